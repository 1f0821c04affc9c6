"""Random mutations of a payload: a typed error, a wrong fingerprint or the right bits, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.codec import simulate
from deltasync import codec
from deltasync.config import CODECS
from deltasync.errors import DeltaSyncError
from deltasync.kernels import cpu, cpu_diff
from deltasync.tensors import TensorSpec

KEY = 7
SPEC = TensorSpec("w", "bfloat16", (1 << 15,))


def mutated(payload: bytes, rng: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        at = rng.randrange(len(data))
        if kind < 0.8:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.9:
            del data[max(1, at) :]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(data)


def applied(payload: bytes, old_N: np.ndarray) -> np.ndarray:
    opened = codec.open_payload(payload)
    live_N = old_N.copy()
    for patch in codec.get(opened.codec).decode(opened, {"w": SPEC}, old=lambda _: old_N):
        if patch.index_K is None:
            live_N[:] = patch.data
        else:
            live_N[patch.index_K] = patch.data if patch.absolute else live_N[patch.index_K] + patch.data
    return live_N


@pytest.mark.parametrize("times", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CODECS)
def test_no_mutation_gives_wrong_bits_under_the_right_fingerprint(name: str, times: int) -> None:
    old_N, new_N = simulate.delta(0.02, 1 << 15)[:2]
    index_K, step_K = cpu_diff.diff(old_N, new_N)
    encoder = codec.get(name).encoder()
    encoder.add(SPEC, index_K, step_K, new_N, "0" * 16)
    payload = encoder.finish(2, 1).to_bytes()
    wanted = cpu.fingerprint(KEY, new_N)
    rng = random.Random(0)
    errors = 0
    for _ in range(times):
        try:
            live_N = applied(mutated(payload, rng), old_N)
        except DeltaSyncError:
            errors += 1
            continue
        assert cpu.fingerprint(KEY, live_N) != wanted or np.array_equal(live_N, new_N)
    assert errors > times / 2
