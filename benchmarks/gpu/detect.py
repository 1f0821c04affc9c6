"""The trainer's half on a GPU: from the optimizer's step to the changes, which stay there; then the shadow
takes them.
"""

from __future__ import annotations

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import Model, positions
from deltasync.publish.agreement import Alone
from deltasync.publish.detect import Difference
from deltasync.publish.shadow import Shadow
from deltasync.trainer.source import Source


def measure(machine: Machine, model: Model, changed_fraction: float, copy_rate: float) -> None:
    """Measure it, and check that what is found is what was changed.

    `copy_rate` is that of a copy on the device, in bytes read and written per second.
    """
    at_K = positions(model, changed_fraction)
    source = Source(Alone(), "keep", None)
    parts = source.first(model.weights)
    shadow = Shadow.of(source.specs, parts, "device", source.devices)
    found: list[Difference] = []
    label = f"{len(model.specs)} tensors: publish"

    def compare() -> None:
        found[:] = [source.compare(shadow, model.weights.items())]

    def change() -> None:
        if found:
            shadow.apply(found.pop())
        model.flat[at_K] += 1

    change()
    compare()  # from here on it knows how many changes to expect
    row = machine.measure(f"{label}: detect", compare, change)
    row.rate = 2 * model.flat.nbytes / row.seconds
    assert found[0].changed == at_K.numel()
    read_s = 2 * model.flat.nbytes / copy_rate
    machine.bar(f"{label}, in times of reading both copies", row.seconds / read_s, 2.5)
    beside_bytes = (row.peak_bytes or 0) - 6 * at_K.numel()
    machine.bar(f"{label}, device memory in MB beside 6 bytes a change", beside_bytes / 1e6, 256)
    machine.measure(f"{label}: apply", lambda: shadow.apply(found.pop()), compare)
