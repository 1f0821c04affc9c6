"""The rate of every kernel on one large tensor, compared with a copy on the same device."""

from __future__ import annotations

import torch

from benchmarks.gpu.machine import Machine, Row, random_bits, random_positions
from deltasync.kernels import segment_kernels
from deltasync.kernels.table import MOST_ELEMENTS, Line, Table, Writes
from deltasync.live import Segment

SECTOR_BYTES = 32
_KEY = 0x9E3779B97F4A7C15


def measure(machine: Machine, element_count: int, changed_fraction: float) -> dict[str, float]:
    """Measure each kernel, and check its result.

    Bytes are those read and written, as for a copy: the tensor for a fingerprint, and for each element that
    is exchanged its position, its value twice, and a sector of memory twice. Returns `copy`, bytes per
    second, and `scatter_s`, seconds of a plain scatter of the changed elements.
    """
    live_N = random_bits(element_count, machine.device, 0)
    at_K = random_positions(element_count, changed_fraction, machine.device, 1)
    rates = _measure_plain(machine, live_N, at_K)
    _measure_tables(machine, live_N, at_K)
    return rates


def _measure_plain(machine: Machine, live_N: torch.Tensor, at_K: torch.Tensor) -> dict[str, float]:
    """Measure what the device can do: a copy, and a scatter by torch."""
    new_N = live_N.clone()
    copy_s = machine.median_s(lambda: new_N.copy_(live_N))
    copy_rate = 2 * live_N.nbytes / copy_s
    machine.rows.append(Row(what="copy on the device", seconds=copy_s, rate=copy_rate))
    ones_K = torch.ones(at_K.numel(), dtype=torch.int16, device=machine.device)
    new_N.index_put_((at_K,), ones_K).scatter_(0, at_K, ones_K)
    by_index_s = machine.median_s(lambda: new_N.index_put_((at_K,), ones_K))
    scatter_s = min(by_index_s, machine.median_s(lambda: new_N.scatter_(0, at_K, ones_K)))
    moved = at_K.numel() * (at_K.element_size() + 2 + 2 * SECTOR_BYTES)
    machine.rows.append(Row(what="plain scatter (torch)", seconds=scatter_s, rate=moved / scatter_s))
    return {"copy": copy_rate, "scatter_s": scatter_s}


def _measure_tables(machine: Machine, live_N: torch.Tensor, at_K: torch.Tensor) -> None:
    """Measure the kernels of a commit and an audit on one segment, which is restored at the end."""
    device = machine.device_of(live_N)
    on_device = segment_kernels(machine.device)
    segment = Segment(live_N, (1,), 0)
    pieces = [*segment.pieces(MOST_ELEMENTS)]
    lines = [
        Line(_KEY, each.flat(), each.offset, each.offset, each.offset + each.live.numel(), each.layout())
        for each in pieces
    ]
    of = Table(lines, device)
    low_K, step_K = at_K.to(torch.int32), torch.ones(at_K.numel(), dtype=torch.int16, device=machine.device)
    low_S, count_S = of.bounds(
        torch.searchsorted(at_K, torch.from_numpy(of.limit_L).to(at_K.device)).cpu().numpy()
    )
    writes = Writes(of, low_K, step_K, low_S, count_S)
    held, (sum_S,) = live_N.clone(), of.empty(((len(lines),), torch.int64))
    on_device.warm_up(device, live_N.dtype)
    on_device.fingerprint(of, of.whole, sum_S)
    before = sum_S.clone()
    row = machine.measure("fingerprint", lambda: on_device.fingerprint(of, of.whole, sum_S))
    row.rate = live_N.nbytes / row.seconds
    row = machine.measure("prepare", lambda: on_device.prepare(writes))
    moved = at_K.numel() * (4 + 2 * 2 + SECTOR_BYTES)
    row.rate = moved / row.seconds
    row = machine.measure("swap", lambda: on_device.swap(writes), lambda: on_device.swap(writes))
    row.rate = (moved + at_K.numel() * SECTOR_BYTES) / row.seconds
    on_device.fingerprint(of, of.whole, sum_S)
    if not torch.equal(sum_S, before):
        on_device.swap(writes)
    assert torch.equal(live_N, held), "two exchanges left other bits"
