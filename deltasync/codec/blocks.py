"""What `packed` and `context` share: tensors cut into blocks, tables per group of tensors, one array of words.

    .words   int32[W]      the streams of all blocks: of all tensors in table order, of each tensor's blocks in their order;
                           bit patterns of unsigned words (`kernels.rans` describes a stream)
    .blocks  int32[B, F]   for each block its changed elements, its words, and what the codec adds; none for dense tensors;
                           of a tensor whose row has `"blocks": [first, last]` for those blocks only, `last` not included;
                           of one whose row has `"range": [start, stop]` for blocks of those elements only, from `start` on
    .tables  uint8[T]      the tables of all groups, one after the other, without gaps

A block is `block_elements` (metadata) elements of a tensor, its last one what is left; one without changes has no words.
A tensor's row in the table of patches names its group by number. A tensor for which all that is larger than all its bits is
stored as `{name}`: in its dtype and shape, marked `"dense": true`, or compressed, marked `"dense": [sizes of its planes]`
(`dense` describes them).

Tensors with many changes have a group of their own; the others share one with those that are alike, so that tables cost
little next to what they describe.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from deltasync.codec import dense
from deltasync.codec.base import RECORD, Change, Encoded, OldBits, Payload, Wanted, spec_for, take
from deltasync.codec.context import ContextModel
from deltasync.codec.packed import PackedModel
from deltasync.codec.tables import Cursor
from deltasync.errors import CorruptDataError
from deltasync.kernels import coder
from deltasync.kernels.rans import Blocks
from deltasync.tensors import Patch, TensorSpec, index_dtype
from deltasync.tensors.bits import tensor_of

BLOCK = 1 << 19
_RESERVED = {".words", ".blocks", ".tables", RECORD, "__metadata__"}  # no entry of a tensor may have these names
OWN_GROUP = 1 << 15  # changed elements from which on a tensor has tables of its own


Model = PackedModel | ContextModel
"""The tables of one group, and what the coder is given beside them."""


class BlockEncoder:
    """Collects the patches of one delta."""

    def __init__(self, model: type[Model]) -> None:
        self._model = model
        self._changes: list[Change] = []

    def add(
        self, spec: TensorSpec, index_K: np.ndarray, step_K: np.ndarray, new: np.ndarray, fingerprint: str, start: int = 0
    ) -> None:
        """Take one changed tensor, or what changed in a range of it; the arrays must not change before `finish`.

        Args:
            spec: The tensor.
            index_K: Flat indices into the whole tensor, ascending, not empty.
            step_K: New minus old bit patterns, modulo 2**width.
            new: New bit patterns of the range.
            fingerprint: The whole tensor's after the delta, 16 hex digits.
            start: Where the range begins.
        """
        origin, stop = (start, start + new.size) if self._model.needs_old else (0, spec.element_count)
        if origin:
            index_K = index_K - index_K.dtype.type(origin)
        first, last = (start - origin) // BLOCK, -(-(start - origin + new.size) // BLOCK)
        bound_B = np.searchsorted(index_K, np.arange(first, last + 1) * BLOCK).astype(np.int64)
        blocks = Blocks.of(stop - origin, BLOCK, bound_B, first)
        self._changes.append(Change(spec, index_K, step_K, new, fingerprint, start, blocks))

    def finish(self, version: int, base_version: int) -> Encoded:
        """The payload."""
        rows: dict[str, dict[str, Any]] = {}
        arrays: dict[str, torch.Tensor] = {}
        models, group_of = self._fit()
        words, blocks = [np.empty(0, np.uint32)], [np.empty((0, self._model.block_fields), np.int32)]
        used: dict[int, int] = {}
        for change, group in zip(self._changes, group_of, strict=True):
            row = rows[change.spec.name] = {"changed": change.index_K.size, "fingerprint": change.fingerprint}
            coded, row_BF = _encode(models[group], change)
            found = _dense(change, coded.nbytes + row_BF.nbytes)
            if found is not None:
                row["dense"], arrays[change.spec.name] = found
                continue
            row["group"] = used.setdefault(group, len(used))
            if not change.whole and self._model.needs_old:
                row["range"] = [change.start, change.start + change.new.size]
            elif not change.whole:
                first = change.start // BLOCK
                row["blocks"] = [first, first + len(row_BF)]
            words.append(coded)
            blocks.append(row_BF)
        tables = b"".join(models[group].to_bytes() for group in used)
        arrays[".blocks"] = torch.from_numpy(np.concatenate(blocks))
        arrays[".words"] = torch.from_numpy(np.concatenate(words).view(np.int32))
        arrays[".tables"] = torch.from_numpy(np.frombuffer(bytearray(tables), np.uint8))
        return Encoded.of(self._model.codec, version, base_version, rows, arrays, {"block_elements": str(BLOCK)})

    def _fit(self) -> tuple[list[Model], list[int]]:
        """The models, and which of them each change has."""
        members: dict[Hashable, list[Change]] = {}
        keys: list[Hashable] = []
        for change in self._changes:
            own = change.index_K.size >= OWN_GROUP
            keys.append(change.spec.name if own else self._model.group(change))
            members.setdefault(keys[-1], []).append(change)
        number = {key: at for at, key in enumerate(members)}
        return [self._model.fit(changes) for changes in members.values()], [number[key] for key in keys]


def _encode(model: Model, change: Change) -> tuple[np.ndarray, np.ndarray]:
    """Words, uint32[W], and rows of `.blocks`, int32[B, F]."""
    level_BF = model.levels(change)
    context = model.context(change.spec, change.new, level_BF)
    words, count_B = coder.encode(change.blocks, change.index_K, change.step_K, model.tables, context)
    return words, np.column_stack([np.diff(change.blocks.bound_B), count_B, level_BF]).astype(np.int32)


def _dense(change: Change, sparse_bytes: int) -> tuple[object, torch.Tensor] | None:
    """The mark and the entry of a dense tensor, or None if sparse is smaller."""
    # Compressed, bits rarely take less than half of their bytes.
    if not change.whole or change.spec.name in _RESERVED or 2 * sparse_bytes < change.new.nbytes:
        return None
    found = dense.compress(change.new)
    if found is not None and found[1].nbytes < sparse_bytes:
        return found
    return (True, tensor_of(change.new.copy(), change.spec)) if sparse_bytes >= change.new.nbytes else None


class BlockCodec:
    """An encoding whose blocks are coded by a model; `needs_old` says that decoding takes the old weights."""

    def __init__(self, model: type[Model]) -> None:
        self.name = model.codec
        self.needs_old = model.needs_old
        self._model = model

    def encoder(self) -> BlockEncoder:
        """A fresh encoder for one delta."""
        return BlockEncoder(self._model)

    def decode(
        self,
        payload: Payload,
        specs: Mapping[str, TensorSpec],
        old: OldBits | None = None,
        wanted: Wanted | None = None,
    ) -> Iterator[Patch]:
        """The patches in file order.

        Args:
            payload: An opened payload of this codec.
            specs: The channel's tensor table.
            old: Gives the bits of a tensor before the delta, flat and unsigned; only `context` needs them.
            wanted: Gives the ranges of a tensor that the caller holds, as int64[R, 2] of first elements and those behind the
                last, or None for all of it. Changes outside may be left out; whole blocks without a wanted element are
                not decoded. Dense patches always hold the whole tensor.

        Raises:
            StageError: the codec needs `old`.
            CorruptDataError: anything in the payload contradicts itself or the table.
        """
        streams = _Streams(self._model, payload, old if self.needs_old else None)
        for name, row in payload.patches.items():
            spec = spec_for(specs, name, row["changed"])
            if mark := row.get("dense"):
                plain = mark is True
                array = payload.arrays.get(name)
                data = take(payload, name, spec.dtype, spec.element_count) if plain else dense.decompress(array, mark, spec)
                yield Patch(name, None, data, absolute=True)
            else:
                patch = streams.next_patch(spec, row, None if wanted is None else wanted(name))
                if patch.data.size:
                    yield patch
        streams.check_exhausted()


class _Streams:
    """Reads the blocks of a payload from front to back."""

    def __init__(self, model: type[Model], payload: Payload, old: OldBits | None) -> None:
        declared = payload.metadata.get("block_elements", "")
        if not re.fullmatch("[0-9]{1,10}", declared) or not 1 <= int(declared) <= 1 << 30:
            raise CorruptDataError(f"Payload has blocks of {declared!r} elements.")
        self._block_elements = int(declared)
        self._model = model
        self._old = old
        table = payload.arrays.get(".blocks")
        wanted = (model.block_fields,)
        if table is None or table.dtype != torch.int32 or table.shape[1:] != wanted or (table[:, :2] < 0).any():
            raise CorruptDataError(f"Payload block table is not int32[B, {wanted[0]}] of non-negative numbers.")
        self._row_BF = table.numpy()
        self._word_B = np.concatenate(([0], np.cumsum(self._row_BF[:, 1], dtype=np.int64)))
        self._words = take(payload, ".words", "int32", int(self._word_B[-1]))
        self._next = 0
        tables = payload.arrays.get(".tables")
        if tables is None or tables.dtype != torch.uint8:
            raise CorruptDataError("Payload has no tables.")
        # Only where each group's tables begin: built, they are much larger than their bytes.
        cursor = Cursor(tables.numpy().tobytes())
        self._groups: list[int] = []
        while cursor.at < len(cursor.data):
            if len(self._groups) == len(payload.patches):
                raise CorruptDataError("Payload has more tables than patches.")
            self._groups.append(cursor.at)
            model.read(cursor)
        self._tables = cursor.data
        self._group: tuple[int, Model] | None = None

    def next_patch(self, spec: TensorSpec, row: Mapping[str, Any], ranges: np.ndarray | None) -> Patch:
        changed, (start, stop) = row["changed"], self._range(spec, row)
        first_block, last_block = self._span(spec, row, stop - start)
        first, self._next = self._next, self._next + last_block - first_block
        row_BF = self._row_BF[first : self._next]
        if self._next > len(self._row_BF):
            raise CorruptDataError(f"Payload ends within {spec.name!r}.")
        bound_B = np.concatenate(([0], np.cumsum(row_BF[:, 0], dtype=np.int64)))
        if bound_B[-1] != changed:
            raise CorruptDataError(f"Payload changes {bound_B[-1]} elements of {spec.name!r}, its table says {changed}.")
        blocks = Blocks.of(stop - start, self._block_elements, bound_B, first_block)
        blocks = Blocks(blocks.base_B + start, blocks.end_B + start, bound_B)
        if (row_BF[:, 0] > blocks.end_B - blocks.base_B).any():
            raise CorruptDataError(f"Payload changes more elements of {spec.name!r} than a block has.")
        words, word_B = self._words, self._word_B[first : self._next + 1]
        if ranges is not None:
            at = np.flatnonzero(_touched(blocks, ranges))
            words = np.concatenate([words[word_B[b] : word_B[b + 1]] for b in at] or [words[:0]])
            row_BF = row_BF[at]
            word_B, bound_B = (np.concatenate(([0], np.cumsum(row_BF[:, f], dtype=np.int64))) for f in (1, 0))
            blocks = Blocks(blocks.base_B[at], blocks.end_B[at], bound_B)
        model = self._tables_of(row.get("group"))
        context = model.context(spec, None if self._old is None else self._old(spec.name), row_BF[:, 2:])
        index_K = np.empty(bound_B[-1], index_dtype(spec.element_count))
        step_K = np.empty(bound_B[-1], spec.bits_dtype)
        if not coder.decode(blocks, words, word_B, model.tables, context, index_K, step_K):
            raise CorruptDataError(f"Payload has a malformed block of {spec.name!r}.")
        return Patch(spec.name, index_K, step_K, absolute=False)

    def _range(self, spec: TensorSpec, row: Mapping[str, Any]) -> tuple[int, int]:
        """Which elements of the tensor are cut into blocks: the first one, and the one behind the last."""
        if not self._model.needs_old or "range" not in row:
            return 0, spec.element_count
        match row["range"]:
            case [int(start), int(stop)] if 0 <= start <= stop <= spec.element_count and "blocks" not in row:
                return start, stop
        raise CorruptDataError(f"Payload has the range {row['range']!r} of {spec.name!r}, of {spec.element_count} elements.")

    def _span(self, spec: TensorSpec, row: Mapping[str, Any], element_count: int) -> tuple[int, int]:
        """Which blocks of these elements there are: the first one, and the one behind the last."""
        count = -(-element_count // self._block_elements)
        match row.get("blocks", [0, count]):
            case [int(first), int(last)] if 0 <= first <= last <= count:
                return first, last
        raise CorruptDataError(f"Payload has blocks {row['blocks']!r} of {spec.name!r}, which has {count}.")

    def check_exhausted(self) -> None:
        if self._next != len(self._row_BF):
            raise CorruptDataError("Payload has more blocks than its table of patches.")

    def _tables_of(self, group: object) -> Model:
        if not isinstance(group, int) or not 0 <= group < len(self._groups):
            raise CorruptDataError(f"Payload has no tables of group {group!r}.")
        if self._group is None or self._group[0] != group:
            self._group = group, self._model.read(Cursor(self._tables, self._groups[group]))
        return self._group[1]


def _touched(blocks: Blocks, range_R2: np.ndarray) -> np.ndarray:
    """Which blocks hold an element of the ranges."""
    low_RB, high_RB = (np.clip(range_R2[:, side, None], blocks.base_B, blocks.end_B) for side in (0, 1))
    touched_B: np.ndarray = np.any(high_RB > low_RB, axis=0)
    return touched_B
