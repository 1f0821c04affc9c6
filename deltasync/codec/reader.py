"""The part of a payload of `packed` or `context` that changes one vector, and how the host decodes it."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from deltasync.codec import classes, tables, tiles
from deltasync.codec.base import OldBits, Payload, Wanted, old_bits, take
from deltasync.codec.parts import GAPS, TILES, Part, flags
from deltasync.codec.tiles import Cut, Tiling
from deltasync.errors import CorruptDataError, StageError
from deltasync.kernels import native
from deltasync.kernels.rans import Blocks, Classes
from deltasync.tensors import Layout, Sparse, Vector, bounds, region_end, region_size

_BATCH_BYTES = 32 << 20  # old bits that are wanted at once
_PART_BYTES = 4 << 20  # old bits that are made at once, for each thread


def _object(payload: Payload, key: str) -> dict[str, Any]:
    try:
        found = json.loads(payload.metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptDataError(f"Payload has no table of {key}.")
    return found


def _elements(payload: Payload, key: str) -> int:
    """Return the size of a block or of a tile.

    Raises:
        CorruptDataError: there is none, or one that it cannot have.
    """
    declared = payload.metadata.get(key, "")
    if not re.fullmatch("[0-9]{1,10}", declared) or not 1 <= int(declared) <= 1 << 30:
        raise CorruptDataError(f"Payload has {key} {declared!r} instead of 1 to 2**30.")
    return int(declared)


def _spans(vector: Vector, number_T: np.ndarray, wanted: Wanted) -> np.ndarray | None:
    """Return where the wanted elements of changed tensors lie, int64[R, 2] of first and last positions; None
    for all.
    """
    spans, whole = [], True
    for t in number_T.tolist():
        first, last = vector.first_T[t : t + 2].tolist()
        regions = wanted(vector.names[t])
        if regions is None:
            spans.append((first, last))
            continue
        whole = False
        spans += [
            (first + region[0], first + region_end(region)) for region in regions if region_size(region)
        ]
    return None if whole else np.array(spans, np.int64).reshape(-1, 2)


class Reader:
    """Reads what a payload has of one vector.

    Attributes:
        vector: The vector.
        number_T, count_T, digest_T: Numbers of the changed tensors, the changes of each, and their
            fingerprints.
        gaps: The blocks of gaps, if there are any.
        blocks: Where these lie.
        tiles: The blocks by class, if there are any.
        tiled_T: Numbers of the tensors that have these.
        range_T2: Which elements of each of those have blocks, the first one and the one behind the last.
        sizes: Elements of a tile and of a block.

    Raises:
        CorruptDataError: (from the start) the payload contradicts itself or the tensor table.
    """

    def __init__(self, payload: Payload, vector: Vector, row: Mapping[str, Any], block: int) -> None:
        self._payload, self.vector = payload, vector
        self.gaps: Part | None = None
        self.tiles: Part | None = None
        self._keep_B: np.ndarray | None = None  # blocks by class that are decoded; None for all
        if row["blocks"]:
            self.gaps = Part(payload, vector.width, GAPS, row, row["blocks"])
            self.blocks = Blocks.of(vector.element_count, block, self.gaps.bound_B, row["block"])
            if (self.gaps.row_B2[:, 0] > self.blocks.size_BC[:, 0]).any():
                raise CorruptDataError("Payload has a block with more changes than elements.")
        named_T, index = self._flags("tensors", row["tensors"]), vector.index_dtype
        self.number_T = np.flatnonzero(named_T) + row["tensor"]
        self.count_T = self._take("counts", index.name, self.number_T.size).view(index).astype(np.int64)
        self.digest_T = self._take("fingerprints", "int64", self.number_T.size)
        self.tiled_T = self.number_T[:0]
        if "tiles" in row:
            self._open_tiles(row["tiles"], (_elements(payload, "tile_elements"), block))

    def _take(self, entry: str, dtype: str, size: int) -> np.ndarray:
        return take(self._payload, f".{self.vector.width}.{entry}", dtype, size)

    def _flags(self, entry: str, count: int) -> np.ndarray:
        """Return the bits of an entry; without it all are set."""
        key = f".{self.vector.width}.{entry}"
        return flags(self._payload, key, count) if key in self._payload.arrays else np.ones(count, np.bool_)

    def _open_tiles(self, row: object, sizes: tuple[int, int]) -> None:
        if not isinstance(row, dict):
            raise CorruptDataError(f"Payload has tiles {row!r:.100}.")
        vector, is_tiled_T = self.vector, self._flags("tiled", self.number_T.size)
        self.sizes, self.tiled_T = sizes, self.number_T[is_tiled_T]
        whole_T2 = self.range_T2 = tiles.whole(vector)[self.tiled_T]
        if f".{vector.width}.ranges" in self._payload.arrays:
            self.range_T2 = self._take("ranges", "int64", whole_T2.size).view(np.int64).reshape(-1, 2)
        low_T, high_T = self.range_T2.T
        if ((low_T < 0) | (low_T >= high_T) | (high_T > whole_T2[:, 1])).any():
            raise CorruptDataError("Payload has ranges that are not inside their tensors.")
        if np.array_equal(self.range_T2, whole_T2):
            self._block_T = bounds(tiles.counts(vector, *sizes)[self.tiled_T])
        else:
            self._block_T = bounds([cut.count for cut in self.cuts.values()])
        self.tiles = Part(self._payload, vector.width, TILES, row, int(self._block_T[-1]))
        if (np.diff(self.tiles.bound_B[self._block_T]) != self.count_T[is_tiled_T]).any():
            raise CorruptDataError("Payload counts the changes of its tensors wrong.")

    @functools.cached_property
    def cuts(self) -> dict[int, Cut]:
        """The blocks by class of each tensor, by its number."""
        specs, lines = self.vector.specs, zip(self.tiled_T.tolist(), self.range_T2.tolist(), strict=True)
        return {t: tiles.cut(specs[t].shape, start, stop, *self.sizes) for t, (start, stop) in lines}

    @property
    def changed(self) -> int:
        """Number of changes in its blocks."""
        return sum(int(part.bound_B[-1]) for part in (self.gaps, self.tiles) if part is not None)

    def choose(self, wanted: Wanted) -> list[str]:
        """Decode only blocks with wanted elements. Return the tensors of which that needs more old bits than
        are wanted.
        """
        lacking = []
        if self.tiles is not None:
            self._keep_B = np.zeros(len(self.tiles.row_B2), np.bool_)
            for (t, cut), low, high in zip(
                self.cuts.items(), self._block_T[:-1], self._block_T[1:], strict=True
            ):
                spec = self.vector.specs[t]
                regions = wanted(spec.name)
                chosen_B = None if regions is None else cut.chosen(regions, spec.element_count)
                self._keep_B[low:high] = regions is None
                if chosen_B is not None:
                    self._keep_B[low + chosen_B] = True
                elif regions is not None:
                    lacking.append(spec.name)
        return lacking

    def decode(self, wanted: Wanted | None, old: OldBits | None) -> Sparse:
        """Return the changes of blocks with wanted elements.

        Raises:
            StageError: there are no old bits, or those of a tensor have another size or dtype.
        """
        by_class = [] if self.tiles is None else self._by_class(self.tiles, old)
        by_gap = [] if self.gaps is None else self._by_gap(self.gaps, wanted)
        if self.tiled_T.size and any(self.vector.count(part.at_K)[self.tiled_T].any() for part in by_gap):
            raise CorruptDataError("Payload changes a tensor by gaps and by classes.")
        found = [*by_class, *by_gap]
        if len(found) < 2:
            return found[0] if found else Sparse.of(self.vector)
        at_K, step_K = (np.concatenate(each) for each in zip(*found, strict=True))
        if by_class and by_gap:  # they lie between each other
            order = np.argsort(at_K, kind="stable")
            return Sparse(at_K[order], step_K[order])
        return Sparse(at_K, step_K)

    def _malformed(self) -> CorruptDataError:
        return CorruptDataError(f"Payload has a malformed block of elements of {self.vector.width} bytes.")

    def _by_gap(self, part: Part, wanted: Wanted | None) -> list[Sparse]:
        """Decode the blocks of gaps with wanted elements."""
        keep_B, blocks = np.ones(len(part.row_B2), np.bool_), self.blocks
        span_R2 = (
            None if wanted is None else _spans(self.vector, np.setdiff1d(self.number_T, self.tiled_T), wanted)
        )
        if span_R2 is not None:
            end_B = blocks.base_B + blocks.size_BC[:, 0]
            first_R = np.searchsorted(end_B, span_R2[:, 0], side="right")
            last_R = np.maximum(np.searchsorted(blocks.base_B, span_R2[:, 1]), first_R)
            edges = np.zeros(keep_B.size + 1, np.int64)
            np.add.at(edges, first_R, 1)
            np.add.at(edges, last_R, -1)
            keep_B = np.cumsum(edges[:-1]) > 0
        freq_TS = tables.read(part.tables, 2 * len(part.groups))
        found: list[Sparse] = []
        for group, (low, high) in enumerate(itertools.pairwise([*part.groups, keep_B.size])):
            at_B = np.flatnonzero(keep_B[low:high]) + low
            if not part.row_B2[at_B, 0].any():
                continue
            held = Blocks(blocks.base_B[at_B], blocks.size_BC[at_B], bounds(part.row_B2[at_B, 0]))
            found.append(Sparse.of(self.vector, held.bound_B[-1]))
            if not native.decode(
                held, part.words, part.words_of(at_B), freq_TS[2 * group : 2 * group + 2], *found[-1]
            ):
                raise self._malformed()
        return found

    def _by_class(self, part: Part, old: OldBits | None) -> list[Sparse]:
        """Decode the blocks by class that were chosen, in pieces that are ascending together."""
        if old is None:
            raise StageError(
                "This delta is coded by `context` and needs the old weights; decode it with `old`."
            )
        lines, freq_TS = classes.read(part.tables, len(part.groups))
        groups = Classes.of(lines)
        vector, table_G, found = self.vector, (2 * groups.bound_G).tolist(), list[Sparse]()
        for at_B, row_BF, band_GF, _ in self._batches(old):
            row_B2, group_B, word_B2 = part.row_B2[at_B], part.group_B[at_B], part.words_of(at_B)
            if (row_B2[:, 0] > row_BF[:, 1] * row_BF[:, 3]).any():
                raise CorruptDataError("Payload has a block with more changes than elements.")
            bound_B = bounds(row_B2[:, 0])
            at_K, step_K = Sparse.of(vector, bound_B[-1])
            for low, high in itertools.pairwise(
                [0, *(np.flatnonzero(np.diff(group_B)) + 1).tolist(), at_B.size]
            ):
                here, group = slice(int(bound_B[low]), int(bound_B[high])), int(group_B[low])
                if here.start < here.stop and not native.decode_classes(
                    row_BF[low:high],
                    bound_B[low : high + 1] - bound_B[low],
                    part.words,
                    word_B2[low:high],
                    groups.group(group),
                    freq_TS[table_G[group] : table_G[group + 1]],
                    at_K[here],
                    step_K[here],
                ):
                    raise self._malformed()
            bound_G = bound_B[np.append(band_GF[:, 5], at_B.size)]
            found.append(Sparse(*native.regroup(bound_G, band_GF, False, at_K, step_K, 0)[:2]))
        return found

    def _tiling(self) -> Tiling:
        """Return the blocks by class, of other tensors also: the kept ones if encoders of now make these."""
        if self.sizes == (tiles.TILE, tiles.BLOCK):
            range_T2 = np.zeros((len(self.vector.specs), 2), np.int64)
            range_T2[self.tiled_T] = self.range_T2
            tiling = tiles.tiling_of(self.vector, range_T2)
            if tiling.count_T[self.tiled_T].all():
                return tiling
        return Tiling.of(self.vector, self.cuts)

    def _batches(self, old: OldBits) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]]:
        """Yield the blocks by class to decode in batches of about `_BATCH_BYTES` of old bits.

        A batch is pieces of tensors: the numbers of their blocks, the tables of blocks and of bands, which
        count blocks in the batch, and the bits. An array is taken as a whole. Other old bits are made for
        about `_PART_BYTES` for each thread at a time.
        """
        vector, width, tiling = self.vector, self.vector.width, self._tiling()
        is_in_T = np.zeros(len(vector.specs), np.bool_)
        is_in_T[self.tiled_T] = True
        row_BF, band_GF = tiling.chosen(is_in_T, np.zeros_like(tiling.count_T))
        at_B = np.arange(len(row_BF)) if self._keep_B is None else np.flatnonzero(self._keep_B)
        row_BF, edge_G = row_BF[at_B], np.searchsorted(at_B, np.append(band_GF[:, 5], len(row_BF))).tolist()
        start_B = row_BF[:, 4] - np.repeat(
            vector.first_T[self.tiled_T], np.diff(np.searchsorted(at_B, self._block_T))
        )
        stop_B = start_B + (row_BF[:, 3] - 1) * row_BF[:, 2] + row_BF[:, 1]
        part_bytes, byte_G = (
            _PART_BYTES * native.threads(vector.element_count),
            np.cumsum(band_GF[:, 2:5].prod(axis=1)) * width,
        )
        band_T, made, filled, begin = bounds(tiling.band_T[self.tiled_T]).tolist(), list[np.ndarray](), 0.0, 0
        for t, (first, last) in zip(self.tiled_T.tolist(), itertools.pairwise(band_T), strict=True):
            if edge_G[first] == edge_G[last]:
                continue
            bits, most, edges = old_bits(old, vector.specs[t]), _BATCH_BYTES, [first, last]
            if not isinstance(bits, np.ndarray):
                most, before_G = part_bytes, byte_G[first:last]
                if before_G[-1] - before_G[0] >= most:
                    edges[1:1] = (
                        np.flatnonzero(np.diff((before_G - before_G[0]) // most)) + 1 + first
                    ).tolist()
            for low, high in itertools.pairwise(edges):
                held = slice(edge_G[low], edge_G[high])
                if held.start == held.stop:
                    continue
                start, stop = int(start_B[held.start]), int(stop_B[held].max())
                made.append(np.ascontiguousarray(bits[start:stop]))
                row_BF[held, 0] += made[-1].ctypes.data - start * width
                filled += (stop - start) * width / most
                if filled >= 1 or held.stop == at_B.size:
                    here = slice(edge_G[begin], held.stop)
                    band_GF[begin:high, 5] = np.subtract(edge_G[begin:high], here.start)
                    yield at_B[here], row_BF[here], band_GF[begin:high], made
                    made, filled, begin = [], 0.0, high


def readers_of(payload: Payload, layout: Layout) -> dict[int, Reader]:
    """Return what a payload has of each vector, by width.

    Raises:
        CorruptDataError: it contradicts itself or the tensor table.
    """
    block, found = _elements(payload, "block_elements"), dict[int, Reader]()
    for width, row in _object(payload, "vectors").items():
        if width not in map(str, layout.vectors) or not isinstance(row, dict):
            raise CorruptDataError(
                f"Payload has elements of {width!r:.40} bytes, which the channel does not have."
            )
        row = {"block": 0, "blocks": 0} | row
        numbers: list[Any] = [row.get(key) for key in ("tensor", "tensors", "block", "blocks")]
        vector = layout.vectors[int(width)]
        most = len(vector.specs), -(-vector.element_count // block)
        spans = all(type(number) is int and number >= 0 for number in numbers)
        if not spans or numbers[0] + numbers[1] > most[0] or numbers[2] + numbers[3] > most[1]:
            raise CorruptDataError(f"Payload has wrong bounds of tensors or blocks, {row!r:.100}.")
        found[vector.width] = Reader(payload, vector, row, block)
    if (coded := sum(reader.changed for reader in found.values())) != payload.changed:
        raise CorruptDataError(f"Payload has blocks with {coded} changes, and should have {payload.changed}.")
    return found
