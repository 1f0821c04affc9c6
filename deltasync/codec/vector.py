"""`packed` and `context`: positions as gaps, and ULP steps, entropy coded block by block over whole vectors.

A *vector* is all elements of one width W in bytes, in the order of the channel's tensor table (`tensors.layout`). For each
vector of which elements changed, a payload has the metadata `vectors`, tables of its changed tensors (`.W.tensors`,
`.W.counts`, `.W.fingerprints`), and the blocks (`.W.blocks`, `.W.tables`, `.W.words`): a gap and a step for each change.

With `context`, tensors of which enough changes are cut into tiles instead (`.W.tiles`, `.W.tile_tables`, `.W.tile_words`;
`tiled`), in which changes are coded by the classes of their old bits (`classes`).

docs/format.md, section 10, is the format, with pseudocode and test vectors.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltasync.codec import tables, tiled, tiles
from deltasync.codec.base import Encoded, NewBits, OldBits, Payload, Wanted, take
from deltasync.codec.tiled import TiledReader, bounds, read_flags, read_groups, read_rows, read_tables, runs
from deltasync.codec.tiles import Cut
from deltasync.errors import CorruptDataError, ShareError
from deltasync.kernels import native
from deltasync.kernels.rans import Blocks, ratios
from deltasync.tensors import Delta, Layout, Sparse, Vector, count_below, region_end, region_size

BLOCK = 1 << 19
_RUNS = 256  # whose symbols are counted by one launch
_ONE_CLASS = ratios(np.zeros(1, np.int64))


class VectorCodec:
    """The codecs `packed` and `context`.

    Attributes:
        name: Its name.
        needs_old: Whether tensors are coded by the classes of their old bits.
    """

    def __init__(self, name: str, needs_old: bool) -> None:
        self.name = name
        self.needs_old = needs_old

    def encode(
        self, delta: Delta, new: NewBits, fingerprints: Mapping[str, int], version: int, base_version: int
    ) -> Encoded:
        """Return a payload.

        Args:
            delta: The steps from the base version on. Not mutated.
            new: Returns the range of a tensor that is held, with its new bits.
            fingerprints: Those of the changed tensors after the delta.
            version: The version that it leads to.
            base_version: The one that it leads from.
        """
        arrays: dict[str, torch.Tensor] = {}
        vectors: dict[str, dict[str, Any]] = {}
        for width, steps in delta.steps.items():
            vector = delta.layout.vectors[width]
            count_T = vector.count(steps.at_K)
            cuts = _cuts(vector, count_T, new) if self.needs_old else {}
            changed_T = np.flatnonzero(count_T)
            digest_T = np.array([fingerprints[vector.names[t]] for t in changed_T.tolist()], np.uint64)
            by_class, steps = _split(vector, steps, list(cuts))
            in_tiles = tiled.encode(vector, cuts, by_class, new) if cuts else None
            by_gap = _encode(vector, steps)
            found, vectors[str(width)] = entries(
                vector, changed_T, count_T, digest_T, by_gap, in_tiles, np.isin(changed_T, list(cuts))
            )
            arrays |= found
        return payload_of(self.name, version, base_version, delta.changed, arrays, vectors)

    def decode(
        self, payload: Payload, layout: Layout, old: OldBits | None = None, wanted: Wanted | None = None
    ) -> tuple[Delta, dict[str, int]]:
        """Return the changes, and the fingerprints of changed tensors after them.

        Args:
            payload: An opened payload of this codec.
            layout: The channel's tensors.
            old: Returns the bits of a tensor before the delta, flat and unsigned, as an array or by ranges (`Bits`);
                elements that are not wanted may have any bits. Only `context` needs it.
            wanted: Returns the regions of a tensor that the caller holds, or None for the whole tensor. Blocks without a
                wanted element are not decoded; other changes outside may be included.

        Raises:
            StageError: the payload needs `old`.
            ShareError: it needs more of some tensors than the caller holds: whole tiles, or all where there are none.
            CorruptDataError: the payload contradicts itself or the tensor table.
        """
        steps: dict[int, Sparse] = {}
        fingerprints: dict[str, int] = {}
        counted = 0
        size = _elements(payload, "block_elements")
        rows = _rows(payload, layout, size)
        readers = {width: _Reader(payload, layout.vectors[width], row, size) for width, row in rows}
        if wanted is not None and (names := [name for reader in readers.values() for name in reader.choose(wanted)]):
            raise ShareError(f"Decoding needs more than is held of {len(names)} tensors, such as {names[0]}.", names)
        if (coded := sum(reader.changed for reader in readers.values())) != payload.changed:
            raise CorruptDataError(f"Payload has blocks with {coded} changes, and should have {payload.changed}.")
        for width, reader in readers.items():
            vector = layout.vectors[width]
            number_T, count_T, digest_T = reader.number_T, reader.count_T, reader.digest_T
            counted += int(count_T.sum(dtype=np.uint64))
            fingerprints |= dict(zip((vector.names[t] for t in number_T.tolist()), digest_T.tolist(), strict=True))
            found = reader.decode(wanted, old)
            if found.at_K.size:
                steps[width] = found
            found_T = vector.count(found.at_K)
            left_T = np.zeros_like(found_T)
            left_T[number_T] = count_T
            left_T -= found_T
            if (left_T < 0).any() or (count_T <= 0).any() or (wanted is None and left_T.any()):
                raise CorruptDataError("Payload changes tensors that it does not name, or counts their changes wrong.")
        if counted != payload.changed:
            raise CorruptDataError("Payload counts the changes of its tensors wrong.")
        return Delta(layout, steps), fingerprints


Coded = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Entries of a payload and what its metadata says of them."""


