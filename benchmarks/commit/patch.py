"""Write one delta into the live weights of a vLLM model: by deltasync, by vLLM's own sparse path, by a plain
scatter.

All run in one process and on the same memory, one after the other. After each the bits are compared with the
published ones, and then the old ones are restored.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common import peak_extra_bytes, timed
from deltasync.channel import payloads
from deltasync.channel.documents import sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.following import LiveWeights
from deltasync.kernels import native
from deltasync.live import LiveMemory, Segment, model_fingerprint
from deltasync.serve import load_plan, proof
from deltasync.stores import open_store
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import tensor_of
from vllm_plugin.load import layers

PEERS = {"default": {}, "unique indices unchecked": {"validate_unique_indices": False}}
"""Settings of vLLM's `load_checkpoint_weight_patches`."""

Write = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Live memory, positions in it, bit patterns there before and after the delta."""


def measure(
    model: torch.nn.Module, channel: str, old_sha256: dict[str, str], new_sha256: dict[str, str], repeats: int
) -> dict[str, Any]:
    """Measure commits of version 2 into a model that holds version 1, and compare the bits.

    `channel` has the newest version 2; the digests are those of each tensor's bits at versions 1 and 2. Each
    measurement is repeated `repeats` times after a first one.

    Returns seconds of deltasync's stages, of vLLM's path for each of `PEERS`, and of the plain scatter: of
    the first time, which may compile or ask for memory, the median of the others and the best; the bytes that
    stay staged on the device until the commit is confirmed; the extra memory at its peak, of staging and of
    vLLM's path.
    """
    reader = ChannelReader(open_store(channel))
    segments = load_plan.record(model, reader.specs, layers.LOADER).segments
    memory = LiveMemory(reader.specs, segments)
    proof.check_coverage(reader.specs, [memory.regions])
    memory.audit()
    follower = LiveWeights(reader, memory)
    first, second = reader.numbered(1), reader.numbered(2)
    if first.record.fingerprint == f"{model_fingerprint(memory.fingerprints):016x}":
        follower.identified(first)
    _check(memory, old_sha256, "loading")

    rounds = []
    for number in range(repeats + 1):
        times: dict[str, float] = {}
        times["stage"], staged = timed(lambda: follower.stage([second]))
        times["commit"], committed = timed(lambda staged=staged: follower.commit(staged))  # type: ignore[misc]
        times["confirm"], _ = timed(lambda committed=committed: follower.confirm(committed))  # type: ignore[misc]
        times["scatter"] = committed.staged.scatter_s
        if number == repeats:
            _check(memory, new_sha256, "the commit")
        times["rollback"], _ = timed(lambda committed=committed: follower.rollback(committed))  # type: ignore[misc]
        follower.identified(first)
        rounds.append(times)
        staged_bytes = staged.staged.device_bytes
        del staged, committed  # so that the next round uses the same memory
    _check(memory, old_sha256, "the rollback")
    stage_extra_bytes = peak_extra_bytes(lambda: follower.stage([second]))

    writes = []
    patches = []
    delta, _ = payloads.delta(reader, second, memory.gather, memory.wanted)
    for name in delta.counts():
        index_K, step_K = delta.of(name)
        old_K = memory.gather(name)[index_K]
        new_K = old_K + step_K
        patches.append((reader.specs[name], index_K, new_K))
        for segment in segments[name]:
            live = segment.flat().numpy()
            to_K = _positions(segment, reader.specs[name].element_count)[index_K]
            taken = to_K >= 0
            writes.append((live.view(f"u{live.itemsize}"), to_K[taken], old_K[taken], new_K[taken]))

    def plain() -> None:
        for live, dest_index_K, _, new_K in writes:
            live[dest_index_K] = new_K

    plain_s = _repeat(plain, lambda: _restore(writes), repeats)
    _check(memory, new_sha256, "the plain scatter")
    _restore(writes)
    peers = {}
    load = _peer(model, patches)
    for name, options in PEERS.items():
        peers[name] = _repeat(lambda options=options: load(**options), lambda: _restore(writes), repeats)  # type: ignore[misc]
        _check(memory, new_sha256, f"vLLM's path ({name})")
        _restore(writes)
    return {
        "threads": {"deltasync": native.threads(1 << 30), "torch": torch.get_num_threads()},
        "segment_count": sum(map(len, segments.values())),
        "deltasync": {name: _summary([times[name] for times in rounds]) for name in rounds[0]},
        "plain": _summary(plain_s),
        "vllm": {name: _summary(times_s) for name, times_s in peers.items()},
        "staged_bytes": staged_bytes,
        "stage_extra_bytes": stage_extra_bytes,
        "vllm_extra_bytes": peak_extra_bytes(load),
    }


def _peer(
    model: torch.nn.Module, patches: Sequence[tuple[TensorSpec, np.ndarray, np.ndarray]]
) -> Callable[..., object]:
    """Return a call of vLLM's own sparse path with this delta, decoded and in the form that it takes."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    converted = []
    for spec, index_K, new_K in patches:
        values_K = tensor_of(new_K, dataclasses.replace(spec, shape=new_K.shape))
        converted.append(
            CheckpointWeightPatch(
                spec.name, spec.shape, values_K.dtype, values_K, torch.from_numpy(index_K.astype(np.int64))
            )
        )
    return lambda **options: load_checkpoint_weight_patches(model, converted, **options)


def _restore(writes: Sequence[Write]) -> None:
    for live, dest_index_K, old_K, _ in writes:
        live[dest_index_K] = old_K


def _positions(segment: Segment, element_count: int) -> np.ndarray:
    """Return where each element of a tensor lies in a segment's memory, int64; -1 for those that do not."""
    live, found_N = segment.live, torch.full((element_count,), -1)
    place = torch.arange(segment.flat().numel()).as_strided(live.shape, live.stride())
    segment.source(found_N).copy_(place)
    return found_N.numpy()


def _check(memory: LiveMemory, sha256: Mapping[str, str], what: str) -> None:
    """Compare every bit of live memory."""
    for name, digest in sha256.items():
        if sha256_hex(memory.gather(name).data) != digest:
            raise AssertionError(f"{what} left other bits in {name}")


def _repeat(action: Callable[[], object], restore: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of `repeats` + 1 runs; the effect of the last one stays."""
    times_s = []
    for number in range(repeats + 1):
        if number:
            restore()
        times_s.append(timed(action)[0])
    return times_s


def _summary(times_s: Sequence[float]) -> dict[str, float]:
    return {"first_s": times_s[0], "median_s": statistics.median(times_s[1:]), "best_s": min(times_s[1:])}
