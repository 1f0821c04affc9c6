"""Random mutations of a payload: a typed error, a wrong fingerprint or the right bits, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.codec import simulate
from deltasync.config import CODECS
from deltasync.errors import DeltaSyncError
from deltasync.kernels import native
from deltasync.tensors import TensorSpec
from tests import deltas

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
    delta, _ = deltas.decode(payload, {"w": SPEC}, {"w": old_N})
    return deltas.applied(delta, {"w": old_N})["w"]


@pytest.mark.parametrize("times", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CODECS)
def test_no_mutation_gives_wrong_bits_under_the_right_fingerprint(name: str, times: int) -> None:
    old_N, new_N = simulate.delta(0.02, 1 << 15)[:2]
    payload = deltas.encode(name, {"w": SPEC}, {"w": old_N}, {"w": new_N}).to_bytes()
    wanted = native.fingerprint(KEY, new_N)
    rng = random.Random(0)
    errors = 0
    for _ in range(times):
        try:
            live_N = applied(mutated(payload, rng), old_N)
        except DeltaSyncError:
            errors += 1
            continue
        assert native.fingerprint(KEY, live_N) != wanted or np.array_equal(live_N, new_N)
    assert errors > times / 2
