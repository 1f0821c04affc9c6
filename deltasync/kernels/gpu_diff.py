"""Compare many tensors on a GPU with their shadows there, and bring the changes to the host: Triton over tables.

Tensors are compared in groups of up to `groups.GROUP` elements. Each group takes the same few launches, however many tensors
it has:

    _mark      reads both tensors of each row of a table once; writes a bit for each element that differs, and the number of
               changes of each block
    cumsum     finds where the changes of each block go
    _compact   visits only the marked elements; writes index and step of each into a buffer, and its new bits into the shadow
    copy       moves the buffer to pinned memory, on a stream of its own, while the next group is compared

There are two buffers, and pinned memory for each. The host waits for a group when its buffer is wanted for the group after
the next, which leaves the device one group to compare meanwhile. A buffer has room for somewhat more changes than are
expected. If there are even more, the group is compared again; the shadow already has those that did fit. So memory beside
the shadows is bounded, whatever changed: on the device `groups.GROUP` / 8 bytes of marks and two `groups.BUFFER_BYTES`, on
the host two `groups.BUFFER_BYTES` of pinned memory, which stay.

Kernels see bit patterns as unsigned integers. N elements, K changed, B blocks, W words of 32 marks, T rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.kernels import groups
from deltasync.tensors import index_dtype

_WORDS = 1024  # words of marks per program of `_compact`
_ALIGNED_BYTES = 16

_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _bfloat16_bits(bits):
    """Round float32 bit patterns to nearest even. In integers, because hardware and torch disagree on what a NaN becomes."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16)


@triton.jit
def _popcount(bits):
    """Count the ones in each 32-bit word. LLVM recognizes this form as one instruction."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _mark(
    table_ptr,
    row_ptr,
    mark_ptr,
    count_ptr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    entry_ptr = table_ptr + tl.load(row_ptr + block).to(tl.int64) * 4
    base = (block - tl.load(entry_ptr + 2)) * BLOCK
    left = tl.load(entry_ptr + 3) - base
    old_ptr = tl.load(entry_ptr).to(tl.pointer_type(OLD)) + base
    new_ptr = tl.load(entry_ptr + 1).to(tl.pointer_type(NEW)) + base
    if ALIGNED:
        old_ptr, new_ptr = tl.multiple_of(old_ptr, 16), tl.multiple_of(new_ptr, 16)
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    at = word[:, None] * 32 + bit[None, :]
    if left >= BLOCK:  # loads without a mask are the widest
        old = tl.load(old_ptr + at)
        new = tl.load(new_ptr + at)
    else:
        old = tl.load(old_ptr + at, at < left, other=0)
        new = tl.load(new_ptr + at, at < left, other=0)
    if OLD != NEW:
        new = _bfloat16_bits(new)
    changed = (old != new).to(tl.uint32)
    tl.store(mark_ptr + block * (BLOCK // 32) + word, tl.sum(changed << bit.to(tl.uint32)[None, :], axis=1))
    tl.store(count_ptr + block, tl.sum(tl.sum(changed, axis=1), axis=0).to(tl.int32))


@triton.jit(do_not_specialize=["word_count", "capacity"])
def _compact(
    table_ptr,
    row_ptr,
    mark_ptr,
    end_ptr,
    index_ptr,
    step_ptr,
    word_count: tl.int32,
    capacity: tl.int32,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    marks = tl.load(mark_ptr + word, word < word_count, other=0)
    count = _popcount(marks)
    block = tl.program_id(0) * (WORDS * 32 // BLOCK)
    k = tl.load(end_ptr + block - 1, block > 0, other=0) + tl.cumsum(count, axis=0) - count
    # No mark lies beyond the end of its row, so a mark is enough to know that an element may be read.
    marked = marks != 0
    entry_ptr = table_ptr + tl.load(row_ptr + word // (BLOCK // 32), marked, other=0).to(tl.int64) * 4
    base = (word - tl.load(entry_ptr + 2, marked, other=0) * (BLOCK // 32)) * 32
    old_ptr = tl.load(entry_ptr, marked, other=0).to(tl.pointer_type(OLD)) + base
    new_ptr = tl.load(entry_ptr + 1, marked, other=0).to(tl.pointer_type(NEW)) + base
    for _ in range(tl.max(count, axis=0)):  # each turn takes the lowest mark left in each word
        bit = _popcount((marks & (0 - marks)) - 1)
        taken = (marks != 0) & (k < capacity)
        old = tl.load(old_ptr + bit, taken, other=0)
        new = tl.load(new_ptr + bit, taken, other=0)
        if OLD != NEW:
            new = _bfloat16_bits(new)
        tl.store(index_ptr + k, (base + bit).to(tl.int32), taken)
        tl.store(step_ptr + k, new - old, taken)
        tl.store(old_ptr + bit, new, taken)
        marks = marks & (marks - 1)
        k += 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A piece of a tensor: the tensor's name, the piece's first index in it, its shadow, new bits and expected changes."""

    name: str
    start: int
    shadow: torch.Tensor
    new: torch.Tensor
    expected: float

    @property
    def blocks(self) -> int:
        return triton.cdiv(self.shadow.numel(), groups.BLOCK)


