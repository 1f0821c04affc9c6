"""Weights that change as in RL: small Adam-like steps on an fp32 master, seen through bf16.

Weights are student-t distributed (heavier tails than a Gaussian, as trained weights have), the master is fp32, and the
update of each weight follows an AR(1) process of unit variance, as Adam's normalised steps do. A change becomes visible in
bf16 only when it crosses a rounding boundary, so which weights change depends on their exponent.
"""

from __future__ import annotations

import numpy as np
import torch

from deltasync.bits import bits_of

STEPS = 12  # the last one is the delta: momentum has built up by then
_SCALE = 0.02
_DEGREES_OF_FREEDOM = 5.0
_MOMENTUM = 0.9


def delta(changed_fraction: float, element_count: int = 1 << 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bit patterns before and after one step.

    Args:
        changed_fraction: Wanted fraction of changed elements, met within a few percent of itself.
        element_count: N.
        seed: Of the weights and the steps.

    Returns:
        Old and new bit patterns, uint16, shape N.
    """
    # The changed fraction is proportional to the step size as long as steps are small against a rounding interval.
    probe = 1e-7
    learning_rate = probe * changed_fraction / _fraction(*_last_step(probe, min(element_count, 1 << 20), seed))
    return _last_step(learning_rate, element_count, seed)


def _fraction(old_N: np.ndarray, new_N: np.ndarray) -> float:
    return float((old_N != new_N).mean())


def _last_step(learning_rate: float, element_count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    master = (rng.standard_t(_DEGREES_OF_FREEDOM, element_count) * _SCALE).astype(np.float32)
    update = rng.standard_normal(element_count, np.float32)
    noise = np.float32(np.sqrt(1 - _MOMENTUM**2))
    old_N = master
    for _ in range(STEPS):
        old_N = master.copy()
        update = np.float32(_MOMENTUM) * update + noise * rng.standard_normal(element_count, np.float32)
        master += np.float32(learning_rate) * update
    return _bf16(old_N), _bf16(master)


def _bf16(values: np.ndarray) -> np.ndarray:
    return bits_of(torch.from_numpy(values).to(torch.bfloat16))
