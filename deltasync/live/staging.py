"""STAGE: decoded patches into exchanges, on the device of the live memory that they are for.

A patch of elements becomes positions and new values. Full weights are compared with live memory: where little differs they
become the same, and otherwise they stay on the host until the commit copies them, so that a device needs room for a few
pieces and not for a second model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from deltasync import kernels
from deltasync.kernels.table import Entry, Table
from deltasync.live.devices import Device
from deltasync.live.exchange import Copy, DeviceSwap, HostSwap, Swap, Target, Values
from deltasync.live.segments import Segment, unsigned
from deltasync.tensors import Patch, fingerprint, index_dtype
from deltasync.tensors.bits import signed_view

_HOST_PIECE_BYTES = 4 << 20
_DEVICE_PIECE_BYTES = 32 << 20
_DIFFERING_BYTES = 64 << 20
"""Largest size, on a device, of positions and values of full weights; what differs beyond that is copied."""

_ROWS = torch.contiguous_format
_FEW = 8  # of full weights that differ in less than one in so many elements, those are exchanged


Pieces = list[tuple[torch.Tensor, torch.Tensor]]
"""Views of live memory, and new bits for them on the host."""


class HostReadout:
    """Segments of host memory whose fingerprints are to be read."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets

    def read(self) -> Values:
        """Their fingerprints, of every bit in live memory."""
        return [(target, kernels.cpu.fingerprint_runs(target.key, *target.segment.runs())) for target in self._targets]


