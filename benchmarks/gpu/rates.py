"""The rate of every kernel on one large tensor, compared with a copy on the same device."""

from __future__ import annotations

import torch

from benchmarks.gpu.machine import Machine, Row, random_bits, random_positions
from deltasync.kernels import segment_kernels
from deltasync.kernels.table import Entry, Table
from deltasync.live.devices import Device
from deltasync.publish.detect import Difference
from deltasync.publish.shadow import Shadow
from deltasync.tensors.device import DeviceDelta

SECTOR_BYTES = 32
_KEY = 0x9E3779B97F4A7C15


def measure(machine: Machine, element_count: int, changed_fraction: float) -> dict[str, float]:
    """Measure each kernel, and check its result.

    Bytes are those read and written, as for a copy: both tensors for a comparison, the tensor for a fingerprint, and for
    each element that is exchanged its position, its value twice, and a sector of memory twice. Returns `copy`, bytes per
    second, and `scatter_s`, seconds of a plain scatter of the changed elements.
    """
    device = machine.device
    old_N = random_bits(element_count, device, 0)
    new_N = torch.empty_like(old_N)
    new_N.copy_(old_N)
    copy_s = machine.median_s(lambda: new_N.copy_(old_N))
    copy_rate = 2 * old_N.nbytes / copy_s
    machine.rows.append(Row(what="copy on the device", seconds=copy_s, rate=copy_rate))
    at_K = random_positions(element_count, changed_fraction, device, 1)
    ones_K = torch.ones(at_K.numel(), dtype=torch.int16, device=device)
    new_N.index_put_((at_K,), ones_K).scatter_(0, at_K, ones_K)
    by_index_s = machine.median_s(lambda: new_N.index_put_((at_K,), ones_K))
    scatter_s = min(by_index_s, machine.median_s(lambda: new_N.scatter_(0, at_K, ones_K)))
    moved = at_K.numel() * (at_K.element_size() + 2 + 2 * SECTOR_BYTES)
    machine.rows.append(Row(what="plain scatter (torch)", seconds=scatter_s, rate=moved / scatter_s))
    new_N.copy_(old_N)
    _measure_diff(machine, old_N, new_N, at_K)
    _measure_tables(machine, old_N, at_K)
    return {"copy": copy_rate, "scatter_s": scatter_s}


def _measure_diff(machine: Machine, old_N: torch.Tensor, new_N: torch.Tensor, at_K: torch.Tensor) -> None:
    """Measure comparing with a shadow, and applying what differs to it."""
    weights = {"w": new_N}
    shadow = Shadow.of({"w": old_N}, "keep", 0, place="device")
    found: list[Difference] = []

    def change() -> None:
        if found:
            shadow.apply(found.pop())
        new_N[at_K] += 1

    def compare() -> None:
        found[:] = [shadow.compare(weights, "keep", 0)]

    change()
    compare()  # compiles, and knows how many changes to expect from here on
    row = machine.measure("compare", compare, change)
    row.rate = 2 * old_N.nbytes / row.seconds
    row.note = f"{at_K.numel():,} of {old_N.numel():,} changed"
    (delta,) = found[0].pieces
    assert isinstance(delta, DeviceDelta)
    steps = delta.steps[2]
    assert torch.equal(steps.positions(), at_K) and bool((steps.step_K == 1).all())
    machine.measure("apply", lambda: shadow.apply(found[0]))


def _measure_tables(machine: Machine, live_N: torch.Tensor, at_K: torch.Tensor) -> None:
    """Measure the kernels of a commit on one segment, which is restored at the end."""
    room = machine.device_of(live_N)
    assert isinstance(room, Device)
    on_device = segment_kernels(machine.device)
    layout = ((1, live_N.numel(), 1),)
    positions_K = at_K.cpu().numpy()
    if live_N.numel() < 1 << 31:
        positions_K = positions_K.astype("i4")
    held = live_N.clone()
    steps_K = torch.ones(at_K.numel(), dtype=torch.int16).numpy().view("u2")
    whole = Table([Entry(_KEY, live_N, 0, layout)], room)
    writes = Table([Entry(_KEY, live_N, 0, layout, positions_K, steps_K, False)], room)

    on_device.warm_up(machine.device, live_N.dtype)
    row = machine.measure("fingerprint", lambda: on_device.fingerprint(whole))
    row.rate = live_N.nbytes / row.seconds
    (before,) = whole.gained()
    row = machine.measure("prepare", lambda: on_device.prepare(writes))
    moved = at_K.numel() * (positions_K.itemsize + 2 * 2 + SECTOR_BYTES)
    row.rate = moved / row.seconds
    row = machine.measure("swap", lambda: on_device.swap(writes), lambda: on_device.swap(writes))
    row.rate = (moved + at_K.numel() * SECTOR_BYTES) / row.seconds
    # Each measured swap undid the one before it.
    assert torch.equal(live_N, held)
    on_device.fingerprint(whole)
    assert whole.gained() == [before]
