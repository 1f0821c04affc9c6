"""Prepare, swap, fingerprint and compare in torch operations, for devices that have no kernels of their own.

torch adds and multiplies int64 modulo 2**64, so signed arithmetic gives the same bits as unsigned arithmetic
in `reference`. Only shifts need a mask. Only the sums of fingerprints leave the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from deltasync.errors import undoing
from deltasync.kernels import table
from deltasync.kernels.table import Line, Room, Rows, Table, Writes
from deltasync.tensors.fingerprint import INDEX_STEP, MIX_1, MIX_2, VALUE_STEP

_READ_BLOCK = 1 << 20


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_INDEX_STEP, _VALUE_STEP, _MIX_1, _MIX_2 = map(_as_signed, (INDEX_STEP, VALUE_STEP, MIX_1, MIX_2))


def _shift(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift int64 right, filling with zeros."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _widened(bits_K: torch.Tensor) -> torch.Tensor:
    """Convert a signed view of bit patterns to the unsigned values, as int64."""
    width = 8 * bits_K.element_size()
    return bits_K.to(torch.int64) & ((1 << width) - 1 if width < 64 else -1)


def cell_hash(key: int, index_K: torch.Tensor, bits_K: torch.Tensor) -> torch.Tensor:
    """As `reference.cell_hash`, int64; `bits_K` is a signed view of the bit patterns."""
    z = _as_signed(key) + index_K.to(torch.int64) * _INDEX_STEP + _widened(bits_K) * _VALUE_STEP
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def prepare(of: Writes) -> None:
    """See `SegmentKernels.prepare`."""
    of.sum_3S.zero_()
    for number, low, place, value_K, to_K, index_K in _changes(of):
        line = of.table.lines[number]
        old_K = line.dest[to_K]
        step_K = of.step_K[low : low + value_K.numel()] if place is None else of.step_K[low + place]
        new_K = step_K + old_K
        value_K.copy_(new_K) if place is None else value_K.index_copy_(0, place, new_K)
        gained = cell_hash(line.key, index_K, new_K) - cell_hash(line.key, index_K, old_K)
        of.sum_3S[table.GAIN, number] = gained.sum()
        of.sum_3S[table.CHECK, number] = _checksum(to_K, old_K)
        of.sum_3S[table.KEPT, number] = to_K.numel()


def swap(of: Writes) -> None:
    """See `SegmentKernels.swap`."""
    # Everything is allocated before the first value is exchanged.
    writes = []
    of.sum_3S[table.CHECK].zero_()
    for number, _, place, value_K, to_K, _ in _changes(of):
        dest = of.table.lines[number].dest
        new_K, old_K = value_K.clone() if place is None else value_K[place], dest[to_K]
        of.sum_3S[table.CHECK, number] = _checksum(to_K, old_K)
        writes.append((dest, to_K, new_K, value_K, place, old_K))
    begun = 0
    try:
        for dest, to_K, new_K, *_ in writes:
            begun += 1
            dest.index_copy_(0, to_K, new_K)
        for *_, value_K, place, old_K in writes:
            value_K.copy_(old_K) if place is None else value_K.index_copy_(0, place, old_K)
    except BaseException:
        with undoing():
            for dest, to_K, *_, old_K in writes[:begun]:
                dest.index_copy_(0, to_K, old_K)
        raise


def _changes(
    of: Writes,
) -> Iterator[tuple[int, int, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield what is written to each line.

    That is the line's number, its first change, which of its changes lie in the segment (None for all), the
    values of all of them, and the positions in live memory and checkpoint indices of those in the segment.
    """
    for number in np.flatnonzero(of.write_SC_host[:, table.COUNT]).tolist():
        line, (low, count, first) = of.table.lines[number], of.write_SC_host[number].tolist()
        offset_K = (of.low_K[low : low + count].to(torch.int64) - line.first) & 0xFFFFFFFF
        place, to_K, rest = None, offset_K, offset_K
        if not line.is_contiguous:
            inside, to_K = torch.ones_like(offset_K, dtype=torch.bool), torch.zeros_like(offset_K)
            for stride, size, live_stride in sorted(
                ((s, n, live) for live, n, s in line.layout), reverse=True
            ):
                coordinate = rest // stride
                rest = rest - coordinate * stride
                inside &= coordinate < size
                to_K = to_K + coordinate * live_stride
            place = (inside & (rest == 0)).nonzero().view(-1)
            to_K, offset_K = to_K[place], offset_K[place]
        yield number, low, place, of.value_V[first : first + count], to_K, offset_K + line.offset


def fingerprint(of: Table, rows: Rows, gain_S: torch.Tensor) -> None:
    """See `SegmentKernels.fingerprint`."""
    gain_S.zero_()
    for number in rows.lines.tolist():
        line = of.lines[number]
        for first in range(0, line.dest.numel(), _READ_BLOCK):
            bits = line.dest[first : first + _READ_BLOCK]
            index, element = _index(line, torch.arange(first, first + bits.numel(), device=bits.device))
            gain_S[number] += torch.where(element, cell_hash(line.key, index, bits), 0).sum()


def _index(line: Line, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the checkpoint indices of positions in a segment's memory, and whether an element lies there,
    not a gap.
    """
    index, rest, inside = torch.full_like(at, line.offset), at, at >= 0
    for live_stride, size, stride in line.layout:
        coordinate = rest // live_stride
        rest = rest - coordinate * live_stride
        inside = inside & (coordinate < size)
        index = index + coordinate * stride
    return index, inside & (rest == 0)


def _checksum(at_K: torch.Tensor, bits_K: torch.Tensor) -> torch.Tensor:
    return ((2 * at_K + 1) * _widened(bits_K)).sum()


def warm_up(room: Room, dtype: torch.dtype) -> None:
    """Do nothing: there is nothing to compile."""
