"""`kernels.class_fit` in plain Python and numpy, for a machine without numba; its times are not those of a publisher."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Classes(NamedTuple):
    """See `kernels.classes`."""

    low_C: np.ndarray
    span_C: np.ndarray


class Costs(NamedTuple):
    """See `kernels.class_fit`."""

    table: float
    symbol: float
    element: float


def _xlogx(value_N: np.ndarray | float) -> np.ndarray:
    found: np.ndarray = value_N * np.log2(np.maximum(value_N, 1.0))
    return found


def _class_bits(element_N: np.ndarray, step_NS: np.ndarray, costs: Costs) -> np.ndarray:
    changed_N = step_NS.sum(axis=-1).astype(np.float64)
    bits_N = costs.table + (costs.symbol * (step_NS > 0) - _xlogx(step_NS.astype(np.float64))).sum(axis=-1)
    element_N = np.maximum(element_N, changed_N)
    found: np.ndarray = bits_N + _xlogx(element_N) - _xlogx(element_N - changed_N)
    return found


def bits(element_E: np.ndarray, step_ES: np.ndarray, costs: Costs) -> float:
    """See `kernels.class_fit.bits`."""
    used_E = np.flatnonzero(step_ES.any(axis=1))
    return float(_class_bits(element_E[used_E], step_ES[used_E], costs).sum())


def fit(element_GE: np.ndarray, step_GES: np.ndarray, costs: Costs) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """See `kernels.class_fit.fit`."""
    return [_fit(element_E, step_ES, costs) for element_E, step_ES in zip(element_GE, step_GES, strict=True)]


def _fit(element_E: np.ndarray, step_ES: np.ndarray, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    below_E = np.append(0.0, np.cumsum(np.maximum(element_E, step_ES.sum(axis=1))))
    first_C = np.flatnonzero(step_ES.any(axis=1))
    last_C, step_CS = first_C.copy(), step_ES[first_C].astype(np.int64)
    bits_C = _class_bits(element_E[first_C], step_CS, costs)
    while first_C.size > 1:
        joined = _class_bits(below_E[last_C[1:] + 1] - below_E[first_C[:-1]], step_CS[:-1] + step_CS[1:], costs)
        gain = bits_C[:-1] + bits_C[1:] - joined + costs.element * below_E[-1]
        c = int(gain.argmax())
        if gain[c] <= 0:
            break
        last_C[c], step_CS[c], bits_C[c] = last_C[c + 1], step_CS[c] + step_CS[c + 1], joined[c]
        first_C, last_C, bits_C = (np.delete(each, c + 1) for each in (first_C, last_C, bits_C))
        step_CS = np.delete(step_CS, c + 1, axis=0)
    mean_C = (below_E[last_C + 1] - below_E[first_C]) / step_CS.sum(axis=1)
    return first_C, last_C, np.rint(8 * np.log2(mean_C)).astype(np.int64).clip(0, 160)
