"""`deltasync repair`: put lost bytes back, or make ways around them."""

from __future__ import annotations

import dataclasses
import sys

import click

from deltasync.cli.keys import signing_key, trusted_keys
from deltasync.cli.output import echo, echo_json


@click.command("repair")
@click.argument("channel")
@click.option("--from", "source", metavar="URL|DIR", help="A copy of the channel, or a directory of files named by sha256.")
@click.option("--no-replay", is_flag=True, help="Compare digests only; do not apply every version.")
@signing_key
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
def command(
    channel: str,
    source: str | None,
    no_replay: bool,
    signing_key: str | None,
    trusted_keys: str | None,
    as_json: bool,
) -> None:
    """Repair CHANNEL: find what is missing or damaged, and say what was done about each object.

    Its bytes are put back from --from, a copy or the cache of a node. Otherwise a fold is stored around it, or an anchor
    announced in its place. Nothing is deleted, and the publisher may run meanwhile. channel.json can only come from a copy.
    Exits with 0 if every version that is there can be reached afterwards, with 5 otherwise.
    """
    from deltasync import housekeeping
    from deltasync.channel import signing
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import progress_bars, ranges
    from deltasync.config import PublisherSettings
    from deltasync.stores import open_store

    settings = PublisherSettings.from_env(signing_key=signing_key, trusted_keys=trusted_keys)
    signer = None if settings.signing_key is None else signing.signer_of(settings)
    reader = ChannelReader(open_store(channel), trusted_keys if signer is None else signer.trusted)
    where = None if source is None else housekeeping.source_of(source)
    with progress_bars() as progress:
        found = housekeeping.repair(reader, source=where, replay=not no_replay, signer=signer, progress=progress)
    if as_json:
        echo_json({**dataclasses.asdict(found), "exit_code": found.exit_code}, indent=2)
        sys.exit(found.exit_code)
    for done in found.objects:
        echo(f"{done.outcome:13} {done.key}: {done.how}")
        echo(f"{'':13} {done.problem}")
    if found.lost:
        echo(f"{'not reachable':13} {ranges(found.lost)}")
    if not found.objects:
        echo(f"{channel}: nothing to repair")
    sys.exit(found.exit_code)
