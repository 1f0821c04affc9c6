"""DETECT: the bits last handed to the uploader, and what differs from them now. A rank keeps the ranges that it holds."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync import fingerprint, kernels
from deltasync.bits import bits_of, cast, dtype_name, has_nan, nan_bounds, served_dtype, signed_view, spec_of, tensor_of
from deltasync.device_copies import DeviceCopies, Difference
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.fold import fold
from deltasync.live import LiveMemory, Segment
from deltasync.quantize import fp8_blocks
from deltasync.sharded import TensorRange, range_of
from deltasync.types import Patch, TensorSpec, check_specs

if TYPE_CHECKING:
    from deltasync import chain
    from deltasync.peers import Range
    from deltasync.reader import ChannelReader

Tensors = Iterable[tuple[str, torch.Tensor | TensorRange]]
Stream = Tensors | Callable[[], Tensors]
"""Names and tensors, or a function that returns them, called when they are read.

A list, or the items of a dict, keep their tensors until the publish returns; they are compared together. Anything else, such
as a generator, may free or overwrite a tensor as soon as the next one is asked for.
"""


class Shadow:
    """Published bits of the ranges that this rank holds.

    They are in host memory. Of tensors that come from an accelerator there may be a second copy in its memory
    (`DeviceCopies`), with which they are compared there, so that only what changed crosses to the host.

    Attributes:
        specs: Of the whole tensors.
        ranges: What is held of each.
        bits: Unsigned bit patterns of each range.
        fingerprints: What each range adds to the fingerprint of its tensor.
        with_nan: Tensors with a NaN among what was taken last.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], ranges: Mapping[str, Range], bits: Mapping[str, np.ndarray]) -> None:
        self.specs = dict(specs)
        self.ranges = dict(ranges)
        self.bits = dict(bits)
        self.with_nan: list[str] = []
        self._copies = DeviceCopies(self.bits)
        self.fingerprints = {
            name: kernels.cpu.fingerprint(fingerprint.tensor_key(name), held, ranges[name][0])
            for name, held in self.bits.items()
        }

    @classmethod
    def of(cls, stream: Stream, dtype: str, rank: int) -> Shadow:
        """A copy of the first stream, in the served dtype.

        Raises:
            ModelMismatchError: it holds nothing, a tensor twice, or one that no channel carries.
        """
        specs: dict[str, TensorSpec] = {}
        held: dict[str, np.ndarray] = {}
        ranges: dict[str, Range] = {}
        tensors, dtype = _tensors(stream, dtype)
        for name, part in _parts(tensors, dtype, rank, specs):
            held[name], ranges[name] = bits_of(cast(part.held, dtype)).copy(), (part.start, part.stop)
        if not specs:
            raise ModelMismatchError("The stream held no tensors; nothing was published.")
        shadow = cls(specs, ranges, held)
        shadow.with_nan = [name for name, bits in held.items() if has_nan(bits, specs[name])]
        return shadow

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor]) -> Shadow:
        """Over the memory of these whole tensors, on the host."""
        specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
        ranges = {name: (0, spec.element_count) for name, spec in specs.items()}
        return cls(specs, ranges, {name: bits_of(tensor) for name, tensor in tensors.items()})

    @classmethod
    def read(cls, reader: ChannelReader, steps: Sequence[chain.Step], ranges: Mapping[str, Range]) -> Shadow:
        """These ranges as a channel has them. Whether they are right only the fingerprint over all ranks can tell.

        Args:
            reader: The channel.
            steps: What leads to the version.
            ranges: Of each tensor.

        Raises:
            StoreError, ChainError, FormatError, ApplyError: they cannot be read.
        """
        specs = reader.specs
        bits = {name: np.zeros(stop - start, specs[name].bits_dtype) for name, (start, stop) in ranges.items()}
        segments = {name: [Segment(signed_view(held), (1,), ranges[name][0])] for name, held in bits.items()}
        memory = LiveMemory(specs, segments)
        memory.audit()
        for step in steps:
            memory.commit(memory.stage(reader.patches(step, memory.gather, memory.held)))
        return cls(specs, ranges, bits)

    def stream(self) -> Iterator[tuple[str, TensorRange]]:
        """The bits as a stream."""
        for name, bits in self.bits.items():
            spec = self.specs[name]
            held = tensor_of(bits, TensorSpec(name, spec.dtype, (bits.size,)))
            yield name, TensorRange(held, self.ranges[name][0], spec.shape)

    def advance(self, stream: Stream, dtype: str, rank: int, placement: str = "host") -> dict[str, Patch]:
        """Take the stream; returns the steps, in flat indices of the whole tensors. If it raises, nothing was taken.

        Args:
            stream: Every tensor of the model.
            dtype: The served one, or `keep`.
            rank: Of this process.
            placement: As `PublisherSettings.shadow_placement`.

        Raises:
            ModelMismatchError: it holds other tensors, or other ranges of them.
        """
        changes: dict[str, Patch] = {}
        fingerprints = dict(self.fingerprints)
        seen: dict[str, TensorSpec] = {}
        self.with_nan = []
        try:
            for name, at_K, step_K in self._differences(stream, dtype, rank, placement, seen):
                if not at_K.size:
                    continue
                start = self.ranges[name][0]
                patch = Patch.steps(seen[name], at_K, step_K, start)
                key, bounds = fingerprint.tensor_key(name), nan_bounds(seen[name])
                gained, nan = kernels.cpu.add(key, self.bits[name], at_K, step_K, bounds, start)
                changes[name] = patch  # what raised until here did not touch the bits
                if nan:
                    self.with_nan.append(name)
                self.fingerprints[name] = (self.fingerprints[name] + gained) & fingerprint.MASK
            check_specs(self.specs, seen, "The published model")
        except BaseException:
            self.retreat(changes, fingerprints)
            raise
        return {name: changes[name] for name in seen if name in changes}

    def _differences(
        self, stream: Stream, dtype: str, rank: int, placement: str, seen: dict[str, TensorSpec]
    ) -> Iterator[Difference]:
        """What differs from the shadow, tensor by tensor, of the same specs and ranges; fills `seen`."""
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
            yield from self._copies.differences(name, part.held, dtype, placement, lasting)
        yield from self._copies.rest(dtype)

    def retreat(self, changes: Mapping[str, Patch], fingerprints: Mapping[str, int]) -> None:
        """Undo `advance`."""
        for name, patch in changes.items():
            assert patch.index_K is not None
            self.bits[name][patch.index_K - self.ranges[name][0]] -= patch.data
        self.fingerprints = dict(fingerprints)
        self._copies.clear()

    @property
    def device_bytes(self) -> int:
        """Bytes of the copies on accelerators."""
        return self._copies.size_bytes


