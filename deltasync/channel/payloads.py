"""Fetch and decode the objects that a record or compaction names: payloads, weight files, or a reference."""

from __future__ import annotations

import contextlib
import pkgutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from deltasync import codec, limits
from deltasync.channel.anchors import read_weights
from deltasync.channel.documents import File, Record
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.codec.base import Payload
from deltasync.errors import CorruptDataError, first_five
from deltasync.tensors import Changed, Delta, Layout
from deltasync.tensors.delta import joined
from deltasync.threads import ahead

Decoder = Callable[[Iterable[Payload]], Changed | None]
"""Decodes payloads of one version of `packed` or `context`, where the bits are; None if there is too little
memory. See `Backend.decoder`."""

_REFERENCES = "deltasync.opening.references:weights"  # a wing: reads full weights outside the channel
_LENGTH = struct.Struct("<Q")  # of a safetensors header, before it


def fetch(reader: ChannelReader, stored: StoredRecord) -> list[tuple[str, bytes]]:
    """Fetch the payloads of a delta or compaction as (key, bytes), that in the record first. Nothing for full
    weights.
    """
    return [] if stored.use_anchor else list(_payloads(reader, stored))


def delta(
    reader: ChannelReader,
    stored: StoredRecord,
    old: codec.OldBits | None = None,
    wanted: codec.Wanted | None = None,
    fetched: Sequence[tuple[str, bytes]] | None = None,
    decoder: Decoder | None = None,
) -> Changed:
    """Decode a delta or a compaction: its changes, and the fingerprints of changed tensors after them.

    `old` returns the bits of a tensor before the change; some codecs need them. `wanted` is as in
    `Codec.decode`. Without `fetched`, the result of `fetch`, files are fetched as they are needed. With a
    `decoder` the changes are where that leaves them, unless it has too little memory.
    """
    found = _payloads(reader, stored) if fetched is None else fetched
    assert stored.record.delta is not None
    if decoder is not None and stored.record.delta.codec != "raw":
        found = [*found]
        changed = decoder(payload for _, payload in opened(stored.record, found))
        if changed is not None:
            return changed
    return decode(stored.record, found, reader.layout, old, wanted)


def weights(reader: ChannelReader, stored: StoredRecord) -> Iterator[tuple[str, np.ndarray, int]]:
    """Read full weights, each tensor once: name, read-only unsigned bit patterns of shape N, fingerprint."""
    record = stored.record
    if record.reference is not None:
        yield from pkgutil.resolve_name(_REFERENCES)(reader, record)
        return
    with each_once(reader, record) as note:
        for file, data in _files(reader, stored, limits.FILES_AHEAD):
            with naming(file.key):
                for name, bits_N, expected in read_weights(data, reader.specs):
                    note(name)
                    yield name, bits_N, expected


@contextlib.contextmanager
def each_once(reader: ChannelReader, record: Record) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with each tensor. Raise CorruptDataError if it is called twice for one, or not
    for all.
    """
    missing = dict(reader.specs)

    def note(name: str) -> None:
        if missing.pop(name, None) is None:
            raise CorruptDataError(f"{name} occurs twice.")

    yield note
    if missing:
        raise CorruptDataError(f"The anchor of version {record.version} lacks {first_five(sorted(missing))}.")


def decode(
    record: Record,
    payloads: Iterable[tuple[str, bytes]],
    layout: Layout,
    old: codec.OldBits | None,
    wanted: codec.Wanted | None = None,
) -> Changed:
    """`delta` of a delta or compaction whose payloads, (key, bytes), were fetched."""
    parts: list[Delta] = []
    fingerprints: dict[str, int] = {}
    for key, payload in opened(record, payloads):
        found, digests = codec.get(payload.codec).decode(payload, layout, old, wanted)
        for name in fingerprints.keys() & digests.keys():
            if fingerprints[name] != digests[name]:
                raise CorruptDataError(f"{key} contradicts another payload of its version about {name}.")
        fingerprints |= digests
        parts.append(found)
    try:
        return Changed(joined(parts, layout), fingerprints)
    except ValueError as error:
        raise CorruptDataError(
            f"Payloads of version {record.version} contradict each other: {error}."
        ) from error


def opened(record: Record, payloads: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, Payload]]:
    """Open payloads, which must be the record's and change no more elements than it says; with their keys."""
    assert record.delta is not None and record.base is not None
    changed = 0
    for key, data in payloads:
        with naming(key):
            payload = codec.open_payload(data)
        names = (payload.codec, payload.version, payload.base_version)
        if names != (record.delta.codec, record.version, record.base.version):
            raise CorruptDataError(f"{key} contains {names}, and its record names others.")
        changed += payload.changed
        if changed > record.delta.changed:
            raise CorruptDataError(
                f"{key} changes more elements than its record says, {record.delta.changed}."
            )
        yield key, payload


def _payloads(reader: ChannelReader, stored: StoredRecord) -> Iterator[tuple[str, bytes]]:
    """Each payload as (key, bytes); the next ones are fetched while one is used."""
    data = stored.data
    if data is None:
        data = reader.fetch(File(key=stored.key, bytes=stored.size, sha256=stored.sha256))
    if _LENGTH.size + _LENGTH.unpack_from(data)[0] < stored.record.body_bytes:  # more than a header
        yield stored.key, data
    for file, part in _files(reader, stored, limits.PARTS_AHEAD):
        yield file.key, part


def _files(reader: ChannelReader, stored: StoredRecord, count: int) -> Iterator[tuple[File, bytes]]:
    """The parts or weight files; up to `count` are fetched ahead."""
    files = stored.record.payload_files
    return zip(files, ahead(reader.fetch, files, count), strict=True)


@contextlib.contextmanager
def naming(key: str) -> Iterator[None]:
    """Put the file's key before the message of a CorruptDataError."""
    try:
        yield
    except CorruptDataError as error:
        raise CorruptDataError(f"{key}: {error}") from error
