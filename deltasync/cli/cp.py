"""`deltasync cp`: copy a channel to another store."""

from __future__ import annotations

import dataclasses
import sys

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json


@click.command("cp")
@click.argument("source")
@click.argument("target")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="What was copied as JSON.")
def command(source: str, target: str, trusted_keys: str | None, as_json: bool) -> None:
    """Copy the channel SOURCE to the URL TARGET: every version, anchor and fold. Every digest is checked.

    Nothing is replaced but head, and what TARGET has is not copied again: interrupted, TARGET is a channel or none yet, and
    running it again goes on. Publishing to SOURCE may go on; run it again to copy what came since. Damaged objects are left
    out; the exit code is then that of the problem.
    """
    from deltasync import housekeeping
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import count, progress_bars
    from deltasync.stores import open_store

    with progress_bars() as progress:
        reader = ChannelReader(open_store(source), trusted_keys)
        copied = housekeeping.copy(reader, open_store(target), progress=progress)
    exit_code = max((problem.exit_code for problem in copied.problems), default=0)
    if as_json:
        version = None if copied.version is None else dataclasses.asdict(copied.version)
        counts = {"objects": copied.objects, "bytes": copied.bytes, "skipped": copied.skipped}
        echo_json({"version": version, **counts, "problems": [str(problem) for problem in copied.problems]})
        sys.exit(exit_code)
    for problem in copied.problems:
        echo(f"not copied: {problem}", err=True)
    there = f", {count(copied.skipped, 'object')} there already" if copied.skipped else ""
    echo(f"{target} is at version {copied.version}: copied {count(copied.objects, 'object')}, {copied.bytes:,} bytes{there}")
    sys.exit(exit_code)
