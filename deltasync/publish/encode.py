"""ENCODE: groups of changed tensors to payloads, each proved by the reader's code."""

from __future__ import annotations

import functools
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
    inline: Encoded | None  # what goes into the record
    bytes: int  # size of all payloads
    patches: dict[str, Patch]  # all steps, if they were asked for
    codec: str


def encode_groups(
    job: Job, choice: Choice, put: Callable[[int, bytes], Future[File]], *, inline: bool = True, keep: bool = False
) -> Payloads:
    """Encode and prove a delta group by group; its parts are stored meanwhile.

    The job's shadow does not change meanwhile but by the tensors that come later. `put` begins to store a part, by its
    number from 1 on. With `inline` the last group may go into the record, with `keep` the patches are returned.

    Raises:
        AbortedError: the stream failed.
        CorruptDataError: a payload does not decode to what was encoded.
    """
    files: list[Future[File]] = []
    kept: dict[str, Patch] = {}
    in_record: Encoded | None = None
    payload_bytes, codec_name = 0, ""

    def send(may_be_inline: bool, encoded: Encoded, data: bytes) -> None:
        nonlocal in_record
        if may_be_inline and len(data) <= INLINE_BYTES:
            in_record = encoded
        else:
            files.append(put(len(files) + 1, data))

    for group, last in job.groups():
        if not group:
            continue
        if not codec_name:
            for name in choice.probes(job.version):
                _encode_and_prove(job, choice, name, group)
            codec_name = choice.best()
        payload_bytes += _encode_and_prove(job, choice, codec_name, group, functools.partial(send, inline and last))
        kept |= {patch.name: patch for patch in group} if keep else {}
    choice.groups = len(files) + (in_record is not None) or 1
    return Payloads(files, in_record, payload_bytes, kept, codec_name or choice.best())


def _encode_and_prove(
    job: Job, choice: Choice, codec_name: str, group: Group, send: Callable[[Encoded, bytes], None] = lambda *_: None
) -> int:
    """Bytes of a group's payload, which is proved while it is on its way: that takes longer."""
    began_s = time.perf_counter()
    encoded = encode(job, codec_name, group, job.version - 1)
    data = encoded.to_bytes()
    encoded_s = time.perf_counter()
    send(encoded, data)
    sent_s = time.perf_counter()
    prove(job, codec_name, group, data)
    changed = sum(patch.changed for patch in group)
    choice.took(codec_name, Cost(changed, len(data), encoded_s - began_s, time.perf_counter() - sent_s))
    return len(data)


def encode(job: Job, codec_name: str, patches: Group, base_version: int) -> Encoded:
    """The payload of these steps, which lead from a version to the job's, whose bits its shadow holds."""
    shadow = job.shadow
    encoder = codec.get(codec_name).encoder(shadow.element_count)
    for patch in patches:
        assert patch.index_K is not None
        digest = fingerprint.to_hex(job.fingerprints[patch.name])
        new, (start, _) = shadow.bits[patch.name], shadow.ranges[patch.name]
        encoder.add(shadow.specs[patch.name], patch.index_K, patch.data, new, digest, start)
    return encoder.finish(job.version, base_version)


def compile_ahead(job: Job, codec_names: Iterable[str]) -> None:
    """Compare, encode and prove a change for each dtype of a job's channel, so that no real one waits for a compiler."""
    zeros = {}
    for dtype in {spec.dtype for spec in job.channel.specs.values()}:
        for shape in ((256, 256), (1024,)):  # the first so large that `context` has tiles of it
            zeros[f"{dtype}{shape}"] = torch.zeros(shape, dtype=getattr(torch, dtype))
    shadow = Shadow.whole(zeros)
    new = [(name, (torch.arange(zero.numel()) % 64 == 1).reshape(zero.shape).to(zero.dtype)) for name, zero in zeros.items()]
    steps = shadow.advance(new, "keep", 0)
    following = Job(serial=0, version=job.version + 1, channel=job.channel, shadow=shadow, fingerprints=shadow.fingerprints)
    group = [*steps.values()]
    for codec_name in codec_names:
        prove(following, codec_name, group, encode(following, codec_name, group, job.version).to_bytes())


def prove(job: Job, codec_name: str, patches: Group, data: bytes) -> None:
    """Decode a payload as a reader does, and hold it to what was encoded.

    Raises:
        CorruptDataError: it is anything else.
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

    def old(name: str) -> np.ndarray:
        bits_N, (start, stop) = np.empty(shadow.specs[name].element_count, shadow.bits[name].dtype), shadow.ranges[name]
        bits_N[start:stop] = shadow.bits[name]  # no block is outside
        bits_N[left[name].index_K] -= left[name].data
        return bits_N

    for found, digest in payloads.decode(record, [(name, data)], shadow.specs, old):
        patch = left.pop(found.name, None)
        if patch is None or digest != job.fingerprints[patch.name] or not _same(found, patch, shadow):
            raise CorruptDataError(f"{name} decodes to other bits of {found.name} than were encoded; nothing was published.")
    if left:
        raise CorruptDataError(f"{name} lacks {', '.join(sorted(left)[:5])}; nothing was published.")


def _same(found: Patch, patch: Patch, shadow: Shadow) -> bool:
    new, (start, _) = shadow.bits[patch.name], shadow.ranges[patch.name]
    if found.index_K is None:
        return np.array_equal(found.data, new)
    assert patch.index_K is not None
    expected = new[patch.index_K - start] if found.absolute else patch.data
    return np.array_equal(found.index_K, patch.index_K) and np.array_equal(found.data, expected)
