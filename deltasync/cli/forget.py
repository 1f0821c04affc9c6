"""`deltasync forget`: take versions out of a channel."""

from __future__ import annotations

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json
from deltasync.cli.prune import seconds

_COUNT = click.IntRange(min=1)


@click.command("forget")
@click.argument("channel")
@click.option("--keep-last", type=_COUNT, default=None, help="Keep the newest so many versions.")
@click.option("--keep-anchors", type=_COUNT, default=None, help="Keep the newest so many versions that have an anchor.")
@click.option("--keep-step-every", type=_COUNT, default=None, help="Keep versions whose trainer's step is a multiple.")
@click.option(
    "--grace",
    callback=seconds,
    metavar="DURATION",
    default="1h",
    show_default=True,
    help="Keep what was still needed this long ago, for those who still read it. 90s, 30m, 1h, 7d.",
)
@click.option("--dry-run", is_flag=True, help="Tell what would be forgotten, change nothing.")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="The versions as JSON.")
def command(
    channel: str,
    keep_last: int | None,
    keep_anchors: int | None,
    keep_step_every: int | None,
    grace: float,
    dry_run: bool,
    trusted_keys: str | None,
    as_json: bool,
) -> None:
    """Forget versions of CHANNEL: delete their records. `deltasync prune` deletes their files later.

    A version is kept if any option keeps it, and so is what leads to it; the newest one always is. At least one --keep
    option is needed. Refuses if a version that is kept cannot be read. After an interruption, run it again.
    """
    if keep_last is None and keep_anchors is None and keep_step_every is None:
        raise click.UsageError("Say what to keep: --keep-last, --keep-anchors or --keep-step-every.")
    from deltasync import housekeeping
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import count, progress_bars, ranges
    from deltasync.housekeeping import Keep
    from deltasync.stores import open_store

    keep = Keep(last=keep_last, anchors=keep_anchors, step_every=keep_step_every)
    with progress_bars() as progress:
        reader = ChannelReader(open_store(channel), trusted_keys)
        found = housekeeping.forget(reader, keep, grace_s=grace, dry_run=dry_run, progress=progress)
    if as_json:
        named = {name: [slot.key for slot in getattr(found, name)] for name in ("asked", "leading", "recent")}
        numbers = {"kept": [slot.version for slot in found.kept], "forgotten": [slot.version for slot in found.versions]}
        echo_json({**numbers, **named, "deleted": found.keys, "folds": found.folds, "dry_run": dry_run})
        return
    reasons = [
        (found.asked, ""),
        (found.leading, "lead to others"),
        (found.recent, f"were needed less than {grace:g} s ago"),
    ]
    why = "".join(f"; {len(slots)} of them {reason}" for slots, reason in reasons if slots and reason)
    kept = [slot.version for slot in found.kept]
    echo(f"{'would keep' if dry_run else 'kept':13} {count(len(kept), 'version')}: {ranges(kept)}{why}")
    gone = [slot.version for slot in found.versions]
    folds = f", and {count(len(found.folds), 'fold')}" if found.folds else ""
    shown = f": {ranges(gone)}" if gone else ""
    echo(f"{'would forget' if dry_run else 'forgot':13} {count(len(gone), 'version')}{shown}{folds}")
