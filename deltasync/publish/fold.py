"""FOLD: encode the delta from full weights to a later version, group by group, while the shadow goes on.

Nothing is kept in memory between two folds: the full weights are read again, from the channel or from the checkpoint that it
refers to. At any time one group of tensors is there, twice, and the weight file that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Delta, Record, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError
from deltasync.kernels import cpu_diff
from deltasync.publish.shadow import Snapshot
from deltasync.tensors import TensorSpec, fingerprint

CODEC = "packed"
"""Of folds: it decodes without old bits, can be undone, and is the smaller one where much has changed."""

GROUP_ELEMENTS = 1 << 25
"""Elements whose changes make a payload, unless a single tensor has more."""


class Change(NamedTuple):
    """How one tensor differs from the full weights. Bits are flat and unsigned; `index_K` is ascending."""

    spec: TensorSpec
    old_N: np.ndarray
    new_N: np.ndarray
    index_K: np.ndarray
    step_K: np.ndarray
    fingerprint: int  # of the new bits


def payloads_of(reader: ChannelReader, base: Stored, version: int, snapshot: Snapshot) -> Iterator[tuple[Encoded, int]]:
    """Yield the payloads of the fold from full weights to a version, and how many elements each changes; each is proved.

    Raises:
        FormatError, MissingVersionError, StoreError: the weights of `base` cannot be read.
        CorruptDataError: a payload does not decode to the version's bits, or memory is damaged.
    """
    for group in _groups(reader, base, snapshot):
        encoded = _encode(group, version, base.record.version)
        _prove(group, encoded.to_bytes(), version, base.record.version)
        yield encoded, sum(change.index_K.size for change in group)


def _groups(reader: ChannelReader, base: Stored, snapshot: Snapshot) -> Iterator[list[Change]]:
    group: list[Change] = []
    size = 0
    for name, old_N, _ in payloads.weights(reader, base):
        new_N = np.empty_like(old_N)
        digest = snapshot.take(name, new_N)
        index_K, step_K = cpu_diff.diff(old_N, new_N)
        if index_K.size:
            group.append(Change(reader.specs[name], old_N, new_N, index_K, step_K, digest))
            size += new_N.size
        if size >= GROUP_ELEMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(group: list[Change], version: int, base_version: int) -> Encoded:
    encoder = codec.get(CODEC).encoder()
    for change in group:
        encoder.add(change.spec, change.index_K, change.step_K, change.new_N, fingerprint.to_hex(change.fingerprint))
    return encoder.finish(version, base_version)


def _prove(group: list[Change], data: bytes, version: int, base_version: int) -> None:
    """Decode a payload as a reader does, and compare the bits that it gives."""
    changes = {change.spec.name: change for change in group}
    record = Record(
        run_id="-",
        kind="fold",
        version=version,
        epoch="-",
        created_at="-",
        base=Version(base_version, "-", "-"),
        delta=Delta(codec=CODEC, changed=sum(change.index_K.size for change in group)),
    )
    name = f"The fold from version {base_version} to {version}"
    specs = {change.spec.name: change.spec for change in group}
    for patch, digest in payloads.decode(record, [(name, data)], specs, lambda tensor: changes[tensor].old_N.copy()):
        change = changes.pop(patch.name)
        bits_N = change.old_N.copy()
        patch.apply(bits_N)
        if digest != change.fingerprint or not np.array_equal(bits_N, change.new_N):
            raise CorruptDataError(f"{name} decodes to other bits of {patch.name} than were encoded; it was not stored.")
    if changes:
        raise CorruptDataError(f"{name} lacks {', '.join(sorted(changes)[:5])}; it was not stored.")