def entries(
    vector: Vector,
    changed_T: np.ndarray,
    count_T: np.ndarray,
    digest_T: np.ndarray,
    by_gap: Coded,
    in_tiles: Coded | None,
    is_tiled_T: np.ndarray,
) -> Coded:
    """Return the part of a payload that changes one vector, for all encoders.

    Args:
        vector: The vector.
        changed_T: Numbers of the changed tensors; the arrays that follow `count_T` are for these.
        count_T: Number of changes of each tensor of the vector.
        digest_T: Fingerprints after the delta, uint64.
        by_gap: Their blocks of gaps, if any.
        in_tiles: Their blocks by class.
        is_tiled_T: Which of them those are of.
    """
    first = int(changed_T[0])
    flag_T = np.zeros(int(changed_T[-1]) + 1 - first, np.bool_)
    flag_T[changed_T - first] = True
    found = dict[str, torch.Tensor]()
    row: dict[str, Any] = {"tensor": first, "tensors": flag_T.size}
    if not flag_T.all():
        found["tensors"] = torch.from_numpy(np.packbits(flag_T, bitorder="little"))
    found |= by_gap[0]
    if in_tiles is not None:
        found |= in_tiles[0]
        row["tiles"] = in_tiles[1]
        if not is_tiled_T.all():
            found["tiled"] = torch.from_numpy(np.packbits(is_tiled_T, bitorder="little"))
    found["counts"] = torch.from_numpy(count_T[changed_T].astype(vector.index_dtype))
    found["fingerprints"] = torch.from_numpy(digest_T.view(np.int64))
    return {f".{vector.width}.{entry}": array for entry, array in found.items()}, row | by_gap[1]


def payload_of(
    name: str,
    version: int,
    base_version: int,
    changed: int,
    arrays: dict[str, torch.Tensor],
    vectors: dict[str, dict[str, Any]],
) -> Encoded:
    """Return a payload of `entries` of all widths, and what is said of them."""
    extra = {"block_elements": str(BLOCK), "vectors": json.dumps(vectors, separators=(",", ":"))}
    if any("tiles" in row for row in vectors.values()):
        extra["tile_elements"] = str(tiles.TILE)
    return Encoded.of(name, version, base_version, changed, arrays, extra)


