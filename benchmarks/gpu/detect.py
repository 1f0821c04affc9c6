"""The trainer's half on a GPU: from the optimizer's step on the device to the changes on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.model import Model, positions
from deltasync.publish.device_copies import DeviceCopies, Difference


def measure(machine: Machine, model: Model, changed_fraction: float, copy_rate: float) -> None:
    """Measure it, and check that what is found is what was changed.

    `copy_rate` is that of a copy on the device, in bytes read and written per second.
    """
    copies, at_K = DeviceCopies(), positions(model, changed_fraction)
    found: dict[str, np.ndarray] = {}

    def publish() -> None:
        found.clear()
        copies.begin("device")
        for name, tensor in model.weights.items():
            found.update(_steps(copies.differences(name, tensor, "keep", "device", lasting=True)))
        found.update(_steps(copies.rest()))

    def change() -> None:
        model.flat[at_K] += 1

    for name, tensor in model.weights.items():  # takes the copies; these are for a comparison on the host
        assert all(index_K is None for _, index_K, _ in copies.differences(name, tensor, "keep", "device", lasting=True))
    change()
    publish()  # from here on it knows how many changes to expect
    row = machine.measure(f"{len(model.specs)} tensors: publish: detect", publish, change)
    row.rate = 2 * model.flat.nbytes / row.seconds
    assert sum(index_K.size for index_K in found.values()) == at_K.numel()
    read_s = 2 * model.flat.nbytes / copy_rate
    machine.bar(f"{len(model.specs)} tensors: publish, in times of reading both copies", row.seconds / read_s, 3)
    copies.clear()


def _steps(differences: Iterator[Difference]) -> Iterator[tuple[str, np.ndarray]]:
    for name, at_K, step_K in differences:
        assert at_K is not None and isinstance(step_K, np.ndarray), "a tensor was compared on the host"
        if at_K.size:
            yield name, at_K
