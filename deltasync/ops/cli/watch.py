"""`deltasync watch`: show a run in the terminal or as a web page. Only the channel is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.filesize import decimal as size_of

from deltasync.ops.cli.options import COUNT, channel_command, interval, timeout
from deltasync.ops.cli.output import cell, count, echo, echo_json, table, text_of, with_bars

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from deltasync.channel.reading import ChannelReader
    from deltasync.ops.dashboard import ChannelSnapshot
    from deltasync.ops.dashboard.observe import ReplicaRow

_SHOWN = 12
_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"serving": "green", "failed": "red", "stopped": "dim"}
_WRONG = ("failed", "silent", "stale")


@channel_command("one JSON object per change")
@click.option("--once", is_flag=True, help="Show the channel once and exit.")
@interval
@timeout
@click.option(
    "--last",
    type=COUNT,
    metavar="N",
    help="Start with the newest N versions. Default: 100, of a page 500.",
)
@click.option("--page", is_flag=True, help="Serve a web page on 127.0.0.1 instead.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, help="Port of the page; 0 for a free one."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the page to this file and exit."
)
@click.option(
    "--heat",
    type=click.IntRange(min=0),
    metavar="N",
    default=200,
    help="Show the changes of each layer for the newest N versions on the page.",
)
def watch(
    reader: ChannelReader,
    once: bool,
    interval_s: float,
    timeout_s: float | None,
    last: int | None,
    page: bool,
    port: int,
    out: Path | None,
    heat: int,
    as_json: bool,
) -> None:
    """Watch CHANNEL live: its versions, compactions, replicas and size, in the terminal or as a web page.

    If the output is not a terminal, each change is printed as one line. With --once it ends with an error,
    and names the next command, where something is wrong: an object is missing that somebody needs to join, a
    record is damaged, or a replica is silent, failed or at a version of another run. Documents and heartbeats
    are read, for a page also the headers of deltas. Nothing is written to the channel, but for one small
    object that tells the store's clock where every replica seems silent. Ends with Ctrl-C, --once or
    --timeout.
    """
    if page or out is not None:
        if once or as_json or timeout_s is not None:
            raise click.UsageError(
                "--once, --timeout and --json are for the terminal; --out FILE writes a page once."
            )
        _show_page(reader, out, port, interval_s, last or 500, heat)
        return
    if once:
        _watch_once(reader, last or 100, as_json)
        return
    from rich.console import Console
    from rich.live import Live

    from deltasync.errors import DeltaSyncError
    from deltasync.ops.dashboard import ChannelObserver

    observer = ChannelObserver(reader.store, last=last or 100, trusted_keys=reader.trusted)
    lines = as_json or not sys.stdout.isatty()
    before: ChannelSnapshot | None = None
    moved_s = time.monotonic()
    with contextlib.nullcontext() if lines else Live(console=Console(), auto_refresh=False) as live:
        while True:
            try:
                snapshot = with_bars(observer.refresh) if before is None else observer.refresh()
            except DeltaSyncError as error:
                snapshot = observer.snapshot(error=str(error))
            if live is not None:
                live.update(screen(snapshot), refresh=True)
            else:
                _print_changes(before, snapshot, as_json)
            if before is not None and snapshot.newest_version != before.newest_version:
                moved_s = time.monotonic()
            before = snapshot
            if timeout_s is not None and time.monotonic() - moved_s > timeout_s:
                if snapshot.newest_version is None:
                    reader.channel()
                return
            time.sleep(interval_s)


def _watch_once(reader: ChannelReader, last: int, as_json: bool) -> None:
    """Show the channel. Where something is wrong, the last line says what, and the command to go on with."""
    from rich.console import Console

    from deltasync import ops
    from deltasync.errors import ConfigError, DeltaSyncError, NotPublishedError, StoreError
    from deltasync.ops.dashboard import ChannelObserver

    try:
        ops.described(reader)  # raises if there is none: the URL is probably wrong
        observer = ChannelObserver(reader.store, last=last, trusted_keys=reader.trusted)
        snapshot = with_bars(observer.refresh)
        if as_json or not sys.stdout.isatty():
            _print_changes(None, snapshot, as_json)
        else:
            Console().print(screen(snapshot))
        ops.check_join(reader)
    except ConfigError:  # its sentence names the cure
        raise
    except DeltaSyncError as error:
        is_away = isinstance(error, StoreError | NotPublishedError)
        _end(reader, str(error), "doctor" if is_away else "check", error.exit_code)
    if snapshot.problems:
        _end(reader, snapshot.problems[0], "check")
    if wrong := [row for row in snapshot.replicas if row.error or row.strange or _state(row) in _WRONG]:
        others = f" (and {count(len(wrong) - 1, 'other replica')})" if wrong[1:] else ""
        _end(reader, f"{_replica(dataclasses.asdict(wrong[0]))}{others}.", "doctor", where=" on its machine")


def _end(reader: ChannelReader, wrong: str, command: str, code: int = 1, where: str = "") -> NoReturn:
    """End the command with a sentence and the next command."""
    line = f"deltasync {command} {shlex.quote(reader.store.url)}"
    echo(f"deltasync: {wrong} Next, run `{line}`{where}.", err=True)
    sys.exit(code)


def _print_changes(before: ChannelSnapshot | None, snapshot: ChannelSnapshot, as_json: bool) -> None:
    for change in changes(before, snapshot):
        echo_json(change) if as_json else echo(sentence(change))


def changes(before: ChannelSnapshot | None, snapshot: ChannelSnapshot) -> Iterator[dict[str, Any]]:
    """Yield the changes since the previous snapshot, oldest first; everything if it is None."""
    if before is None and snapshot.newest_version is None:
        yield {"event": "waiting", "channel": snapshot.url}
    seen = {} if before is None else dict(_events(before))
    for identity, event in _events(snapshot):
        # The event of a version includes its anchor. Only an anchor that was announced later is a separate
        # event.
        if identity not in seen and (event["event"] != "anchor" or ("version", event["version"]) in seen):
            yield event
    if before is not None and snapshot.forgotten > before.forgotten:
        yield {
            "event": "forgotten",
            "count": snapshot.forgotten - before.forgotten,
            "left": len(snapshot.versions),
        }


def _events(snapshot: ChannelSnapshot) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield (key, event) pairs. An event is new if the previous snapshot has no event with this key."""
    for row in snapshot.versions:
        fraction = None if row.changed is None else row.changed / max(snapshot.element_count, 1)
        yield (
            ("version", row.version),
            {"event": "version", **dataclasses.asdict(row), "changed_fraction": fraction},
        )
        if row.anchor_bytes is not None:
            anchor = {"version": row.version, "sha256": row.sha256, "payload_bytes": row.anchor_bytes}
            yield ("anchor", row.version), {"event": "anchor", **anchor}
    for compaction in snapshot.compactions:
        yield (
            ("compaction", compaction.base_version, compaction.version),
            {"event": "compaction", **dataclasses.asdict(compaction)},
        )
    for replica in snapshot.replicas:
        state = (replica.version, replica.sha256, replica.state, replica.live, replica.pin, replica.error)
        yield ("replica", replica.replica_id, *state), {"event": "replica", **dataclasses.asdict(replica)}
    for problem in snapshot.problems:
        yield ("problem", problem), {"event": "problem", "problem": problem}
    if snapshot.error is not None:
        yield ("error", snapshot.error), {"event": "error", "error": snapshot.error}


