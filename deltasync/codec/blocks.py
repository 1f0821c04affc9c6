"""The container of `context`: tensors are cut into blocks, and groups of tensors share tables.

    .words   int32[W]      streams of all blocks, in the order of the table of patches and of each tensor's blocks; bit
                           patterns of unsigned 32-bit words (`kernels.rans` describes a stream)
    .blocks  int32[B, 3]   a row for each block: changed elements, words, and a level (`context`)
    .tables  uint8[T]      tables of all groups, without gaps

A block has `block_elements` (metadata) elements; the last one has what is left. A block without changes has no words. A
tensor's row in the table of patches may hold

    "group": g                  the number of its group
    "blocks": [first, last]     the payload has only these blocks, `last` not included
    "range": [start, stop]      the payload has only these elements, cut into blocks from `start` on
    "tiles": [rows, columns]    its blocks are tiles (`tiles`)
    "dense": true, or sizes     no group and no blocks, which would be larger: the entry `{name}` is the tensor in its dtype
                                and shape, or its planes of these sizes (`dense`)

If the metadata has `block_planes`, `.blocks` is uint8: the differences from row to row (of the first row, from 0), column by
column, as 1, -1, 2, -2 -> 2, 1, 4, 3, compressed into planes of these sizes.

Small tensors, and those with few changes for their tiles, are coded by gaps, as `packed` codes vectors; their groups have
the tables of `packed` after two bytes 255. Tensors with many changes have a group of their own. Others share one with
similar tensors, so that tables stay small beside what they describe.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deltasync.codec import dense, tiles
from deltasync.codec.base import (
    RECORD,
    Change,
    Encoded,
    NewBits,
    OldBits,
    Payload,
    Wanted,
    delta_of,
    indices_of,
    spec_for,
    take,
)
from deltasync.codec.context import ContextModel
from deltasync.codec.packed import PackedModel
from deltasync.codec.tables import Cursor
from deltasync.codec.tiles import Grid
from deltasync.codec.vector import block_elements, read_rows, rows_entry
from deltasync.errors import CorruptDataError, ShareError
from deltasync.kernels import coder
from deltasync.kernels.rans import Blocks
from deltasync.tensors import Delta, Layout, Region, TensorSpec, index_dtype, region_end, region_size
from deltasync.tensors.bits import tensor_of
from deltasync.tensors.fingerprint import to_hex

BLOCK = 1 << 19
_RESERVED = {".words", ".blocks", ".tables", RECORD, "__metadata__"}  # a tensor of such a name cannot be dense
OWN_GROUP = 1 << 15  # changed elements from which a tensor has tables of its own
_GAPS = bytes([255, 255])  # would be 256 classes from number 255 on, which tables of `context` cannot have

_Patch = tuple[str, np.ndarray | None, np.ndarray, bool]  # as `delta_of` takes it

Model = PackedModel | ContextModel
"""The tables of one group, and what the coder needs beside them."""


class BlockEncoder:
    """Collects and encodes the patches of one delta."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def add(
        self, spec: TensorSpec, index_K: np.ndarray, step_K: np.ndarray, new: np.ndarray, fingerprint: str, start: int = 0
    ) -> None:
        """Add the changes of a tensor, or of a range of one. The arrays must not change before `finish`.

        Args:
            spec: The tensor.
            index_K: Flat indices into the whole tensor, ascending, not empty.
            step_K: New minus old bit patterns, modulo 2**width.
            new: New bit patterns of the range.
            fingerprint: Fingerprint of the whole tensor after the delta, 16 hex digits.
            start: First element of the range.
        """
        grid = Grid.fit(spec, start, start + new.size)
        if grid is not None and index_K.size >= tiles.FEW * grid.count:
            index_K, step_K, bound_B = grid.by_tiles(index_K, step_K)
            blocks = grid.blocks(bound_B)
            blocks = blocks._replace(base_B=blocks.base_B - start, end_B=blocks.end_B - start)
            index_K -= index_K.dtype.type(start)
            self._changes.append(Change(spec, index_K, step_K, new, fingerprint, start, blocks, grid.ways))
            return
        if start:
            index_K = index_K - index_K.dtype.type(start)
        bound_B = np.searchsorted(index_K, np.arange(-(-new.size // BLOCK) + 1) * BLOCK).astype(np.int64)
        blocks = Blocks.of(new.size, BLOCK, bound_B)
        by_gaps = grid is not None or spec.element_count < tiles.SMALL
        self._changes.append(Change(spec, index_K, step_K, new, fingerprint, start, blocks, by_gaps=by_gaps))

    def finish(self, version: int, base_version: int) -> Encoded:
        """Return the payload of all patches that were added."""
        rows: dict[str, dict[str, Any]] = {}
        arrays: dict[str, torch.Tensor] = {}
        models, group_of = self._fit()
        words, blocks = [np.empty(0, np.uint32)], [np.empty((0, ContextModel.block_fields), np.int32)]
        used: dict[int, int] = {}
        for change, group in zip(self._changes, group_of, strict=True):
            row = rows[change.spec.name] = {"changed": change.index_K.size, "fingerprint": change.fingerprint}
            coded, row_BF = _encode(models[group], change, ContextModel.block_fields)
            found = _dense(change, coded.nbytes + row_BF.nbytes)
            if found is not None:
                row["dense"], arrays[change.spec.name] = found
                continue
            row["group"] = used.setdefault(group, len(used))
            if change.ways is not None:
                row["tiles"] = change.ways
            if not change.whole:
                row["range"] = [change.start, change.start + change.new.size]
            words.append(coded)
            blocks.append(row_BF)
        tables = b"".join(self._marked(models[group]) for group in used)
        arrays[".blocks"], planes = rows_entry(np.concatenate(blocks))
        arrays[".words"] = torch.from_numpy(np.concatenate(words).view(np.int32))
        arrays[".tables"] = torch.from_numpy(np.frombuffer(bytearray(tables), np.uint8))
        changed = sum(row["changed"] for row in rows.values())
        extra = {"patches": json.dumps(rows, separators=(",", ":")), "block_elements": str(BLOCK)}
        if planes is not None:
            extra["block_planes"] = json.dumps(planes)
        return Encoded.of(ContextModel.codec, version, base_version, changed, arrays, extra)

    def _fit(self) -> tuple[list[Model], list[int]]:
        """Return the models, and for each change the number of its model."""
        members: dict[Hashable, list[Change]] = {}
        keys: list[Hashable] = []
        for change in self._changes:
            own = change.index_K.size >= OWN_GROUP
            keys.append(change.spec.name if own else (change.by_gaps, _model_of(change).group(change)))
            members.setdefault(keys[-1], []).append(change)
        number = {key: at for at, key in enumerate(members)}
        return [_model_of(changes[0]).fit(changes) for changes in members.values()], [number[key] for key in keys]

    def _marked(self, model: Model) -> bytes:
        return (b"" if isinstance(model, ContextModel) else _GAPS) + model.to_bytes()


def _model_of(change: Change) -> type[Model]:
    return PackedModel if change.by_gaps else ContextModel


def _encode(model: Model, change: Change, fields: int) -> tuple[np.ndarray, np.ndarray]:
    """Return words, uint32[W], and rows of `.blocks`, int32[B, F]; columns that the model does not use are 0."""
    context = model.for_encoding(change)
    words, count_B = coder.encode(change.blocks, change.index_K, change.step_K, model.tables, context)
    row_BF = np.zeros((count_B.size, fields), np.int32)
    row_BF[:, 0], row_BF[:, 1] = np.diff(change.blocks.bound_B), count_B
    if context is not None:
        row_BF[:, 2] = context.level_B
    return words, row_BF


def _dense(change: Change, sparse_bytes: int) -> tuple[object, torch.Tensor] | None:
    """Return the row's "dense" and the entry of a tensor, or None if sparse is smaller or the tensor cannot be dense."""
    # Bits rarely compress to less than half.
    if not change.whole or change.spec.name in _RESERVED or 2 * sparse_bytes < change.new.nbytes:
        return None
    found = dense.compress(change.new)
    if found is not None and found[1].nbytes < sparse_bytes:
        return found
    return (True, tensor_of(change.new.copy(), change.spec)) if sparse_bytes >= change.new.nbytes else None


def rows_of(payload: Payload, count: int, fields: int) -> np.ndarray:
    """Return the rows of `.blocks`, int32[count, fields].

    Raises:
        CorruptDataError: the entry has another shape or dtype, or a row has a negative number of changes or words.
    """
    sizes = None
    if "block_planes" in payload.metadata:
        try:
            sizes = (
                json.loads(payload.metadata["block_planes"]) or []
            )  # null says no sizes, and not that there are no planes
        except (ValueError, RecursionError):
            sizes = []
    return read_rows(payload, ".blocks", count, fields, sizes)


class BlockCodec:
    """The codec `context`. Decoding needs the old weights."""

    name = ContextModel.codec
    needs_old = True

    def encode(
        self, delta: Delta, new: NewBits, fingerprints: Mapping[str, int], version: int, base_version: int
    ) -> Encoded:
        """See `VectorCodec.encode`."""
        encoder = BlockEncoder()
        for name in delta.counts():
            spec, (bits_N, start), (steps, _) = delta.layout.specs[name], new(name), delta.of(name)
            encoder.add(spec, indices_of(steps, spec), steps.data_K, bits_N, to_hex(fingerprints[name]), start)
        return encoder.finish(version, base_version)

    def decode(
        self, payload: Payload, layout: Layout, old: OldBits | None = None, wanted: Wanted | None = None
    ) -> tuple[Delta, dict[str, int]]:
        """See `VectorCodec.decode`; only blocks that a caller holds as a whole can be decoded from `old`."""
        return delta_of(layout, self._patches(payload, layout.specs, old, wanted)), payload.fingerprints

    def _patches(
        self, payload: Payload, specs: Mapping[str, TensorSpec], old: OldBits | None, wanted: Wanted | None
    ) -> Iterator[_Patch]:
        """Yield the patches in file order.

        Args:
            payload: An opened payload of this codec.
            specs: The channel's tensor table.
            old: Returns the bits of a tensor before the delta, flat and unsigned; elements that are not wanted may have any
                bits. Only `context` needs it.
            wanted: Returns the regions of a tensor that the caller holds, or None for the whole tensor. Blocks without a
                wanted element are not decoded; other changes outside may be included. Dense patches are always whole. A
                tensor without a wanted block has an empty patch: its fingerprint is that of the payload all the same.

        Raises:
            StageError: the codec needs `old`.
            ShareError: it needs more of some tensors than the caller holds: whole tiles, or all where there are none.
            CorruptDataError: the payload contradicts itself or the tensor table.
        """
        streams = _Streams(payload, specs, old)
        chosen = {} if wanted is None else streams.chosen(specs, payload, wanted)
        for name, row in payload.patches.items():
            spec = specs[name]
            if mark := row.get("dense"):
                plain = mark is True
                array = payload.arrays.get(name)
                data = take(payload, name, spec.dtype, spec.element_count) if plain else dense.decompress(array, mark, spec)
                yield name, None, data, True
            else:
                yield streams.next_patch(spec, row, chosen.get(name))


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """The blocks of a tensor that a payload has: `count` blocks of elements `start` to `stop`, from number `first` on."""

    start: int
    stop: int
    first: int
    count: int
    grid: Grid | None


class _Streams:
    """Reads the blocks of a payload from front to back."""

    def __init__(self, payload: Payload, specs: Mapping[str, TensorSpec], old: OldBits | None) -> None:
        self._block_elements = block_elements(payload)
        self._old = old
        rows = ((spec_for(specs, name, row["changed"]), row) for name, row in payload.patches.items())
        self._cuts = {spec.name: self._cut(spec, row) for spec, row in rows if not row.get("dense")}
        self._row_BF = rows_of(payload, sum(cut.count for cut in self._cuts.values()), ContextModel.block_fields)
        self._word_B = _bounds(self._row_BF[:, 1])
        self._words = take(payload, ".words", "int32", int(self._word_B[-1]))
        self._next = 0
        tables = payload.arrays.get(".tables")
        if tables is None or tables.dtype != torch.uint8:
            raise CorruptDataError("Payload has no uint8 tables.")
        # Only the position of each group's tables is kept: parsed, they are much larger than their bytes.
        self._tables = tables.numpy().tobytes()
        cursor = Cursor(self._tables)
        self._groups: list[int] = []
        self._group: tuple[int, Model] | None = None
        while cursor.at < len(self._tables):
            if len(self._groups) == len(payload.patches):
                raise CorruptDataError("Payload has more tables than patches.")
            self._groups.append(cursor.at)
            self._group = cursor.at, self._read(cursor)

    def chosen(self, specs: Mapping[str, TensorSpec], payload: Payload, wanted: Wanted) -> dict[str, np.ndarray]:
        """Return the numbers of the blocks to decode of each tensor that is not wanted as a whole.

        Raises:
            ShareError: some of them need more of the tensor than is held.
        """
        found, lacking = {}, []
        for name, cut in self._cuts.items():
            if (regions := wanted(name)) is None:
                continue
            at_B = self._held(specs[name], cut, payload.patches[name].get("group"), regions)
            if at_B is None:
                lacking.append(name)
            else:
                found[name] = at_B
        if lacking:
            raise ShareError(f"Decoding needs more than is held of {len(lacking)} tensors, such as {lacking[0]}.", lacking)
        return found

    def next_patch(self, spec: TensorSpec, row: Mapping[str, Any], chosen_B: np.ndarray | None) -> _Patch:
        """Decode the next tensor's blocks, all of them or those with the numbers `chosen_B`, ascending."""
        cut, model = self._cuts[spec.name], self._tables_of(row.get("group"))
        first, self._next = self._next, self._next + cut.count
        row_BF, word_B, words = self._row_BF[first : self._next], self._word_B[first : self._next + 1], self._words
        blocks = self._blocks(cut, _bounds(row_BF[:, 0]))
        if blocks.bound_B[-1] != row["changed"] or (row_BF[:, 0] > blocks.size_B).any():
            raise CorruptDataError(f"Payload counts the changes of {spec} wrong, in its table of patches or of blocks.")
        at_B = np.arange(cut.count) if chosen_B is None else chosen_B
        if not at_B.size:
            return spec.name, np.empty(0, np.int64), np.empty(0, spec.bits_dtype), False
        if chosen_B is not None:
            words = np.concatenate([words[word_B[b] : word_B[b + 1]] for b in at_B])
            row_BF = row_BF[at_B]
            blocks = blocks._replace(base_B=blocks.base_B[at_B], end_B=blocks.end_B[at_B], bound_B=_bounds(row_BF[:, 0]))
            word_B = _bounds(row_BF[:, 1])
        old_N = self._old(spec.name) if model.needs_old and self._old is not None else None
        context = model.for_decoding(spec, old_N, row_BF)
        index_K = np.empty(blocks.bound_B[-1], index_dtype(spec.element_count))
        step_K = np.empty(index_K.size, spec.bits_dtype)
        if not coder.decode(blocks, words, word_B, model.tables, context, index_K, step_K):
            raise CorruptDataError(f"Payload has a malformed block of {spec.name!r}.")
        if cut.grid is not None:
            index_K, step_K = cut.grid.ascending(at_B, blocks.bound_B, index_K, step_K)
        return spec.name, index_K, step_K, False

    def _blocks(self, cut: _Cut, bound_B: np.ndarray) -> Blocks:
        if cut.grid is not None:
            return cut.grid.blocks(bound_B)
        blocks = Blocks.of(cut.stop - cut.start, self._block_elements, bound_B, cut.first)
        return blocks._replace(base_B=blocks.base_B + cut.start, end_B=blocks.end_B + cut.start)

    def _held(self, spec: TensorSpec, cut: _Cut, group: object, regions: Sequence[Region]) -> np.ndarray | None:
        """Return the numbers of the blocks to decode for these regions; None if that needs more of the tensor."""
        size = sum(map(region_size, set(regions)))
        if not self._needs_old(self._place_of(group)) or size in (0, spec.element_count):
            return np.flatnonzero(_touched(self._blocks(cut, np.zeros(cut.count + 1, np.int64)), regions))
        return None if cut.grid is None else cut.grid.held(regions)

    def _cut(self, spec: TensorSpec, row: Mapping[str, Any]) -> _Cut:
        start, stop = self._range(spec, row)
        if "tiles" not in row:
            first, last = self._span(spec, row, stop - start)
            return _Cut(start, stop, first, last - first, None)
        match row["tiles"]:
            case [int(down), int(across)] if "blocks" not in row:
                grid = Grid.cut(spec, start, stop, (down, across))
                if grid is not None:
                    return _Cut(start, stop, 0, grid.count, grid)
        raise CorruptDataError(f"Payload cannot cut {spec.name!r}, of shape {spec.shape}, into tiles {row['tiles']!r:.40}.")

    def _range(self, spec: TensorSpec, row: Mapping[str, Any]) -> tuple[int, int]:
        """Return which elements of the tensor are cut into blocks: the first one, and the one after the last."""
        if "range" not in row:
            return 0, spec.element_count
        match row["range"]:
            case [int(start), int(stop)] if 0 <= start <= stop <= spec.element_count and "blocks" not in row:
                return start, stop
        raise CorruptDataError(f"Payload has the range {row['range']!r:.40} of {spec.name!r}, of {spec.element_count}.")

    def _span(self, spec: TensorSpec, row: Mapping[str, Any], element_count: int) -> tuple[int, int]:
        """Return which blocks of these elements the payload has: the first one, and the one after the last."""
        count = -(-element_count // self._block_elements)
        match row.get("blocks", [0, count]):
            case [int(first), int(last)] if 0 <= first <= last <= count:
                return first, last
        raise CorruptDataError(f"Payload has blocks {row['blocks']!r:.40} of {spec.name!r}, which has {count} blocks.")

    def _tables_of(self, group: object) -> Model:
        at = self._place_of(group)
        if self._group is None or self._group[0] != at:
            self._group = at, self._read(Cursor(self._tables, at))
        return self._group[1]

    def _place_of(self, group: object) -> int:
        if not isinstance(group, int) or not 0 <= group < len(self._groups):
            raise CorruptDataError(f"Payload has no tables of group {group!r:.40}.")
        return self._groups[group]

    def _needs_old(self, at: int) -> bool:
        """Whether the tables at this place are for changes that are decoded by the old bits."""
        return not self._tables.startswith(_GAPS, at)

    def _read(self, cursor: Cursor) -> Model:
        if not self._needs_old(cursor.at):
            cursor.at += len(_GAPS)
            return PackedModel.read(cursor)
        return ContextModel.read(cursor)


def _bounds(count_B: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(count_B, dtype=np.int64)))


def _touched(blocks: Blocks, regions: Sequence[Region]) -> np.ndarray:
    """Return, for each block, whether it overlaps the span from the first to the last element of a region; bool[B]."""
    range_R2 = np.array([(region[0], region_end(region)) for region in regions], np.int64).reshape(-1, 2)
    low_RB, high_RB = (np.clip(range_R2[:, side, None], blocks.base_B, blocks.end_B) for side in (0, 1))
    touched_B: np.ndarray = np.any(high_RB > low_RB, axis=0)
    return touched_B
