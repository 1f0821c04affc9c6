"""The kernels of `reference` in numba: compiled on first use, cached on disk, parallel over chunks, without the GIL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, prange, set_num_threads, types
from numba.extending import intrinsic

from deltasync.kernels import reference
from deltasync.types import index_dtype

_I = reference.INDEX_STEP
_V = reference.VALUE_STEP
_M1 = reference.MIX_1
_M2 = reference.MIX_2
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

# Elements per parallel task: large enough to hide the scheduling, small enough for both cores to share one tensor.
_CHUNK = 1 << 18
_SCATTER_CHUNK = 1 << 12
_JOINED = 1 << 17


@intrinsic
def _trailing_zeros(_context, _value):
    def generate(_context, builder, _signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@njit(inline="always")
def _cell(key, index, bits):
    z = key + np.uint64(index) * _I + np.uint64(bits) * _V
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@njit(parallel=True, nogil=True, cache=True)
def _fingerprint(key, bits_N):
    total = np.uint64(0)
    chunks = (bits_N.size + _CHUNK - 1) // _CHUNK
    for chunk in prange(chunks):
        part = np.uint64(0)
        for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, bits_N.size)):
            part += _cell(key, i, bits_N[i])
        total += part
    return total


@njit(parallel=True, nogil=True, cache=True)
def _fingerprint_runs(key, start_R, bits_RL):
    total = np.uint64(0)
    for r in prange(start_R.size):
        part = np.uint64(0)
        for i in range(bits_RL.shape[1]):
            part += _cell(key, start_R[r] + i, bits_RL[r, i])
        total += part
    return total


@njit(parallel=True, nogil=True, cache=True)
def _diff(old_N, new_N, part, room, index_R, step_R, count_P):
    """Each part of the tensor into its own rows, which hold 64 more than `room`; counts on where `room` is exceeded.

    The first two changes of 64 elements are written without a branch, into a place that the next one takes if there was
    none: at 1 % density a branch there would be mispredicted every second time.
    """
    one, last_lane = np.uint64(1), np.uint64(63)
    for p in prange(count_P.size):
        first = p * part
        last = min(first + part, old_N.size)
        found = 0
        i = first
        while i + 64 <= last:
            old, new = old_N[i : i + 64], new_N[i : i + 64]
            changed = np.uint64(0)
            for j in range(64):
                changed |= np.uint64(old[j] != new[j]) << np.uint64(j)
            if found <= room:
                for _ in range(2):
                    at = i + np.int64(_trailing_zeros(changed) & last_lane)
                    index_R[p, found] = at
                    step_R[p, found] = new_N[at] - old_N[at]
                    found += changed != 0
                    changed &= changed - one
                while changed:
                    at = i + np.int64(_trailing_zeros(changed))
                    index_R[p, found] = at
                    step_R[p, found] = new_N[at] - old_N[at]
                    found += 1
                    changed &= changed - one
            else:
                while changed:
                    found += 1
                    changed &= changed - one
            i += 64
        while i < last:
            if old_N[i] != new_N[i]:
                if found <= room:
                    index_R[p, found] = i
                    step_R[p, found] = new_N[i] - old_N[i]
                found += 1
            i += 1
        count_P[p] = found


@njit(parallel=True, nogil=True, cache=True)
def _join(index_R, step_R, start_P, index_K, step_K):
    for p in prange(start_P.size - 1):
        low, high = start_P[p], start_P[p + 1]
        index_K[low:high] = index_R[p, : high - low]
        step_K[low:high] = step_R[p, : high - low]


@njit(parallel=True, nogil=True, cache=True)
def _scatter(key, dest, dest_index_K, data_K, absolute, index_K, old_K):
    added = np.uint64(0)
    chunks = (data_K.size + _SCATTER_CHUNK - 1) // _SCATTER_CHUNK
    for chunk in prange(chunks):
        part = np.uint64(0)
        first, last = chunk * _SCATTER_CHUNK, min((chunk + 1) * _SCATTER_CHUNK, data_K.size)
        # Nothing but loads first: many of them miss the cache, and so they wait together.
        for k in range(first, last):
            old_K[k] = dest[dest_index_K[k]]
        for k in range(first, last):
            at = dest_index_K[k]
            old = old_K[k]
            new = data_K[k]
            if not absolute:
                new += old
            dest[at] = new
            part += _cell(key, index_K[k], dest[at]) - _cell(key, index_K[k], old)
        added += part
    return added


@njit(parallel=True, nogil=True, cache=True)
def _prepare(key, dest, dest_index_K, data_K, absolute, index_K, old_K, new_K):
    added = np.uint64(0)
    chunks = (data_K.size + _SCATTER_CHUNK - 1) // _SCATTER_CHUNK
    for chunk in prange(chunks):
        part = np.uint64(0)
        first, last = chunk * _SCATTER_CHUNK, min((chunk + 1) * _SCATTER_CHUNK, data_K.size)
        for k in range(first, last):
            old_K[k] = dest[dest_index_K[k]]
        for k in range(first, last):
            new = data_K[k]
            if not absolute:
                new += old_K[k]
            new_K[k] = new
            part += _cell(key, index_K[k], new_K[k]) - _cell(key, index_K[k], old_K[k])
        added += part
    return added


@njit(parallel=True, nogil=True, cache=True)
def _exchange(dest, dest_index_K, new_K, old_K):
    differing = 0
    chunks = (new_K.size + _SCATTER_CHUNK - 1) // _SCATTER_CHUNK
    for chunk in prange(chunks):
        found = 0
        first, last = chunk * _SCATTER_CHUNK, min((chunk + 1) * _SCATTER_CHUNK, new_K.size)
        # Loads, then stores, as in `_scatter`; unsigned indices, so that numba need not look for negative ones.
        now = np.empty(last - first, dest.dtype)
        for k in range(first, last):
            now[k - first] = dest[np.uint64(dest_index_K[k])]
        for k in range(first, last):
            dest[np.uint64(dest_index_K[k])] = new_K[k]
        for k in range(first, last):
            found += now[k - first] != old_K[k]
            old_K[k] = now[k - first]
        differing += found
    return differing


@contextlib.contextmanager
def threads(task_count: int) -> Iterator[None]:
    """Run kernels in at most `task_count` threads: waiting for one that is not needed costs more than a small tensor."""
    before = get_num_threads()
    set_num_threads(max(1, min(before, task_count)))
    try:
        yield
    finally:
        set_num_threads(before)


def fingerprint(key: int, bits_N: np.ndarray) -> int:
    """As `reference.fingerprint`."""
    with threads(bits_N.size // _CHUNK):
        return int(_fingerprint(np.uint64(key), bits_N))


def fingerprint_runs(key: int, start_R: np.ndarray, bits_RL: np.ndarray) -> int:
    """What runs of consecutive elements add to a tensor's fingerprint; `start_R` are their first flat indices."""
    if start_R.size == 1:  # one after the other they share no work
        return fingerprint((key + int(start_R[0]) * int(_I)) % (1 << 64), bits_RL[0])
    with threads(bits_RL.size // _CHUNK):
        return int(_fingerprint_runs(np.uint64(key), start_R, bits_RL))


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.diff`; reads both once, and again where more than one element in eight changed."""
    part = min(_CHUNK, max(64, old_N.size))
    count_P = np.zeros((old_N.size + part - 1) // part, np.int64)
    room = part // 8 + 64
    while True:
        index_R = np.empty((count_P.size, room + 64), index_dtype(old_N.size))
        step_R = np.empty((count_P.size, room + 64), old_N.dtype)
        with threads(count_P.size):
            _diff(old_N, new_N, part, room, index_R, step_R, count_P)
        most = int(count_P.max(initial=0))
        if most <= room:
            break
        room = most
    start_P = np.concatenate(([0], np.cumsum(count_P)))
    index_K = np.empty(start_P[-1], index_R.dtype)
    step_K = np.empty(start_P[-1], old_N.dtype)
    with threads(index_K.size // _JOINED):
        _join(index_R, step_R, start_P, index_K, step_K)
    return index_K, step_K


def scatter(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, int]:
    """As `reference.scatter`."""
    old_K = np.empty_like(data_K)
    with threads(data_K.size // _SCATTER_CHUNK):
        added = _scatter(np.uint64(key), dest, dest_index_K, data_K, absolute, index_K, old_K)
    return old_K, int(added)


def prepare(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """What `scatter` would do, without doing it: the old and the new bit patterns, and what they add to the fingerprint."""
    old_K, new_K = np.empty_like(data_K), np.empty_like(data_K)
    with threads(data_K.size // _SCATTER_CHUNK):
        added = _prepare(np.uint64(key), dest, dest_index_K, data_K, absolute, index_K, old_K, new_K)
    return old_K, new_K, int(added)


def exchange(dest: np.ndarray, dest_index_K: np.ndarray, new_K: np.ndarray, old_K: np.ndarray) -> int:
    """Write `new_K` into `dest` and what was there into `old_K`, both mutated; how many were not what `old_K` said."""
    with threads(new_K.size // _SCATTER_CHUNK):
        return int(_exchange(dest, dest_index_K, new_K, old_K))
