"""Kernels over tables of segments in Triton: prepare, swap and fingerprint, with one launch for all segments
of a kind.

A kernel reads from the table (see `table`) what a segment is, so the number of launches does not depend on
the number of segments. Kernels see bit patterns as unsigned integers, and every offset as int64. A program
adds its sums to those of its line; sums of integers modulo 2**64 do not depend on the order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.errors import undoing
from deltasync.gpu.common import UNSIGNED, on, unsigned
from deltasync.kernels import table
from deltasync.kernels.table import Line, Room, Rows, Table, Writes
from deltasync.tensors.fingerprint import INDEX_STEP, MIX_1, MIX_2, VALUE_STEP

_READ_BLOCK = 512  # elements that a program reads at once from a row of `table.STREAM_BLOCK`

_DEST, _KEY, _OFFSET, _FIRST, _SPAN, _DIMS, _COLUMNS, _MOST_DIMS, _LOW, _COUNT, _PLACE, _WRITE_COLUMNS = (
    tl.constexpr(column)
    for column in (
        *(
            table.DEST,
            table.KEY,
            table.OFFSET,
            table.FIRST,
            table.SPAN,
            table.DIMS,
            table.COLUMNS,
            table.MOST_DIMS,
        ),
        *(table.LOW, table.COUNT, table.PLACE, table.WRITE_COLUMNS),
    )
)

_INDEX_STEP, _VALUE_STEP = tl.constexpr(INDEX_STEP), tl.constexpr(VALUE_STEP)
_MIX_1, _MIX_2 = tl.constexpr(MIX_1), tl.constexpr(MIX_2)

# Nothing is specialized on values or alignment: a commit must not have to compile what `warm_up` has not
# compiled.
_swap_arguments = ["line_ptr", "dim_ptr", "write_ptr", "row_ptr", "low_ptr", "value_ptr", "check_ptr"]
_prepare_arguments = [
    *("line_ptr", "dim_ptr", "write_ptr", "row_ptr", "low_ptr", "step_ptr", "value_ptr"),
    *("gain_ptr", "check_ptr", "kept_ptr"),
]
_fingerprint_arguments = ["line_ptr", "dim_ptr", "row_ptr", "gain_ptr"]


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _cell(key, index, bits):
    return _mixed(key + index.to(tl.uint64) * _INDEX_STEP + bits.to(tl.uint64) * _VALUE_STEP)


@triton.jit
def _weighted(at, bits):
    return bits.to(tl.uint64) * (at.to(tl.uint64) * 2 + 1)


@triton.jit
def _line(row_ptr, line_ptr):
    """Return the number of a program's line, the line, and the program's number among those of the line."""
    row = tl.load(row_ptr + tl.program_id(0))
    number = row >> 32
    return number, line_ptr + number * _COLUMNS, row & 0xFFFFFFFF


@triton.jit
def _changes(line, number, block, dim_ptr, write_ptr, low_ptr, STRIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Find the changes of a program.

    Returns the numbers of the first one and of its value, their offsets from the line's first element in the
    tensor and live memory, and whether each is in the segment. Contiguous lines take no division, the others
    one of 32 bits a dimension.
    """
    write = write_ptr + number * _WRITE_COLUMNS
    first = block * BLOCK
    lane = tl.arange(0, BLOCK)
    inside = lane < (tl.load(write + _COUNT) - first)
    k = tl.load(write + _LOW) + first
    offset = tl.load(low_ptr + k + lane, inside, other=0) - tl.load(line + _FIRST).to(tl.uint32)
    if STRIDED:
        rest = tl.where(inside, offset, 0)
        to = rest.to(tl.int64) * 0
        for dim in range(tl.load(line + _DIMS)):
            triple = dim_ptr + (number * 2 * _MOST_DIMS + dim) * 3
            stride = tl.load(triple).to(tl.uint32)
            coordinate = rest // stride
            rest -= coordinate * stride
            inside = inside & (coordinate < tl.load(triple + 1).to(tl.uint32))
            to += coordinate.to(tl.int64) * tl.load(triple + 2)
        inside = inside & (rest == 0)
    else:
        to = offset
    return k, tl.load(write + _PLACE) + first, offset, to, inside


