"""Weights that change as in RL: small Adam-like steps on a master, seen through bf16.

Weights are student-t distributed (heavier tails than a Gaussian, as trained weights have), and the update of
each weight follows an AR(1) process of unit variance, as Adam's normalised steps do. A change becomes visible
in bf16 only when it crosses a rounding boundary, so which weights change depends on their exponent, and on
what the steps are added to: an fp32 master that is one for a while, an fp32 master that started on the bf16
values of a checkpoint, or the bf16 values themselves. Compared with published numbers of real runs, at their
density:

    master                                        fp32     bf16 start    bf16    published
    changed by 8 steps, times that of one          5.1         4.8       1.7     1.7   PULSE, Qwen2.5-7B in bf16, 0.86 %
    changed by 32 steps, times that of one        12.0        10.4       2.4     2.3   the same
    bits, COO u8/u16 + bf16, zstd                 24.1        23.9      23.1    23.1   PULSE in production, 0.78 %
    index bits, exponent-class Rice                6.2   3.8 ... 4.7     1.9     4.3   PULSEPT v3, Qwen3-8B, about 0.43 %
    of what step 2 changes, changed in step 1     21 %        40 %      80 %     45 to 52 %   SparseRL-Sync, 0.65 %
    of what step 11 changes, changed before       54 %        67 %      96 %     72 to 77 %   the same

Runs in pure bf16 are met by `bf16`, runs with an fp32 master best by `bf16 start`, whose range is from step
12 to step 100.

The last of 12 steps of the fp32 master is `delta`. Two of its numbers are calibrated to bounds that were
published for such a simulation, in bits per changed element:

    changed                                        0.57 %   1.07 %   1.99 %   4.6 %
    index bound given the exponent, published        5.90     5.36     4.83    4.08
    the same, seed 0                                 5.90     5.38     4.83    4.10
    with the step's entropy given it, published      7.26     6.77     6.29    5.64
    the same, seed 0                                 7.26     6.79     6.29    5.66
    and given whether it changed before, published   7.16     6.71     6.26    5.62
    the same, seed 0                                 7.16     6.72     6.26    5.64

- Degrees of freedom, 8: between 3 and 8 the bounds move by 0.03 bits, about as much as between seeds.
- AR coefficient, 0.9: only the bound given the history depends on it. 0.8 would give 6.94 for 7.16.

The numbers do not say whether the published 0.02 is the standard deviation or the scale; both fit within 0.02
bits. The step size follows from the changed fraction, so a factor on all weights only shifts their exponents.
Here 0.02 is the standard deviation. It does matter where the master starts: from bf16 values, 12 steps later
only small weights have changed, and the index bound at 0.57 % is 3.7 bits (`data.finetune` has a run of this
kind).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch

from deltasync.tensors.bits import bits_of

STEPS = 12  # the last step is the delta: momentum has built up by then
STANDARD_DEVIATION = 0.02
DEGREES_OF_FREEDOM = 8.0
MOMENTUM = 0.9

Master = Literal["fp32", "bf16 start", "bf16"]
"""The weights that steps are added to: fp32 values, fp32 values that began as bf16 ones, or bf16 values (sums
rounded).
"""

Change = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Old and new bit patterns, uint16, and the history of the old ones (see `update_history`), int8; all of
shape N.
"""

_CHUNK = 1 << 20  # elements that a thread simulates at once; what a seed gives depends on it
_PROBE_STEP = 1e-7


def delta(
    changed_fraction: float, element_count: int = 1 << 24, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return bf16 bit patterns before and after one step; see `delta_with_history`."""
    old_N, new_N, _ = delta_with_history(changed_fraction, element_count, seed)
    return old_N, new_N


def delta_with_history(changed_fraction: float, element_count: int = 1 << 24, seed: int = 0) -> Change:
    """Return bf16 bit patterns before and after one step, and what changed in the steps before it; see
    `changes`.
    """
    (found,) = changes(changed_fraction, element_count, seed, "fp32", [(STEPS - 1, STEPS)])
    return found


def changes(
    changed_fraction: float, element_count: int, seed: int, master: Master, spans: Sequence[tuple[int, int]]
) -> list[Change]:
    """Return what changed between versions of one run.

    Args:
        changed_fraction: Wanted fraction of elements that the first span changes, met within a few percent of
            itself.
        element_count: N.
        seed: Seed of the weights and the steps.
        master: What the steps are added to.
        spans: Pairs of versions, old and new. A version is the number of steps made, at least one.
    """
    # The changed fraction is proportional to the step size while large weights move little against their
    # rounding interval.
    step_size = _PROBE_STEP
    for _ in range(3):
        ((old_N, new_N, _),) = _chunk(step_size, min(element_count, _CHUNK), seed, 0, master, spans[:1])
        step_size *= changed_fraction / max(float((old_N != new_N).mean()), 1 / old_N.size)
    parts = range(-(-element_count // _CHUNK))
    sizes = [min(_CHUNK, element_count - part * _CHUNK) for part in parts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy and torch release the GIL
        chunks = list(pool.map(lambda part: _chunk(step_size, sizes[part], seed, part, master, spans), parts))
    joined = []
    for span in zip(*chunks, strict=True):
        old, new, history = zip(*span, strict=True)
        joined.append((np.concatenate(old), np.concatenate(new), np.concatenate(history)))
    return joined


def update_history(history_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray) -> np.ndarray:
    """Return the history after one more step.

    A history is int8: 0 for an element that never changed, otherwise the number of steps since it last did (1
    for the step just made, at most 127), positive if its bit pattern grew, negative if it shrank.
    """
    aged_N = history_N + np.sign(history_N) * (np.abs(history_N) < 127)
    changed_N = np.flatnonzero(old_N != new_N)
    step_K = (new_N[changed_N] - old_N[changed_N]).view(f"i{old_N.itemsize}")
    aged_N[changed_N] = np.where(step_K > 0, 1, -1)
    return aged_N


def _chunk(
    step_size: float,
    element_count: int,
    seed: int,
    part: int,
    master: Master,
    spans: Sequence[tuple[int, int]],
) -> list[Change]:
    rng = np.random.default_rng([seed, part])
    scale = STANDARD_DEVIATION * np.sqrt((DEGREES_OF_FREEDOM - 2) / DEGREES_OF_FREEDOM)
    weights = (rng.standard_t(DEGREES_OF_FREEDOM, element_count) * scale).astype(np.float32)
    if master != "fp32":
        weights = _rounded(weights)
    update = rng.standard_normal(element_count, np.float32)
    noise = np.float32(np.sqrt(1 - MOMENTUM**2))
    new_N, history_N = _bf16(weights), np.zeros(element_count, np.int8)
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for version in range(1, max(map(max, spans)) + 1):
        old_N = new_N
        update = np.float32(MOMENTUM) * update + noise * rng.standard_normal(element_count, np.float32)
        weights += np.float32(step_size) * update
        if master == "bf16":
            weights = _rounded(weights)
        new_N = _bf16(weights)
        history_N = update_history(history_N, old_N, new_N)
        if any(version in span for span in spans):
            kept[version] = new_N, history_N
    return [(kept[old][0], kept[new][0], kept[old][1]) for old, new in spans]


def _rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()


def _bf16(values: np.ndarray) -> np.ndarray:
    return bits_of(torch.from_numpy(values).to(torch.bfloat16))
