"""Which values of the field of `classes` form a class: those whose changes take the fewest bits together, in numba.

Shapes: G groups of blocks, E values of the field (256), S symbols of steps, C classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from deltasync.kernels.compiled import kernel
from deltasync.kernels.cpu import threads
from deltasync.kernels.rans import LEVELS


class Costs(NamedTuple):
    """The bits that a class costs beside its changes.

    Attributes:
        table: Cost of its table of gaps.
        symbol: Cost of each symbol in its table of steps.
        element: Cost of each element of its group, for the time that another class takes on both sides.
    """

    table: float
    symbol: float
    element: float


@njit
def _xlogx(value):
    return value * np.log2(value) if value > 1.0 else 0.0


@njit
def _class_bits(element, step_S, costs):
    """Estimate the bits that the changes of a class take, with their tables, but without the extra bits of steps."""
    changed, bits = 0.0, costs[0]
    for s in range(step_S.size):
        if step_S[s]:
            changed += step_S[s]
            bits += costs[1] - _xlogx(float(step_S[s]))
    element = max(element, changed)
    return bits + _xlogx(element) - _xlogx(element - changed)  # which of them change; then by which step


@kernel
def _bits(element_E, step_ES, costs, bits_E):
    for e in prange(element_E.size):
        if step_ES[e].any():
            bits_E[e] = _class_bits(element_E[e], step_ES[e], costs)


@njit
def _gain(c, first_C, last_C, next_C, bits_C, element_E, step_CS, costs):
    """Return how many bits it is worth to join a class with the next one. `element_E` has partial sums."""
    n = next_C[c]
    if n < 0:
        return 0.0
    joined = _class_bits(element_E[last_C[n] + 1] - element_E[first_C[c]], step_CS[c] + step_CS[n], costs)
    return bits_C[c] + bits_C[n] - joined + costs[2] * element_E[-1]


@kernel
def _fit(element_GE, step_GES, costs, first_GC, last_GC, mean_GC):
    for g in prange(first_GC.shape[0]):
        first_C, last_C, step_CS, most = first_GC[g], last_GC[g], step_GES[g].copy(), first_GC.shape[1]
        element_E, bits_C, gain_C = np.zeros(most + 1), np.zeros(most), np.zeros(most)
        next_C, before_C = np.full(most, -1), np.full(most, -1)
        count = 0
        for e in range(most):
            changed = step_GES[g, e].sum()
            element_E[e + 1] = element_E[e] + max(element_GE[g, e], float(changed))
            if changed:
                first_C[count], last_C[count], step_CS[count] = e, e, step_GES[g, e]
                bits_C[count] = _class_bits(element_GE[g, e], step_CS[count], costs)
                if count:
                    next_C[count - 1], before_C[count] = count, count - 1
                count += 1
        for c in range(count):
            gain_C[c] = _gain(c, first_C, last_C, next_C, bits_C, element_E, step_CS, costs)
        while True:
            c = np.argmax(gain_C)
            if gain_C[c] <= 0:
                break
            n = next_C[c]
            last_C[c], next_C[c], step_CS[c] = last_C[n], next_C[n], step_CS[c] + step_CS[n]
            bits_C[c] = _class_bits(element_E[last_C[c] + 1] - element_E[first_C[c]], step_CS[c], costs)
            first_C[n], gain_C[n] = -1, 0.0  # it is no class any more
            if next_C[c] >= 0:
                before_C[next_C[c]] = c
            for near in (before_C[c], c):
                if near >= 0:
                    gain_C[near] = _gain(near, first_C, last_C, next_C, bits_C, element_E, step_CS, costs)
        for c in range(count):
            if first_C[c] >= 0:
                mean_GC[g, c] = (element_E[last_C[c] + 1] - element_E[first_C[c]]) / step_CS[c].sum()


def bits(element_E: np.ndarray, step_ES: np.ndarray, costs: Costs) -> float:
    """Estimate the bits of the changes of a run of blocks, if each value of the field is a class; arguments as `fit`."""
    bits_E = np.zeros(element_E.size)
    with threads(1):
        _bits(element_E, step_ES, tuple(costs), bits_E)
    return float(bits_E.sum())


def fit(element_GE: np.ndarray, step_GES: np.ndarray, costs: Costs) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the classes in which the changes of each group take the fewest bits: first and last values, and levels.

    Args:
        element_GE: Elements with each value of the field; estimates, float64[G, 256].
        step_GES: Symbols of the steps of changed elements, by the value, int64.
        costs: Costs of a class.
    """
    first_GC, last_GC = np.full(element_GE.shape, -1), np.full(element_GE.shape, -1)
    mean_GC = np.ones(element_GE.shape)  # elements for each change
    with threads(len(element_GE)):
        _fit(element_GE, step_GES, tuple(costs), first_GC, last_GC, mean_GC)
    level_GC = np.rint(8 * np.log2(mean_GC)).astype(np.int64).clip(0, LEVELS)
    arrays = zip(first_GC, last_GC, level_GC, first_GC >= 0, strict=True)
    return [(first_C[is_class], last_C[is_class], level_C[is_class]) for first_C, last_C, level_C, is_class in arrays]
