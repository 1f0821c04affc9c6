"""Gaps and steps as numbers, and counts of their symbols, to fit tables to them."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numba.cpython.unsafe.numbers import leading_zeros

from deltasync.kernels.compiled import kernel
from deltasync.kernels.cpu import threads
from deltasync.kernels.rans import RATIO_BITS, Blocks

_U0, _U1, _U2, _U3, _U4, _U16, _U63 = map(np.uint64, (0, 1, 2, 3, 4, 16, 63))

# Changes are counted in at most `_PARTS` parts, each of at least `PART` changes.
_PARTS, PART = 4, 1 << 13


@njit(forceinline=True)
def bucket(value):
    """Return the symbol of a number, and how many extra bits follow it."""
    if value < _U16:
        return value, _U0
    exponent = _U63 - leading_zeros(value)
    extra = exponent - _U2
    return _U4 * exponent + ((value >> extra) & _U3), extra


@njit(forceinline=True)
def zigzag(step, top):
    """Return a step as a number: 1, -1, 2, -2 become 1, 0, 3, 2. `top` is 2**(width - 1) as uint64."""
    value = np.uint64(step)
    if value & top:
        return ((top - value) << _U1) + (top << _U1) - _U2
    return (value << _U1) - _U1


@njit(forceinline=True)
def first_class(size_BC, b):
    """Return the first class of a block that has an element, or the last of all."""
    c = np.int64(0)
    while c < size_BC.shape[1] - 1 and size_BC[b, c] == 0:
        c += 1
    return c


@njit(forceinline=True)
def gap_before(k, low, base, size_BC, b, at_K, class_K, ratio_CC):
    """Return the class in which the gap before change `k` of a block begins, and the gap; the block begins with `low`."""
    c, place = np.int64(class_K[k]), np.int64(at_K[k]) - base
    begin, before = np.int64(0), np.int64(-1)
    if k > np.uint64(low):
        begin, before = np.int64(class_K[k - _U1]), np.int64(at_K[k - _U1]) - base
    else:
        begin = first_class(size_BC, b)
    if begin == c:
        return begin, place - before - 1
    gap = size_BC[b, begin] - before - 1
    for to in range(begin + 1, c):
        gap += (size_BC[b, to] * ratio_CC[begin, to]) >> RATIO_BITS
    return begin, gap + (((place + 1) * ratio_CC[begin, c]) >> RATIO_BITS) - 1


@kernel
def _count(part_P, blocks, at_K, class_K, step_K, top, ratio_CC, count_PTS):
    base_B, size_BC, bound_B = blocks
    for p in prange(part_P.size - 1):
        count_TS = count_PTS[p]
        for b in range(part_P[p], part_P[p + 1]):
            low, base = bound_B[b], base_B[b]
            for k in range(np.uint64(low), np.uint64(bound_B[b + 1])):
                table, number = gap_before(k, low, base, size_BC, b, at_K, class_K, ratio_CC)
                gap, _ = bucket(np.uint64(number))
                step, _ = bucket(zigzag(step_K[k], top))
                count_TS[np.uint64(2 * table), gap] += 1
                count_TS[np.uint64(2 * class_K[k] + 1), step] += 1


def top_of(step_K: np.ndarray) -> np.uint64:
    """Return the highest bit of steps of this width: 2**(width - 1)."""
    return np.uint64(1 << (8 * step_K.itemsize - 1))


def tasks(blocks: Blocks, at_K: np.ndarray) -> int:
    """Return how many threads are worth starting for work on the changes."""
    return min(blocks.base_B.size, at_K.size // PART)


def count(blocks: Blocks, at_K: np.ndarray, class_K: np.ndarray, step_K: np.ndarray, ratio_CC: np.ndarray) -> np.ndarray:
    """Count each symbol of each table (`Tables`), int64[2 C, 256]; arguments as `coder.encode`."""
    parts = max(1, min(_PARTS, tasks(blocks, at_K)))
    part_P = np.searchsorted(blocks.bound_B[:-1], np.linspace(0, at_K.size, parts + 1).astype(np.int64))
    part_P[0], part_P[-1] = 0, blocks.base_B.size
    count_TS: np.ndarray = count_runs(part_P, blocks, at_K, class_K, step_K, ratio_CC).sum(axis=0)
    return count_TS


def count_runs(
    run_R: np.ndarray, blocks: Blocks, at_K: np.ndarray, class_K: np.ndarray, step_K: np.ndarray, ratio_CC: np.ndarray
) -> np.ndarray:
    """As `count`, for each run of blocks from `run_R[r]` on and below `run_R[r + 1]`; int64[R, 2 C, 256]."""
    count_RTS = np.zeros((run_R.size - 1, 2 * len(ratio_CC), 256), np.int64)
    with threads(min(run_R.size - 1, at_K.size // PART)):
        _count(run_R, tuple(blocks), at_K, class_K, step_K, top_of(step_K), ratio_CC, count_RTS)
    return count_RTS
