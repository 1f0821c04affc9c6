"""`deltasync log`: the versions of a channel as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import click

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import cell, echo_json

_COLUMNS = (
    ("version", "right"),
    ("kind", "left"),
    ("step", "right"),
    ("created", "left"),
    ("changed", "right"),
    ("delta bytes", "right"),
    ("bits/changed", "right"),
    ("anchor bytes", "right"),
)


def row(manifest: Any) -> dict[str, Any]:
    """What `log` tells of one version, as plain data."""
    delta, anchor = manifest.delta, manifest.anchor
    changed = manifest.total if delta is None else delta.changed
    delta_bytes = None if delta is None else delta.payload_bytes
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "reference": None if manifest.reference is None else str(manifest.reference),
        "base_version": None if delta is None else delta.base_version,
        "step": manifest.step,
        "created_at": manifest.created_at,
        "changed_fraction": changed / manifest.total if manifest.total else 0.0,
        "delta_bytes": delta_bytes,
        "anchor_bytes": None if anchor is None or manifest.reference is not None else anchor.payload_bytes,
        "bits_per_changed": 8 * delta_bytes / changed if delta_bytes and changed else None,
        "coalesced": manifest.coalesced,
        "fingerprint": manifest.fingerprint,
    }


def fold_row(fold: Any, total: int) -> dict[str, Any]:
    """What `log` tells of a fold; `total` is the number of elements of all tensors."""
    return {
        "version": fold.version,
        "kind": "fold",
        "base_version": fold.base_version,
        "created_at": fold.created_at,
        "changed_fraction": fold.changed / total if total else 0.0,
        "delta_bytes": fold.payload_bytes,
        "bits_per_changed": 8 * fold.payload_bytes / fold.changed if fold.changed else None,
    }


@click.command("log")
@click.argument("channel")
@click.option("--last", type=click.IntRange(min=1), default=None, help="Only the newest so many.")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, oldest first.")
def command(channel: str, last: int | None, trusted_keys: str | None, as_json: bool) -> None:
    """List the versions of CHANNEL, oldest first, each followed by the folds that lead to it."""
    from deltasync import housekeeping
    from deltasync.cli.progress import progress_bars
    from deltasync.reader import ChannelReader
    from deltasync.stores import open_store

    reader = ChannelReader(open_store(channel), trusted_keys)
    head = reader.head()
    versions = [version for version in reader.versions() if version <= head.version][-(last or 0) :]
    with progress_bars() as progress:
        manifests = housekeeping.read_manifests(reader, progress, versions)
        folds = housekeeping.read_folds(reader, progress, versions)
    rows = []
    for version, manifest in manifests.items():
        rows.append(row(manifest))
        rows += [fold_row(fold, manifest.total) for fold in folds.values() if fold.version == version]
    if as_json:
        for line in rows:
            echo_json(line)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=cell(f"{reader.store.url}  run {head.run_id[:12]}  head {head.version}"), title_justify="left")
    table.caption, table.caption_justify = _totals(rows), "left"
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for line in rows:
        table.add_row(
            str(line["version"]) if line["kind"] != "fold" else f"{line['base_version']}-{line['version']}",
            "reference" if line.get("reference") else line["kind"],
            _text(line.get("step")),
            cell(line["created_at"][:19].replace("T", " ")),
            f"{line['changed_fraction']:.4%}",
            _text(line["delta_bytes"], ","),
            _text(line["bits_per_changed"], ".2f"),
            _text(line.get("anchor_bytes"), ","),
        )
    # Not to a terminal: nothing is cut off.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _totals(rows: Iterable[dict[str, Any]]) -> str:
    """Bytes of each kind, of the rows that are shown."""
    sizes: dict[str, list[int | None]] = {"deltas": [], "anchors": [], "folds": []}
    for line in rows:
        sizes["folds" if line["kind"] == "fold" else "deltas"].append(line["delta_bytes"])
        sizes["anchors"].append(line.get("anchor_bytes"))
    found = {kind: [size for size in listed if size is not None] for kind, listed in sizes.items()}
    return ", ".join(f"{len(listed)} {kind} {sum(listed):,} bytes" for kind, listed in found.items() if listed)


def _text(value: Any, form: str = "") -> str:
    return "" if value is None else format(value, form)
