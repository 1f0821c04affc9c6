"""Kernels over tables of segments in Triton: prepare, swap and fingerprint, with one launch for all segments of a kind.

A kernel reads from the table (see `table`) what a segment is, so the number of launches does not depend on the number of
segments. Kernels see bit patterns as unsigned integers, and every offset as int64. Each program writes its partial sums,
which the host adds modulo 2**64. So there are no atomics, and every result is reproducible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.errors import undoing
from deltasync.kernels import reference, table
from deltasync.kernels.table import Entry, Kind, Table

_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_AT = {4: tl.int32, 8: tl.int64}
_READ_BLOCK = 1024  # elements that a program reads at once from a row of `table.STREAM_BLOCK`; 64 registers per thread

_DEST, _KEY, _OFFSET, _DIMS, _AT_COLUMN, _VALUE, _ABSOLUTE, _LAYOUT, _COLUMNS, _ROW = (
    tl.constexpr(column)
    for column in (
        table.DEST,
        table.KEY,
        table.OFFSET,
        table.DIMS,
        table.AT,
        table.VALUE,
        table.ABSOLUTE,
        table.LAYOUT,
        table.COLUMNS,
        table.ROW,
    )
)

# Nothing is specialized on values or alignment: a commit must not have to compile what `warm_up` has not compiled.
_swap_arguments = ["segment_ptr", "row_ptr", "check_ptr"]
_prepare_arguments = ["segment_ptr", "row_ptr", "added_ptr", "check_ptr"]
_fingerprint_arguments = ["segment_ptr", "row_ptr", "added_ptr"]


_INDEX_STEP = tl.constexpr(int(reference.INDEX_STEP))
_VALUE_STEP = tl.constexpr(int(reference.VALUE_STEP))
_MIX_1 = tl.constexpr(int(reference.MIX_1))
_MIX_2 = tl.constexpr(int(reference.MIX_2))


@triton.jit
def _cell(key, index, bits):
    z = key + index.to(tl.uint64) * _INDEX_STEP + bits.to(tl.uint64) * _VALUE_STEP
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _weighted(at, bits):
    return bits.to(tl.uint64) * (at.to(tl.uint64) * 2 + 1)


@triton.jit
def _index(segment, at):
    """Return the checkpoint indices of positions in a segment's memory, and whether an element lies there, not a gap."""
    index = at * 0 + tl.load(segment + _OFFSET)
    rest = at
    inside = at >= 0
    for dim in range(tl.load(segment + _DIMS)):
        line = segment + _LAYOUT + 3 * dim
        live_stride = tl.load(line)
        coordinate = rest // live_stride
        rest -= coordinate * live_stride
        inside = inside & (coordinate < tl.load(line + 1))
        index += coordinate * tl.load(line + 2)
    return index, inside & (rest == 0)