class HostStaging:
    """Collects what is to be written to host memory."""

    def __init__(self) -> None:
        self._writes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._gains: Values = []
        self._check = 0
        self._copies: list[tuple[Target, Pieces]] = []

    def add(self, target: Target, patch: Patch) -> None:
        """Take a patch's share of a segment."""
        segment = target.segment
        if patch.index_K is not None:
            at, dest_index_K = segment.locate(patch.index_K)
            index_K, data_K = (x if at is None else x[at] for x in (patch.index_K, patch.data))
            self._elements(target, dest_index_K, index_K, data_K, patch.absolute)
            return
        whole = signed_view(patch.data)
        source = segment.source(whole).contiguous()
        new_N, old_N = (unsigned(view.reshape(-1)) for view in (source, segment.live.contiguous()))
        at, _ = kernels.cpu.diff(old_N, new_N)
        if at.size <= new_N.size // _FEW:
            self._elements(target, *_places(segment, at), new_N[at], absolute=True)
            return
        pieces = segment.pieces(_HOST_PIECE_BYTES // source.element_size())
        self._copies.append((target, [(p.live, p.source(whole).clone(memory_format=_ROWS).view(-1)) for p in pieces]))

    def _elements(
        self, target: Target, dest_index_K: np.ndarray, index_K: np.ndarray, data_K: np.ndarray, absolute: bool
    ) -> None:
        if not data_K.size:
            return
        dest = target.segment.flat()
        dest_index_K = np.ascontiguousarray(dest_index_K, index_dtype(dest.numel()))
        kernels.cpu.warm_up(data_K.dtype, dest_index_K.dtype)
        new_K, gained, check = kernels.cpu.prepare(target.key, unsigned(dest), dest_index_K, data_K, absolute, index_K)
        self._writes.append((dest, torch.from_numpy(dest_index_K), signed_view(new_K)))
        self._gains.append((target, gained))
        self._check = (self._check + check) & fingerprint.MASK

    def finish(self) -> tuple[Sequence[Swap], Sequence[Copy], Sequence[Readout]]:
        """What was collected, and what reads the segments that are copied."""
        swaps = [HostSwap(self._writes, self._gains, self._check)] if self._writes else []
        if not self._copies:
            return swaps, [], []
        largest_bytes = max(live.nbytes for _, pieces in self._copies for live, _ in pieces)
        room = torch.empty((2, -(-largest_bytes // 8) * 8), dtype=torch.uint8)  # elements of any width begin in it
        copies = [Copy(pieces, room) for _, pieces in self._copies]
        return swaps, copies, [HostReadout([target for target, _ in self._copies])]


class DeviceReadout:
    """Segments of an accelerator's memory, read there, and all that it takes."""

    def __init__(self, device: Device, targets: Sequence[Target]) -> None:
        self._device = device
        self._targets = [target for target in targets if target.segment.live.numel()]
        self._empty = [(target, 0) for target in targets if not target.segment.live.numel()]
        self._table: Table | None = None
        if self._targets:
            with device.staging():
                entries = [_entry(target.key, target.segment) for target in self._targets]
                self._table = Table(entries, device, "fingerprints")

    def read(self) -> Values:
        """Their fingerprints."""
        if self._table is None:
            return self._empty
        self._device.kernels.fingerprint(self._table)
        return [*self._empty, *zip(self._targets, self._table.gained(), strict=True)]


class DeviceStaging:
    """Collects what is to be written to an accelerator; it goes there in one copy, at the end."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._targets: list[Target] = []
        self._entries: list[Entry] = []
        self._copies: list[tuple[Target, Pieces]] = []
        self._room: torch.Tensor | None = None
        self._differing_bytes = 0

    def add(self, target: Target, patch: Patch) -> None:
        """Take a patch's share of a segment."""
        if patch.index_K is None:
            if target.segment.live.numel():
                with self._device.staging():
                    self._whole(target, signed_view(patch.data))
            return
        at, dest_index_K = target.segment.locate(patch.index_K)
        data_K = patch.data if at is None else patch.data[at]
        self._elements(target, dest_index_K, data_K, patch.absolute)

    def _elements(self, target: Target, dest_index_K: np.ndarray, data_K: np.ndarray, absolute: bool) -> None:
        if not data_K.size:
            return
        entry = _entry(target.key, target.segment)
        dest_index_K = np.ascontiguousarray(dest_index_K, index_dtype(entry.dest.numel()))
        self._entries.append(dataclasses.replace(entry, at_K=dest_index_K, value_K=data_K, absolute=absolute))
        self._targets.append(target)

    def _whole(self, target: Target, whole: torch.Tensor) -> None:
        """Take full weights: compared on the device, piece by piece."""
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
        """Which elements of a piece differ, in row-major order; None if many do."""
        if self._room is None:
            self._room = self._device.allocate(3 * _DEVICE_PIECE_BYTES, "pieces").view(3, _DEVICE_PIECE_BYTES)
        came = self._room[1, : live.nbytes].view(live.dtype).view(live.shape)
        differs = self._room[2, : live.numel()].view(torch.bool).view(live.shape)
        came.copy_(source.view(live.shape), non_blocking=True)
        torch.ne(live, came, out=differs)
        if int(torch.count_nonzero(differs)) > live.numel() // 4:  # to name them would take as much memory again
            return None
        at: np.ndarray = torch.nonzero(differs.view(-1)).view(-1).cpu().numpy()
        return at

    def finish(self) -> tuple[Sequence[Swap], Sequence[Copy], Sequence[Readout]]:
        """What was collected, and what reads the segments that are copied."""
        swaps: list[Swap] = []
        if self._entries:
            with self._device.staging():
                table = Table(self._entries, self._device, "writes")
                self._device.kernels.prepare(table)
                gains = list(zip(self._targets, table.gained(), strict=True))
                swaps.append(DeviceSwap(self._device, table, gains, table.check()))
        if self._room is None or not self._copies:
            return swaps, [], []
        copies = [Copy(pieces, self._room[:2]) for _, pieces in self._copies]
        return swaps, copies, [DeviceReadout(self._device, [target for target, _ in self._copies])]


Readout = HostReadout | DeviceReadout
Staging = HostStaging | DeviceStaging


def differs(device: Device, segment: Segment, whole: torch.Tensor) -> bool:
    """Whether an accelerator's memory has other bits anywhere than a whole tensor; compared there."""
    with device.staging():
        room = device.allocate(_DEVICE_PIECE_BYTES, "pieces")
        for piece in segment.pieces(_DEVICE_PIECE_BYTES // segment.live.element_size()):
            came = room[: piece.live.nbytes].view(piece.live.dtype).view(piece.live.shape)
            came.copy_(piece.source(whole))
            if not torch.equal(piece.live, came):
                return True
    return False


def _entry(key: int, segment: Segment) -> Entry:
    return Entry(key, segment.flat(), segment.offset, segment.layout())


def _places(segment: Segment, at_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions in `flat()`, and checkpoint indices, of elements that are numbered in row-major order; int64."""
    coordinates = np.unravel_index(at_K, segment.live.shape) if segment.live.ndim else ()
    dest_index_K, index_K = np.zeros((2, at_K.size), np.int64)
    index_K += segment.offset
    for coordinate, live_stride, stride in zip(coordinates, segment.live.stride(), segment.stride, strict=True):
        dest_index_K += coordinate * live_stride
        index_K += coordinate * stride
    return dest_index_K, index_K
