"""`deltasync log`: the versions of a channel as a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal as size_of

from deltasync.cli.options import channel_command
from deltasync.cli.output import cell, echo, echo_json, table, with_bars

if TYPE_CHECKING:
    from deltasync.channel.documents import Record
    from deltasync.channel.keys import Slot
    from deltasync.channel.reading import ChannelReader
    from deltasync.errors import DeltaSyncError
    from deltasync.housekeeping import Progress

_COLUMNS = (
    ("version", "right"),
    ("digest", "left"),
    ("kind", "left"),
    ("step", "right"),
    ("time", "left"),
    ("changed", "right"),
    ("delta", "right"),
    ("bits", "right"),
    ("anchor", "right"),
)


def row(key: str, record: Record, sha256: str | None, total: int) -> dict[str, Any]:
    """What `log` tells of a version, a fold or an announced anchor, as plain data.

    `sha256` is that of the version that it is or leads to, `total` the elements of all tensors.
    """
    delta, anchor, reference = record.delta, record.anchor, record.reference
    changed = total if delta is None else delta.changed
    delta_bytes = None if delta is None else record.payload_bytes
    return {
        "version": record.version,
        "epoch": record.epoch,
        "sha256": sha256,
        "key": key,
        "kind": "announced" if record.kind == "fold" and anchor is not None else record.kind,
        "reference": None if reference is None else str(reference),
        "base_version": None if delta is None or record.base is None else record.base.version,
        "step": record.step,
        "created_at": record.created_at,
        "changed_fraction": changed / total if total else 0.0,
        "delta_bytes": delta_bytes,
        "anchor_bytes": None if anchor is None or reference is not None else record.payload_bytes,
        "bits_per_changed": 8 * delta_bytes / changed if delta_bytes and changed else None,
        "coalesced": record.coalesced,
        "fingerprint": record.fingerprint,
    }


@channel_command("log", "One JSON object per line, oldest first.")
@click.option("--last", type=click.IntRange(min=1), default=None, help="Show only the newest N versions.")
def command(reader: ChannelReader, last: int | None, as_json: bool) -> None:
    """List the versions of CHANNEL, oldest first, each followed by the folds and anchors that lead to it."""
    rows, newest, problems = with_bars(_read, reader, last)
    for problem in problems:
        echo(f"deltasync: {problem}", err=True)
    if as_json:
        for each in rows:
            echo_json(each)
        return
    from rich.console import Console

    days = {each["created_at"][:10] for each in rows}
    time = slice(11, 19) if len(days) < 2 else slice(5, 16)  # of a day's, or with the day
    run = f"run {reader.channel().run_id[:12]}  newest version {newest}  {max(days, default='')}"
    title = cell(reader.store.url).append("\n").append_text(cell(run))
    shown = table(_COLUMNS, title=title, caption=_totals(rows), box=None, padding=(0, 1, 0, 0))
    for each in rows:
        is_fold, is_version = each["kind"] == "fold", each["kind"] in ("delta", "anchor")
        shown.add_row(
            f"{each['base_version']}-{each['version']}" if is_fold else str(each["version"]),
            (each["sha256"] or "")[:12] if is_version else "",
            each["kind"] if is_version or is_fold else "anchor",
            _text(each["step"]),
            cell(each["created_at"][time].replace("T", " ")),
            "" if each["delta_bytes"] is None else f"{each['changed_fraction']:.3%}",
            _text(each["delta_bytes"], size_of),
            _text(each["bits_per_changed"], "{:.2f}".format),
            "reference" if each["reference"] else _text(each["anchor_bytes"], size_of),
        )
    # Not to a terminal: nothing is cut off.
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def _read(
    reader: ChannelReader, last: int | None, progress: Progress
) -> tuple[list[dict[str, Any]], str, list[DeltaSyncError]]:
    """The rows, which version is the newest, and what is damaged."""
    from deltasync import housekeeping

    def newest(slots: Iterable[Slot]) -> list[Slot]:
        """Those that may be of the last versions; each epoch that ends among them has a seal."""
        found = list(slots)
        return found if last is None else [slot for slot in found if slot.version > found[-1].version - last - 2]

    held = housekeeping.survey(reader, progress, wanted=newest)
    shown = housekeeping.line(held.records)[: last or None][::-1]
    digests = housekeeping.identities(reader, held, shown)
    total = sum(spec.element_count for spec in reader.specs.values())
    rows = []
    for slot in shown:
        record = held.records[slot]
        if record is not None:
            rows.append(row(slot.key, record, digests.get(slot), total))
        for key, fold in held.folds.items():
            if fold is not None and (fold.version, fold.epoch) == (slot.version, slot.epoch):
                rows.append(row(key, fold, fold.sha256, total))
    newest_version = f"{shown[-1].version} ({(digests.get(shown[-1]) or '')[:12]})" if shown else "none"
    return rows, newest_version, [*held.problems.values()]


def _totals(rows: Iterable[dict[str, Any]]) -> str:
    """Bytes of each kind, of the rows that are shown."""
    sizes: dict[str, list[int]] = {"deltas": [], "anchors": [], "folds": []}
    for each in rows:
        if each["delta_bytes"] is not None:
            sizes["folds" if each["kind"] == "fold" else "deltas"].append(each["delta_bytes"])
        if each["anchor_bytes"] is not None:
            sizes["anchors"].append(each["anchor_bytes"])
    return ", ".join(f"{len(listed)} {kind} {sum(listed):,} bytes" for kind, listed in sizes.items() if listed)


def _text(value: Any, shown: Callable[[Any], str] = str) -> str:
    return "" if value is None else shown(value)
