"""`kernels.cpu_rows` for the bits of one tensor."""

from __future__ import annotations

import numpy as np

from deltasync.kernels import cpu_rows
from deltasync.tensors import Sparse, TensorSpec, Vector

_FIRST = np.zeros(1, np.int64)


def _places(key: int, bounds: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([key], np.uint64), np.array([bounds], np.uint64)


def add(
    key: int, bits_N: np.ndarray, index_K: np.ndarray, step_K: np.ndarray, bounds: tuple[int, int], start: int = 0
) -> tuple[int, bool]:
    """Add steps at positions in `bits_N`, whose first element has the index `start`; see `cpu_rows.add`."""
    spec = TensorSpec("w", f"int{8 * bits_N.itemsize}", (start + bits_N.size,))
    vector = Vector(bits_N.itemsize, (spec,), np.array([0, spec.element_count], np.int64))
    vars(vector)["key_T"] = np.array([key], np.uint64)
    zero_T = np.array([bits_N.ctypes.data - start * bits_N.itemsize])
    sparse = Sparse(index_K + np.int64(start), step_K)
    gain_T, above_T = cpu_rows.add(vector, zero_T, sparse, np.array([bounds], np.uint64))
    return int(gain_T[0]), bool(above_T[0])


def advance(
    key: int, bits_N: np.ndarray, new_N: np.ndarray, bounds: tuple[int, int], start: int, index: np.dtype
) -> tuple[np.ndarray, np.ndarray, int, bool]:
    """Set `bits_N` to `new_N`; return indices, steps and what `add` returns. See `cpu_rows.advance`."""
    row_RF = np.array([(0, start, bits_N.size, bits_N.ctypes.data, new_N.ctypes.data)], np.int64)
    found = [(np.empty(0, index), np.empty(0, bits_N.dtype))]
    gained, above = 0, False
    for taken in cpu_rows.chunks(row_RF, _FIRST, bits_N.dtype):
        gain_T, above_T = cpu_rows.advance(taken, *_places(key, bounds), bits_N.dtype)
        gained, above = gained + int(gain_T[0]), above or bool(above_T[0])
        found.append(taken.join(index, bits_N.dtype))
    index_K, step_K = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return index_K, step_K, gained % (1 << 64), above
