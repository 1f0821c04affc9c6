"""Compactions of a publisher: the changes from the newest full weights to a version, for late joiners.

They are encoded group by group while the shadow goes on. Nothing is kept in memory between two of them: the full weights
are read again, from the channel or from the checkpoint that it refers to. One group of tensors is in memory at a time,
twice, and the weight file that is read. Each rank of a sharded trainer makes the parts of the ranges that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Self

import msgspec
import numpy as np

from deltasync.channel import keys, payloads
from deltasync.channel.documents import File
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import INLINE_BYTES, StoredRecord
from deltasync.codec.base import Encoded
from deltasync.kernels import native
from deltasync.publish.encode import Versions, encode, prove
from deltasync.publish.job import Job
from deltasync.publish.shadow import Snapshot
from deltasync.ranks.peers import Range
from deltasync.tensors import Delta, Layout, fingerprint
from deltasync.tensors.delta import joined, of_tensor
from deltasync.threads import Workers

CODEC = "packed"
"""Codec of compactions: it decodes without old bits, can be undone, and is the smaller one where much has changed."""

STORED_AT_ONCE = 2
"""Parts of a compaction, or weight files, that are stored at once, so that the disk or link never idles between two."""

GROUP_ELEMENTS = 1 << 25
"""Elements whose changes make a payload, unless a single tensor has more."""


class Target(NamedTuple):
    """The version that a compaction leads to."""

    version: int
    snapshot: Snapshot
    fingerprints: Mapping[str, int]  # of the whole tensors

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the version of a job whose shadow has its bits; the shadow may advance afterwards."""
        assert job.fingerprints is not None
        return cls(job.version, job.shadow.snapshot(), job.fingerprints)


class Parts(msgspec.Struct, frozen=True):
    """The parts of a compaction that one rank has stored.

    Attributes:
        files: The parts.
        changed: Elements that they change, and those of the payload for the record.
        before: This rank's share of the fingerprint of the full weights, which proves what was read of them.
    """

    files: list[File]
    changed: int
    before: int


class _Change(NamedTuple):
    """How the range of one tensor differs from the full weights. Bits are flat and unsigned."""

    start: int  # flat index of the range
    new_N: np.ndarray
    delta: Delta


_Group = dict[str, _Change]  # by tensor


def store_parts(
    reader: ChannelReader,
    base: StoredRecord,
    target: Target,
    put: Callable[[str, bytes], File],
    *,
    rank: int = 0,
    inline: bool = True,
) -> tuple[Parts, Encoded | None]:
    """Encode and prove the changes from full weights to a version, in the ranges of its snapshot, and store them.

    `put` stores a part, by its file name. With `inline` a single small payload is returned, for the record, instead.

    Raises:
        FormatError, MissingVersionError, StoreError: the weights of `base` cannot be read.
        CorruptDataError: a payload does not decode to the version's bits, or memory is damaged.
    """
    puts, stored = Workers(STORED_AT_ONCE, "upload"), list[Future[File]]()
    waiting: Encoded | None = None
    changed = before = 0

    def old_ranges() -> Iterator[tuple[str, int, np.ndarray]]:
        nonlocal before
        for name, start, old_N in _old_ranges(reader, base, target.snapshot.ranges):
            before += native.fingerprint(fingerprint.tensor_key(name), old_N, start)
            yield name, start, old_N

    def store(payload: Encoded) -> None:
        if len(stored) >= STORED_AT_ONCE:
            stored[-STORED_AT_ONCE].result()  # so that no more are in memory
        name = keys.compaction_part(base.record.version, rank, len(stored) + 1)
        stored.append(puts.submit(put, name, payload.to_bytes()))

    for group in _groups(reader.layout, old_ranges(), target.snapshot):
        if waiting is not None:
            store(waiting)
        waiting = _encode(group, target, base.record.version)
        changed += sum(change.delta.changed for change in group.values())
    if waiting is not None and (stored or not inline or len(waiting.to_bytes()) > INLINE_BYTES):
        store(waiting)
        waiting = None
    return Parts([part.result() for part in stored], changed, before & fingerprint.MASK), waiting


def _groups(layout: Layout, old_ranges: Iterable[tuple[str, int, np.ndarray]], snapshot: Snapshot) -> Iterator[_Group]:
    """Yield the tensors that differ, in groups."""
    group: _Group = {}
    size = 0
    for name, start, old_N in old_ranges:
        new_N = np.empty_like(old_N)
        snapshot.take(name, new_N)
        index_K, step_K = native.diff(old_N, new_N)
        if index_K.size:
            group[name] = _Change(start, new_N, of_tensor(layout, name, index_K, step_K, start=start))
            size += new_N.size
        if size >= GROUP_ELEMENTS:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _old_ranges(
    reader: ChannelReader, base: StoredRecord, ranges: Mapping[str, Range]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield ranges of full weights: name, first flat index, bits."""
    if all(ranges[name] == (0, spec.element_count) for name, spec in reader.specs.items()):
        for name, old_N, _ in payloads.weights(reader, base):
            yield name, 0, old_N
        return
    found: dict[str, tuple[np.ndarray, int]] = {}  # of those that come in several pieces, and how much is there
    for name, at, piece_N in payloads.ranges_of_weights(reader, base, ranges):
        start, stop = ranges[name]
        old_N, count = found.pop(name, (np.empty(stop - start, piece_N.dtype), 0))
        old_N[at - start : at - start + piece_N.size] = piece_N
        if count + piece_N.size < old_N.size:
            found[name] = old_N, count + piece_N.size
        else:
            yield name, start, old_N


def _encode(group: _Group, target: Target, base_version: int) -> Encoded:
    """Encode and prove a group. Raises CorruptDataError as `prove`."""
    delta = joined([change.delta for change in group.values()])
    new = {name: (change.new_N, change.start) for name, change in group.items()}
    versions = Versions(target.version, base_version, new.__getitem__, target.fingerprints)
    encoded = encode(CODEC, delta, versions)
    prove(CODEC, delta, versions, encoded.to_bytes())
    return encoded
