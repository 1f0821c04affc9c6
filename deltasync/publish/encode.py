"""ENCODE: choose a codec, and turn the changes of a version into payloads that the reader's code has decoded again.

With `codec="auto"` a publisher takes the codec with which a replica has the version sooner. All numbers for that come from
publishing: the link is timed while objects are stored, codecs while groups are encoded and proved. A codec that is not in
use encodes a group now and then, whose payload is thrown away.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, Self

import numpy as np

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Delta, File, Record, VersionId
from deltasync.channel.record import INLINE_BYTES
from deltasync.codec.base import Encoded, NewBits
from deltasync.config import AUTO
from deltasync.errors import CorruptDataError
from deltasync.publish.job import Job
from deltasync.publish.writes import MeteredStore
from deltasync.tensors import Delta as Changes

_DEFAULT, _SMALLER = "packed", "context"
_PROBES, _PROBE_EVERY = 3, 50  # other codecs are tried in the first 3 versions, and in every 50th


class Cost(NamedTuple):
    """The cost of encoding one group."""

    changed: int
    bytes: int
    encode_s: float
    prove_s: float
    decode_s: float  # what a replica takes: proving without restoring the old bits


class Choice:
    """Chooses the codec of each delta.

    Args:
        codec: The setting.
        store: Where deltas go. None makes `auto` mean `packed`, for ranks that would have to agree.

    Attributes:
        codecs: The codecs to choose from.
        groups: Number of groups of the last delta.
    """

    def __init__(self, codec: str, store: MeteredStore | None) -> None:
        fixed = _DEFAULT if codec == AUTO else codec
        self.codecs = (_DEFAULT, _SMALLER) if codec == AUTO and store is not None else (fixed,)
        self.groups = 1
        self._store = store
        self._costs: dict[str, deque[Cost]] = {name: deque(maxlen=_PROBES) for name in self.codecs}

    def best(self) -> str:
        """Return the codec by which the next delta is served soonest, as far as is known."""
        byte_s = None if self._store is None else self._store.byte_s
        if byte_s is None or not all(self._costs.values()):
            return self.codecs[0]
        return min(self.codecs, key=lambda name: self._served_s(name, byte_s))

    def probes(self, version: int) -> list[str]:
        """Return the other codecs, if it is time to try them."""
        best, is_due = self.best(), version % _PROBE_EVERY == 0
        return [name for name, costs in self._costs.items() if name != best and (is_due or len(costs) < _PROBES)]

    def took(self, codec: str, cost: Cost) -> None:
        """Note what a group cost, unless nothing changed in it."""
        if cost.changed:
            self._costs[codec].append(cost)

    def _served_s(self, codec: str, byte_s: float) -> float:
        """Estimate the seconds per changed element until a replica has decoded it.

        Groups are stored while they are proved and while others are encoded, and fetched while others are stored. Their
        record is stored once all are stored and proved. A replica is assumed to have the publisher's link and speed.
        """
        costs = self._costs[codec]
        # The least: others were measured while a kernel was being compiled, or the machine was busy.
        encode_s = min(cost.encode_s / cost.changed for cost in costs)
        prove_s = min(cost.prove_s / cost.changed for cost in costs)
        decode_s = min(cost.decode_s / cost.changed for cost in costs)
        link_s = byte_s * sum(cost.bytes for cost in costs) / sum(cost.changed for cost in costs)
        last = 1 / self.groups  # the share of the last group, and of the first
        stored_s = max(encode_s * last + link_s, encode_s + prove_s * (1 - last) + link_s * last, encode_s + prove_s)
        return stored_s + link_s * last + decode_s


GROUP_CHANGED = 1 << 20
"""Changed elements that are encoded, and stored as a part, by themselves."""


class Payloads(NamedTuple):
    """The payloads that one rank encoded for a version."""

    files: list[Future[File]]  # parts, which are being stored
    inline: Encoded | None  # the payload that goes into the record
    bytes: int  # of all payloads
    codec: str


def encode_groups(job: Job, choice: Choice, put: Callable[[int, bytes], Future[File]], *, inline: bool = True) -> Payloads:
    """Encode and prove a delta group by group, while its parts are stored.

    The job's shadow must not change meanwhile. `put` begins to store a part, by its number from 1 on. With `inline` the last
    group may go into the record.

    Raises:
        CorruptDataError: a payload does not decode to what was encoded.
    """
    files: list[Future[File]] = []
    in_record: Encoded | None = None
    payload_bytes, codec_name = 0, ""
    groups = list(job.delta.split(GROUP_CHANGED))
    for group in groups:
        if not codec_name:
            for name in choice.probes(job.version):
                _, data, encode_s = _timed_encode(job, name, group)
                _timed_prove(job, name, group, data, encode_s, choice)
            codec_name = choice.best()
        encoded, data, encode_s = _timed_encode(job, codec_name, group)
        if inline and group is groups[-1] and len(data) <= INLINE_BYTES:
            in_record = encoded
        else:
            files.append(put(len(files) + 1, data))
        _timed_prove(job, codec_name, group, data, encode_s, choice)  # while it is on its way, which takes longer
        payload_bytes += len(data)
    choice.groups = len(files) + (in_record is not None) or 1
    return Payloads(files, in_record, payload_bytes, codec_name or choice.best())


def _timed_encode(job: Job, codec_name: str, group: Changes) -> tuple[Encoded, bytes, float]:
    began_s = time.perf_counter()
    encoded = encode(codec_name, group, Versions.of(job))
    data = encoded.to_bytes()
    return encoded, data, time.perf_counter() - began_s


def _timed_prove(job: Job, codec_name: str, group: Changes, data: bytes, encode_s: float, choice: Choice) -> None:
    began_s = time.perf_counter()
    restore_s = prove(codec_name, group, Versions.of(job), data)
    prove_s = time.perf_counter() - began_s
    choice.took(codec_name, Cost(group.changed, len(data), encode_s, prove_s, prove_s - restore_s))


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


def prove(codec_name: str, delta: Changes, versions: Versions, data: bytes) -> float:
    """Decode a payload as a reader does, by the record that will name it, and compare it with the encoded steps.

    Returns:
        The seconds of it that were spent on restoring old bits, which a reader has.

    Raises:
        CorruptDataError: they differ.
    """
    layout, restore_s = delta.layout, 0.0
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
        nonlocal restore_s
        began_s = time.perf_counter()
        new_N, start = versions.new(name)
        bits_N = np.empty(layout.specs[name].element_count, new_N.dtype)
        bits_N[start : start + new_N.size] = new_N  # no block is outside
        steps = delta.of(name)
        bits_N[steps.at_K] -= steps.data_K
        restore_s += time.perf_counter() - began_s
        return bits_N

    what = f"The payload from version {versions.base} to {versions.to}"
    found, digests = payloads.decode(record, [(what, data)], layout, old)
    named = {tensor: versions.fingerprints[tensor] for tensor in delta.counts()}
    if digests != named or not _same(found, delta):
        raise CorruptDataError(f"{what} decodes to other bits than were encoded; no record names it.")
    return restore_s


def _same(found: Changes, delta: Changes) -> bool:
    """Whether two deltas have the same steps."""
    return found.steps.keys() == delta.steps.keys() and all(
        np.array_equal(one, other)
        for width, steps in delta.steps.items()
        for one, other in zip(found.steps[width], steps, strict=True)
    )
