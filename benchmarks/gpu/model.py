"""A model of a trainer and a replica: publish, stage, commit, roll back and audit it, and compare every bit."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.gpu.machine import Machine, random_bits, random_positions
from deltasync.live import LiveMemory, Segment, Staged
from deltasync.publish.detect import Difference
from deltasync.publish.job import on_host
from deltasync.publish.shadow import Shadow
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec

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
        of_layer |= {"o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        of_layer |= {"norm_1": (hidden,), "norm_2": (hidden,)}
        shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {"norm": (hidden,), "head": (vocabulary, hidden)}


def mixture(layers: int, experts: int, hidden: int, inner: int, rest: int) -> Shapes:
    """Return shapes of experts, three matrices each, and of others; 48 layers of 128 experts and 387 others are 18,819."""
    shapes: Shapes = {f"other.{number}": (hidden, hidden) for number in range(rest)}
    for layer in range(layers):
        for expert in range(experts):
            shapes |= {f"{layer}.{expert}.{name}": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.{expert}.down": (hidden, inner) for expert in range(experts)}
    return shapes


class Run:
    """Measurements on a model.

    Args:
        machine: The machine.
        model: The model.
        changed_fraction: Fraction of the elements that each version changes.

    Attributes:
        model: The model.
        memory: The replica's live memory.
        changed: What the trainer published, for `memory.stage`.
    """

    def __init__(self, machine: Machine, model: Model, changed_fraction: float) -> None:
        self._machine = machine
        self._name = f"{len(model.specs):,} tensors"
        self.model = model
        self._at_K = random_positions(model.flat.numel(), changed_fraction, machine.device, 4)
        self._shadow: Shadow | None = None
        self.memory = LiveMemory(model.specs, model.segments, machine.device_of)
        self._layout = Layout(model.specs)
        self.changed = Changed(Delta(self._layout, {}), {})

    def measure(self, copy_rate: float, scatter_s: float | None) -> None:
        """Measure everything, and check the bits.

        `copy_rate` is that of a copy on the device, in bytes read and written per second; `scatter_s` the time of a plain
        scatter of as many elements, if a bar depends on it.
        """
        machine, memory = self._machine, self.memory
        memory.warm_up()
        machine.measure(self._label("audit"), memory.audit)
        self._publish(copy_rate, scatter_s is not None)
        staged: list[Staged] = []
        committed: list[Staged] = []
        row = machine.measure(self._label("stage"), lambda: staged.append(memory.stage(self.changed)), staged.clear)
        row.note = f"holds {staged[0].device_bytes / 1e6:,.1f} MB on the device until it is confirmed"
        before = dict(memory.parts)

        def back() -> None:
            if committed:
                memory.rollback(committed.pop())

        def commit() -> None:
            committed.append(memory.commit(staged[0]))

        def again() -> None:
            back()
            commit()

        row = machine.measure(self._label("commit"), commit, back)
        row.note = f"{staged[0].changed:,} elements in {sum(map(len, self.model.segments.values())):,} segments"
        self._check(self.model.flat, "commit")
        after = dict(memory.parts)
        memory.audit()
        assert memory.parts == after, "the audit found other fingerprints than the commit"
        machine.measure(self._label("rollback"), back, again)
        assert not torch.equal(self.model.live, self.model.flat)
        assert memory.parts == before
        commit()
        self._check(self.model.flat, "the last commit")
        if scatter_s is not None:
            machine.bar(f"{self._name}: commit, in plain scatters", row.seconds / scatter_s, 1.5)
            machine.bar(f"{self._name}: commit, extra device memory in MB", (row.peak_bytes or 0) / 1e6, 256)

    def _publish(self, copy_rate: float, judged: bool) -> None:
        """Measure the trainer's half: from the optimizer's step on the device to the changes on the host."""
        weights, flat, machine = self.model.weights, self.model.flat, self._machine
        shadow = self._shadow = Shadow.of(weights, "keep", 0, place="device")
        found: list[Difference] = []

        def publish() -> None:
            found[:] = [shadow.compare(weights, "keep", 0)]
            shadow.apply(found[0])

        def change() -> None:
            found.clear()
            flat[self._at_K] += 1

        change()
        publish()  # from here on it knows how many changes to expect
        row = machine.measure(self._label("publish: detect and apply"), publish, change)
        row.rate = 2 * flat.nbytes / row.seconds
        assert found[0].changed == self._at_K.numel()
        # Several versions were published; the replica takes them as one.
        versions = int(flat[self._at_K[0]] - self.model.live[self._at_K[0]])
        delta = on_host(self._layout, found[0].pieces)
        steps = {width: Sparse(of.at_K, of.data_K * of.data_K.dtype.type(versions)) for width, of in delta.steps.items()}
        self.changed = Changed(Delta(self._layout, steps), dict.fromkeys(delta.counts()))
        if judged:
            read_s = 2 * flat.nbytes / copy_rate
            machine.bar(f"{self._name}: publish, in times of reading both copies", row.seconds / read_s, 2.5)
            extra_bytes = (row.peak_bytes or 0) - 6 * self._at_K.numel()
            machine.bar(f"{self._name}: publish, extra device memory in MB, beside 6 bytes a change", extra_bytes / 1e6, 256)

    def release_shadow(self) -> None:
        """Free the trainer's shadow: a replica has none."""
        self._shadow = None

    def _check(self, flat: torch.Tensor, what: str) -> None:
        assert torch.equal(self.model.live, flat), f"{what} left other bits"

    def _label(self, what: str) -> str:
        return f"{self._name}: {what}"
