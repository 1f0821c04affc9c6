"""`deltasync show`: one record or fold in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from deltasync.cli.keys import trusted_keys
from deltasync.cli.output import echo, echo_json

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import Stored


@click.command("show")
@click.argument("channel")
@click.argument("what", metavar="[VERSION|KEY]", default="latest")
@trusted_keys
@click.option("--json", "as_json", is_flag=True, help="The document as JSON, with its key and digest.")
def command(channel: str, what: str, trusted_keys: str | None, as_json: bool) -> None:
    """Show a record of CHANNEL: its document, its signature, the ways that lead to it, its most changed tensors.

    By number, `latest` (the default), or the key of a record, seal or fold as `deltasync log --json` and listings show it.
    """
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import signed_by
    from deltasync.stores import open_store

    reader = ChannelReader(open_store(channel), trusted_keys)
    stored = _find(reader, what)
    assert stored.data is not None
    name = signed_by(stored.data)
    document = msgspec.to_builtins(stored.record)
    if as_json:
        echo_json({"key": stored.key, "sha256": stored.sha256, "bytes": stored.size, "document": document}, indent=2)
        return
    echo(f"{'key':16} {stored.key}")
    echo(f"{'sha256':16} {stored.sha256}")
    echo(f"{'bytes':16} {stored.size:,}")
    for field, value in document.items():
        if field == "base" and value is not None:
            echo(f"{field:16} {stored.record.base}  {value['epoch']}")
        elif field == "sha256" and value is not None:
            echo(f"{'of record':16} {value}")
        elif field not in ("delta", "anchor", "sha256") and value not in (None, []):
            echo(f"{field:16} {value}")
    if name is not None:
        echo(f"{'signed by':16} {name}{'' if reader.trusted else ' (not checked)'}")
    if stored.record.reference is not None:
        echo(f"{'reference':16} {stored.record.reference}")
    for file in stored.record.files:
        echo(f"{'file':16} {file.key}  {file.bytes:,} bytes  sha256 {file.sha256[:12]}")
    _show_ways(reader, stored)
    _show_payload(reader, stored)


def _find(reader: ChannelReader, what: str) -> Stored:
    from deltasync.channel import keys
    from deltasync.errors import ConfigError, NotPublishedError

    if what.isdecimal() and int(what) > 0:
        return reader.numbered(int(what))
    if what == "latest":
        stored = reader.newest()
        if stored is not None and stored.record.next_epoch is not None:  # a seal
            stored = None if stored.record.base is None else reader.record(stored.record.base)
        if stored is None:
            raise NotPublishedError(f"{reader.store.url} holds no version yet.")
        return stored
    if keys.slot_of(what) is None and keys.fold_of(what) is None:
        raise ConfigError(f"{what!r} is neither a version, nor `latest`, nor the key of a record or fold.")
    return reader.stored(what)


def _show_ways(reader: ChannelReader, stored: Stored) -> None:
    """Folds and announced anchors of a version."""
    for span, info in reader.folds() if stored.record.is_version else []:
        fold = reader.document(info) if span.version == stored.record.version else None
        if fold is None or fold.sha256 != stored.sha256:
            continue
        if fold.delta is None:
            echo(f"{'anchor':16} {info.key}  {fold.payload_bytes:,} bytes")
        else:
            echo(f"{'fold':16} {info.key}  {fold.payload_bytes:,} bytes  {fold.delta.changed:,} changed")


def _show_payload(reader: ChannelReader, stored: Stored) -> None:
    """The most changed tensors."""
    from deltasync import codec
    from deltasync.channel import payloads

    delta = stored.record.delta
    if delta is None or stored.record.base is None:
        return
    total = sum(spec.element_count for spec in reader.specs.values())
    echo(f"{'changed':16} {delta.changed:,} of {total:,} elements since version {stored.record.base.version}")
    changed: dict[str, int] = {}
    for _, data in payloads.fetch(reader, stored).payloads:
        for name, row in codec.open_payload(data).patches.items():
            changed[name] = changed.get(name, 0) + row["changed"]
    fractions = {name: count / reader.specs[name].element_count for name, count in changed.items()}
    for name in sorted(fractions, key=fractions.__getitem__, reverse=True)[:10]:
        echo(f"{fractions[name]:16.4%} {reader.specs[name]}")