def named(version: int, sha256: str | None, step: int | None = None) -> str:
    """Return a text such as `version 7 (41d2cb0e8f0a, step 70)`."""
    details = ", ".join([*([sha256[:12]] if sha256 else []), *([] if step is None else [f"step {step}"])])
    return f"version {version} ({details})" if details else f"version {version}"


def sentence(change: dict[str, Any]) -> str:
    """Return a change as a line for people."""
    match kind := change["event"]:
        case "waiting":
            return f"{change['channel']}: waiting for the first version"
        case "version":
            text = _version(change)
        case "anchor":
            text = (
                f"anchor of {named(change['version'], change['sha256'])}: {size_of(change['payload_bytes'])}"
            )
        case "compaction":
            text = (
                f"compaction {change['base_version']}-{change['version']}: {size_of(change['payload_bytes'])}"
            )
        case "replica":
            text = _replica(change)
        case "forgotten":
            text = f"{count(change['count'], 'version')} forgotten, {change['left']} left"
        case _:
            text = f"{kind}: {change[kind]}"
    return f"{time.strftime('%H:%M:%S', time.localtime(change.get('created_s', time.time())))}  {text}"


def _version(change: dict[str, Any]) -> str:
    sizes = [(change["delta_bytes"], "delta"), (change["anchor_bytes"], "anchor")]
    payload = (
        ", ".join(f"{kind} {size_of(size)}" for size, kind in sizes if size is not None) or change["kind"]
    )
    changed = text_of(change["changed_fraction"], ", {:.3%} changed".format)
    return f"{named(change['version'], change['sha256'], change['step'])}: {payload}{changed}"


def _replica(change: dict[str, Any]) -> str:
    serves = "no version" if change["version"] is None else named(change["version"], change["sha256"])
    parts = [
        f"replica {change['replica_id']}: {change['state']}, {serves}",
        ", not the channel's version" if change["strange"] else "",
        f", {change['behind']} behind" if change["behind"] else "",
        text_of(change["pin"], ", pinned to {}".format),
        "" if change["live"] else f", last heartbeat {duration(change['age_s'])} ago",
        text_of(change["error"], ": {}".format),
    ]
    return "".join(parts)


