"""The shadow: the bits that were published last, of the ranges that this rank holds, and snapshots of it."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync import kernels
from deltasync.channel import payloads
from deltasync.errors import ConfigError, CorruptDataError, ModelMismatchError, get_logger
from deltasync.live import LiveMemory, Segment
from deltasync.publish.detect import Detector, Held, Step, VectorMemory, parts_of, served_tensors
from deltasync.publish.device_copies import on_host
from deltasync.publish.stream import Stream, TensorRange
from deltasync.tensors import Delta, Fingerprints, Layout, TensorSpec, fingerprint
from deltasync.tensors.bits import bits_of, has_nan, signed_view, spec_of, tensor_of
from deltasync.tensors.delta import merge

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import StoredRecord
    from deltasync.ranks.peers import Range

logger = get_logger(__name__)

_MOST_LATER = 8
"""Deltas that a snapshot keeps one by one; more are merged."""


class Shadow:
    """Published bits of the ranges that this rank holds, in host memory.

    Tensors that come from an accelerator may have a second copy in its memory (`DeviceCopies`). They are compared there, so
    that only what changed crosses to the host. One thread advances and retreats; snapshots may be read in others meanwhile.

    Attributes:
        layout: The whole tensors.
        ranges: The range that is held of each.
        bits: Unsigned bit patterns of each range.
        lock: Held while the bits change.
        with_nan: Tensors with a NaN in what was taken last, until `warn_of_nan`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], ranges: Mapping[str, Range], bits: Mapping[str, np.ndarray]) -> None:
        self.layout = Layout(specs)
        self.ranges = dict(ranges)
        self.bits = dict(bits)
        self.with_nan: list[str] = []
        memory = {w: VectorMemory(vector, self.bits, self.ranges) for w, vector in self.layout.vectors.items()}
        self.lock = threading.RLock()
        self._snapshots: list[Snapshot] = []
        self._detector = Detector(Held(self.layout, self.ranges, memory))
        self._steps: list[Step] = []
        self._before: Fingerprints | None = None
        self._lost: str | None = None  # the tensor that `retreat` could not restore

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The whole tensors by name."""
        return self.layout.specs

    @functools.cached_property
    def fingerprints(self) -> Fingerprints:
        """The share of each range in the fingerprint of its tensor; computed when it is first asked for."""
        self.with_nan = [name for name, held in self.bits.items() if has_nan(held, self.specs[name])]
        return Fingerprints.by_name(self.layout, {name: self._found(name) for name in self.bits})

    def learn(self, snapshot: Snapshot, version: int) -> Fingerprints:
        """Take over and return the fingerprints that a snapshot has found as its tensors were read; warn of its NaN."""
        _warn_of_nan(snapshot.with_nan, version)
        found = Fingerprints.by_name(self.layout, snapshot.fingerprints)
        vars(self).setdefault("fingerprints", found.copy())  # unless `advance` wanted them sooner
        return found

    def warn_of_nan(self, version: int) -> None:
        """Warn of NaN in what was taken last, once."""
        nan, self.with_nan = self.with_nan, []
        _warn_of_nan(nan, version)

    @classmethod
    def of(cls, stream: Stream, dtype: str, rank: int) -> Shadow:
        """Copy the first stream, in the served dtype.

        Raises:
            ModelMismatchError: the stream is empty, or holds a tensor twice, or one that no channel carries.
        """
        specs: dict[str, TensorSpec] = {}
        held: dict[str, np.ndarray] = {}
        ranges: dict[str, Range] = {}
        for name, part in _first_parts(stream, dtype, rank, specs):
            copy = torch.empty(part.held.shape, dtype=getattr(torch, specs[name].dtype))
            if part.held.is_cpu and "cpu" not in kernels.ACCELERATORS:
                copy.copy_(part.held.detach())  # casts in all threads
            else:
                for first, piece in on_host(part.held, specs[name].dtype):
                    copy.view(-1)[first : first + piece.numel()] = piece
            held[name], ranges[name] = bits_of(copy), (part.start, part.stop)
        return cls(specs, ranges, held)

    def ordered(self, specs: Mapping[str, TensorSpec]) -> Shadow:
        """Return this new shadow in the order of a channel's table, in which positions count."""
        if [*self.specs] == [*specs]:
            return self
        return Shadow(specs, {name: self.ranges[name] for name in specs}, {name: self.bits[name] for name in specs})

    @staticmethod
    def outline(stream: Stream, dtype: str, rank: int) -> tuple[dict[str, TensorSpec], dict[str, Range]]:
        """Return the whole tensors of a stream that stays in memory, and the ranges that it holds. Raises as `of`."""
        specs: dict[str, TensorSpec] = {}
        ranges = {name: (part.start, part.stop) for name, part in _first_parts(stream, dtype, rank, specs)}
        return specs, ranges

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor]) -> Shadow:
        """Return a shadow over the memory of these whole tensors, on the host."""
        specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
        ranges = {name: (0, spec.element_count) for name, spec in specs.items()}
        return cls(specs, ranges, {name: bits_of(tensor) for name, tensor in tensors.items()})

    @classmethod
    def read(cls, reader: ChannelReader, chain: Sequence[StoredRecord], ranges: Mapping[str, Range]) -> Shadow:
        """Read these ranges from a channel, along a chain of records. The caller checks the fingerprint over all ranks.

        Raises:
            StoreError, ChainError, FormatError, ApplyError: they cannot be read.
        """
        specs = reader.specs
        bits = {
            name: bits_of(torch.empty(stop - start, dtype=getattr(torch, specs[name].dtype)))
            for name, (start, stop) in ranges.items()
        }
        segments = {name: [Segment(signed_view(held), (1,), ranges[name][0])] for name, held in bits.items()}
        memory = LiveMemory(specs, segments)
        for stored in chain:
            if stored.use_anchor:
                for name, at, piece_N in payloads.ranges_of_weights(reader, stored, ranges):
                    first = at - ranges[name][0]
                    bits[name][first : first + piece_N.size] = piece_N
                memory.audit()
            else:
                memory.commit(memory.stage(payloads.delta(reader, stored, memory.gather, memory.wanted)))
        return cls(specs, ranges, bits)

    def stream(self) -> Iterator[tuple[str, TensorRange]]:
        """Yield the bits as a stream of ranges."""
        for name, bits in self.bits.items():
            spec = self.specs[name]
            held = tensor_of(bits, TensorSpec(name, spec.dtype, (bits.size,)))
            yield name, TensorRange(held, self.ranges[name][0], spec.shape)

    def advance(self, stream: Stream, dtype: str, rank: int, placement: str = "host") -> list[Delta]:
        """Take the stream and return its steps in pieces (`delta.joined`). If this raises, call `retreat`.

        Raises:
            ModelMismatchError: the stream holds other tensors, or other ranges of them.
            CorruptDataError: an earlier one was interrupted where it could not be undone.
        """
        if self._lost is not None:
            raise CorruptDataError(
                f"An interrupt came while {self._lost} was taken, and its published bits are not known any more. "
                "Nothing was published; open another publisher with resume=True."
            )
        self._before, self._steps, self.with_nan = self.fingerprints.copy(), [], []
        for step in self._detector.take(stream, dtype, rank, placement):
            with self.lock:
                self._steps.append(step)  # before it happens, since an interrupt may come right after it
                delta, gain_T, above_T = step.take()
                if delta.changed:
                    self.note(delta, gain_T, above_T)
                step.noted = True
        return [step.delta for step in self._steps if step.delta is not None and step.delta.changed]

    def note(self, delta: Delta, gain_T: np.ndarray, above_T: np.ndarray) -> None:
        """Note steps of one vector that the bits have taken, and what they add to fingerprints. The caller holds `lock`."""
        (width,) = delta.steps
        self.fingerprints.of[width][:] += gain_T
        self.with_nan += [self.layout.vectors[width].names[t] for t in np.flatnonzero(above_T).tolist()]
        for snapshot in self._snapshots:
            snapshot.note(delta)

    def retreat(self) -> None:
        """Undo the last `advance`, whether it raised or not. `_lost` names a tensor that an interrupt left half-way."""
        touched, undone = list[str](), list[Step]()
        with self.lock:
            while self._steps:
                step = self._steps[-1]
                touched += step.undo(lambda name: self._found(name) != self.fingerprints[name])
                undone.append(self._steps.pop())
            if self._before is not None:
                before, self._before = self._before, None
                self._lost = next((name for name in touched if self._found(name) != before[name]), self._lost)
                self.fingerprints = before
            for step in undone:
                for snapshot in self._snapshots:
                    if step.delta is not None and (step.noted or snapshot.noted(step.delta)):
                        snapshot.note(step.delta.undone())
        self._detector.copies.clear()

    def _found(self, name: str) -> int:
        """Return the fingerprint of the bits that are there."""
        return kernels.cpu.fingerprint(fingerprint.tensor_key(name), self.bits[name], self.ranges[name][0])

    def keep(self) -> None:
        """Make the last `advance` final."""
        self._steps, self._before = [], None

    def snapshot(self) -> Snapshot:
        """Return the bits of now, while the shadow goes on."""
        snapshot = Snapshot(self)
        with self.lock:
            self._snapshots = [*(other for other in self._snapshots if other.is_open), snapshot]
        return snapshot

    @property
    def size_bytes(self) -> dict[str, int]:
        """Memory of the bits on the `host`, and of their copies on a `device`."""
        return {"host": sum(bits.nbytes for bits in self.bits.values()), "device": self._detector.copies.size_bytes}


