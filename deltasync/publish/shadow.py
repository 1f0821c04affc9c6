"""DETECT: keep the bits last handed to the uploader, of the ranges that this rank holds, and find what differs from them."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync import kernels
from deltasync.channel import payloads
from deltasync.errors import ConfigError, CorruptDataError, ModelMismatchError, get_logger
from deltasync.kernels import cpu_rows
from deltasync.kernels.cpu_rows import Taken
from deltasync.live import LiveMemory, Segment
from deltasync.publish.device_copies import DeviceCopies
from deltasync.publish.quantize import fp8_blocks
from deltasync.publish.shards import pieces
from deltasync.publish.stream import Stream, TensorRange, Tensors, pair_of, range_of, tensors_of
from deltasync.tensors import ITEM_BYTES, Delta, Layout, Sparse, TensorSpec, check_specs, fingerprint, weight_elements
from deltasync.tensors.bits import (
    bits_of,
    cast,
    has_nan,
    nan_bounds,
    served_name,
    signed_view,
    spec_of,
    tensor_of,
)
from deltasync.tensors.delta import merge

if TYPE_CHECKING:
    from deltasync.channel.reading import ChannelReader
    from deltasync.channel.record import StoredRecord
    from deltasync.ranks.peers import Range

logger = get_logger(__name__)

_DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
_BATCH = 1 << 26  # elements that are compared by one call
_COPIED = 1 << 20  # elements of a tensor that is copied, to be compared with others, where its memory may be used again
_COPIES_BYTES = 4 << 20
"""Bytes of tensors in another dtype or order than the published one, of which copies are compared together."""

_MOST_LATER = 8
"""Deltas that a snapshot keeps one by one; more are merged."""


class Shadow:
    """Published bits of the ranges that this rank holds, in host memory.

    Tensors that come from an accelerator may have a second copy in its memory (`DeviceCopies`). They are compared there, so
    that only what changed crosses to the host. One thread advances and retreats; snapshots may be read in others meanwhile.

    Attributes:
        layout: The whole tensors.
        element_count: Elements of all of them.
        ranges: The range that is held of each.
        bits: Unsigned bit patterns of each range.
        lock: Held while the bits change.
        with_nan: Tensors with a NaN in what was taken last, until `warn_of_nan`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], ranges: Mapping[str, Range], bits: Mapping[str, np.ndarray]) -> None:
        self.layout = Layout(specs)
        self.element_count = weight_elements(specs.values())
        self.ranges = dict(ranges)
        self.bits = dict(bits)
        self.with_nan: list[str] = []
        self._copies = DeviceCopies(self.bits)
        self._rows = {width: _Rows(self, width) for width in self.layout.vectors}
        self.lock = threading.RLock()
        self._snapshots: list[Snapshot] = []
        self._taken: list[_Step] = []
        self._before: dict[str, int] | None = None
        self._lost: str | None = None  # the tensor that `retreat` could not restore

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The whole tensors by name."""
        return self.layout.specs

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
        for name, part in _first_parts(stream, dtype, rank, specs):
            copy = torch.empty(part.held.shape, dtype=getattr(torch, specs[name].dtype))
            # The copy casts host tensors, in all threads; others are cast where they are.
            copy.copy_(part.held.detach() if part.held.is_cpu else cast(part.held, specs[name].dtype))
            held[name], ranges[name] = bits_of(copy), (part.start, part.stop)
        return cls(specs, ranges, held)

    def ordered(self, specs: Mapping[str, TensorSpec]) -> Shadow:
        """Return this new shadow in the order of a channel's table, which positions count by."""
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
        self._before, self._taken, self.with_nan = dict(self.fingerprints), [], []
        seen: dict[str, TensorSpec] = {}
        tensors, dtype = _tensors(stream, dtype)
        lasting = isinstance(tensors, ItemsView | Sequence)
        on_host = placement == "host" or (placement == "auto" and "cpu" not in kernels.ACCELERATORS)
        self._copies.begin(placement)
        batch = _Batch(self)
        for name, part in _parts(tensors, dtype, rank, seen, self.specs):
            spec = seen[name]
            if spec is not self.specs.get(name):
                continue  # reported below, after the stream has been drained
            if self.ranges[name] != (part.start, part.stop):
                raise ModelMismatchError(
                    f"{name} was published from element {self.ranges[name][0]} on by this rank, and now comes from "
                    f"{part.start} on."
                )
            if on_host and part.held.is_cpu:
                batch.compare(name, part.held, spec, lasting)
            else:
                batch.take(self._copies.differences(name, part.held, spec.dtype, placement, lasting))
        batch.take(self._copies.rest())
        batch.flush()
        check_specs(self.specs, seen, "The published model")
        return [step.delta for step in self._taken if step.delta is not None and step.delta.changed]

    def note(self, delta: Delta, gain_T: np.ndarray, above_T: np.ndarray) -> None:
        """Note steps of one vector that the bits have taken, and what they add to fingerprints. The caller holds `lock`."""
        ((width, steps),) = delta.steps.items()
        vector = self.layout.vectors[width]
        for t in np.flatnonzero(vector.count(steps.at_K)).tolist():
            name = vector.names[t]
            self.fingerprints[name] = (self.fingerprints[name] + int(gain_T[t])) & fingerprint.MASK
        self.with_nan += [vector.names[t] for t in np.flatnonzero(above_T).tolist()]
        for snapshot in self._snapshots:
            snapshot.note(delta)

    def retreat(self) -> None:
        """Undo the last `advance`, whether it raised or not. What an interrupt left half-way is noted in `_lost`."""
        with self.lock:
            touched = list[str]()
            for step in reversed(self._taken):
                unfinished = step.delta is None
                delta = step.undone()
                self._rows[step.width].add(delta.steps[step.width])
                if unfinished:
                    touched += delta.counts()
                    if any(self._found(name) != self.fingerprints[name] for name in touched):  # it had not happened
                        self._rows[step.width].add(delta.undone().steps[step.width])
                for snapshot in self._snapshots:
                    if step.noted or snapshot.noted(step.delta):
                        snapshot.note(delta)
        if self._before is not None:
            self._lost = next((name for name in touched if self._found(name) != self._before[name]), self._lost)
            self.fingerprints, self._before = self._before, None
        self._taken = []
        self._copies.clear()

    def _found(self, name: str) -> int:
        """Return the fingerprint of the bits that are there."""
        return kernels.cpu.fingerprint(fingerprint.tensor_key(name), self.bits[name], self.ranges[name][0])

    def keep(self) -> None:
        """Make the last `advance` final."""
        self._taken, self._before = [], None

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


