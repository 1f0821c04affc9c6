"""`packed` and `context` on a device: payloads of a delta in its memory, byte for byte as `vector` and `tiled` write them.

All payloads of a version are encoded, and decoded, by the same few launches, whatever the number of tensors. To the host
cross words, tables and counts. Needs triton.

Shapes: T tensors of one width, P payloads, K changed elements, B blocks, G bands of blocks, S streams, R runs of streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from deltasync.codec import classes, tables, tiled, tiles, vector
from deltasync.codec.base import Encoded, Payload
from deltasync.codec.classes import Model
from deltasync.codec.tiled import TiledReader, read_groups, read_tables
from deltasync.codec.vector import Coded
from deltasync.errors import CorruptDataError, StageError
from deltasync.kernels import gpu_classes, gpu_coder
from deltasync.kernels.gpu_classes import ADDRESS, COLUMNS, FIRST, PITCH, ROWS, SHIFT, STRIDE, Bands, Bits, Changes, Classes
from deltasync.kernels.gpu_coder import Numbers, Streams
from deltasync.kernels.rans import RATIO, RATIO_BITS
from deltasync.tensors import Layout, Vector
from deltasync.tensors.bits import SIGNED, UNSIGNED
from deltasync.tensors.device import DeviceBits, DeviceDelta, DeviceSparse

MOST_CHANGED = 1 << 25
"""Changes of payloads that are encoded at once, by classes with 7 bytes for each."""

Send = Callable[[Iterable[tuple[np.ndarray, torch.Tensor]]], None]
"""See `live.devices.Device.send`."""

Piece = Mapping[int, tuple[int, int]]
"""The tensors of each width that a payload has, from number to number."""


class Rooms:
    """Memory of the host that stays: pinned, for words that cross. Contents are lost with the next version."""

    def __init__(self) -> None:
        self._rooms: dict[str, torch.Tensor] = {}

    def fetch(self, what: str, found: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host."""
        if found.device.type == "cpu":
            return found
        room = self._rooms.get(what)
        if room is None or room.numel() < found.nbytes:
            self._rooms.pop(what, None)
            room = torch.empty(1 << (found.nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
            self._rooms[what] = room
        to = room[: found.nbytes].view(found.dtype).view(found.shape)
        to.copy_(found, non_blocking=True)
        torch.cuda.current_stream(found.device).synchronize()
        return to


@dataclasses.dataclass(frozen=True, eq=False)
class Tiling:
    """The blocks of tensors of a vector, made once for a model.

    Attributes:
        count_T: Number of blocks of each tensor, 0 of one that has none.
        is_worth_T: Whether enough changes of the tensor are coded by classes.
        row_BF: Tables of the blocks, int64[B, gpu_classes.FIELDS]; `ADDRESS` is the first element's byte from the tensor's
            first one on.
        band_GF: Tables of bands, as in `kernels.native.regroup`; positions count in the vector, blocks in the tensor.
        band_T: Number of bands of each tensor.
        range_T2: The first element of each tensor that is held, and the one behind the last.
    """

    count_T: np.ndarray
    is_worth_T: np.ndarray
    row_BF: np.ndarray
    band_GF: np.ndarray
    band_T: np.ndarray
    range_T2: np.ndarray

    @classmethod
    def of(cls, of: Vector, cut_T: Mapping[int, tiles.Cut], range_T2: np.ndarray) -> Tiling:
        """Return the blocks of tensors that are cut so, by number. `range_T2` is what is held of each."""
        count_T, band_T = np.zeros(len(of.specs), np.int64), np.zeros(len(of.specs), np.int64)
        is_worth_T = np.zeros(len(of.specs), np.bool_)
        blocks, bands = [np.empty((0, 4), np.int64)], [np.empty((0, gpu_classes.BANDS), np.int64)]
        for t, cut in cut_T.items():
            found = cut.tables()
            blocks.append(found[0])
            bands.append(found[1])
            count_T[t], band_T[t] = len(found[0]), len(found[1])
            is_worth_T[t] = tiles.worth(of.specs[t], cut.start, cut.stop, 1 << 62, vector.BLOCK) is not None
        row_B4, band_GF = np.concatenate(blocks), np.concatenate(bands)
        row_BF = np.zeros((len(row_B4), gpu_classes.FIELDS), np.int64)
        first_B = np.repeat(of.first_T[:-1], count_T)
        row_BF[:, ADDRESS] = row_B4[:, 0] * of.width
        row_BF[:, [COLUMNS, STRIDE, ROWS]] = row_B4[:, 1:]
        row_BF[:, FIRST], row_BF[:, PITCH] = row_B4[:, 0] + first_B, row_B4[:, 2]
        field_T2 = np.array([classes.field(spec.dtype) for spec in of.specs], np.int64).reshape(-1, 2)
        row_BF[:, SHIFT : SHIFT + 2] = np.repeat(field_T2, count_T, axis=0)
        band_GF[:, 0] += np.repeat(of.first_T[:-1], band_T)
        return cls(count_T, is_worth_T, row_BF, band_GF, band_T, range_T2)

    def chosen(self, is_in_T: np.ndarray, address_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tables of blocks and of bands of some tensors, in order; new arrays.

        Args:
            is_in_T: The tensors.
            address_T: Address of each tensor's first element.
        """
        count_T = np.where(is_in_T, self.count_T, 0)
        row_BF = self.row_BF[np.repeat(is_in_T, self.count_T)]
        row_BF[:, ADDRESS] += np.repeat(address_T, count_T)
        band_GF = self.band_GF[np.repeat(is_in_T, self.band_T)]
        band_GF[:, 5] += np.repeat(np.cumsum(count_T) - count_T, np.where(is_in_T, self.band_T, 0))
        return row_BF, band_GF


class Tilings:
    """The blocks of all tensors of a model, by width: an encoder's, and those of payloads that it has written."""

    def __init__(self) -> None:
        self._found: dict[int, Tiling] = {}

    def of(self, of: Vector, range_T2: np.ndarray) -> Tiling:
        """Return the blocks of these ranges of a vector's tensors."""
        found = self._found.get(of.width)
        if found is None or not np.array_equal(found.range_T2, range_T2):
            lines = [(t, start, stop) for t, (start, stop) in enumerate(range_T2.tolist()) if start < stop]
            cut_T = {t: tiles.cut(of.specs[t].shape, start, stop, tiles.TILE, vector.BLOCK) for t, start, stop in lines}
            found = self._found[of.width] = Tiling.of(of, cut_T, range_T2)
        return found


def split(delta: DeviceDelta, most: int) -> Iterator[Piece]:
    """Yield the tensors of each payload of about `most` changes, as `Delta.split` has them."""
    piece, count = dict[int, tuple[int, int]](), 0
    for width, steps in delta.steps.items():
        end_T, low, begin = np.cumsum(steps.count_T), 0, 0
        while low < steps.changed:
            end = int(np.searchsorted(end_T, min(low + most - count, steps.changed) - 1, side="right")) + 1
            piece[width] = begin, end
            count, low, begin = count + int(end_T[end - 1]) - low, int(end_T[end - 1]), end
            if count >= most:
                yield piece
                piece, count = {}, 0
    if piece:
        yield piece


class Encoder:
    """Encodes deltas of a model on its device.

    Args:
        layout: The model.

    Attributes:
        tilings: The blocks of its tensors, which a decoder beside it shares.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._rooms, self.tilings = layout, Rooms(), Tilings()

    def encode(
        self,
        codec_name: str,
        delta: DeviceDelta,
        digests: Mapping[int, np.ndarray],
        version: int,
        base_version: int,
        pieces: Sequence[Piece],
    ) -> Iterator[Encoded]:
        """Yield the payloads of a delta. The arrays of one last until the next one's are wanted, or another delta's.

        Args:
            codec_name: `packed` or `context`.
            delta: The steps from the base version on, which `bits` have taken.
            digests: Fingerprints after the delta by width, uint64[T].
            version: The version that it leads to.
            base_version: The one that it leads from.
            pieces: All payloads, as `split` returns them.
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
            is_tiled_T = np.zeros(len(of.specs), np.bool_)
            by_class: Sequence[Coded | None] = [None] * len(in_P)
            if codec_name == "context":
                tiling = self.tilings.of(of, ranges(of, delta.bits[width]))
                inside_T = np.zeros(len(of.specs), np.bool_)
                inside_T[tensor_P2[0, 0] : tensor_P2[-1, 1]] = True
                enough_T = steps.count_T >= np.maximum(tiles.FEW * tiling.count_T, tiles.FEW)
                is_tiled_T = inside_T & tiling.is_worth_T & enough_T
                if is_tiled_T.any():
                    by_class = self._by_class(of, steps, delta.bits[width], tiling, is_tiled_T, tensor_P2)
            by_gap = self._by_gap(of, steps, ~is_tiled_T, tensor_P2)
            for p, (first, last), gaps, in_tiles in zip(in_P, tensor_P2.tolist(), by_gap, by_class, strict=True):
                changed_T = np.flatnonzero(steps.count_T[first:last]) + first
                digest_T = digests[width][changed_T]
                entries, row = vector.entries(of, changed_T, steps.count_T, digest_T, gaps, in_tiles, is_tiled_T[changed_T])
                found[p][0].update(entries)
                found[p][1][str(width)] = row
        for piece, (arrays, vectors) in zip(pieces, found, strict=True):
            yield vector.payload_of(codec_name, *versions, _changed(delta, piece), arrays, vectors)

    def _by_gap(self, of: Vector, steps: DeviceSparse, is_in_T: np.ndarray, tensor_P2: np.ndarray) -> list[Coded]:
        """Return entries and metadata of each payload's tensors that are coded by gaps; `vector._encode`."""
        device, changed_T = steps.low_K.device, np.where(is_in_T, steps.count_T, 0)
        bound_T, all_T = _bounds(changed_T), _bounds(steps.count_T)
        low_P, high_P = bound_T[tensor_P2[:, 0]], bound_T[tensor_P2[:, 1]]
        held_P = np.flatnonzero(low_P < high_P)
        found: list[Coded] = [({}, {}) for _ in tensor_P2]
        if not held_P.size:
            return found
        low_P, high_P, start = low_P[held_P], high_P[held_P], int(low_P[held_P[0]])
        # The first and the last change of each payload, and then how many there are before each of its blocks.
        edge_P2 = np.stack((low_P, high_P - 1), axis=1)
        tensor = np.searchsorted(bound_T, edge_P2, side="right") - 1
        at_P2 = _positions(steps, edge_P2 - bound_T[tensor] + all_T[tensor])
        block_P2 = at_P2 // vector.BLOCK + [0, 1]
        count_P = block_P2[:, 1] - block_P2[:, 0]
        edge_P = _bounds(count_P + 1)
        edge_E = np.arange(edge_P[-1]) - np.repeat(edge_P[:-1] - block_P2[:, 0], count_P + 1)
        edge_E = np.minimum(edge_E * vector.BLOCK, of.element_count)
        below_E = steps.count_below(torch.from_numpy(edge_E).to(device)).cpu().numpy()
        tensor_E = np.searchsorted(of.first_T, edge_E, side="right") - 1
        tensor_E = np.minimum(tensor_E, len(of.specs) - 1)
        inside_E = np.where(is_in_T[tensor_E], below_E - all_T[tensor_E], 0)
        bound_E = np.clip(bound_T[tensor_E] + inside_E, np.repeat(low_P, count_P + 1), np.repeat(high_P, count_P + 1))
        is_last_E = np.zeros(bound_E.size, np.bool_)
        is_last_E[edge_P[1:] - 1] = True
        bound_S, end_S, base_S = bound_E[~is_last_E], bound_E[1:][~is_last_E[:-1]], edge_E[~is_last_E]
        within_S = bound_S - np.repeat(low_P, count_P)
        run_S = within_S // tiled.GROUP_CHANGED
        stream_P = _bounds(count_P)
        begins_S = np.append(True, run_S[1:] != run_S[:-1])
        begins_S[stream_P[:-1]] = True
        run_S = np.cumsum(begins_S) - 1
        first_R = np.flatnonzero(begins_S)
        numbers = _selected(steps, is_in_T, start, int(high_P[-1]), bound_T, all_T)
        bound = torch.from_numpy(np.append(bound_S, end_S[-1:]) - start).to(device)
        base = torch.from_numpy(base_S).to(device)
        run = torch.from_numpy(run_S.astype(np.int32)).to(device)
        streams = Streams(bound, base, run)
        count_RTS = gpu_coder.count(streams, numbers, run, first_R.size)
        piece = np.append(run_S[stream_P[:-1]], first_R.size).astype(np.int32)
        group_R = gpu_coder.join(count_RTS, torch.from_numpy(piece).to(device))
        fitted = gpu_coder.fit(count_RTS)
        streams = Streams(bound, base, (2 * group_R)[run.to(torch.int64)].to(torch.int32))
        words, word_S = gpu_coder.encode(streams, numbers, fitted)
        is_group_R = group_R.cpu().numpy() == np.arange(first_R.size)
        freq_RTS = fitted.freq_TS.cpu().numpy().reshape(-1, 2, 256)[is_group_R]
        table_N, end_T = tables.all_bytes(freq_RTS.reshape(-1, 256))
        end_G, group_first = np.append(0, end_T[1::2]), first_R[is_group_R]
        words_, word_bound = self._rooms.fetch(f"{of.width} gaps", words), _bounds(word_S)
        row_S2 = np.stack((end_S - bound_S, np.diff(word_bound)), axis=1).astype(np.int32)
        for p, low, high, block in zip(
            held_P.tolist(), stream_P[:-1].tolist(), stream_P[1:].tolist(), block_P2, strict=True
        ):
            blocks_entry, planes = tiled.rows_entry(row_S2[low:high])
            group, group_end = (int(np.searchsorted(group_first, edge)) for edge in (low, high))
            found[p] = (
                {
                    "blocks": blocks_entry,
                    "tables": torch.from_numpy(table_N[end_G[group] : end_G[group_end]]),
                    "words": words_[word_bound[low] : word_bound[high]],
                },
                {
                    "block": int(block[0]),
                    "blocks": high - low,
                    "groups": (group_first[group:group_end] - low).tolist(),
                    "planes": planes,
                },
            )
        return found

    def _by_class(
        self,
        of: Vector,
        steps: DeviceSparse,
        bits: DeviceBits,
        tiling: Tiling,
        is_in_T: np.ndarray,
        tensor_P2: np.ndarray,
    ) -> list[Coded | None]:
        """Return entries and metadata of each payload's tensors that are coded by classes; `tiled.encode`."""
        device = steps.low_K.device
        row_BF, band_GF = tiling.chosen(is_in_T, addresses(of, bits))
        block_T = _bounds(np.where(is_in_T, tiling.count_T, 0))
        first_P, last_P = block_T[tensor_P2[:, 0]], block_T[tensor_P2[:, 1]]
        bands = _bands(of, steps, tiling, band_GF)
        step_K = steps.step_K.view(UNSIGNED[of.width])
        count_B = bands.tally(steps.low_K, len(row_BF)).cpu().numpy().astype(np.int64)
        bound_B = _bounds(count_B)
        changes = Changes(bands, steps.low_K, step_K, bits.bits_N)
        blocks = Bits(row_BF, band_GF, bound_B, of.width, device, changes)
        runs, run_P = _runs(bound_B, first_P, last_P)
        size_R = np.add.reduceat(row_BF[:, COLUMNS] * row_BF[:, ROWS], runs[:-1])
        period_R = np.clip(size_R // tiled._SAMPLED, 1, 64) | 1
        group_run_G, held_G = _models(blocks.survey(runs, period_R), run_P, size_R)
        first_G = runs[group_run_G]
        class_G = _bounds(np.array([model.classes.low_C.size for model in held_G]))
        group_B = np.searchsorted(first_G, np.arange(len(row_BF)), side="right") - 1
        blocks.divide(group_B, class_G, _classes(held_G, device))
        gap_bits = _gap_bits(row_BF, group_B, held_G)
        numbers_ = gpu_classes.rank(blocks, gap_bits)
        numbers, begins_B = Numbers(numbers_[0], numbers_[2], numbers_[1]), numbers_[3]
        table_B = torch.from_numpy((2 * class_G[group_B]).astype(np.int32)).to(device)
        streams = Streams(blocks.bound, table_B, table_B, begins_B)
        fitted = gpu_coder.fit(gpu_coder.count_classes(streams, numbers, 2 * int(class_G[-1])))
        words, word_B = gpu_coder.encode(streams, numbers, fitted, gap_bits)
        table_N, end_T = tables.all_bytes(fitted.freq_TS.cpu().numpy())
        end_T = np.append(0, end_T)
        words_, word_bound = self._rooms.fetch(f"{of.width} classes", words), _bounds(word_B)
        row_B2 = np.stack((count_B, np.diff(word_bound)), axis=1).astype(np.int32)
        found: list[Coded | None] = []
        group_P = np.searchsorted(first_G, first_P)
        for (first_t, last_t), low, high, group in zip(
            tensor_P2.tolist(), first_P.tolist(), last_P.tolist(), group_P.tolist(), strict=True
        ):
            if low == high:
                found.append(None)
                continue
            parts, group_end = [], int(np.searchsorted(first_G, high))
            for number in range(group, group_end):
                head = held_G[number].head()
                low_t, high_t = end_T[2 * class_G[number]], end_T[2 * class_G[number + 1]]
                parts += [np.frombuffer(head, np.uint8), table_N[low_t:high_t]]
            rows, planes = tiled.rows_entry(row_B2[low:high])
            entries = {
                "tiles": rows,
                "tile_tables": torch.from_numpy(np.concatenate(parts)),
                "tile_words": words_[word_bound[low] : word_bound[high]],
            }
            inside_T = np.flatnonzero(is_in_T[first_t:last_t]) + first_t
            range_T2 = tiling.range_T2[inside_T]
            if (range_T2 != np.stack((np.zeros_like(inside_T), np.diff(of.first_T)[inside_T]), axis=1)).any():
                entries["ranges"] = torch.from_numpy(range_T2)
            found.append((entries, {"groups": (first_G[group:group_end] - low).tolist(), "planes": planes}))
        return found


def _bands(of: Vector, steps: DeviceSparse, tiling: Tiling, band_GF: np.ndarray) -> Bands:
    """Return bands of blocks, with their changes in a delta and among those of all bands."""
    tensor_G = np.searchsorted(of.first_T, band_GF[:, 0], side="right") - 1
    end_G = np.append(band_GF[1:, 0], 0)
    is_last_G = np.append(tensor_G[1:] != tensor_G[:-1], True)
    end_G[is_last_G] = of.first_T[tensor_G[is_last_G]] + tiling.range_T2[tensor_G[is_last_G], 1]
    device = steps.low_K.device
    edge = torch.from_numpy(np.concatenate((band_GF[:, 0], end_G))).to(device)
    begin, end = steps.count_below(edge).reshape(2, -1)
    return Bands(torch.from_numpy(band_GF).to(device), begin, end, torch.cumsum(end - begin, 0) - (end - begin))


def ranges(of: Vector, bits: DeviceBits) -> np.ndarray:
    """Return which elements of each tensor are held, int64[T, 2]."""
    start_T = np.where(bits.run_T3[:, 1] > 0, bits.run_T3[:, 0] - of.first_T[:-1], 0)
    return np.stack((start_T, start_T + bits.run_T3[:, 1]), axis=1)


def addresses(of: Vector, bits: DeviceBits) -> np.ndarray:
    """Return the address that each tensor's first element has, or would have, int64[T]."""
    return bits.bits_N.data_ptr() + (bits.run_T3[:, 2] - ranges(of, bits)[:, 0]) * of.width


def _positions(steps: DeviceSparse, number_N: np.ndarray) -> np.ndarray:
    """Return the positions of some changes, on the host."""
    found: np.ndarray = steps.positions_of(torch.from_numpy(number_N).to(steps.low_K.device)).cpu().numpy()
    return found


def _selected(
    steps: DeviceSparse, is_in_T: np.ndarray, start: int, stop: int, bound_T: np.ndarray, all_T: np.ndarray
) -> Numbers:
    """Return the changes from number `start` on and below `stop` of those of some tensors."""
    first = int(np.searchsorted(bound_T, start, side="right")) - 1
    last = int(np.searchsorted(bound_T, stop, side="left"))
    step_K = steps.step_K.view(UNSIGNED[steps.step_K.element_size()])
    shift_T, count_T = (all_T - bound_T)[first:last], np.diff(bound_T)[first:last]
    if (shift_T[count_T > 0] == shift_T[count_T > 0][0]).all():
        shift = int(shift_T[count_T > 0][0])
        return Numbers(steps.low_K[start + shift : stop + shift], step_K[start + shift : stop + shift])
    device = steps.low_K.device
    moved = torch.from_numpy(np.stack((shift_T, count_T))).to(device)
    number_K = torch.repeat_interleave(*moved, output_size=stop - start)
    number_K += torch.arange(start, stop, device=device)
    return Numbers(steps.low_K[number_K], steps.step_K[number_K].view(step_K.dtype))


def _runs(bound_B: np.ndarray, first_P: np.ndarray, last_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first block of each run, and the number of blocks; the first run of each payload, and their number."""
    firsts, run_P = [], [0]
    for low, high in zip(first_P.tolist(), last_P.tolist(), strict=True):
        if low < high:
            changed = bound_B[low : high + 1] - bound_B[low]
            firsts.append(low + tiled.runs(changed, int(changed[-1]) // tiled.MOST_RUNS))
        run_P.append(run_P[-1] + (firsts[-1].size if low < high else 0))
    return np.append(np.concatenate(firsts), last_P[-1]), np.array(run_P)


def _models(
    survey: tuple[torch.Tensor, torch.Tensor], run_P: np.ndarray, size_R: np.ndarray
) -> tuple[np.ndarray, list[Model]]:
    """Return the first run of each group, and its classes."""
    element, step = survey
    used_E, used_S = (torch.nonzero(step.sum(dim=dims)).reshape(-1) for dims in ((0, 2), (0, 1)))
    step_RVS = step[:, used_E][:, :, used_S].cpu().numpy().view(np.uint32)
    element_RE = element.cpu().numpy()
    element_RE = element_RE * (size_R / np.maximum(element_RE.sum(axis=1), 1))[:, None]
    return classes.groups(element_RE, used_E.cpu().numpy(), step_RVS, run_P)


def _classes(models: Sequence[Model], device: torch.device) -> Classes:
    rows = []
    for model in models:
        low_C, span_C = (each.astype(np.int64) for each in model.classes)
        rows.append((low_C, low_C + span_C, model.level_C))
    return Classes.of(rows, device)


def _gap_bits(row_BF: np.ndarray, group_B: np.ndarray, models: Sequence[Model]) -> int:
    """Return the bits that no gap of these blocks exceeds."""
    span_G = np.array([int(model.level_C[0] - model.level_C[-1]) for model in models])
    most = int((row_BF[:, COLUMNS] * row_BF[:, ROWS] * (RATIO[span_G[group_B]] >> RATIO_BITS) + 1).max())
    return (2 * most).bit_length()


def _changed(delta: DeviceDelta, piece: Piece) -> int:
    return sum(int(delta.steps[width].count_T[first:last].sum()) for width, (first, last) in piece.items())


def _bounds(count_N: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(count_N, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where the old bits of a vector's tensors lie on a device.

    Attributes:
        address_T: Address of each tensor's first element, or the one that it would have; int64[T].
        range_T2: The first element of each tensor that is held, and the one behind the last.
    """

    address_T: np.ndarray
    range_T2: np.ndarray

    @classmethod
    def of(cls, vector_: Vector, bits: DeviceBits) -> Places:
        """Return where the bits of a shadow are."""
        return cls(addresses(vector_, bits), ranges(vector_, bits))


class Decoder:
    """Decodes payloads of a model on a device.

    Args:
        layout: The model.
        device: The device.
        send: Copies arrays to the device, on the current stream, each to a tensor of as many elements.
        tilings: Those of an encoder beside it; None for new ones.
    """

    def __init__(self, layout: Layout, device: torch.device, send: Send, tilings: Tilings | None = None) -> None:
        self._layout, self._device, self._send = layout, device, send
        self._tilings = Tilings() if tilings is None else tilings

    def decode(
        self, opened: Sequence[Payload], places: Mapping[int, Places], undone: DeviceDelta | None = None
    ) -> dict[int, Decoded]:
        """Return the changes of payloads by width.

        Args:
            opened: The payloads, of `packed` or `context`, of one version; none changes a tensor of another one.
            places: Where bits are, by width. Only `context` needs them.
            undone: The same changes, which the bits have taken; None if they are old.

        Raises:
            CorruptDataError: a payload contradicts itself or the tensor table.
        """
        parts: dict[int, list[vector._Reader]] = {}
        for payload in opened:
            size = vector._elements(payload, "block_elements")
            readers = [
                (width, vector._Reader(payload, self._layout.vectors[width], row, size))
                for width, row in vector._rows(payload, self._layout, size)
            ]
            if sum(reader.changed for _, reader in readers) != payload.changed:
                raise CorruptDataError(f"Payload has blocks with other numbers of changes than {payload.changed}.")
            for width, reader in readers:
                parts.setdefault(width, []).append(reader)
        return {width: self._decode(width, readers, places.get(width), undone) for width, readers in sorted(parts.items())}

    def _decode(
        self, width: int, readers: Sequence[vector._Reader], places: Places | None, undone: DeviceDelta | None
    ) -> Decoded:
        of = self._layout.vectors[width]
        readers = sorted(readers, key=lambda reader: int(reader.number_T[0]) if reader.number_T.size else 0)
        number_T = np.concatenate([reader.number_T for reader in readers])
        count_T = np.concatenate([reader.count_T for reader in readers])
        if (np.diff(number_T) <= 0).any() or (count_T <= 0).any():
            raise CorruptDataError("Payloads change a tensor twice, or name one that does not change.")
        all_T = np.zeros(len(of.specs), np.int64)
        all_T[number_T] = count_T
        gap_part = self._by_gap(of, [reader for reader in readers if len(reader._row_B2)])
        tiled_readers = [reader._tiled for reader in readers if reader._tiled is not None]
        class_part = self._by_class(of, tiled_readers, places, undone) if tiled_readers else None
        parts = [part for part in (gap_part, class_part) if part is not None]
        if len(parts) == 2:
            is_tiled_T = np.zeros(len(of.specs), np.bool_)
            for tiled_ in tiled_readers:
                is_tiled_T[tiled_.number_T] = True
            found = self._merged(parts[0], parts[1], all_T, is_tiled_T)
        elif parts:
            found = parts[0]
        else:
            found = (torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=UNSIGNED[width]))
        digest_T = np.concatenate([reader.digest_T for reader in readers])
        return Decoded(*found, all_T, number_T, digest_T)

    def _upload(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        """Copy words to the device, one array after the other."""
        sizes = [array.size for array in arrays]
        words = torch.empty(max(sum(sizes), 1), dtype=torch.int32, device=self._device)
        self._send(zip(arrays, torch.split(words[: sum(sizes)], sizes), strict=True))
        return words

    def _tiling(self, of: Vector, readers: Sequence[TiledReader], range_T2: np.ndarray) -> Tiling:
        """Return the blocks of what is held, if that is what payloads have blocks of, or of what they say."""
        known = tiles.TILE, vector.BLOCK
        if all(r.sizes == known and np.array_equal(r.range_T2, range_T2[r.number_T]) for r in readers):
            return self._tilings.of(of, range_T2)
        return Tiling.of(of, {t: cut for reader in readers for t, cut in reader.cuts.items()}, range_T2)

    def _by_gap(self, of: Vector, readers: Sequence[vector._Reader]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Decode the tensors that are coded by gaps: ascending low halves of positions, and steps."""
        if not readers:
            return None
        device = self._device
        table_S, freqs, base_S, size_S, count_S, word_S = [], [], [], [], [], []
        groups = 0
        for reader in readers:
            blocks, firsts = reader._blocks(), read_groups(reader._row, len(reader._row_B2))
            freqs.append(tables.read(read_tables(reader._payload, f".{of.width}.tables"), 2 * len(firsts)))
            number_B = np.searchsorted(firsts, np.arange(len(reader._row_B2)), side="right") - 1
            table_S.append(2 * (groups + number_B))
            groups += len(firsts)
            base_S.append(blocks.base_B)
            size_S.append(blocks.size_BC[:, 0])
            count_S.append(reader._row_B2[:, 0])
            word_S.append(reader._row_B2[:, 1])
        bound_S, word_bound = _bounds(np.concatenate(count_S)), _bounds(np.concatenate(word_S))
        there = [torch.from_numpy(array).to(device) for array in (bound_S, np.concatenate(base_S), np.concatenate(size_S))]
        word = torch.from_numpy(word_bound).to(device)
        table = torch.from_numpy(np.concatenate(table_S).astype(np.int32)).to(device)
        slots = gpu_coder.slots(torch.from_numpy(np.concatenate(freqs).astype(np.int16)).to(device))
        words = self._upload([reader._words for reader in readers])
        at_K = torch.zeros(int(bound_S[-1]), dtype=torch.int32, device=device)
        step_K = torch.zeros(int(bound_S[-1]), dtype=UNSIGNED[of.width], device=device)
        streams = Streams(there[0], there[1], table)
        good_S = gpu_coder.decode(streams, there[2], words, word[:-1], word[1:], slots, at_K, step_K)
        if not bool(good_S.all()):
            raise CorruptDataError(f"Payload has a malformed block of elements of {of.width} bytes.")
        return at_K, step_K

    def _by_class(
        self, of: Vector, readers: Sequence[TiledReader], places: Places | None, undone: DeviceDelta | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the tensors that are coded by classes: ascending low halves of positions, and steps."""
        if places is None:
            raise StageError("This delta is coded by `context` and needs the old weights; decode it with `old`.")
        device = self._device
        is_in_T = np.zeros(len(of.specs), np.bool_)
        is_in_T[np.concatenate([reader.number_T for reader in readers])] = True
        tiling = self._tiling(of, readers, places.range_T2)
        row_BF, band_GF = tiling.chosen(is_in_T, places.address_T)
        row_B2 = np.concatenate([reader._row_B2 for reader in readers])
        if (row_B2[:, 0] > row_BF[:, COLUMNS] * row_BF[:, ROWS]).any():
            raise CorruptDataError("Payload has a block with more changes than elements.")
        bound_B, word_bound = _bounds(row_B2[:, 0]), _bounds(row_B2[:, 1])
        models, freqs, group_B = list[Model](), list[np.ndarray](), []
        for reader in readers:
            held, freq_TS = Model.read(read_tables(reader._payload, f".{of.width}.tile_tables"), len(reader._groups))
            number_B = np.searchsorted(reader._groups, np.arange(len(reader._row_B2)), side="right") - 1
            group_B.append(len(models) + number_B)
            models += held
            freqs.append(freq_TS)
        changes = None
        if undone is not None:
            steps = undone.steps[of.width]
            bands, step_K = _bands(of, steps, tiling, band_GF), steps.step_K.view(UNSIGNED[of.width])
            changes = Changes(bands, steps.low_K, step_K, undone.bits[of.width].bits_N)
        blocks = Bits(row_BF, band_GF, bound_B, of.width, device, changes)
        class_G = _bounds(np.array([model.classes.low_C.size for model in models]))
        blocks.divide(np.concatenate(group_B), class_G, _classes(models, device))
        slots = gpu_coder.slots(torch.from_numpy(np.concatenate(freqs).astype(np.int16)).to(device))
        words, word = self._upload([reader._words for reader in readers]), torch.from_numpy(word_bound).to(device)
        found, good_B = gpu_classes.decode(blocks, words, word[:-1], word[1:], slots)
        if not bool(good_B.all()):
            raise CorruptDataError(f"Payload has a malformed block of elements of {of.width} bytes.")
        at_K = torch.zeros(int(bound_B[-1]), dtype=torch.int32, device=device)
        step_K = torch.zeros(int(bound_B[-1]), dtype=UNSIGNED[of.width], device=device)
        gpu_classes.place(blocks, found, at_K, step_K)
        return at_K, step_K

    def _merged(
        self,
        gap_part: tuple[torch.Tensor, torch.Tensor],
        class_part: tuple[torch.Tensor, torch.Tensor],
        count_T: np.ndarray,
        is_tiled_T: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join changes of tensors that lie between each other."""
        device = self._device
        to_T = np.cumsum(count_T) - count_T
        found = [torch.empty(int(count_T.sum()), dtype=each.dtype, device=device) for each in gap_part]
        for part, is_in_T in ((gap_part, ~is_tiled_T), (class_part, is_tiled_T)):
            held_T = np.where(is_in_T, count_T, 0)
            if int(held_T.sum()) != part[0].numel():
                raise CorruptDataError("Payload counts the changes of its tensors wrong.")
            moved = torch.from_numpy(np.stack((to_T - (np.cumsum(held_T) - held_T), held_T))).to(device)
            to_K = torch.repeat_interleave(*moved, output_size=part[0].numel())
            to_K += torch.arange(part[0].numel(), device=device)
            for into, data in zip(found, part, strict=True):
                into.view(SIGNED[into.element_size()])[to_K] = data.view(SIGNED[data.element_size()])
        return found[0], found[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Decoded:
    """Changes of one width, on a device.

    Attributes:
        low_K: The low 32 bits of ascending positions in the vector, int32.
        step_K: Steps, unsigned.
        count_T: Number of changes of each tensor of the vector, int64[T], on the host.
        number_T, digest_T: The changed tensors, and their fingerprints after the delta, int64; on the host.
    """

    low_K: torch.Tensor
    step_K: torch.Tensor
    count_T: np.ndarray
    number_T: np.ndarray
    digest_T: np.ndarray