class Snapshot:
    """The bits that a shadow had at one moment, of the ranges that it holds, while it advances: less the steps since.

    Each tensor is read once. The shadow's lock is held while the bits change, and while a tensor is read again that changed
    while it was being read.

    Attributes:
        ranges: The range of each tensor.
        fingerprints: The share of each range in its tensor's; of a new shadow, of those that were read.
        with_nan: Tensors of a new shadow that were read and have a NaN.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.fingerprints: dict[str, int] = dict(vars(shadow).get("fingerprints", {}))
        self.with_nan: list[str] = []
        self.ranges = shadow.ranges
        self._bits, self._lock, self._specs = shadow.bits, shadow.lock, shadow.specs  # not the shadow, which keeps this
        self._left = set(shadow.bits)
        self._later: list[Delta] = []

    @property
    def is_open(self) -> bool:
        """Whether a tensor is still to be read."""
        return bool(self._left)

    def note(self, delta: Delta) -> None:
        """Note a step of the shadow, which holds the lock."""
        if self._left:
            before = self._later
            self._later = [*([merge(before)] if len(before) >= _MOST_LATER else before), delta]

    def noted(self, delta: Delta | None) -> bool:
        """Whether this was the last delta to be noted."""
        return bool(self._later) and self._later[-1] is delta

    def take(self, name: str, out_N: np.ndarray) -> int:
        """Write a tensor's range of bits into `out_N`, unsigned and flat, and return its share of the fingerprint.

        Raises:
            CorruptDataError: memory has damaged them.
        """
        bits_N, (start, _) = self._bits[name], self.ranges[name]
        key = int(kernels.cpu.key_from(fingerprint.tensor_key(name), start))
        with self._lock:
            before = self._later
        # Without the lock, so that the trainer does not wait for it.
        found = kernels.cpu.take(key, bits_N, out_N)
        with self._lock:
            later = self._later
            if later is not before:  # each step makes another list
                np.copyto(out_N, bits_N)
            self._left.discard(name)
        for delta in later:
            steps = delta.of(name)
            out_N[steps.at_K - steps.at_K.dtype.type(start)] -= steps.data_K
        if later:
            found = kernels.cpu.fingerprint(key, out_N)
        if name not in self.fingerprints and has_nan(out_N, self._specs[name]):
            self.with_nan.append(name)
        if found != self.fingerprints.setdefault(name, found):
            raise CorruptDataError(f"The bits of {name} in memory are not those that were published.")
        return found

    def close(self) -> None:
        """Drop the steps since; no tensor is read any more."""
        with self._lock:
            self._left, self._later = set(), []


def _warn_of_nan(nan: Sequence[str], version: int) -> None:
    if nan:
        logger.warning(
            "Version %d is published as it is, but has NaN in %d tensors: %s. Replicas will produce garbage.",
            *(version, len(nan), ", ".join(nan[:5])),
        )


def _first_parts(stream: Stream, dtype: str, rank: int, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges of a first stream and fill `specs`, as `parts_of`; at the end, warn of tensors that are rounded.

    Raises:
        ModelMismatchError: the stream is empty, or as `parts_of`.
    """
    given: dict[str, torch.dtype] = {}
    sizes: dict[torch.dtype, int] = {}
    tensors, dtype = served_tensors(stream, dtype)
    for name, part in parts_of(tensors, dtype, rank, specs, {}):
        yield name, part
        sizes[part.held.dtype] = sizes.get(part.held.dtype, 0) + math.prod(part.shape)
        given[name] = part.held.dtype
    if not specs:
        raise ModelMismatchError("The stream held no tensors; nothing was published.")
    _warn_of_rounding(given, specs, max(sizes, key=lambda dtype: sizes[dtype]))


