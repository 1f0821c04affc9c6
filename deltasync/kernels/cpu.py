"""The kernels of `reference` in numba: compiled on first use, cached on disk, parallel over chunks, without the GIL."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numba import carray, get_num_threads, njit, prange, set_num_threads
from numba import threading_layer as _threading_layer
from numba.cpython.unsafe.numbers import trailing_zeros

from deltasync.kernels import reference
from deltasync.kernels.compiled import kernel
from deltasync.kernels.intrinsics import differing_lanes, pointer, prefetch
from deltasync.tensors import index_dtype

_I = reference.INDEX_STEP
_V = reference.VALUE_STEP
_M1 = reference.MIX_1
_M2 = reference.MIX_2
_S30, _S27, _S31 = map(np.uint64, (30, 27, 31))

# Elements per parallel task: enough to hide the scheduling, few enough for the cores to share one tensor.
_CHUNK = 1 << 18
_SCATTER_CHUNK = 1 << 12
_SWAP_CHUNK = 1 << 14

# `_diff` collects the changes of `_ROW` elements in a row, so that offsets fit uint16, and fills up to `_ROWS` rows a call.
_ROW, _ROWS = 1 << 16, 64
_JOINED = 1 << 16  # changes that `_join` copies in one thread
_PIECE = 8 << 20  # bytes that `_room` allocates at once and cuts up


class _Kept(threading.local):
    """State of a thread. It keeps the memory of `_scratch` and `_room`, because new memory is slow when first written."""

    def __init__(self) -> None:
        self.rows: dict[np.dtype, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.left = np.empty(0, np.uint8)
        self.others = 0  # see `beside`


_kept = _Kept()

_AHEAD = 64  # prefetch distance, in elements


@njit(inline="always")
def _cell(key, index, bits):
    z = key + np.uint64(index) * _I + np.uint64(bits) * _V
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


# Here and below, loops that should be vectorized go over slices, with indices from 0. Otherwise the compiler has to allow
# for negative indices, and handles a third as many elements at a time.
@kernel
def _fingerprint(key, bits_N):
    total = np.uint64(0)
    chunks = (bits_N.size + _CHUNK - 1) // _CHUNK
    for chunk in prange(chunks):
        first = chunk * _CHUNK
        total += _cells(key, first, bits_N[first : min(first + _CHUNK, bits_N.size)])
    return total


@njit(inline="always")
def _cells(key, first, bits_C):
    part, at = np.uint64(0), key + np.uint64(first) * _I
    for i in range(bits_C.size):
        part += _cell(at, i, bits_C[i])
    return part


@kernel
def _take(key, bits_N, out_N):
    """Copy pieces that stay in the cache, and hash each copy: the fingerprint is of what was written."""
    total = np.uint64(0)
    chunks = (bits_N.size + _CHUNK - 1) // _CHUNK
    for chunk in prange(chunks):
        part = np.uint64(0)
        end = min((chunk + 1) * _CHUNK, bits_N.size)
        for first in range(chunk * _CHUNK, end, _SCATTER_CHUNK):
            last = min(first + _SCATTER_CHUNK, end)
            out_C = out_N[first:last]
            out_C[:] = bits_N[first:last]
            part += _cells(key, first, out_C)
        total += part
    return total


@kernel
def _fingerprint_runs(key, start_R, bits_RL):
    total = np.uint64(0)
    for r in prange(start_R.size):
        total += _cells(key, start_R[r], bits_RL[r])
    return total


@njit(inline="always")
def _find(old_N, new_N, base, last, offset_P, step_P):
    """Write the changes from element `base` to `last` into a row; return how many there are.

    The first two changes of 64 elements are written without a branch; if there is no change, the next one overwrites what
    was written. At 1 % density a branch would be mispredicted every second time.
    """
    one, last_lane = np.uint64(1), np.uint64(63)
    found = 0
    i = base
    while i + 64 <= last:
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
    """Find the changes from element `first` on, and write those of each `_ROW` elements into one row."""
    for r in prange(count_R.size):
        base = first + r * _ROW
        count_R[r] = _find(old_N, new_N, base, min(base + _ROW, old_N.size), offset_RP[r], step_RP[r])


@kernel
def _advance(key, start, bits_N, new_N, first, all_bits, mask, largest, offset_RP, step_RP, value_RP, count_R):
    """As `_diff`; also add the steps to `bits_N`, while it is in the cache. `value_RP` is scratch."""
    added, above = np.uint64(0), np.int64(0)
    for r in prange(count_R.size):
        base = first + r * _ROW
        found = _find(bits_N, new_N, base, min(base + _ROW, bits_N.size), offset_RP[r], step_RP[r])
        offset_C, step_C, value_C = offset_RP[r, :found], step_RP[r, :found], value_RP[r, :found]
        for k in range(found):
            at = np.uint64(base) + np.uint64(offset_C[k])
            value_C[k] = bits_N[at] + step_C[k]
            bits_N[at] = value_C[k]
        # A separate loop, which the compiler vectorizes.
        part, part_above, index = np.uint64(0), np.int64(0), start + np.uint64(base)
        for k in range(offset_C.size):
            new, at = np.uint64(value_C[k]), index + np.uint64(offset_C[k])
            part += _cell(key, at, new) - _cell(key, at, (new - np.uint64(step_C[k])) & all_bits)
            part_above += (new & mask) > largest
        count_R[r] = found
        added += part
        above += part_above
    return added, above


@kernel
def _join(first, offset_RP, step_RP, start_R, index_K, step_K):
    for r in prange(start_R.size - 1):
        base, low, high = first + r * _ROW, start_R[r], start_R[r + 1]
        index_C, step_C = index_K[low:high], step_K[low:high]
        for k in range(index_C.size):
            index_C[k] = base + np.int64(offset_RP[r, k])
            step_C[k] = step_RP[r, k]


@kernel
def _add(key, bits_N, index_K, step_K, mask, largest, room_RP):
    """Add the steps. `room_RP` is scratch, a row for each task; nothing is allocated here, so nothing fails halfway."""
    added, above = np.uint64(0), np.int64(0)
    chunks = (step_K.size + _SCATTER_CHUNK - 1) // _SCATTER_CHUNK
    tasks = min(chunks, room_RP.shape[0])
    for r in prange(tasks):
        old_C, new_C = room_RP[r, :_SCATTER_CHUNK], room_RP[r, _SCATTER_CHUNK : 2 * _SCATTER_CHUNK]
        part, part_above = np.uint64(0), np.int64(0)
        for chunk in range(r, chunks, tasks):
            first, last = chunk * _SCATTER_CHUNK, min((chunk + 1) * _SCATTER_CHUNK, step_K.size)
            for k in range(first, last):
                if k + _AHEAD < last:
                    prefetch(bits_N, np.uint64(index_K[k + _AHEAD]))
                at = np.uint64(index_K[k])
                old_C[k - first] = bits_N[at]
                new_C[k - first] = bits_N[at] + step_K[k]
                bits_N[at] = new_C[k - first]
            # A separate loop, which the compiler vectorizes.
            index_C = index_K[first:last]
            for k in range(index_C.size):
                old, new = old_C[k], new_C[k]
                part += _cell(key, index_C[k], new) - _cell(key, index_C[k], old)
                part_above += (np.uint64(new) & mask) > largest
        added += part
        above += part_above
    return added, above


@kernel
def _prepare(key, dest, dest_index_K, data_K, absolute, index_K, new_K):
    added, check = np.uint64(0), np.uint64(0)
    chunks = (data_K.size + _SCATTER_CHUNK - 1) // _SCATTER_CHUNK
    for chunk in prange(chunks):
        part, part_check = np.uint64(0), np.uint64(0)
        first, last = chunk * _SCATTER_CHUNK, min((chunk + 1) * _SCATTER_CHUNK, data_K.size)
        # First only loads: many of them miss the cache, and the misses overlap.
        for k in range(first, last):
            if k + _AHEAD < last:
                prefetch(dest, np.uint64(dest_index_K[k + _AHEAD]))
            new_K[k] = dest[np.uint64(dest_index_K[k])]
        new_C, data_C, index_C, dest_C = new_K[first:last], data_K[first:last], index_K[first:last], dest_index_K[first:last]
        for k in range(new_C.size):
            old = new_C[k]
            new = data_C[k]
            if not absolute:
                new += old
            new_C[k] = new
            part += _cell(key, index_C[k], new_C[k]) - _cell(key, index_C[k], old)
            part_check += _weighted(dest_C[k], old)
        added += part
        check += part_check
    return added, check


@njit(inline="always")
def _weighted(at, bits):
    return np.uint64(bits) * (np.uint64(2) * np.uint64(at) + np.uint64(1))


@kernel
def _swap(chunk_CF, bits, index):
    """Exchange values with memory, in chunks.

    A row of `chunk_CF` has the addresses of memory, positions and values, and the number of values. `bits` and `index` only
    give the types.
    """
    check = np.uint64(0)
    for c in prange(chunk_CF.shape[0]):
        count = chunk_CF[c, 3]
        dest = carray(pointer(chunk_CF[c, 0], bits), 1 << 62)
        at_K = carray(pointer(chunk_CF[c, 1], index), count)
        value_K = carray(pointer(chunk_CF[c, 2], bits), count)
        part = np.uint64(0)
        for k in range(count):
            if k + _AHEAD < count:
                prefetch(dest, np.uint64(at_K[k + _AHEAD]))
            at = np.uint64(at_K[k])
            old = dest[at]
            dest[at] = value_K[k]
            value_K[k] = old
            part += _weighted(at, old)
        check += part
    return check


@functools.cache
def _launch() -> None:
    """Start numba's thread pool, from a thread that then ends.

    numba's OpenMP layer sets the thread count and the nesting of the thread that starts the pool, and torch's kernels obey
    both there: `torch.set_num_threads` is undone, or, called later, makes MKL start threads inside threads (28 times as
    slow).
    """
    thread = threading.Thread(target=get_num_threads, name="deltasync-launch")
    thread.start()
    thread.join()


_most: int | None = None  # most threads of one kernel; None for numba's choice, all cores


def limit_threads(count: int) -> None:
    """Use at most `count` threads, but at least one, in each kernel of this process from now on."""
    global _most
    _most = max(1, count)


@functools.cache
def threading_layer() -> str:
    """Return numba's threading layer: `omp`, `tbb`, or `workqueue`, which ends the process if two threads use it."""
    _launch()
    return str(_threading_layer())