def _encode(vector: Vector, steps: Sparse) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the entries of blocks, and their metadata."""
    at_K, step_K = steps
    if not at_K.size:
        return {}, {}
    first, last = int(at_K[0]) // BLOCK, int(at_K[-1]) // BLOCK + 1
    bound_B = count_below(at_K, np.minimum(np.arange(first, last + 1) * BLOCK, vector.element_count))
    blocks = Blocks.of(vector.element_count, BLOCK, bound_B, first)
    group_G, count_GTS = _groups(blocks, steps)
    words, tables_ = [np.empty(0, np.uint32)], bytearray()
    row_B2 = np.stack((np.diff(bound_B), np.zeros(last - first, np.int64)), axis=1).astype(np.int32)
    for (low, high), count_TS in zip(itertools.pairwise([*group_G, last - first]), count_GTS, strict=True):
        part, held = _part(blocks, low, high)
        freq_TS = tables.fit(count_TS)
        coded, row_B2[low:high, 1] = native.encode(part, at_K[held], None, step_K[held], freq_TS, _ONE_CLASS)
        words.append(coded)
        tables_ += tables.all_bytes(freq_TS)[0].tobytes()
    blocks_entry, planes = tiled.rows_entry(row_B2)
    entries = {
        "blocks": blocks_entry,
        "tables": torch.from_numpy(np.frombuffer(tables_, np.uint8)),
        "words": torch.from_numpy(np.concatenate(words).view(np.int32)),
    }
    return entries, {"block": first, "blocks": last - first, "groups": group_G, "planes": planes}


def _part(blocks: Blocks, low: int, high: int) -> tuple[Blocks, slice]:
    """Return blocks from number `low` on and below `high`, and which changes they have."""
    bound_B = blocks.bound_B[low : high + 1]
    part = Blocks(blocks.base_B[low:high], blocks.size_BC[low:high], bound_B - bound_B[0])
    return part, slice(int(bound_B[0]), int(bound_B[-1]))


def _groups(blocks: Blocks, steps: Sparse) -> tuple[list[int], list[np.ndarray]]:
    """Return the first block of each group, and the symbols that it has, int64[2, 256].

    Runs of blocks with about `GROUP_CHANGED` changes are joined as long as common tables take fewer bits than two of them.
    """
    starts, given = runs(blocks.bound_B).tolist(), (steps.at_K, None, steps.data_K, _ONE_CLASS)
    firsts, found, last_bits = list[int](), list[np.ndarray](), 0.0
    for at in range(0, len(starts), _RUNS):
        run_R = np.array([*starts, blocks.bound_B.size - 1][at : at + _RUNS + 1])
        for first, count_TS in zip(starts[at : at + _RUNS], native.count_runs(run_R, blocks, *given), strict=True):
            bits = _table_bits(count_TS)
            if found and (joined := _table_bits(found[-1] + count_TS)) <= last_bits + bits:
                found[-1], last_bits = found[-1] + count_TS, joined
                continue
            firsts.append(first)
            found.append(count_TS)
            last_bits = bits
    return firsts, found


def _table_bits(count_TS: np.ndarray) -> float:
    """Return the bits that symbols take beside their extra bits, with their tables."""
    total_T, some = np.maximum(count_TS.sum(axis=1), 1), count_TS[count_TS > 0]
    return float((total_T * np.log2(total_T)).sum() - (some * np.log2(some)).sum()) + 12 * some.size


def _cuts(vector: Vector, count_T: np.ndarray, new: NewBits) -> dict[int, Cut]:
    """Return the blocks of each tensor that is coded by classes."""
    found = {}
    for t in np.flatnonzero(count_T).tolist():
        spec = vector.specs[t]
        if count_T[t] >= tiles.FEW:
            bits_N, start = new(spec.name)
            cut = tiles.worth(spec, start, start + bits_N.size, int(count_T[t]), BLOCK)
            if cut is not None:
                found[t] = cut
    return found


def _split(vector: Vector, steps: Sparse, tensors: list[int]) -> tuple[Sparse, Sparse]:
    """Return the changes of these tensors, and the others."""
    if not tensors:
        return Sparse(steps.at_K[:0], steps.data_K[:0]), steps
    low_T, high_T = (count_below(steps.at_K, vector.first_T[np.array(tensors) + side]) for side in (0, 1))
    if (high_T - low_T).sum() == steps.at_K.size:
        return steps, Sparse(steps.at_K[:0], steps.data_K[:0])
    edge_K = np.zeros(steps.at_K.size + 1, np.int8)
    edge_K[low_T] += 1  # every one of them has changes
    edge_K[high_T] -= 1
    inside_K = np.cumsum(edge_K[:-1], dtype=np.int8).view(np.bool_)
    return Sparse(steps.at_K[inside_K], steps.data_K[inside_K]), Sparse(steps.at_K[~inside_K], steps.data_K[~inside_K])


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


def _rows(payload: Payload, layout: Layout, block: int) -> list[tuple[int, dict[str, int]]]:
    """Return the widths that a payload changes and the numbers about each of them."""
    found = []
    for width, row in _object(payload, "vectors").items():
        if width not in map(str, layout.vectors) or not isinstance(row, dict):
            raise CorruptDataError(f"Payload has elements of {width!r:.40} bytes, which the channel does not have.")
        row = {"block": 0, "blocks": 0} | row
        numbers: list[Any] = [row.get(key) for key in ("tensor", "tensors", "block", "blocks")]
        vector = layout.vectors[int(width)]
        most = len(vector.specs), -(-vector.element_count // block)
        spans = all(type(number) is int and number >= 0 for number in numbers)
        if not spans or numbers[0] + numbers[1] > most[0] or numbers[2] + numbers[3] > most[1]:
            raise CorruptDataError(f"Payload has wrong bounds of tensors or blocks, {row!r:.100}.")
        found.append((int(width), row))
    return found


def _spans(vector: Vector, number_T: np.ndarray, wanted: Wanted) -> np.ndarray | None:
    """Return where the wanted elements of changed tensors lie, int64[R, 2] of first and last positions; None for all."""
    spans, whole = [], True
    for t in number_T.tolist():
        first, last = vector.first_T[t : t + 2].tolist()
        regions = wanted(vector.names[t])
        if regions is None:
            spans.append((first, last))
            continue
        whole = False
        spans += [(first + region[0], first + region_end(region)) for region in regions if region_size(region)]
    return None if whole else np.array(spans, np.int64).reshape(-1, 2)


class _Reader:
    """Reads the part of a payload that changes one vector."""

    def __init__(self, payload: Payload, vector: Vector, row: Mapping[str, Any], block: int) -> None:
        self._payload, self._vector, self._row, self._block = payload, vector, row, block
        self._first = row["block"]
        self._row_B2, self._words = np.empty((0, 2), np.int32), np.empty(0, np.uint32)
        if row["blocks"]:
            self._row_B2 = read_rows(payload, f".{vector.width}.blocks", row["blocks"], row.get("planes"))
        self._bound_B, self._word_B = bounds(self._row_B2[:, 0]), bounds(self._row_B2[:, 1])
        if (self._row_B2[:, 0] > self._blocks().size_BC[:, 0]).any():
            raise CorruptDataError("Payload has a block with more changes than elements.")
        if row["blocks"]:
            self._words = self._take("words", "int32", int(self._word_B[-1]))
        self.number_T, index = self._numbers(), vector.index_dtype
        self.count_T = self._take("counts", index.name, self.number_T.size).view(index).astype(np.int64)
        self.digest_T = self._take("fingerprints", "int64", self.number_T.size)
        self._tiled = None
        if "tiles" in row:
            if not isinstance(row["tiles"], dict):
                raise CorruptDataError(f"Payload has tiles {row['tiles']!r:.100}.")
            sizes = _elements(payload, "tile_elements"), block
            self._tiled = TiledReader(payload, vector, row["tiles"], self.number_T, self.count_T, sizes)

    @property
    def changed(self) -> int:
        """Number of changes in its blocks."""
        return int(self._bound_B[-1]) + (0 if self._tiled is None else self._tiled.changed)

    def choose(self, wanted: Wanted) -> list[str]:
        """See `TiledReader.choose`."""
        return [] if self._tiled is None else self._tiled.choose(wanted)

    def _take(self, entry: str, dtype: str, size: int) -> np.ndarray:
        return take(self._payload, f".{self._vector.width}.{entry}", dtype, size)

    def _blocks(self) -> Blocks:
        return Blocks.of(self._vector.element_count, self._block, self._bound_B, self._first)

    def _numbers(self) -> np.ndarray:
        count = self._row["tensors"]
        if f".{self._vector.width}.tensors" not in self._payload.arrays:
            return np.arange(count) + self._row["tensor"]
        return np.flatnonzero(read_flags(self._payload, f".{self._vector.width}.tensors", count)) + self._row["tensor"]

    def decode(self, wanted: Wanted | None, old: OldBits | None) -> Sparse:
        """Return the changes of blocks with wanted elements."""
        by_class = [] if self._tiled is None else self._tiled.decode(old)
        number_T = self.number_T if self._tiled is None else np.setdiff1d(self.number_T, self._tiled.number_T)
        by_gaps = self._decode(None if wanted is None else _spans(self._vector, number_T, wanted))
        if self._tiled is not None and any(self._vector.count(part.at_K)[self._tiled.number_T].any() for part in by_gaps):
            raise CorruptDataError("Payload changes a tensor by gaps and by classes.")
        found = [*by_class, *by_gaps]
        if not found:
            return Sparse(np.empty(0, self._vector.index_dtype), np.empty(0, self._vector.bits_dtype))
        if len(found) == 1:
            return found[0]
        at_K, step_K = (np.concatenate(each) for each in zip(*found, strict=True))
        if by_class and by_gaps:  # they lie between each other
            order = np.argsort(at_K, kind="stable")
            return Sparse(at_K[order], step_K[order])
        return Sparse(at_K, step_K)

    def _decode(self, span_R2: np.ndarray | None) -> list[Sparse]:
        """Decode the blocks of gaps that overlap any of these spans of positions; all for None."""
        if not len(self._row_B2):
            return []
        blocks = self._blocks()
        keep_B = np.ones(len(self._row_B2), np.bool_)
        if span_R2 is not None:
            first_R = np.clip(span_R2[:, 0] // self._block - self._first, 0, keep_B.size)
            last_R = np.clip(-(-span_R2[:, 1] // self._block) - self._first, first_R, keep_B.size)
            edges = np.zeros(keep_B.size + 1, np.int64)
            np.add.at(edges, first_R, 1)
            np.add.at(edges, last_R, -1)
            keep_B = np.cumsum(edges[:-1]) > 0
        groups = read_groups(self._row, len(self._row_B2))
        freq_TS = tables.read(read_tables(self._payload, f".{self._vector.width}.tables"), 2 * len(groups))
        pieces: list[Sparse] = []
        for table, (low, high) in enumerate(itertools.pairwise([*groups, keep_B.size])):
            at_B = np.flatnonzero(keep_B[low:high]) + low
            if not at_B.size or not self._row_B2[at_B, 0].any():
                continue
            pieces.append(self._decode_group(blocks, at_B, freq_TS[2 * table : 2 * table + 2]))
        return pieces

    def _decode_group(self, blocks: Blocks, at_B: np.ndarray, freq_TS: np.ndarray) -> Sparse:
        vector = self._vector
        part = Blocks(blocks.base_B[at_B], blocks.size_BC[at_B], bounds(self._row_B2[at_B, 0]))
        word_B2 = np.stack((self._word_B[at_B], self._word_B[at_B + 1]), axis=1)
        at_K, step_K = np.empty(part.bound_B[-1], vector.index_dtype), np.empty(part.bound_B[-1], vector.bits_dtype)
        if not native.decode(part, self._words, word_B2, freq_TS, at_K, step_K):
            raise CorruptDataError(f"Payload has a malformed block of elements of {vector.width} bytes.")
        return Sparse(at_K, step_K)
