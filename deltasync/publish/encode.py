"""ENCODE: turn groups of changed tensors into payloads, each proved by the reader's code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Delta, File, Record, Version
from deltasync.channel.record import INLINE_BYTES
from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError
from deltasync.publish.choose import Choice, Cost
from deltasync.publish.job import Group, Job
from deltasync.publish.shadow import Shadow
from deltasync.tensors import Patch, fingerprint


class Payloads(NamedTuple):
    """What one rank encoded of a version."""

    files: list[Future[File]]  # parts, which are being stored
    inline: Encoded | None  # the payload that goes into the record
    bytes: int  # of all payloads
    codec: str


def encode_groups(job: Job, choice: Choice, put: Callable[[int, bytes], Future[File]], *, inline: bool = True) -> Payloads:
    """Encode and prove a delta group by group, while its parts are stored.

    Of the job's shadow only tensors that come later may change meanwhile. `put` begins to store a part, by its number from 1
    on. With `inline` the last group may go into the record.

    Raises:
        AbortedError: the stream failed.
        CorruptDataError: a payload does not decode to what was encoded.
    """
    files: list[Future[File]] = []
    in_record: Encoded | None = None
    payload_bytes, codec_name = 0, ""
    for group, last in job.groups():
        if not group:
            continue
        if not codec_name:
            for name in choice.probes(job.version):
                _, data, encode_s = _timed_encode(job, name, group)
                _timed_prove(job, name, group, data, encode_s, choice)
            codec_name = choice.best()
        encoded, data, encode_s = _timed_encode(job, codec_name, group)
        if inline and last and len(data) <= INLINE_BYTES:
            in_record = encoded
        else:
            files.append(put(len(files) + 1, data))
        _timed_prove(job, codec_name, group, data, encode_s, choice)  # while it is on its way, which takes longer
        payload_bytes += len(data)
    choice.groups = len(files) + (in_record is not None) or 1
    return Payloads(files, in_record, payload_bytes, codec_name or choice.best())


def _timed_encode(job: Job, codec_name: str, group: Group) -> tuple[Encoded, bytes, float]:
    began_s = time.perf_counter()
    encoded = encode(job, codec_name, group, job.version - 1)
    data = encoded.to_bytes()
    return encoded, data, time.perf_counter() - began_s


def _timed_prove(job: Job, codec_name: str, group: Group, data: bytes, encode_s: float, choice: Choice) -> None:
    began_s = time.perf_counter()
    restore_s = prove(job, codec_name, group, data)
    prove_s = time.perf_counter() - began_s
    changed = sum(patch.changed for patch in group)
    choice.took(codec_name, Cost(changed, len(data), encode_s, prove_s, prove_s - restore_s))


def encode(job: Job, codec_name: str, patches: Group, base_version: int) -> Encoded:
    """Return the payload of steps that lead from a base version to the job's version, whose bits its shadow holds."""
    shadow = job.shadow
    encoder = codec.get(codec_name).encoder()
    for patch in patches:
        assert patch.index_K is not None
        digest = fingerprint.to_hex(job.fingerprints[patch.name])
        new, (start, _) = shadow.bits[patch.name], shadow.ranges[patch.name]
        encoder.add(shadow.specs[patch.name], patch.index_K, patch.data, new, digest, start)
    return encoder.finish(job.version, base_version)


def compile_ahead(job: Job, codec_names: Iterable[str]) -> None:
    """Compare, encode and prove a change for each dtype of a job's channel, so that no real change waits for a compiler."""
    zeros = {
        f"{dtype}{shape}": torch.zeros(shape, dtype=getattr(torch, dtype))
        for dtype in {spec.dtype for spec in job.shadow.specs.values()}
        for shape in ((256, 256), (1024,))  # the first so large that `context` has tiles of it
    }
    shadow = Shadow.whole(zeros)
    new = [(name, (torch.arange(zero.numel()) % 64 == 1).reshape(zero.shape).to(zero.dtype)) for name, zero in zeros.items()]
    steps = shadow.advance(new, "keep", 0)
    following = Job(serial=0, version=job.version + 1, channel=job.channel, shadow=shadow, fingerprints=shadow.fingerprints)
    group = [*steps.values()]
    for codec_name in codec_names:
        prove(following, codec_name, group, encode(following, codec_name, group, job.version).to_bytes())


def prove(job: Job, codec_name: str, patches: Group, data: bytes) -> float:
    """Decode a payload as a reader does and compare it with what was encoded.

    Returns:
        The seconds of it that were spent on restoring old bits, which a reader has.

    Raises:
        CorruptDataError: they differ.
    """
    left, shadow = {patch.name: patch for patch in patches}, job.shadow
    record = Record(
        run_id="-",
        kind="delta",
        version=job.version,
        epoch="-",
        created_at="-",
        base=Version(job.version - 1, "-", "-"),
        delta=Delta(codec=codec_name, changed=sum(patch.changed for patch in patches)),
    )
    name = f"The payload of version {job.version}"

    restore_s = 0.0

    def old(name: str) -> np.ndarray:
        nonlocal restore_s
        began_s = time.perf_counter()
        bits_N, (start, stop) = np.empty(shadow.specs[name].element_count, shadow.bits[name].dtype), shadow.ranges[name]
        bits_N[start:stop] = shadow.bits[name]  # no block is outside
        bits_N[left[name].index_K] -= left[name].data
        restore_s += time.perf_counter() - began_s
        return bits_N

    for found, digest in payloads.decode(record, [(name, data)], shadow.specs, old):
        patch = left.pop(found.name, None)
        if patch is None or digest != job.fingerprints[patch.name] or not _same(found, patch, shadow):
            raise CorruptDataError(f"{name} decodes to other bits of {found.name} than were encoded; nothing was published.")
    if left:
        raise CorruptDataError(f"{name} lacks {', '.join(sorted(left)[:5])}; nothing was published.")
    return restore_s


def _same(found: Patch, patch: Patch, shadow: Shadow) -> bool:
    new, (start, _) = shadow.bits[patch.name], shadow.ranges[patch.name]
    if found.index_K is None:
        return np.array_equal(found.data, new)
    assert patch.index_K is not None
    expected = new[patch.index_K - start] if found.absolute else patch.data
    return np.array_equal(found.index_K, patch.index_K) and np.array_equal(found.data, expected)
