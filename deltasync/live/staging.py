"""STAGE: turn decoded changes into exchanges, on the device of the live memory that they change.

Changed elements become positions and new values. Full weights are compared with live memory. Where little differs they
become positions and values too; otherwise they stay on the host until the commit copies them, so that a device needs room
for a few pieces and not for a second model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync.errors import StageError
from deltasync.kernels import native
from deltasync.kernels.table import Entry, Table
from deltasync.live.devices import Device
from deltasync.live.exchange import Copy, DeviceSwap, HostSwap, Swap, Target, Values
from deltasync.live.segments import Parts, Segment, unsigned
from deltasync.tensors import Sparse, Vector, count_below, fingerprint, index_dtype, region_end
from deltasync.tensors.bits import signed_view

if TYPE_CHECKING:
    from deltasync.kernels.native import SwapTable

_HOST_PIECE_BYTES = 4 << 20
_DEVICE_PIECE_BYTES = 32 << 20
_DIFFERING_BYTES = 64 << 20
"""Most bytes, on a device, of the positions and values of full weights. Segments beyond that are copied."""

_MOST_DIMS = 8  # of a segment
_ROWS = torch.contiguous_format
_FEW = 8  # full weights are exchanged by elements if at most one in this many differs


Pieces = list[tuple[torch.Tensor, torch.Tensor]]
"""Views of live memory, and new bits for them on the host."""


@dataclasses.dataclass(slots=True)
class Staged:
    """One version, ready to commit; from the commit on, what undoes it.

    Attributes:
        swaps, copies: Values to write; after the commit, the old values.
        readouts: Each returns the fingerprints of copied segments.
        fingerprints: The fingerprint that each tensor of the version must have after the commit; None where only the
            model's is known.
        parts: After the commit, the fingerprints of the segments of each of these tensors.
        before: After the commit, all `LiveMemory.parts` before it.
        scatter_s: Seconds during which the commit was writing live weights.
    """

    swaps: list[Swap] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)
    readouts: list[Callable[[], Values]] = dataclasses.field(default_factory=list)
    fingerprints: dict[str, int | None] = dataclasses.field(default_factory=dict)
    parts: Parts = dataclasses.field(default_factory=dict)
    before: Parts = dataclasses.field(default_factory=dict)
    scatter_s: float = 0.0

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        return sum(swap.changed for swap in self.swaps) + sum(copy.changed for copy in self.copies)

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes beside the live weights, on their device, until the commit is confirmed."""
        rooms = {copy.room_RB.data_ptr(): copy.room_RB.nbytes for copy in self.copies}
        return sum(swap.nbytes for swap in self.swaps) + sum(rooms.values())


def readout(device: Device | None, targets: Sequence[Target]) -> Callable[[], Values]:
    """Return a function that reads the fingerprints of segments out of live memory.

    Neither `targets` nor any of their segments is empty. On an accelerator everything that it needs is allocated now.
    """
    if device is None:
        return lambda: [(each, native.fingerprint_runs(each.key, *each.segment.runs())) for each in targets]
    with device.staging():
        table = Table([_entry(target) for target in targets], device)

    def read() -> Values:
        device.kernels.fingerprint(table)
        return list(zip(targets, table.gained(), strict=True))

    return read


class HostPlaces:
    """The segments of one vector in host memory, as rows of the kernels.

    Raises:
        StageError: a segment has more dimensions than the kernels know.
    """

    def __init__(self, vector: Vector, targets: Sequence[Target]) -> None:
        self.vector = vector
        self.targets = [target for target in targets if target.segment.live.numel()]
        number = {name: t for t, name in enumerate(vector.names)}
        rows, dims = list[tuple[int, ...]](), list[list[tuple[int, int, int]]]()
        self._span = 0  # elements of the largest segment, gaps included
        for target in self.targets:
            segment, tensor = target.segment, number[target.name]
            first = int(vector.first_T[tensor])
            at = first + segment.offset
            layout = _strided(segment)
            last = region_end(segment.region())
            self._span = max(self._span, last - segment.offset, segment.flat().numel())
            place = segment.live.data_ptr(), -1 if layout is None else len(dims), segment.flat().numel()
            rows.append((tensor, at, first + last, *place))
            if layout is not None:
                dims.append(layout + [(0, 0, 0)] * (_MOST_DIMS - len(layout)))
        self._row_SF = np.array(rows, np.int64).reshape(-1, 6)
        self._dim_D83 = np.array(dims, np.int64).reshape(-1, _MOST_DIMS, 3)

    def prepare(self, steps: Sparse) -> tuple[SwapTable, list[np.ndarray], Values, int, int]:
        """Find what to write, without writing it.

        Returns:
            The table of the exchange; the arrays that it has the addresses of; what it adds to fingerprints; its checksum;
            and how many elements it writes.
        """
        tensor_S, at_S, end_S, address_S, dims_S, span_S = self._row_SF.T
        low_S, high_S = count_below(steps.at_K, at_S), count_below(steps.at_K, end_S)
        touched = np.flatnonzero(high_S > low_S)
        columns = tensor_S, low_S, high_S, address_S, at_S, dims_S, span_S
        row_RF = np.stack([column[touched] for column in columns], axis=1)
        to = np.dtype(np.int32 if self._span < 1 << 31 else np.int64)
        places = self.vector.key_T, self.vector.first_T
        write_CF, to_K, new_K, gain_R, kept_R, check = native.prepare(row_RF, self._dim_D83, *places, *steps, to)
        chunk_CF = np.empty((len(write_CF), 4), np.int64)
        chunk_CF[:, 0], place_C, chunk_CF[:, 3] = write_CF[:, 1], write_CF[:, 2], write_CF[:, 3]
        for column, array in ((1, to_K), (2, new_K)):
            chunk_CF[:, column] = array.ctypes.data + place_C * array.itemsize
        written = np.flatnonzero(kept_R)
        gains = [(self.targets[s], int(gain_R[r])) for r, s in zip(written.tolist(), touched[written].tolist(), strict=True)]
        return [(chunk_CF, new_K.itemsize, to_K.itemsize)], [to_K, new_K], gains, check, int(kept_R.sum())


