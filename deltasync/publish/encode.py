"""ENCODE: turn the changes of a version into payloads that the reader's code has decoded again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Delta, File, Record, VersionId
from deltasync.channel.record import INLINE_BYTES
from deltasync.codec.base import Encoded, NewBits, RangeBits
from deltasync.errors import CorruptDataError, get_logger
from deltasync.publish.pending import Pending
from deltasync.tensors import Delta as Changes

if TYPE_CHECKING:
    from deltasync.codec.device import Piece
    from deltasync.publish.encode_device import DeviceCoder
    from deltasync.tensors.device import DeviceDelta

logger = get_logger(__name__)

GROUP_CHANGED = 1 << 20
"""Changed elements that are encoded, and stored as a part, by themselves."""


class Payloads(NamedTuple):
    """The payloads that one rank encoded for a version."""

    files: list[Future[File]]  # parts, which are being stored
    inline: Encoded | None  # the payload that goes into the record
    bytes: int  # of all payloads


class GroupEncoder:
    """Encodes and proves deltas group by group: on the device where they are, else on the host.

    Args:
        codec_name: The codec.
    """

    def __init__(self, codec_name: str) -> None:
        self.codec_name = codec_name
        self._device: DeviceCoder | None = None

    def encode(self, job: Pending, put: Callable[[int, bytes], Future[File]], *, inline: bool = True) -> Payloads:
        """Encode and prove a delta, while its parts are stored.

        The job's shadow must not change meanwhile. `put` begins to store a part, by its number from 1 on. With `inline` the
        last group may go into the record.

        Raises:
            CorruptDataError: a payload does not decode to what was encoded.
        """
        files: list[Future[File]] = []
        in_record: Encoded | None = None
        stored: list[bytes] = []
        count, payloads_ = self._payloads(job)
        for encoded, prove_ in payloads_:
            stored.append(encoded.to_bytes())
            if inline and len(stored) == count and len(stored[-1]) <= INLINE_BYTES:
                in_record = encoded
            else:
                files.append(put(len(files) + 1, stored[-1]))
            if prove_ is not None:
                prove_(stored[-1])  # while it is on its way, which takes longer
        if job.on_device is not None and self._device is not None:
            self._prove_on_device(job, stored)
        return Payloads(files, in_record, sum(map(len, stored)))

    def _payloads(self, job: Pending) -> tuple[int, Iterator[tuple[Encoded, Callable[[bytes], None] | None]]]:
        """Return how many payloads a job has, and each with what proves it, None if that is done for all at once."""
        delta = job.on_device
        if delta is None or self.codec_name == "raw":
            self._device = None
            groups, versions = list(job.delta.split(GROUP_CHANGED)), Versions.of(job)
            proven = (
                (encode(self.codec_name, group, versions), functools.partial(prove, self.codec_name, group, versions))
                for group in groups
            )
            return len(groups), proven
        from deltasync.codec.device import split
        from deltasync.publish.encode_device import DeviceCoder

        if self._device is None or self._device.layout is not delta.layout:
            self._device = DeviceCoder(delta)
        pieces = list(split(delta, GROUP_CHANGED))
        return len(pieces), ((encoded, None) for encoded in self._on_device(job, delta, pieces))

    def _on_device(self, job: Pending, delta: DeviceDelta, pieces: Sequence[Piece]) -> Iterator[Encoded]:
        import torch

        assert self._device is not None and job.fingerprints is not None
        done = 0
        try:
            for encoded in self._device.encode(self.codec_name, delta, job.fingerprints.of, job.version, pieces):
                yield encoded
                done += 1
        except torch.OutOfMemoryError as error:
            logger.warning("Version %d is encoded on the host: %s", job.version, error)
            for group in itertools.islice(job.delta.split(GROUP_CHANGED), done, None):
                yield encode(self.codec_name, group, Versions.of(job))

    def _prove_on_device(self, job: Pending, stored: Sequence[bytes]) -> None:
        import torch

        assert self._device is not None and job.on_device is not None and job.fingerprints is not None
        try:
            record = record_of(self.codec_name, job.version, job.version - 1, job.on_device.changed)
            named = [(f"Payload {number} of version {job.version}", data) for number, data in enumerate(stored, 1)]
            self._device.prove(record, job.on_device, job.fingerprints.of, named)
        except torch.OutOfMemoryError as error:
            logger.warning("Version %d is proven on the host: %s", job.version, error)
            for group, data in zip(job.delta.split(GROUP_CHANGED), stored, strict=True):
                prove(self.codec_name, group, Versions.of(job), data)


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
    def of(cls, job: Pending) -> Self:
        """Return the version of a job and the one before, while the job's shadow has its bits."""
        shadow = job.shadow
        assert job.fingerprints is not None
        return cls(job.version, job.version - 1, lambda name: (shadow.bits[name], shadow.ranges[name][0]), job.fingerprints)


def encode(codec_name: str, delta: Changes, versions: Versions) -> Encoded:
    """Return the payload of steps."""
    return codec.get(codec_name).encode(delta, versions.new, versions.fingerprints, versions.to, versions.base)


def record_of(codec_name: str, version: int, base: int, changed: int) -> Record:
    """Return what a reader of payloads needs of the record that will name them."""
    return Record(
        run_id="-",
        kind="delta",
        version=version,
        epoch="-",
        created_at="-",
        base=VersionId(base, "-", "-"),
        delta=Delta(codec=codec_name, changed=changed),
    )


def prove(codec_name: str, delta: Changes, versions: Versions, data: bytes) -> None:
    """Decode a payload as a reader does, by the record that will name it, and compare it with the encoded steps.

    Raises:
        CorruptDataError: they differ.
    """
    layout = delta.layout
    record = record_of(codec_name, versions.to, versions.base, delta.changed)

    def old(name: str) -> RangeBits:
        new_N, start = versions.new(name)
        return RangeBits(new_N, start, layout.specs[name].element_count, delta.of(name))

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
