"""The exchanges of new values with live memory that make up a commit. Each is its own undo log.

A second exchange brings the old values back. An exchange that raises has exchanged nothing, unless it raises CommitError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from deltasync.errors import undoing
from deltasync.kernels import native
from deltasync.kernels.table import Writes
from deltasync.live.devices import Chunk, Device
from deltasync.live.segments import Segment

if TYPE_CHECKING:
    from deltasync.kernels.native import SwapTable


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A segment to write or to read.

    Attributes:
        name: The tensor.
        part: Number of the segment among all of the memory, which is that of its fingerprint.
        segment: The segment.
        key: Fingerprint key of the tensor.
    """

    name: str
    part: int
    segment: Segment
    key: int


class Values(NamedTuple):
    """Fingerprints of segments, or what an exchange adds to them.

    Attributes:
        part_M: Numbers of the segments, int64; a segment may occur several times.
        value_M: To be added up, uint64.
    """

    part_M: np.ndarray
    value_M: np.ndarray


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
    """The same as `HostSwap` in an accelerator's memory, by one launch. Preparing it reads live memory."""

    def __init__(self, device: Device, writes: Writes) -> None:
        self._device = device
        self._writes = writes
        device.kernels.prepare(writes)
        part_M, value_M, self.check = writes.prepared()
        self.gains = Values(part_M, value_M)
        self.changed = writes.changed
        self.nbytes = writes.nbytes

    def exchange(self) -> None:
        """Exchange all values; mutates live memory. Returns once it is launched."""
        self._device.kernels.swap(self._writes)

    def found(self) -> int:
        """Return the checksum of what the last exchange found in live memory. Waits for the device."""
        return self._writes.check()


Swap = HostSwap | DeviceSwap


@dataclasses.dataclass(frozen=True, slots=True)
class HostCopy:
    """An exchange of whole segments in host memory, piece by piece.

    Attributes:
        pieces: Views of live memory, and the new bits, flat, in row-major order. Both are mutated.
        room_B: A buffer that is large enough for any piece.
    """

    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    room_B: torch.Tensor

    @property
    def changed(self) -> int:
        """Number of elements."""
        return sum(live.numel() for live, _ in self.pieces)

    @property
    def device_bytes(self) -> int:
        """Bytes beside the live weights, on their device, until the commit is confirmed."""
        return self.room_B.nbytes

    def exchange(self) -> None:
        """Exchange all pieces; mutates live memory."""
        done = list[tuple[torch.Tensor, torch.Tensor]]()
        try:
            for live, source in self.pieces:
                self._exchange(live, source)
                done.append((live, source))
        except BaseException:
            with undoing():
                for live, source in done:
                    self._exchange(live, source)
            raise

    def _exchange(self, live: torch.Tensor, source: torch.Tensor) -> None:
        held = self.room_B[: live.nbytes].view(live.dtype).view(live.shape)
        held.copy_(live)
        try:
            live.copy_(source.view(live.shape))
            source.copy_(held.view(-1))
        except BaseException:
            with undoing():
                live.copy_(held)
            raise


class DeviceCopy:
    """Copies whole segments from host memory to an accelerator. Their old bits were saved on the host before the pause.

    Args:
        pieces: Views of live memory, and on the host their new and their old bits, flat, in row-major order.
        room_B: A buffer on the device, large enough for any piece: to copy to memory with gaps would take memory.
        chunks: The host's memory.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        room_B: torch.Tensor,
        chunks: Sequence[Chunk],
    ) -> None:
        self._pieces, self._room_B, self._chunks = pieces, room_B, chunks
        self._is_new = False  # whether the new bits are live
        self.changed = sum(live.numel() for live, *_ in pieces)
        self.device_bytes = room_B.nbytes

    def exchange(self) -> None:
        """Write the new bits; the next time the old ones; mutates live memory. Returns once it is launched."""
        try:
            self._write(not self._is_new)
        except BaseException:
            with undoing():
                self._write(self._is_new)
            raise
        self._is_new = not self._is_new

    def _write(self, new: bool) -> None:
        for live, new_N, old_N in self._pieces:
            bits = (new_N if new else old_N).view(live.shape)
            if not live.is_contiguous():
                came = self._room_B[: live.nbytes].view(live.dtype).view(live.shape)
                bits = came.copy_(bits, non_blocking=True)
            live.copy_(bits, non_blocking=True)


Copy = HostCopy | DeviceCopy
