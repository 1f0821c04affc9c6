"""`packed`: positions as gaps, and ULP steps, entropy coded block by block over whole vectors; decoding needs no old values.

A *vector* is all elements of one width, in the order of the channel's tensor table (`tensors.layout`). For each width W in
bytes of which elements changed, a payload has

    .W.tensors       uint8[ceil(T / 8)]   a bit for each tensor of a range of the table, the lowest bit first: is it changed?
                                          Absent if all are
    .W.counts        int32[changed]       changed elements of each changed tensor; int64 from 2**31 elements of the vector on
    .W.fingerprints  int64[changed]       what the fingerprints of the changed tensors become; bit patterns of uint64
    .W.blocks        int32[B, 2]          changed elements and words of each block, or its planes (below)
    .W.tables        uint8[bytes]         for each group the table of gaps, then that of steps (`tables`)
    .W.words         int32[words]         the streams of all blocks, in order; bit patterns of unsigned 32-bit words

and its metadata `vectors` is JSON: {"W": {"tensor": first tensor of the bitmap, "tensors": T, "block": first block,
"blocks": B, "groups": the first block of each group, from 0 on, ascending, "planes": sizes or null}}. A block has
`block_elements` positions (metadata, decimal; 1 to 2**30); the last one of a vector has what is left. A block without
changes has no words. If there are `planes`, `.W.blocks` is uint8: the differences from row to row (of the first row, from
0), column by column, as 1, -1, 2, -2 -> 2, 1, 4, 3, compressed into planes of these sizes (`dense`).

The stream of a block (`kernels.rans`) holds two numbers for each changed element, in ascending order:

- the gap: unchanged positions between it and the changed one before, or the start of the block;
- the step: new minus old bit pattern modulo 2**(8 W), as a signed number, 1, -1, 2, -2 -> 1, 0, 3, 2.

A number is coded as a bucket, 12 bits of the state by the group's table, and extra bits. Bucket s below 16 is the number s.
Bucket s from 16 on holds the numbers from (4 + s % 4) << e to ((5 + s % 4) << e) - 1 with e = s // 4 - 2. Their low e bits
follow from the top, in groups of 24 and a last one of what is left, each a uniform symbol (start = value, freq = 1, bits =
size of the group).

A tensor whose changes would be larger than itself is *dense*: the entry `{name}` is the tensor in its dtype and shape, or
its planes (`dense`). The metadata `dense` is JSON: {name: true, or the sizes of the planes}.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deltasync.codec import dense, tables
from deltasync.codec.base import RECORD, Encoded, NewBits, OldBits, Payload, Wanted, delta_of, take
from deltasync.codec.tables import Cursor
from deltasync.errors import CorruptDataError
from deltasync.kernels import coder, counts
from deltasync.kernels.rans import Blocks, Tables
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec, Vector, region_end, region_size
from deltasync.tensors.bits import tensor_of

BLOCK = 1 << 19
GROUP_CHANGED = 1 << 15
"""Changed elements that are worth tables of their own."""

_MOST_ROWS = 1 << 24  # of a table of blocks in planes: small planes could ask for any amount of memory


class VectorCodec:
    """The codec `packed`."""

    name = "packed"
    needs_old = False

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
        whole: dict[str, object] = {}
        for width, steps in delta.steps.items():
            vector = delta.layout.vectors[width]
            count_T = vector.count(steps.at_K)
            for t in _candidates(vector, steps, count_T):
                name = vector.names[t]
                if (found := _dense(vector, t, steps, new)) is not None:
                    whole[name], arrays[name] = found
                    low, high = np.searchsorted(steps.at_K, vector.first_T[t : t + 2])
                    steps = Sparse(np.delete(steps.at_K, slice(low, high)), np.delete(steps.data_K, slice(low, high)))
            changed_T = np.flatnonzero(count_T)
            first = int(changed_T[0])
            flag_T = np.zeros(int(changed_T[-1]) + 1 - first, np.bool_)
            flag_T[changed_T - first] = True
            digest_T = np.array([fingerprints[vector.names[t]] for t in changed_T.tolist()], np.uint64)
            row = {"tensor": first, "tensors": flag_T.size}
            entries, more = _encode(vector, steps)
            if not flag_T.all():
                entries["tensors"] = torch.from_numpy(np.packbits(flag_T, bitorder="little"))
            entries["counts"] = torch.from_numpy(count_T[changed_T].astype(vector.index_dtype))
            entries["fingerprints"] = torch.from_numpy(digest_T.view(np.int64))
            arrays |= {f".{width}.{entry}": array for entry, array in entries.items()}
            vectors[str(width)] = row | more
        extra = {"block_elements": str(BLOCK), "vectors": json.dumps(vectors, separators=(",", ":"))}
        if whole:
            extra["dense"] = json.dumps(whole, separators=(",", ":"))
        return Encoded.of(self.name, version, base_version, delta.changed, arrays, extra)

    def decode(
        self, payload: Payload, layout: Layout, old: OldBits | None = None, wanted: Wanted | None = None
    ) -> tuple[Delta, dict[str, int]]:
        """Return the changes, and the fingerprints of changed tensors after them.

        Args:
            payload: An opened payload of this codec.
            layout: The channel's tensors.
            old: Not used: see `context`.
            wanted: Returns the regions of a tensor that the caller holds, or None for the whole tensor. Blocks without a
                wanted element are not decoded; other changes outside may be included.

        Raises:
            CorruptDataError: the payload contradicts itself or the tensor table.
        """
        steps: dict[int, Sparse] = {}
        patches: list[tuple[str, None, np.ndarray, bool]] = []  # dense tensors
        fingerprints: dict[str, int] = {}
        counted, lacking = 0, set[str]()
        size = block_elements(payload)
        rows = _rows(payload, layout, size)
        readers = {width: _Reader(payload, layout.vectors[width], row, size) for width, row in rows}
        whole = _object(payload, "dense")
        coded = sum(reader.changed for reader in readers.values())
        if coded > payload.changed or (coded < payload.changed and not whole):
            raise CorruptDataError(f"Payload has blocks with {coded} changes, and should have {payload.changed}.")
        for width, reader in readers.items():
            vector = layout.vectors[width]
            number_T, count_T, digest_T = reader.changed_tensors()
            counted += int(count_T.sum(dtype=np.uint64))
            fingerprints |= dict(zip((vector.names[t] for t in number_T.tolist()), digest_T.tolist(), strict=True))
            found = reader.decode(None if wanted is None else _spans(vector, number_T, wanted))
            if found.at_K.size:
                steps[width] = found
            found_T = vector.count(found.at_K)
            left_T = np.zeros_like(found_T)
            left_T[number_T] = count_T
            left_T -= found_T
            if (left_T < 0).any() or (count_T <= 0).any():
                raise CorruptDataError("Payload changes tensors that it does not name, or more of them than it says.")
            if wanted is None:
                lacking |= {vector.names[t] for t in np.flatnonzero(left_T).tolist()}
        if counted != payload.changed or lacking - whole.keys():
            raise CorruptDataError("Payload counts the changes of its tensors wrong.")
        for name, sizes in whole.items():
            if name not in fingerprints:
                raise CorruptDataError(f"Payload has a dense tensor that it does not name, {name!r:.100}.")
            spec = layout.specs[name]
            width, first, last = layout.span(name)
            bits_N = take(payload, name, spec.dtype, spec.element_count) if sizes is True else None
            if bits_N is None:
                bits_N = dense.decompress(payload.arrays.get(name), sizes, spec)
            if width in steps and steps[width].between(first, last).at_K.size:
                raise CorruptDataError(f"Payload has {name!r} twice.")
            patches.append((name, None, bits_N, True))
        return Delta(layout, steps, delta_of(layout, patches).known), fingerprints


def _encode(vector: Vector, steps: Sparse) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the entries of blocks, and their metadata."""
    at_K, step_K = steps
    first, last = (int(at_K[0]) // BLOCK, int(at_K[-1]) // BLOCK + 1) if at_K.size else (0, 0)
    bound_B = np.searchsorted(at_K, np.arange(first, last + 1) * BLOCK).astype(np.int64)
    blocks = Blocks.of(vector.element_count, BLOCK, bound_B, first)
    group_G, count_GTS = _groups(blocks, steps)
    words, tables_ = [np.empty(0, np.uint32)], bytearray()
    row_B2 = np.stack((np.diff(bound_B), np.zeros(last - first, np.int64)), axis=1).astype(np.int32)
    for (low, high), count_TS in zip(itertools.pairwise([*group_G, last - first]), count_GTS, strict=True):
        part, held = _part(blocks, low, high)
        freq_TS = np.stack([tables.fit(count_S) for count_S in count_TS])
        coded, row_B2[low:high, 1] = coder.encode(part, at_K[held], step_K[held], Tables.of(freq_TS), None)
        words.append(coded)
        tables_ += b"".join(map(tables.to_bytes, freq_TS))
    blocks_entry, planes = rows_entry(row_B2)
    entries = {
        "blocks": blocks_entry,
        "tables": torch.from_numpy(np.frombuffer(tables_, np.uint8)),
        "words": torch.from_numpy(np.concatenate(words).view(np.int32)),
    }
    return entries, {"block": first, "blocks": last - first, "groups": group_G, "planes": planes}


def _part(blocks: Blocks, low: int, high: int) -> tuple[Blocks, slice]:
    """Return blocks from number `low` on and below `high`, and which changes they have."""
    bound_B = blocks.bound_B[low : high + 1]
    part = blocks._replace(base_B=blocks.base_B[low:high], end_B=blocks.end_B[low:high], bound_B=bound_B - bound_B[0])
    return part, slice(int(bound_B[0]), int(bound_B[-1]))


def _groups(blocks: Blocks, steps: Sparse) -> tuple[list[int], list[np.ndarray]]:
    """Return the first block of each group, and the symbols that it has, int64[2, 256].

    Runs of blocks with about `GROUP_CHANGED` changes are joined as long as common tables take fewer bits than two of them.
    """
    bound_B = blocks.bound_B
    if bound_B.size < 2:
        return [], []
    run_B = bound_B[:-1] // GROUP_CHANGED
    starts = np.append(0, np.flatnonzero(run_B[1:] != run_B[:-1]) + 1).tolist()
    groups, found = list[int](), list[np.ndarray]()
    for low, high in itertools.pairwise([*starts, bound_B.size - 1]):
        part, held = _part(blocks, low, high)
        count_TS = counts.count_packed(part, steps.at_K[held], steps.data_K[held])
        if found and _table_bits(found[-1] + count_TS) <= _table_bits(found[-1]) + _table_bits(count_TS):
            found[-1] = found[-1] + count_TS
        else:
            groups.append(low)
            found.append(count_TS)
    return groups, found


def _table_bits(count_TS: np.ndarray) -> float:
    """Return the bits that symbols take beside their extra bits, with their tables."""
    bits = 0.0
    for count_S in count_TS:
        some = count_S[count_S > 0]
        bits += float(some.sum() * np.log2(max(int(some.sum()), 1)) - (some * np.log2(some)).sum()) + 12 * some.size
    return bits


def _candidates(vector: Vector, steps: Sparse, count_T: np.ndarray) -> list[int]:
    """Return the tensors of which so much changes that they may be smaller as a whole: at least half of their bits."""
    size_T = np.diff(vector.first_T)
    many_T = np.flatnonzero(4 * count_T >= np.maximum(size_T, 1))
    found = []
    for t in many_T.tolist():
        low, high = np.searchsorted(steps.at_K, vector.first_T[t : t + 2])
        if 2 * _bits(steps.data_K[low:high], int(size_T[t])) >= 8 * vector.width * size_T[t]:
            found.append(t)
    return found


def _bits(step_K: np.ndarray, size: int) -> float:
    """Estimate how many bits changes take, by the entropy of the steps' magnitudes and of the places."""
    signed = step_K.view(f"i{step_K.itemsize}")
    exponent_K = np.frexp(np.abs(signed.astype(np.float64)))[1]
    _, count = np.unique(exponent_K, return_counts=True)
    part = count / step_K.size
    places = step_K.size / size
    gap_bits = 0.0 if places >= 1 else size * -(places * np.log2(places) + (1 - places) * np.log2(1 - places))
    return 1.02 * float(exponent_K.sum() - (count * np.log2(part)).sum() + gap_bits)  # tables do not fit exactly


def _dense(vector: Vector, t: int, steps: Sparse, new: NewBits) -> tuple[object, torch.Tensor] | None:
    """Return what `dense` says of a tensor and its entry, or None if changes are smaller or it cannot be dense."""
    spec = vector.specs[t]
    bits_N, _ = new(spec.name)
    if bits_N.size != spec.element_count or spec.name.startswith(".") or spec.name in (RECORD, "__metadata__"):
        return None
    low, high = np.searchsorted(steps.at_K, vector.first_T[t : t + 2])
    sparse_bytes = _bits(steps.data_K[low:high], bits_N.size) / 8
    found = dense.compress(bits_N)
    if found is not None and found[1].nbytes < sparse_bytes:
        return found
    return (True, tensor_of(bits_N.copy(), spec)) if sparse_bytes >= bits_N.nbytes else None


def rows_entry(row_BF: np.ndarray) -> tuple[torch.Tensor, list[int] | None]:
    """Return the entry of a table of blocks, and the sizes of its planes."""
    more_BF = np.diff(row_BF, axis=0, prepend=np.zeros_like(row_BF[:1]))
    found = dense.compress(np.ascontiguousarray(((more_BF << 1) ^ (more_BF >> 31)).T).view(np.uint32).reshape(-1))
    if found is None or len(row_BF) > _MOST_ROWS:
        return torch.from_numpy(row_BF), None
    return found[1], found[0]


def read_rows(payload: Payload, key: str, count: int, fields: int, planes: object) -> np.ndarray:
    """Return a table of blocks, int32[count, fields], from its entry and the sizes of its planes, None for no planes.

    Raises:
        CorruptDataError: the entry has another shape or dtype, or a row has a negative number of changes or words.
    """
    entry = payload.arrays.get(key)
    if planes is not None and count <= _MOST_ROWS:
        number_N = dense.decompress(entry, planes, TensorSpec(key, "int32", (fields, count)))
        more_FB = ((number_N >> 1) ^ (0 - (number_N & 1))).view(np.int32).reshape(fields, count)
        row_BF = np.cumsum(more_FB, axis=1, dtype=np.int32).T
    elif entry is not None and entry.dtype == torch.int32 and entry.shape == (count, fields):
        row_BF = entry.numpy()
    else:
        raise CorruptDataError(f"Payload has no table of blocks {key!r}, int32[{count}, {fields}].")
    if (row_BF[:, :2] < 0).any():
        raise CorruptDataError("Payload has a block with a negative number of changes or words.")
    return row_BF


def _object(payload: Payload, key: str) -> dict[str, Any]:
    try:
        found = json.loads(payload.metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptDataError(f"Payload has no table of {key}.")
    return found


def block_elements(payload: Payload) -> int:
    """Return the size of a block.

    Raises:
        CorruptDataError: there is none, or one that no block has.
    """
    declared = payload.metadata.get("block_elements", "")
    if not re.fullmatch("[0-9]{1,10}", declared) or not 1 <= int(declared) <= 1 << 30:
        raise CorruptDataError(f"Payload has blocks of {declared!r} elements instead of 1 to 2**30.")
    return int(declared)


def _rows(payload: Payload, layout: Layout, block: int) -> list[tuple[int, dict[str, int]]]:
    """Return the widths that a payload changes and the numbers about each of them."""
    found = []
    for width, row in _object(payload, "vectors").items():
        if width not in map(str, layout.vectors) or not isinstance(row, dict):
            raise CorruptDataError(f"Payload has elements of {width!r:.40} bytes, which the channel does not have.")
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
        self._row_B2 = read_rows(payload, f".{vector.width}.blocks", row["blocks"], 2, row.get("planes"))
        self._bound_B = _bounds(self._row_B2[:, 0])
        self._word_B = _bounds(self._row_B2[:, 1])
        blocks = self._blocks()
        if (self._row_B2[:, 0] > blocks.end_B - blocks.base_B).any():
            raise CorruptDataError("Payload has a block with more changes than elements.")
        self._words = self._take("words", "int32", int(self._word_B[-1]))

    @property
    def changed(self) -> int:
        """Number of changes in its blocks."""
        return int(self._bound_B[-1])

    def _take(self, entry: str, dtype: str, size: int) -> np.ndarray:
        return take(self._payload, f".{self._vector.width}.{entry}", dtype, size)

    def _blocks(self) -> Blocks:
        return Blocks.of(self._vector.element_count, self._block, self._bound_B, self._first)

    def changed_tensors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the numbers of the changed tensors, how many elements change, and their fingerprints then, uint64."""
        number_T, index = self._numbers(), self._vector.index_dtype
        count_T = self._take("counts", index.name, number_T.size).view(index)
        return number_T, count_T.astype(np.int64), self._take("fingerprints", "int64", number_T.size)

    def _numbers(self) -> np.ndarray:
        count = self._row["tensors"]
        if f".{self._vector.width}.tensors" not in self._payload.arrays:
            return np.arange(count) + self._row["tensor"]
        flags = np.unpackbits(self._take("tensors", "uint8", -(-count // 8)), bitorder="little")
        if flags[count:].any():
            raise CorruptDataError("Payload names tensors that the channel does not have.")
        return np.flatnonzero(flags) + self._row["tensor"]

    def decode(self, span_R2: np.ndarray | None) -> Sparse:
        """Decode the blocks that overlap any of these spans of positions; all for None."""
        blocks, vector = self._blocks(), self._vector
        keep_B = np.ones(len(self._row_B2), np.bool_)
        if span_R2 is not None:
            first_R = np.clip(span_R2[:, 0] // self._block - self._first, 0, keep_B.size)
            last_R = np.clip(-(-span_R2[:, 1] // self._block) - self._first, first_R, keep_B.size)
            edges = np.zeros(keep_B.size + 1, np.int64)
            np.add.at(edges, first_R, 1)
            np.add.at(edges, last_R, -1)
            keep_B = np.cumsum(edges[:-1]) > 0
        groups = self._groups()
        cursor = Cursor(self._take_tables())
        pieces: list[Sparse] = []
        for low, high in itertools.pairwise([*groups, keep_B.size]):
            freq_TS = np.stack([cursor.table(), cursor.table()])
            at_B = np.flatnonzero(keep_B[low:high]) + low
            if not at_B.size or not self._row_B2[at_B, 0].any():
                continue
            pieces.append(self._decode(blocks, at_B, Tables.of(freq_TS)))
        if cursor.at != len(cursor.data):
            raise CorruptDataError("Payload has more tables than groups.")
        if not pieces:
            return Sparse(np.empty(0, vector.index_dtype), np.empty(0, vector.bits_dtype))
        return pieces[0] if len(pieces) == 1 else Sparse(*(np.concatenate(each) for each in zip(*pieces, strict=True)))

    def _decode(self, blocks: Blocks, at_B: np.ndarray, tables_: Tables) -> Sparse:
        row_B2, words, vector = self._row_B2[at_B], self._words, self._vector
        word_B = self._word_B[at_B[0] :][: at_B.size + 1]
        if at_B.size != at_B[-1] + 1 - at_B[0]:
            words = np.concatenate([words[self._word_B[b] : self._word_B[b + 1]] for b in at_B])
            word_B = _bounds(row_B2[:, 1])
        part = Blocks(blocks.base_B[at_B], blocks.end_B[at_B], _bounds(row_B2[:, 0]))
        at_K, step_K = np.empty(part.bound_B[-1], vector.index_dtype), np.empty(part.bound_B[-1], vector.bits_dtype)
        if not coder.decode(part, words, word_B, tables_, None, at_K, step_K):
            raise CorruptDataError(f"Payload has a malformed block of elements of {vector.width} bytes.")
        return Sparse(at_K, step_K)

    def _groups(self) -> list[int]:
        match self._row.get("groups"):
            case [] if not len(self._row_B2):
                return []
            case [0, *_] as groups if all(type(block) is int for block in groups):
                if all(one < other for one, other in itertools.pairwise([*groups, len(self._row_B2)])):
                    return groups
        raise CorruptDataError("Payload has groups that are not ascending blocks.")

    def _take_tables(self) -> bytes:
        entry = self._payload.arrays.get(f".{self._vector.width}.tables")
        if entry is None or entry.dtype != torch.uint8:
            raise CorruptDataError("Payload has no uint8 tables.")
        return entry.numpy().tobytes()


def _bounds(count_B: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(count_B, dtype=np.int64)))
