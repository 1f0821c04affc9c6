"""`kernels.native` for the bits of one tensor."""

from __future__ import annotations

import numpy as np

from deltasync.kernels import native
from deltasync.tensors import Sparse, TensorSpec, Vector


def vector_of(key: int, bits_N: np.ndarray, start: int = 0) -> Vector:
    """A vector of one tensor with this fingerprint key, of which `bits_N` begins at index `start`."""
    spec = TensorSpec("w", f"int{8 * bits_N.itemsize}", (start + bits_N.size,))
    vector = Vector(bits_N.itemsize, (spec,), np.array([0, spec.element_count], np.int64))
    vars(vector)["key_T"] = np.array([key], np.uint64)
    return vector


def add(
    key: int,
    bits_N: np.ndarray,
    index_K: np.ndarray,
    step_K: np.ndarray,
    bounds: tuple[int, int],
    start: int = 0,
) -> tuple[int, bool]:
    """Add steps at positions in `bits_N`, whose first element has the index `start`; see `native.add`."""
    zero_T = np.array([bits_N.ctypes.data - start * bits_N.itemsize])
    steps = Sparse(index_K + np.int64(start), step_K)
    gain_T, above_T = native.add(vector_of(key, bits_N, start), zero_T, steps, np.array([bounds], np.uint64))
    return int(gain_T[0]), bool(above_T[0])


def compare(
    key: int, old_N: np.ndarray, new_N: np.ndarray, bounds: tuple[int, int], start: int
) -> tuple[np.ndarray, np.ndarray, int, bool]:
    """Return positions, steps and what `add` returns. See `native.compare`."""
    row_RF = np.array([(0, start, old_N.size, old_N.ctypes.data, new_N.ctypes.data)], np.int64)
    steps, gain_T, above_T = native.compare(
        row_RF, vector_of(key, old_N, start), np.array([bounds], np.uint64)
    )
    return *steps, int(gain_T[0]), bool(above_T[0])
