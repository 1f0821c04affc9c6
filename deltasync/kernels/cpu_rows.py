"""What `publish.detect` needs until it compares without writing: `native.compare` and `native.add` in one step."""

from __future__ import annotations

import numpy as np

from deltasync.kernels import native
from deltasync.kernels.native import _Flat, add
from deltasync.tensors import Sparse, Vector

__all__ = ["Taken", "add", "advance", "chunks", "subtract"]


class Taken:
    """Rows that are compared together, and then their changes."""

    def __init__(self, row_RF: np.ndarray, first_T: np.ndarray) -> None:
        self.row_RF, self.first_T = row_RF, first_T
        self.steps: Sparse | None = None
        self.zero_T = np.zeros(first_T.size - 1, np.int64)
        self.vector: _Flat | None = None

    @property
    def chunk_RF(self) -> np.ndarray:
        """The rows in which something changed."""
        count_T = np.zeros(self.zero_T.size, np.int64)
        if self.steps is not None and self.vector is not None:
            count_T = self.vector.count(self.steps.at_K)
        found: np.ndarray = self.row_RF[count_T[self.row_RF[:, 0]] > 0]
        return found

    @property
    def count_R(self) -> np.ndarray:
        """One for each of `chunk_RF`."""
        return np.ones(len(self.chunk_RF), np.int64)

    def join(self, index: np.dtype, bits: np.dtype) -> Sparse:
        """Return the steps."""
        assert self.steps is not None
        return self.steps

    def undo(self, bits: np.dtype) -> None:
        """Undo the changes in memory."""
        if self.steps is not None and self.vector is not None:
            subtract(self.vector, self.zero_T, self.steps)  # type: ignore[arg-type]
            self.steps = None


def chunks(row_RF: np.ndarray, first_T: np.ndarray, bits: np.dtype) -> list[Taken]:
    """Return what one `advance` takes."""
    return [Taken(row_RF, first_T)]


def advance(taken: Taken, key_T: np.ndarray, bound_T2: np.ndarray, bits: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Set memory to new bits and note the changes."""
    elements = int(taken.first_T[-1])
    taken.vector = _Flat(key_T, taken.first_T, np.dtype(np.int32 if elements < 1 << 31 else np.int64), bits)
    found = native.compare(taken.row_RF, taken.vector, bound_T2)  # type: ignore[arg-type]
    tensor_R, first_R, address_R = taken.row_RF[:, 0], taken.row_RF[:, 1], taken.row_RF[:, 3]
    taken.zero_T[tensor_R] = address_R - (taken.first_T[tensor_R] + first_R) * bits.itemsize
    taken.steps = found.steps
    add(taken.vector, taken.zero_T, found.steps)  # type: ignore[arg-type]
    return found.gain_T, found.above_T


def subtract(vector: Vector, zero_T: np.ndarray, steps: Sparse) -> None:
    """Undo `add`."""
    add(vector, zero_T, Sparse(steps.at_K, np.negative(steps.data_K)))
