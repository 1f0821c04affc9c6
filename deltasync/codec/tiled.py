"""The tensors of a vector that `context` codes by the classes of their old bits, block by block (`tiles`, `classes`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from deltasync.codec import classes, planes, tables, tiles
from deltasync.codec.base import NewBits, OldBits, Payload, Wanted, old_bits, take
from deltasync.codec.classes import Model
from deltasync.codec.tiles import Cut
from deltasync.errors import CorruptDataError, StageError
from deltasync.kernels import native
from deltasync.tensors import Sparse, Vector, count_below

GROUP_CHANGED = 1 << 15
"""Changed elements that are worth tables of their own."""

MOST_RUNS = 64  # of which tables are counted before they are joined
_SAMPLED = 1 << 16  # elements of a run whose classes are counted
_BATCH_BYTES = 32 << 20  # old bits that are wanted at once
_PART_BYTES = 4 << 20  # old bits that are made at once, for each thread
_MOST_ROWS = 1 << 24  # of a table of blocks in planes: small planes could ask for any amount of memory


def encode(
    vector: Vector, cuts: Mapping[int, Cut], steps: Sparse, new: NewBits
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the entries of tensors that are coded by classes, and their metadata.

    Args:
        vector: The vector.
        cuts: The blocks of each of these tensors, by its number, ascending; at least one.
        steps: Their changes.
        new: See `VectorCodec.encode`.
    """
    held = [new(vector.names[t]) for t in cuts]  # kept until all is encoded
    addresses = [bits_N.ctypes.data - start * vector.width for bits_N, start in held]
    row_BF, band_GF = _table(vector, [*cuts], [cut.tables() for cut in cuts.values()], addresses)
    bound_G = np.append(count_below(steps.at_K, band_GF[:, 0]), steps.at_K.size)
    at_K, step_K, count_B = native.regroup(bound_G, band_GF, True, *steps, len(row_BF))
    bound_B = bounds(count_B)
    run_R = np.append(runs(bound_B, at_K.size // MOST_RUNS), count_B.size)
    element_RE, step_RES = native.survey(run_R, row_BF, bound_B, at_K, step_K, _SAMPLED)
    value_V, used_S = (np.flatnonzero(step_RES.any(axis=each)) for each in ((0, 2), (0, 1)))
    first_G, models = classes.groups(element_RE, value_V, step_RES[:, value_V][:, :, used_S])
    firsts = run_R[first_G].tolist()
    words, tables_, word_count_B = [], bytearray(), np.zeros_like(count_B)
    for (low, high), model in zip(itertools.pairwise([*firsts, count_B.size]), models, strict=True):
        part = slice(int(bound_B[low]), int(bound_B[high]))
        part_B = bound_B[low : high + 1] - bound_B[low]
        ranked = native.rank(row_BF[low:high], part_B, at_K[part], step_K[part], model.classes)
        count_TS = native.count(*ranked, model.ratio_CC)
        freq_TS = tables.fit(count_TS)
        coded, word_count_B[low:high] = native.encode(*ranked, freq_TS, model.ratio_CC)
        words.append(coded)
        tables_ += model.to_bytes(freq_TS)
    rows, sizes = rows_entry(np.stack((count_B, word_count_B), axis=1).astype(np.int32))
    entries = {
        "tiles": rows,
        "tile_tables": torch.from_numpy(np.frombuffer(tables_, np.uint8)),
        "tile_words": torch.from_numpy(np.concatenate(words).view(np.int32)),
    }
    size_T = np.diff(vector.first_T)
    if any((cut.start, cut.stop) != (0, size_T[t]) for t, cut in cuts.items()):
        ranges = np.array([(cut.start, cut.stop) for cut in cuts.values()], np.int64)
        entries["ranges"] = torch.from_numpy(ranges)
    return entries, {"groups": firsts, "planes": sizes}


def _table(
    vector: Vector, tensors: Sequence[int], tables_: Iterable[tuple[np.ndarray, np.ndarray]], addresses: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the table of blocks (`native.FIELDS`) and that of bands of several tensors, one after the other.

    Args:
        vector: The vector.
        tensors: Their numbers.
        tables_: `Cut.tables` of each; the bands may count the blocks that are there.
        addresses: Where the first element of each would be.
    """
    blocks, bands = zip(*tables_, strict=True)
    block_T, band_T = list(map(len, blocks)), list(map(len, bands))
    row_BF = np.empty((sum(block_T), native.FIELDS), np.int64)
    band_GF = np.concatenate(bands)
    row_BF[:, :4] = np.concatenate(blocks)
    first_T = vector.first_T[list(tensors)]
    row_BF[:, 4] = row_BF[:, 0] + np.repeat(first_T, block_T)
    row_BF[:, 0] = row_BF[:, 0] * vector.width + np.repeat(np.array(addresses, np.int64), block_T)
    row_BF[:, 5:] = np.repeat([classes.field(vector.specs[t].dtype) for t in tensors], block_T, axis=0)
    band_GF[:, 0] += np.repeat(first_T, band_T)
    band_GF[:, 5] += np.repeat(np.cumsum([0, *block_T[:-1]]), band_T)
    return row_BF, band_GF


class _Piece(NamedTuple):
    """Whole bands of blocks of one tensor, whose old bits are wanted at once.

    Attributes:
        tensor: Its number.
        at_B: Numbers of the blocks to decode, counted in the payload; ascending.
        block_BF: Their rows of `Cut.tables`.
        band_GF: The bands, with the first block of each counted in `at_B`.
        bits_P: The old bits of a range of the tensor that has these blocks.
        start: The first element of the range.
    """

    tensor: int
    at_B: np.ndarray
    block_BF: np.ndarray
    band_GF: np.ndarray
    bits_P: np.ndarray
    start: int


class TiledReader:
    """Reads the part of a payload that changes one vector by classes.

    Attributes:
        number_T: Numbers of its tensors.
        range_T2: Which elements of each have blocks, the first one and the one behind the last; int64[T, 2].
        sizes: Elements of a tile and of a block.
    """

    def __init__(
        self,
        payload: Payload,
        vector: Vector,
        row: Mapping[str, Any],
        number_T: np.ndarray,
        count_T: np.ndarray,
        sizes: tuple[int, int],
    ) -> None:
        """Read what it needs before it decodes.

        Args:
            payload: The payload.
            vector: The vector.
            row: The metadata of these tensors.
            number_T: Numbers of the changed tensors.
            count_T: Number of changes of each of them.
            sizes: Elements of a tile and of a block.
        """
        self._payload, self._vector = payload, vector
        key, flags = f".{vector.width}.tiled", np.ones(number_T.size, np.bool_)
        if key in payload.arrays:
            flags = read_flags(payload, key, number_T.size)
        self.number_T, self.sizes = number_T[flags], sizes
        self.range_T2, is_whole = self._ranges()
        if is_whole:
            self._block_T = bounds(tiles.counts(vector, *sizes)[self.number_T])
        else:
            self._block_T = bounds(np.array([cut.count for cut in self.cuts.values()], np.int64))
        count = int(self._block_T[-1])
        self._row_B2 = read_rows(payload, f".{vector.width}.tiles", count, row.get("planes"))
        self._bound_B, self._word_B = bounds(self._row_B2[:, 0]), bounds(self._row_B2[:, 1])
        self._groups = read_groups(row, count)
        self._words = take(payload, f".{vector.width}.tile_words", "int32", int(self._word_B[-1]))
        if (np.diff(self._bound_B[self._block_T]) != count_T[flags]).any():
            raise CorruptDataError("Payload counts the changes of its tensors wrong.")

    @functools.cached_property
    def cuts(self) -> dict[int, Cut]:
        """The blocks of each tensor, by its number."""
        specs, lines = self._vector.specs, zip(self.number_T.tolist(), self.range_T2.tolist(), strict=True)
        return {t: tiles.cut(specs[t].shape, start, stop, *self.sizes) for t, (start, stop) in lines}

    @functools.cached_property
    def _chosen(self) -> dict[int, np.ndarray | None]:
        """Numbers of the blocks to decode of each tensor, None for all."""
        return dict.fromkeys(self.cuts)

    @property
    def changed(self) -> int:
        """Number of changes in its blocks."""
        return int(self._bound_B[-1])

    def _ranges(self) -> tuple[np.ndarray, bool]:
        """Return the ranges of its tensors that have blocks, int64[T, 2], and whether these are whole tensors."""
        size_T = np.diff(self._vector.first_T)[self.number_T]
        key = f".{self._vector.width}.ranges"
        range_T2 = np.stack((np.zeros_like(size_T), size_T), axis=1)
        if key in self._payload.arrays:
            range_T2 = take(self._payload, key, "int64", 2 * size_T.size).view(np.int64).reshape(-1, 2)
        if ((range_T2[:, 0] < 0) | (range_T2[:, 0] >= range_T2[:, 1]) | (range_T2[:, 1] > size_T)).any():
            raise CorruptDataError("Payload has ranges that are not inside their tensors.")
        return range_T2, bool((range_T2[:, 1] - range_T2[:, 0] == size_T).all())

    def choose(self, wanted: Wanted) -> list[str]:
        """Decode only blocks with wanted elements. Return the tensors of which that needs more old bits than are wanted."""
        lacking = []
        for t, cut in self.cuts.items():
            spec = self._vector.specs[t]
            regions = wanted(spec.name)
            self._chosen[t] = None if regions is None else cut.chosen(regions, spec.element_count)
            if regions is not None and self._chosen[t] is None:
                lacking.append(spec.name)
        return lacking

    def decode(self, old: OldBits | None) -> list[Sparse]:
        """Return the changes of its tensors, in pieces that are ascending together.

        Raises:
            StageError: there are no old bits, or those of a tensor have another size or dtype.
        """
        if old is None:
            raise StageError("This delta is coded by `context` and needs the old weights; decode it with `old`.")
        vector = self._vector
        models, freq_TS = Model.read(read_tables(self._payload, f".{vector.width}.tile_tables"), len(self._groups))
        first_G = bounds(np.array([2 * len(model.level_C) for model in models], np.int64))  # tables
        end_G = np.array([*self._groups[1:], len(self._row_B2)])
        found = list[Sparse]()
        for pieces in self._batches(old):
            row_BF, band_GF = _table(
                vector,
                [piece.tensor for piece in pieces],
                [(piece.block_BF, piece.band_GF) for piece in pieces],
                [piece.bits_P.ctypes.data - piece.start * vector.width for piece in pieces],
            )
            at_B = np.concatenate([piece.at_B for piece in pieces])
            row_B2 = self._row_B2[at_B]
            if (row_B2[:, 0] > row_BF[:, 1] * row_BF[:, 3]).any():
                raise CorruptDataError("Payload has a block with more changes than elements.")
            bound_B = bounds(row_B2[:, 0])
            word_B2 = np.stack((self._word_B[at_B], self._word_B[at_B + 1]), axis=1)
            at_K, step_K = np.empty(bound_B[-1], vector.index_dtype), np.empty(bound_B[-1], vector.bits_dtype)
            low = 0
            while low < at_B.size:
                group = int(np.searchsorted(end_G, at_B[low], side="right"))
                model, high = models[group], int(np.searchsorted(at_B, end_G[group]))
                part = slice(int(bound_B[low]), int(bound_B[high]))
                if part.start < part.stop and not native.decode_classes(
                    row_BF[low:high],
                    bound_B[low : high + 1] - bound_B[low],
                    self._words,
                    word_B2[low:high],
                    model.classes,
                    freq_TS[first_G[group] : first_G[group + 1]],
                    model.ratio_CC,
                    at_K[part],
                    step_K[part],
                ):
                    raise CorruptDataError(f"Payload has a malformed block of elements of {vector.width} bytes.")
                low = high
            bound_G = bound_B[np.append(band_GF[:, 5], at_B.size)]
            found.append(Sparse(*native.regroup(bound_G, band_GF, False, at_K, step_K, 0)[:2]))
        return found

    def _batches(self, old: OldBits) -> Iterator[list[_Piece]]:
        """Yield the blocks to decode in batches of about `_BATCH_BYTES` of old bits.

        An array is taken as a whole. Other old bits are made for about `_PART_BYTES` for each thread at a time.
        """
        width, batch, filled = self._vector.width, list[_Piece](), 0.0
        part_bytes = _PART_BYTES * native.threads(self._vector.element_count)
        for (t, cut), first in zip(self.cuts.items(), self._block_T.tolist(), strict=False):
            chosen = self._chosen[t]
            if chosen is not None and not chosen.size:
                continue
            block_BF, band_GF = cut.tables()
            chosen_B = np.arange(cut.count) if chosen is None else chosen
            bits = old_bits(old, self._vector.specs[t])
            whole = isinstance(bits, np.ndarray)
            most = _BATCH_BYTES if whole else part_bytes
            edges = [0, len(band_GF)]
            if not whole:
                byte_G = np.cumsum(band_GF[:, 2] * band_GF[:, 3] * band_GF[:, 4]) * width
                edges[1:1] = (np.flatnonzero(np.diff((byte_G - byte_G[0]) // most)) + 1).tolist()
            for low, high in itertools.pairwise(edges):
                edge_G = np.append(band_GF[low:high, 5], cut.count if high == len(band_GF) else band_GF[high, 5])
                bound_G = np.searchsorted(chosen_B, edge_G)
                at_B = chosen_B[bound_G[0] : bound_G[-1]]
                if not at_B.size:
                    continue
                row_BF, part_GF = block_BF[at_B], band_GF[low:high].copy()
                part_GF[:, 5] = bound_G[:-1] - bound_G[0]
                start_B, columns_B, stride_B, rows_B = row_BF.T
                start, stop = int(start_B[0]), int((start_B + (rows_B - 1) * stride_B + columns_B).max())
                batch.append(_Piece(t, first + at_B, row_BF, part_GF, np.ascontiguousarray(bits[start:stop]), start))
                filled += (stop - start) * width / most
                if filled >= 1:
                    yield batch
                    batch, filled = [], 0.0
        if batch:
            yield batch


def rows_entry(row_B2: np.ndarray) -> tuple[torch.Tensor, list[int] | None]:
    """Return the entry of a table of blocks, and the sizes of its planes."""
    more_B2 = np.diff(row_B2, axis=0, prepend=np.zeros_like(row_B2[:1]))
    found = planes.compress(np.ascontiguousarray(((more_B2 << 1) ^ (more_B2 >> 31)).T).view(np.uint32).reshape(-1))
    if found is None or len(row_B2) > _MOST_ROWS:
        return torch.from_numpy(row_B2), None
    return torch.frombuffer(bytearray(found[1]), dtype=torch.uint8), found[0]


def read_rows(payload: Payload, key: str, count: int, sizes: object) -> np.ndarray:
    """Return a table of blocks, int32[count, 2], from its entry and the sizes of its planes, None for no planes.

    Raises:
        CorruptDataError: the entry has another shape or dtype, or a row has a negative number of changes or words.
    """
    if sizes is not None and count <= _MOST_ROWS:
        if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise CorruptDataError(f"The planes of {key!r} have sizes {sizes!r:.100}.")
        entry = take(payload, key, "uint8", sum(sizes))
        number_N = planes.decompress(entry, sizes, key, 2 * count)
        more_2B = ((number_N >> 1) ^ (0 - (number_N & 1))).view(np.int32).reshape(2, count)
        row_B2 = np.cumsum(more_2B, axis=1, dtype=np.int32).T
    else:
        row_B2 = take(payload, key, "int32", 2 * count).view(np.int32).reshape(count, 2)
        if payload.arrays[key].shape != row_B2.shape:
            raise CorruptDataError(f"Payload has no table of blocks {key!r}, int32[{count}, 2].")
    if (row_B2 < 0).any():
        raise CorruptDataError("Payload has a block with a negative number of changes or words.")
    return row_B2


def read_groups(row: Mapping[str, Any], count: int) -> list[int]:
    """Return the first block of each group of `count` blocks.

    Raises:
        CorruptDataError: they are not ascending from 0.
    """
    match row.get("groups"):
        case [] if not count:
            return []
        case [0, *_] as groups if all(type(block) is int for block in groups):
            if all(one < other for one, other in itertools.pairwise([*groups, count])):
                return groups
    raise CorruptDataError("Payload has groups that are not ascending blocks.")


def read_flags(payload: Payload, key: str, count: int) -> np.ndarray:
    """Return `count` bits, bool.

    Raises:
        CorruptDataError: the entry has another size, or more bits.
    """
    flags = np.unpackbits(take(payload, key, "uint8", -(-count // 8)), bitorder="little").view(np.bool_)
    if flags[count:].any():
        raise CorruptDataError("Payload names tensors that the channel does not have.")
    return flags[:count]


def read_tables(payload: Payload, key: str) -> bytes:
    """Return the bytes of tables.

    Raises:
        CorruptDataError: there are none.
    """
    if payload.dtypes.get(key) != "U8":
        raise CorruptDataError("Payload has no uint8 tables.")
    return payload.arrays[key].tobytes()


def runs(bound_B: np.ndarray, least: int = 0) -> np.ndarray:
    """Return the first block of each run of blocks with about `GROUP_CHANGED` changes, or `least`, if that is more."""
    run_B = bound_B[:-1] // max(GROUP_CHANGED, least)
    firsts: np.ndarray = np.append(0, np.flatnonzero(run_B[1:] != run_B[:-1]) + 1)
    return firsts


def bounds(count_B: np.ndarray) -> np.ndarray:
    """Return the sum of the counts before each, and of all."""
    return np.concatenate(([0], np.cumsum(count_B, dtype=np.int64)))
