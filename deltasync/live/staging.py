"""STAGE: turn decoded changes into exchanges, on the device of the live memory that they change.

Steps become new values at positions, through a table of segments that is made once for a model. Full weights
are compared with live memory. Where little differs they become positions and values too; otherwise they stay
on the host until the commit copies them, so that a device needs room for a few pieces and not for a second
model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from deltasync.gpu.delta import DeviceSparse, search
from deltasync.gpu.devices import Chunk, Device, copiers
from deltasync.kernels import native
from deltasync.kernels.table import MOST_ELEMENTS, Line, Rows, Table, Values, Writes
from deltasync.live.exchange import Copy, Piece
from deltasync.live.segments import Segment, unsigned
from deltasync.tensors import Sparse, count_below, region_end
from deltasync.tensors.bits import signed_view

if TYPE_CHECKING:
    from deltasync.gpu.codec import Decoded

Steps = tuple[torch.Tensor, torch.Tensor]
"""Positions in the vector, of which 32 bits count, and steps of what differs."""

_HOST_PIECE_BYTES = 4 << 20
_DEVICE_PIECE_BYTES = 16 << 20
_DIFFERING_BYTES = 64 << 20
"""Most bytes, on a device, of the positions and values of full weights. Segments beyond that are copied."""

_JOB_BYTES = 4 << 20
"""Fewest bytes of full weights that a thread copies at once; pieces of small tensors are joined."""

_JOBS = 32
"""Most of those that are under way."""

_ALIGNED = 16  # bytes
_COUNTS = 4096  # pieces whose counts are allocated at once
_FEW = 8  # full weights are exchanged by elements if at most one in this many differs, in each piece


Digests = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The fingerprints that a version says its tensors have: numbers of the tensors, in the order of the memory's
table; the fingerprints, uint64; and whether the version says one, as only the model's is known otherwise."""


def digests_of(number: Mapping[str, int], fingerprints: Mapping[str, int | None]) -> Digests:
    """Return those of tensors by name, whose numbers are given."""
    values = list(fingerprints.values())
    found = np.array([0 if value is None else value for value in values], np.uint64)
    tensors = np.fromiter(map(number.__getitem__, fingerprints), np.int64, len(values))
    return tensors, found, np.array([value is not None for value in values], bool)


