"""A model of a trainer and a replica: stage, commit, roll back and audit it, and compare every bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import Machine, Row, random_bits, random_positions
from deltasync.gpu.delta import BLOCK, DeviceDelta, DeviceSparse
from deltasync.live import LiveMemory, Segment, Staged
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec, Vector

Shapes = dict[str, tuple[int, ...]]
"""Checkpoint tensors in their order in memory; those of a fused parameter follow each other."""


@dataclasses.dataclass
class Model:
    """One model on a device."""

    specs: dict[str, TensorSpec]  # the checkpoint's tensors
    weights: dict[str, torch.Tensor]  # the trainer's weights, bfloat16; views of `flat`
    flat: torch.Tensor  # all these weights as int16
    segments: dict[str, list[Segment]]  # the replica's tensors; views of `live`, which has the same layout
    live: torch.Tensor  # the replica's memory

    @classmethod
    def build(cls, shapes: Shapes, device: torch.device) -> Model:
        """Make a model with random bits."""
        specs = {name: TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()}
        flat = random_bits(sum(spec.element_count for spec in specs.values()), device, 3)
        live = flat.clone()
        weights, segments, at = {}, {}, 0
        for name, spec in specs.items():
            here = slice(at, at + spec.element_count)
            weights[name] = flat[here].view(torch.bfloat16).view(spec.shape)
            strides = weights[name].stride()
            segments[name] = [Segment(live[here].view(spec.shape), strides, 0)]
            at += spec.element_count
        return cls(specs, weights, flat, segments, live)


def dense(layers: int, hidden: int, inner: int, vocabulary: int, key_value: int) -> Shapes:
    """Return the shapes of Qwen2.5; with 28 layers 339 tensors."""
    shapes: Shapes = {"embed": (vocabulary, hidden)}
    for layer in range(layers):
        rows = {"q": hidden, "k": key_value, "v": key_value}
        of_layer: Shapes = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
        of_layer |= {f"{name}.bias": (count,) for name, count in rows.items()}
        of_layer |= {
            "o": (hidden, hidden),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        of_layer |= {"norm_1": (hidden,), "norm_2": (hidden,)}
        shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {"norm": (hidden,), "head": (vocabulary, hidden)}


def mixture(layers: int, experts: int, hidden: int, inner: int, rest: int) -> Shapes:
    """Return shapes of experts, three matrices each, and of others; 48 layers of 128 experts and 387 others
    are 18,819.
    """
    shapes: Shapes = {f"other.{number}": (hidden, hidden) for number in range(rest)}
    for layer in range(layers):
        for expert in range(experts):
            shapes |= {f"{layer}.{expert}.{name}": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.{expert}.down": (hidden, inner) for expert in range(experts)}
    return shapes


def positions(model: Model, changed_fraction: float) -> torch.Tensor:
    """Return positions in `flat`, which is the model's vector, ascending and distinct, int64 on the
    device.
    """
    return random_positions(model.flat.numel(), changed_fraction, model.flat.device, 1)


class Run:
    """A replica on a model: each step is measured, and every bit compared.

    Args:
        machine: The machine.
        model: The model.
        changed_fraction: How many elements a version changes.

    Attributes:
        memory: The replica's memory.
        changed, on_device: A version, decoded on the host and on the device.
    """

    def __init__(self, machine: Machine, model: Model, changed_fraction: float) -> None:
        self._machine, self.model = machine, model
        self._name = f"{len(model.specs)} tensors"
        self.memory = LiveMemory(model.specs, model.segments, machine.device_of)
        at_K = positions(model, changed_fraction)
        step_K = random_bits(at_K.numel(), machine.device, 4) | 1  # never 0
        layout = Layout(model.specs)
        (vector,) = layout.vectors.values()
        on_host = Sparse(
            at_K.cpu().numpy().astype(vector.index_dtype, copy=False), step_K.cpu().numpy().view("u2")
        )
        self.changed = Changed(Delta(layout, {2: on_host}), dict.fromkeys(model.specs))
        steps = _sparse(vector, at_K, step_K)
        delta: Any = DeviceDelta(layout, {2: steps}, {})
        self.on_device = Changed(delta, self.changed.fingerprints)
        model.flat.copy_(model.live)
        model.flat[at_K] += step_K  # what a commit has to give

    def measure(self, scatter_s: float | None) -> None:
        """Measure stage, commit, rollback and audit. `scatter_s` is the time of a plain scatter of as many
        elements.
        """
        machine, memory, model = self._machine, self.memory, self.model
        self._timed("the table, once", memory.warm_up)
        memory.audit()
        row = machine.measure(self._label("audit"), memory.audit)
        row.rate = model.live.nbytes / row.seconds
        machine.bar(self._label("audit, ms"), 1e3 * row.seconds, 12)
        before = memory.known_parts.tolist()
        bits = model.live.clone()
        staged: list[Staged] = []
        for what, changed in (
            ("stage, decoded on the host", self.changed),
            ("stage, decoded on the device", self.on_device),
        ):
            memory.stage(changed)
            row = machine.measure(
                self._label(what), lambda changed=changed: staged.append(memory.stage(changed)), staged.clear
            )
            row.note = f"holds {staged[0].device_bytes / 1e6:,.1f} MB on the device until it is confirmed"
            machine.bar(self._label(f"{what}, ms"), 1e3 * row.seconds, 25)
        committed: list[Staged] = []

        def back() -> None:
            if committed:
                memory.rollback(committed.pop())

        def commit() -> None:
            committed.append(memory.commit(staged[0]))

        def again() -> None:
            back()
            commit()

        row = machine.measure(self._label("commit"), commit, back)
        row.note = (
            f"{staged[0].changed:,} elements; {1e3 * staged[0].scatter_s:.2f} ms of it until they are written"
        )
        if scatter_s is not None:
            machine.bar(self._label("commit, in plain scatters"), row.seconds / scatter_s, 1.3)
            machine.bar(self._label("commit, extra device memory in MB"), (row.peak_bytes or 0) / 1e6, 256)
        assert torch.equal(model.live, model.flat), "the commit left other bits"
        machine.measure(
            self._label("confirm: fingerprints of all tensors compared"), lambda: memory.compare(committed[0])
        )
        after = memory.known_parts.tolist()
        memory.audit()
        assert memory.known_parts.tolist() == after != before, (
            "the audit found other fingerprints than the commit"
        )
        machine.measure(self._label("rollback"), back, again)
        assert torch.equal(model.live, bits), "the rollback left other bits"
        assert memory.known_parts.tolist() == before
        staged[:] = [memory.stage(self.changed)]  # of the host, after those of the device
        commit()
        assert torch.equal(model.live, model.flat), "a version that was decoded on the host has other bits"
        back()
        assert torch.equal(model.live, bits)

    def _timed(self, what: str, run: Any) -> None:
        self._machine.rows.append(Row(what=self._label(what), seconds=self._machine.seconds(run)))

    def _label(self, what: str) -> str:
        return f"{self._name}: {what}"


def _sparse(vector: Vector, at_K: torch.Tensor, step_K: torch.Tensor) -> DeviceSparse:
    """Return the steps as a decoder on the device leaves them."""
    first_T, count_T = vector.first_T[:-1], np.diff(vector.first_T)
    blocks_T = -(-count_T // BLOCK)
    number_B = np.arange(int(blocks_T.sum())) - np.repeat(np.cumsum(blocks_T) - blocks_T, blocks_T)
    base_B = torch.from_numpy(np.repeat(first_T, blocks_T) + number_B * BLOCK).to(at_K.device)
    bound_B = torch.searchsorted(at_K, torch.cat((base_B, base_B.new_tensor([vector.element_count]))))
    ends_T = torch.searchsorted(at_K, torch.from_numpy(vector.first_T).to(at_K.device)).cpu().numpy()
    return DeviceSparse(at_K.to(torch.int32), step_K, base_B, bound_B, np.diff(ends_T))
