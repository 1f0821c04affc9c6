"""Memory for all tensors of a model, in few large pieces: the kernel backs those by huge pages.

Page by page, of 4 kB, the first write to a copy of a model takes longer than copying it.
"""

from __future__ import annotations

import numpy as np

_FIRST_BYTES, _MOST_BYTES = 1 << 20, 1 << 28
_ALIGNED_BYTES = 64


class Slabs:
    """Gives out zeroed arrays. A piece of memory is freed once no array in it is used any more."""

    def __init__(self) -> None:
        self._next_bytes = _FIRST_BYTES
        self._left_B = np.empty(0, np.uint8)

    def zeros(self, count: int, dtype: np.dtype) -> np.ndarray:
        """An array of shape `count`.

        Raises:
            MemoryError: there is no more.
        """
        size = count * dtype.itemsize
        padded = -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if padded > self._left_B.size:
            self._left_B = np.zeros(max(padded, self._next_bytes), np.uint8)
            self._next_bytes = min(4 * self._next_bytes, _MOST_BYTES)
        taken_B, self._left_B = self._left_B[:size], self._left_B[padded:]
        return taken_B.view(dtype)
