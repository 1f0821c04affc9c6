"""DETECT: keep the bits last handed to the uploader, of the ranges that this rank holds, and find what differs from them."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync import kernels
from deltasync.channel import payloads
from deltasync.errors import ConfigError, CorruptDataError, ModelMismatchError, get_logger
from deltasync.live import LiveMemory, Segment
from deltasync.publish.device_copies import DeviceCopies, Difference
from deltasync.publish.quantize import fp8_blocks
from deltasync.publish.stream import Stream, TensorRange, Tensors, pair_of, range_of, tensors_of
from deltasync.tensors import Patch, TensorSpec, check_specs, fingerprint, index_dtype, weight_elements
from deltasync.tensors.bits import (
    bits_of,
    cast,
    dtype_for,
    dtype_name,
    has_nan,
    nan_bounds,
    served_dtype,
    signed_view,
    spec_of,
    tensor_of,
)
from deltasync.tensors.fold import fold_all

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import Stored
    from deltasync.ranks.peers import Range

logger = get_logger(__name__)

_MOST_LATER = 8
"""Steps of one tensor that a snapshot keeps one by one; more are folded."""


class Shadow:
    """Published bits of the ranges that this rank holds, in host memory.

    Tensors that come from an accelerator may have a second copy in its memory (`DeviceCopies`). They are compared there, so
    that only what changed crosses to the host. One thread advances and retreats; snapshots may be read in others meanwhile.

    Attributes:
        specs: The whole tensors.
        element_count: Elements of all of them.
        ranges: The range that is held of each.
        bits: Unsigned bit patterns of each range.
        lock: Held while the bits change.
        with_nan: Tensors with a NaN in what was taken last, until `warn_of_nan`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], ranges: Mapping[str, Range], bits: Mapping[str, np.ndarray]) -> None:
        self.specs = dict(specs)
        self.element_count = weight_elements(self.specs.values())
        self.ranges = dict(ranges)
        self.bits = dict(bits)
        self.with_nan: list[str] = []
        self._copies = DeviceCopies(self.bits)
        self.lock = threading.RLock()
        self._snapshots: list[Snapshot] = []
        self._taken: dict[str, Patch] = {}
        self._before: dict[str, int] | None = None
        self._last: str | None = None  # the tensor taken last, whose bits an interrupt may have left neither old nor new
        self._lost: str | None = None  # the tensor that `retreat` could not restore

    @functools.cached_property
    def fingerprints(self) -> dict[str, int]:
        """The share of each range in the fingerprint of its tensor; computed when it is first asked for."""
        self.with_nan = [name for name, held in self.bits.items() if has_nan(held, self.specs[name])]
        return {
            name: kernels.cpu.fingerprint(fingerprint.tensor_key(name), held, self.ranges[name][0])
            for name, held in self.bits.items()
        }

    def learn(self, snapshot: Snapshot, version: int) -> dict[str, int]:
        """Take over and return the fingerprints that a snapshot has found as its tensors were read; warn of its NaN."""
        _warn_of_nan(snapshot.with_nan, version)
        vars(self).setdefault("fingerprints", dict(snapshot.fingerprints))  # unless `advance` wanted them sooner
        return dict(snapshot.fingerprints)

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
        given: dict[str, torch.dtype] = {}
        sizes: dict[torch.dtype, int] = {}
        tensors, dtype = _tensors(stream, dtype)
        for name, part in _parts(tensors, dtype, rank, specs):
            copy = torch.empty(part.held.shape, dtype=getattr(torch, specs[name].dtype))
            # The copy casts host tensors, in all threads; others are cast where they are.
            copy.copy_(part.held.detach() if part.held.is_cpu else cast(part.held, specs[name].dtype))
            held[name], ranges[name] = bits_of(copy), (part.start, part.stop)
            sizes[part.held.dtype] = sizes.get(part.held.dtype, 0) + math.prod(part.shape)
            given[name] = part.held.dtype
        if not specs:
            raise ModelMismatchError("The stream held no tensors; nothing was published.")
        _warn_of_rounding(given, specs, max(sizes, key=lambda dtype: sizes[dtype]))
        return cls(specs, ranges, held)

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor]) -> Shadow:
        """Return a shadow over the memory of these whole tensors, on the host."""
        specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
        ranges = {name: (0, spec.element_count) for name, spec in specs.items()}
        return cls(specs, ranges, {name: bits_of(tensor) for name, tensor in tensors.items()})

    @classmethod
    def read(cls, reader: ChannelReader, way: Sequence[Stored], ranges: Mapping[str, Range]) -> Shadow:
        """Read these ranges from a channel, along a way of records. The caller checks the fingerprint over all ranks.

        Raises:
            StoreError, ChainError, FormatError, ApplyError: they cannot be read.
        """
        specs = reader.specs
        bits = {
            name: bits_of(torch.zeros(stop - start, dtype=getattr(torch, specs[name].dtype)))
            for name, (start, stop) in ranges.items()
        }
        segments = {name: [Segment(signed_view(held), (1,), ranges[name][0])] for name, held in bits.items()}
        memory = LiveMemory(specs, segments)
        memory.audit()
        for stored in way:
            memory.commit(memory.stage(payloads.patches(reader, stored, memory.gather, memory.held)))
        return cls(specs, ranges, bits)

    def stream(self) -> Iterator[tuple[str, TensorRange]]:
        """Yield the bits as a stream of ranges."""
        for name, bits in self.bits.items():
            spec = self.specs[name]
            held = tensor_of(bits, TensorSpec(name, spec.dtype, (bits.size,)))
            yield name, TensorRange(held, self.ranges[name][0], spec.shape)

    def advance(
        self,
        stream: Stream,
        dtype: str,
        rank: int,
        placement: str = "host",
        on_change: Callable[[Patch], None] | None = None,
    ) -> dict[str, Patch]:
        """Take the stream and return the steps, in flat indices of the whole tensors. If this raises, call `retreat`.

        `on_change` is called for each changed tensor, whose bits stay the new ones for the rest of the stream.

        Raises:
            ModelMismatchError: the stream holds other tensors, or other ranges of them.
            CorruptDataError: an earlier one was interrupted where it could not be undone.
        """
        if self._lost is not None:
            raise CorruptDataError(
                f"An interrupt came while {self._lost} was taken, and its published bits are not known any more. "
                "Nothing was published; open another publisher with resume=True."
            )
        self._before, self._taken = dict(self.fingerprints), {}
        seen: dict[str, TensorSpec] = {}
        self.with_nan = []
        for name, at_K, data in self._differences(stream, dtype, rank, placement, seen):
            spec, start = seen[name], self.ranges[name][0]
            place = fingerprint.tensor_key(name), self.bits[name]
            with self.lock:
                self._last = name
                if at_K is None:
                    index = index_dtype(spec.element_count)
                    index_K, step_K, gained, nan = kernels.cpu_diff.advance(*place, data, nan_bounds(spec), start, index)
                    patch = Patch(name, index_K, step_K, absolute=False)
                else:
                    patch = Patch.steps(spec, at_K, data, start)
                    gained, nan = kernels.cpu_diff.add(*place, at_K, data, nan_bounds(spec), start)
                if not patch.changed:
                    continue
                self._taken[name] = patch  # errors until here leave the bits as they were; an interrupt may not
                for snapshot in self._snapshots:
                    snapshot.note(patch)
            if nan:
                self.with_nan.append(name)
            self.fingerprints[name] = (self.fingerprints[name] + gained) & fingerprint.MASK
            if on_change is not None:
                on_change(patch)
        check_specs(self.specs, seen, "The published model")
        return {name: self._taken[name] for name in seen if name in self._taken}

    def _differences(
        self, stream: Stream, dtype: str, rank: int, placement: str, seen: dict[str, TensorSpec]
    ) -> Iterator[Difference]:
        """Yield what differs, tensor by tensor; fill `seen` with the stream's specs."""
        tensors, dtype = _tensors(stream, dtype)
        lasting = isinstance(tensors, ItemsView | Sequence)
        self._copies.begin(placement)
        for name, part in _parts(tensors, dtype, rank, seen):
            if seen[name] != self.specs.get(name):
                continue  # reported by the caller, after the stream has been drained
            if self.ranges[name] != (part.start, part.stop):
                raise ModelMismatchError(
                    f"{name} was published from element {self.ranges[name][0]} on by this rank, and now comes from "
                    f"{part.start} on."
                )
            yield from self._copies.differences(name, part.held, seen[name].dtype, placement, lasting)
        yield from self._copies.rest()

    def retreat(self) -> None:
        """Undo the last `advance`, whether it raised or not. What an interrupt left half-way is noted in `_lost`."""
        with self.lock:
            for name, patch in self._taken.items():
                assert patch.index_K is not None
                self.bits[name][patch.index_K - self.ranges[name][0]] -= patch.data
                for snapshot in self._snapshots:
                    snapshot.note(Patch(name, patch.index_K, np.negative(patch.data), absolute=False))
        if self._before is not None:
            if (last := self._last) is not None:
                found = kernels.cpu.fingerprint(fingerprint.tensor_key(last), self.bits[last], self.ranges[last][0])
                self._lost = last if found != self._before[last] else None
            self.fingerprints, self._before = self._before, None
        self._taken = {}
        self._copies.clear()

    def keep(self) -> None:
        """Make the last `advance` final."""
        self._taken, self._before = {}, None

    def snapshot(self) -> Snapshot:
        """Return the bits of now, in a process that has the whole model."""
        snapshot = Snapshot(self)
        with self.lock:
            self._snapshots = [*(other for other in self._snapshots if other.is_open), snapshot]
        return snapshot

    @property
    def size_bytes(self) -> dict[str, int]:
        """Memory of the bits on the `host`, and of their copies on a `device`."""
        return {"host": sum(bits.nbytes for bits in self.bits.values()), "device": self._copies.size_bytes}