def _warn_of_rounding(given: Mapping[str, torch.dtype], specs: Mapping[str, TensorSpec], main: torch.dtype) -> None:
    """Warn of tensors that the model holds in a wider dtype than most, and that are published in a narrower one."""
    rounded = [
        name
        for name, dtype in given.items()
        if dtype.is_floating_point and dtype.itemsize > max(main.itemsize, specs[name].item_bytes)
    ]
    if rounded:
        name = rounded[0]
        logger.warning(
            "%d tensors are wider than the model's %s, and published in %s: %s. A server with their dtype will differ. "
            'To publish them as they are: dtype="%s,*%s=keep".',
            *(len(rounded), str(main).removeprefix("torch."), specs[name].dtype, ", ".join(rounded[:5])),
            *(specs[name].dtype, ".".join(name.split(".")[-2:])),
        )


def check_coverage(specs: Mapping[str, TensorSpec], held: Sequence[Mapping[str, Range]]) -> None:
    """Check that the ranges of all ranks hold every element of a model once.

    Raises:
        ConfigError: one rank publishes alone, and does not hold all of a tensor.
        ModelMismatchError: elements are missing, or held by several ranks.
    """
    for name, spec in specs.items():
        at = 0
        for start, stop in sorted(ranges[name] for ranges in held if ranges[name][0] < ranges[name][1]):
            if start != at:
                break
            at = stop
        else:
            if at == spec.element_count:
                continue
        if len(held) == 1:
            raise ConfigError(
                f"This rank holds only a part of {name}. Publish from all ranks, each with Publisher(..., group=group)."
            )
        raise ModelMismatchError(f"The ranks do not cover every element of {spec} exactly once.")
