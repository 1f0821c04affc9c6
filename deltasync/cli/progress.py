"""Progress bars on stderr, where that is a terminal; and how numbers are told."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator

from deltasync.housekeeping import Progress, quiet


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """A bar for each thing that is being done; they are gone when it ends."""
    if not sys.stderr.isatty():
        yield quiet
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, progress.TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what)
            shown.update(tasks[what], completed=done, total=total)

        yield tell


def count(number: int, what: str) -> str:
    """`1 version`, `1,234 versions`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def ranges(numbers: Iterable[int]) -> str:
    """`1-3, 7`."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