def _tensors(stream: Stream, dtype: str) -> tuple[Tensors, str]:
    """The stream, quantized if that is the served dtype, and the dtype to cast its tensors to."""
    tensors = stream() if callable(stream) else stream
    return (fp8_blocks(tensors), "keep") if dtype == "fp8" else (tensors, dtype)


def _parts(stream: Tensors, dtype: str, rank: int, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, TensorRange]]:
    """The stream's ranges; fills `specs` with what they are in the served dtype."""
    for name, tensor in stream:
        if name in specs:
            raise ModelMismatchError(f"The stream held {name} twice; nothing was published.")
        part = range_of(name, tensor, rank)
        if part.held.is_meta:
            raise ConfigError(
                f"{name} is offloaded: it lies on the meta device, without values. Train without offloading, or publish "
                "tensors that were gathered."
            )
        specs[name] = TensorSpec(name, dtype_name(served_dtype(part.held, dtype)), part.shape)
        yield name, part


def check_coverage(specs: Mapping[str, TensorSpec], held: Sequence[Mapping[str, Range]]) -> None:
    """Check that the ranks hold every element once.

    Args:
        specs: The model.
        held: Ranges of each rank.

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
        raise ModelMismatchError(f"Together the ranks hold not every element of {spec} exactly once.")


def fold_changes(first: Mapping[str, Patch], second: Mapping[str, Patch]) -> dict[str, Patch]:
    """Fold two sets of steps, tensor by tensor."""
    folded = dict(first)
    for name, patch in second.items():
        merged = fold(folded[name], patch) if name in folded else patch
        if merged is None:
            del folded[name]
        else:
            folded[name] = merged
    return folded
