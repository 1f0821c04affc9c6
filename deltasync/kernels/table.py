"""Tables of segments in a device's memory. With a table, one launch of a kernel serves any number of segments.

A table has a line for each segment: where its live memory lies, how positions there translate to checkpoint indices and,
where elements are to be written, where their positions and values lie. It also has a row for each program of a kernel: the
segment, and which of its elements. All of this lies in one buffer on the device, which the host fills by one copy.

S segments, R rows, K elements of a segment to write.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from deltasync.errors import StageError
from deltasync.tensors.fingerprint import MASK

DEST, KEY, OFFSET, DIMS, AT, VALUE, ABSOLUTE, LAYOUT = range(8)
"""Columns of a line: address of the live memory, fingerprint key of the tensor, checkpoint index of position 0, number of
dimensions, addresses of the positions and of the values, whether the values are new bits; then the dimensions."""

_MOST_DIMS = 8
COLUMNS = LAYOUT + 3 * _MOST_DIMS
"""Length of a line. A dimension takes three columns: live stride, size, checkpoint stride."""

ROW = 3
"""Length of a row: number of the segment, first element, number of elements."""

SCATTER_BLOCK = 1024
STREAM_BLOCK = 1 << 16
"""Most elements of a row: `SCATTER_BLOCK` of those to write, or `STREAM_BLOCK` of a segment's memory to read."""

ROWS_AT_ONCE = 4096
"""Most rows of one launch outside of a commit's pause: two on each place of a large GPU, so about 0.1 ms."""

_ALIGNED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One segment of a table.

    Attributes:
        key: Fingerprint key of the tensor.
        dest: The live memory, flat, gaps included; a signed view.
        offset, layout: `Segment.offset`, the checkpoint index of the first element, and `Segment.layout()`.
        at_K: Positions in `dest`, distinct; int32 or int64. None for the whole segment.
        value_K: New bits of each position, unsigned, or what to add to the old ones.
        absolute: Whether `value_K` holds new bits.
    """

    key: int
    dest: torch.Tensor
    offset: int
    layout: tuple[tuple[int, int, int], ...]
    at_K: np.ndarray | None = None
    value_K: np.ndarray | None = None
    absolute: bool = True

    @property
    def element_count(self) -> int:
        """Number of elements that a kernel visits."""
        return self.dest.numel() if self.at_K is None else self.at_K.size


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Rows that one launch serves.

    Attributes:
        bits: Bytes of an element.
        at: Bytes of a position; 0 without positions.
        first, last: The first row, and the one past the last.
    """

    bits: int
    at: int
    first: int
    last: int


class Room(Protocol):
    """Allocates the memory of tables."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device."""

    def send(self, host: torch.Tensor, to: torch.Tensor) -> None:
        """Copy bytes to the device, on the current stream. `host` may be dropped after return."""


