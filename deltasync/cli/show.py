"""`deltasync show`: one version in full."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json


@click.command("show")
@click.argument("channel")
@click.argument("version", type=click.IntRange(min=1), required=False)
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
def command(channel: str, version: int | None, trusted_keys: str | None, as_json: bool) -> None:
    """Show VERSION of CHANNEL (the newest by default): its manifest, the folds that lead to it, its most changed tensors."""
    from deltasync import codec, housekeeping, layout, signing
    from deltasync.reader import ChannelReader
    from deltasync.stores import open_store

    reader = ChannelReader(open_store(channel), trusted_keys)
    manifest = reader.manifest(reader.head().version if version is None else version)
    document = msgspec.to_builtins(manifest)
    if as_json:
        echo_json(document, indent=2)
        return
    for field, value in document.items():
        if field not in ("delta", "anchor", "chain") and value not in (None, []):
            echo(f"{field:16} {value}")
    name = signing.signed_by(reader.store.read(layout.manifest(manifest.version)))
    if name is not None:
        echo(f"{'signed by':16} {name}{'' if reader.trusted else ' (not checked)'}")
    if manifest.chain:
        echo(f"{'chain':16} {len(manifest.chain)} versions, from version {manifest.chain[0].version}")
    if manifest.reference is not None:
        echo(f"{'reference':16} {manifest.reference}")
    parts: dict[str, Any] = {"delta": manifest.delta, "anchor": manifest.anchor if manifest.reference is None else None}
    for kind, part in parts.items():
        if part is not None:
            echo(f"{kind:16} {part.payload_bytes:,} bytes")
        for file in part.files if part is not None else []:
            echo(f"{'file':16} {file.key}  {file.bytes:,} bytes  sha256 {file.sha256[:16]}...")
    for fold in housekeeping.read_folds(reader, versions=[manifest.version]).values():
        echo(f"{'fold':16} from version {fold.base_version}  {fold.payload_bytes:,} bytes  {fold.changed:,} changed")
    if manifest.delta is None:
        return
    echo(
        f"{'changed':16} {manifest.delta.changed:,} of {manifest.total:,} elements "
        f"since version {manifest.delta.base_version}"
    )
    patches: dict[str, Any] = {}
    for file in manifest.delta.files:
        patches.update(codec.open_payload(reader.fetch(file)).patches)
    fractions = {name: row["changed"] / reader.specs[name].element_count for name, row in patches.items()}
    for name in sorted(fractions, key=fractions.__getitem__, reverse=True)[:10]:
        echo(f"{fractions[name]:16.4%} {reader.specs[name]}")