@dataclasses.dataclass(slots=True)
class Staged:
    """One version, ready to commit; from the commit on, what undoes it.

    Attributes:
        swaps, copies: Values to write; after the commit, the old values.
        readouts: Each returns the fingerprints of copied segments.
        fingerprints: The fingerprint that each tensor of the version must have after the commit; None where
            only the model's is known.
        digests: The same as arrays.
        before_P: After the commit, the fingerprint of each segment before it.
        scatter_s: Seconds during which the commit was writing live weights.
    """

    swaps: list[Writes] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)
    readouts: list[Callable[[], Values]] = dataclasses.field(default_factory=list)
    fingerprints: dict[str, int | None] = dataclasses.field(default_factory=dict)
    digests: Digests | None = None
    before_P: np.ndarray | None = None
    scatter_s: float = 0.0

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        return sum(swap.changed for swap in self.swaps) + sum(copy.changed for copy in self.copies)

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes beside the live weights, on their device, until the commit is confirmed."""
        return sum(swap.nbytes for swap in self.swaps) + sum(copy.nbytes for copy in self.copies)


class Held(NamedTuple):
    """A segment: its number among all of the memory; fingerprint key and first position of the tensor."""

    part: int
    key: int
    first: int
    segment: Segment


class Places:
    """The segments of one vector on one device, or on the host, in one table.

    Attributes:
        device: The device.
        table: The table.
        segments: The segments, pieces of large ones, in the order of the table's lines.
        lines: Numbers of the lines of each segment.

    Raises:
        StageError: a segment overlaps itself or has too many dimensions, or the device has too little memory.
    """

    def __init__(self, device: Device, first_T: np.ndarray, held: Sequence[Held]) -> None:
        self.device = device
        pieces = [(each, piece) for each in held for piece in each.segment.pieces(MOST_ELEMENTS)]
        found = [(self._line(each, piece), piece) for each, piece in pieces]
        found.sort(key=lambda each: each[0].kind)
        self.segments = [piece for _, piece in found]
        with device.staging():
            self.table = Table([line for line, _ in found], device)
            (self._limit_L,) = self.table.sent(self.table.limit_L)
            (self._sum_S,) = self.table.empty(((len(found),), torch.int64))
        at_L = np.searchsorted(first_T, self.table.limit_L)
        # Where segments are whole tensors, changes before them follow from those of each tensor.
        self._edge_L = at_L if (first_T[at_L] == self.table.limit_L).all() else None
        self.lines: dict[int, list[int]] = {}
        for number, part in enumerate(self.table.part_S.tolist()):
            self.lines.setdefault(part, []).append(number)

    @staticmethod
    def _line(held: Held, piece: Segment) -> Line:
        last = held.first + region_end(piece.region())
        return Line(
            held.key, piece.flat(), piece.offset, held.first + piece.offset, last, piece.layout(), held.part
        )

    def fingerprints(self) -> Values:
        """Return the fingerprints of all segments, out of live memory."""
        return self._read(self.table.whole)

    def readout(self, parts: Sequence[int]) -> Callable[[], Values]:
        """Return a function that reads the fingerprints of these segments. All that it needs is allocated
        now.
        """
        lines = np.array(sorted(line for part in parts for line in self.lines[part]), np.int64)
        with self.device.staging():
            rows = self.table.rows(lines)
        return functools.partial(self._read, rows)

    def _read(self, rows: Rows) -> Values:
        self.device.kernels.fingerprint(self.table, rows, self._sum_S)
        value_S = self._sum_S.cpu().numpy().view(np.uint64)
        return self.table.part_S[rows.lines], value_S[rows.lines]

    @property
    def are_whole(self) -> bool:
        """Whether each segment is a whole tensor, in its order."""
        return self._edge_L is not None and bool(self.table.contiguous_S.all())

    def swap(
        self, steps: Sparse | DeviceSparse | Decoded, ready: torch.cuda.Event | None = None
    ) -> Writes | None:
        """Return the exchange of what steps change in these segments, prepared; None for nothing.

        `ready` is the event that steps on the device wait for. They are not mutated, but those of a decoder
        are: only its caller has them.
        """
        table = self.table
        if isinstance(steps, DeviceSparse) and steps.low_K.device != self.device.device:
            steps = steps.host(np.dtype(np.int64))
        mutates = not isinstance(steps, DeviceSparse)
        with self.device.staging():
            self.device.wait(ready)
            if not isinstance(steps, Sparse):
                low_K, step_K = steps.low_K.view(torch.int32), steps.step_K.view(table.dtype)
                below_L = self._below(steps)
            elif self.device.is_host:
                low_K, step_K = (
                    signed_view(steps.at_K.astype(np.int32, copy=False)),
                    signed_view(steps.data_K),
                )
                mutates = False
                below_L = count_below(steps.at_K, table.limit_L)
            else:
                low_K, step_K = table.crossed((steps.at_K, torch.int32), (steps.data_K, table.dtype))
                below_L = self._searched(steps.at_K, low_K)
            low_S, count_S = table.bounds(below_L)
            if not count_S.any():
                return None
            writes = Writes(table, low_K, step_K, low_S, count_S, mutates=mutates)
            writes.prepare()
            return writes

    def _searched(self, at_K: np.ndarray, low_K: torch.Tensor) -> np.ndarray:
        """Return the same of positions on the host, whose lower halves are on the device and searched there.

        Halves ascend from one multiple of 2**32 to the next. A search through the host's memory would take 10
        ms.
        """
        limit_L = self.table.limit_L
        turn = count_below(at_K, np.arange(int(limit_L[-1] >> 32) + 1, dtype=np.int64) << 32)
        edges = np.append(turn, at_K.size)
        low_L, high_L, wanted_L = self.table.sent(
            edges[limit_L >> 32], edges[(limit_L >> 32) + 1], limit_L & 0xFFFFFFFF
        )
        found_L = search(
            low_K, low_L, high_L, at_K.size, lambda found_LP: (found_LP & 0xFFFFFFFF) < wanted_L[:, None]
        )
        below: np.ndarray = found_L.cpu().numpy()
        return below

    def _below(self, steps: DeviceSparse | Decoded) -> np.ndarray:
        """Return how many changes there are before each limit of the table."""
        if self._edge_L is not None:
            below: np.ndarray = np.append(0, np.cumsum(steps.count_T))[self._edge_L]
            return below
        assert isinstance(steps, DeviceSparse), "steps of a decoder are for whole tensors"
        below = steps.count_below(self._limit_L).cpu().numpy()
        return below


class _Pinned(NamedTuple):
    """A part of a line's segment, and its new bits in pinned memory, flat, in row-major order."""

    places: Places
    line: int
    segment: Segment
    new_N: torch.Tensor


