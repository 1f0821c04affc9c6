"""`packed` and `context` on a device: payloads of a delta in its memory, byte for byte as `vector` writes
them.

All payloads of a version are encoded, and decoded, by the same few launches, whatever the number of tensors.
To the host cross words, tables and counts. Needs triton.

Shapes: T tensors of one width, P payloads, K changed elements, B blocks, G bands of blocks, S streams, R runs
of streams.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from deltasync import codec
from deltasync.codec import classes, tables, tiles, vector
from deltasync.codec.base import Encoded, Payload
from deltasync.codec.parts import GAPS, TILES, Coded, Part, coded
from deltasync.codec.reader import Reader, readers_of
from deltasync.codec.tiles import Tiling
from deltasync.errors import CorruptDataError, StageError
from deltasync.gpu import classes as gpu_classes
from deltasync.gpu import coder as gpu_coder
from deltasync.gpu.classes import BlockBits, Changes
from deltasync.gpu.coder import Streams
from deltasync.gpu.delta import DeviceBits, DeviceDelta, DeviceSparse
from deltasync.gpu.held import HeldTiles
from deltasync.kernels import native
from deltasync.kernels.native import COLUMNS, ROWS
from deltasync.kernels.rans import RATIO, RATIO_BITS, Classes
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec, Vector, bounds
from deltasync.tensors.bits import SIGNED, UNSIGNED
from deltasync.tensors.delta import Piece

if TYPE_CHECKING:
    from deltasync.kernels.backend import Backend

MOST_CHANGED = 1 << 25
"""Changes of payloads that are encoded at once, by classes with 7 bytes for each."""

_BLOCK_BYTES = 256  # of tables, for each block
_BAND_BYTES = 1024  # of finding the changes of each band
_TABLE_BYTES = 6 << 10  # of a table and what encoding looks up of it

Send = Callable[[Iterable[tuple[np.ndarray, torch.Tensor]]], None]
"""See `Backend.send`."""


@dataclasses.dataclass(frozen=True, eq=False)
class BitAddresses:
    """Where the bits of a vector's tensors lie on a device.

    Attributes:
        address_T: Address of each tensor's first element, or the one that it would have; int64[T].
        range_T2: The first element of each tensor that is held, and the one behind the last.
    """

    address_T: np.ndarray
    range_T2: np.ndarray

    @classmethod
    def of(cls, vector_: Vector, bits: DeviceBits) -> BitAddresses:
        """Return where the bits of a shadow are."""
        position_T, count_T, place_T = bits.run_T3.T
        start_T = np.where(count_T > 0, position_T - vector_.first_T[:-1], 0)
        address_T = bits.bits_N.data_ptr() + (place_T - start_T) * vector_.width
        return cls(address_T, np.stack((start_T, start_T + count_T), axis=1))

    @property
    def are_whole(self) -> bool:
        """See `HeldTiles.are_whole`. Readers get all that payloads have."""
        return True

    def tables(self, tiling: Tiling, is_in_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `HeldTiles.tables`: all blocks are held."""
        row_BF, band_GF = tiling.chosen(is_in_T, self.address_T)
        return row_BF, band_GF, np.ones(len(row_BF), np.bool_)


Places = BitAddresses | HeldTiles


class HeldBlocks(NamedTuple):
    """The blocks of a version that are decoded.

    Attributes:
        row_BF, band_GF, keep_B: See `HeldTiles.tables`.
        tiling: The tiling of which they are.
        count_T: Number of their changes of each tensor.
    """

    row_BF: np.ndarray
    band_GF: np.ndarray
    keep_B: np.ndarray
    tiling: Tiling
    count_T: np.ndarray


