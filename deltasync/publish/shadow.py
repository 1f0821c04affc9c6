"""The shadow: the bits that were published last, of the ranges that this rank holds, and snapshots of it.

It is in one place: on the accelerator where the tensors are, if that has room, or on the host. Publishing compares a stream
with it, which only reads, and applies the difference once all ranks have agreed on the version.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from deltasync import kernels
from deltasync.errors import ConfigError, CorruptDataError, ModelMismatchError, get_logger
from deltasync.kernels import native
from deltasync.publish.detect import Difference, Looks, Seen, looks_of, on_host, parts_of, served_tensors
from deltasync.publish.device_shadow import DeviceShadow, needed_bytes, room_bytes
from deltasync.publish.host_shadow import HostShadow
from deltasync.publish.stream import Stream, TensorRange, Tensors, stays
from deltasync.tensors import Delta, Fingerprints, Layout, TensorSpec, check_specs, fingerprint
from deltasync.tensors.bits import bits_of, has_nan, signed_view, tensor_of
from deltasync.tensors.delta import merge
from deltasync.tensors.device import DeviceDelta

if TYPE_CHECKING:
    from deltasync.ranks.peers import Range

logger = get_logger(__name__)

_MOST_LATER = 8
"""Deltas that a snapshot keeps one by one; more are merged."""


class Shadow:
    """Published bits of the ranges that this rank holds. One thread compares and applies; others may read snapshots.

    Args:
        specs: The whole tensors.
        ranges: The range that is held of each.
        memory: The unsigned bit patterns of each range, on the host or on a device.
        place: `auto`, `device` or `host`: where bits that are on the host go when the first stream is compared with them.

    Attributes:
        layout: The whole tensors.
        ranges: The range that is held of each.
        bits: The bits of each range on the host: of a shadow there, a view; else a copy, made when it is asked for.
        lock: Held while the bits change.
        with_nan: Tensors with a NaN in what was taken last, until `warn_of_nan`.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        ranges: Mapping[str, Range],
        memory: Mapping[str, np.ndarray] | HostShadow | DeviceShadow,
        place: str = "host",
    ) -> None:
        self.layout = Layout(specs)
        self.ranges = dict(ranges)
        self.with_nan: list[str] = []
        self.lock = threading.RLock()
        self._memory = HostShadow(self.layout, self.ranges, memory) if isinstance(memory, Mapping) else memory
        self.bits = _Bits(self._memory)
        self._place, self._is_settled = place, self._memory.device is not None
        self._snapshots: list[Snapshot] = []
        self._seen: Seen | None = None
        self._planned: tuple[list[str], Looks] | None = None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The whole tensors by name."""
        return self.layout.specs

    @functools.cached_property
    def fingerprints(self) -> Fingerprints:
        """The share of each range in the fingerprint of its tensor; computed when it is first asked for."""
        found, self.with_nan = self._memory.fingerprints()
        return found

    def learn(self, snapshot: Snapshot, version: int) -> Fingerprints:
        """Take over and return the fingerprints that a snapshot has found as its tensors were read; warn of its NaN."""
        _warn_of_nan(snapshot.with_nan, version)
        found = Fingerprints.by_name(self.layout, snapshot.fingerprints)
        vars(self).setdefault("fingerprints", found)  # unless `apply` wanted them sooner
        return found

    def warn_of_nan(self, version: int) -> None:
        """Warn of NaN in what was taken last, once."""
        nan, self.with_nan = self.with_nan, []
        _warn_of_nan(nan, version)

    @classmethod
    def of(cls, stream: Stream, dtype: str, rank: int, place: str = "host", *, settle: bool = True) -> Shadow:
        """Copy the first stream, in the served dtype, and choose the place; without `settle`, that is left to `compare`.

        Raises:
            ModelMismatchError: the stream is empty, or holds a tensor twice, or one that no channel carries.
        """
        specs: dict[str, TensorSpec] = {}
        tensors, dtype = served_tensors(stream, dtype)
        parts: Iterable[tuple[str, TensorRange]] = _first_parts(tensors, dtype, rank, specs)
        if settle and stays(tensors):
            parts = listed = list(parts)
            ranges = {name: (part.start, part.stop) for name, part in listed}
            layout = Layout(specs)
            device = choose(place, layout, ranges, (part.held for _, part in listed))
            if device is not None:
                memory = DeviceShadow(layout, ranges, device)
                for name, part in listed:
                    memory.set(name, part.held)
                memory.is_settled()
                return cls(specs, ranges, memory, place)
        held: dict[str, np.ndarray] = {}
        ranges, some = {}, list[torch.Tensor]()
        for name, part in parts:
            held[name], ranges[name] = _copied(part.held, specs[name]), (part.start, part.stop)
            some = [*some, part.held.new_empty(1)][:1] if part.held.numel() else some
        shadow = cls(specs, ranges, held, place)
        shadow._is_settled = isinstance(parts, list)
        if settle:
            shadow._settle_place(some)
        return shadow

    def laid_out(self, specs: Mapping[str, TensorSpec], without: Sequence[str] = ()) -> Shadow:
        """Return this new shadow in the order of a channel's table, which positions follow, without some of its ranges."""
        if [*self.specs] == [*specs] and not without:
            return self
        ranges = {name: (0, 0) if name in without else self.ranges[name] for name in specs}
        if isinstance(self._memory, DeviceShadow):
            return Shadow(specs, ranges, self._memory.laid_out(Layout(specs), ranges), self._place)
        return Shadow(
            specs,
            ranges,
            {name: self.bits[name][:0].copy() if name in without else self.bits[name] for name in specs},
            self._place,
        )

    @staticmethod
    def outline(stream: Stream, dtype: str, rank: int) -> tuple[dict[str, TensorSpec], dict[str, Range]]:
        """Return the whole tensors of a stream that stays in memory, and the ranges that it holds. Raises as `of`."""
        specs: dict[str, TensorSpec] = {}
        tensors, dtype = served_tensors(stream, dtype)
        return specs, {name: (part.start, part.stop) for name, part in _first_parts(tensors, dtype, rank, specs)}

    def stream(self) -> Iterator[tuple[str, TensorRange]]:
        """Yield the bits as a stream of ranges."""
        for name, (start, stop) in self.ranges.items():
            spec = self.specs[name]
            if isinstance(self._memory, DeviceShadow):
                held = self._memory.view(name).view(getattr(torch, spec.dtype))
            else:
                held = tensor_of(self.bits[name], TensorSpec(name, spec.dtype, (stop - start,)))
            yield name, TensorRange(held, start, spec.shape)

    def compare(self, stream: Stream, dtype: str, rank: int, *, settle: bool = True) -> Difference:
        """Compare a stream with the bits. Nothing is mutated; the first stream to `settle` decides the place of the bits.

        Raises:
            ModelMismatchError: the stream holds other tensors, or other ranges of them.
            torch.OutOfMemoryError: the device has no memory for what differs, and the bits have to stay there.
        """
        tensors, dtype = served_tensors(stream, dtype)
        lasting = tensors if isinstance(tensors, ItemsView | Sequence) else None
        held = None if lasting is None or self._seen is None else self._seen.again(lasting, dtype, rank)
        if held is None:
            lasting = lasting if stays(tensors) else None
            seen: dict[str, TensorSpec] = {}
            parts = self._known(parts_of(tensors, dtype, rank, seen, self.specs), seen)
            if lasting is None:
                first = list(itertools.islice(parts, 1))
                if settle:
                    self._settle_place(part.held for _, part in first)
                found = self._memory.compare_each((name, part.held) for name, part in itertools.chain(first, parts))
                check_specs(self.specs, seen, "The published model")
                return found
            listed = list(parts)
            check_specs(self.specs, seen, "The published model")
            held = [part.held for _, part in listed]
            if settle:
                self._settle_place(held)
            self._plan([name for name, _ in listed], held)
            self._seen = Seen.of(lasting, listed, dtype, rank)
        try:
            return self._memory.compare(held)
        except torch.OutOfMemoryError as error:
            if self._place != "auto" or self._planned is None:
                raise
            self._bring_back(str(error).partition("\n")[0])
            (names, _), self._planned = self._planned, None
            self._plan(names, held)
            return self._memory.compare(held)

    def apply(self, difference: Difference) -> None:
        """Take over a difference, which all ranks have agreed on.

        If this raises, or is interrupted, the bits are not known any more.
        """
        with self.lock:
            before = self.fingerprints
            if any(snapshot.is_open for snapshot in self._snapshots):
                deltas = [piece.host() if isinstance(piece, DeviceDelta) else piece for piece in difference.pieces]
            else:
                deltas = []
            del self.fingerprints  # until they are known again
            difference.apply()
            self.fingerprints = before.with_gains(difference.gains)
            vectors = self.layout.vectors
            self.with_nan = [
                vectors[width].names[t]
                for width, above_T in difference.aboves.items()
                for t in np.flatnonzero(above_T).tolist()
            ]
            for snapshot in self._snapshots:
                for delta in deltas:
                    snapshot.note(delta)

    def snapshot(self) -> Snapshot:
        """Return the bits of now, while the shadow goes on."""
        snapshot = Snapshot(self)
        with self.lock:
            self._snapshots = [*(other for other in self._snapshots if other.is_open), snapshot]
        return snapshot

    @property
    def size_bytes(self) -> dict[str, int]:
        """Memory of the bits, on the `host` and on the `device`; one of them is 0."""
        sizes = {"host": 0, "device": 0}
        sizes["host" if self._memory.device is None else "device"] = self._memory.size_bytes
        return sizes

    def _known(
        self, parts: Iterable[tuple[str, TensorRange]], seen: Mapping[str, TensorSpec]
    ) -> Iterator[tuple[str, TensorRange]]:
        """Yield the parts of tensors that are the shadow's. `check_specs` refuses the others, once the stream was read."""
        for name, part in parts:
            if seen[name] is not self.specs.get(name):
                continue
            if self.ranges[name] != (part.start, part.stop):
                raise ModelMismatchError(
                    f"{name} was published from element {self.ranges[name][0]} on by this rank, and now comes from "
                    f"{part.start} on."
                )
            yield name, part

    def _plan(self, names: list[str], held: Sequence[torch.Tensor]) -> None:
        planned = names, looks_of(held)
        if planned != self._planned:
            self._memory.plan(names, held)
            self._planned = planned

    def _settle_place(self, held: Iterable[torch.Tensor]) -> None:
        """Move the bits to where the tensors of a first stream are, if they are to go there."""
        if self._is_settled:
            return
        device = choose(self._place, self.layout, self.ranges, held)
        if device is not None:
            memory = DeviceShadow(self.layout, self.ranges, device)
            for name, bits_N in self.bits.items():
                memory.view(name).copy_(signed_view(bits_N.reshape(-1)))
            memory.is_settled()
            self._become(memory)
        self._is_settled = True

    def _bring_back(self, why: str) -> None:
        """Move the bits to the host for good."""
        logger.warning("The shadow moves to the host, where weights are compared from now on: %s", why)
        self._become(HostShadow(self.layout, self.ranges, dict(self.bits.items())))

    def _become(self, memory: HostShadow | DeviceShadow) -> None:
        with self.lock:
            self._memory = self.bits.memory = memory