class Snapshot:
    """The bits that a shadow had at one moment, while it advances: its bits less the steps taken since.

    Each tensor is read once. The shadow's lock is held while the bits change, and while a tensor is read again that changed
    while it was being read.

    Attributes:
        fingerprints: Of each tensor; of a new shadow, of those that were read.
        with_nan: Tensors of a new shadow that were read and have a NaN.
    """

    def __init__(self, shadow: Shadow) -> None:
        self.fingerprints: dict[str, int] = dict(vars(shadow).get("fingerprints", {}))
        self.with_nan: list[str] = []
        self._bits, self._lock, self._specs = shadow.bits, shadow.lock, shadow.specs  # not the shadow, which keeps this
        self._later: dict[str, list[Patch]] = {name: [] for name in shadow.bits}

    @property
    def is_open(self) -> bool:
        """Whether a tensor is still to be read."""
        return bool(self._later)

    def note(self, patch: Patch) -> None:
        """Note a step of the shadow, which holds the lock."""
        later = self._later.get(patch.name)
        if later is not None:
            later = [*later, patch]
            self._later[patch.name] = fold_all(later) if len(later) > _MOST_LATER else later

    def take(self, name: str, out_N: np.ndarray) -> int:
        """Write a tensor's bits into `out_N`, unsigned and flat, and return their fingerprint.

        Raises:
            CorruptDataError: memory has damaged them.
        """
        key, bits_N = fingerprint.tensor_key(name), self._bits[name]
        with self._lock:
            before = self._later[name]
        # Without the lock, so that the trainer does not wait for it.
        found = kernels.cpu.take(key, bits_N, out_N)
        with self._lock:
            later = self._later.pop(name)
            moved = later is not before  # each step makes another list
            if moved:
                np.copyto(out_N, bits_N)
        for patch in later:
            assert patch.index_K is not None
            out_N[patch.index_K] -= patch.data
        if moved or later:
            found = kernels.cpu.fingerprint(key, out_N)
        if name not in self.fingerprints and has_nan(out_N, self._specs[name]):
            self.with_nan.append(name)
        if found != self.fingerprints.setdefault(name, found):
            raise CorruptDataError(f"The bits of {name} in memory are not those that were published.")
        return found

    def close(self) -> None:
        """Drop the steps of tensors that were not read."""
        with self._lock:
            self._later.clear()


