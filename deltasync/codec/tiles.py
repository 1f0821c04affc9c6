"""Tiles: `context` cuts matrices so that a worker with an even shard of one decodes it from what it holds.

The last two dimensions of a tensor are a matrix, which is cut into rows of tiles of one shape. Tiles follow
each other by matrix, then by row of tiles, then from left to right. Each is a block; its elements follow each
other by row. The cut follows from the shape, the range that a payload has, and the metadata `tile_elements`.
A range without tiles is cut into rows of `block_elements` elements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from deltasync.codec import classes
from deltasync.kernels import native
from deltasync.tensors import Region, Vector, region_end, region_size

BLOCK = 1 << 19
"""Elements of a block of what is not cut into tiles."""
TILE = 1 << 14
"""Fewest elements of a tile in a matrix of more than four tiles."""
SMALL = 4 * TILE
"""A tensor of fewer elements that has no tiles is coded by gaps."""
LEAST = 1 << 12
"""Fewest elements of a matrix that has tiles. The smallest matrices have four, however small these are."""
FEW = 10
"""With fewer changes per block, gaps take less."""

MOST_WAYS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The blocks of a range of a tensor.

    Attributes:
        start, stop: The range: its first element, and the one behind its last.
        grid: Its tiles, or None: it is cut into rows of `size` elements.
        size: See `grid`.
    """

    start: int
    stop: int
    grid: Grid | None
    size: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-(self.stop - self.start) // self.size) if self.grid is None else self.grid.count

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of blocks, int64[B, 4], and of bands of blocks, int64[G, 6]. Neither must be
        mutated.

        A block: first element, columns, elements from row to row, rows. A band is for `native.regroup`, in
        elements of the tensor.
        """
        return _tables(self) if self.count <= _MOST_KEPT else _tables.__wrapped__(self)

    def chosen(self, regions: Sequence[Region], element_count: int) -> np.ndarray | None:
        """Return the numbers of the blocks to decode for these regions of the tensor, ascending.

        None if that needs old bits outside of them.
        """
        if sum(map(region_size, set(regions))) in (0, element_count):
            first_B, columns_B, stride_B, rows_B = self.tables()[0].T
            end_B = first_B + (rows_B - 1) * stride_B + columns_B
            range_R2 = np.array([(region[0], region_end(region)) for region in regions], np.int64).reshape(
                -1, 2
            )
            low_RB, high_RB = (np.clip(range_R2[:, side, None], first_B, end_B) for side in (0, 1))
            return np.flatnonzero(np.any(high_RB > low_RB, axis=0))
        return None if self.grid is None else self.grid.held(regions)

    def is_large(self, element_count: int) -> bool:
        """Whether enough changes of the range, of a tensor of so many elements, are coded by classes."""
        if self.grid is None:
            return element_count >= SMALL
        _, height, width = self.grid.shape
        return height * width >= max(LEAST, 0 if self.grid.square else SMALL)


_MOST_KEPT = 1 << 12  # blocks of a cut whose tables are kept


@functools.lru_cache(maxsize=256)
def _tables(cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    if cut.grid is not None:
        return cut.grid.tables()
    first_B = np.arange(cut.start, cut.stop, cut.size, dtype=np.int64)
    size_B, one_B = np.minimum(cut.size, cut.stop - first_B), np.ones_like(first_B)
    bands = first_B, size_B, size_B, one_B, one_B, np.arange(first_B.size)
    return np.stack((first_B, size_B, size_B, one_B), axis=1), np.stack(bands, axis=1)


@functools.lru_cache(maxsize=4096)
def cut(shape: tuple[int, ...], start: int, stop: int, tile: int, block: int) -> Cut:
    """Cut elements `start` to `stop` of a tensor of this shape."""
    return Cut(start, stop, Grid.fit(shape, start, stop, tile), block)


@functools.lru_cache(maxsize=16)
def counts(vector: Vector, tile: int, block: int) -> np.ndarray:
    """Return the number of blocks of each whole tensor of a vector, int64[T], which must not be mutated."""
    return np.array(
        [cut(spec.shape, 0, spec.element_count, tile, block).count for spec in vector.specs], np.int64
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Tiling:
    """The blocks of ranges of a vector's tensors, in tables.

    Attributes:
        range_T2: The range of each tensor: its first element, and the one behind its last. Empty if it has no
            blocks.
        count_T: Number of blocks of each tensor.
        band_T: Number of their bands.
        row_BF: The table of blocks (`kernels.native.FIELDS`). Addresses count from each tensor's first
            element on.
        band_GF: Their bands, as in `kernels.native.regroup`. Positions count in the vector, blocks in the
            tensor.
    """

    range_T2: np.ndarray
    count_T: np.ndarray
    band_T: np.ndarray
    row_BF: np.ndarray
    band_GF: np.ndarray

    @classmethod
    def of(cls, vector: Vector, cuts: Mapping[int, Cut]) -> Self:
        """Return the tables of cuts, by number of the tensor, ascending."""
        range_T2, count_2T = (
            np.zeros((len(vector.specs), 2), np.int64),
            np.zeros((2, len(vector.specs)), np.int64),
        )
        field_T2 = np.zeros((len(vector.specs), 2), np.int64)
        blocks, bands = [np.empty((0, 4), np.int64)], [np.empty((0, 6), np.int64)]
        for t, cut in cuts.items():
            block_B4, band_GF = cut.tables()
            blocks.append(block_B4)
            bands.append(band_GF)
            range_T2[t], count_2T[:, t] = (cut.start, cut.stop), (len(block_B4), len(band_GF))
            field_T2[t] = classes.field(vector.specs[t].dtype)
        block_B4, band_GF = np.concatenate(blocks), np.concatenate(bands)
        band_GF[:, 0] += np.repeat(vector.first_T[:-1], count_2T[1])
        row_BF = np.empty((len(block_B4), native.FIELDS), np.int64)
        row_BF[:, 0], row_BF[:, 1:4] = block_B4[:, 0] * vector.width, block_B4[:, 1:]
        row_BF[:, 4] = block_B4[:, 0] + np.repeat(vector.first_T[:-1], count_2T[0])
        row_BF[:, 5:] = np.repeat(field_T2, count_2T[0], axis=0)
        return cls(range_T2, count_2T[0], count_2T[1], row_BF, band_GF)

    def worth_T(self, changed_T: np.ndarray) -> np.ndarray:
        """Return whether each tensor with so many changes is coded by classes."""
        worth_T: np.ndarray = (self.count_T > 0) & (changed_T > 0) & (changed_T >= FEW * self.count_T)
        return worth_T

    def chosen(self, is_in_T: np.ndarray, address_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tables of blocks and bands of some tensors; new arrays, in which blocks count in the
        table.

        Args:
            is_in_T: The tensors.
            address_T: Address of each tensor's first element, or the one that it would have.
        """
        count_T = np.where(is_in_T, self.count_T, 0)
        row_BF = self.row_BF[np.repeat(is_in_T, self.count_T)]
        row_BF[:, 0] += np.repeat(address_T, count_T)
        band_GF = self.band_GF[np.repeat(is_in_T, self.band_T)]
        band_GF[:, 5] += np.repeat(np.cumsum(count_T) - count_T, np.where(is_in_T, self.band_T, 0))
        return row_BF, band_GF


