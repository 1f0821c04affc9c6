"""The exchanges of new values with live memory that make up a commit. Each is its own undo log.

A second exchange brings the old values back. An exchange that raises has exchanged nothing, unless it raises CommitError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync.errors import undoing
from deltasync.kernels import native
from deltasync.kernels.table import Table
from deltasync.live.devices import Device, Queue
from deltasync.live.segments import Segment

if TYPE_CHECKING:
    from deltasync.kernels.native import SwapTable


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
        table: See `native.swap_by`.
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
        self._found = native.swap_by(self._table)

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
    """An exchange of whole segments with host memory, piece by piece. Old bits leave while those of the next piece arrive.

    Attributes:
        pieces: Views of live memory, and the new bits on the host, flat, in row-major order. Both are mutated.
        room_RB: Buffers, each large enough for any piece, on the device of the live memory: two, and on an accelerator a
            third, because to copy from the host to memory with gaps would take memory of the device.
        device: The accelerator; None for the host.
    """

    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    room_RB: torch.Tensor
    device: Device | None = None

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(live.numel() for live, _ in self.pieces)

    def exchange(self) -> None:
        """Exchange all pieces; mutates live memory. On an accelerator it may return before that has happened."""
        queues = (Queue(), Queue()) if self.device is None else self.device.queues()
        done = list[tuple[torch.Tensor, torch.Tensor]]()
        try:
            self._exchange(self.pieces, queues, done)
        except BaseException:
            for piece in done:
                with undoing():
                    self._exchange([piece], queues, [])
            raise

    def _exchange(
        self,
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
        queues: tuple[Queue, Queue],
        done: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Exchange pieces, and add each to `done`. Work that follows on the current stream waits for them."""
        arriving, leaving = queues
        marks = [leaving.mark(), leaving.mark()]  # of the pieces before the last and the last one
        try:
            for number, (live, source) in enumerate(pieces):
                held = self._room(number % 2, live)
                arriving.wait(marks[0])  # the room is free again
                arriving.copy(held, live)
                try:
                    if live.is_contiguous() or self.device is None:
                        arriving.copy(live, source.view(live.shape))
                    else:
                        arriving.copy(came := self._room(2, live), source.view(live.shape))
                        arriving.copy(live, came)
                    leaving.wait(arriving.mark())
                    leaving.copy(source, held.view(-1))
                except BaseException:
                    with undoing():
                        arriving.copy(live, held)
                    raise
                marks = [marks[1], leaving.mark()]
                done.append((live, source))
        finally:
            arriving.wait(leaving.mark())

    def _room(self, number: int, live: torch.Tensor) -> torch.Tensor:
        return self.room_RB[number, : live.nbytes].view(live.dtype).view(live.shape)
