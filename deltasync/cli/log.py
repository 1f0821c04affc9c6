"""`deltasync log`: the versions of a channel as a table."""

from __future__ import annotations

import json
from typing import Any

import click


def row(manifest: Any) -> dict[str, Any]:
    """What `log` tells of one version, as plain data."""
    delta, anchor = manifest.delta, manifest.anchor
    changed = manifest.total if delta is None else delta.changed
    delta_bytes = None if delta is None else delta.payload_bytes
    return {
        "version": manifest.version,
        "kind": manifest.kind,
        "step": manifest.step,
        "created_at": manifest.created_at,
        "changed_fraction": changed / manifest.total if manifest.total else 0.0,
        "delta_bytes": delta_bytes,
        "anchor_bytes": None if anchor is None else anchor.payload_bytes,
        "bits_per_changed": 8 * delta_bytes / changed if delta_bytes and changed else None,
        "coalesced": manifest.coalesced,
        "fingerprint": manifest.fingerprint,
    }


@click.command("log")
@click.argument("channel")
@click.option("--last", type=click.IntRange(min=1), default=None, help="Only the newest so many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, oldest first.")
def command(channel: str, last: int | None, as_json: bool) -> None:
    """List the versions of CHANNEL, oldest first."""
    from deltasync.reader import ChannelReader
    from deltasync.stores import open_store

    reader = ChannelReader(open_store(channel))
    head = reader.head()
    versions = [version for version in reader.versions() if version <= head.version]
    rows = [row(reader.manifest(version)) for version in versions[-(last or 0) :]]
    if as_json:
        for line in rows:
            click.echo(json.dumps(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{reader.store.url}  run {head.run_id[:12]}  head {head.version}", title_justify="left")
    for name, justify in (
        ("version", "right"),
        ("kind", "left"),
        ("step", "right"),
        ("created", "left"),
        ("changed", "right"),
        ("delta bytes", "right"),
        ("bits/changed", "right"),
        ("anchor bytes", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for line in rows:
        table.add_row(
            str(line["version"]),
            line["kind"],
            _text(line["step"]),
            line["created_at"][:19].replace("T", " "),
            f"{line['changed_fraction']:.4%}",
            _text(line["delta_bytes"], ","),
            _text(line["bits_per_changed"], ".2f"),
            _text(line["anchor_bytes"], ","),
        )
    Console().print(table)


def _text(value: Any, form: str = "") -> str:
    return "" if value is None else format(value, form)