def whole(vector: Vector) -> np.ndarray:
    """Return the ranges of whole tensors, int64[T, 2]."""
    size_T = np.diff(vector.first_T)
    return np.stack((np.zeros_like(size_T), size_T), axis=1)


def tiling_of(vector: Vector, range_T2: np.ndarray) -> Tiling:
    """Return kept blocks of ranges that have some; those of all whole tensors if these are whole ones, so
    that one table serves all payloads.
    """
    whole_T2, is_in_T = whole(vector), range_T2[:, 0] < range_T2[:, 1]
    is_whole = np.array_equal(range_T2[is_in_T], whole_T2[is_in_T])
    is_kept = is_whole and counts(vector, TILE, BLOCK).sum() <= _MOST_TILES
    return tiling(vector, whole_T2 if is_kept else range_T2)


def tiling(vector: Vector, range_T2: np.ndarray) -> Tiling:
    """Return the blocks of these ranges of a vector's tensors that an encoder makes if enough changes.

    They are kept: one table of at most `_MOST_TILES`, and eight smaller ones.
    """
    count = int(counts(vector, TILE, BLOCK)[range_T2[:, 0] < range_T2[:, 1]].sum())
    make = _tiling if count <= _FEW_TILES else _large_tiling if count <= _MOST_TILES else _made
    return make(vector, range_T2.tobytes(), TILE, BLOCK)


