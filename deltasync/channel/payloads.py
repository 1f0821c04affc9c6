"""Fetch and decode the objects that a record or compaction names: payloads, weight files, or a reference."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from deltasync import codec, limits
from deltasync.channel.anchors import read_weights
from deltasync.channel.documents import File, Record, Reference
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.codec.base import Payload, read_metadata
from deltasync.errors import ConfigError, CorruptDataError, MissingVersionError, ModelMismatchError
from deltasync.kernels import native
from deltasync.opening import checkpoint, ranges
from deltasync.tensors import Changed, Delta, Layout, TensorSpec, fingerprint, weight_bytes
from deltasync.tensors.delta import joined
from deltasync.threads import ahead

Decoder = Callable[[Iterable[Payload]], Changed]
"""Decodes payloads of one version of `packed` or `context`, where the bits are; see `Backend.decoder`."""

_REFERENCE_BYTES = 8, 64 << 20  # of a checkpoint for each byte of the channel's model, and in addition


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
    `decoder` the changes are where that leaves them.
    """
    found = _payloads(reader, stored) if fetched is None else fetched
    assert stored.record.delta is not None
    if decoder is not None and stored.record.delta.codec != "raw":
        return decoder(payload for _, payload in opened(stored.record, found))
    return decode(stored.record, found, reader.layout, old, wanted)


def weights(reader: ChannelReader, stored: StoredRecord) -> Iterator[tuple[str, np.ndarray, int]]:
    """Read full weights, each tensor once: name, read-only unsigned bit patterns of shape N, fingerprint."""
    record = stored.record
    if record.reference is not None:
        yield from _reference_weights(reader, record.version, record.reference)
        return
    with _each_once(reader, record) as note:
        for file, data in _files(reader, stored, limits.FILES_AHEAD):
            with _naming(file.key):
                for name, bits_N, expected in read_weights(data, reader.specs):
                    note(name)
                    yield name, bits_N, expected


def ranges_of_weights(
    reader: ChannelReader, stored: StoredRecord, wanted: ranges.Ranges
) -> Iterator[ranges.Piece]:
    """Read ranges of full weights in pieces. The caller checks the fingerprint of all ranges together."""
    record, specs = stored.record, reader.specs
    if record.reference is not None:
        with _loading(record.version, record.reference):
            yield from _referred(reader, record.version, record.reference).ranges(specs, wanted)
        return
    with _each_once(reader, record) as note:
        for file in record.payload_files:
            ranged = ranges.RangedFile(file.bytes, functools.partial(reader.read_range, file))
            with _naming(file.key):
                for found in ranges.read_weights(ranged, specs, wanted):
                    if isinstance(found, str):
                        note(found)
                    else:
                        yield found


@contextlib.contextmanager
def _each_once(reader: ChannelReader, record: Record) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with each tensor. Raise CorruptDataError if it is called twice for one, or not
    for all.
    """
    missing = dict(reader.specs)

    def note(name: str) -> None:
        if missing.pop(name, None) is None:
            raise CorruptDataError(f"{name} occurs twice.")

    yield note
    if missing:
        raise CorruptDataError(
            f"The anchor of version {record.version} lacks {checkpoint.first_five(sorted(missing))}."
        )


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
        with _naming(key):
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


def unlike(reader: ChannelReader, reference: Reference, fingerprints: Mapping[str, int]) -> str:
    """A sentence that names the tensors here whose fingerprints are not those of a reference."""
    wrong = [
        name for name, digest in reference.fingerprints.items() if fingerprints.get(name) != int(digest, 16)
    ]
    return f"The weights here are not those of {reference}: {_differing(wrong, reader.specs)}"


def _payloads(reader: ChannelReader, stored: StoredRecord) -> Iterator[tuple[str, bytes]]:
    """Each payload as (key, bytes); the next ones are fetched while one is used."""
    data = stored.data
    if data is None:
        data = reader.fetch(File(key=stored.key, bytes=stored.size, sha256=stored.sha256))
    if _has_payload(data):
        yield stored.key, data
    for file, part in _files(reader, stored, limits.PARTS_AHEAD):
        yield file.key, part


def _files(reader: ChannelReader, stored: StoredRecord, count: int) -> Iterator[tuple[File, bytes]]:
    """The parts or weight files; up to `count` are fetched ahead."""
    files = stored.record.payload_files
    return zip(files, ahead(reader.fetch, files, count), strict=True)


def _has_payload(data: bytes) -> bool:
    """Whether a record's body holds a payload, not only the header; its digest was checked."""
    try:
        return "codec" in read_metadata(data)
    except CorruptDataError:
        return False


def _reference_weights(
    reader: ChannelReader, version: int, reference: Reference
) -> Iterator[tuple[str, np.ndarray, int]]:
    specs, wrong = reader.specs, []
    found = _referred(reader, version, reference)
    with _loading(version, reference):
        for name, bits_N in found.read(specs):
            expected = int(reference.fingerprints[name], 16)
            if native.fingerprint(fingerprint.tensor_key(name), bits_N) == expected:
                yield name, bits_N, expected
            else:
                wrong.append(name)
    if wrong:
        raise CorruptDataError(
            f"The checkpoint {reference} is not version {version}: {_differing(wrong, specs)}"
        )


def _referred(reader: ChannelReader, version: int, reference: Reference) -> checkpoint.Checkpoint:
    """Load the checkpoint that a version refers to."""
    specs = reader.specs
    if reference.fingerprints.keys() != specs.keys():
        raise CorruptDataError(f"The reference of version {version} does not name the channel's tensors.")
    try:
        factor, more = _REFERENCE_BYTES
        limit_bytes = factor * weight_bytes(specs.values()) + more
        return checkpoint.load(reference, limit_bytes, with_token=reader.may_use_token(reference.repo))
    except ConfigError as error:
        raise MissingVersionError(
            f"Version {version} refers to the checkpoint {reference}, which this machine cannot load: {error}"
        ) from error


@contextlib.contextmanager
def _loading(version: int, reference: Reference) -> Iterator[None]:
    """Raise CorruptDataError if a checkpoint does not have the channel's tensors."""
    try:
        yield
    except ModelMismatchError as error:
        raise CorruptDataError(f"The checkpoint {reference} is not version {version}: {error}") from error


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put the file's key before the message of a CorruptDataError."""
    try:
        yield
    except CorruptDataError as error:
        raise CorruptDataError(f"{key}: {error}") from error


def _differing(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> str:
    return f"{len(names)} of {len(specs)} tensors differ: {checkpoint.first_five(names)}."
