"""ENCODE: turn the changes of a version into payloads that the reader's code has decoded again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future

import numpy as np
import torch

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import DeltaFiles, File, Record, VersionId
from deltasync.channel.record import INLINE_BYTES
from deltasync.codec.base import Encoded, NewBits, RangeBits
from deltasync.errors import CorruptDataError, StageError, get_logger
from deltasync.publish.pending import Pending
from deltasync.tensors import Delta, Layout

logger = get_logger(__name__)

GROUP_CHANGED = 1 << 20
"""Changed elements that are encoded, and stored as a part, by themselves."""

_BESIDE_INLINE = 8
"""Parts beside which a payload may go into the record, so that it costs no further request. With more of them it
would not be noticed, and whoever reads a record only to plan reads it, too.
"""


class GroupEncoder:
    """Encodes and proves deltas group by group: where the shadow is, else on the host.

    Args:
        codec_name: The codec.
    """

    def __init__(self, codec_name: str) -> None:
        self.codec_name = codec_name

    def encode(
        self, job: Pending, put: Callable[[int, bytes], Future[File]], *, inline: bool = True
    ) -> tuple[list[Future[File]], Encoded | None, int]:
        """Encode and prove a delta. Return its parts, which are being stored, the payload for the record, and
        all bytes.

        The job's shadow must not change meanwhile. `put` begins to store a part, by its number from 1 on.
        With `inline` the last group may go into the record.

        Raises:
            CorruptDataError: a payload does not decode to what was encoded, or the shadow has been damaged.
        """
        assert job.fingerprints is not None
        number = itertools.count(1)

        def put_next(data: bytes) -> Future[File]:  # what the host stores after a device gets other keys
            return put(next(number), data)

        try:
            job.shadow.audit()
            there = job.shadow.encode(
                self.codec_name, job.delta, job.fingerprints.of, job.version, GROUP_CHANGED
            )
            if there is not None:
                return _stored(there, put_next, inline=inline)
        except (torch.OutOfMemoryError, StageError) as error:
            logger.warning("Version %d is encoded on the host, which takes longer: %s", job.version, error)
        return _stored(self._encoded(job), put_next, inline=inline)

    def _encoded(self, job: Pending) -> Iterator[tuple[Encoded, bytes]]:
        shadow, delta = job.shadow, job.delta.host()
        assert job.fingerprints is not None

        def new(name: str) -> tuple[np.ndarray, int]:
            return shadow.bits[name], shadow.ranges[name][0]

        for piece in delta.split(GROUP_CHANGED):
            group = delta.part(piece)
            yield encode(self.codec_name, group, new, job.fingerprints, job.version, job.version - 1, job)


def _stored(
    found: Iterable[tuple[Encoded, bytes]], put: Callable[[bytes], Future[File]], *, inline: bool
) -> tuple[list[Future[File]], Encoded | None, int]:
    """Begin to store all payloads but the last one, and that too, unless it fits into the record, and few
    precede it.
    """
    files, size, last = list[Future[File]](), 0, None
    for encoded, data in found:
        if last is not None:
            files.append(put(last[1]))
        last, size = (encoded, data), size + len(data)
        if not inline or len(data) > INLINE_BYTES or len(files) > _BESIDE_INLINE:
            files.append(put(data))
            last = None
    return files, None if last is None else last[0], size


def encode(
    codec_name: str,
    delta: Delta,
    new: NewBits,
    fingerprints: Mapping[str, int],
    version: int,
    base: int,
    job: Pending | None = None,
) -> tuple[Encoded, bytes]:
    """Return the payload of steps from version `base` on, and its bytes, which were decoded as a reader does.

    `new` returns the range of a tensor that is held, with the bits of the version, and its first flat index;
    `fingerprints` are those of the whole tensors at the version. With the `job` that the version is of, the
    decoded steps must lead from the old bits to bits of these fingerprints; otherwise they must be those that
    were encoded.

    Raises:
        CorruptDataError: the payload decodes to something else.
    """
    encoded = codec.get(codec_name).encode(delta, new, fingerprints, version, base)
    data, layout, what = encoded.to_bytes(), delta.layout, f"The payload from version {base} to {version}"

    def old(name: str) -> RangeBits:
        new_N, start = new(name)
        return RangeBits(new_N, start, layout.specs[name].element_count, delta.of(name))

    found, digests = payloads.decode(
        record_of(codec_name, version, base, delta.changed), [(what, data)], layout, old
    )
    gains = None if job is None else job.shadow.gains(found)
    if job is None or gains is None:
        are_same = found.steps.keys() == delta.steps.keys() and all(
            np.array_equal(one, other)
            for width, steps in delta.steps.items()
            for one, other in zip(found.steps[width], steps, strict=True)
        )
    else:
        are_same = not differing_gains(layout, delta, gains, job.gains)
    if not are_same or digests != {tensor: fingerprints[tensor] for tensor in delta.counts()}:
        raise CorruptDataError(f"{what} decodes to other bits than were encoded; no record names it.")
    return encoded, data


def differing_gains(
    layout: Layout, delta: Delta, found: Mapping[int, np.ndarray], wanted: Mapping[int, np.ndarray]
) -> list[str]:
    """Return the tensors whose fingerprints gain something else by a part of a version than by all of it.

    A tensor that the part changes, it changes as the version does; others gain nothing.
    """
    wrong: list[str] = []
    for width, vector in layout.vectors.items():
        none_T = np.zeros(len(vector.specs), np.uint64)
        changed_T = vector.count(delta.steps[width].at_K) > 0 if width in delta.steps else none_T > 0
        wanted_T = np.where(changed_T, wanted.get(width, none_T), none_T)
        wrong += [vector.names[t] for t in np.flatnonzero(found.get(width, none_T) != wanted_T).tolist()]
    return wrong


def record_of(codec_name: str, version: int, base: int, changed: int) -> Record:
    """Return what a reader of payloads needs of the record that will name them."""
    return Record(
        run_id="-",
        kind="delta",
        version=version,
        epoch="-",
        created_at="-",
        base=VersionId(base, "-", "-"),
        delta=DeltaFiles(codec=codec_name, changed=changed),
    )