_FEW_TILES = 1 << 16
_MOST_TILES = 1 << 22  # about 80 bytes each


def _made(vector: Vector, ranges: bytes, tile: int, block: int) -> Tiling:
    held = enumerate(np.frombuffer(ranges, np.int64).reshape(-1, 2).tolist())
    cuts = {
        t: cut(vector.specs[t].shape, start, stop, tile, block) for t, (start, stop) in held if start < stop
    }
    return Tiling.of(vector, {t: of for t, of in cuts.items() if of.is_large(vector.specs[t].element_count)})


_tiling = functools.lru_cache(maxsize=8)(_made)
_large_tiling = functools.lru_cache(maxsize=1)(_made)


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
    def cut(cls, shape: tuple[int, ...], start: int, stop: int, ways: tuple[int, int]) -> Self | None:
        """Cut elements `start` to `stop` into `ways`, rows and columns of tiles in each matrix; None if that
        is not even.
        """
        if len(shape) < 2 or start >= stop:
            return None
        height, width = shape[-2:]
        matrix, row = divmod(start // width, height)
        rows = min(height, (stop - start) // width)
        count = (stop - start) // (rows * width) if rows else 0
        even = (
            start % width == 0
            and count * rows * width == stop - start
            and rows % ways[0] == width % ways[1] == 0
        )
        if not even or row + rows > height:
            return None
        return cls(
            (math.prod(shape[:-2]), height, width),
            (matrix, row, 0),
            (count, *ways),
            (1, rows // ways[0], width // ways[1]),
        )

    @classmethod
    def fit(cls, shape: tuple[int, ...], start: int, stop: int, tile: int) -> Self | None:
        """Return the tiles into which a range is cut; None if it stays in one piece.

        A matrix has w by w tiles, w the greatest of 4, 8 and 16 for which each has at least `tile` elements,
        or 2, as far as w divides the sides. The range has whole rows of tiles, or a part of one row: a
        trainer may be sharded in another way than its replicas.
        """
        whole = cls.cut(shape, start, stop, (1, 1))
        if whole is None:
            return None
        size = whole.shape[1] * whole.shape[2]
        most = min(MOST_WAYS, 1 << max(1, math.isqrt(size // tile).bit_length() - 1))
        down, across = (math.gcd(most, side) for side in whole.shape[1:])
        band, row, rows = whole.shape[1] // down, whole.first[1], whole.tile[1]
        if row % band == rows % band == 0:
            down = rows // band
        elif row // band == (row + rows - 1) // band:
            down = 1
        else:
            return None
        return cls.cut(shape, start, stop, (down, across)) if down * across > 1 else None

    @property
    def square(self) -> bool:
        """Whether a whole matrix has two tiles in both directions, or more."""
        return self.shape[1] % 2 == self.shape[2] % 2 == 0

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

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """See `Cut.tables`."""
        matrix_M, row_R, _ = (edge_E[:-1] for edge_E in self._edges())
        _, height, width = self.shape
        first_G = ((matrix_M[:, None] * height + row_R) * width).reshape(-1)
        (_, rows, columns), across = self.tile, self.counts[2]
        first_B = (first_G[:, None] + np.arange(across) * columns).reshape(-1)
        blocks = np.stack(np.broadcast_arrays(first_B, columns, width, rows), axis=1)
        number_G = np.arange(first_G.size) * across
        return blocks, np.stack(np.broadcast_arrays(first_G, width, columns, across, rows, number_G), axis=1)

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
            box = [
                (int(low), int(high) + 1)
                for low, high in np.array(np.unravel_index([offset, last], self.shape))
            ]
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
