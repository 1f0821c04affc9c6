"""The kernels that find what differs between weights, in numba; see `cpu`, and `cpu_rows` for many tensors at once."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numba import njit, prange
from numba.cpython.unsafe.numbers import trailing_zeros

from deltasync.kernels.compiled import kernel
from deltasync.kernels.cpu import prefetch_range, threads
from deltasync.kernels.intrinsics import differing_lanes
from deltasync.tensors import index_dtype

# Kernels write the changes of `ROW` elements into a row, so that offsets fit uint16, and fill up to `_ROWS` rows a call.
ROW, _ROWS = 1 << 16, 256
_AHEAD_BYTES = 1 << 10  # how far ahead memory is asked for
_JOINED = 1 << 16  # changes that `_join` copies in one thread
_PIECE = 8 << 20  # bytes that `room` allocates at once and cuts up


class _Kept(threading.local):
    """Memory of a thread, which `scratch` and `_room` give out, because new memory is slow when first written."""

    def __init__(self) -> None:
        self.rows: dict[np.dtype, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.left = np.empty(0, np.uint8)


_kept = _Kept()


@njit(inline="always")
def find(old_N, new_N, base, last, offset_P, step_P):
    """Write the changes from element `base` to `last` into a row; return how many there are.

    The first two changes of 64 elements are written without a branch; if there is no change, the next one overwrites what
    was written. At 1 % density a branch would be mispredicted every second time.
    """
    one, last_lane = np.uint64(1), np.uint64(63)
    found = 0
    i = base
    ahead = _AHEAD_BYTES // old_N.itemsize
    while i + 64 <= last:
        prefetch_range(old_N, i + ahead, i + ahead + 64)
        prefetch_range(new_N, i + ahead, i + ahead + 64)
        changed = differing_lanes(old_N, new_N, i)
        for _ in range(2):
            at = i + np.int64(trailing_zeros(changed) & last_lane)
            offset_P[found] = at - base
            step_P[found] = new_N[at] - old_N[at]
            found += changed != 0
            changed &= changed - one
        while changed:
            at = i + np.int64(trailing_zeros(changed))
            offset_P[found] = at - base
            step_P[found] = new_N[at] - old_N[at]
            found += 1
            changed &= changed - one
        i += 64
    while i < last:
        if old_N[i] != new_N[i]:
            offset_P[found] = i - base
            step_P[found] = new_N[i] - old_N[i]
            found += 1
        i += 1
    return found


@kernel
def _diff(old_N, new_N, first, offset_RP, step_RP, count_R):
    """Find the changes from element `first` on, and write those of each `ROW` elements into one row."""
    for r in prange(count_R.size):
        base = first + r * ROW
        count_R[r] = find(old_N, new_N, base, min(base + ROW, old_N.size), offset_RP[r], step_RP[r])


@kernel
def _join(first, offset_RP, step_RP, start_R, index_K, step_K):
    for r in prange(start_R.size - 1):
        base, low, high = first + r * ROW, start_R[r], start_R[r + 1]
        index_C, step_C = index_K[low:high], step_K[low:high]
        for k in range(index_C.size):
            index_C[k] = base + np.int64(offset_RP[r, k])
            step_C[k] = step_RP[r, k]


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.diff`."""
    index, pieces = index_dtype(old_N.size), list[Steps]()
    offset_RP, step_RP, _ = scratch(old_N.dtype)
    for first, count_R in _batches(old_N.size):
        with threads(count_R.size // 2):
            _diff(old_N, new_N, first, offset_RP, step_RP, count_R)
        pieces.append(_piece(first, count_R, index, old_N.dtype))
    return _joined(pieces, index, old_N.dtype)


Steps = tuple[np.ndarray, np.ndarray]
"""Flat indices, in ascending order, and steps."""


def _batches(size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first element of each batch of up to `_ROWS` rows, and room for the number of changes of each row."""
    for first in range(0, size, _ROWS * ROW):
        yield first, np.zeros(min(_ROWS, -(-(size - first) // ROW)), np.int64)


def _piece(first: int, count_R: np.ndarray, index: np.dtype, bits: np.dtype) -> Steps:
    """Join the rows of a batch whose first element is number `first`."""
    offset_RP, step_RP, _ = scratch(bits)
    start_R = np.concatenate(([0], np.cumsum(count_R)))
    index_K, step_K = np.empty(start_R[-1], index), np.empty(start_R[-1], bits)
    with threads(int(start_R[-1]) // _JOINED):
        _join(first, offset_RP, step_RP, start_R, index_K, step_K)
    return index_K, step_K


def room(count: int, dtype: np.dtype) -> np.ndarray:
    """Return an array, cut out of a piece of memory that has huge pages.

    An array of its own would have many small pages, each of which the system clears first.
    """
    size = -(-count * dtype.itemsize // 64) * 64
    if _kept.left.size < size:
        _kept.left = np.empty(max(_PIECE, size), np.uint8)
    array, _kept.left = _kept.left[: count * dtype.itemsize], _kept.left[size:]
    return array.view(dtype)


def _joined(pieces: Sequence[Steps], index: np.dtype, bits: np.dtype) -> Steps:
    if len(pieces) == 1:
        return pieces[0]
    empty = np.empty(0, index), np.empty(0, bits)
    index_K, step_K = (np.concatenate(parts) for parts in zip(empty, *pieces, strict=True))
    return index_K, step_K


def scratch(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the thread's rows for `_diff` and `cpu_rows.advance`: offsets, and twice bit patterns of this dtype."""
    if dtype not in _kept.rows:
        # 64 more than `ROW`: room for what is written where nothing changed. Besides, rows that begin a power of two apart
        # would compete for the same cache lines.
        shape = (_ROWS, ROW + 64)
        _kept.rows[dtype] = _paged(shape, np.dtype(np.uint16)), _paged(shape, dtype), _paged(shape, dtype)
    return _kept.rows[dtype]


def _paged(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Return an array that takes memory page by page as it is written. Where few elements change, little of it is."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