@triton.jit(do_not_specialize_on_alignment=_prepare_arguments)
def _prepare(
    line_ptr,
    dim_ptr,
    write_ptr,
    row_ptr,
    low_ptr,
    step_ptr,
    value_ptr,
    gain_ptr,
    check_ptr,
    kept_ptr,
    BITS: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number, line, block = _line(row_ptr, line_ptr)
    k, place, offset, to, inside = _changes(line, number, block, dim_ptr, write_ptr, low_ptr, STRIDED, BLOCK)
    lane = tl.arange(0, BLOCK)
    old = tl.load(tl.load(line + _DEST).to(tl.pointer_type(BITS)) + to, inside, other=0)
    tl.atomic_add(
        check_ptr + number, tl.sum(_weighted(to, old), axis=0).to(tl.int64, bitcast=True), sem="relaxed"
    )
    new = tl.load(step_ptr + k + lane, inside, other=0) + old
    tl.store(value_ptr + place + lane, new, inside)
    key = tl.load(line + _KEY).to(tl.uint64, bitcast=True)
    index = tl.load(line + _OFFSET) + offset.to(tl.int64)
    # Outside, old and new are both 0 and add nothing.
    gained = tl.sum(_cell(key, index, new) - _cell(key, index, old), axis=0)
    tl.atomic_add(gain_ptr + number, gained.to(tl.int64, bitcast=True), sem="relaxed")
    if STRIDED:
        tl.atomic_add(kept_ptr + number, tl.sum(inside.to(tl.int64), axis=0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_swap_arguments)
def _swap(
    line_ptr,
    dim_ptr,
    write_ptr,
    row_ptr,
    low_ptr,
    value_ptr,
    check_ptr,
    BITS: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number, line, block = _line(row_ptr, line_ptr)
    _, place, _, to, inside = _changes(line, number, block, dim_ptr, write_ptr, low_ptr, STRIDED, BLOCK)
    value_ptr += place + tl.arange(0, BLOCK)
    dest_ptr = tl.load(line + _DEST).to(tl.pointer_type(BITS)) + to
    new = tl.load(value_ptr, inside, other=0)
    old = tl.load(dest_ptr, inside, other=0)
    tl.store(dest_ptr, new, inside)
    tl.store(value_ptr, old, inside)
    tl.atomic_add(
        check_ptr + number, tl.sum(_weighted(to, old), axis=0).to(tl.int64, bitcast=True), sem="relaxed"
    )


@triton.jit
def _index(line, number, dim_ptr, at):
    """Return the checkpoint indices of positions in a segment's memory, and whether an element lies there,
    not a gap.
    """
    index = at * 0 + tl.load(line + _OFFSET)
    rest = at
    inside = at >= 0
    for dim in range(tl.load(line + _DIMS)):
        triple = dim_ptr + ((number * 2 + 1) * _MOST_DIMS + dim) * 3
        live_stride = tl.load(triple)
        coordinate = rest // live_stride
        rest -= coordinate * live_stride
        inside = inside & (coordinate < tl.load(triple + 1))
        index += coordinate * tl.load(triple + 2)
    return index, inside & (rest == 0)


@triton.jit(do_not_specialize_on_alignment=_fingerprint_arguments)
def _fingerprint_strided(
    line_ptr, dim_ptr, row_ptr, gain_ptr, BITS: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr
):
    number, line, block = _line(row_ptr, line_ptr)
    first = block * ROW
    end = tl.minimum(first + ROW, tl.load(line + _SPAN))
    dest_ptr = tl.load(line + _DEST).to(tl.pointer_type(BITS))
    key = tl.load(line + _KEY).to(tl.uint64, bitcast=True)
    added = tl.zeros((BLOCK,), tl.uint64)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        index, element = _index(line, number, dim_ptr, at)
        element = element & (at < end)
        hashed = _cell(key, index, tl.load(dest_ptr + at, element, other=0))
        added += tl.where(element, hashed, 0)
    tl.atomic_add(gain_ptr + number, tl.sum(added, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_fingerprint_arguments)
def _fingerprint(
    line_ptr,
    dim_ptr,
    row_ptr,
    gain_ptr,
    BITS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Of contiguous segments: the index is a start for each block and a constant for each lane, so nothing is
    divided.
    """
    number, line, block = _line(row_ptr, line_ptr)
    first = block * ROW
    count = tl.minimum(ROW, tl.load(line + _SPAN) - first).to(tl.int32)
    dest_ptr = tl.load(line + _DEST).to(tl.pointer_type(BITS)) + first
    if ALIGNED:
        dest_ptr = tl.multiple_of(dest_ptr, 16)
    key = tl.load(line + _KEY).to(tl.uint64, bitcast=True)
    lane = tl.arange(0, BLOCK)
    of_block = key + (tl.load(line + _OFFSET) + first).to(tl.uint64) * _INDEX_STEP
    of_lane = lane.to(tl.uint64) * _INDEX_STEP
    added = tl.zeros((BLOCK,), tl.uint64)
    full = count // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        bits = tl.load(dest_ptr + start + lane)
        added += _mixed(of_block + of_lane + bits.to(tl.uint64) * _VALUE_STEP)
        of_block += (BLOCK * _INDEX_STEP) % (1 << 64)
    if full < count:
        element = full + lane < count
        bits = tl.load(dest_ptr + full + lane, element, other=0)
        added += tl.where(element, _mixed(of_block + of_lane + bits.to(tl.uint64) * _VALUE_STEP), 0)
    tl.atomic_add(gain_ptr + number, tl.sum(added, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


def prepare(of: Writes) -> None:
    """See `SegmentKernels.prepare`."""
    of.sum_3S.zero_()
    held, bits = of.table, UNSIGNED[of.table.width]
    step_K, value_V = unsigned(of.step_K), unsigned(of.value_V)
    for is_strided, of_kind in _kinds(of):
        # launches that end soon: an engine's kernels come between them
        for row_R in of_kind.split(of.at_once):
            arguments = (
                held.line_SC,
                held.dim_S2D3,
                of.write_SC,
                row_R,
                unsigned(of.low_K),
                step_K,
                value_V,
                *of.sum_3S,
            )
            _launch(_prepare, row_R.numel(), arguments, bits, is_strided, of.block)


def swap(of: Writes) -> None:
    """See `SegmentKernels.swap`."""
    of.sum_3S[table.CHECK].zero_()
    launched: list[tuple[bool, torch.Tensor]] = []
    try:
        for kind in _kinds(of):
            _swap_kind(of, *kind)
            launched.append(kind)
    except BaseException:
        with undoing():
            for kind in launched:
                _swap_kind(of, *kind)
        raise


def _swap_kind(of: Writes, is_strided: bool, row_R: torch.Tensor) -> None:
    held, low_K, value_V = of.table, unsigned(of.low_K), unsigned(of.value_V)
    arguments = (held.line_SC, held.dim_S2D3, of.write_SC, row_R, low_K, value_V, of.sum_3S[table.CHECK])
    _launch(_swap, row_R.numel(), arguments, UNSIGNED[held.width], is_strided, of.block)


def _kinds(of: Writes) -> list[tuple[bool, torch.Tensor]]:
    """Return the rows of contiguous lines, and of the others; at least one kind, and none without rows."""
    rows = (False, of.row_R[: of.contiguous_rows]), (True, of.row_R[of.contiguous_rows :])
    return [(is_strided, row_R) for is_strided, row_R in rows if row_R.numel()]


def fingerprint(of: Table, rows: Rows, gain_S: torch.Tensor) -> None:
    """See `SegmentKernels.fingerprint`."""
    gain_S.zero_()
    for (is_strided, is_unaligned), row_R in _pieces(rows):
        arguments = (of.line_SC, of.dim_S2D3, row_R, gain_S)
        constants = UNSIGNED[of.width], table.STREAM_BLOCK, _READ_BLOCK
        if is_strided:
            _launch(_fingerprint_strided, row_R.numel(), arguments, *constants, num_warps=8)
        else:
            _launch(_fingerprint, row_R.numel(), arguments, *constants, not is_unaligned)


def _pieces(rows: Rows) -> Iterator[tuple[tuple[bool, bool], torch.Tensor]]:
    """Yield the rows of each kind in launches that end soon."""
    for kind, first, last in rows.kinds:
        for row_R in rows.row_R[first:last].split(rows.at_once):
            yield kind, row_R


def _launch(
    kernel: Any, programs: int, arguments: tuple[torch.Tensor, ...], *constants: Any, **options: Any
) -> None:
    """Launch a kernel on the tensors' device; Triton would take the current one. Its interpreter takes host
    tensors.
    """
    with on(arguments[0].device):
        kernel[(programs,)](*arguments, *constants, **options)


@functools.cache
def warm_up(room: Room, dtype: torch.dtype) -> None:
    """Compile the kernels for signed views of this dtype, once per process.

    This takes seconds, which a commit would spend otherwise. Triton keeps what it compiled on disk, for later
    processes.
    """
    dest = room.allocate(16 * dtype.itemsize).view(dtype)
    low_K, step_K = (torch.zeros(1, dtype=kind, device=dest.device) for kind in (torch.int32, dtype))
    for first, layout in ((0, ()), (1, ()), (0, ((2, 1, 1),))):
        of = Table([Line(0, dest[first : first + 1], 0, 0, 1, layout)], room)
        fingerprint(of, of.whole, *of.empty(((1,), torch.int64)))
        writes = Writes(of, low_K, step_K, np.zeros(1, np.int64), np.ones(1, np.int64))
        prepare(writes)
        swap(writes)
