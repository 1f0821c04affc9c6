"""`deltasync show`: one record or fold in full."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

import click
import msgspec

from deltasync.cli.options import channel_command
from deltasync.cli.output import echo, echo_json, field, with_bars

if TYPE_CHECKING:
    from deltasync.channel.documents import Record
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import Stored
    from deltasync.housekeeping import Progress

_field = functools.partial(field, width=16)


@channel_command("show", "The document as JSON, with its key and digest.")
@click.argument("what", metavar="[VERSION|KEY]", default="latest")
def command(reader: ChannelReader, what: str, as_json: bool) -> None:
    """Show a record of CHANNEL: its document, its signature, the ways that lead to it, its most changed tensors.

    By number, `latest` (the default), or the key of a record, seal or fold as `deltasync log --json` and listings show it.
    """
    from deltasync.channel.record import signed_by

    stored = _find(reader, what)
    assert stored.data is not None
    name = signed_by(stored.data)
    document = msgspec.to_builtins(stored.record)
    if as_json:
        echo_json({"key": stored.key, "sha256": stored.sha256, "bytes": stored.size, "document": document}, indent=2)
        return
    _field("key", stored.key)
    _field("sha256", stored.sha256)
    _field("bytes", f"{stored.size:,}")
    for of_document, value in document.items():
        if of_document == "base" and value is not None:
            _field("base", f"{stored.record.base}  {value['epoch']}")
        elif of_document == "sha256" and value is not None:
            _field("of record", value)
        elif of_document not in ("delta", "anchor", "sha256") and value not in (None, []):
            _field(of_document, value)
    if name is not None:
        _field("signed by", f"{name}{'' if reader.trusted else ' (not checked)'}")
    if stored.record.reference is not None:
        _field("reference", stored.record.reference)
    for file in stored.record.files:
        _field("file", f"{file.key}  {file.bytes:,} bytes  sha256 {file.sha256[:12]}")
    ways, changed = with_bars(_around, reader, stored)
    for key, way in ways.items():
        more = "" if way.delta is None else f"  {way.delta.changed:,} changed"
        _field("anchor" if way.delta is None else "fold", f"{key}  {way.payload_bytes:,} bytes{more}")
    if stored.record.delta is not None and stored.record.base is not None:
        total = sum(spec.element_count for spec in reader.specs.values())
        since = f"since version {stored.record.base.version}"
        _field("changed", f"{stored.record.delta.changed:,} of {total:,} elements {since}")
    fractions = {name: changed[name] / spec.element_count for name, spec in reader.specs.items() if name in changed}
    for name in sorted(fractions, key=fractions.__getitem__, reverse=True)[:10]:
        echo(f"{fractions[name]:16.4%} {reader.specs[name]}")


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
            reader.channel()
            raise NotPublishedError(f"{reader.store.url} holds no version yet.")
        return stored
    if keys.slot_of(what) is None and keys.fold_of(what) is None:
        raise ConfigError(f"{what!r} is neither a version, nor `latest`, nor the key of a record or fold.")
    return reader.stored(what)


def _around(reader: ChannelReader, stored: Stored, progress: Progress) -> tuple[dict[str, Record], dict[str, int]]:
    """Folds and announced anchors of a version, by key, and changed elements by tensor.

    These are out of the headers of payloads, which are not held to their digests.
    """
    from deltasync.channel.documents import File
    from deltasync.dashboard.heat import read_changed
    from deltasync.housekeeping import in_parallel

    record, ways, changed = stored.record, {}, Counter[str]()
    if record.is_version:
        infos = [info for span, info in reader.folds() if span.version == record.version]
        found = zip(infos, in_parallel(reader.document, infos, "folds", progress), strict=True)
        ways = {info.key: way for info, way in found if way.sha256 == stored.sha256}
    if record.delta is not None and record.base is not None:
        files = [File(key=stored.key, bytes=stored.size, sha256=stored.sha256), *record.delta.parts]
        for counts in in_parallel(lambda file: read_changed(reader.store, file), files, "payload headers", progress):
            changed.update(counts)
    return ways, changed