class _Rows:
    """Where the ranges of one vector lie in memory, as the kernels want it."""

    def __init__(self, shadow: Shadow, width: int) -> None:
        self.vector = shadow.layout.vectors[width]
        held = [shadow.bits[name] for name in self.vector.names]
        self.start_T = np.array([shadow.ranges[name][0] for name in self.vector.names], np.int64)
        self.address_T = np.array([bits.ctypes.data for bits in held], np.int64)
        self.bound_T2 = np.array([nan_bounds(spec) for spec in self.vector.specs], np.uint64)

    def add(self, steps: Sparse) -> tuple[np.ndarray, np.ndarray]:
        """Add steps to the bits; see `cpu_rows.add`."""
        vector = self.vector
        bound_T = np.concatenate(([0], np.cumsum(vector.count(steps.at_K))))
        zero_T = self.address_T - (vector.first_T[:-1] + self.start_T) * vector.width
        row_RF = np.stack((np.arange(len(vector.specs)), bound_T[:-1], bound_T[1:], zero_T), axis=1)
        return cpu_rows.add(row_RF, vector.key_T, self.bound_T2, vector.first_T, *steps)


class _Step:
    """What happened to the bits of one vector, from the moment on when it may have happened."""

    def __init__(self, layout: Layout, width: int, taken: Taken | None, steps: Sparse | None = None) -> None:
        self.width = width
        self.delta: Delta | None = None
        self.noted = False  # by the shadow and all snapshots
        self._layout, self._taken, self._steps = layout, taken, steps

    def end(self) -> Delta:
        """Return the steps as a delta."""
        steps = self._steps
        if steps is None:
            assert self._taken is not None
            vector = self._layout.vectors[self.width]
            steps = Sparse(*self._taken.join(vector.index_dtype, vector.bits_dtype))
        self.delta = Delta(self._layout, {self.width: steps})
        return self.delta

    def undone(self) -> Delta:
        """Return what undoes it."""
        return (self.delta or self.end()).undone()


