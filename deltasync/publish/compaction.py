"""COMPACTION: encode the delta from full weights to a later version, group by group, while the shadow goes on.

Nothing is kept in memory between two compactions: the full weights are read again, from the channel or from the checkpoint
that it refers to. At any time one group of tensors is there, twice, and the weight file that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Delta, Record, VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError
from deltasync.kernels import cpu_diff
from deltasync.publish.shadow import Snapshot
from deltasync.tensors import Delta as Changes
from deltasync.tensors.delta import joined, of_tensor

CODEC = "packed"
"""Of compactions: it decodes without old bits, can be undone, and is the smaller one where much has changed."""

GROUP_ELEMENTS = 1 << 25
"""Elements whose changes make a payload, unless a single tensor has more."""


class Change(NamedTuple):
    """How one tensor differs from the full weights. Bits are flat and unsigned."""

    old_N: np.ndarray
    new_N: np.ndarray
    delta: Changes
    fingerprint: int  # of the new bits


_Group = dict[str, Change]  # by tensor


def payloads_of(
    reader: ChannelReader, base: StoredRecord, version: int, snapshot: Snapshot
) -> Iterator[tuple[Encoded, int]]:
    """Yield the payloads of the compaction from full weights to a version, and how many elements each changes; each is
    proved.

    Raises:
        FormatError, MissingVersionError, StoreError: the weights of `base` cannot be read.
        CorruptDataError: a payload does not decode to the version's bits, or memory is damaged.
    """
    for group in _groups(reader, base, snapshot):
        delta = joined([change.delta for change in group.values()])
        digests = {name: change.fingerprint for name, change in group.items()}
        new, versions = {name: (change.new_N, 0) for name, change in group.items()}, (version, base.record.version)
        encoded = codec.get(CODEC).encode(delta, new.__getitem__, digests, *versions)
        _prove(group, delta, encoded.to_bytes(), *versions)
        yield encoded, delta.changed


def _groups(reader: ChannelReader, base: StoredRecord, snapshot: Snapshot) -> Iterator[_Group]:
    group: _Group = {}
    size, layout = 0, reader.layout
    for name, old_N, _ in payloads.weights(reader, base):
        new_N = np.empty_like(old_N)
        digest = snapshot.take(name, new_N)
        index_K, step_K = cpu_diff.diff(old_N, new_N)
        if index_K.size:
            group[name] = Change(old_N, new_N, of_tensor(layout, name, index_K, step_K), digest)
            size += new_N.size
        if size >= GROUP_ELEMENTS:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _prove(group: _Group, delta: Changes, data: bytes, version: int, base_version: int) -> None:
    """Decode a payload as a reader does, and compare the bits that it gives."""
    record = Record(
        run_id="-",
        kind="compaction",
        version=version,
        epoch="-",
        created_at="-",
        base=VersionId(base_version, "-", "-"),
        delta=Delta(codec=CODEC, changed=delta.changed),
    )
    name = f"The compaction from version {base_version} to {version}"
    found, digests = payloads.decode(record, [(name, data)], delta.layout, lambda tensor: group[tensor].old_N.copy())
    if digests != {tensor: change.fingerprint for tensor, change in group.items()}:
        raise CorruptDataError(f"{name} names other tensors or fingerprints than were encoded; it was not stored.")
    for tensor, change in group.items():
        bits_N = change.old_N.copy()
        found.apply(tensor, bits_N)
        if not np.array_equal(bits_N, change.new_N):
            raise CorruptDataError(f"{name} decodes to other bits of {tensor} than were encoded; it was not stored.")
