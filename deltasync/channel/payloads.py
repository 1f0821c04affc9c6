"""The bits that a record or a fold leads to: its payloads, its weight files or its reference, as patches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from deltasync import codec
from deltasync.channel import checkpoint
from deltasync.channel.anchors import read_weights
from deltasync.channel.documents import File, Reference
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.channel.threads import ahead
from deltasync.codec.base import read_metadata
from deltasync.errors import ConfigError, CorruptDataError, MissingVersionError, ModelMismatchError
from deltasync.kernels import cpu
from deltasync.tensors import Patch, TensorSpec, fingerprint

_FILES_AHEAD = 4


def fetch(reader: ChannelReader, stored: Stored) -> list[tuple[str, bytes]]:
    """(key, bytes) of each payload of a delta or fold, that in the record first; none of full weights."""
    return [] if stored.use_anchor else list(_payloads(reader, stored))


def patches(
    reader: ChannelReader,
    stored: Stored,
    old: codec.OldBits | None = None,
    wanted: codec.Wanted | None = None,
    fetched: Sequence[tuple[str, bytes]] | None = None,
) -> Iterator[tuple[Patch, int]]:
    """Patches of one record or fold and the fingerprint of each tensor after it, tensor by tensor.

    Args:
        reader: The channel's.
        stored: A version or a fold.
        old: Gives the bits of a tensor before it; some codecs need them.
        wanted: As in `Codec.decode`.
        fetched: What `fetch` returned; otherwise files are fetched as they are needed.

    Raises:
        FormatError, MissingVersionError: as `ChannelReader.fetch` and `Codec.decode`.
    """
    if stored.use_anchor:
        for name, bits_N, expected in weights(reader, stored):
            yield Patch(name, None, np.require(bits_N, requirements="W"), absolute=True), expected
    else:
        yield from decode(stored, _payloads(reader, stored) if fetched is None else fetched, reader.specs, old, wanted)


def weights(reader: ChannelReader, stored: Stored) -> Iterator[tuple[str, np.ndarray, int]]:
    """Full weights, each tensor once: name, unsigned bit patterns of shape N, not to be written to, fingerprint.

    Raises:
        FormatError, MissingVersionError: as `patches`; also at the end, if a tensor is missing.
    """
    record = stored.record
    if record.reference is not None:
        yield from _reference_weights(reader, record.version, record.reference)
        return
    missing = dict(reader.specs)
    for file, data in _files(reader, stored, 2):
        with _naming(file.key):
            for name, bits_N, expected in read_weights(data, reader.specs):
                if missing.pop(name, None) is None:
                    raise CorruptDataError(f"{name} is there twice.")
                yield name, bits_N, expected
    if missing:
        raise CorruptDataError(f"The anchor of version {record.version} lacks {', '.join(sorted(missing)[:5])}.")


def decode(
    stored: Stored,
    payloads: Iterable[tuple[str, bytes]],
    specs: Mapping[str, TensorSpec],
    old: codec.OldBits | None,
    wanted: codec.Wanted | None = None,
) -> Iterator[tuple[Patch, int]]:
    """As `patches`, of a delta or fold whose payloads, (key, bytes), are there."""
    record = stored.record
    assert record.delta is not None and record.base is not None
    parts, changed = _Parts(), 0
    for key, data in payloads:
        with _naming(key):
            payload = codec.open_payload(data)
        names = (payload.codec, payload.version, payload.base_version)
        if names != (record.delta.codec, record.version, record.base.version):
            raise CorruptDataError(f"{key} says {names}, which is not what its record says.")
        changed += sum(row["changed"] for row in payload.patches.values())
        if changed > record.delta.changed:
            raise CorruptDataError(f"{key} changes more elements than its record says, {record.delta.changed}.")
        fingerprints = payload.fingerprints
        for patch in codec.get(payload.codec).decode(payload, specs, old, wanted):
            parts.check(patch, fingerprints[patch.name], key)
            yield patch, fingerprints[patch.name]


def unlike(reader: ChannelReader, reference: Reference, fingerprints: Mapping[str, int]) -> str:
    """Which tensors, by the fingerprints of all tensors here, are not those of a checkpoint, as a sentence."""
    wrong = [name for name, digest in reference.fingerprints.items() if fingerprints.get(name) != int(digest, 16)]
    return f"The weights here are not those of {reference}: {_differing(wrong, reader.specs)}"


def _payloads(reader: ChannelReader, stored: Stored) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of each payload; the next ones are being fetched while one is used."""
    data = stored.data
    if data is None:
        data = reader.fetch(File(key=stored.key, bytes=stored.size, sha256=stored.sha256))
    if _has_payload(data):
        yield stored.key, data
    for file, part in _files(reader, stored, _FILES_AHEAD):
        yield file.key, part


def _files(reader: ChannelReader, stored: Stored, count: int) -> Iterator[tuple[File, bytes]]:
    files = stored.record.payload_files
    return zip(files, ahead(reader.fetch, files, count), strict=True)


def _has_payload(data: bytes) -> bool:
    """Whether a record's body, which has been checked, holds more than the place of the document."""
    try:
        return "codec" in read_metadata(data)
    except CorruptDataError:
        return False


def _reference_weights(reader: ChannelReader, version: int, reference: Reference) -> Iterator[tuple[str, np.ndarray, int]]:
    specs = reader.specs
    if reference.fingerprints.keys() != specs.keys():
        raise CorruptDataError(f"The reference of version {version} does not name the channel's tensors.")
    try:
        found = checkpoint.load(reference)
    except ConfigError as error:
        raise MissingVersionError(
            f"Version {version} refers to the checkpoint {reference}, which this machine cannot load: {error}"
        ) from error
    wrong = []
    try:
        for name, bits_N in found.read(specs):
            expected = int(reference.fingerprints[name], 16)
            if cpu.fingerprint(fingerprint.tensor_key(name), bits_N) == expected:
                yield name, bits_N, expected
            else:
                wrong.append(name)
    except ModelMismatchError as error:
        raise CorruptDataError(f"The checkpoint {reference} is not version {version}: {error}") from error
    if wrong:
        raise CorruptDataError(f"The checkpoint {reference} is not version {version}: {_differing(wrong, specs)}")


class _Parts:
    """The payloads of one record: those that patch the same tensor patch different ranges of it, to one fingerprint."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, list[tuple[int, int]]]] = {}

    def check(self, patch: Patch, expected: int, key: str) -> None:
        index_K = patch.index_K
        first, last = (0, sys.maxsize) if index_K is None else (int(index_K[0]), int(index_K[-1]))
        known, ranges = self._known.setdefault(patch.name, (expected, []))
        if known != expected or any(first <= end and start <= last for start, end in ranges):
            raise CorruptDataError(f"{key} contradicts another payload of its version about {patch.name}.")
        ranges.append((first, last))


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Prefix corruption errors with the file's key."""
    try:
        yield
    except CorruptDataError as error:
        raise CorruptDataError(f"{key}: {error}") from error


def _differing(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> str:
    return f"{len(names)} of {len(specs)} tensors differ: {checkpoint.some(names)}."
