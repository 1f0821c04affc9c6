"""STAGE: turn decoded changes into exchanges, on the device of the live memory that they change.

Steps become new values at positions, through a table of segments that is made once for a model. Full weights are compared
with live memory. Where little differs they become positions and values too; otherwise they stay on the host until the commit
copies them, so that a device needs room for a few pieces and not for a second model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from deltasync.errors import StageError
from deltasync.kernels import native
from deltasync.kernels.table import MOST_DIMS, MOST_ELEMENTS, Line, Rows, Table, Writes
from deltasync.live.devices import Chunk, Device, copiers
from deltasync.live.exchange import Copy, DeviceCopy, DeviceSwap, HostCopy, HostSwap, Swap, Target, Values
from deltasync.live.segments import Segment, unsigned
from deltasync.tensors import Sparse, Vector, count_below, fingerprint, index_dtype, region_end
from deltasync.tensors.bits import signed_view
from deltasync.tensors.device import DeviceSparse, search

if TYPE_CHECKING:
    from deltasync.kernels.native import SwapTable

_HOST_PIECE_BYTES = 4 << 20
_DEVICE_PIECE_BYTES = 16 << 20
_DIFFERING_BYTES = 64 << 20
"""Most bytes, on a device, of the positions and values of full weights. Segments beyond that are copied."""

_JOB_BYTES = 4 << 20
"""Fewest bytes of full weights that a thread copies at once; pieces of small tensors are joined."""

_JOBS = 32
"""Most of those that are under way."""

_ALIGNED = 16  # bytes
_ROWS = torch.contiguous_format
_COUNTS = 4096  # pieces whose counts are allocated at once
_FEW = 8  # full weights are exchanged by elements if at most one in this many differs, in each piece


class Digests(NamedTuple):
    """The fingerprints that a version says its tensors have.

    Attributes:
        tensor_F: Numbers of the tensors, in the order of the memory's table.
        value_F: The fingerprints, uint64.
        known_F: Whether the version says one; only the model's is known otherwise.
    """

    tensor_F: np.ndarray
    value_F: np.ndarray
    known_F: np.ndarray

    @classmethod
    def of(cls, number: Mapping[str, int], fingerprints: Mapping[str, int | None]) -> Digests:
        """Return those of tensors by name, whose numbers are given."""
        values = list(fingerprints.values())
        found = np.array([0 if value is None else value for value in values], np.uint64)
        tensors = np.fromiter(map(number.__getitem__, fingerprints), np.int64, len(values))
        return cls(tensors, found, np.array([value is not None for value in values], bool))


@dataclasses.dataclass(slots=True)
class Staged:
    """One version, ready to commit; from the commit on, what undoes it.

    Attributes:
        swaps, copies: Values to write; after the commit, the old values.
        readouts: Each returns the fingerprints of copied segments.
        fingerprints: The fingerprint that each tensor of the version must have after the commit; None where only the
            model's is known.
        digests: The same as arrays.
        before_P: After the commit, the fingerprint of each segment before it.
        scatter_s: Seconds during which the commit was writing live weights.
    """

    swaps: list[Swap] = dataclasses.field(default_factory=list)
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
        return sum(swap.nbytes for swap in self.swaps) + sum(copy.device_bytes for copy in self.copies)


def host_fingerprints(targets: Sequence[Target]) -> Values:
    """Return the fingerprints of segments in host memory."""
    found = [native.fingerprint_runs(target.key, *target.segment.runs()) for target in targets]
    return Values(np.array([target.part for target in targets], np.int64), np.array(found, np.uint64))


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
                dims.append(layout + [(0, 0, 0)] * (MOST_DIMS - len(layout)))
        self._row_SF = np.array(rows, np.int64).reshape(-1, 6)
        self._part_S = np.array([target.part for target in self.targets], np.int64)
        self._dim_D83 = np.array(dims, np.int64).reshape(-1, MOST_DIMS, 3)

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
        gains = Values(self._part_S[touched[written]], gain_R[written])
        return [(chunk_CF, new_K.itemsize, to_K.itemsize)], [to_K, new_K], gains, check, int(kept_R.sum())


def _strided(segment: Segment) -> list[tuple[int, int, int]] | None:
    """Return the dimensions of a segment, for `native.prepare`; None if it is contiguous here and in the tensor."""
    live = segment.live
    dims = [dim for dim in zip(segment.stride, live.shape, live.stride(), strict=True) if dim[1] > 1]
    if live.is_contiguous() and all(stride == live_stride for stride, _, live_stride in dims):
        return None
    if len(dims) > MOST_DIMS:
        raise StageError(f"A live tensor has {len(dims)} dimensions, which is more than {MOST_DIMS}.")
    return sorted(dims, reverse=True)


class HostStaging:
    """Collects what is to be written to host memory."""

    def __init__(self) -> None:
        self._writes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._tables: SwapTable = []
        self._arrays: list[np.ndarray] = []
        self._changed = 0
        self._gains: list[Values] = []
        self._check = 0
        self._copies: list[tuple[Target, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def elements(self, places: HostPlaces, steps: Sparse) -> None:
        """Add steps of elements of a vector."""
        table, arrays, gains, check, changed = places.prepare(steps)
        self._tables += table
        self._arrays += arrays
        self._gains.append(gains)
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
        self._gains.append(Values(np.array([target.part]), np.array([gained], np.uint64)))
        self._changed += data_K.size
        self._check = (self._check + check) & fingerprint.MASK

    def finish(self, staged: Staged) -> None:
        """Add what was collected to `staged`."""
        if self._changed:
            writes = [(unsigned(dest), at_K.numpy(), unsigned(value_K)) for dest, at_K, value_K in self._writes]
            table = [*self._tables, *native.swap_table(writes)]
            arrays = [*self._arrays, *(array for write in writes for array in write[1:])]
            gains = Values(*map(np.concatenate, zip(*self._gains, strict=True)))
            staged.swaps.append(HostSwap(table, arrays, gains, self._check, self._changed))
        if self._copies:
            largest_bytes = max(live.nbytes for _, pieces in self._copies for live, _ in pieces)
            room = torch.empty(-(-largest_bytes // 8) * 8, dtype=torch.uint8)  # elements of any width begin in it
            staged.copies.extend(HostCopy(pieces, room) for _, pieces in self._copies)
            staged.readouts.append(functools.partial(host_fingerprints, [target for target, _ in self._copies]))


class DeviceSteps(Protocol):
    """Steps of one vector on a device, as `DeviceSparse` or as a decoder leaves them."""

    @property
    def low_K(self) -> torch.Tensor:
        """The lower 32 bits of ascending positions."""

    @property
    def step_K(self) -> torch.Tensor:
        """The steps."""

    @property
    def count_T(self) -> np.ndarray:
        """Number of changes of each tensor of the vector, on the host."""


class DevicePlaces:
    """The segments of one vector in the memory of one device: their table there, made once.

    Attributes:
        device: The device.
        table: The table.
        segments: The segment of each line.
        lines: The numbers of the lines of each segment, by its part.
        first: The position of each tensor's first element.

    Raises:
        StageError: a segment overlaps itself or has too many dimensions, or the device has too little memory.
    """

    def __init__(self, device: Device, vector: Vector, targets: Sequence[Target]) -> None:
        self.device = device
        self.first = dict(zip(vector.names, vector.first_T.tolist(), strict=False))
        pieces = [(target, piece) for target in targets for piece in target.segment.pieces(MOST_ELEMENTS)]
        held = [(self._line(target, piece), piece) for target, piece in pieces]
        held.sort(key=lambda each: each[0].kind)
        self.segments = [piece for _, piece in held]
        with device.staging():
            self.table = Table([line for line, _ in held], device)
            (self._limit_L,) = self.table.sent(self.table.limit_L)
            (self._sum_S,) = self.table.empty(((len(held),), torch.int64))
        edge_T = vector.first_T
        at_L = np.searchsorted(edge_T, self.table.limit_L)
        # Where segments are whole tensors, changes before them follow from those of each tensor.
        self._edge_L = at_L if (edge_T[at_L] == self.table.limit_L).all() else None
        self.lines: dict[int, list[int]] = {}
        for number, part in enumerate(self.table.part_S.tolist()):
            self.lines.setdefault(part, []).append(number)

    def _line(self, target: Target, piece: Segment) -> Line:
        first = self.first[target.name]
        places = piece.offset, first + piece.offset, first + region_end(piece.region())
        return Line(target.key, piece.flat(), *places, piece.layout(), target.part)

    def fingerprints(self) -> Values:
        """Return the fingerprints of all segments, out of live memory."""
        return self._read(self.table.whole)

    def readout(self, parts: Sequence[int]) -> Callable[[], Values]:
        """Return a function that reads the fingerprints of these segments. All that it needs is allocated now."""
        lines = np.array(sorted(line for part in parts for line in self.lines[part]), np.int64)
        with self.device.staging():
            rows = self.table.rows(lines)
        return functools.partial(self._read, rows)

    def _read(self, rows: Rows) -> Values:
        self.device.kernels.fingerprint(self.table, rows, self._sum_S)
        value_S = self._sum_S.cpu().numpy().view(np.uint64)
        return Values(self.table.part_S[rows.lines], value_S[rows.lines])

    @property
    def are_whole(self) -> bool:
        """Whether each segment is a whole tensor, in its order."""
        return self._edge_L is not None and bool(self.table.contiguous_S.all())

    def swap(self, steps: Sparse | DeviceSteps, ready: torch.cuda.Event | None = None) -> DeviceSwap | None:
        """Return the exchange of what steps change in these segments, prepared; None for nothing.

        `ready` is the event that steps on the device wait for. They are not mutated, but those of a decoder are: only its
        caller has them.
        """
        table = self.table
        if isinstance(steps, DeviceSparse) and steps.low_K.device != self.device.device:
            steps = steps.host(np.dtype(np.int64))
        with self.device.staging():
            self.device.wait(ready)
            if not isinstance(steps, Sparse):
                low_K, step_K = steps.low_K.view(torch.int32), steps.step_K.view(table.dtype)
                below_L = self._below(steps)
            else:
                low_K, step_K = table.crossed((steps.at_K, torch.int32), (steps.data_K, table.dtype))
                below_L = self._searched(steps.at_K, low_K)
            low_S, count_S = table.bounds(below_L)
            if not count_S.any():
                return None
            mutates = not isinstance(steps, DeviceSparse)
            writes = Writes(table, low_K, step_K, low_S, count_S, mutates=mutates)
            return DeviceSwap(self.device, writes)

    def _searched(self, at_K: np.ndarray, low_K: torch.Tensor) -> np.ndarray:
        """Return the same of positions on the host, whose lower halves are on the device and searched there.

        Halves ascend from one multiple of 2**32 to the next. A search through the host's memory would take 10 ms.
        """
        limit_L = self.table.limit_L
        turn = count_below(at_K, np.arange(int(limit_L[-1] >> 32) + 1, dtype=np.int64) << 32)
        edges = np.append(turn, at_K.size)
        low_L, high_L, wanted_L = self.table.sent(edges[limit_L >> 32], edges[(limit_L >> 32) + 1], limit_L & 0xFFFFFFFF)
        found_L = search(low_K, low_L, high_L, at_K.size, lambda found_LP: (found_LP & 0xFFFFFFFF) < wanted_L[:, None])
        below: np.ndarray = found_L.cpu().numpy()
        return below

    def _below(self, steps: DeviceSteps) -> np.ndarray:
        """Return how many changes there are before each limit of the table."""
        if self._edge_L is not None:
            below: np.ndarray = np.append(0, np.cumsum(steps.count_T))[self._edge_L]
            return below
        assert isinstance(steps, DeviceSparse), "steps of a decoder are for whole tensors"
        below = steps.count_below(self._limit_L).cpu().numpy()
        return below


class _Piece(NamedTuple):
    """A part of a segment, and its new bits in pinned memory, flat, in row-major order."""

    places: DevicePlaces
    target: Target
    line: int
    segment: Segment
    new_N: torch.Tensor


class DeviceStaging:
    """Collects full weights for the memory of one device, and compares them with it there.

    Threads copy them into pinned memory while those before cross; the host waits for the device once, in `finish`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._chunks: list[Chunk] = []
        self._left_B = torch.empty(0, dtype=torch.uint8)  # of the last chunk
        self._pieces: list[_Piece] = []
        self._job: list[tuple[np.ndarray, np.ndarray]] = []
        self._job_bytes = self._compared = 0
        self._jobs: deque[tuple[Future[None], int]] = deque()  # and behind which piece each ends
        self._counts: list[torch.Tensor] = []  # of differing elements, on the device, of `_COUNTS` pieces each
        with device.staging():
            self._room = device.allocate(2 * _DEVICE_PIECE_BYTES).view(2, -1)

    def whole(self, places: DevicePlaces, target: Target, bits_N: np.ndarray) -> None:
        """Add a whole tensor's new bits, of which the segment has a share. They must stay as they are."""
        for line in places.lines[target.part]:
            for piece in places.segments[line].pieces(_DEVICE_PIECE_BYTES // places.table.width):
                new_N = self._pinned(piece.live.nbytes).view(piece.live.dtype)
                self._pieces.append(_Piece(places, target, line, piece, new_N))
                self._job.append((new_N.numpy(), _source(piece, bits_N)))
                self._job_bytes += new_N.nbytes
                if self._job_bytes >= _JOB_BYTES:
                    self._submit()

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

    def _differs(self, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
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
            counts = (each[: self._compared - at * _COUNTS].cpu().numpy() for at, each in enumerate(self._counts))
            count_P = np.concatenate([*counts, np.zeros(0, np.int64)])
            copied, few, few_bytes = list[_Piece](), list[tuple[_Piece, int]](), 0
            for first, last in _spans([piece.target.part for piece in self._pieces]):
                held, count = self._pieces[first:last], int(count_P[first:last].sum())
                size_bytes = count * (4 + held[0].places.table.width)
                counted = [(piece, int(n)) for piece, n in zip(held, count_P[first:last], strict=True) if n]
                is_few = all(n <= piece.new_N.numel() // _FEW for piece, n in counted)
                if is_few and few_bytes + size_bytes <= _DIFFERING_BYTES:
                    few_bytes += size_bytes
                    few += counted
                else:
                    copied += [piece for piece, _ in counted]
            self._add_elements(staged, few)
            self._add_copies(staged, copied)

    def _add_elements(self, staged: Staged, few: Sequence[tuple[_Piece, int]]) -> None:
        """Add pieces of which little differs, as positions and steps: each takes a wait for the device."""
        by_table: dict[int, list[tuple[_Piece, int]]] = {}
        for piece, count in few:
            by_table.setdefault(id(piece.places), []).append((piece, count))
        for held in by_table.values():
            held.sort(key=lambda each: each[0].line)
            table = held[0][0].places.table
            count_S = np.zeros(len(table.lines), np.int64)
            total = sum(count for _, count in held)
            low_K, step_K = table.empty(((total,), torch.int32), ((total,), table.dtype))
            done = 0
            for piece, count in held:
                here = slice(done, done + count)
                low_K[here], step_K[here] = self._steps(piece)
                count_S[piece.line] += count
                done += count
            writes = Writes(table, low_K, step_K, np.cumsum(count_S) - count_S, count_S, mutates=True)
            staged.swaps.append(DeviceSwap(self._device, writes))

    def _steps(self, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions in the vector, of which 32 bits count, and steps of what differs."""
        segment = piece.segment
        differs, came = self._differs(piece)
        rest_K = differs.view(-1).nonzero().view(-1)
        position_K = torch.full_like(rest_K, piece.places.first[piece.target.name] + segment.offset)
        for size, stride in zip(reversed(segment.live.shape), reversed(segment.stride), strict=True):
            position_K += rest_K % size * stride
            rest_K = rest_K // size
        return position_K, came.masked_select(differs) - segment.live.masked_select(differs)

    def _add_copies(self, staged: Staged, copied: Sequence[_Piece]) -> None:
        """Add pieces of which much differs. Their old bits are saved on the host now: only new ones cross in the pause."""
        if not copied:
            return
        pieces = []
        for piece in copied:
            live, old_N = piece.segment.live, self._pinned(piece.new_N.nbytes).view(piece.new_N.dtype)
            held = live
            if not live.is_contiguous():
                held = self._room[0, : live.nbytes].view(live.dtype).view(live.shape).copy_(live)
            old_N.view(live.shape).copy_(held, non_blocking=True)
            pieces.append((live, piece.new_N, old_N))
        staged.copies.append(DeviceCopy(pieces, self._room[0], self._chunks))
        parts: dict[int, tuple[DevicePlaces, set[int]]] = {}
        for piece in copied:
            parts.setdefault(id(piece.places), (piece.places, set()))[1].add(piece.target.part)
        staged.readouts += [places.readout([*held]) for places, held in parts.values()]


def _copy(job: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for to_N, source in job:
        np.copyto(to_N.reshape(source.shape), source)


def _source(piece: Segment, bits_N: np.ndarray) -> np.ndarray:
    """Return a segment's view of a whole tensor's flat unsigned bits, as signed integers; it is only read."""
    signed_N = bits_N.view(f"i{bits_N.itemsize}")
    strides = [stride * bits_N.itemsize for stride in piece.stride]
    if not piece.live.numel():
        return signed_N[:0]
    return np.lib.stride_tricks.as_strided(signed_N[piece.offset :], tuple(piece.live.shape), strides, writeable=False)


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of equal numbers begins and ends."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[first]:
            yield first, at
            first = at


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


def _places(segment: Segment, at_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions in `flat()` and checkpoint indices, int64, of elements numbered in row-major order."""
    coordinates = np.unravel_index(at_K, segment.live.shape) if segment.live.ndim else ()
    dest_index_K, index_K = np.zeros((2, at_K.size), np.int64)
    index_K += segment.offset
    for coordinate, live_stride, stride in zip(coordinates, segment.live.stride(), segment.stride, strict=True):
        dest_index_K += coordinate * live_stride
        index_K += coordinate * stride
    return dest_index_K, index_K