class _Bits(Mapping[str, np.ndarray]):
    """A shadow's bits on the host, wherever they are. Snapshots keep this, and not the shadow, which keeps them."""

    def __init__(self, memory: HostShadow | DeviceShadow) -> None:
        self.memory = memory

    def __getitem__(self, name: str) -> np.ndarray:
        return self.memory.bits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.memory.bits)

    def __len__(self) -> int:
        return len(self.memory.bits)


def choose(place: str, layout: Layout, ranges: Mapping[str, Range], held: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device where the shadow of these tensors goes, None for the host; and say so in the log."""
    devices = {tensor.device for tensor in held if tensor.numel()}
    device, why = None, "it was chosen"
    if place != "host":
        why = f"the tensors are on {', '.join(map(str, devices)) or 'no device'}"
        if len(devices) == 1 and kernels.compares(of := next(iter(devices))):
            room, needed = room_bytes(of), needed_bytes(layout, ranges)
            if place == "device" or needed <= room:
                device = of
            else:
                why = f"{of} has room for {room} bytes, and it needs {needed}"
    logger.info(
        "shadow place=%s why=%r bytes=%d",
        *(
            "host" if device is None else device,
            why,
            sum(layout.specs[n].item_bytes * (b - a) for n, (a, b) in ranges.items()),
        ),
    )
    return device


def _copied(held: torch.Tensor, spec: TensorSpec) -> np.ndarray:
    """Return a copy of a tensor's bits in the served dtype, on the host."""
    copy = torch.empty(held.shape, dtype=getattr(torch, spec.dtype))
    if held.is_cpu:
        copy.copy_(held.detach())  # casts in all threads
    else:
        for first, piece in on_host(held, spec.dtype):
            copy.view(-1)[first : first + piece.numel()] = piece
    return bits_of(copy)


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

    def take(self, name: str, out_N: np.ndarray) -> int:
        """Write a tensor's range of bits into `out_N`, unsigned and flat, and return its share of the fingerprint.

        Raises:
            CorruptDataError: memory has damaged them.
        """
        bits_N, (start, _) = self._bits[name], self.ranges[name]
        key = native.key_from(fingerprint.tensor_key(name), start)
        with self._lock:
            before = self._later
        # Without the lock, so that the trainer does not wait for it.
        found = native.take(key, bits_N, out_N)
        with self._lock:
            later = self._later
            if later is not before:  # each step makes another list
                np.copyto(out_N, self._bits[name])
            self._left.discard(name)
        for delta in later:
            steps = delta.of(name)
            out_N[steps.at_K - steps.at_K.dtype.type(start)] -= steps.data_K
        if later:
            found = native.fingerprint(key, out_N)
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


def _first_parts(tensors: Tensors, dtype: str, rank: int, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges of a first stream and fill `specs`, as `parts_of`; at the end, warn of tensors that are rounded.

    Raises:
        ModelMismatchError: the stream is empty, or as `parts_of`.
    """
    given: dict[str, torch.dtype] = {}
    sizes: dict[torch.dtype, int] = {}
    for name, part in parts_of(tensors, dtype, rank, specs, {}):
        yield name, part
        sizes[part.held.dtype] = sizes.get(part.held.dtype, 0) + math.prod(part.shape)
        given[name] = part.held.dtype
    if not specs:
        raise ModelMismatchError("The stream held no tensors; nothing was published.")
    _warn_of_rounding(given, specs, max(sizes, key=lambda dtype: sizes[dtype]), dtype)


def _warn_of_rounding(
    given: Mapping[str, torch.dtype], specs: Mapping[str, TensorSpec], main: torch.dtype, rule: str
) -> None:
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
            *(rule, ".".join(name.split(".")[-2:])),
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
