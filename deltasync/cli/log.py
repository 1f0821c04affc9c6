"""`deltasync log`: the versions of a channel as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import cell, echo, echo_json

if TYPE_CHECKING:
    from deltasync.channel.documents import Record
    from deltasync.channel.keys import Slot

_COLUMNS = (
    ("version", "right"),
    ("digest", "left"),
    ("kind", "left"),
    ("step", "right"),
    ("created", "left"),
    ("changed", "right"),
    ("delta bytes", "right"),
    ("bits/changed", "right"),
    ("anchor bytes", "right"),
)


def row(key: str, record: Record, sha256: str | None, total: int) -> dict[str, Any]:
    """What `log` tells of a version, a fold or an announced anchor, as plain data.

    Args:
        key: Of the object.
        record: Its document.
        sha256: Digest of the version that it is or leads to.
        total: Elements of all tensors.
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


@click.command("log")
@click.argument("channel")
@click.option("--last", type=click.IntRange(min=1), default=None, help="Only the newest so many.")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, oldest first.")
def command(channel: str, last: int | None, trusted_keys: str | None, as_json: bool) -> None:
    """List the versions of CHANNEL, oldest first, each followed by the folds and anchors that lead to it."""
    from deltasync import housekeeping
    from deltasync.channel.reading import ChannelReader
    from deltasync.cli.progress import progress_bars
    from deltasync.stores import open_store

    reader = ChannelReader(open_store(channel), trusted_keys)

    def newest(slots: Iterable[Slot]) -> list[Slot]:
        """Those that may be of the last versions; each epoch that ends among them has a seal."""
        found = list(slots)
        return found if last is None else [slot for slot in found if slot.version > found[-1].version - last - 2]

    with progress_bars() as progress:
        held = housekeeping.survey(reader, progress, wanted=newest)
        shown = housekeeping.line(held)[: last or None][::-1]
        digests = housekeeping.identities(reader, held, shown)
    for problem in held.problems.values():
        echo(f"deltasync: {problem}", err=True)
    total = sum(spec.element_count for spec in reader.specs.values())
    rows = []
    for slot in shown:
        record = held.records[slot]
        if record is not None:
            rows.append(row(slot.key, record, digests.get(slot), total))
        for key, fold in held.folds.items():
            if fold is not None and (fold.version, fold.epoch) == (slot.version, slot.epoch):
                rows.append(row(key, fold, fold.sha256, total))
    if as_json:
        for each in rows:
            echo_json(each)
        return
    from rich.console import Console
    from rich.table import Table

    newest_version = f"{shown[-1].version} ({(digests.get(shown[-1]) or '')[:12]})" if shown else "none"
    title = f"{reader.store.url}  run {reader.channel().run_id[:12]}  newest version {newest_version}"
    table = Table(title=cell(title), title_justify="left")
    table.caption, table.caption_justify = _totals(rows), "left"
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for each in rows:
        span = f"{each['base_version']}-{each['version']}" if each["kind"] == "fold" else str(each["version"])
        table.add_row(
            span,
            (each["sha256"] or "")[:12] if each["kind"] in ("delta", "anchor") else "",
            "reference" if each["reference"] else each["kind"],
            _text(each["step"]),
            cell(each["created_at"][:19].replace("T", " ")),
            "" if each["kind"] == "announced" else f"{each['changed_fraction']:.4%}",
            _text(each["delta_bytes"], ","),
            _text(each["bits_per_changed"], ".2f"),
            _text(each["anchor_bytes"], ","),
        )
    # Not to a terminal: nothing is cut off.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _totals(rows: Iterable[dict[str, Any]]) -> str:
    """Bytes of each kind, of the rows that are shown."""
    sizes: dict[str, list[int | None]] = {"deltas": [], "anchors": [], "folds": []}
    for each in rows:
        sizes["folds" if each["kind"] == "fold" else "deltas"].append(each["delta_bytes"])
        sizes["anchors"].append(each["anchor_bytes"])
    found = {kind: [size for size in listed if size is not None] for kind, listed in sizes.items()}
    return ", ".join(f"{len(listed)} {kind} {sum(listed):,} bytes" for kind, listed in found.items() if listed)


def _text(value: Any, form: str = "") -> str:
    return "" if value is None else format(value, form)
