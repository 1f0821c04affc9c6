"""STAGE: turn decoded changes into exchanges, on the device of the live memory that they change.

Steps become new values at positions, through a table of segments that is made once for a model. Full weights
are compared with live memory. Where little differs they become positions and values too; otherwise they stay
on the host until the commit copies them, so that a device needs room for a few pieces and not for a second
model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from deltasync.kernels import native
from deltasync.kernels.backend import Backend
from deltasync.kernels.table import MOST_ELEMENTS, Line, Rows, Table, Values, Writes
from deltasync.live.exchange import Copy, Piece
from deltasync.live.segments import Segment, unsigned
from deltasync.tensors import region_end
from deltasync.tensors.bits import signed_view

Steps = tuple[torch.Tensor, torch.Tensor]
"""Positions in the vector, of which 32 bits count, and steps of what differs."""

_PIECE_BYTES, _COMPARED_BYTES = 4 << 20, 16 << 20

FEW = 8
"""Full weights are exchanged by elements if at most one in this many differs, in each piece."""


Digests = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The fingerprints that a version says its tensors have: numbers of the tensors, in the order of the memory's
table; the fingerprints, uint64; and whether the version says one, as only the model's is known otherwise."""


def digests_of(number: Mapping[str, int], fingerprints: Mapping[str, int | None]) -> Digests:
    """Convert fingerprints by name to arrays: tensor number, value, and whether the value is known."""
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


class SegmentTable:
    """The segments of one vector on one device, or on the host, in one table.

    Attributes:
        device: The device.
        table: The table.
        segments: The segments, pieces of large ones, in the order of the table's lines.
        lines: Numbers of the lines of each segment.

    Raises:
        StageError: a segment overlaps itself or has too many dimensions, or the device has too little memory.
    """

    def __init__(self, device: Backend, first_T: np.ndarray, held: Sequence[Held]) -> None:
        self.device = device
        pieces = [(each, piece) for each in held for piece in each.segment.pieces(MOST_ELEMENTS)]
        found = [(self._line(each, piece), piece) for each, piece in pieces]
        found.sort(key=lambda each: each[0].kind)
        self.segments = [piece for _, piece in found]
        with device.staging():
            self.table = Table([line for line, _ in found], device)
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

    def fingerprints(self, parts: Set[int]) -> Values:
        """Return the fingerprints of these segments, out of live memory."""
        return self.readout([*parts])() if parts < self.lines.keys() else self._read(self.table.whole)

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

    def swap(self, delta: Any, width: int) -> Writes | None:
        """Return the exchange of what a delta that is near changes in these segments, prepared; None for
        nothing.
        """
        with self.device.staging():
            low_K, step_K, below_L, is_spare = self.device.arrived(delta, width, self.table, self._edge_L)
            low_S, count_S = self.table.bounds(below_L)
            if not count_S.any():
                return None
            writes = Writes(self.table, low_K, step_K, low_S, count_S, mutates=is_spare)
            writes.prepare()
            return writes


class Staging:
    """Collects full weights for memory of one device. Here, on the host, each segment is compared at once, and
    only copied where much of it differs.
    """

    def __init__(self, device: Backend) -> None:
        self._device = device
        # the line, how many differ, and which
        self._few: list[tuple[SegmentTable, int, int, Callable[[], Steps]]] = []
        self._copied: list[tuple[SegmentTable, int, list[Piece]]] = []  # and the line

    def whole(self, places: SegmentTable, part: int, bits_N: np.ndarray) -> None:
        """Add a whole tensor's new bits, of which a segment has a share. They must stay as they are until
        `finish`.
        """
        for line in places.lines[part]:
            self._add(places, line, places.segments[line], bits_N)

    def _add(self, places: SegmentTable, line: int, segment: Segment, bits_N: np.ndarray) -> None:
        whole = signed_view(np.require(bits_N, requirements="W"))  # torch takes no array that is read-only
        new_N, old_N = (
            unsigned(view.contiguous().view(-1)) for view in (segment.source(whole), segment.live)
        )
        at_K, step_K = native.diff(old_N, new_N)
        if at_K.size <= new_N.size // FEW:
            position_K = positions(places.table.lines[line], segment, torch.from_numpy(at_K.astype(np.int64)))
            self._few += (
                [(places, line, at_K.size, lambda: (position_K, signed_view(step_K)))] if at_K.size else []
            )
            return
        pieces, rows = segment.pieces(_PIECE_BYTES // places.table.width), torch.contiguous_format
        held: list[Piece] = [
            (p.live, p.source(whole).clone(memory_format=rows).view(-1), None) for p in pieces
        ]
        self._copied.append((places, line, held))

    def finish(self, staged: Staged) -> None:
        """Add what was collected to `staged`."""
        self._add_elements(staged)
        if self._copied:  # through a room for any piece, where elements of any width begin
            largest = max(live.nbytes for *_, held in self._copied for live, *_ in held)
            self._add_copies(staged, self._device.allocate(-(-largest // 8) * 8))

    def _add_elements(self, staged: Staged) -> None:
        """Add what little differs, as positions and steps; on a device each piece takes a wait for it."""
        by_table: dict[int, list[tuple[SegmentTable, int, int, Callable[[], Steps]]]] = {}
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

    def _add_copies(self, staged: Staged, room_B: torch.Tensor, keeps: object = None) -> None:
        staged.copies.append(Copy([piece for *_, held in self._copied for piece in held], room_B, keeps))
        parts: dict[int, tuple[SegmentTable, set[int]]] = {}
        for places, line, _ in self._copied:
            parts.setdefault(id(places), (places, set()))[1].add(places.table.lines[line].part)
        staged.readouts += [places.readout([*held]) for places, held in parts.values()]


def positions(line: Line, segment: Segment, number_K: torch.Tensor) -> torch.Tensor:
    """Return positions of elements of a part of a line's segment, which are numbered in row-major order."""
    position_K = torch.full_like(number_K, line.first - line.offset + segment.offset)
    for size, stride in zip(reversed(segment.live.shape), reversed(segment.stride), strict=True):
        position_K += number_K % size * stride
        number_K = number_K // size
    return position_K


def differs(device: Backend, segment: Segment, whole: torch.Tensor) -> bool:
    """Whether any bit of a segment differs from a whole tensor's, on any device; compared where the segment
    is.
    """
    with device.staging():
        room = device.allocate(min(_COMPARED_BYTES, segment.live.nbytes))
        for piece in segment.pieces(_COMPARED_BYTES // segment.live.element_size()):
            came = room[: piece.live.nbytes].view(piece.live.dtype).view(piece.live.shape)
            came.copy_(piece.source(whole))
            if not torch.equal(piece.live, came):
                return True
    return False
