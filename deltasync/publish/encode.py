"""ENCODE: turn the changes of a version into payloads that the reader's code has decoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Self

import numpy as np

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Delta, File, Record, VersionId
from deltasync.channel.record import INLINE_BYTES
from deltasync.codec.base import Encoded, NewBits
from deltasync.errors import CorruptDataError
from deltasync.publish.job import Job
from deltasync.tensors import Delta as Changes

GROUP_CHANGED = 1 << 20
"""Changed elements that are encoded, and stored as a part, by themselves."""


class Payloads(NamedTuple):
    """The payloads that one rank encoded for a version."""

    files: list[Future[File]]  # parts, which are being stored
    inline: Encoded | None  # the payload that goes into the record
    bytes: int  # of all payloads


def encode_groups(job: Job, codec_name: str, put: Callable[[int, bytes], Future[File]], *, inline: bool = True) -> Payloads:
    """Encode and prove a delta group by group, while its parts are stored.

    The job's shadow must not change meanwhile. `put` begins to store a part, by its number from 1 on. With `inline` the last
    group may go into the record.

    Raises:
        CorruptDataError: a payload does not decode to what was encoded.
    """
    files: list[Future[File]] = []
    in_record: Encoded | None = None
    payload_bytes, versions = 0, Versions.of(job)
    groups = list(job.delta.split(GROUP_CHANGED))
    for group in groups:
        encoded = encode(codec_name, group, versions)
        data = encoded.to_bytes()
        if inline and group is groups[-1] and len(data) <= INLINE_BYTES:
            in_record = encoded
        else:
            files.append(put(len(files) + 1, data))
        prove(codec_name, group, versions, data)  # while it is on its way, which takes longer
        payload_bytes += len(data)
    return Payloads(files, in_record, payload_bytes)


class Versions(NamedTuple):
    """The versions that a payload leads to and from, and the bits and fingerprints of the first one.

    Attributes:
        to: The version after the delta.
        base: The version before it.
        new: Returns the range of a tensor that is held, with the bits of `to`, and its first flat index.
        fingerprints: Those of the whole tensors at `to`.
    """

    to: int
    base: int
    new: NewBits
    fingerprints: Mapping[str, int]

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the version of a job and the one before, while the job's shadow has its bits."""
        shadow = job.shadow
        assert job.fingerprints is not None
        return cls(job.version, job.version - 1, lambda name: (shadow.bits[name], shadow.ranges[name][0]), job.fingerprints)


def encode(codec_name: str, delta: Changes, versions: Versions) -> Encoded:
    """Return the payload of steps."""
    return codec.get(codec_name).encode(delta, versions.new, versions.fingerprints, versions.to, versions.base)


def prove(codec_name: str, delta: Changes, versions: Versions, data: bytes) -> None:
    """Decode a payload as a reader does, by the record that will name it, and compare it with the encoded steps.

    Raises:
        CorruptDataError: they differ.
    """
    layout = delta.layout
    record = Record(
        run_id="-",
        kind="delta",
        version=versions.to,
        epoch="-",
        created_at="-",
        base=VersionId(versions.base, "-", "-"),
        delta=Delta(codec=codec_name, changed=delta.changed),
    )

    def old(name: str) -> np.ndarray:
        new_N, start = versions.new(name)
        bits_N = np.empty(layout.specs[name].element_count, new_N.dtype)
        bits_N[start : start + new_N.size] = new_N  # no block is outside
        steps = delta.of(name)
        bits_N[steps.at_K] -= steps.data_K
        return bits_N

    what = f"The payload from version {versions.base} to {versions.to}"
    found, digests = payloads.decode(record, [(what, data)], layout, old)
    named = {tensor: versions.fingerprints[tensor] for tensor in delta.counts()}
    if digests != named or not _same(found, delta):
        raise CorruptDataError(f"{what} decodes to other bits than were encoded; no record names it.")


def _same(found: Changes, delta: Changes) -> bool:
    """Whether two deltas have the same steps."""
    return found.steps.keys() == delta.steps.keys() and all(
        np.array_equal(one, other)
        for width, steps in delta.steps.items()
        for one, other in zip(found.steps[width], steps, strict=True)
    )
