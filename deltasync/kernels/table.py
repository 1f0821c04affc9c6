"""Segments of live memory on a device, as a table in its memory, and changes that are written through it.

A table is made once for a model: a line for each segment says where its live memory lies and how positions in
the vector of `tensors.layout` translate to it. So the launches of a version do not depend on the number of
segments, and nothing of the size of a segment's changes is computed on the host.

S lines, R rows, K changes, V values to write. A row is the work of one program: `line << 32 | block`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from deltasync.errors import StageError
from deltasync.tensors.fingerprint import MASK

Values = tuple[np.ndarray, np.ndarray]
"""Fingerprints of segments, or what is added to them: their numbers, int64, any of them several times, and
uint64.
"""

DEST, KEY, OFFSET, FIRST, SPAN, DIMS, COLUMNS = range(7)
"""Columns of a line: address of the live memory; fingerprint key of the tensor; checkpoint index and position
in the vector of the first element; elements of the live memory, gaps included; number of dimensions, 0 if the
segment is one run."""

MOST_DIMS = 8
"""Most dimensions of a line. It has a triple of each for writing, (checkpoint stride, size, live stride), the
largest checkpoint stride first, and one for reading, (live stride, size, checkpoint stride), the largest live
stride first."""

LOW, COUNT, PLACE, WRITE_COLUMNS = range(4)
"""Columns of what is written to a line: its first change, how many changes lie in its range, and where its
values begin.
"""

GAIN, CHECK, KEPT = range(3)
"""Sums of each line: what its fingerprint gains; the checksum of old values; how many of its changes lie in
the segment.
"""

SCATTER_BLOCK, HOST_BLOCK = 256, 1 << 10
"""Most changes that a row writes, on a device and on the host."""
STREAM_BLOCK = 1 << 14
"""Most elements of a segment's memory that a row reads."""

WRITTEN_AT_ONCE, READ_AT_ONCE = 1 << 21, 1 << 28
"""Most elements of one launch outside of a commit's pause: 0.1 and 0.3 ms of a large GPU, some programs on
each place.
"""

MOST_ELEMENTS = 1 << 31
"""Of a line, so that offsets in it have 32 bits. Larger segments take several."""

