"""Prepare, swap, fingerprint and compare in torch operations, for devices that have no kernels of their own.

torch adds and multiplies int64 modulo 2**64, so signed arithmetic gives the same bits as unsigned arithmetic in `reference`.
Only shifts need a mask. Only the sums of fingerprints leave the device.
"""

from __future__ import annotations

import torch

from deltasync.errors import undoing
from deltasync.kernels import reference
from deltasync.kernels.table import Entry, Table

_READ_BLOCK = 1 << 20


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_INDEX_STEP, _VALUE_STEP, _MIX_1, _MIX_2 = (
    _as_signed(int(c)) for c in (reference.INDEX_STEP, reference.VALUE_STEP, reference.MIX_1, reference.MIX_2)
)


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


def prepare(of: Table) -> None:
    """See `SegmentKernels.prepare`."""
    of.sum_2R.zero_()
    for row, (entry, positions_K, value_K) in zip(of.first_S, of.writes(), strict=True):
        at_K = positions_K.long()
        old_K = entry.dest[at_K]
        if not entry.absolute:
            value_K += old_K
        index_K, _ = _index(entry, at_K)
        of.sum_2R[0, row] = (cell_hash(entry.key, index_K, value_K) - cell_hash(entry.key, index_K, old_K)).sum()
        of.sum_2R[1, row] = _checksum(at_K, old_K)


def swap(of: Table) -> None:
    """See `SegmentKernels.swap`."""
    # Everything is allocated before the first value is exchanged.
    writes = [(entry.dest, at_K.long(), value_K, entry.dest[at_K.long()]) for entry, at_K, value_K in of.writes()]
    of.sum_2R[1].zero_()
    for row, (_, at_K, _, old_K) in zip(of.first_S, writes, strict=True):
        of.sum_2R[1, row] = _checksum(at_K, old_K)
    begun = 0
    try:
        for dest, at_K, value_K, _ in writes:
            begun += 1
            dest.index_copy_(0, at_K, value_K)
        for _, _, value_K, old_K in writes:
            value_K.copy_(old_K)
    except BaseException:
        with undoing():
            for dest, at_K, _, old_K in writes[:begun]:
                dest.index_copy_(0, at_K, old_K)
        raise


def fingerprint(of: Table) -> None:
    """See `SegmentKernels.fingerprint`."""
    of.sum_2R.zero_()
    for row, entry in zip(of.first_S, of.entries, strict=True):
        for first in range(0, entry.dest.numel(), _READ_BLOCK):
            bits = entry.dest[first : first + _READ_BLOCK]
            index, element = _index(entry, torch.arange(first, first + bits.numel(), device=bits.device))
            of.sum_2R[0, row] += torch.where(element, cell_hash(entry.key, index, bits), 0).sum()


def _index(entry: Entry, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the checkpoint indices of positions in a segment's memory, and whether an element lies there, not a gap."""
    index, rest, inside = torch.full_like(at, entry.offset), at, at >= 0
    for live_stride, size, stride in entry.layout:
        coordinate = rest // live_stride
        rest = rest - coordinate * live_stride
        inside = inside & (coordinate < size)
        index = index + coordinate * stride
    return index, inside & (rest == 0)


def _checksum(at_K: torch.Tensor, bits_K: torch.Tensor) -> torch.Tensor:
    return ((2 * at_K + 1) * _widened(bits_K)).sum()


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Do nothing: there is nothing to compile."""
