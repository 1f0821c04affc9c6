"""`deltasync prune`: delete the bytes that nothing refers to any more."""

from __future__ import annotations

import re

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Seconds of a duration such as `90s`, `30m`, `1h` or `7d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration such as 90s, 30m, 1h or 7d.")
    return float(match[1]) * _UNIT_S[match[2]]


@click.command("prune")
@click.argument("channel")
@click.option(
    "--grace",
    callback=seconds,
    metavar="DURATION",
    default="1h",
    show_default=True,
    help="Keep files newer than this, for those who still read them. 90s, 30m, 1h, 7d.",
)
@click.option("--dry-run", is_flag=True, help="Tell what would be deleted, change nothing.")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="The objects as JSON.")
def command(channel: str, grace: float, dry_run: bool, trusted_keys: str | None, as_json: bool) -> None:
    """Delete the files of CHANNEL, parts and anchors, that no record and no fold names.

    Those are what `deltasync forget` left and what publishers left that died. It is safe while a publisher writes and
    replicas read. Heartbeats of replicas that have not been heard of for a week go too. After an interruption, run it again.
    """
    from deltasync import housekeeping
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import count, progress_bars
    from deltasync.stores import open_store

    with progress_bars() as progress:
        reader = ChannelReader(open_store(channel), trusted_keys)
        found = housekeeping.prune(reader, grace_s=grace, dry_run=dry_run, progress=progress)
    freed, waiting, young = (sum(info.bytes for info in infos) for infos in (found.objects, found.waiting, found.young))
    if as_json:
        keys = {"objects": [info.key for info in found.objects], "heartbeats": found.heartbeats, "bytes": freed}
        spared = {"waiting_objects": len(found.waiting), "waiting_bytes": waiting, "young_objects": len(found.young)}
        echo_json({**keys, **spared, "dry_run": dry_run})
        return
    if dry_run:
        for info in found.objects:
            echo(f"{info.bytes:>16,} {info.key}")
    echo(f"{'would delete' if dry_run else 'deleted':13} {count(len(found.objects), 'object')}, {freed:,} bytes")
    if found.waiting:
        echo(f"{'spared':13} {count(len(found.waiting), 'object')}, {waiting:,} bytes: being published")
    if found.young:
        echo(f"{'not looked at':13} {count(len(found.young), 'object')}, {young:,} bytes: stored less than {grace:g} s ago")
    if found.heartbeats:
        echo(f"{'would delete' if dry_run else 'deleted':13} {count(len(found.heartbeats), 'stale heartbeat')}")