_Kind = tuple[int, int, bool]
"""Bytes of an element of the shadow and of the new tensor, and whether both are aligned. A launch takes one kind."""


@dataclasses.dataclass(slots=True)
class _Group:
    """Rows of one kind that wait to be compared."""

    rows: list[_Row] = dataclasses.field(default_factory=list)
    blocks: int = 0

    def add(self, row: _Row) -> None:
        self.rows.append(row)
        self.blocks += row.blocks


@dataclasses.dataclass(slots=True)
class _Launched:
    """A launched group: its rows, where each ends in blocks, and in `host` what changed, once `done`, None on the CPU."""

    rows: Sequence[_Row]
    aligned: bool
    end_T: np.ndarray
    block_count: int
    capacity: int
    host: torch.Tensor
    done: torch.cuda.Event | None

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how many changes end with each row, int64[T]; copies of index_K and step_K of those that fit."""
        if self.done is not None:
            self.done.synchronize()
        ends, index_bytes, step_bytes = groups.layout(self.block_count, self.capacity, self.rows[0].shadow.element_size())
        last_T = self.host[:ends].view(torch.int32).numpy()[self.end_T - 1].astype(np.int64)
        taken = min(int(last_T[-1]), self.capacity)
        index = self.host[ends : ends + index_bytes].view(torch.int32)
        step = self.host[ends + index_bytes : ends + index_bytes + step_bytes].view(self.rows[0].shadow.dtype)
        return last_T, index[:taken].clone().numpy(), step[:taken].clone().numpy()


class Diff:
    """Compares tensors with their shadows on one device, on its current stream, and brings the changes to the host.

    Args:
        device: A CUDA device, or the CPU through Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if self._on_gpu else None
        self._hosts = [torch.empty(0, dtype=torch.uint8)] * 2  # pinned
        self.drop()

    def drop(self) -> None:
        """See `DeviceDiff.drop`."""
        self._open: dict[_Kind, _Group] = {}
        self._launched: deque[_Launched] = deque()  # those whose results are still in a buffer, at most two
        self._again: list[tuple[Sequence[_Row], bool, int]] = []  # groups to compare again, and how many changes are left
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._number = 0  # of the next buffer
        self._names: dict[str, int] = {}
        self._found: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}

    def add(self, name: str, shadow_N: torch.Tensor, new_N: torch.Tensor, expected: int) -> None:
        """Compare a tensor with its shadow, when its group is full or in `finish`. Both must stay until `finish` returns.

        Args:
            name: Name of the tensor.
            shadow_N: Signed view of the last published bits. Mutated: after `finish` it holds the new bits.
            new_N: The weights. For a bfloat16 shadow they may be float32, which is rounded to nearest even; a NaN keeps its
                sign and the upper bits of its payload, and becomes quiet. Otherwise a signed view of the shadow's dtype.
            expected: Number of elements that are expected to have changed. Many more take another comparison.

        Raises:
            torch.OutOfMemoryError: the device has no memory for a group. The caller has to call `drop`.
        """
        if new_N.dtype == torch.float32:
            new_N = new_N.view(torch.int32)
        assert shadow_N.is_contiguous() and new_N.is_contiguous() and shadow_N.numel() == new_N.numel()
        self._names[name] = shadow_N.numel()
        aligned = (shadow_N.data_ptr() | new_N.data_ptr()) % _ALIGNED_BYTES == 0
        kind = shadow_N.element_size(), new_N.element_size(), aligned
        start = 0
        while start < shadow_N.numel():
            group = self._open.setdefault(kind, _Group())
            room = groups.GROUP // groups.BLOCK - group.blocks
            stop = min(start + room * groups.BLOCK, shadow_N.numel())
            share = expected * (stop - start) / shadow_N.numel()
            group.add(_Row(name, start, shadow_N[start:stop], new_N[start:stop], share))
            if group.blocks * groups.BLOCK >= groups.GROUP:
                self._launch(self._open.pop(kind).rows, aligned)
            start = stop

    def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Wait until all tensors that were added are compared.

        Returns:
            `reference.diff` of the shadow before and after, by name, for the tensors that changed.

        Raises:
            torch.OutOfMemoryError: as `add`.
        """
        while self._open:
            (*_, aligned), waiting = self._open.popitem()
            self._launch(waiting.rows, aligned)
        while self._launched or self._again:
            while self._launched:
                self._collect()
            again, self._again = self._again, []
            for group in again:
                self._launch(*group)
        joined = {name: _join(pieces, self._names[name]) for name, pieces in self._found.items()}
        self.drop()
        return joined

    def _collect(self) -> None:
        """Wait for the oldest launched group, and take its changes out of its buffer."""
        done = self._launched.popleft()
        last_T, index_K, step_K = done.results()
        for row, first, last in zip(done.rows, [0, *last_T[:-1]], last_T, strict=True):
            if min(last, index_K.size) > first:
                self._found.setdefault(row.name, []).append((row.start, index_K[first:last], step_K[first:last]))
        if last_T[-1] > done.capacity:
            self._again.append((done.rows, done.aligned, int(last_T[-1]) - done.capacity))

    def _launch(self, rows: Sequence[_Row], aligned: bool, wanted: int | None = None) -> None:
        """Launch the comparison of a group. Everything is allocated before the first write to a shadow."""
        with torch.cuda.device(self._device) if self._on_gpu else contextlib.nullcontext():
            self._launch_here(rows, aligned, wanted)

    def _launch_here(self, rows: Sequence[_Row], aligned: bool, wanted: int | None) -> None:
        shadow, new = rows[0].shadow, rows[0].new
        end_T = np.cumsum([row.blocks for row in rows])
        blocks, width = int(end_T[-1]), shadow.element_size()
        wanted = groups.may_come(sum(row.expected for row in rows)) if wanted is None else wanted
        capacity = groups.capacity(sum(row.shadow.numel() for row in rows), blocks, wanted, width)
        sizes = groups.layout(blocks, capacity, width)
        table, row_B = self._tables(rows, end_T)
        mark_W = shadow.new_empty(blocks * (groups.BLOCK // 32), dtype=torch.int32)
        count_B = shadow.new_empty(blocks, dtype=torch.int32)
        host, buffer = self._buffer(sum(sizes))
        ends, index, step = torch.split(buffer, list(sizes))
        types = _UNSIGNED[width], _UNSIGNED[new.element_size()]
        mark = mark_W.view(torch.uint32)
        _mark[(blocks,)](table, row_B, mark, count_B, *types, aligned, groups.BLOCK, num_warps=8)
        end_B = ends.view(torch.int32)[:blocks]
        torch.cumsum(count_B, 0, dtype=torch.int32, out=end_B)
        changes = index.view(torch.int32), step.view(getattr(torch, f"uint{8 * width}"))
        _compact[(triton.cdiv(mark.numel(), _WORDS),)](
            table, row_B, mark, end_B, *changes, mark.numel(), capacity, *types, groups.BLOCK, _WORDS, num_warps=8
        )
        done = self._copy(host, buffer)
        self._launched.append(_Launched(rows, aligned, end_T, blocks, capacity, host, done))

    def _tables(self, rows: Sequence[_Row], end_T: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy to the device, in one copy, the table of the rows, int64[T, 4], flat, and the row of each block, int32[B]."""
        blocks_T = np.diff(end_T, prepend=0)
        table = np.array([(row.shadow.data_ptr(), row.new.data_ptr(), 0, row.shadow.numel()) for row in rows], np.int64)
        table[:, 2] = end_T - blocks_T
        size = table.nbytes
        both = torch.empty(size + 4 * int(end_T[-1]), dtype=torch.uint8, pin_memory=self._on_gpu)
        both[:size].view(torch.int64).numpy()[:] = table.reshape(-1)
        both[size:].view(torch.int32).numpy()[:] = np.repeat(np.arange(len(rows), dtype=np.int32), blocks_T)
        there = both.to(self._device, non_blocking=True)
        return there[:size].view(torch.int64), there[size:].view(torch.int32)

    def _buffer(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next of two buffers, in pinned memory and on the device, after its last contents were taken."""
        if len(self._launched) == 2:
            self._collect()
        number, self._number = self._number, 1 - self._number
        host, buffer = self._hosts[number], self._buffers[number]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[number] = None  # so that the allocator has its memory
            buffer = self._buffers[number] = torch.empty(size, dtype=torch.uint8, device=self._device)
        if host.numel() < size:
            rounded = 1 << (size - 1).bit_length()  # as PyTorch rounds pinned memory up
            host = self._hosts[number] = torch.empty(rounded, dtype=torch.uint8, pin_memory=self._on_gpu)
        return host[:size], buffer[:size]

    def _copy(self, host: torch.Tensor, buffer: torch.Tensor) -> torch.cuda.Event | None:
        if self._copies is None:
            host.copy_(buffer)
            return None
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host.copy_(buffer, non_blocking=True)
            return self._copies.record_event()


def _join(pieces: list[tuple[int, np.ndarray, np.ndarray]], element_count: int) -> tuple[np.ndarray, np.ndarray]:
    """Join the changes of a tensor's pieces, given with their first indices. Those of a piece stay in the order found."""
    dtype = index_dtype(element_count)
    pieces.sort(key=lambda piece: piece[0])
    index = [at_K.astype(dtype, copy=False) + dtype.type(start) if start else at_K for start, at_K, _ in pieces]
    step = [step_K.view(f"u{step_K.itemsize}") for _, _, step_K in pieces]
    if len(pieces) == 1:
        return index[0].astype(dtype, copy=False), step[0]
    return np.concatenate(index).astype(dtype, copy=False), np.concatenate(step)
