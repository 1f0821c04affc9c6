"""The kernels that compare weights and add what differs to a copy of them, in numba; see `cpu`."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numba import njit, prange
from numba.cpython.unsafe.numbers import trailing_zeros

from deltasync.kernels.compiled import kernel
from deltasync.kernels.cpu import AHEAD, CHANGES, cell, key_from, prefetch_range, threads
from deltasync.kernels.intrinsics import differing_lanes, prefetch_to_write
from deltasync.tensors import index_dtype

# Kernels write the changes of `ROW` elements into a row, so that offsets fit uint16, and fill up to `_ROWS` rows a call.
ROW, _ROWS = 1 << 16, 256
_AHEAD_BYTES = 1 << 10  # how far ahead memory is asked for
_JOINED = 1 << 16  # changes that `_join` copies in one thread
_PIECE = 8 << 20  # bytes that `_room` allocates at once and cuts up


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
def _advance(key, start, bits_N, new_N, first, all_bits, mask, largest, offset_RP, step_RP, value_RP, count_R):
    """As `_diff`; also add the steps to `bits_N`, while it is in the cache. `value_RP` is scratch."""
    added, above = np.uint64(0), np.int64(0)
    for r in prange(count_R.size):
        base = first + r * ROW
        found = find(bits_N, new_N, base, min(base + ROW, bits_N.size), offset_RP[r], step_RP[r])
        offset_C, step_C, value_C = offset_RP[r, :found], step_RP[r, :found], value_RP[r, :found]
        for k in range(found):
            at = np.uint64(base) + np.uint64(offset_C[k])
            value_C[k] = bits_N[at] + step_C[k]
            bits_N[at] = value_C[k]
        # A separate loop, which the compiler vectorizes.
        part, part_above, index = np.uint64(0), np.int64(0), start + np.uint64(base)
        for k in range(offset_C.size):
            new, at = np.uint64(value_C[k]), index + np.uint64(offset_C[k])
            part += cell(key, at, new) - cell(key, at, (new - np.uint64(step_C[k])) & all_bits)
            part_above += (new & mask) > largest
        count_R[r] = found
        added += part
        above += part_above
    return added, above


@kernel
def _join(first, offset_RP, step_RP, start_R, index_K, step_K):
    for r in prange(start_R.size - 1):
        base, low, high = first + r * ROW, start_R[r], start_R[r + 1]
        index_C, step_C = index_K[low:high], step_K[low:high]
        for k in range(index_C.size):
            index_C[k] = base + np.int64(offset_RP[r, k])
            step_C[k] = step_RP[r, k]


@kernel
def _add(key, bits_N, index_K, step_K, mask, largest, room_RP):
    """Add the steps. `room_RP` is scratch, a row for each task; nothing is allocated here, so nothing fails halfway."""
    added, above = np.uint64(0), np.int64(0)
    chunks = (step_K.size + CHANGES - 1) // CHANGES
    tasks = min(chunks, room_RP.shape[0])
    for r in prange(tasks):
        old_C, new_C = room_RP[r, :CHANGES], room_RP[r, CHANGES : 2 * CHANGES]
        part, part_above = np.uint64(0), np.int64(0)
        for chunk in range(r, chunks, tasks):
            first, last = chunk * CHANGES, min((chunk + 1) * CHANGES, step_K.size)
            for k in range(first, last):
                if k + AHEAD < last:
                    prefetch_to_write(bits_N, np.uint64(index_K[k + AHEAD]))
                at = np.uint64(index_K[k])
                old_C[k - first] = bits_N[at]
                new_C[k - first] = bits_N[at] + step_K[k]
                bits_N[at] = new_C[k - first]
            # A separate loop, which the compiler vectorizes.
            index_C = index_K[first:last]
            for k in range(index_C.size):
                old, new = old_C[k], new_C[k]
                part += cell(key, index_C[k], new) - cell(key, index_C[k], old)
                part_above += (np.uint64(new) & mask) > largest
        added += part
        above += part_above
    return added, above


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.diff`."""
    index, pieces = index_dtype(old_N.size), list[Steps]()
    offset_RP, step_RP, _ = scratch(old_N.dtype)
    for first, count_R in _batches(old_N.size):
        with threads(count_R.size // 2):
            _diff(old_N, new_N, first, offset_RP, step_RP, count_R)
        pieces.append(_piece(first, count_R, index, old_N.dtype, np.empty))
    return _joined(pieces, index, old_N.dtype)


def advance(
    key: int, bits_N: np.ndarray, new_N: np.ndarray, bounds: tuple[int, int], start: int, index: np.dtype
) -> tuple[np.ndarray, np.ndarray, int, bool]:
    """Set `bits_N` to `new_N`: `diff` and `add` in one. If this raises, `bits_N` is unchanged.

    Args:
        key: Fingerprint key of the tensor.
        bits_N: Bit patterns of consecutive elements; mutated.
        new_N: Their new bit patterns.
        bounds: As in `add`.
        start: Flat index of the first element in the tensor.
        index: dtype of the indices to return.

    Returns:
        Flat indices in the whole tensor, steps, and what `add` returns.
    """
    mask, largest = np.array(bounds, np.uint64)
    all_bits = np.uint64((1 << 8 * bits_N.itemsize) - 1)
    at = np.uint64(key), np.uint64(start), bits_N, new_N
    added, above, pieces, count_R = 0, 0, list[Steps](), np.empty(0, np.int64)
    rows = scratch(bits_N.dtype)
    first = 0
    try:
        for first, count_R in _batches(bits_N.size):
            with threads(count_R.size // 2):
                found = _advance(*at, first, all_bits, mask, largest, *rows, count_R)
            pieces.append(_piece(start + first, count_R, index, bits_N.dtype, _room))
            count_R = count_R[:0]
            added, above = added + int(found[0]), above + found[1]
        return *_joined(pieces, index, bits_N.dtype), added % (1 << 64), above > 0
    except BaseException:
        for index_K, step_K in pieces:
            bits_N[index_K - start] -= step_K
        for r, count in enumerate(count_R):
            bits_N[first + r * ROW + rows[0][r, :count].astype(np.int64)] -= rows[1][r, :count]
        raise


Steps = tuple[np.ndarray, np.ndarray]
"""Flat indices, in ascending order, and steps."""


def _batches(size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first element of each batch of up to `_ROWS` rows, and room for the number of changes of each row."""
    for first in range(0, size, _ROWS * ROW):
        yield first, np.zeros(min(_ROWS, -(-(size - first) // ROW)), np.int64)


def _piece(
    first: int, count_R: np.ndarray, index: np.dtype, bits: np.dtype, empty: Callable[[int, np.dtype], np.ndarray]
) -> Steps:
    """Join the rows of a batch whose first element is number `first`; `empty` makes the arrays."""
    offset_RP, step_RP, _ = scratch(bits)
    start_R = np.concatenate(([0], np.cumsum(count_R)))
    index_K, step_K = empty(start_R[-1], index), empty(start_R[-1], bits)
    with threads(int(start_R[-1]) // _JOINED):
        _join(first, offset_RP, step_RP, start_R, index_K, step_K)
    return index_K, step_K


def _room(count: int, dtype: np.dtype) -> np.ndarray:
    """Return an array, cut out of a piece of memory that has huge pages.

    An array of its own would have many small pages, each of which the system clears first.
    """
    size = -(-count * dtype.itemsize // 64) * 64
    if _kept.left.size < size:
        _kept.left = np.empty(max(_PIECE, size), np.uint8)
    room, _kept.left = _kept.left[: count * dtype.itemsize], _kept.left[size:]
    return room.view(dtype)


def _joined(pieces: Sequence[Steps], index: np.dtype, bits: np.dtype) -> Steps:
    if len(pieces) == 1:
        return pieces[0]
    empty = np.empty(0, index), np.empty(0, bits)
    index_K, step_K = (np.concatenate(parts) for parts in zip(empty, *pieces, strict=True))
    return index_K, step_K


def scratch(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the thread's rows for `_diff`, `_advance` and `_add`: offsets, and twice bit patterns of this dtype."""
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


def add(
    key: int, bits_N: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, bounds: tuple[int, int], start: int = 0
) -> tuple[int, bool]:
    """Add steps to elements of a tensor.

    Args:
        key: Fingerprint key of the tensor.
        bits_N: Bit patterns of consecutive elements; mutated.
        index_K: Positions in `bits_N`, distinct.
        step_K: What to add at each position, modulo 2**width.
        bounds: A mask, and the largest masked bit pattern that is not reported.
        start: Flat index of the first element in the tensor.

    Returns:
        What this adds to the tensor's fingerprint, modulo 2**64, and whether a new masked bit pattern exceeds the bound.
    """
    mask, largest = np.array(bounds, np.uint64)
    _, _, room_RP = scratch(bits_N.dtype)
    with threads(step_K.size // CHANGES):
        added, above = _add(key_from(key, start), bits_N, index_K, step_K, mask, largest, room_RP)
    return int(added), above > 0