class Table:
    """Segments of one device, in its memory.

    Args:
        entries: The segments, at least one and none empty. Either all have positions or none has.
        room: Allocates the table, and sends it to the device.

    Attributes:
        entries: The segments, sorted by width of their elements and positions.
        order: Index of each of `entries` among those given.
        first_S: The first row of each of `entries`.
        segment_SC, row_RC: The lines and the rows, on the device.
        sum_2R: Two sums of each row, on the device: what the fingerprint gains, and the checksum of old values.
        kinds: The rows of each launch.
        changed: Number of elements to write.
        nbytes: Bytes on the device.
    """

    def __init__(self, entries: Sequence[Entry], room: Room) -> None:
        kind_S = [(entry.dest.element_size(), 0 if entry.at_K is None else entry.at_K.itemsize) for entry in entries]
        self.order = sorted(range(len(entries)), key=lambda number: kind_S[number])
        self.entries = [entries[number] for number in self.order]
        self._row_R = _rows(self.entries)
        self.first_S = np.searchsorted(self._row_R[:, 0], np.arange(len(entries))).tolist()
        self.kinds = tuple(_kinds([kind_S[number] for number in self.order], self._row_R[:, 0]))
        arrays = [array for entry in self.entries for array in (entry.at_K, entry.value_K) if array is not None]
        sizes = [len(self.entries) * COLUMNS * 8, self._row_R.nbytes, *(array.nbytes for array in arrays)]
        starts = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        sums = starts.pop()
        self.nbytes = sums + 16 * len(self._row_R)
        self.changed = sum(entry.element_count for entry in self.entries if entry.at_K is not None)
        self._buffer = room.allocate(self.nbytes)
        self._starts = starts[2:]
        host = torch.empty(sums, dtype=torch.uint8)
        bytes_ = host.numpy()
        lines = _lines(self.entries, [self._buffer.data_ptr() + start for start in self._starts])
        for start, array in zip(starts, (lines, self._row_R, *arrays), strict=True):
            bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        room.send(host, self._buffer[:sums])
        self.segment_SC = self._view(0, sizes[0], torch.int64)
        self.row_RC = self._view(starts[1], sizes[1], torch.int64).reshape(-1, ROW)
        self.sum_2R = self._view(sums, 16 * len(self._row_R), torch.int64).reshape(2, -1)

    def _view(self, start: int, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self._buffer[start : start + size_bytes].view(dtype)

    def writes(self) -> Iterator[tuple[Entry, torch.Tensor, torch.Tensor]]:
        """Yield each entry with its positions and values on the device; the values are a signed view."""
        for number, entry in enumerate(self.entries):
            assert entry.at_K is not None and entry.value_K is not None
            at, value = self._starts[2 * number : 2 * number + 2]
            at_dtype = torch.int32 if entry.at_K.itemsize == 4 else torch.int64
            yield (
                entry,
                self._view(at, entry.at_K.nbytes, at_dtype),
                self._view(value, entry.value_K.nbytes, entry.dest.dtype),
            )

    def gained(self) -> list[int]:
        """Return what the fingerprint gains by each entry, in the order given. Waits for the device."""
        sum_R = self.sum_2R[0].cpu().numpy().view(np.uint64)
        found = [0] * len(self.entries)
        for number, gained in zip(self.order, np.add.reduceat(sum_R, self.first_S).tolist(), strict=True):
            found[number] = gained
        return found

    def check(self) -> int:
        """Return the checksum of what was in live memory. Waits for the device."""
        # Summed on the host: a device without free memory must not turn an exchange that has ended into an error.
        return int(self.sum_2R[1].cpu().numpy().view(np.uint64).sum(dtype=np.uint64)) & MASK


def _rows(entries: Sequence[Entry]) -> np.ndarray:
    """Return the rows of these entries, int64[R, ROW]."""
    count_S = np.array([entry.element_count for entry in entries], np.int64)
    block_S = np.array([STREAM_BLOCK if entry.at_K is None else SCATTER_BLOCK for entry in entries], np.int64)
    rows_S = -(-count_S // np.maximum(block_S, 1))
    entry_R = np.repeat(np.arange(len(entries)), rows_S)
    start_S = np.cumsum(rows_S) - rows_S
    first_R = (np.arange(entry_R.size) - start_S[entry_R]) * block_S[entry_R]
    return np.stack((entry_R, first_R, np.minimum(block_S[entry_R], count_S[entry_R] - first_R)), axis=1)


def _kinds(kind_S: Sequence[tuple[int, int]], entry_R: np.ndarray) -> Iterator[Kind]:
    for (bits, at), group in itertools.groupby(enumerate(kind_S), key=lambda each: each[1]):
        numbers = [number for number, _ in group]
        first, last = np.searchsorted(entry_R, (numbers[0], numbers[-1] + 1)).tolist()
        yield Kind(bits, at, first, last)


def _lines(entries: Sequence[Entry], addresses: Sequence[int]) -> np.ndarray:
    """Return the lines of these entries, int64[S, COLUMNS]. `addresses` are those of their positions and values, in turn."""
    lines = np.zeros((len(entries), COLUMNS), np.int64)
    for number, entry in enumerate(entries):
        if len(entry.layout) > _MOST_DIMS:
            raise StageError(f"A live tensor has {len(entry.layout)} dimensions, which is more than {_MOST_DIMS}.")
        key = entry.key - (1 << 64) if entry.key >> 63 else entry.key
        places = addresses[2 * number : 2 * number + 2] or (0, 0)
        dims = itertools.chain.from_iterable(entry.layout)
        line = (entry.dest.data_ptr(), key, entry.offset, len(entry.layout), *places, entry.absolute, *dims)
        lines[number, : len(line)] = line
    return lines