_alone = threading.RLock()  # held while kernels run, with a layer that two threads may not use at once


@contextlib.contextmanager
def threads(task_count: int) -> Iterator[None]:
    """Run the kernels inside this context in at most `task_count` threads.

    Waiting for a thread that is not needed takes longer than a small tensor.
    """
    with _alone if threading_layer() == "workqueue" else contextlib.nullcontext():
        before = get_num_threads()
        most = before - _kept.others
        set_num_threads(max(1, min(task_count, most if _most is None else min(most, _most))))
        try:
            yield
        finally:
            set_num_threads(before)


@contextlib.contextmanager
def beside(others: int) -> Iterator[None]:
    """Leave `others` cores to other threads while this thread runs kernels in this context. A kernel gets at least one core.

    A kernel's threads spin while they wait for each other. Where there are too few cores, this costs more than the threads
    save.
    """
    before, _kept.others = _kept.others, others
    try:
        yield
    finally:
        _kept.others = before


def fingerprint(key: int, bits_N: np.ndarray, start: int = 0) -> int:
    """Return what consecutive elements, from flat index `start` on, add to their tensor's `reference.fingerprint`."""
    with threads(bits_N.size // _CHUNK):
        return int(_fingerprint(_from(key, start), bits_N))


def take(key: int, bits_N: np.ndarray, out_N: np.ndarray) -> int:
    """Copy a tensor's bits into `out_N`, of the same shape and dtype. Return their fingerprint."""
    with threads(bits_N.size // _CHUNK):
        return int(_take(np.uint64(key), bits_N, out_N))


def fingerprint_runs(key: int, start_R: np.ndarray, bits_RL: np.ndarray) -> int:
    """Return what runs of consecutive elements add to a tensor's fingerprint. `start_R` has their first flat indices."""
    if start_R.size == 1:  # `_fingerprint_runs` would use one thread
        return fingerprint(key, bits_RL[0], int(start_R[0]))
    with threads(bits_RL.size // _CHUNK):
        return int(_fingerprint_runs(np.uint64(key), start_R, bits_RL))


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.diff`."""
    index, pieces = index_dtype(old_N.size), list[Steps]()
    offset_RP, step_RP, _ = _scratch(old_N.dtype)
    with threads(old_N.size // (2 * _ROW)):
        for first, count_R in _batches(old_N.size):
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
    rows = _scratch(bits_N.dtype)
    first = 0
    try:
        with threads(bits_N.size // (2 * _ROW)):
            for first, count_R in _batches(bits_N.size):
                found = _advance(*at, first, all_bits, mask, largest, *rows, count_R)
                pieces.append(_piece(start + first, count_R, index, bits_N.dtype, _room))
                count_R = count_R[:0]
                added, above = added + int(found[0]), above + found[1]
        return *_joined(pieces, index, bits_N.dtype), added % (1 << 64), above > 0
    except BaseException:
        for index_K, step_K in pieces:
            bits_N[index_K - start] -= step_K
        for r, count in enumerate(count_R):
            bits_N[first + r * _ROW + rows[0][r, :count].astype(np.int64)] -= rows[1][r, :count]
        raise


Steps = tuple[np.ndarray, np.ndarray]
"""Flat indices, in ascending order, and steps."""


def _batches(size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first element of each batch of up to `_ROWS` rows, and room for the number of changes of each row."""
    for first in range(0, size, _ROWS * _ROW):
        yield first, np.zeros(min(_ROWS, -(-(size - first) // _ROW)), np.int64)


def _piece(
    first: int, count_R: np.ndarray, index: np.dtype, bits: np.dtype, empty: Callable[[int, np.dtype], np.ndarray]
) -> Steps:
    """Join the rows of a batch whose first element is number `first`; `empty` makes the arrays."""
    offset_RP, step_RP, _ = _scratch(bits)
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


def _scratch(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the thread's rows for `_diff`, `_advance` and `_add`: offsets, and twice bit patterns of this dtype."""
    if dtype not in _kept.rows:
        # 64 more than `_ROW`: room for what is written where nothing changed. Besides, rows that begin a power of two apart
        # would compete for the same cache lines.
        shape = (_ROWS, _ROW + 64)
        _kept.rows[dtype] = np.empty(shape, np.uint16), np.empty(shape, dtype), np.empty(shape, dtype)
    return _kept.rows[dtype]


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
    _, _, room_RP = _scratch(bits_N.dtype)
    with threads(step_K.size // _SCATTER_CHUNK):
        added, above = _add(_from(key, start), bits_N, index_K, step_K, mask, largest, room_RP)
    return int(added), above > 0


def _from(key: int, start: int) -> np.uint64:
    """Return the key under which elements from flat index `start` on hash as if that index were 0."""
    return np.uint64((key + start * int(_I)) % (1 << 64))


def prepare(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """As `reference.prepare`."""
    new_K = np.empty_like(data_K)
    with threads(data_K.size // _SCATTER_CHUNK):
        added, check = _prepare(np.uint64(key), dest, dest_index_K, data_K, absolute, index_K, new_K)
    return new_K, int(added), int(check)


@functools.cache
def warm_up(bits: np.dtype, index: np.dtype) -> None:
    """Compile `swap_by` for these dtypes, or load it from the cache, so that no commit waits for it."""
    with threads(1):
        _swap(np.empty((0, 4), np.int64), np.empty(0, bits), np.empty(0, index))


SwapTable = list[tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Arguments of calls of `_swap`: one call for all writes of the same dtypes."""


def swap_table(writes: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> SwapTable:
    """Return what `swap_by` needs to do `reference.swap` of these writes. Their arrays must outlive it."""
    alike: dict[tuple[np.dtype, np.dtype], list[tuple[int, int, int, int]]] = {}
    for dest, dest_index_K, value_K in writes:
        chunks = alike.setdefault((value_K.dtype, dest_index_K.dtype), [])
        memory, indices, values = dest.ctypes.data, dest_index_K.ctypes.data, value_K.ctypes.data
        for first in range(0, value_K.size, _SWAP_CHUNK):
            part = indices + first * dest_index_K.itemsize, values + first * value_K.itemsize
            chunks.append((memory, *part, min(_SWAP_CHUNK, value_K.size - first)))
    return [
        (np.array(chunks, np.int64).reshape(-1, 4), np.empty(0, bits), np.empty(0, index))
        for (bits, index), chunks in alike.items()
    ]


def swap_by(table: SwapTable) -> int:
    """As `reference.swap`, from a table. Nothing is allocated here, so nothing fails halfway."""
    check = 0
    for call in table:
        with threads(len(call[0])):
            check += int(_swap(*call))
    return check % (1 << 64)
