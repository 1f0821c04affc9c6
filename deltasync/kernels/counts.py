"""Count the symbols of changes and the classes of elements, to fit tables to them; and sort changes, by counting."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from numba.cpython.unsafe.numbers import leading_zeros

from deltasync.kernels.compiled import kernel
from deltasync.kernels.cpu import threads
from deltasync.kernels.intrinsics import prefetch
from deltasync.kernels.rans import Blocks, Classes

_U0, _U1, _U2, _U3, _U4, _U16, _U63 = map(np.uint64, (0, 1, 2, 3, 4, 16, 63))

# Changes are counted in at most `_PARTS` parts, each of at least `_PART` changes.
_PARTS, _PART = 4, 1 << 13

# Prefetch distances, in changes and in samples.
_AHEAD, _SAMPLES_AHEAD = 64, 16


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


@kernel
def _count_packed(base_B, bound_B, index_K, step_K, top, count_BS):
    for b in prange(base_B.size):
        index_C, step_C = index_K[bound_B[b] : bound_B[b + 1]], step_K[bound_B[b] : bound_B[b + 1]]
        gap_S, step_S = count_BS[b, 0], count_BS[b, 1]
        before = base_B[b] - 1
        for k in range(index_C.size):
            index = np.int64(index_C[k])
            gap, _ = bucket(np.uint64(index - before - 1))
            step, _ = bucket(zigzag(step_C[k], top))
            gap_S[gap] += 1
            step_S[step] += 1
            before = index


@kernel
def _count_classes(bits_N, shift, mask, run, period, count_PC):
    parts = count_PC.shape[0]
    for p in prange(parts):
        count_C = count_PC[p]
        for start in range(p * period, bits_N.size, parts * period):
            ahead = start + _SAMPLES_AHEAD * parts * period
            if ahead < bits_N.size:
                prefetch(bits_N, ahead)
            for i in range(np.uint64(start), np.uint64(min(start + run, bits_N.size))):
                count_C[(bits_N[i] >> shift) & mask] += 1


@kernel
def _count_steps(part_P, new_N, index_K, step_K, shift, mask, top, step_PCS):
    for p in prange(part_P.size - 1):
        index_C, step_C, count_CS = index_K[part_P[p] : part_P[p + 1]], step_K[part_P[p] : part_P[p + 1]], step_PCS[p]
        for k in range(index_C.size):
            if k + _AHEAD < index_C.size:
                prefetch(new_N, np.uint64(index_C[k + _AHEAD]))
            old = new_N[np.uint64(index_C[k])] - step_C[k]
            step, _ = bucket(zigzag(step_C[k], top))
            count_CS[(old >> shift) & mask, step] += 1


@kernel
def _regroup(bound_G, base_G, width, columns, by_tile, index_K, step_K, bound_GC, to_index_K, to_step_K):
    # Multiply by inverses: a division takes longer than all the rest. With 0.5 added, rounding does not matter.
    row_part, tile_part = 1.0 / width, 1.0 / columns
    for g in prange(base_G.size):
        next_C = np.zeros(bound_GC.shape[1] + 1, np.int64)
        next_C[0] = bound_G[g]
        for counting in (True, False):
            for k in range(bound_G[g], bound_G[g + 1]):
                offset = np.int64(index_K[k]) - base_G[g]
                c = np.int64((offset + 0.5) * row_part)
                if by_tile:
                    c = np.int64((offset - c * width + 0.5) * tile_part)
                if counting:
                    next_C[c + 1] += 1
                else:
                    at = next_C[c]
                    next_C[c] += 1
                    to_index_K[at] = index_K[k]
                    to_step_K[at] = step_K[k]
            if counting:
                for c in range(bound_GC.shape[1]):
                    next_C[c + 1] += next_C[c]
                    bound_GC[g, c] = next_C[c]


def top_of(step_K: np.ndarray) -> np.uint64:
    """Return the highest bit of steps of this width: 2**(width - 1)."""
    return np.uint64(1 << (8 * step_K.itemsize - 1))


def tasks(blocks: Blocks, index_K: np.ndarray) -> int:
    """Return how many threads are worth starting for work on the changes."""
    return min(blocks.base_B.size, index_K.size // _PART)


def count_packed(blocks: Blocks, index_K: np.ndarray, step_K: np.ndarray) -> np.ndarray:
    """Count each symbol among the gaps (row 0) and the steps (row 1), int64[2, 256]."""
    count_BS = np.zeros((blocks.base_B.size, 2, 256), np.int64)
    with threads(tasks(blocks, index_K)):
        _count_packed(blocks.base_B, blocks.bound_B, index_K, step_K, top_of(step_K), count_BS)
    return count_BS.sum(axis=0)


def count_classes(bits_N: np.ndarray, classes: Classes, run: int, period: int) -> np.ndarray:
    """Count the elements of each class, among the first `run` of every `period` elements; int64[C]."""
    parts = max(1, min(_PARTS, bits_N.size // period * run // _PART))
    count_PC = np.zeros((parts, int(classes.mask) + 1), np.int64)
    with threads(parts):
        _count_classes(bits_N, *classes, run, period, count_PC)
    count_C: np.ndarray = count_PC.sum(axis=0)
    return count_C


def count_steps(new_N: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, classes: Classes) -> np.ndarray:
    """Count for each class of old values each symbol among the steps, int64[C, 256]."""
    part_count = max(1, min(_PARTS, index_K.size // _PART))
    part_P = np.linspace(0, index_K.size, part_count + 1).astype(np.int64)
    step_PCS = np.zeros((part_count, int(classes.mask) + 1, 256), np.uint32)
    with threads(part_count):
        _count_steps(part_P, new_N, index_K, step_K, *classes, top_of(step_K), step_PCS)
    return step_PCS.sum(axis=0, dtype=np.int64)


def regroup(
    bound_G: np.ndarray,
    base_G: np.ndarray,
    keys: int,
    width: int,
    columns: int | None,
    index_K: np.ndarray,
    step_K: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort the changes within each group of rows of a matrix, by row or by tile, stably.

    Args:
        bound_G: First change of each group, and the number of changes; shape G + 1.
        base_G: Flat index at which each group begins.
        keys: Number of rows or of tiles in a group.
        width: Length of a row.
        columns: Number of columns of a tile; None to sort by row.
        index_K: Flat indices of the changes, group after group.
        step_K: Steps of the changes.

    Returns:
        New arrays of the sorted indices and steps, and the first change of each row or tile, int64[G, keys].
    """
    to_index_K, to_step_K = np.empty_like(index_K), np.empty_like(step_K)
    bound_GC = np.empty((base_G.size, keys), np.int64)
    with threads(min(base_G.size, index_K.size // _PART)):
        changes = index_K, step_K, bound_GC, to_index_K, to_step_K
        _regroup(bound_G, base_G, width, columns or width, columns is not None, *changes)
    return to_index_K, to_step_K, bound_GC
