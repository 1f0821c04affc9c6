"""Weights that change as in RL: small Adam-like steps on an fp32 master, seen through bf16.

Weights are student-t distributed (heavier tails than a Gaussian, as trained weights have), the master is fp32, and the
update of each weight follows an AR(1) process of unit variance, as Adam's normalised steps do. A change becomes visible in
bf16 only when it crosses a rounding boundary, so which weights change depends on their exponent. The last of 12 steps is
the delta.

Two numbers are calibrated to bounds that were published for such a simulation, in bits per changed element:

    changed                                        0.57 %   1.07 %   1.99 %   4.6 %
    index bound given the exponent, published        5.90     5.36     4.83    4.08
    the same, seed 0                                 5.90     5.38     4.83    4.10
    with the step's entropy given it, published      7.26     6.77     6.29    5.64
    the same, seed 0                                 7.26     6.79     6.29    5.66
    and given whether it changed before, published   7.16     6.71     6.26    5.62
    the same, seed 0                                 7.16     6.72     6.26    5.64

- Degrees of freedom, 8: between 3 and 8 the bounds move by 0.03 bits, about as much as between seeds.
- AR coefficient, 0.9: only the bound given the history depends on it. 0.8 would give 6.94 for 7.16.

The numbers do not say whether the published 0.02 is the standard deviation or the scale; both fit within 0.02 bits. The step
size follows from the changed fraction, so a factor on all weights only shifts their exponents. Here 0.02 is the standard
deviation. It does matter that the master does not start on bf16 values: if it did, 12 steps later only small weights would
have changed, and the index bound at 0.57 % would be 3.7 bits (`data.finetune` has a run of this kind).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from deltasync.tensors.bits import bits_of

STEPS = 12  # the last step is the delta: momentum has built up by then
STANDARD_DEVIATION = 0.02
DEGREES_OF_FREEDOM = 8.0
MOMENTUM = 0.9

_CHUNK = 1 << 20  # elements that a thread simulates at once; what a seed gives depends on it
_PROBE_STEP = 1e-7


def delta(changed_fraction: float, element_count: int = 1 << 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return bf16 bit patterns before and after one step; see `delta_with_history`."""
    old_N, new_N, _ = delta_with_history(changed_fraction, element_count, seed)
    return old_N, new_N


def delta_with_history(
    changed_fraction: float, element_count: int = 1 << 24, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bf16 bit patterns before and after one step, and what changed in the steps before it.

    Args:
        changed_fraction: Wanted fraction of changed elements, met within a few percent of itself.
        element_count: N.
        seed: Seed of the weights and the steps.

    Returns:
        Old and new bit patterns, uint16, and the history (see `update_history`), int8; all of shape N.
    """
    # The changed fraction is proportional to the step size as long as steps are small against a rounding interval.
    step_size = _PROBE_STEP
    for _ in range(3):
        old_N, new_N, _ = _chunk(step_size, min(element_count, _CHUNK), seed, 0)
        step_size *= changed_fraction / max(float((old_N != new_N).mean()), 1 / old_N.size)
    parts = range(-(-element_count // _CHUNK))
    sizes = [min(_CHUNK, element_count - part * _CHUNK) for part in parts]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy and torch release the GIL
        chunks = list(pool.map(lambda part: _chunk(step_size, sizes[part], seed, part), parts))
    old, new, history = zip(*chunks, strict=True)
    return np.concatenate(old), np.concatenate(new), np.concatenate(history)


def update_history(history_N: np.ndarray, old_N: np.ndarray, new_N: np.ndarray) -> np.ndarray:
    """Return the history after one more step.

    Args:
        history_N: int8: 0 for an element that never changed, otherwise the number of steps since it last did (1 for the
            step just made, at most 127), positive if its bit pattern grew, negative if it shrank.
        old_N: Bit patterns before the step.
        new_N: Bit patterns after the step.
    """
    aged_N = history_N + np.sign(history_N) * (np.abs(history_N) < 127)
    changed_N = np.flatnonzero(old_N != new_N)
    step_K = (new_N[changed_N] - old_N[changed_N]).view(f"i{old_N.itemsize}")
    aged_N[changed_N] = np.where(step_K > 0, 1, -1)
    return aged_N


def _chunk(step_size: float, element_count: int, seed: int, part: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, part])
    scale = STANDARD_DEVIATION * np.sqrt((DEGREES_OF_FREEDOM - 2) / DEGREES_OF_FREEDOM)
    master = (rng.standard_t(DEGREES_OF_FREEDOM, element_count) * scale).astype(np.float32)
    update = rng.standard_normal(element_count, np.float32)
    noise = np.float32(np.sqrt(1 - MOMENTUM**2))
    old_N = new_N = _bf16(master)
    history_N = np.zeros(element_count, np.int8)
    for step in range(STEPS):
        if step > 0:
            history_N = update_history(history_N, old_N, new_N)
        old_N = new_N
        update = np.float32(MOMENTUM) * update + noise * rng.standard_normal(element_count, np.float32)
        master += np.float32(step_size) * update
        new_N = _bf16(master)
    return old_N, new_N, history_N


def _bf16(values: np.ndarray) -> np.ndarray:
    return bits_of(torch.from_numpy(values).to(torch.bfloat16))