_VECTOR_BYTES = 16  # what a thread loads at once from aligned memory


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One segment of a table.

    Attributes:
        key: Fingerprint key of the tensor.
        dest: The live memory, flat, gaps included; a signed view.
        offset: Checkpoint index of the first element.
        first, last: Positions in the vector of the first element and behind the last one; less than 2**32
            apart.
        layout: `Segment.layout()`: (live stride, size, checkpoint stride), the largest live stride first.
        part: The number of the fingerprint that it adds to.
    """

    key: int
    dest: torch.Tensor
    offset: int
    first: int
    last: int
    layout: tuple[tuple[int, int, int], ...]
    part: int = 0

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are one run of positions in the tensor's order."""
        return self.layout in ((), ((1, self.dest.numel(), 1),))

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return runs of consecutive checkpoint elements: first indices, int64[R], and bit patterns, [R, L];
        on the host.
        """
        order = sorted(self.layout, key=lambda dim: -dim[2])
        ends_in_run = bool(order) and order[-1][2] == 1
        start_R = np.full(1, self.offset, np.int64)
        for _, size, stride in order[: -1 if ends_in_run else None]:
            start_R = (start_R[:, None] + np.arange(size) * stride).reshape(-1)
        held = self.dest.as_strided(
            [size for _, size, _ in order], [live_stride for live_stride, *_ in order]
        )
        bits: np.ndarray = held.contiguous().numpy()
        return start_R, bits.view(f"u{bits.itemsize}").reshape(
            start_R.size, order[-1][1] if ends_in_run else 1
        )

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether it is not contiguous, and whether a thread cannot load several elements at once."""
        return not self.is_contiguous, bool(self.dest.data_ptr() % _VECTOR_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows that read whole lines, on the device.

    Attributes:
        row_R: The rows.
        kinds: Which launches they take: kind of the lines, first row, and the one past the last.
        lines: The numbers of the lines.
        at_once: Rows of one launch.
    """

    row_R: torch.Tensor
    kinds: tuple[tuple[tuple[bool, bool], int, int], ...]
    lines: np.ndarray
    at_once: int


def at_once(rows: int, elements: int, most: int) -> int:
    """Return how many rows one launch takes outside of a pause: launches depend on the elements, not on the
    segments.
    """
    return -(-rows // max(1, -(-elements // most))) or 1


class SegmentKernels(Protocol):
    """The kernels for live memory on a device. With Triton, any number of segments takes the same number of
    launches.
    """

    def prepare(self, of: Writes) -> None:
        """Turn steps into new bits, without writing live memory.

        The sums become what the writes will add to fingerprints, and the checksum that `swap` will find.
        """

    def swap(self, of: Writes) -> None:
        """Exchange values with live memory; a second call restores everything.

        This may return once the kernel is launched. If it raises, live memory is unchanged, unless it raises
        CommitError.
        """

    def fingerprint(self, of: Table, rows: Rows, gain_S: torch.Tensor) -> None:
        """Sum the fingerprints of all elements of some lines into `gain_S`, int64 by line; those of others
        become 0.
        """

    def warm_up(self, room: Room, dtype: torch.dtype) -> None:
        """Compile the kernels for signed views of this dtype, so that no commit waits for the compiler."""


class Room(Protocol):
    """Where the memory of tables is."""

    @property
    def is_host(self) -> bool:
        """Whether it is host memory that no device has."""

    @property
    def kernels(self) -> SegmentKernels:
        """The kernels of this memory: C on the host, Triton or torch's operations on a device."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device."""

    def send(self, pairs: Iterable[tuple[np.ndarray, torch.Tensor]]) -> None:
        """Copy arrays to the device, on the current stream; integers keep their lower bits. The arrays may be
        dropped.
        """


class Table:
    """Segments of one device and element width, in its memory.

    Args:
        lines: The segments, at least one and none empty.
        room: Where it is.

    Attributes:
        lines: The segments; those of one kind follow each other.
        width: Bytes of an element.
        part_S: `Line.part` of each.
        limit_L: The first and last positions of all lines, ascending, each once; `bounds` takes the changes
            below them.
        limit_there_L: The same, on the device.
        line_SC, dim_S2D3: The table, on the device.
        whole: The rows that read all of it.
        nbytes: Bytes on the device.
    """

    def __init__(self, lines: Sequence[Line], room: Room) -> None:
        self.lines = sorted(lines, key=lambda line: line.kind)
        self.width = self.lines[0].dest.element_size()
        self.dtype = self.lines[0].dest.dtype
        self.part_S = np.array([line.part for line in self.lines], np.int64)
        line_SC, dim_S2D3 = _described(self.lines)
        self._span_S = line_SC[:, SPAN]
        self.contiguous_S = line_SC[:, DIMS] == 0
        self._kinds = [line.kind for line in self.lines]
        limit_2S = np.array(
            [[line.first for line in self.lines], [line.last for line in self.lines]], np.int64
        )
        self.limit_L, place = np.unique(limit_2S, return_inverse=True)
        self._limit_2S = place.reshape(limit_2S.shape)
        self.room = room
        self.line_SC, self.dim_S2D3, self.limit_there_L = self.sent(line_SC, dim_S2D3, self.limit_L)
        self.whole = self.rows(np.arange(len(self.lines)))
        self.nbytes = self.line_SC.nbytes + self.dim_S2D3.nbytes + self.whole.row_R.nbytes

    def sent(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Return copies on the device of host arrays of int64."""
        host = np.concatenate([array.reshape(-1) for array in arrays])
        to = self.empty((host.shape, torch.int64))[0]
        self.room.send([(host, to)])
        end_A = np.cumsum([array.size for array in arrays]).tolist()
        return [
            to[end - array.size : end].view(array.shape) for end, array in zip(end_A, arrays, strict=True)
        ]

    def empty(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Return new tensors on the device, of these shapes and dtypes, in one allocation."""
        bytes_W = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in wanted]
        start_W = np.cumsum([0, *(-(-size // _VECTOR_BYTES) * _VECTOR_BYTES for size in bytes_W)]).tolist()
        memory = self.room.allocate(max(_VECTOR_BYTES, start_W[-1]))
        spans = zip(start_W[:-1], bytes_W, wanted, strict=True)
        return [memory[start : start + size].view(dtype).view(shape) for start, size, (shape, dtype) in spans]

    def crossed(self, *arrays: tuple[np.ndarray, torch.dtype]) -> list[torch.Tensor]:
        """Return copies on the device of host arrays of integers, which keep the lower bits that these dtypes
        have.
        """
        found = self.empty(*((array.shape, dtype) for array, dtype in arrays))
        self.room.send((array, to) for (array, _), to in zip(arrays, found, strict=True))
        return found

    def bounds(self, below_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many changes are before each line and how many in its range, from those below each of
        `limit_L`.
        """
        low_S, high_S = below_L[self._limit_2S]
        return low_S, high_S - low_S

    def rows(self, lines: np.ndarray) -> Rows:
        """Return the rows that read these lines, whose numbers ascend."""
        row_R, end_L = _rows(lines, -(-self._span_S[lines] // STREAM_BLOCK))
        kinds, first = list[tuple[tuple[bool, bool], int, int]](), 0
        for number, end in zip(lines.tolist(), end_L.tolist(), strict=True):
            if kinds and kinds[-1][0] == self._kinds[number]:
                kinds[-1] = (kinds[-1][0], kinds[-1][1], end)
            else:
                kinds.append((self._kinds[number], first, end))
            first = end
        at_once_ = at_once(row_R.size, int(self._span_S[lines].sum()), READ_AT_ONCE)
        return Rows(self.sent(row_R)[0], tuple(kinds), lines, at_once_)


class Writes:
    """Changes of one version, to be written to the lines of a table: an exchange, which is its own undo log.

    Args:
        table: The table.
        low_K: The lower 32 bits of positions in the vector, int32, on the device. Those of a line follow each
            other, each once.
        step_K: New minus old bits, a signed view, on the device.
        low_S, count_S: The first change of each line, and how many there are in its range.
        mutates: Whether the values may take the place of `step_K`.

    Attributes:
        value_V: New bits once it is prepared, on the device; old ones after an exchange.
        block: Most changes of a row.
        write_SC, row_R: The lines and rows, on the device; those of contiguous lines first.
        contiguous_rows: How many those are.
        at_once: Rows of one launch outside of a pause.
        sum_3S: The sums of each line, on the device.
        nbytes: Bytes on the device, until the commit is confirmed.
        changed: Number of elements that are written, once it is prepared, as the next two.
        gains: Numbers of segments, and what each one's fingerprint gains by the first exchange.
        check: What `found` returns after the first exchange, unless live memory was written since it was
            prepared.
    """

    def __init__(
        self,
        table: Table,
        low_K: torch.Tensor,
        step_K: torch.Tensor,
        low_S: np.ndarray,
        count_S: np.ndarray,
        *,
        mutates: bool = False,
    ) -> None:
        self.table, self.low_K, self.step_K = table, low_K, step_K
        self._touched = np.flatnonzero(count_S)
        self.write_SC_host = np.stack((low_S, count_S, np.cumsum(count_S) - count_S), axis=1)
        in_place = mutates and (self.write_SC_host[self._touched, PLACE] == low_S[self._touched]).all()
        values = 0 if in_place else int(count_S.sum())
        self.sum_3S, value_V = table.empty(((3, len(table.lines)), torch.int64), ((values,), step_K.dtype))
        self.value_V = step_K if in_place else value_V
        self.block = HOST_BLOCK if table.room.is_host else SCATTER_BLOCK
        row_R, _ = _rows(self._touched, -(-count_S[self._touched] // self.block))
        self.contiguous_rows = int(np.searchsorted(row_R, int(table.contiguous_S.sum()) << 32))
        self.write_SC, self.row_R = table.sent(self.write_SC_host, row_R)
        self.at_once = at_once(row_R.size, int(count_S.sum()), WRITTEN_AT_ONCE)
        self.changed = self.check = 0
        self.gains: Values = np.empty(0, np.int64), np.empty(0, np.uint64)
        self.nbytes = sum(
            each.nbytes for each in (low_K, self.value_V, self.write_SC, self.row_R, self.sum_3S)
        )

    def prepare(self) -> None:
        """Turn steps into new bits, without writing live memory. Waits for the device. The steps are
        dropped.
        """
        self.table.room.kernels.prepare(self)
        sum_3S = self.sum_3S.cpu().numpy()
        count_S = np.where(self.table.contiguous_S, self.write_SC_host[:, COUNT], sum_3S[KEPT])
        self.changed, self.check = int(count_S.sum()), _total(sum_3S[CHECK])
        del self.step_K
        self.gains = self.table.part_S[self._touched], sum_3S[GAIN, self._touched].view(np.uint64)

    def exchange(self) -> None:
        """Exchange all values; mutates live memory. Returns once it is launched. If it raises, nothing was
        exchanged.
        """
        self.table.room.kernels.swap(self)

    def found(self) -> int:
        """Return the checksum of what the last exchange found in live memory. Waits for the device."""
        # Summed on the host: a device without free memory must not turn an exchange that has ended into an
        # error.
        return _total(self.sum_3S[CHECK].cpu().numpy())


def _total(sum_S: np.ndarray) -> int:
    return int(sum_S.view(np.uint64).sum(dtype=np.uint64)) & MASK


def _rows(lines: np.ndarray, blocks_L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of so many blocks of each line, int64[R], and where the rows of each line end."""
    end_L = np.cumsum(blocks_L)
    row_R = np.repeat((lines << 32) - (end_L - blocks_L), blocks_L) + np.arange(
        end_L[-1] if end_L.size else 0
    )
    return row_R, end_L


def _described(lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of these lines, int64[S, COLUMNS], and their dimensions, int64[S or 1, 2, MOST_DIMS,
    3].
    """
    line_SC = np.zeros((len(lines), COLUMNS), np.int64)
    strided = [number for number, line in enumerate(lines) if not line.is_contiguous]
    dims_S2D3 = np.zeros((len(lines) if strided else 1, 2, MOST_DIMS, 3), np.int64)
    for number, line in enumerate(lines):
        key = line.key - (1 << 64) if line.key >> 63 else line.key
        line_SC[number, :DIMS] = line.dest.data_ptr(), key, line.offset, line.first, line.dest.numel()
    for number in strided:
        layout = lines[number].layout
        if len(layout) > MOST_DIMS:
            raise StageError(f"A live tensor has {len(layout)} dimensions, which is more than {MOST_DIMS}.")
        line_SC[number, DIMS] = len(layout)
        writing = sorted(((stride, size, live) for live, size, stride in layout), reverse=True)
        dims_S2D3[number, 0, : len(layout)], dims_S2D3[number, 1, : len(layout)] = writing, layout
    return line_SC, dims_S2D3
