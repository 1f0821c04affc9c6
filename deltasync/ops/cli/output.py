"""Output of the commands: lines, tables with cells from `cell`, progress bars, and reports of slow calls."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from deltasync.errors import printable
from deltasync.stores.base import Store, WrappedStore
from deltasync.threads import watched

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from deltasync.ops import Copied

PATIENCE_S = 4.0  # seconds after which a call is reported
_AGAIN_S = 60.0  # from one report about a store to the next

_Result = TypeVar("_Result")


def echo(line: str, err: bool = False) -> None:
    """Print one line, with unprintable characters escaped."""
    click.echo(printable(line), err=err)


def field(name: str, value: object, width: int = 13) -> None:
    """Print a line with a name and its value."""
    echo(f"{name:{width}} {value}")


def echo_json(document: Any, indent: int | None = None) -> None:
    """Print plain data as JSON, in ASCII, with control characters escaped."""
    click.echo(json.dumps(document, indent=indent).replace("\x7f", "\\u007f"))


def cell(text: object, style: str = "") -> Text:
    """Return a printable text for rich, without markup."""
    from rich.text import Text

    return Text(printable(str(text)), style)


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str | Text]], left: Collection[str] = (), **options: Any
) -> Table:
    """Return a table for rich, with title and caption on the left and further options of `rich.table.Table`.
    The columns that are named in `left` begin at the left, others end at the right.

    If the terminal is too narrow, digests are truncated first, and errors wrap.
    """
    from rich.table import Table

    shown = Table(title_justify="left", caption_justify="left", box=None, **options)
    for name in columns:
        overflow, no_wrap = "fold" if name == "error" else "ellipsis", name not in ("digest", "error")
        justify = "left" if name in left else "right"
        shown.add_column(name, justify=justify, overflow=overflow, no_wrap=no_wrap)  # type: ignore[arg-type]
    for row in rows:
        shown.add_row(*row)
    return shown


def print_table(*arguments: Any, **options: Any) -> None:
    """Print a `table`. Output to a file or pipe is not cut off."""
    from rich.console import Console

    shown = table(*arguments, padding=(0, 1, 0, 0), **options)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def text_of(value: Any, shown: Callable[[Any], str] = str) -> str:
    """Return a value as text; empty for None."""
    return "" if value is None else shown(value)


def with_bars(action: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Run an action and return its result. Its progress is shown as bars on stderr, if that is a terminal.

    No bars are shown with --json. Until the first report, the bar has no end.
    """
    from deltasync.ops import reporting

    context = click.get_current_context(silent=True)
    if not sys.stderr.isatty() or (context is not None and context.params.get("as_json")):
        return action(*arguments, **options)
    from rich import progress
    from rich.console import Console

    name = "working" if context is None else context.info_name or ""
    parts = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    bars = progress.Progress(
        *parts,
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
    tasks = {name: bars.add_task(name, total=None)}

    def show_progress(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bars.update(tasks[name], visible=False)
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    with bars, reporting(show_progress):
        return action(*arguments, **options)


def show_copied(copied: Copied, as_json: bool, line: str) -> int:
    """Print the result of a copy as JSON, or else its problems and `line`. Return the exit code."""
    if as_json:
        echo_json(msgspec.to_builtins(copied, enc_hook=str))
    else:
        for problem in copied.problems:
            echo(f"not copied: {problem}", err=True)
        echo(line)
    return max((problem.exit_code for problem in copied.problems), default=0)


def count(number: int, noun: str) -> str:
    """Return a text such as `1 version` or `1,234 versions`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def ranges(numbers: Iterable[int]) -> str:
    """Return a text such as `1-3, 7`."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def reported(
    call: str, advice: str, is_due: Callable[[], bool] = lambda: True
) -> contextlib.AbstractContextManager[None]:
    """Print a line on stderr if the block takes longer than `PATIENCE_S` and `is_due` agrees.

    `call` names the call and its place, as in `read of head.json at s3://bucket/run`; `advice` says what to
    do.
    """

    def report() -> None:
        if is_due():
            echo(
                f"deltasync: {call} has not finished after {PATIENCE_S:g} s; the command waits. {advice}",
                err=True,
            )

    return watched(PATIENCE_S, report)


class ReportedStore(WrappedStore):
    """A store whose slow calls are reported, at most once a minute."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._next_s = 0.0

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Run the call, and report it if it is slow."""
        call = f"{verb} of {key} at {self.url}" if key else f"{verb} of {self.url}"
        with reported(
            call, f"Ctrl-C ends it; `deltasync doctor {shlex.quote(self.url)}` tests the store.", self._is_due
        ):
            return action()

    def _is_due(self) -> bool:
        is_due = time.monotonic() >= self._next_s
        if is_due:
            self._next_s = time.monotonic() + _AGAIN_S
        return is_due
