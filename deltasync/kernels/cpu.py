"""The kernels of `reference` in numba: compiled on first use, cached on disk, parallel over chunks, without the GIL."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from deltasync.kernels import reference

_I = reference.INDEX_STEP
_V = reference.VALUE_STEP
_M1 = reference.MIX_1
_M2 = reference.MIX_2
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

# Elements per parallel task: large enough to hide the scheduling, small enough for both cores to share one tensor.
_CHUNK = 1 << 18


@njit(inline="always")
def _cell(key, index, bits):  # type: ignore[no-untyped-def]
    z = key + np.uint64(index) * _I + np.uint64(bits) * _V
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


@njit(parallel=True, nogil=True, cache=True)
def _fingerprint(key, bits_N):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    chunks = (bits_N.size + _CHUNK - 1) // _CHUNK
    for chunk in prange(chunks):
        part = np.uint64(0)
        for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, bits_N.size)):
            part += _cell(key, i, bits_N[i])
        total += part
    return total


@njit(parallel=True, nogil=True, cache=True)
def _count(old_N, new_N, count_C):  # type: ignore[no-untyped-def]
    for chunk in prange(count_C.size):
        found = 0
        for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, old_N.size)):
            found += old_N[i] != new_N[i]
        count_C[chunk] = found


@njit(parallel=True, nogil=True, cache=True)
def _compact(old_N, new_N, start_C, index_K, step_K):  # type: ignore[no-untyped-def]
    for chunk in prange(start_C.size - 1):
        k = start_C[chunk]
        if k == start_C[chunk + 1]:
            continue
        for i in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, old_N.size)):
            if old_N[i] != new_N[i]:
                index_K[k] = i
                step_K[k] = new_N[i] - old_N[i]
                k += 1


@njit(nogil=True, cache=True)
def _scatter(key, dest, dest_index_K, data_K, absolute, index_K, old_K):  # type: ignore[no-untyped-def]
    added = np.uint64(0)
    for k in range(data_K.size):
        at = dest_index_K[k]
        old = dest[at]
        new = data_K[k]
        if not absolute:
            new += old
        dest[at] = new
        old_K[k] = old
        added += _cell(key, index_K[k], dest[at]) - _cell(key, index_K[k], old)
    return added


def fingerprint(key: int, bits_N: np.ndarray) -> int:
    """As `reference.fingerprint`."""
    return int(_fingerprint(np.uint64(key), bits_N))


def diff(old_N: np.ndarray, new_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `reference.diff`; two passes over the chunks that changed, one over the others."""
    count_C = np.empty((old_N.size + _CHUNK - 1) // _CHUNK, np.int64)
    _count(old_N, new_N, count_C)
    start_C = np.concatenate(([0], np.cumsum(count_C)))
    index_K = np.empty(start_C[-1], np.int64)
    step_K = np.empty(start_C[-1], old_N.dtype)
    _compact(old_N, new_N, start_C, index_K, step_K)
    return index_K, step_K


def scatter(
    key: int, dest: np.ndarray, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool, index_K: np.ndarray
) -> tuple[np.ndarray, int]:
    """As `reference.scatter`."""
    old_K = np.empty_like(data_K)
    added = _scatter(np.uint64(key), dest, dest_index_K, data_K, absolute, index_K, old_K)
    return old_K, int(added)
