"""`deltasync cp`: copy a channel to another store."""

from __future__ import annotations

import dataclasses

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json


@click.command("cp")
@click.argument("source")
@click.argument("target")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="What was copied as JSON.")
def command(source: str, target: str, trusted_keys: str | None, as_json: bool) -> None:
    """Copy the channel SOURCE to the URL TARGET: every version up to head, and the folds. Every digest is checked.

    Objects are only created, never replaced, and head comes last: interrupted, TARGET is what it was before, and running it
    again goes on. Publishing to SOURCE may go on; run it again to copy what came since.
    """
    from deltasync import housekeeping
    from deltasync.cli.progress import count, progress_bars
    from deltasync.reader import ChannelReader
    from deltasync.stores import open_store

    with progress_bars() as progress:
        reader = ChannelReader(open_store(source), trusted_keys)
        copied = housekeeping.copy(reader, open_store(target), progress=progress)
    if as_json:
        echo_json(dataclasses.asdict(copied))
        return
    there = f", {count(copied.skipped, 'object')} there already" if copied.skipped else ""
    echo(f"{target} is at version {copied.version}: copied {count(copied.objects, 'object')}, {copied.bytes:,} bytes{there}")
