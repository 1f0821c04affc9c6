"""`deltasync watch`: a run in the terminal, from its channel alone."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import cell, echo, echo_json
from deltasync.cli.progress import count

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltasync.dashboard import Snapshot

_SHOWN = 12
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"serving": "green", "failed": "red", "stopped": "dim"}


@click.command("watch")
@click.argument("channel")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="One JSON object per change.")
@click.option("--once", is_flag=True, help="Show what is there and exit.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between looks."
)
@click.option("--timeout", "timeout_s", type=float, default=None, help="Seconds without a new version after which to exit.")
@click.option("--last", type=click.IntRange(min=1), default=100, show_default=True, help="Begin with the newest so many.")
def command(
    channel: str,
    trusted_keys: str | None,
    as_json: bool,
    once: bool,
    interval_s: float,
    timeout_s: float | None,
    last: int,
) -> None:
    """Watch CHANNEL: its versions, folds, replicas and what they cost, live.

    Not on a terminal: one line per change. Reads documents and heartbeats only. Ends with Ctrl-C, or as the options say.
    """
    from rich.console import Console
    from rich.live import Live

    from deltasync.dashboard import Observer
    from deltasync.errors import DeltaSyncError
    from deltasync.stores import open_store

    observer = Observer(open_store(channel), last=last, trusted_keys=trusted_keys)
    lines = as_json or not sys.stdout.isatty()
    before: Snapshot | None = None
    moved_s = time.monotonic()
    with contextlib.nullcontext() if lines else Live(console=Console(), auto_refresh=False) as live:
        while True:
            try:
                found = observer.look()
            except DeltaSyncError as error:
                if once:
                    raise
                found = observer.snapshot(error=str(error))
            if live is not None:
                live.update(screen(found), refresh=True)
            else:
                for change in changes(before, found):
                    echo_json(change) if as_json else echo(sentence(change))
            if before is not None and found.newest_version != before.newest_version:
                moved_s = time.monotonic()
            before = found
            if once or (timeout_s is not None and time.monotonic() - moved_s > timeout_s):
                return
            time.sleep(interval_s)


def changes(before: Snapshot | None, found: Snapshot) -> Iterator[dict[str, Any]]:
    """What is new since the snapshot before, oldest first; everything if there is none."""
    seen = {row.version for row in before.versions} if before is not None else set()
    anchored = {row.version for row in before.versions if row.anchor_bytes is not None} if before is not None else set()
    folds = {(fold.base_version, fold.version) for fold in before.folds} if before is not None else set()
    told = {row.replica_id: _state(row) for row in before.replicas} if before is not None else {}
    if found.newest_version is None and before is None:
        yield {"event": "waiting", "channel": found.url}
    for row in found.versions:
        if row.version not in seen:
            fraction = None if row.changed is None else row.changed / max(found.element_count, 1)
            yield {"event": "version", **dataclasses.asdict(row), "changed_fraction": fraction}
        elif before is not None and row.anchor_bytes is not None and row.version not in anchored:
            yield {"event": "anchor", "version": row.version, "sha256": row.sha256, "payload_bytes": row.anchor_bytes}
    for fold in found.folds:
        if (fold.base_version, fold.version) not in folds:
            yield {"event": "fold", **dataclasses.asdict(fold)}
    if before is not None and found.forgotten > before.forgotten:
        yield {"event": "forgotten", "count": found.forgotten - before.forgotten, "left": len(found.versions)}
    for replica in found.replicas:
        if told.get(replica.replica_id) != _state(replica):
            yield {"event": "replica", **dataclasses.asdict(replica)}
    for problem in found.problems:
        if before is None or problem not in before.problems:
            yield {"event": "problem", "problem": problem}
    if found.error is not None and (before is None or before.error != found.error):
        yield {"event": "error", "error": found.error}


def _state(replica: Any) -> tuple[Any, ...]:
    return replica.version, replica.sha256, replica.state, replica.live, replica.error


def named(version: int, sha256: str | None, step: int | None = None) -> str:
    """`version 7 (41d2cb0e8f0a, step 70)`."""
    beside = ", ".join([*([sha256[:12]] if sha256 else []), *([] if step is None else [f"step {step}"])])
    return f"version {version} ({beside})" if beside else f"version {version}"


def sentence(change: dict[str, Any]) -> str:
    """A change as a line for people."""
    what = change["event"]
    if what == "version":
        sizes = [(change["delta_bytes"], "delta"), (change["anchor_bytes"], "anchor")]
        payload = ", ".join(f"{kind} {size_of(size)}" for size, kind in sizes if size is not None) or change["kind"]
        changed = "" if change["changed_fraction"] is None else f", {change['changed_fraction']:.3%} changed"
        return (
            f"{clock(change['created_s'])}  {named(change['version'], change['sha256'], change['step'])}: {payload}{changed}"
        )
    if what == "anchor":
        version, size = named(change["version"], change["sha256"]), size_of(change["payload_bytes"])
        return f"{clock(time.time())}  anchor of {version}: {size}"
    if what == "fold":
        span = f"{change['base_version']}-{change['version']}"
        return f"{clock(change['created_s'])}  fold {span}: {size_of(change['payload_bytes'])}"
    if what == "replica":
        live = "" if change["live"] else f", last heard of {duration(change['age_s'])} ago"
        error = "" if change["error"] is None else f": {change['error']}"
        behind = f", {change['behind']} behind" if change["behind"] else ""
        serves = "no version" if change["version"] is None else named(change["version"], change["sha256"])
        strange = ", which is another than the channel's" if change["strange"] else ""
        told = f"{change['state']}, {serves}{strange}{behind}{live}{error}"
        return f"{clock(time.time())}  replica {change['replica_id']}: {told}"
    if what == "forgotten":
        return f"{clock(time.time())}  {count(change['count'], 'version')} forgotten, {change['left']} left"
    if what == "waiting":
        return f"{change['channel']}: waiting for the first version"
    return f"{clock(time.time())}  {what}: {change[what]}"


def screen(found: Snapshot) -> RenderableType:
    """All of it, for a terminal."""
    from rich.console import Group

    parts: list[RenderableType] = [cell(f"{found.url}  run {found.run_id[:12]}" if found.run_id else found.url, "bold")]
    if found.newest_version is None:
        parts.append(cell("Waiting for the first version.", "yellow"))
    else:
        parts += [cell(_summary(found)), _versions(found), _replicas(found), cell(_cost(found), "dim")]
    parts += [cell(problem, "yellow") for problem in found.problems[-3:]]
    if found.error is not None:
        parts.append(cell(found.error, "red"))
    return Group(*parts)


def _summary(found: Snapshot) -> str:
    head = found.versions[-1] if found.versions else None
    age = "" if head is None else f", {duration(found.time_s - head.created_s)} ago"
    anchors = sum(row.anchor_bytes is not None for row in found.versions)
    counts = f"{count(len(found.versions), 'version')}, {anchors} with full weights, {count(len(found.folds), 'fold')}"
    gone = f", {found.forgotten} forgotten" if found.forgotten else ""
    newest = "" if head is None else named(head.version, found.head_sha256, head.step)
    return f"{newest}{age}; {counts}{gone}; model {size_of(found.full_bytes)}"


def _versions(found: Snapshot) -> RenderableType:
    from rich.table import Table

    deltas = [row.delta_bytes or 0 for row in found.versions[-60:]]
    table = Table(caption=f"delta payload {sparkline(deltas)}", caption_justify="left", title_justify="left", box=None)
    for name in ("version", "digest", "step", "age", "changed", "delta", "anchor", "folds from"):
        table.add_column(name, justify="right")
    folds: dict[int, list[str]] = {}
    for fold in found.folds:
        folds.setdefault(fold.version, []).append(str(fold.base_version))
    for row in found.versions[-_SHOWN:]:
        table.add_row(
            str(row.version),
            (row.sha256 or "")[:12],
            "" if row.step is None else str(row.step),
            duration(found.time_s - row.created_s),
            "" if row.changed is None else f"{row.changed / max(found.element_count, 1):.4%}",
            "" if row.delta_bytes is None else size_of(row.delta_bytes),
            row.kind if row.kind == "reference" else "" if row.anchor_bytes is None else size_of(row.anchor_bytes),
            ", ".join(folds.get(row.version, [])),
        )
    return table


def _replicas(found: Snapshot) -> RenderableType:
    from rich.table import Table

    if not found.replicas:
        return cell("No replica has reported.", "yellow")
    table = Table(box=None)
    for name in ("replica", "state"):
        table.add_column(name)
    for name in ("version", "behind", "lag", "heard"):
        table.add_column(name, justify="right")
    table.add_column("error", overflow="fold")
    for row in found.replicas:
        state = row.state if row.live or row.state == "stopped" else "silent"
        table.add_row(
            cell(row.replica_id),
            cell(state, _COLOURS.get(state, "yellow")),
            "" if row.version is None else f"{row.version}{' (another)' if row.strange else ''}",
            "" if row.behind is None else str(row.behind),
            "" if row.lag_s is None else duration(row.lag_s),
            f"{duration(row.age_s)} ago",
            cell(row.error or ""),
        )
    return table


def _cost(found: Snapshot) -> str:
    costs = found.costs
    if costs is None:
        return ""
    up, down = sum(row.up_bytes for row in costs.rows), sum(row.down_bytes for row in costs.rows)
    requests = sum(row.requests for row in costs.rows)
    asked = f", {requests:,} requests" if requests else ""
    dollars = (
        "" if costs.usd is None else f", ${costs.usd:.2f} and ${costs.traffic_usd:.2f} for traffic if it leaves the region"
    )
    return f"so far about {size_of(up)} up, {size_of(down)} down{asked}; {size_of(costs.stored_bytes)} stored{dollars}"


def sparkline(numbers: list[int]) -> str:
    """A bar for each number, from 0 to the greatest."""
    most = max(numbers, default=0) or 1
    return "".join(_BARS[round((len(_BARS) - 1) * number / most)] for number in numbers)


def size_of(number: float) -> str:
    """`41.2 kB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}" if number < 1000 * factor else f"{number / factor:,.0f} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `5 min`, `3.2 h`."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def clock(time_s: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))
