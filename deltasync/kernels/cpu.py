"""The kernels of `reference` in numba: compiled on first use, cached on disk, parallel over chunks, without the GIL.

`cpu_diff` has the rest of them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numba import carray, get_num_threads, njit, prange, set_num_threads
from numba import threading_layer as _threading_layer

from deltasync.kernels import reference
from deltasync.kernels.compiled import kernel
from deltasync.kernels.intrinsics import pointer, prefetch, prefetch_to_write

_I = reference.INDEX_STEP
_V = reference.VALUE_STEP
_M1 = reference.MIX_1
_M2 = reference.MIX_2
_S30, _S27, _S31 = map(np.uint64, (30, 27, 31))

# Elements, and changes, per parallel task: enough to hide the scheduling, few enough for the cores to share one tensor.
_CHUNK = 1 << 18
_PIECE = 1 << 9  # elements that are hashed while memory is asked for the next ones: hardware does not look that far ahead
CHANGES = 1 << 12
_SWAP_CHUNK = 1 << 14

AHEAD = 64  # prefetch distance, in elements
_LINE_BYTES = 64


@njit(inline="always")
def cell(key, index, bits):
    """Return what an element adds to the fingerprint of its tensor, as `reference.cell_hash`."""
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
        part = np.uint64(0)
        end = min((chunk + 1) * _CHUNK, bits_N.size)
        for first in range(chunk * _CHUNK, end, _PIECE):
            last = min(first + _PIECE, end)
            prefetch_range(bits_N, last, last + _PIECE)
            part += _cells(key, first, bits_N[first:last])
        total += part
    return total


@njit(inline="always")
def _cells(key, first, bits_C):
    part, at = np.uint64(0), key + np.uint64(first) * _I
    for i in range(bits_C.size):
        part += cell(at, i, bits_C[i])
    return part


@njit(inline="always")
def prefetch_range(array, first, last):
    """Prefetch consecutive elements, also such as lie behind the array."""
    for at in range(first, last, _LINE_BYTES // array.itemsize):
        prefetch(array, at)


@kernel
def _take(key, bits_N, out_N):
    """Copy pieces that stay in the cache, and hash each copy: the fingerprint is of what was written."""
    total = np.uint64(0)
    chunks = (bits_N.size + _CHUNK - 1) // _CHUNK
    for chunk in prange(chunks):
        part = np.uint64(0)
        end = min((chunk + 1) * _CHUNK, bits_N.size)
        for first in range(chunk * _CHUNK, end, _PIECE):
            last = min(first + _PIECE, end)
            prefetch_range(bits_N, last, last + _PIECE)
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


@kernel
def _prepare(key, dest, dest_index_K, data_K, absolute, index_K, new_K):
    added, check = np.uint64(0), np.uint64(0)
    chunks = (data_K.size + CHANGES - 1) // CHANGES
    for chunk in prange(chunks):
        part, part_check = np.uint64(0), np.uint64(0)
        first, last = chunk * CHANGES, min((chunk + 1) * CHANGES, data_K.size)
        # First only loads: many of them miss the cache, and the misses overlap.
        for k in range(first, last):
            if k + AHEAD < last:
                prefetch(dest, np.uint64(dest_index_K[k + AHEAD]))
            new_K[k] = dest[np.uint64(dest_index_K[k])]
        new_C, data_C, index_C, dest_C = new_K[first:last], data_K[first:last], index_K[first:last], dest_index_K[first:last]
        for k in range(new_C.size):
            old = new_C[k]
            new = data_C[k]
            if not absolute:
                new += old
            new_C[k] = new
            part += cell(key, index_C[k], new_C[k]) - cell(key, index_C[k], old)
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
            if k + AHEAD < count:
                prefetch_to_write(dest, np.uint64(at_K[k + AHEAD]))
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
    try:
        thread.start()
        thread.join()
    except RuntimeError:  # Python 3.12 and newer start no thread while the interpreter exits, when torch computes no more
        get_num_threads()


class _Thread(threading.local):
    others = 0  # see `beside`


_thread = _Thread()
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


_alone = threading.Lock()  # held while kernels run, with a layer that two threads may not use at once


@contextlib.contextmanager
def threads(task_count: int) -> Iterator[None]:
    """Run the kernels inside this context in one thread, or, if they have more than one task, in all.

    Waiting for other threads takes longer than a small tensor. Some of the threads would be worse than all: libgomp ends
    those that a smaller team does not need, and makes them again for the next larger one.
    """
    with _alone if threading_layer() == "workqueue" else contextlib.nullcontext():
        before = get_num_threads()
        most = max(1, min(before - _thread.others, _most or before))
        set_num_threads(most if task_count > 1 else 1)
        try:
            yield
        finally:
            set_num_threads(before)


@contextlib.contextmanager
def leave_cores(others: int) -> Iterator[None]:
    """Leave `others` cores to other threads while this thread runs kernels in this context. A kernel gets at least one core.

    A kernel's threads spin while they wait for each other. Where there are too few cores, this costs more than the threads
    save.
    """
    before, _thread.others = _thread.others, others
    try:
        yield
    finally:
        _thread.others = before


def fingerprint(key: int, bits_N: np.ndarray, start: int = 0) -> int:
    """Return what consecutive elements, from flat index `start` on, add to their tensor's `reference.fingerprint`."""
    with threads(bits_N.size // _CHUNK):
        return int(_fingerprint(key_from(key, start), bits_N))


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


def key_from(key: int, start: int) -> np.uint64:
    """Return the key under which elements from flat index `start` on hash as if that index were 0."""
    return np.uint64((key + start * int(_I)) % (1 << 64))


def prepare(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """As `reference.prepare`."""
    new_K = np.empty_like(data_K)
    with threads(data_K.size // CHANGES):
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