def screen(snapshot: ChannelSnapshot) -> RenderableType:
    """Return the whole snapshot for a terminal."""
    from rich.console import Group

    parts: list[RenderableType] = [
        cell(f"{snapshot.url}  run {snapshot.run_id[:12]}" if snapshot.run_id else snapshot.url, "bold")
    ]
    if snapshot.newest_version is None:
        parts.append(cell("Waiting for the first version.", "yellow"))
    else:
        parts += [cell(_summary(snapshot)), _versions(snapshot), _replicas(snapshot)]
    parts += [cell(problem, "yellow") for problem in snapshot.problems[-3:]]
    if snapshot.error is not None:
        parts.append(cell(snapshot.error, "red"))
    return Group(*parts)


def _summary(snapshot: ChannelSnapshot) -> str:
    newest = ""
    if snapshot.versions:
        head = snapshot.versions[-1]
        newest = f"{named(head.version, snapshot.head_sha256, head.step)}, {duration(snapshot.time_s - head.created_s)} ago"
    anchors = sum(row.anchor_bytes is not None for row in snapshot.versions)
    versions, compactions = (
        count(len(snapshot.versions), "version"),
        count(len(snapshot.compactions), "compaction"),
    )
    counts = f"{versions}, {anchors} with full weights, {compactions}"
    gone = f", {snapshot.forgotten} forgotten" if snapshot.forgotten else ""
    return f"{newest}; {counts}{gone}; model {size_of(snapshot.full_bytes)}, {size_of(snapshot.stored_bytes)} stored"


def _versions(snapshot: ChannelSnapshot) -> RenderableType:
    columns = ("version", "digest", "step", "age", "changed", "delta", "anchor", "compactions from")
    deltas = [row.delta_bytes or 0 for row in snapshot.versions[-60:]]
    rows = (
        (
            str(row.version),
            (row.sha256 or "")[:12],
            text_of(row.step),
            duration(snapshot.time_s - row.created_s),
            "" if row.changed is None else f"{row.changed / max(snapshot.element_count, 1):.4%}",
            text_of(row.delta_bytes, size_of),
            row.kind if row.kind == "reference" else text_of(row.anchor_bytes, size_of),
            ", ".join(
                str(compaction.base_version)
                for compaction in snapshot.compactions
                if compaction.version == row.version
            ),
        )
        for row in snapshot.versions[-_SHOWN:]
    )
    return table(columns, rows, caption=f"delta payload {sparkline(deltas)}")


def _replicas(snapshot: ChannelSnapshot) -> RenderableType:
    if not snapshot.replicas:
        return cell("No replica has reported.", "yellow")
    columns = ("replica", "state", "version", "behind", "lag", "heard", "error")
    return table(columns, map(_replica_cells, snapshot.replicas), ("replica", "state", "error"))


def _replica_cells(row: ReplicaRow) -> list[str | Text]:
    state = _state(row)
    shown = state if row.pin is None else f"{state}, pinned to {row.pin}"
    return [
        cell(row.replica_id),
        cell(shown, _COLOURS.get(state, "yellow")),
        "" if row.version is None else f"{row.version}{' (another)' if row.strange else ''}",
        text_of(row.behind),
        text_of(row.lag_s, duration),
        f"{duration(row.age_s)} ago",
        cell(text_of(row.error)),
    ]


def _state(row: ReplicaRow) -> str:
    return row.state if row.live or row.state == "stopped" else "silent"


def sparkline(numbers: list[int]) -> str:
    """Return a bar for each number, scaled from 0 to the greatest."""
    most = max(numbers, default=0) or 1
    return "".join(_BARS[round((len(_BARS) - 1) * number / most)] for number in numbers)


def duration(seconds: float) -> str:
    """Return a text such as `0.4 s`, `12 s`, `5 min` or `3.2 h`."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _show_page(
    reader: ChannelReader, out: Path | None, port: int, interval_s: float, last: int, heat: int
) -> None:
    from deltasync.ops.dashboard import ChannelObserver, PageServer, page

    observer = ChannelObserver(reader.store, last=last, heat=heat, trusted_keys=reader.trusted)
    if out is not None:
        reader.channel()  # raises if there is none: the URL is probably wrong
        with_bars(observer.refresh)
        with_bars(observer.read_headers, heat)
        out.write_bytes(page(observer.snapshot()))
        return
    with PageServer(observer, port, interval_s) as server:
        echo(server.url)
        server.run()