def _warn_of_nan(nan: Sequence[str], version: int) -> None:
    if nan:
        logger.warning(
            "Version %d is published as it is, but has NaN in %d tensors: %s. Replicas will produce garbage.",
            *(version, len(nan), ", ".join(nan[:5])),
        )


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


def _tensors(stream: Stream, dtype: str) -> tuple[Tensors, str]:
    """Return the stream, quantized if that is the served dtype, and the dtype to cast its tensors to."""
    tensors = tensors_of(stream)
    return (fp8_blocks(map(pair_of, tensors)), "keep") if dtype == "fp8" else (tensors, dtype)


def _parts(stream: Tensors, dtype: str, rank: int, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges that a rank publishes of a stream; fill `specs` with the whole tensors in the served dtype."""
    for name, tensor in map(pair_of, stream):
        if name in specs:
            raise ModelMismatchError(f"The stream held {name} twice; nothing was published.")
        part = range_of(name, tensor, rank)
        if part.held.is_meta:
            raise ConfigError(
                f"{name} is offloaded: it lies on the meta device, without values. Train without offloading, or publish "
                "tensors that were gathered."
            )
        specs[name] = TensorSpec(name, dtype_name(served_dtype(part.held, dtype_for(name, dtype)), name), part.shape)
        yield name, part


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


def fold_changes(first: Mapping[str, Patch], second: Mapping[str, Patch]) -> dict[str, Patch]:
    """Fold two sets of steps, tensor by tensor."""
    folded = dict(first)
    for name, patch in second.items():
        merged = fold_all((folded[name], patch)) if name in folded else [patch]
        if merged:
            folded[name] = merged[0]
        else:
            del folded[name]
    return folded
