"""Tiles: `context` cuts matrices so that a worker with an even shard of one decodes it from what it holds.

The last two dimensions of a tensor are a matrix, which is cut into rows of tiles of one shape. Tiles follow each other by
matrix, then by row of tiles, then from left to right. Each is a block; its elements follow each other by row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np

from deltasync.kernels import counts
from deltasync.kernels.rans import Blocks
from deltasync.tensors import Region, TensorSpec

TILE = 1 << 14
"""Fewest elements of a tile in a matrix of more than four tiles."""
SMALL = 4 * TILE
"""A tensor of fewer elements that has no tiles is coded by gaps."""
LEAST = 1 << 12
"""Fewest elements of a matrix that has tiles. The smallest matrices have four, however small these are."""
FEW = 10
"""With fewer changes per tile, gaps take less: about 7 bits more for each change, without the about 70 bits of a tile."""

MOST_WAYS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of a range of a tensor, at most 16 by 16 in a matrix.

    Attributes:
        shape: Number of matrices, rows and columns of the tensor.
        first: Matrix, row and column where the range begins; the column is 0.
        counts: Number of matrices in the range, of rows of tiles in each, of tiles in a row.
        tile: Number of matrices (1), rows and columns of a tile.
    """

    shape: tuple[int, int, int]
    first: tuple[int, int, int]
    counts: tuple[int, int, int]
    tile: tuple[int, int, int]

    @classmethod
    def cut(cls, spec: TensorSpec, start: int, stop: int, ways: tuple[int, int]) -> Self | None:
        """Cut elements `start` to `stop` into `ways`, rows and columns of tiles in each matrix; None if that is not even."""
        if len(spec.shape) < 2 or start >= stop or not 1 <= min(ways) <= max(ways) <= MOST_WAYS:
            return None
        height, width = spec.shape[-2:]
        matrix, row = divmod(start // width, height)
        rows = min(height, (stop - start) // width)
        count = (stop - start) // (rows * width) if rows else 0
        even = start % width == 0 and count * rows * width == stop - start and rows % ways[0] == width % ways[1] == 0
        if not even or row + rows > height:
            return None
        shape = math.prod(spec.shape[:-2]), height, width
        return cls(shape, (matrix, row, 0), (count, *ways), (1, rows // ways[0], width // ways[1]))

    @classmethod
    def fit(cls, spec: TensorSpec, start: int, stop: int) -> Self | None:
        """Return the tiles into which a writer cuts a range; None if it stays in one piece.

        They depend on the shape of the tensor: up to 16 by 16 in a matrix of 4 M elements or more, 8 by 8 from 1 M on. A
        range has whole rows of them, or a part of one row: a trainer may be sharded in another way than its replicas.
        """
        whole = cls.cut(spec, start, stop, (1, 1))
        if whole is None or (size := whole.shape[1] * whole.shape[2]) < LEAST:
            return None
        most = min(MOST_WAYS, 1 << max(1, math.isqrt(size // TILE).bit_length() - 1))
        down, across = (math.gcd(most, side) for side in whole.shape[1:])
        if size < SMALL and (down, across) != (2, 2):
            return None  # coded by gaps, which any shard decodes
        band, row, rows = whole.shape[1] // down, whole.first[1], whole.tile[1]
        if row % band == rows % band == 0:
            down = rows // band
        elif row // band == (row + rows - 1) // band:
            down = 1
        else:
            return None
        return cls.cut(spec, start, stop, (down, across)) if down * across > 1 else None

    @property
    def ways(self) -> tuple[int, int]:
        """Rows and columns of tiles in each matrix, as `cut` takes them."""
        return self.counts[1:]

    @property
    def count(self) -> int:
        """Number of tiles."""
        return math.prod(self.counts)

    @property
    def elements(self) -> int:
        """Number of elements of a tile."""
        return math.prod(self.tile)

    def blocks(self, bound_B: np.ndarray) -> Blocks:
        """Return the tiles as blocks, in flat indices of the tensor; `bound_B` is as in `Blocks`."""
        (base_G, width), (_, rows, columns) = self._bands(), self.tile
        base_B = (base_G[:, None] + np.arange(self.counts[2]) * columns).reshape(-1)
        return Blocks(base_B, base_B + ((rows - 1) * width + columns), bound_B, columns, width)

    def by_tiles(self, index_K: np.ndarray, step_K: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort ascending changes of the range by tile; return them and the first one of each tile (`Blocks.bound_B`)."""
        base_G, width = self._bands()
        bound_G = np.append(np.searchsorted(index_K, base_G), index_K.size)
        across, columns = self.counts[2], self.tile[2]
        index_K, step_K, bound_GC = counts.regroup(bound_G, base_G, across, width, columns, index_K, step_K)
        return index_K, step_K, np.append(bound_GC, index_K.size)

    def ascending(
        self, at_B: np.ndarray, bound_B: np.ndarray, index_K: np.ndarray, step_K: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Undo `by_tiles` for the tiles with the numbers `at_B`, ascending; `bound_B` is as in `Blocks`."""
        base_G, width = self._bands()
        bound_G = bound_B[np.searchsorted(at_B, np.arange(base_G.size + 1) * self.counts[2])]
        return counts.regroup(bound_G, base_G, self.tile[1], width, None, index_K, step_K)[:2]

    def _bands(self) -> tuple[np.ndarray, int]:
        """Return where the rows of tiles begin, as flat indices of the tensor, and the length of a row of the matrix."""
        matrix_M, row_R, _ = (edge_E[:-1] for edge_E in self._edges())
        _, height, width = self.shape
        return ((matrix_M[:, None] * height + row_R) * width).reshape(-1), width

    def held(self, regions: Iterable[Region]) -> np.ndarray | None:
        """Return the numbers of the tiles that these regions cover, ascending.

        None if they cover a part of a tile, or one of them is no block of whole rows or columns.
        """
        found_MRC = np.zeros(self.counts, np.int64)
        for offset, dims in set(regions):
            size = math.prod(count for count, _ in dims)
            if not size:
                continue
            last = offset + sum((count - 1) * stride for count, stride in dims)
            box = [(int(low), int(high) + 1) for low, high in np.array(np.unravel_index([offset, last], self.shape))]
            if math.prod(high - low for low, high in box) != size:
                return None
            overlaps = [_overlap(edge_E, *side) for edge_E, side in zip(self._edges(), box, strict=True)]
            found_MRC += math.prod(np.ix_(*overlaps))
        return None if (found_MRC % self.elements).any() else np.flatnonzero(found_MRC)

    def _edges(self) -> Iterator[np.ndarray]:
        """Yield for each dimension where its tiles begin, and where the last one ends."""
        for first, count, size in zip(self.first, self.counts, self.tile, strict=True):
            yield first + np.arange(count + 1, dtype=np.int64) * size


def _overlap(edge_E: np.ndarray, low: int, high: int) -> np.ndarray:
    overlap: np.ndarray = np.clip(np.minimum(edge_E[1:], high) - np.maximum(edge_E[:-1], low), 0, None)
    return overlap
