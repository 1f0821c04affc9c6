"""Where the tiles of a vector lie in live memory: of whole tensors, or of the shares that a worker of several has.

Shapes: T tensors of the vector, B blocks of a tiling, D dimensions of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from deltasync.codec import tiles
from deltasync.codec.tiles import Tiling
from deltasync.errors import StageError
from deltasync.kernels.native import ADDRESS, COLUMNS, ROWS, STRIDE
from deltasync.tensors import Vector, bounds, region_size

if TYPE_CHECKING:
    from deltasync.live import Segment

_MOST_ELEMENTS = 1 << 32  # of a tensor of which a part is held: positions are found by their lower halves


class HeldTiles:
    """The tiles that live memory holds, each in one segment.

    Args:
        vector: The vector.
        segments: The segments of each tensor, on one device; as `LiveMemory` has them.

    Attributes:
        range_T2: The first element of each tensor that has tiles, and the one behind the last; whole tensors.
        are_whole: Whether all tensors are held as wholes, in their order.

    Raises:
        StageError: (from the start, and from `tables`) a tile is held in pieces, or only a part of it.
    """

    def __init__(self, vector: Vector, segments: Mapping[str, Sequence[Segment]]) -> None:
        self._vector = vector
        self._held = [[each for each in segments.get(name, ()) if each.live.numel()] for name in vector.names]
        size_T = np.diff(vector.first_T)
        self._address_T = [
            _whole(held, size) if size else 0 for held, size in zip(self._held, size_T.tolist(), strict=True)
        ]
        self.are_whole = None not in self._address_T
        if not self.are_whole and size_T.max(initial=0) > _MOST_ELEMENTS:
            raise StageError(
                f"A tensor has more than {_MOST_ELEMENTS} elements, and only a part of it is here."
            )
        self.range_T2 = tiles.whole(vector)
        self._found = self._look(tiles.tiling(vector, self.range_T2))

    def tables(self, tiling: Tiling, is_in_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tables of the blocks of some tensors that are held, and of their bands, as `Tiling.chosen`; and
        which of all their blocks these are, bool.
        """
        if self._found[0] is not tiling:
            self._found = self._look(tiling)
        _, place_B2, is_held_B = self._found
        is_in_B = np.repeat(is_in_T, tiling.count_T)
        row_BF, band_GF = tiling.chosen(is_in_T, np.zeros_like(tiling.count_T))
        keep_B = is_held_B[is_in_B]
        row_BF = row_BF[keep_B]
        row_BF[:, [ADDRESS, STRIDE]] = place_B2[is_in_B][keep_B]
        edge_G = bounds(keep_B)[np.append(band_GF[:, 5], keep_B.size)]
        has_G = np.diff(edge_G) > 0
        band_GF = band_GF[has_G]
        band_GF[:, 5] = edge_G[:-1][has_G]
        return row_BF, band_GF, keep_B

    def _look(self, tiling: Tiling) -> tuple[Tiling, np.ndarray, np.ndarray]:
        """Return the address and the stride of each block, int64[B, 2], and whether it is held."""
        vector, bound_T = self._vector, bounds(tiling.count_T)
        place_B2 = tiling.row_BF[:, [ADDRESS, STRIDE]]
        is_held_B = np.zeros(len(place_B2), np.bool_)
        for t in np.flatnonzero(tiling.count_T).tolist():
            here, address = slice(bound_T[t], bound_T[t + 1]), self._address_T[t]
            if address is not None:
                place_B2[here, 0] += address
                is_held_B[here] = True
                continue
            block_BF = tiling.row_BF[here]
            for segment in self._held[t]:
                found_B2, is_in_B = _places(segment, vector.width, block_BF)
                place_B2[here][is_in_B] = found_B2[is_in_B]
                is_held_B[here] |= is_in_B
            held = sum(map(region_size, {each.region() for each in self._held[t]}))
            if (block_BF[:, COLUMNS] * block_BF[:, ROWS])[is_held_B[here]].sum() != held:
                raise StageError(f"{vector.names[t]} lies in other pieces here than a version's tiles.")
        return tiling, place_B2, is_held_B


def _whole(held: Sequence[Segment], size: int) -> int | None:
    """Return the address of a segment that is a whole tensor, in its order; None if there is none."""
    runs = (each for each in held if each.layout() in ((), ((1, size, 1),)) and each.live.numel() == size)
    return next((each.live.data_ptr() for each in runs), None)


def _places(segment: Segment, width: int, block_BF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where a segment has the elements of blocks, which count from the tensor's first one on: address and
    elements from row to row, int64[B, 2], and whether it has all of a block's.
    """
    dims = sorted(segment.layout(), key=lambda dim: -dim[2]) or [(1, 1, 1)]
    live_D, size_D, stride_D = np.array(dims, np.int64).T
    first_B, columns_B, stride_B, rows_B = block_BF[:, :4].T
    first_B = first_B // width

    def coordinates(number_B: np.ndarray) -> np.ndarray:
        found, rest_B = [], number_B - segment.offset
        for stride in stride_D:
            at_B, rest_B = np.divmod(rest_B, stride)
            found.append(at_B)
        return np.stack(found)

    begin_DB = coordinates(first_B)
    row_DB = np.where(rows_B > 1, coordinates(first_B + stride_B) - begin_DB, 0)
    # All elements of a block are between its corners, since coordinates are sums of rows and columns.
    end_DB = begin_DB + (rows_B - 1) * row_DB
    low_DB, high_DB = np.minimum(begin_DB, end_DB), np.maximum(begin_DB, end_DB)
    high_DB[-1] += columns_B - 1
    is_in_B = ((low_DB >= 0) & (high_DB < size_D[:, None])).all(axis=0)
    is_in_B &= stride_D[-1] == live_D[-1] == 1
    address_B = segment.live.data_ptr() + width * (live_D @ begin_DB)
    return np.stack((address_B, np.where(rows_B > 1, live_D @ row_DB, columns_B)), axis=1), is_in_B