def _strided(segment: Segment) -> list[tuple[int, int, int]] | None:
    """Return the dimensions of a segment, for `native.prepare`; None if it is contiguous here and in the tensor."""
    live = segment.live
    dims = [dim for dim in zip(segment.stride, live.shape, live.stride(), strict=True) if dim[1] > 1]
    if live.is_contiguous() and all(stride == live_stride for stride, _, live_stride in dims):
        return None
    if len(dims) > _MOST_DIMS:
        raise StageError(f"A live tensor has {len(dims)} dimensions, which is more than {_MOST_DIMS}.")
    return sorted(dims, reverse=True)


class HostStaging:
    """Collects what is to be written to host memory."""

    def __init__(self) -> None:
        self._writes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._tables: SwapTable = []
        self._arrays: list[np.ndarray] = []
        self._changed = 0
        self._gains: Values = []
        self._check = 0
        self._copies: list[tuple[Target, Pieces]] = []

    def elements(self, places: HostPlaces, steps: Sparse) -> None:
        """Add steps of elements of a vector."""
        table, arrays, gains, check, changed = places.prepare(steps)
        self._tables += table
        self._arrays += arrays
        self._gains += gains
        self._changed += changed
        self._check = (self._check + check) & fingerprint.MASK

    def whole(self, target: Target, bits_N: np.ndarray) -> None:
        """Add a whole tensor's new bits, of which the segment has a share."""
        segment = target.segment
        whole = signed_view(bits_N)
        source = segment.source(whole).contiguous()
        new_N, old_N = (unsigned(view.reshape(-1)) for view in (source, segment.live.contiguous()))
        at, _ = native.diff(old_N, new_N)
        if at.size <= new_N.size // _FEW:
            self._differing(target, *_places(segment, at), new_N[at])
            return
        pieces = segment.pieces(_HOST_PIECE_BYTES // source.element_size())
        self._copies.append((target, [(p.live, p.source(whole).clone(memory_format=_ROWS).view(-1)) for p in pieces]))

    def _differing(self, target: Target, dest_index_K: np.ndarray, index_K: np.ndarray, data_K: np.ndarray) -> None:
        if not data_K.size:
            return
        dest = target.segment.flat()
        dest_index_K = np.ascontiguousarray(dest_index_K, index_dtype(dest.numel()))
        gained, check = native.weigh(target.key, unsigned(dest), dest_index_K, index_K, data_K)
        self._writes.append((dest, torch.from_numpy(dest_index_K), signed_view(data_K)))
        self._gains.append((target, gained))
        self._changed += data_K.size
        self._check = (self._check + check) & fingerprint.MASK

    def finish(self, staged: Staged) -> None:
        """Add what was collected to `staged`."""
        if self._changed:
            writes = [(unsigned(dest), at_K.numpy(), unsigned(value_K)) for dest, at_K, value_K in self._writes]
            table = [*self._tables, *native.swap_table(writes)]
            arrays = [*self._arrays, *(array for write in writes for array in write[1:])]
            staged.swaps.append(HostSwap(table, arrays, self._gains, self._check, self._changed))
        if self._copies:
            largest_bytes = max(live.nbytes for _, pieces in self._copies for live, _ in pieces)
            room = torch.empty((2, -(-largest_bytes // 8) * 8), dtype=torch.uint8)  # elements of any width begin in it
            staged.copies.extend(Copy(pieces, room) for _, pieces in self._copies)
            staged.readouts.append(readout(None, [target for target, _ in self._copies]))


class DeviceStaging:
    """Collects what is to be written to an accelerator; it goes there in one copy, in `finish`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._targets: list[Target] = []
        self._entries: list[Entry] = []
        self._copies: list[tuple[Target, Pieces]] = []
        self._room: torch.Tensor | None = None
        self._differing_bytes = 0

    def elements(self, target: Target, steps: Sparse) -> None:
        """Add steps of elements of a tensor by flat indices, of which the segment has a share."""
        at, dest_index_K = target.segment.locate(steps.at_K)
        self._elements(target, dest_index_K, steps.data_K if at is None else steps.data_K[at], absolute=False)

    def whole(self, target: Target, bits_N: np.ndarray) -> None:
        """Add a whole tensor's new bits, of which the segment has a share."""
        if target.segment.live.numel():
            with self._device.staging():
                self._whole(target, signed_view(bits_N))

    def _elements(self, target: Target, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool) -> None:
        if data_K.size:
            self._targets.append(target)
            self._entries.append(_entry(target, dest_index_K, data_K, absolute))

    def _whole(self, target: Target, whole: torch.Tensor) -> None:
        """Add full weights, compared with live memory on the device, piece by piece."""
        segment = target.segment
        pieces: Pieces = []
        found: list[tuple[np.ndarray, np.ndarray]] | None = []
        most = segment.live.numel() // _FEW
        for piece in segment.pieces(_DEVICE_PIECE_BYTES // segment.live.element_size()):
            source = self._device.pinned(piece.live.nbytes).view(piece.live.dtype)
            source.view(piece.live.shape).copy_(piece.source(whole))
            pieces.append((piece.live, source))
            at = None if found is None else self._differing(piece.live, source)
            if at is None or at.size > most:
                found = None
            elif found is not None:
                most -= at.size
                gap = piece.live.storage_offset() - segment.live.storage_offset()
                found.append((_places(piece, at)[0] + gap, unsigned(source)[at]))
        if found is not None:
            dest_index_K, data_K = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            size_bytes = data_K.nbytes + data_K.size * index_dtype(segment.flat().numel()).itemsize
            if self._differing_bytes + size_bytes <= _DIFFERING_BYTES:
                self._differing_bytes += size_bytes
                self._elements(target, dest_index_K, data_K, absolute=True)
                return
        self._copies.append((target, pieces))

    def _differing(self, live: torch.Tensor, source: torch.Tensor) -> np.ndarray | None:
        """Return which elements of a piece differ, in row-major order; None if many do."""
        if self._room is None:
            self._room = self._device.allocate(3 * _DEVICE_PIECE_BYTES).view(3, _DEVICE_PIECE_BYTES)
        at_N = self._room[0].view(torch.int64)
        came = self._room[1, : live.nbytes].view(live.dtype).view(live.shape)
        differs = self._room[2, : live.numel()].view(torch.bool).view(live.shape)
        came.copy_(source.view(live.shape), non_blocking=True)
        torch.ne(live, came, out=differs)
        count = int(torch.count_nonzero(differs))
        if count > min(live.numel() // 4, at_N.numel()):
            return None
        at: np.ndarray = torch.nonzero(differs.view(-1), out=at_N[:count].view(-1, 1)).view(-1).cpu().numpy()
        return at

    def finish(self, staged: Staged) -> None:
        """Add what was collected to `staged`."""
        if self._entries:
            with self._device.staging():
                table = Table(self._entries, self._device)
                self._device.kernels.prepare(table)
                gains = list(zip(self._targets, table.gained(), strict=True))
                staged.swaps.append(DeviceSwap(self._device, table, gains, table.check()))
        if self._copies:
            assert self._room is not None
            pieces = [piece for _, pieces in self._copies for piece in pieces]
            staged.copies.append(Copy(pieces, self._room, self._device))
            staged.readouts.append(readout(self._device, [target for target, _ in self._copies]))


def differs(device: Device, segment: Segment, whole: torch.Tensor) -> bool:
    """Whether any bit of a segment in an accelerator's memory differs from a whole tensor's; compared there."""
    with device.staging():
        room = device.allocate(_DEVICE_PIECE_BYTES)
        for piece in segment.pieces(_DEVICE_PIECE_BYTES // segment.live.element_size()):
            came = room[: piece.live.nbytes].view(piece.live.dtype).view(piece.live.shape)
            came.copy_(piece.source(whole))
            if not torch.equal(piece.live, came):
                return True
    return False


def _entry(
    target: Target, at_K: np.ndarray | None = None, value_K: np.ndarray | None = None, absolute: bool = True
) -> Entry:
    segment, dest = target.segment, target.segment.flat()
    if at_K is not None:
        at_K = np.ascontiguousarray(at_K, index_dtype(dest.numel()))
    return Entry(target.key, dest, segment.offset, segment.layout(), at_K, value_K, absolute)


def _places(segment: Segment, at_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions in `flat()` and checkpoint indices, int64, of elements numbered in row-major order."""
    coordinates = np.unravel_index(at_K, segment.live.shape) if segment.live.ndim else ()
    dest_index_K, index_K = np.zeros((2, at_K.size), np.int64)
    index_K += segment.offset
    for coordinate, live_stride, stride in zip(coordinates, segment.live.stride(), segment.stride, strict=True):
        dest_index_K += coordinate * live_stride
        index_K += coordinate * stride
    return dest_index_K, index_K
