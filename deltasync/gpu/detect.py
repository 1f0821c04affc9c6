"""Compare a model on a GPU with its shadow there, in a few launches; what differs stays on the device.

A table has a line for each run of elements: where the shadow and the new weights lie, and what a fingerprint
needs. It stays as long as the tensors do. Runs are cut into blocks (`tensors.device`), of which a group is
compared at once:

    _compare   reads both sides of each block, as 32-bit words, to find which elements differ; writes how many, and up to
               `SLOT` of them (position in the block, step) into the block's slot
    cumsum     finds where the changes of each block go
    _pack      moves the slots there, in order, and sums what the changes add to fingerprints

The host waits once, for the number of changes. Blocks with more of them than a slot holds are then read again
(`_all`), each writing to its place in the result. If the result has no room, everything is compared again:
comparing only reads. `_apply` adds the steps to the shadow later.

Nobody can keep a trainer from writing meanwhile, so that a second read may see other bits than the first one.
A step is therefore of one read, and what follows from it (what a fingerprint gains, the new bits in the
shadow) is computed from the old bits and the step. Where an element is read twice the last read counts: one
that has its old bits again leaves a step of zero, which is dropped; and a block that by then has more changes
than its place has room for is compared once more, with room for all of its elements.

Kernels see bit patterns as unsigned integers. R runs, B blocks, T tensors of one width, K changed elements.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.gpu import groups
from deltasync.gpu.common import UNSIGNED, on, popcount, unsigned
from deltasync.gpu.delta import BLOCK, DeviceSparse
from deltasync.gpu.segments import _cell
from deltasync.tensors import bounds
from deltasync.tensors.bits import SIGNED

OLD, NEW, FIRST, COUNT, AT, KEY, INDEX, MASK, LARGEST = range(9)
"""Columns of a line: address of the shadow and of the new bits, number of the first block, number of
elements, position of the first one in the vector, fingerprint key of the tensor, flat index of the first
element in it, and as in `nan_bounds`."""

COLUMNS = 9
_OLD, _NEW, _FIRST, _COUNT, _AT, _KEY, _INDEX, _MASK, _LARGEST, _COLUMNS = (
    tl.constexpr(each) for each in range(10)
)

Fill = Callable[[int, torch.Tensor], None]

Into = tuple[torch.Tensor, torch.Tensor, int]
"""Where positions and steps go, and for how many blocks that has slots; 0 if it is the result."""

_ALIGNED_BYTES = 16
_LANES = 1024  # elements that a program of `_print` reads at once


@triton.jit
def _bfloat16_bits(bits):
    """Round float32 bit patterns to nearest even. In integers, because hardware and torch disagree on what a
    NaN becomes.
    """
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16)


@triton.jit
def _marks(
    old_ptr, new_ptr, left, W: tl.constexpr, NEW_W: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a bit for each element that differs, uint32[BLOCK / 32].

    Aligned elements of one or two bytes are read as words of `PER` elements. Loads without a mask are the
    widest.
    """
    word = tl.arange(0, BLOCK // 32)[:, None]
    if ALIGNED and NEW_W < 4:
        PER: tl.constexpr = 4 // W
        old_ptr = tl.multiple_of(old_ptr.to(tl.pointer_type(tl.uint32), bitcast=True), 16)
        new_ptr = tl.multiple_of(new_ptr.to(tl.pointer_type(tl.uint32), bitcast=True), 16)
        j = tl.arange(0, 32 // PER)[None, :]
        at = word * (32 // PER) + j
        if left >= BLOCK:
            x = tl.load(old_ptr + at) ^ tl.load(new_ptr + at)
        else:
            # an aligned word lies in one page, so that it may be read, but what is behind the end does not
            # count
            x = tl.load(old_ptr + at, PER * at < left, other=0) ^ tl.load(
                new_ptr + at, PER * at < left, other=0
            )
            rest = tl.minimum(tl.maximum(left - PER * at, 0), PER).to(tl.uint32) * (32 // PER)
            x &= tl.where(rest < 32, (1 << rest) - 1, 0xFFFFFFFF).to(tl.uint32)
        if W == 2:
            differs = (((x & 0x7FFF7FFF) + 0x7FFF7FFF) | x) & 0x80008000
            marks = tl.sum(differs >> (15 - j).to(tl.uint32), axis=1)
            # Even elements are in the lower half, odd ones in the upper. Shuffle them.
            swapped = (marks ^ (marks >> 8)) & 0x0000FF00
            marks ^= swapped ^ (swapped << 8)
            swapped = (marks ^ (marks >> 4)) & 0x00F000F0
            marks ^= swapped ^ (swapped << 4)
            swapped = (marks ^ (marks >> 2)) & 0x0C0C0C0C
            marks ^= swapped ^ (swapped << 2)
            swapped = (marks ^ (marks >> 1)) & 0x22222222
            marks ^= swapped ^ (swapped << 1)
        else:
            differs = ((((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x) & 0x80808080) >> 7
            four = ((differs * 0x01020408) >> 24) & 15  # the products do not meet, so that nothing is carried
            marks = tl.sum(four << (4 * j).to(tl.uint32), axis=1)
    else:
        bit = tl.arange(0, 32)[None, :]
        at = word * 32 + bit
        if left >= BLOCK:
            old = tl.load(old_ptr + at)
            new = tl.load(new_ptr + at)
        else:
            old = tl.load(old_ptr + at, at < left, other=0)
            new = tl.load(new_ptr + at, at < left, other=0)
        if W != NEW_W:
            new = _bfloat16_bits(new)
        marks = tl.sum((old != new).to(tl.uint32) << bit.to(tl.uint32), axis=1)
    return marks


@triton.jit(do_not_specialize=["first"])
def _compare(
    table_ptr,
    row_ptr,
    listed_ptr,
    count_ptr,
    to_at_ptr,
    to_step_ptr,
    first: tl.int64,
    W: tl.constexpr,
    NEW_W: tl.constexpr,
    OLD_TYPE: tl.constexpr,
    NEW_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LISTED: tl.constexpr,
    WIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Compare a block, number `first` + the program's, or the one that is listed there.

    Count its changes, and write them to its slot, if that has room, the first slot being that of block
    `first` of the group. With `WIDE`, count all elements of a block whose slot has no room.
    """
    block = tl.program_id(0).to(tl.int64) + first
    if LISTED:
        block = tl.load(listed_ptr + block).to(tl.int64)
    entry_ptr = table_ptr + tl.load(row_ptr + block).to(tl.int64) * _COLUMNS
    base = (block - tl.load(entry_ptr + _FIRST)) * BLOCK
    left = tl.load(entry_ptr + _COUNT) - base
    old_ptr = tl.load(entry_ptr + _OLD).to(tl.pointer_type(OLD_TYPE)) + base
    new_ptr = tl.load(entry_ptr + _NEW).to(tl.pointer_type(NEW_TYPE)) + base
    if ALIGNED:  # here, because arguments of a function carry no hints
        old_ptr, new_ptr = tl.multiple_of(old_ptr, 16), tl.multiple_of(new_ptr, 16)
    marks = _marks(old_ptr, new_ptr, left, W, NEW_W, ALIGNED, BLOCK)
    n = popcount(marks)
    total = tl.sum(n, axis=0)
    k = tl.cumsum(n, axis=0) - n
    room = total
    if WIDE:
        room = tl.where(total > SLOT, tl.minimum(left, BLOCK), total).to(tl.int32)
    tl.store(count_ptr + block, room)
    if total <= SLOT:
        start = (block & (SLOTS - 1)) * SLOT
        at_ptr, step_ptr = to_at_ptr + start, to_step_ptr + start
        word = tl.arange(0, BLOCK // 32) * 32
        # each turn takes the lowest mark left in each word; its bits are in the cache
        for _ in range(tl.max(n, axis=0)):
            marked = marks != 0
            lowest = (marks & (0 - marks)).to(tl.float32)  # a power of two, whose exponent is the place
            place = word + (lowest.to(tl.int32, bitcast=True) >> 23) - 127
            old = tl.load(old_ptr + place, marked, other=0)
            new = tl.load(new_ptr + place, marked, other=0)
            if W != NEW_W:
                new = _bfloat16_bits(new)
            tl.store(at_ptr + k, place.to(tl.uint16), marked)
            tl.store(step_ptr + k, new - old, marked)
            marks = marks & (marks - 1)
            k += 1


@triton.jit
def _all(
    table_ptr,
    row_ptr,
    listed_ptr,
    bound_ptr,
    low_ptr,
    step_ptr,
    unlike_ptr,
    W: tl.constexpr,
    NEW_W: tl.constexpr,
    OLD_TYPE: tl.constexpr,
    NEW_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare a listed block, reading each element once, and write its changes to their place in the result.

    What is left of the place is filled with steps of zero. If it has no room, it gets none but such, and
    `unlike_ptr[1]` is set.
    """
    block = tl.load(listed_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(bound_ptr + block)
    room = (tl.load(bound_ptr + block + 1) - start).to(tl.int32)
    entry_ptr = table_ptr + tl.load(row_ptr + block).to(tl.int64) * _COLUMNS
    base = (block - tl.load(entry_ptr + _FIRST)) * BLOCK
    left = tl.load(entry_ptr + _COUNT) - base
    added = tl.load(entry_ptr + _AT) + base
    old_ptr = tl.load(entry_ptr + _OLD).to(tl.pointer_type(OLD_TYPE)) + base
    new_ptr = tl.load(entry_ptr + _NEW).to(tl.pointer_type(NEW_TYPE)) + base
    if ALIGNED:
        old_ptr, new_ptr = tl.multiple_of(old_ptr, 16), tl.multiple_of(new_ptr, 16)
    place = tl.arange(0, BLOCK)
    if left >= BLOCK:  # loads without a mask are the widest
        old = tl.load(old_ptr + place)
        new = tl.load(new_ptr + place)
    else:
        old = tl.load(old_ptr + place, place < left, other=0)
        new = tl.load(new_ptr + place, place < left, other=0)
    if W != NEW_W:
        new = _bfloat16_bits(new)
    differs = (new != old) & (place < left)
    total = tl.sum(differs.to(tl.int32), axis=0)
    if total > room:
        tl.store(unlike_ptr + 1, 1)
        total = total * 0
    k = tl.cumsum(differs.to(tl.int32), axis=0) - 1
    written = differs & (total > 0)
    tl.store(low_ptr + start + k, (place + added).to(tl.uint32), written)
    tl.store(step_ptr + start + k, new - old, written)
    rest = (place >= total) & (place < room)
    tl.store(low_ptr + start + place, (place * 0 + added).to(tl.uint32), rest)
    tl.store(step_ptr + start + place, old * 0, rest)


@triton.jit(do_not_specialize=["first", "room"])
def _pack(
    table_ptr,
    row_ptr,
    listed_ptr,
    bound_ptr,
    slot_at_ptr,
    slot_step_ptr,
    low_ptr,
    step_ptr,
    gain_ptr,
    above_ptr,
    unlike_ptr,
    first: tl.int64,
    room: tl.int64,
    OLD_TYPE: tl.constexpr,
    LISTED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Sum what the changes of a block add to the fingerprint, and how many become NaN; with `SLOTS`, bring
    them there first.

    A block with more changes than a slot holds, or than there is room for, is left out. A step of zero sets
    `unlike_ptr[0]`.
    """
    block = tl.program_id(0).to(tl.int64) + first
    if LISTED:
        block = tl.load(listed_ptr + block).to(tl.int64)
    start = tl.load(bound_ptr + block)
    n = (tl.load(bound_ptr + block + 1) - start).to(tl.int32)
    entry_ptr = table_ptr + tl.load(row_ptr + block).to(tl.int64) * _COLUMNS
    base = (block - tl.load(entry_ptr + _FIRST)) * BLOCK
    old_ptr = tl.load(entry_ptr + _OLD).to(tl.pointer_type(OLD_TYPE)) + base
    at = tl.load(entry_ptr + _AT) + base
    key = tl.load(entry_ptr + _KEY).to(tl.uint64, bitcast=True)
    index = tl.load(entry_ptr + _INDEX) + base
    mask = tl.load(entry_ptr + _MASK).to(tl.uint64)
    largest = tl.load(entry_ptr + _LARGEST).to(tl.uint64)
    gain = tl.zeros((SLOT,), tl.uint64)
    above = tl.zeros((SLOT,), tl.int32)
    zeros = tl.zeros((SLOT,), tl.int32)
    if start + n > room:
        n = 0
    if SLOTS:
        if n > SLOT:
            n = 0
        slot = (block & (SLOTS - 1)) * SLOT
    for done in range(0, n, SLOT):
        j = done + tl.arange(0, SLOT)
        inside = j < n
        if SLOTS:
            place = tl.load(slot_at_ptr + slot + j, inside, other=0).to(tl.int64)
            step = tl.load(slot_step_ptr + slot + j, inside, other=0)
            tl.store(low_ptr + start + j, (at + place).to(tl.int32), inside)
            tl.store(step_ptr + start + j, step, inside)
        else:
            place = ((tl.load(low_ptr + start + j, inside, other=0) - at) & 0xFFFFFFFF).to(tl.int64)
            place = tl.where(inside, place, 0)
            step = tl.load(step_ptr + start + j, inside, other=0)
        old = tl.load(old_ptr + place, inside, other=0)
        new = old + step
        gain += tl.where(inside, _cell(key, index + place, new) - _cell(key, index + place, old), 0)
        above += (inside & (step != 0) & ((new.to(tl.uint64) & mask) > largest)).to(tl.int32)
        zeros += (inside & (step == 0)).to(tl.int32)
    tl.store(gain_ptr + block, tl.sum(gain, axis=0))
    tl.store(above_ptr + block, tl.sum(above, axis=0))
    if tl.sum(zeros, axis=0) > 0:
        tl.store(unlike_ptr, 1)


@triton.jit
def _apply(
    table_ptr,
    row_ptr,
    bound_ptr,
    low_ptr,
    step_ptr,
    OLD_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Add the steps of a block to the shadow."""
    block = tl.program_id(0).to(tl.int64)
    start = tl.load(bound_ptr + block)
    n = (tl.load(bound_ptr + block + 1) - start).to(tl.int32)
    if n > 0:
        entry_ptr = table_ptr + tl.load(row_ptr + block).to(tl.int64) * _COLUMNS
        base = (block - tl.load(entry_ptr + _FIRST)) * BLOCK
        old_ptr = tl.load(entry_ptr + _OLD).to(tl.pointer_type(OLD_TYPE)) + base
        at = tl.load(entry_ptr + _AT) + base
        for done in range(0, n, SLOT):
            j = done + tl.arange(0, SLOT)
            inside = j < n
            place = ((tl.load(low_ptr + start + j, inside, other=0) - at) & 0xFFFFFFFF).to(tl.int64)
            place = tl.where(inside, place, 0)
            step = tl.load(step_ptr + start + j, inside, other=0)
            tl.store(old_ptr + place, tl.load(old_ptr + place, inside, other=0) + step, inside)


@triton.jit
def _print(
    table_ptr, row_ptr, sum_ptr, above_ptr, OLD_TYPE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """Sum the fingerprints of the shadow's bits in a block, and count its NaN."""
    block = tl.program_id(0).to(tl.int64)
    entry_ptr = table_ptr + tl.load(row_ptr + block).to(tl.int64) * _COLUMNS
    base = (block - tl.load(entry_ptr + _FIRST)) * BLOCK
    left = tl.load(entry_ptr + _COUNT) - base
    old_ptr = tl.load(entry_ptr + _OLD).to(tl.pointer_type(OLD_TYPE)) + base
    key = tl.load(entry_ptr + _KEY).to(tl.uint64, bitcast=True)
    index = tl.load(entry_ptr + _INDEX) + base
    mask = tl.load(entry_ptr + _MASK).to(tl.uint64)
    largest = tl.load(entry_ptr + _LARGEST).to(tl.uint64)
    total = tl.zeros((LANES,), tl.uint64)
    above = tl.zeros((LANES,), tl.int32)
    for done in range(0, BLOCK, LANES):
        at = done + tl.arange(0, LANES)
        bits = tl.load(old_ptr + at, at < left, other=0)
        total += tl.where(at < left, _cell(key, index + at, bits), 0)
        above += ((bits.to(tl.uint64) & mask) > largest).to(tl.int32)
    tl.store(sum_ptr + block, tl.sum(total, axis=0))
    tl.store(above_ptr + block, tl.sum(above, axis=0))


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The changes that a comparison found in one vector.

    Attributes:
        steps: The steps; None if nothing changed.
        gain_T: Sum of what they add to the fingerprint of each tensor, uint64[T].
        above_T: How many elements of each tensor become NaN, int64[T].
    """

    steps: DeviceSparse | None
    gain_T: np.ndarray
    above_T: np.ndarray


class Comparison:
    """Runs of one vector on a device, in a table that stays, and the blocks that they are cut into.

    Args:
        device: A CUDA device, or the CPU under Triton's interpreter.
        width: Bytes of an element of the shadow.
        line_RC: The runs, ascending in `AT`, none empty; int64[R, COLUMNS], `FIRST` is filled in.
        new_width_R: Bytes of an element of the new weights: `width`, or 4 for float32 that is rounded to
            bfloat16.
        tensor_R: Number of each run's tensor in the vector.
        tensor_count: T.
        copied_R: Bytes of the copy of each run that has to be made before it is compared, 0 if it lies there
            as it is.

    Attributes:
        element_count: Elements of all runs.
        blocks: B.
    """

    def __init__(
        self,
        device: torch.device,
        width: int,
        line_RC: np.ndarray,
        new_width_R: np.ndarray,
        tensor_R: np.ndarray,
        tensor_count: int,
        copied_R: np.ndarray,
    ) -> None:
        self.device, self.width = device, width
        self._expected: int | None = None
        self._line_RC, self._new_width_R = line_RC, new_width_R
        self.element_count = int(line_RC[:, COUNT].sum())
        blocks_R = -(-line_RC[:, COUNT] // BLOCK)
        self._first_R = bounds(blocks_R)
        self.blocks = int(self._first_R[-1])
        line_RC[:, FIRST] = self._first_R[:-1]
        low_T, high_T = (
            np.searchsorted(tensor_R, np.arange(tensor_count), side=side) for side in ("left", "right")
        )
        self._copied = np.flatnonzero(copied_R)
        place_R, edges = _places(self._first_R, copied_R)
        self._groups = [
            *itertools.pairwise(sorted({*range(0, self.blocks, groups.GROUP_BLOCKS), *edges, self.blocks}))
        ]
        with on(self.device):
            self._copies = torch.empty(int((place_R + copied_R).max()), dtype=torch.uint8, device=device)
            self._copy_R = np.where(copied_R > 0, self._copies.data_ptr() + place_R, 0)
            line_RC[:, NEW] = np.where(copied_R > 0, self._copy_R, line_RC[:, NEW])
            self._table_RC = torch.from_numpy(line_RC.copy()).to(device)
            number_R = torch.arange(len(line_RC), dtype=torch.int32, device=device)
            self._row_B = number_R.repeat_interleave(
                torch.from_numpy(blocks_R).to(device), output_size=self.blocks
            )
            inside_B = torch.arange(self.blocks, device=device) - self._table_RC[:, FIRST][self._row_B]
            self._base_B = self._table_RC[:, AT][self._row_B].add_(inside_B.mul_(BLOCK))
            edge_2T = np.stack((self._first_R[low_T], self._first_R[high_T]))
            self._bound_2T = torch.from_numpy(edge_2T).to(device)
        self._kinds = self._kinds_of()

    def move(self, address_R: np.ndarray) -> None:
        """Set the addresses of the new weights; those of copies do not count."""
        address_R = np.where(self._copy_R > 0, self._copy_R, address_R)
        if np.array_equal(address_R, self._line_RC[:, NEW]):
            return
        was = self._is_aligned()
        self._line_RC[:, NEW] = address_R
        with on(self.device):
            self._table_RC.copy_(torch.from_numpy(self._line_RC))
        if not np.array_equal(was, self._is_aligned()):
            self._kinds = self._kinds_of()

    def launch(self, fill: Fill) -> Callable[[], Found]:
        """Begin to compare; return a function that waits and returns what differs.

        Args:
            fill: Writes a run, by its number, to the memory of its copy, flat and in the dtype that is
                compared.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it; from the returned function too.
        """
        expected = int(groups.FIRST_GUESS * self.element_count) if self._expected is None else self._expected
        launched = self._launch(groups.room(expected, self.element_count), fill)
        return lambda: self._finish(launched, fill)

    def apply(self, steps: DeviceSparse) -> None:
        """Add steps that were found to the shadow. This allocates nothing, and returns once it is
        launched.
        """
        with on(self.device):
            _apply[(self.blocks,)](
                *(self._table_RC, self._row_B, steps.bound_B, steps.low_K, unsigned(steps.step_K)),
                *(UNSIGNED[self.width], BLOCK, groups.SLOT),
                num_warps=1,
            )

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the fingerprint of the shadow's elements of each tensor, uint64[T], and how many are NaN,
        int64[T].
        """
        with on(self.device):
            sum_B = torch.empty(self.blocks, dtype=torch.int64, device=self.device)
            above_B = torch.empty(self.blocks, dtype=torch.int32, device=self.device)
            _print[(self.blocks,)](
                *(self._table_RC, self._row_B, sum_B.view(torch.uint64), above_B),
                *(UNSIGNED[self.width], BLOCK, min(_LANES, BLOCK)),
                num_warps=4,
            )
            found_2T = (
                torch.stack([self._by_tensor(_ends(each_B)) for each_B in (sum_B, above_B)]).cpu().numpy()
            )
        return found_2T[0].view(np.uint64), found_2T[1]

    def _is_aligned(self) -> np.ndarray:
        aligned: np.ndarray = (self._line_RC[:, OLD] | self._line_RC[:, NEW]) % _ALIGNED_BYTES == 0
        return aligned

    def _kinds_of(self) -> dict[tuple[int, bool], tuple[np.ndarray, torch.Tensor] | None]:
        """Return the blocks of each kind of run, on the host and there; None if they are all of one kind."""
        kind_R = self._new_width_R * 2 + self._is_aligned()
        found: dict[tuple[int, bool], tuple[np.ndarray, torch.Tensor] | None] = {}
        kinds = np.unique(kind_R).tolist()
        for kind in kinds:
            listed = None
            if len(kinds) > 1:
                block_L = np.flatnonzero(np.repeat(kind_R == kind, np.diff(self._first_R))).astype(np.int32)
                listed = block_L, torch.from_numpy(block_L).to(self.device)
            found[kind // 2, bool(kind % 2)] = listed
        return found

    def _launch(self, room: int, fill: Fill, *, wide: bool = False) -> _Launched:
        with on(self.device):
            slots = min(1 << (self.blocks - 1).bit_length(), groups.GROUP_BLOCKS) * groups.SLOT
            slot_at = torch.empty(slots, dtype=torch.int16, device=self.device)
            slot_step = torch.empty(slots, dtype=SIGNED[self.width], device=self.device)
            into = slot_at.view(torch.uint16), unsigned(slot_step), groups.GROUP_BLOCKS
            of = _Launched.of(self.blocks, room, self.device, SIGNED[self.width], wide)
            for low, high in self._groups:
                self._fill(low, high, fill)
                self._compare(low, high, of, into)
                bound = of.bound_B[low + 1 : high + 1]
                torch.cumsum(of.count_B[low:high], 0, dtype=torch.int64, out=bound)
                if low:
                    bound += of.bound_B[low]
                self._pack(high - low, low, None, of, into)
            of.most[:1] = of.bound_B[-1:]
            of.most[1:] = of.count_B.max()
            of.host.copy_(of.most, non_blocking=True)
            if self.device.type == "cuda":
                of.done = torch.cuda.current_stream(self.device).record_event()
        return of

    def _finish(self, of: _Launched, fill: Fill) -> Found:
        if of.done is not None:
            of.done.synchronize()
        changed, most = of.host.tolist()
        self._expected = changed
        if changed > of.low_K.numel():
            room, wide = groups.room(changed, self.element_count), of.wide
            del of
            return self._finish(self._launch(room, fill, wide=wide), fill)
        with on(self.device):
            if most > groups.SLOT:
                self._overflowing(of, fill)
            sums = map(self._by_tensor, (of.bound_B, _ends(of.gain_B), _ends(of.above_B)))
            found = torch.cat((*sums, of.unlike)).cpu().numpy()
            has_zeros, has_no_room = found[-2:].tolist()
            if has_no_room:
                del of
                return self._finish(
                    self._launch(groups.room(changed, self.element_count), fill, wide=True), fill
                )
            count_T, gain_T, above_T = found[:-2].reshape(3, -1)
            low_K, step_K, bound_B = of.low_K[:changed], of.step_K[:changed], of.bound_B
            if has_zeros:
                is_step_K = step_K != 0
                bound_B = _ends(is_step_K)[bound_B]
                low_K, step_K = low_K[is_step_K], step_K[is_step_K]
                count_T = self._by_tensor(bound_B).cpu().numpy()
                self._expected = changed = low_K.numel()
        steps = DeviceSparse(low_K, step_K, self._base_B, bound_B, count_T) if changed else None
        return Found(steps, gain_T.view(np.uint64), above_T)

    def _fill(self, low: int, high: int, fill: Fill) -> None:
        """Make the copies of the runs in which these blocks lie."""
        if self._copied.size:
            first_run = np.searchsorted(self._first_R, low, side="right") - 1
            bounds = np.searchsorted(self._copied, (first_run, np.searchsorted(self._first_R, high)))
            for run in self._copied[slice(*bounds.tolist())].tolist():
                place, size = int(self._copy_R[run]) - self._copies.data_ptr(), int(self._line_RC[run, COUNT])
                width = int(self._new_width_R[run])
                fill(run, self._copies[place : place + size * width])

    def _by_tensor(self, bound_B: torch.Tensor) -> torch.Tensor:
        low_T, high_T = bound_B[self._bound_2T]
        return high_T - low_T

    def _overflowing(self, of: _Launched, fill: Fill) -> None:
        """Compare the blocks that had no room in their slots once more."""
        over_L = torch.nonzero(of.count_B > groups.SLOT).view(-1)
        over = over_L.cpu().numpy()
        for low, high in self._groups:
            first, last = np.searchsorted(over, (low, high)).tolist()
            if first == last:
                continue
            self._fill(low, high, fill)
            for kind, listed in self._kinds.items():
                blocks_L = over_L[first:last]
                if listed is not None:
                    held = np.flatnonzero(np.isin(over[first:last], listed[0], assume_unique=True))
                    blocks_L = blocks_L[torch.from_numpy(held).to(self.device)]
                if blocks_L.numel():
                    new_width, aligned = kind
                    _all[(blocks_L.numel(),)](
                        *(self._table_RC, self._row_B, blocks_L.to(torch.int32), of.bound_B),
                        *(of.low_K.view(torch.uint32), unsigned(of.step_K), of.unlike),
                        *(self.width, new_width, UNSIGNED[self.width], UNSIGNED[new_width], aligned, BLOCK),
                        num_warps=16,
                    )
        self._pack(
            len(over), 0, over_L.to(torch.int32), of, (of.low_K.view(torch.uint32), unsigned(of.step_K), 0)
        )

    def _compare(self, low: int, high: int, of: _Launched, into: Into) -> None:
        for kind, listed in self._kinds.items():
            if listed is None:
                self._compare_kind(kind, high - low, low, None, of, into)
                continue
            first, last = np.searchsorted(listed[0], (low, high)).tolist()
            if first < last:
                self._compare_kind(kind, last - first, first, listed[1], of, into)

    def _compare_kind(
        self,
        kind: tuple[int, bool],
        count: int,
        first: int,
        listed_L: torch.Tensor | None,
        of: _Launched,
        into: Into,
    ) -> None:
        (new_width, aligned), (to_at, to_step, slots) = kind, into
        _compare[(count,)](
            *(self._table_RC, self._row_B, self._row_B if listed_L is None else listed_L, of.count_B),
            *(to_at, to_step, first, self.width, new_width, UNSIGNED[self.width], UNSIGNED[new_width]),
            *(aligned, listed_L is not None, of.wide, slots, BLOCK, groups.SLOT),
            num_warps=4 if aligned and new_width < 4 else 8,
        )

    def _pack(self, count: int, first: int, listed_L: torch.Tensor | None, of: _Launched, into: Into) -> None:
        slot_at, slot_step, slots = into
        _pack[(count,)](
            *(self._table_RC, self._row_B, self._row_B if listed_L is None else listed_L, of.bound_B),
            *(
                slot_at,
                slot_step,
                of.low_K,
                unsigned(of.step_K),
                of.gain_B.view(torch.uint64),
                of.above_B,
                of.unlike,
            ),
            *(first, of.low_K.numel(), UNSIGNED[self.width], listed_L is not None, slots, BLOCK, groups.SLOT),
            num_warps=1,
        )


@dataclasses.dataclass(eq=False)
class _Launched:
    """A comparison on its way."""

    count_B: torch.Tensor
    bound_B: torch.Tensor
    gain_B: torch.Tensor
    above_B: torch.Tensor
    low_K: torch.Tensor  # with the room that there is
    step_K: torch.Tensor
    most: torch.Tensor  # number of changes, and the most of a block
    # whether a step is zero, and whether a block has no room, as elements changed between two reads
    unlike: torch.Tensor
    host: torch.Tensor  # as `most`, on the host, once `done`
    wide: bool  # whether blocks with more changes than a slot holds have room for all their elements
    done: torch.cuda.Event | None = None

    @classmethod
    def of(cls, blocks: int, room: int, device: torch.device, signed: torch.dtype, wide: bool) -> _Launched:
        def new(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        host = torch.empty(2, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        bound_B = new(blocks + 1, torch.int64)
        bound_B[:1] = 0
        return cls(
            *(new(blocks, torch.int32), bound_B, new(blocks, torch.int64), new(blocks, torch.int32)),
            *(new(room, torch.int32), new(room, signed), new(2, torch.int64)),
            *(torch.zeros(2, dtype=torch.int64, device=device), host, wide),
        )


def _places(first_R: np.ndarray, copied_R: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return where in memory for copies that of each run goes, and the blocks at which that memory is used
    again.
    """
    place_R, edges, held = np.zeros_like(copied_R), list[int](), 0
    for run in np.flatnonzero(copied_R).tolist():
        size = -(-int(copied_R[run]) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if held + size > groups.COPIES_BYTES and held:
            edges.append(int(first_R[run]))
            held = 0
        place_R[run] = held
        held += size
    return place_R, edges


def _ends(value_B: torch.Tensor) -> torch.Tensor:
    """Return sums before each block, and of all, modulo 2**64."""
    ends = torch.zeros(value_B.numel() + 1, dtype=torch.int64, device=value_B.device)
    torch.cumsum(value_B, 0, dtype=torch.int64, out=ends[1:])
    return ends