class Staging:
    """Collects full weights for the memory of one device, and compares them with it there.

    Threads copy them into pinned memory while those before cross; the host waits for the device once, in
    `finish`. In host memory each segment is compared at once, and only copied where much of it differs.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._chunks: list[Chunk] = []
        self._left_B = torch.empty(0, dtype=torch.uint8, device="cpu")  # of the last chunk
        self._pieces: list[_Pinned] = []
        self._job: list[tuple[np.ndarray, np.ndarray]] = []
        self._job_bytes = self._compared = 0
        self._jobs: deque[tuple[Future[None], int]] = deque()  # and behind which piece each ends
        # of differing elements, on the device, of `_COUNTS` pieces each
        self._counts: list[torch.Tensor] = []
        # the line, how many differ, and which
        self._few: list[tuple[Places, int, int, Callable[[], Steps]]] = []
        self._copied: list[tuple[Places, int, list[Piece]]] = []  # and the line
        if not device.is_host:
            with device.staging():
                self._room = device.allocate(2 * _DEVICE_PIECE_BYTES).view(2, -1)

    def whole(self, places: Places, part: int, bits_N: np.ndarray) -> None:
        """Add a whole tensor's new bits, of which a segment has a share. They must stay as they are until
        `finish`.
        """
        for line in places.lines[part]:
            segment = places.segments[line]
            if self._device.is_host:
                self._compare_here(places, line, segment, bits_N)
                continue
            for piece in segment.pieces(_DEVICE_PIECE_BYTES // places.table.width):
                new_N = self._pinned(piece.live.nbytes).view(piece.live.dtype)
                self._pieces.append(_Pinned(places, line, piece, new_N))
                self._job.append((new_N.numpy(), _source(piece, bits_N)))
                self._job_bytes += new_N.nbytes
                if self._job_bytes >= _JOB_BYTES:
                    self._submit()

    def _compare_here(self, places: Places, line: int, segment: Segment, bits_N: np.ndarray) -> None:
        whole = signed_view(np.require(bits_N, requirements="W"))  # torch takes no array that is read-only
        new_N, old_N = (
            unsigned(view.contiguous().view(-1)) for view in (segment.source(whole), segment.live)
        )
        at_K, step_K = native.diff(old_N, new_N)
        if at_K.size <= new_N.size // _FEW:
            position_K = _positions(
                places.table.lines[line], segment, torch.from_numpy(at_K.astype(np.int64))
            )
            self._few += (
                [(places, line, at_K.size, lambda: (position_K, signed_view(step_K)))] if at_K.size else []
            )
            return
        pieces, rows = segment.pieces(_HOST_PIECE_BYTES // places.table.width), torch.contiguous_format
        held: list[Piece] = [
            (p.live, p.source(whole).clone(memory_format=rows).view(-1), None) for p in pieces
        ]
        self._copied.append((places, line, held))

    def _pinned(self, size_bytes: int) -> torch.Tensor:
        taken = -(-size_bytes // _ALIGNED) * _ALIGNED
        if self._left_B.numel() < taken:
            self._chunks.append(self._device.chunk())
            self._left_B = self._chunks[-1].bytes_B
        found, self._left_B = self._left_B[:size_bytes], self._left_B[taken:]
        return found

    def _submit(self) -> None:
        if self._job:
            self._jobs.append((copiers().submit(_copy, self._job), len(self._pieces)))
            self._job, self._job_bytes = [], 0
        if len(self._jobs) >= _JOBS:
            self._compare()

    def _compare(self) -> None:
        """Compare the pieces of the oldest job with live memory, and count what differs, without a wait."""
        copied, last = self._jobs.popleft()
        copied.result()
        with self._device.staging(wait=False):
            for number in range(self._compared, last):
                if number % _COUNTS == 0:
                    self._counts.append(self._device.allocate(8 * _COUNTS).view(torch.int64))
                differs, _ = self._differs(self._pieces[number])
                torch.sum(differs.view(-1), 0, dtype=torch.int64, out=self._counts[-1][number % _COUNTS])
        self._compared = last

    def _differs(self, piece: _Pinned) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which elements of a piece differ, and its new bits, on the device until the next call."""
        live = piece.segment.live
        came = self._room[0, : live.nbytes].view(live.dtype).view(live.shape)
        differs = self._room[1, : live.numel()].view(torch.bool).view(live.shape)
        came.copy_(piece.new_N.view(live.shape), non_blocking=True)
        torch.ne(live, came, out=differs)
        return differs, came

    def finish(self, staged: Staged) -> None:
        """Add what was collected to `staged`."""
        self._submit()
        while self._jobs:
            self._compare()
        with self._device.staging():
            self._divide()
            self._add_elements(staged)
            self._add_copies(staged)

    def _divide(self) -> None:
        """Divide the pieces that crossed into those of which little differs, in each piece of a segment, and
        the others.
        """
        counts = (each[: self._compared - at * _COUNTS].cpu().numpy() for at, each in enumerate(self._counts))
        count_P, few_bytes = np.concatenate([*counts, np.zeros(0, np.int64)]), 0
        parts = [piece.places.table.lines[piece.line].part for piece in self._pieces]
        for first, last in _spans(parts):
            held, count = self._pieces[first:last], int(count_P[first:last].sum())
            size_bytes = count * (4 + held[0].places.table.width)
            counted = [(piece, int(n)) for piece, n in zip(held, count_P[first:last], strict=True) if n]
            is_few = all(n <= piece.new_N.numel() // _FEW for piece, n in counted)
            if is_few and few_bytes + size_bytes <= _DIFFERING_BYTES:
                few_bytes += size_bytes
                self._few += [(p.places, p.line, n, functools.partial(self._steps, p)) for p, n in counted]
            else:
                self._copied += [
                    (p.places, p.line, [(p.segment.live, p.new_N, self._saved(p))]) for p, _ in counted
                ]

    def _steps(self, piece: _Pinned) -> Steps:
        differs, came = self._differs(piece)
        position_K = _positions(
            piece.places.table.lines[piece.line], piece.segment, differs.view(-1).nonzero().view(-1)
        )
        return position_K, came.masked_select(differs) - piece.segment.live.masked_select(differs)

    def _saved(self, piece: _Pinned) -> torch.Tensor:
        """Return the old bits of a piece, saved on the host now: only new ones cross in the pause."""
        live, old_N = piece.segment.live, self._pinned(piece.new_N.nbytes).view(piece.new_N.dtype)
        held = live
        if not live.is_contiguous():
            held = self._room[0, : live.nbytes].view(live.dtype).view(live.shape).copy_(live)
        old_N.view(live.shape).copy_(held, non_blocking=True)
        return old_N

    def _add_elements(self, staged: Staged) -> None:
        """Add what little differs, as positions and steps; on a device each piece takes a wait for it."""
        by_table: dict[int, list[tuple[Places, int, int, Callable[[], Steps]]]] = {}
        for each in self._few:
            by_table.setdefault(id(each[0]), []).append(each)
        for held in by_table.values():
            held.sort(key=lambda each: each[1])
            table = held[0][0].table
            count_S = np.zeros(len(table.lines), np.int64)
            total = sum(count for *_, count, _ in held)
            low_K, step_K = table.empty(((total,), torch.int32), ((total,), table.dtype))
            done = 0
            for _, line, count, steps in held:
                here = slice(done, done + count)
                low_K[here], step_K[here] = steps()
                count_S[line] += count
                done += count
            writes = Writes(table, low_K, step_K, np.cumsum(count_S) - count_S, count_S, mutates=True)
            writes.prepare()
            staged.swaps.append(writes)

    def _add_copies(self, staged: Staged) -> None:
        if not self._copied:
            return
        pieces = [piece for *_, held in self._copied for piece in held]
        if self._device.is_host:  # a room for any piece, where elements of any width begin
            self._room = torch.empty(
                (1, -(-max(live.nbytes for live, *_ in pieces) // 8) * 8), dtype=torch.uint8, device="cpu"
            )
        staged.copies.append(Copy(pieces, self._room[0], self._chunks))
        parts: dict[int, tuple[Places, set[int]]] = {}
        for places, line, _ in self._copied:
            parts.setdefault(id(places), (places, set()))[1].add(places.table.lines[line].part)
        staged.readouts += [places.readout([*held]) for places, held in parts.values()]


def _positions(line: Line, segment: Segment, number_K: torch.Tensor) -> torch.Tensor:
    """Return positions of elements of a part of a line's segment, which are numbered in row-major order."""
    position_K = torch.full_like(number_K, line.first - line.offset + segment.offset)
    for size, stride in zip(reversed(segment.live.shape), reversed(segment.stride), strict=True):
        position_K += number_K % size * stride
        number_K = number_K // size
    return position_K


def _copy(job: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for to_N, source in job:
        np.copyto(to_N.reshape(source.shape), source)


def _source(piece: Segment, bits_N: np.ndarray) -> np.ndarray:
    """Return a segment's view of a whole tensor's flat unsigned bits, as signed integers; it is only read."""
    signed_N = bits_N.view(f"i{bits_N.itemsize}")
    strides = [stride * bits_N.itemsize for stride in piece.stride]
    if not piece.live.numel():
        return signed_N[:0]
    return np.lib.stride_tricks.as_strided(
        signed_N[piece.offset :], tuple(piece.live.shape), strides, writeable=False
    )


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of equal numbers begins and ends."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[first]:
            yield first, at
            first = at


def differs(device: Device, segment: Segment, whole: torch.Tensor) -> bool:
    """Whether any bit of a segment differs from a whole tensor's, on any device; compared where the segment
    is.
    """
    if device.is_host:
        return not torch.equal(segment.source(whole).cpu(), segment.live)
    with device.staging():
        room = device.allocate(_DEVICE_PIECE_BYTES)
        for piece in segment.pieces(_DEVICE_PIECE_BYTES // segment.live.element_size()):
            came = room[: piece.live.nbytes].view(piece.live.dtype).view(piece.live.shape)
            came.copy_(piece.source(whole))
            if not torch.equal(piece.live, came):
                return True
    return False
