"""`deltasync bisect | blame`: the first version that fails a check, and the versions that changed a tensor most."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deltasync.cli.options import channel_command
from deltasync.cli.output import cell, count, echo, echo_json, table, text_of, with_bars

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader

_SKIP = 125  # as `git bisect run` has it
_SHOWN = 20  # versions in a table


@channel_command("one JSON object per tested version, then the result")
@click.option("--run", "run", required=True, metavar="COMMAND", help="Shell command; {} is the directory of a checkpoint.")
@click.option("--good", type=click.IntRange(min=1), metavar="VERSION", help="A version that passes. Default: the oldest.")
@click.option("--bad", type=click.IntRange(min=1), metavar="VERSION", help="A later one that fails. Default: the newest.")
def bisect(reader: ChannelReader, run: str, good: int | None, bad: int | None, as_json: bool) -> None:
    """Find the first version of CHANNEL that fails a check, by some log2 of its versions.

    COMMAND exits with 0 for a good version, 125 for one that cannot be tested, 1 to 127 for a bad one; anything else ends
    the search. Each version is written as a checkpoint to temporary disk. In COMMAND, {} is its directory, and $VERSION its
    number.
    """
    from deltasync import maintenance

    if "{}" not in run:
        raise click.UsageError("--run needs {}, where the directory of the checkpoint stands: --run 'python check.py {}'")

    def test(version: int, directory: Path) -> bool | None:
        done = subprocess.run(
            (
                "sh",
                "-c",
                run.replace("{}", shlex.quote(str(directory))),
            ),  # typed by the user; nothing of the channel is in it
            env={**os.environ, "VERSION": str(version)},
            stdout=2 if as_json else None,  # stderr
            check=False,
        )
        if not 0 <= done.returncode <= 127:
            raise click.ClickException(f"The check of version {version} ended with {done.returncode}: the search ends.")
        return None if done.returncode == _SKIP else done.returncode == 0

    def show(version: int, is_good: bool | None, left: int) -> None:
        said = "could not be tested" if is_good is None else "good" if is_good else "bad"
        if as_json:
            echo_json({"version": version, "good": is_good, "between": left})
        else:
            echo(f"version {version}: {said}")

    last_good, first_bad, skipped = maintenance.bisect(reader, test, good, bad, show)
    step = reader.numbered(first_bad).record.step
    if as_json:
        echo_json({"first_bad": first_bad, "step": step, "last_good": last_good, "skipped": skipped})
        return
    of = "" if step is None else f" (step {step})"
    among = f", or one of {', '.join(map(str, skipped))}, which could not be tested" if skipped else ""
    echo(f"version {first_bad}{of} is the first bad one{among}; version {last_good} is good")


@channel_command("one JSON object per version, oldest first")
@click.argument("tensor")
@click.option(
    "--last", type=click.IntRange(min=1), default=_SHOWN, help="Show the N versions that changed most.", metavar="N"
)
def blame(reader: ChannelReader, tensor: str, last: int, as_json: bool) -> None:
    """Show which versions of CHANNEL changed TENSOR most: a name, or a pattern such as '*.mlp.*'. Reads counts alone."""
    from rich.console import Console

    from deltasync import maintenance

    changes = with_bars(maintenance.blame, reader, tensor)
    for change in changes:
        if change.problem is not None:
            echo(f"deltasync: {change.problem}", err=True)
    if as_json:
        for change in changes:
            echo_json({"version": change.version, "step": change.step, "changed": change.changed})
        return
    rows = [(sum(change.changed.values()), change) for change in changes if change.changed is not None]
    names = maintenance.matching(reader, tensor)
    total = sum(reader.specs[name].element_count for name in names)
    full = [change.version for change in changes if change.changed is None and change.problem is None]
    caption = f"{count(len(names), 'tensor')}, {total:,} elements; {count(len(rows), 'delta')}"
    caption += f"; full weights, which tell nothing: {', '.join(map(str, full))}" if full else ""
    columns = [("version", "right"), ("step", "right"), ("changed", "right"), ("fraction", "right"), ("most in", "left")]
    shown = table(columns, caption=caption, box=None, padding=(0, 1, 0, 0))
    for changed, change in sorted(rows, key=lambda row: (-row[0], row[1].version))[:last]:
        most = max(change.changed or {"": 0}, key=lambda name: (change.changed or {}).get(name, 0), default="")
        shown.add_row(str(change.version), text_of(change.step), f"{changed:,}", f"{changed / total:.3%}", cell(most))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
