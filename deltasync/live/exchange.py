"""The exchanges of new values with live memory that make up a commit. Each is its own undo log.

A second exchange brings the old values back. An exchange that raises has exchanged nothing, unless it raises CommitError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync import kernels
from deltasync.errors import undoing
from deltasync.kernels.table import Table
from deltasync.live.devices import Device
from deltasync.live.segments import Segment

if TYPE_CHECKING:
    from deltasync.kernels.cpu import SwapTable


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A segment to write or to read: the tensor's name, the segment's number in it, and the tensor's fingerprint key."""

    name: str
    number: int
    segment: Segment
    key: int


Values = list[tuple[Target, int]]
"""Fingerprints of segments, or what an exchange adds to them."""


class HostSwap:
    """An exchange of scattered elements in host memory.

    Args:
        table: See `kernels.cpu.swap_by`.
        arrays: Positions and new values, to which the table has addresses. The values are mutated.
        gains: Gains of the fingerprints by the first exchange.
        check: What `found` returns after the first exchange, unless live memory was written since this was staged.
        changed: Number of elements.
    """

    def __init__(self, table: SwapTable, arrays: Sequence[np.ndarray], gains: Values, check: int, changed: int) -> None:
        self._table = table
        self._arrays = arrays
        self.gains = gains
        self.check = check
        self.changed = changed
        self.nbytes = sum(array.nbytes for array in arrays)  # until the commit is confirmed
        self._found = 0

    def exchange(self) -> None:
        """Exchange all values; mutates live memory."""
        self._found = kernels.cpu.swap_by(self._table)

    def found(self) -> int:
        """Return the checksum of what the last exchange found in live memory."""
        return self._found


class DeviceSwap:
    """The same as `HostSwap` in an accelerator's memory, by a constant number of launches. The table is prepared."""

    def __init__(self, device: Device, table: Table, gains: Values, check: int) -> None:
        self._device = device
        self._table = table
        self.gains = gains
        self.check = check
        self.changed = table.changed
        self.nbytes = table.nbytes

    def exchange(self) -> None:
        """Exchange all values; mutates live memory. Returns once it is launched."""
        self._device.kernels.swap(self._table)

    def found(self) -> int:
        """Return the checksum of what the last exchange found in live memory. Waits for the device."""
        return self._table.check()


Swap = HostSwap | DeviceSwap


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """An exchange of a whole segment with host memory, piece by piece.

    Attributes:
        pieces: Views of live memory, and the new bits on the host, flat, in row-major order. Both are mutated.
        room_2B: Two buffers, each large enough for any piece, on the device of the live memory.
    """

    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    room_2B: torch.Tensor

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(live.numel() for live, _ in self.pieces)

    def exchange(self) -> None:
        """Exchange all pieces; mutates live memory. On an accelerator it may return before that has happened."""
        done = 0
        try:
            for live, source in self.pieces:
                self._exchange(live, source)
                done += 1
        except BaseException:
            for piece in self.pieces[:done]:
                with undoing():
                    self._exchange(*piece)
            raise

    def _exchange(self, live: torch.Tensor, source: torch.Tensor) -> None:
        held, came = (room[: live.nbytes].view(live.dtype).view(live.shape) for room in self.room_2B)
        held.copy_(live)
        try:
            if live.is_contiguous() or live.device.type == "cpu":
                live.copy_(source.view(live.shape), non_blocking=True)
            else:  # to copy there from the host would take memory of the device
                came.copy_(source.view(live.shape), non_blocking=True)
                live.copy_(came)
            source.copy_(held.view(-1), non_blocking=True)
        except BaseException:
            with undoing():
                live.copy_(held)
            raise