@triton.jit(do_not_specialize_on_alignment=_prepare_arguments)
def _prepare(segment_ptr, row_ptr, added_ptr, check_ptr, BITS: tl.constexpr, AT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    segment = segment_ptr + tl.load(row_ptr + _ROW * row) * _COLUMNS
    k = tl.load(row_ptr + _ROW * row + 1) + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < tl.load(row_ptr + _ROW * row + 2)
    at_ptr = tl.load(segment + _AT_COLUMN).to(tl.pointer_type(AT))
    value_ptr = tl.load(segment + _VALUE).to(tl.pointer_type(BITS))
    at = tl.load(at_ptr + k, inside, other=0).to(tl.int64)
    old = tl.load(tl.load(segment + _DEST).to(tl.pointer_type(BITS)) + at, inside, other=0)
    data = tl.load(value_ptr + k, inside, other=0)
    new = tl.where(tl.load(segment + _ABSOLUTE) != 0, data, data + old)
    tl.store(value_ptr + k, new, inside)
    key = tl.load(segment + _KEY).to(tl.uint64, bitcast=True)
    index, _ = _index(segment, at)
    # Outside, old and new are both 0 and add nothing.
    tl.store(added_ptr + row, tl.sum(_cell(key, index, new) - _cell(key, index, old), axis=0))
    tl.store(check_ptr + row, tl.sum(_weighted(at, old), axis=0))


@triton.jit(do_not_specialize_on_alignment=_swap_arguments)
def _swap(segment_ptr, row_ptr, check_ptr, BITS: tl.constexpr, AT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    segment = segment_ptr + tl.load(row_ptr + _ROW * row) * _COLUMNS
    k = tl.load(row_ptr + _ROW * row + 1) + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < tl.load(row_ptr + _ROW * row + 2)
    dest_ptr = tl.load(segment + _DEST).to(tl.pointer_type(BITS))
    value_ptr = tl.load(segment + _VALUE).to(tl.pointer_type(BITS))
    at = tl.load(tl.load(segment + _AT_COLUMN).to(tl.pointer_type(AT)) + k, inside, other=0).to(tl.int64)
    old = tl.load(dest_ptr + at, inside, other=0)
    tl.store(dest_ptr + at, tl.load(value_ptr + k, inside, other=0), inside)
    tl.store(value_ptr + k, old, inside)
    tl.store(check_ptr + row, tl.sum(_weighted(at, old), axis=0))


@triton.jit(do_not_specialize_on_alignment=_fingerprint_arguments)
def _fingerprint(segment_ptr, row_ptr, added_ptr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    segment = segment_ptr + tl.load(row_ptr + _ROW * row) * _COLUMNS
    first = tl.load(row_ptr + _ROW * row + 1)
    end = first + tl.load(row_ptr + _ROW * row + 2)
    dest_ptr = tl.load(segment + _DEST).to(tl.pointer_type(BITS))
    key = tl.load(segment + _KEY).to(tl.uint64, bitcast=True)
    added = tl.zeros((BLOCK,), tl.uint64)
    for start in range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        index, element = _index(segment, at)
        element = element & (at < end)
        hashed = _cell(key, index, tl.load(dest_ptr + at, element, other=0))
        added += tl.where(element, hashed, 0)
    tl.store(added_ptr + row, tl.sum(added, axis=0))


def prepare(of: Table) -> None:
    """See `SegmentKernels.prepare`."""
    for kind in _pieces(of):
        added, check = (_sums(of, which, kind) for which in (0, 1))
        arguments = (of.segment_SC, of.row_RC[kind.first : kind.last], added, check)
        _launch(_prepare, kind, arguments, _BITS[kind.bits], _AT[kind.at], table.SCATTER_BLOCK)


def swap(of: Table) -> None:
    """See `SegmentKernels.swap`."""
    launched: list[Kind] = []
    try:
        for kind in of.kinds:
            _swap_kind(of, kind)
            launched.append(kind)
    except BaseException:
        with undoing():
            for kind in launched:
                _swap_kind(of, kind)
        raise


def _swap_kind(of: Table, kind: Kind) -> None:
    arguments = (of.segment_SC, of.row_RC[kind.first : kind.last], _sums(of, 1, kind))
    _launch(_swap, kind, arguments, _BITS[kind.bits], _AT[kind.at], table.SCATTER_BLOCK)


def fingerprint(of: Table) -> None:
    """See `SegmentKernels.fingerprint`."""
    for kind in _pieces(of):
        arguments = (of.segment_SC, of.row_RC[kind.first : kind.last], _sums(of, 0, kind))
        _launch(_fingerprint, kind, arguments, _BITS[kind.bits], _READ_BLOCK, num_warps=8)


def _pieces(of: Table) -> Iterator[Kind]:
    """Yield the rows of each kind in launches that end soon, so that an engine's kernels come between them."""
    for kind in of.kinds:
        for first in range(kind.first, kind.last, table.ROWS_AT_ONCE):
            yield dataclasses.replace(kind, first=first, last=min(first + table.ROWS_AT_ONCE, kind.last))


def _sums(of: Table, which: int, kind: Kind) -> torch.Tensor:
    return of.sum_2R[which, kind.first : kind.last].view(torch.uint64)


def _launch(kernel: Any, kind: Kind, arguments: tuple[torch.Tensor, ...], *constants: Any, **options: Any) -> None:
    """Launch a kernel on the tensors' device; Triton would take the current one. Its interpreter takes host tensors."""
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(kind.last - kind.first,)](*arguments, *constants, **options)


class _Anywhere:
    """Allocates the tables of `warm_up`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def send(self, host: torch.Tensor, to: torch.Tensor) -> None:
        to.copy_(host)


@functools.cache
def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for signed views of this dtype, once per process.

    This takes seconds, which a commit would spend otherwise. Triton keeps what it compiled on disk, for later processes.
    """
    dest = torch.zeros(1, dtype=dtype, device=device)
    room = _Anywhere(device)
    for at in (np.int32, np.int64):
        of = Table([Entry(0, dest, 0, (), np.zeros(1, at), np.zeros(1, f"u{dest.element_size()}"))], room)
        prepare(of)
        swap(of)
    fingerprint(Table([Entry(0, dest, 0, ())], room))