class DeviceCodec:
    """The codecs `packed` and `context` of a model on its device.

    Args:
        layout: The model.
        device: The device.
        send: Copies arrays to the device, on the current stream, each to a tensor of as many elements.
        check_room: Called before so many bytes are allocated; raises StageError if there are too few.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        send: Send,
        check_room: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._layout, self._device, self._send, self._check_room = layout, device, send, check_room
        self._rooms: dict[str, torch.Tensor] = {}  # pinned memory of the host that stays

    def encode(
        self,
        codec_name: str,
        delta: DeviceDelta,
        digests: Mapping[int, np.ndarray],
        version: int,
        base_version: int,
        pieces: Sequence[Piece],
    ) -> Iterator[Encoded]:
        """Yield the payloads of a delta. The arrays of one last until the next one's are wanted, or another
        delta's.

        Args:
            codec_name: `packed` or `context`.
            delta: The steps from the base version on, which `bits` have taken.
            digests: Fingerprints after the delta by width, uint64[T].
            version: The version that it leads to.
            base_version: The one that it leads from.
            pieces: All payloads, as `DeviceDelta.split` returns them.

        Raises:
            StageError: the device has too little memory; nothing is held there.
        """
        some, changed = list[Piece](), 0
        for piece in pieces:
            some.append(piece)
            changed += _changed(delta, piece)
            if changed >= MOST_CHANGED or piece is pieces[-1]:
                yield from self._encode(codec_name, delta, digests, (version, base_version), some)
                some, changed = [], 0

    def _encode(
        self,
        codec_name: str,
        delta: DeviceDelta,
        digests: Mapping[int, np.ndarray],
        versions: tuple[int, int],
        pieces: Sequence[Piece],
    ) -> Iterator[Encoded]:
        found: list[Coded] = [({}, {}) for _ in pieces]
        for width, steps in delta.steps.items():
            in_P = [p for p, piece in enumerate(pieces) if width in piece]
            if not in_P:
                continue
            of = self._layout.vectors[width]
            tensor_P2 = np.array([pieces[p][width] for p in in_P], np.int64)
            range_T2 = np.zeros((len(of.specs), 2), np.int64)
            by_class: Sequence[Coded | None] = [None] * len(in_P)
            if codec_name == "context":
                places = BitAddresses.of(of, delta.bits[width])
                tiling = tiles.tiling(of, places.range_T2)
                inside_T = np.zeros(len(of.specs), np.bool_)
                inside_T[tensor_P2[0, 0] : tensor_P2[-1, 1]] = True
                is_tiled_T = inside_T & tiling.worth_T(steps.count_T)
                range_T2[is_tiled_T] = tiling.range_T2[is_tiled_T]
                if is_tiled_T.any():
                    table = tiling.chosen(is_tiled_T, places.address_T)
                    self._check_room(_BAND_BYTES * len(table[1]))
                    block_P2 = bounds(np.where(is_tiled_T, tiling.count_T, 0))[tensor_P2]
                    by_class = self._tiles(
                        of, _changes(of, steps, delta.bits[width], tiling, table[1]), *table, block_P2
                    )
            by_gap = self._gaps(of, steps, range_T2[:, 0] == range_T2[:, 1], tensor_P2)
            for p, (first, last), gaps, in_tiles in zip(
                in_P, tensor_P2.tolist(), by_gap, by_class, strict=True
            ):
                changed_T = np.flatnonzero(steps.count_T[first:last]) + first
                digest_T = digests[width][changed_T]
                entries, row = vector.entries(
                    of, steps.count_T, changed_T, digest_T, gaps, in_tiles, range_T2
                )
                found[p][0].update(entries)
                found[p][1][str(width)] = row
        for piece, (arrays, vectors) in zip(pieces, found, strict=True):
            yield vector.payload_of(codec_name, *versions, _changed(delta, piece), arrays, vectors)

    def _fetch(self, what: str, found: torch.Tensor) -> torch.Tensor:
        """Copy words to the host. They are lost with those of the next version."""
        if found.device.type == "cpu":
            return found
        room = self._rooms.get(what)
        if room is None or room.numel() < found.nbytes:
            self._rooms.pop(what, None)
            room = torch.empty(
                1 << (found.nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True, device="cpu"
            )
            self._rooms[what] = room
        to = room[: found.nbytes].view(found.dtype).view(found.shape)
        to.copy_(found, non_blocking=True)
        torch.cuda.current_stream(found.device).synchronize()
        return to

    def _gaps(
        self, of: Vector, steps: DeviceSparse, is_in_T: np.ndarray, tensor_P2: np.ndarray
    ) -> list[Coded]:
        """Return entries and metadata of each payload's tensors that are coded by gaps; `vector._by_gap`."""
        device, changed_T = steps.low_K.device, np.where(is_in_T, steps.count_T, 0)
        bound_T, all_T = bounds(changed_T), bounds(steps.count_T)
        low_P, high_P = bound_T[tensor_P2[:, 0]], bound_T[tensor_P2[:, 1]]
        held_P = np.flatnonzero(low_P < high_P)
        found: list[Coded] = [({}, {}) for _ in tensor_P2]
        if not held_P.size:
            return found
        low_P, high_P, start = low_P[held_P], high_P[held_P], int(low_P[held_P[0]])
        # The first and the last change of each payload, and then how many there are before each of its
        # blocks.
        edge_P2 = np.stack((low_P, high_P - 1), axis=1)
        tensor = np.searchsorted(bound_T, edge_P2, side="right") - 1
        number_P2 = torch.from_numpy(edge_P2 - bound_T[tensor] + all_T[tensor]).to(device)
        at_P2 = steps.positions_of(number_P2).cpu().numpy()
        block_P2 = at_P2 // tiles.BLOCK + [0, 1]
        count_P = block_P2[:, 1] - block_P2[:, 0]
        edge_P = bounds(count_P + 1)
        edge_E = np.arange(edge_P[-1]) - np.repeat(edge_P[:-1] - block_P2[:, 0], count_P + 1)
        edge_E = np.minimum(edge_E * tiles.BLOCK, of.element_count)
        below_E = steps.count_below(torch.from_numpy(edge_E).to(device)).cpu().numpy()
        tensor_E = np.searchsorted(of.first_T, edge_E, side="right") - 1
        tensor_E = np.minimum(tensor_E, len(of.specs) - 1)
        inside_E = np.where(is_in_T[tensor_E], below_E - all_T[tensor_E], 0)
        bound_E = np.clip(
            bound_T[tensor_E] + inside_E, np.repeat(low_P, count_P + 1), np.repeat(high_P, count_P + 1)
        )
        is_last_E = np.zeros(bound_E.size, np.bool_)
        is_last_E[edge_P[1:] - 1] = True
        bound_S, end_S, base_S = bound_E[~is_last_E], bound_E[1:][~is_last_E[:-1]], edge_E[~is_last_E]
        within_S = bound_S - np.repeat(low_P, count_P)
        run_S = within_S // vector.GROUP_CHANGED
        stream_P = bounds(count_P)
        begins_S = np.append(True, run_S[1:] != run_S[:-1])
        begins_S[stream_P[:-1]] = True
        run_S = np.cumsum(begins_S) - 1
        first_R = np.flatnonzero(begins_S)
        # numbers of changes, twice while they are made, or with the changes
        changed, of_change = int(high_P[-1]) - start, max(16, 12 + of.width)
        self._check_room(changed * of_change + bound_S.size * _BLOCK_BYTES + 2 * first_R.size * _TABLE_BYTES)
        selected = _selected(steps, is_in_T, start, int(high_P[-1]), bound_T, all_T)
        bound = torch.from_numpy(np.append(bound_S, end_S[-1:]) - start).to(device)
        base = torch.from_numpy(base_S).to(device)
        run = torch.from_numpy(run_S.astype(np.int32)).to(device)
        count_RTS = gpu_coder.count(Streams(bound, base, run, *selected), first_R.size)
        piece = np.append(run_S[stream_P[:-1]], first_R.size).astype(np.int32)
        group_R = gpu_coder.join(count_RTS, torch.from_numpy(piece).to(device))
        fitted = gpu_coder.fit(count_RTS)
        table = (2 * group_R)[run.to(torch.int64)].to(torch.int32)
        words, word_S = gpu_coder.encode(
            Streams(bound, base, table, *selected), fitted, check_room=self._check_room
        )
        is_group_R = group_R.cpu().numpy() == np.arange(first_R.size)
        freq_RTS = fitted.freq_TS.cpu().numpy().reshape(-1, 2, 256)[is_group_R]
        table_N, end_T = tables.all_bytes(freq_RTS.reshape(-1, 256))
        end_G, group_first = np.append(0, end_T[1::2]), first_R[is_group_R]
        words_, word_bound = self._fetch(f"{of.width} gaps", words), bounds(word_S)
        row_S2 = np.stack((end_S - bound_S, word_S), axis=1).astype(np.int32)
        for p, (low, high), block in zip(
            held_P.tolist(), itertools.pairwise(stream_P.tolist()), block_P2, strict=True
        ):
            group, group_end = (int(np.searchsorted(group_first, edge)) for edge in (low, high))
            table_bytes = table_N[end_G[group] : end_G[group_end]].tobytes()
            firsts = (group_first[group:group_end] - low).tolist()
            entries, row = coded(
                GAPS, row_S2[low:high], firsts, table_bytes, words_[word_bound[low] : word_bound[high]]
            )
            found[p] = entries, {"block": int(block[0]), "blocks": high - low} | row
        return found

    def _tiles(
        self, of: Vector, changes: Changes, row_BF: np.ndarray, band_GF: np.ndarray, block_P2: np.ndarray
    ) -> list[Coded | None]:
        """Return blocks by class of each payload, from number to number; `vector._by_class`."""
        device = changes.at_K.device
        count_B = changes.tally(len(row_BF)).cpu().numpy().astype(np.int64)
        bound_B = bounds(count_B)
        blocks = BlockBits(row_BF, band_GF, bound_B, of.width, device, changes)
        run_R, run_P = _runs(bound_B, *block_P2.T)
        size_R = np.add.reduceat(row_BF[:, COLUMNS] * row_BF[:, ROWS], run_R[:-1])
        tables_bytes = len(row_BF) * _BLOCK_BYTES
        self._check_room(tables_bytes + size_R.size * 4 * 256 * (1 + 32 * of.width))
        group_run_G, groups = _groups(
            blocks.survey(run_R, np.clip(size_R // vector.SAMPLED, 1, 64) | 1),
            run_P,
            size_R,
            self._check_room,
        )
        first_G = run_R[group_run_G]
        group_B = np.searchsorted(first_G, np.arange(len(row_BF)), side="right") - 1
        blocks.divide(group_B, groups)
        gap_bits = _gap_bits(row_BF, group_B, groups)
        ranked = int(bound_B[-1]) * ((8 if gap_bits > 32 else 4) + 1 + of.width)
        tables_bytes += 2 * int(groups.bound_G[-1]) * _TABLE_BYTES
        self._check_room(ranked + blocks.room_bytes + tables_bytes)
        gap_K, class_K, step_K, begin_B = gpu_classes.rank(blocks, gap_bits)
        table_B = torch.from_numpy((2 * groups.bound_G[group_B]).astype(np.int32)).to(device)
        streams = Streams(blocks.bound, table_B, table_B, gap_K, step_K, class_K, begin_B)
        fitted = gpu_coder.fit(gpu_coder.count_classes(streams, 2 * int(groups.bound_G[-1])))
        words, word_B = gpu_coder.encode(streams, fitted, gap_bits, self._check_room)
        table_G = classes.to_bytes(groups, fitted.freq_TS.cpu().numpy())
        words_, word_bound = self._fetch(f"{of.width} classes", words), bounds(word_B)
        row_B2 = np.stack((count_B, word_B), axis=1).astype(np.int32)
        found: list[Coded | None] = []
        for low, high in block_P2.tolist():
            if low == high:
                found.append(None)
                continue
            here = slice(*np.searchsorted(first_G, (low, high)).tolist())
            held = words_[word_bound[low] : word_bound[high]]
            found.append(
                coded(TILES, row_B2[low:high], (first_G[here] - low).tolist(), b"".join(table_G[here]), held)
            )
        return found

    def changed(self, opened: Iterable[Payload], places: Mapping[int, Places]) -> Changed:
        """As `decode`, with the fingerprints of all changed tensors by name, as `payloads.decode` has them.

        Raises:
            StageError: as `decode`; or payloads change one tensor together, as those of a sharded trainer do.
        """
        parts = self._readers(opened)
        for readers in parts.values():
            number_T = np.concatenate([reader.number_T for reader in readers])
            if np.unique(number_T).size < number_T.size:
                raise StageError("several ranks of its trainer have written parts of one tensor.")
        named = {
            reader.vector.names[t]: digest
            for reader in itertools.chain(*parts.values())
            for t, digest in zip(reader.number_T.tolist(), _digests([reader]).tolist(), strict=True)
        }
        return Changed(self._delta(parts, places, None), named)

    def decode(
        self, opened: Sequence[Payload], places: Mapping[int, Places], undone: DeviceDelta | None = None
    ) -> tuple[DeviceDelta, dict[int, np.ndarray]]:
        """Return the changes of payloads; and by width the fingerprints of changed tensors after them, uint64.

        Args:
            opened: The payloads, of `packed` or `context`, of one version; none changes a tensor of another
                one.
            places: Where bits are, by width. Only `context` needs them. Of tensors of which a part is held, only
                what is coded by classes is left out elsewhere.
            undone: The same changes, which the bits have taken; None if they are old.

        Beside the result it takes one byte for each change if some are coded by classes, 16 KiB for each table,
        and `Batch.room_bytes` of the batch that takes most.

        Raises:
            CorruptDataError: a payload contradicts itself or the tensor table.
            StageError: the device has too little memory; nothing is held there.
        """
        parts = self._readers(opened)
        digests = {width: _digests(readers) for width, readers in parts.items()}
        return self._delta(parts, places, undone), digests

    def _readers(self, opened: Iterable[Payload]) -> dict[int, list[Reader]]:
        """Return what payloads have of each vector, by width, ascending by tensor."""
        parts: dict[int, list[Reader]] = {}
        for payload in opened:
            for width, reader in readers_of(payload, self._layout).items():
                parts.setdefault(width, []).append(reader)
        for readers in parts.values():
            readers.sort(key=lambda reader: int(reader.number_T[0]) if reader.number_T.size else 0)
        return dict(sorted(parts.items()))

    def _delta(
        self,
        parts: Mapping[int, Sequence[Reader]],
        places: Mapping[int, Places],
        undone: DeviceDelta | None,
    ) -> DeviceDelta:
        steps = {
            width: self._decode(width, readers, places.get(width), undone) for width, readers in parts.items()
        }
        return DeviceDelta(self._layout, steps, is_spare=True)

    def _decode(
        self, width: int, readers: Sequence[Reader], places: Places | None, undone: DeviceDelta | None
    ) -> DeviceSparse:
        of = self._layout.vectors[width]
        number_T = np.concatenate([reader.number_T for reader in readers])
        count_T = np.concatenate([reader.count_T for reader in readers])
        if (np.diff(number_T) <= 0).any() or (count_T <= 0).any():
            raise CorruptDataError("Payloads change a tensor twice, or name one that does not change.")
        all_T, is_tiled_T = np.zeros(len(of.specs), np.int64), np.zeros(len(of.specs), np.bool_)
        all_T[number_T] = count_T
        is_tiled_T[np.concatenate([reader.tiled_T for reader in readers])] = True
        in_gaps_T = np.where(is_tiled_T, 0, all_T)
        by_gap = [reader for reader in readers if reader.gaps is not None]
        by_class = [reader for reader in readers if reader.tiles is not None]
        changed = int(all_T.sum())
        if changed != sum(reader.changed for reader in readers):
            raise CorruptDataError("Payload counts the changes of its tensors wrong.")
        held = self._held(of, by_class, is_tiled_T, places) if by_class else None
        in_tiles_T = np.zeros_like(all_T) if held is None else held.count_T
        all_T = in_gaps_T + in_tiles_T
        changed = int(all_T.sum())
        self._check_room(changed * (4 + width + bool(by_class)))
        at_K = torch.empty(changed, dtype=torch.int32, device=self._device)
        step_K = torch.empty(changed, dtype=UNSIGNED[width], device=self._device)
        if by_gap:
            self._read_gaps(of, by_gap, in_gaps_T, np.cumsum(in_tiles_T), at_K, step_K)
        if held is not None and held.keep_B.any():
            before_T = np.repeat(np.cumsum(in_gaps_T), np.where(is_tiled_T, held.tiling.count_T, 0))
            self._read_tiles(of, by_class, held, before_T[held.keep_B], undone, at_K, step_K)
        if places is None or places.are_whole:
            return DeviceSparse(at_K, step_K, None, None, all_T)
        changed_T = np.flatnonzero(all_T)
        base_B, bound_B = self._there(of.first_T[changed_T]), self._there(bounds(all_T[changed_T]))
        return DeviceSparse(at_K, step_K, base_B, bound_B, all_T, int(all_T.max()))

    def _held(
        self, of: Vector, readers: Sequence[Reader], is_in_T: np.ndarray, places: Places | None
    ) -> HeldBlocks:
        """Return the blocks by class that are decoded."""
        if places is None:
            raise StageError(
                "This delta is coded by `context` and needs the old weights; decode it with `old`."
            )
        # The blocks of what is held, which are kept, if that is what payloads have blocks of; or those that
        # they say.
        tiling, known = tiles.tiling(of, places.range_T2), (tiles.TILE, tiles.BLOCK)
        if any(
            each.sizes != known or (each.range_T2 != tiling.range_T2[each.tiled_T]).any() for each in readers
        ):
            tiling = Tiling.of(of, {t: cut for each in readers for t, cut in each.cuts.items()})
        row_BF, band_GF, keep_B = places.tables(tiling, is_in_T)
        count_B = np.concatenate([each.tiles.row_B2[:, 0] for each in readers if each.tiles is not None])
        before_B = bounds(np.where(keep_B, count_B, 0))
        count_T = np.diff(before_B[bounds(np.where(is_in_T, tiling.count_T, 0))])
        return HeldBlocks(row_BF, band_GF, keep_B, tiling, count_T)

    def _streams(
        self, parts: Sequence[Part], freq_TS: np.ndarray, keep_B: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return changes before each block of several payloads, and each one's group, on the host.

        Then, on the device, the words, those before each block, and what is looked up of the tables. They and the
        tables of blocks fit. `keep_B` says which blocks are meant, by default all.
        """
        before = bounds([len(part.groups) for part in parts])
        group_B = np.concatenate(
            [first + part.group_B for first, part in zip(before[:-1], parts, strict=True)]
        )
        row_B2 = np.concatenate([part.row_B2 for part in parts])
        words_of = [part.words for part in parts]
        if keep_B is not None and not keep_B.all():
            words_of = [*_kept(words_of, row_B2[:, 1], keep_B)]
            group_B, row_B2 = group_B[keep_B], row_B2[keep_B]
        sizes = [each.size for each in words_of]
        self._check_room(4 * sum(sizes) + len(freq_TS) * gpu_coder.SLOT_BYTES + len(row_B2) * _BLOCK_BYTES)
        words = torch.empty(max(sum(sizes), 1), dtype=torch.int32, device=self._device)
        self._send(zip(words_of, torch.split(words[: sum(sizes)], sizes), strict=True))
        slots = gpu_coder.slots(self._there(freq_TS.astype(np.int16)))
        return bounds(row_B2[:, 0]), group_B, words, self._there(bounds(row_B2[:, 1])), slots

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _read_gaps(
        self,
        of: Vector,
        readers: Sequence[Reader],
        count_T: np.ndarray,
        before_T: np.ndarray,
        at_K: torch.Tensor,
        step_K: torch.Tensor,
    ) -> None:
        """Decode the tensors that are coded by gaps, ascending by position.

        Args:
            of: The vector.
            readers: Those of the payloads that have such blocks.
            count_T: Changes of each tensor that are coded so.
            before_T: Changes before its end that are not.
            at_K: Gets the low halves of positions.
            step_K: Gets steps.
        """
        parts = [reader.gaps for reader in readers if reader.gaps is not None]
        freq_TS = np.concatenate([tables.read(part.tables, 2 * len(part.groups)) for part in parts])
        bound_S, group_S, words, word_S, slots = self._streams(parts, freq_TS)
        end_T = np.cumsum(count_T)
        held_T = np.append(np.flatnonzero(count_T), count_T.size - 1)
        end_R, shift_R = end_T[held_T], before_T[held_T]
        is_last_R = np.append(shift_R[1:] != shift_R[:-1], True)
        end_R, shift_R = end_R[is_last_R], shift_R[is_last_R]
        run_S = np.minimum(np.searchsorted(end_R, bound_S[:-1], side="right"), end_R.size - 1)
        runs = gpu_coder.Runs(*map(self._there, (run_S.astype(np.int32), end_R, shift_R)))
        base = self._there(np.concatenate([reader.blocks.base_B for reader in readers]))
        size = self._there(np.concatenate([reader.blocks.size_BC[:, 0] for reader in readers]))
        table = self._there((2 * group_S).astype(np.int32))
        good_S = gpu_coder.decode(
            self._there(bound_S), base, size, table, words, word_S, slots, runs, at_K, step_K
        )
        if not bool(good_S.all()):
            raise CorruptDataError(f"Payload has a malformed block of elements of {of.width} bytes.")

    def _read_tiles(
        self,
        of: Vector,
        readers: Sequence[Reader],
        held: HeldBlocks,
        moved_B: np.ndarray,
        undone: DeviceDelta | None,
        at_K: torch.Tensor,
        step_K: torch.Tensor,
    ) -> None:
        """Decode the blocks by class that are held, ascending by position; `moved_B` is as in
        `gpu_classes.decode`.
        """
        row_BF, band_GF = held.row_BF, held.band_GF
        parts = [reader.tiles for reader in readers if reader.tiles is not None]
        lines, freqs = zip(*(classes.read(part.tables, len(part.groups)) for part in parts), strict=True)
        bound_B, group_B, words, word_B, slots = self._streams(parts, np.concatenate(freqs), held.keep_B)
        if (np.diff(bound_B) > row_BF[:, COLUMNS] * row_BF[:, ROWS]).any():
            raise CorruptDataError("Payload has a block with more changes than elements.")
        changes = None
        if undone is not None:
            changes = _changes(of, undone.steps[of.width], undone.bits[of.width], held.tiling, band_GF)
            if (changes.tally(len(row_BF)).cpu().numpy() != np.diff(bound_B)).any():
                raise CorruptDataError("Payload has a block with more or fewer changes than were made.")
        blocks = BlockBits(row_BF, band_GF, bound_B, of.width, self._device, changes)
        blocks.divide(group_B, Classes.of([*itertools.chain(*lines)]))
        self._check_room(blocks.room_bytes)
        if not gpu_classes.decode(blocks, words, word_B, slots, self._there(moved_B), at_K, step_K):
            raise CorruptDataError(f"Payload has a malformed block of elements of {of.width} bytes.")


@functools.cache
def warm_up(device: Backend, width: int) -> None:
    """Compile all that decoding elements of so many bytes launches, once per process: no version waits for it.

    Two small models are decoded, which have a tensor with tiles, and one without; columns of tiles are read by
    units of eight elements, and one by one.
    """
    dtype = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[width]
    for columns in (256, 260):
        specs = {
            name: TensorSpec(name, dtype, shape) for name, shape in (("a", (256, columns)), ("b", (64,)))
        }
        layout = Layout(specs)
        of = layout.vectors[width]
        at_K = np.arange(0, of.element_count, 8, dtype=of.index_dtype)
        new_N = np.zeros(of.element_count, f"u{width}")
        new_N[at_K] = 1
        delta = Delta(layout, {width: Sparse(at_K, new_N[at_K])})
        new = {"a": new_N[:-64], "b": new_N[-64:]}
        written = codec.get("context").encode(
            delta, functools.partial(_range, new), dict.fromkeys(specs, 0), 1, 0
        )
        with device.staging():
            bits_N = torch.zeros(of.element_count, dtype=SIGNED[width], device=device.device)
            address_T = bits_N.data_ptr() + of.first_T[:-1] * width
            places = {width: BitAddresses(address_T, tiles.whole(of))}
            found, _ = DeviceCodec(layout, device.device, device.send).decode(
                [codec.open_payload(written.to_bytes())], places
            )
        assert found.steps[width].low_K.numel() == at_K.size


def _digests(readers: Sequence[Reader]) -> np.ndarray:
    """Return the fingerprints of changed tensors, uint64."""
    return np.concatenate([reader.digest_T for reader in readers]).view(np.uint64)


def _kept(words_of: Sequence[np.ndarray], count_B: np.ndarray, keep_B: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the words of the blocks that are kept, of each payload.

    Args:
        words_of: Those of all its blocks.
        count_B: Words of each block of all payloads.
        keep_B: Which blocks are kept.
    """
    word_B = bounds(count_B)
    # where runs of blocks begin and end
    edge_E = np.flatnonzero(np.diff(keep_B, prepend=False, append=False))
    run_R2, first = word_B[edge_E].reshape(-1, 2), 0
    for words in words_of:
        span_R2 = np.clip(run_R2 - first, 0, words.size)
        spans = [words[low:high] for low, high in span_R2[span_R2[:, 0] < span_R2[:, 1]].tolist()]
        yield np.concatenate([words[:0], *spans])
        first += words.size


def _range(bits: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, int]:
    """Return the bits of a tensor, and the number of the first one."""
    return bits[name], 0


def _changes(
    of: Vector, steps: DeviceSparse, bits: DeviceBits, tiling: Tiling, band_GF: np.ndarray
) -> Changes:
    """Return the changes of bands of blocks, in a delta and among those of all bands."""
    tensor_G = np.searchsorted(of.first_T, band_GF[:, 0], side="right") - 1
    end_G = np.append(band_GF[1:, 0], 0)
    is_last_G = np.append(tensor_G[1:] != tensor_G[:-1], True)
    end_G[is_last_G] = of.first_T[tensor_G[is_last_G]] + tiling.range_T2[tensor_G[is_last_G], 1]
    device = steps.low_K.device
    edge = torch.from_numpy(np.concatenate((band_GF[:, 0], end_G))).to(device)
    begin, end = steps.count_below(edge).reshape(2, -1)
    before, step_K = torch.cumsum(end - begin, 0) - (end - begin), steps.step_K.view(UNSIGNED[of.width])
    return Changes(torch.from_numpy(band_GF).to(device), begin, end, before, steps.low_K, step_K, bits.bits_N)


def _selected(
    steps: DeviceSparse, is_in_T: np.ndarray, start: int, stop: int, bound_T: np.ndarray, all_T: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return low halves of positions and steps of the changes from number `start` on and below `stop` of some
    tensors.
    """
    first = int(np.searchsorted(bound_T, start, side="right")) - 1
    last = int(np.searchsorted(bound_T, stop, side="left"))
    step_K = steps.step_K.view(UNSIGNED[steps.step_K.element_size()])
    shift_T, count_T = (all_T - bound_T)[first:last], np.diff(bound_T)[first:last]
    if (shift_T[count_T > 0] == shift_T[count_T > 0][0]).all():
        shift = int(shift_T[count_T > 0][0])
        return steps.low_K[start + shift : stop + shift], step_K[start + shift : stop + shift]
    device = steps.low_K.device
    moved = torch.from_numpy(np.stack((shift_T, count_T))).to(device)
    number_K = torch.repeat_interleave(*moved, output_size=stop - start)
    number_K += torch.arange(start, stop, device=device)
    return steps.low_K[number_K], steps.step_K[number_K].view(step_K.dtype)


def _runs(bound_B: np.ndarray, first_P: np.ndarray, last_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first block of each run, and the number of blocks; the first run of each payload, and their
    number.
    """
    firsts, run_P = [], [0]
    for low, high in zip(first_P.tolist(), last_P.tolist(), strict=True):
        if low < high:
            changed = bound_B[low : high + 1] - bound_B[low]
            firsts.append(low + vector.runs(changed, int(changed[-1]) // vector.MOST_RUNS))
        run_P.append(run_P[-1] + (firsts[-1].size if low < high else 0))
    return np.append(np.concatenate(firsts), last_P[-1]), np.array(run_P)


def _groups(
    survey: tuple[torch.Tensor, torch.Tensor],
    run_P: np.ndarray,
    size_R: np.ndarray,
    check_room: Callable[[int], None],
) -> tuple[np.ndarray, Classes]:
    """Return the first run of each group, and its classes."""
    element, step = survey
    used_E, used_S = (torch.nonzero(step.sum(dim=dims)).reshape(-1) for dims in ((0, 2), (0, 1)))
    check_room(step.nbytes // 256 * used_E.numel() * 2)
    step_RVS = step[:, used_E][:, :, used_S].cpu().numpy().view(np.uint32)
    element_RE = element.cpu().numpy()
    element_RE = element_RE * (size_R / np.maximum(element_RE.sum(axis=1), 1))[:, None]
    return native.groups(run_P, element_RE, used_E.cpu().numpy(), step_RVS, classes.COSTS)


def _gap_bits(row_BF: np.ndarray, group_B: np.ndarray, groups: Classes) -> int:
    """Return the bits that no gap of these blocks exceeds."""
    span_G = groups.level_L[groups.bound_G[:-1]] - groups.level_L[groups.bound_G[1:] - 1]
    most = int((row_BF[:, COLUMNS] * row_BF[:, ROWS] * (RATIO[span_G[group_B]] >> RATIO_BITS) + 1).max())
    return (2 * most).bit_length()


def _changed(delta: DeviceDelta, piece: Piece) -> int:
    return sum(int(delta.steps[width].count_T[first:last].sum()) for width, (first, last) in piece.items())