class _Batch:
    """Tensors that are compared together."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        # Number, start, count, address of the new bits.
        self._rows: dict[int, list[tuple[int, int, int, int]]] = {width: [] for width in shadow.layout.vectors}
        self._held: list[torch.Tensor] = []  # so that the addresses stay
        self._copied_bytes = 0  # of these, what was copied
        self._found: dict[int, list[tuple[int, np.ndarray, np.ndarray]]] = {}
        self._count = 0

    def compare(self, name: str, held: torch.Tensor, spec: TensorSpec, lasting: bool) -> None:
        """Add a range of a tensor on the host, in any dtype. Its memory may change after return unless it is lasting."""
        start, count = self._shadow.ranges[name][0], held.numel()
        if held.is_contiguous() and held.dtype is _DTYPES[spec.dtype]:
            if not lasting and count <= _COPIED:
                held = held.detach().clone()
                self._copied_bytes += held.nbytes
            self._add(name, start, held)
            if not (lasting or count <= _COPIED):
                self.flush()
            return
        for at, piece in pieces(held):
            new = cast(piece, spec.dtype)
            new = new if lasting or new.data_ptr() != piece.data_ptr() else new.clone()
            self._copied_bytes += new.nbytes
            self._add(name, start + at, new)

    def _add(self, name: str, start: int, new: torch.Tensor) -> None:
        """Add contiguous elements in the served dtype, from index `start` of the tensor on."""
        width, number = self._shadow.layout.places[name]
        self._rows[width].append((number, start, new.numel(), new.data_ptr()))
        self._held.append(new)
        self._count += new.numel()
        if self._count >= _BATCH or self._copied_bytes >= _COPIES_BYTES:
            self.flush()

    def take(self, differences: Iterator[tuple[str, np.ndarray | None, np.ndarray]]) -> None:
        """Add what `DeviceCopies` found: where ranges differ and by which steps, or their new bits."""
        for name, at_K, data in differences:
            if at_K is None:
                spec = self._shadow.specs[name]
                self._copied_bytes += data.nbytes
                self.compare(name, tensor_of(data, TensorSpec(name, spec.dtype, (data.size,))), spec, lasting=True)
            elif at_K.size:
                width, number = self._shadow.layout.places[name]
                self._found.setdefault(width, []).append((number, at_K, data))

    def flush(self) -> None:
        """Compare, and advance the shadow."""
        shadow = self._shadow
        for width, found in self._found.items():
            rows = shadow._rows[width]
            first_T, index = rows.vector.first_T[:-1] + rows.start_T, rows.vector.index_dtype
            found.sort(key=lambda item: item[0])
            at_K = np.concatenate([at_K.astype(index) + index.type(first_T[t]) for t, at_K, _ in found])
            self._advance(_Step(shadow.layout, width, None, Sparse(at_K, np.concatenate([step_K for *_, step_K in found]))))
        for width, given in self._rows.items():
            if not given:
                continue
            rows = shadow._rows[width]
            row_R4 = np.array(sorted(given), np.int64)
            tensor_R = row_R4[:, 0]
            address_R = rows.address_T[tensor_R] + (row_R4[:, 1] - rows.start_T[tensor_R]) * width
            row_RF = np.stack((row_R4[:, 0], row_R4[:, 1], row_R4[:, 2], address_R, row_R4[:, 3]), axis=1)
            for taken in cpu_rows.chunks(row_RF, rows.vector.first_T, rows.vector.bits_dtype):
                self._advance(_Step(shadow.layout, width, taken))
            given.clear()
        self._found, self._held, self._count, self._copied_bytes = {}, [], 0, 0

    def _advance(self, step: _Step) -> None:
        shadow, rows = self._shadow, self._shadow._rows[step.width]
        with shadow.lock:
            shadow._taken.append(step)  # before it happens, since an interrupt may come right after it
            if step._taken is None:
                assert step._steps is not None
                gain_T, above_T = rows.add(step._steps)
            else:
                gain_T, above_T = cpu_rows.advance(step._taken, rows.vector.key_T, rows.bound_T2, rows.vector.bits_dtype)
            delta = step.end()
            if delta.changed:
                shadow.note(delta, gain_T, above_T)
            step.noted = True


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
        """Write a tensor's bits into `out_N`, unsigned and flat, and return their fingerprint.

        Raises:
            CorruptDataError: memory has damaged them.
        """
        key, bits_N = fingerprint.tensor_key(name), self._bits[name]
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
            steps, _ = delta.of(name)
            out_N[steps.at_K] -= steps.data_K
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


def _first_parts(stream: Stream, dtype: str, rank: int, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges of a first stream and fill `specs`, as `_parts`; at the end, warn of tensors that are rounded.

    Raises:
        ModelMismatchError: it is empty, or as `_parts`.
    """
    given: dict[str, torch.dtype] = {}
    sizes: dict[torch.dtype, int] = {}
    tensors, dtype = _tensors(stream, dtype)
    for name, part in _parts(tensors, dtype, rank, specs, {}):
        yield name, part
        sizes[part.held.dtype] = sizes.get(part.held.dtype, 0) + math.prod(part.shape)
        given[name] = part.held.dtype
    if not specs:
        raise ModelMismatchError("The stream held no tensors; nothing was published.")
    _warn_of_rounding(given, specs, max(sizes, key=lambda dtype: sizes[dtype]))


def _parts(
    stream: Tensors, dtype: str, rank: int, specs: dict[str, TensorSpec], known: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges that a rank publishes of a stream; fill `specs` with the whole tensors in the served dtype.

    A tensor that is as it was `known` has the same spec there.
    """
    for name, tensor in map(pair_of, stream):
        if name in specs:
            raise ModelMismatchError(f"The stream held {name} twice; nothing was published.")
        part = range_of(name, tensor, rank)
        if part.held.is_meta:
            raise ConfigError(
                f"{name} is offloaded: it lies on the meta device, without values. Train without offloading, or publish "
                "tensors that were gathered."
            )
        served, spec = served_name(name, part.held.dtype, dtype), known.get(name)
        if spec is None or (spec.dtype, spec.shape) != (served, part.shape):
            spec = TensorSpec(name, served, part.shape)
        specs[name] = spec
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
