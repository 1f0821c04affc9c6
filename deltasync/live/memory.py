"""Live weights in checkpoint coordinates, and the only code that writes them.

    staged = memory.stage(changed)      # decoded, translated, on the device; live weights untouched
    memory.commit(staged)               # live weights mutated; `staged` holds the old values
    memory.rollback(staged)             # the old bits again

`segments` says where they lie, `staging` turns changes into exchanges, `exchange` does and undoes them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from deltasync.errors import FingerprintMismatchError, StageError, undoing
from deltasync.kernels import native
from deltasync.live import staging
from deltasync.live.devices import Device, device_of
from deltasync.live.exchange import Copy, Swap, Target
from deltasync.live.segments import Parts, Segment, combine, unsigned
from deltasync.live.staging import DeviceStaging, HostPlaces, HostStaging, Staged
from deltasync.tensors import (
    Changed,
    Delta,
    Layout,
    Region,
    Sparse,
    TensorSpec,
    Vector,
    fingerprint,
    region_size,
    weight_bytes,
)
from deltasync.tensors.bits import int_view, signed_view


class LiveMemory:
    """Live weights in checkpoint coordinates: the whole model or a shard of it.

    `segments` says where each tensor of the table lies, by a list that may be empty. The regions of all shards together
    cover a tensor; two of them are equal or disjoint.

    Attributes:
        regions: Which elements each segment holds, by tensor name.
        is_on_host: Whether any of them is in host memory.
        parts: Fingerprint of each segment, as of the last commit or `audit`; empty until the first `audit`.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        segments: Mapping[str, list[Segment]],
        device_of: Callable[[torch.Tensor], Device | None] = device_of,
    ) -> None:
        self._specs = specs
        self._layout = Layout(specs)
        self._segments = segments
        self._device_of = device_of
        self._keys = {name: fingerprint.tensor_key(name) for name in specs}
        self.regions = {name: [segment.region() for segment in held] for name, held in segments.items()}
        self.parts: Parts = {}
        places = {device_of(segment.live) for held in segments.values() for segment in held}
        self.is_on_host = None in places
        self._devices = {device for device in places if device is not None}
        self._places: dict[int, HostPlaces] = {}
        self._held: dict[str, Sequence[Region] | None] = {}

    @classmethod
    def on_host(cls, specs: Mapping[str, TensorSpec]) -> tuple[LiveMemory, dict[str, torch.Tensor]]:
        """Return live memory over new host tensors of these specs, with any bits, and the tensors.

        They come from torch: numpy asks for huge pages, which some virtual machines give slowly.

        Raises:
            StageError: this machine has too little memory.
        """
        model_bytes = weight_bytes(specs.values())
        if hasattr(os, "sysconf") and model_bytes > (held := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
            raise StageError(f"The channel's tensors have {model_bytes:,} bytes, this machine {held:,} bytes of memory.")
        try:
            tensors = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        except RuntimeError:  # of torch's allocator, where the system promises no more than it has
            raise StageError(f"The channel's tensors have {model_bytes:,} bytes, more than this machine has left.") from None
        segments = {name: [Segment(int_view(tensor), (1,), 0)] for name, tensor in tensors.items()}
        return cls(specs, segments), tensors

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor if this memory holds the whole model; see `combine`."""
        return combine([self.regions], [self.parts])

    def fingerprints_of(self, names: Iterable[str], parts: Parts | None = None) -> dict[str, int]:
        """Return those of some tensors, of now or from the `parts` of another time."""
        of = self.parts if parts is None else parts
        single = {name: of[name][0] for name in names if len(of[name]) == 1}
        return single | combine([self.regions], [{name: of[name] for name in names if name not in single}])

    def gather(self, name: str) -> np.ndarray:
        """Return a host copy of a tensor's bit patterns, flat and unsigned; zeros outside of `regions`."""
        flat_N = np.zeros(self._specs[name].element_count, self._specs[name].bits_dtype)
        for segment in self._place(name):
            segment.source(signed_view(flat_N)).copy_(segment.live)
        return flat_N

    def bits(self, name: str) -> np.ndarray:
        """Return the same as `gather`, as a view of live memory where possible. Do not write to it."""
        segments = self._place(name)
        if len(segments) == 1 and self._device_of(live := segments[0].live) is None:
            is_whole = live.numel() == self._specs[name].element_count
            if is_whole and live.is_contiguous() and live.stride() == segments[0].stride:
                return unsigned(segments[0].flat())
        return self.gather(name)

    def _place(self, name: str) -> list[Segment]:
        if name not in self._segments:
            raise StageError(f"{name} has no addressable place in live memory.")
        return self._segments[name]

    def held(self, name: str) -> Sequence[Region] | None:
        """Return which elements of a tensor live memory holds, as `codec.Wanted`: None for all."""
        if name not in self._segments:
            return None  # `stage` refuses it
        if name not in self._held:
            whole = self._specs[name].element_count
            is_whole = any(region_size(region) == whole for region in self.regions[name])
            self._held[name] = None if is_whole else self.regions[name]
        return self._held[name]

    @functools.cached_property
    def wanted(self) -> Callable[[str], Sequence[Region] | None] | None:
        """`held`, as decoding wants it; None if every tensor is held whole."""
        return None if all(self.held(name) is None for name in self._specs) else self.held

    def audit(self) -> None:
        """Recompute `parts` from every bit of live memory."""
        found = {name: [0] * len(self._place(name)) for name in self._specs}
        targets: dict[Device | None, list[Target]] = {}
        for target in itertools.chain.from_iterable(map(self._targets, self._specs)):
            if target.segment.live.numel():
                targets.setdefault(self._device_of(target.segment.live), []).append(target)
        for device, held in targets.items():
            with contextlib.nullcontext() if device is None else device.staging():
                for target, value in staging.readout(device, held)():
                    found[target.name][target.number] = value
        self.parts = {name: tuple(values) for name, values in found.items()}

    def _targets(self, name: str) -> list[Target]:
        return [Target(name, at, segment, self._keys[name]) for at, segment in enumerate(self._place(name))]

    def warm_up(self) -> None:
        """Compile the kernels that commits to an accelerator need, so that no commit waits for them."""
        for segment in itertools.chain.from_iterable(self._segments.values()):
            device = self._device_of(segment.live)
            if device is not None:
                device.kernels.warm_up(device.device, segment.live.dtype)

    def read(self, name: str) -> list[bytes]:
        """Return the bits of each segment of a tensor, in the order of its region's dimensions."""
        return [segment.runs()[1].tobytes() for segment in self._place(name)]

    def differs(self, name: str, flat_N: torch.Tensor) -> bool:
        """Whether any bit in live memory differs from those of a whole tensor, a signed view on any device."""
        for segment in self._place(name):
            device = self._device_of(segment.live)
            if device is None:
                if not torch.equal(segment.source(flat_N).cpu(), segment.live):
                    return True
            elif staging.differs(device, segment, flat_N):
                return True
        return False

    def load(self, weights: Iterable[tuple[str, np.ndarray, int]]) -> None:
        """Write full weights into host memory that nobody uses and that holds whole tensors, without a second copy.

        `weights` has the name, the unsigned bit patterns of shape N and the fingerprint of each tensor. Mutates the live
        weights and `parts`; if it raises, some of them are written, and `parts` may be incomplete.

        Raises:
            FingerprintMismatchError: the bits do not have the fingerprint.
            FormatError, StoreError: from fetching them.
        """
        for name, bits_N, expected in weights:
            (segment,) = self._place(name)
            found = native.take(self._keys[name], bits_N, unsigned(segment.flat()))
            self.parts[name] = (found,)
            if found != expected:
                raise FingerprintMismatchError(f"{name} does not have the published bits.")

    def apply(self, delta: Delta) -> None:
        """Apply changes to host memory that nobody uses and that holds whole tensors. This cannot be undone.

        Mutates the live weights and `parts`; if it raises, some of them are written.
        """
        for width, steps in delta.steps.items():
            self._add(self._layout.vectors[width], steps)

    def _add(self, vector: Vector, steps: Sparse) -> None:
        changed = np.flatnonzero(vector.count(steps.at_K))
        zero_T = np.zeros(len(vector.specs), np.int64)
        address_T = [self._place(vector.names[t])[0].live.data_ptr() for t in changed.tolist()]
        zero_T[changed] = np.array(address_T, np.int64) - vector.first_T[changed] * vector.width
        gain_T, _ = native.add(vector, zero_T, steps)
        for t in changed.tolist():
            (part,) = self.parts[vector.names[t]]
            self.parts[vector.names[t]] = ((part + int(gain_T[t])) & fingerprint.MASK,)

    def stage(self, changed: Changed) -> Staged:
        """Translate changes into writes and put them on the device. Live weights are untouched.

        Raises:
            StageError: a tensor has no place in live memory, or its device has too little memory.
        """
        delta, fingerprints = changed
        staged = Staged(fingerprints=dict(fingerprints))
        for name in fingerprints:
            self._place(name)
        host, devices = HostStaging(), dict[Device, DeviceStaging]()
        for width, steps in delta.steps.items():
            if (places := self._on_host(width)).targets:
                host.elements(places, steps)
        for name in delta.counts() if self._devices else ():
            steps = delta.of(name)
            for target in self._targets(name):
                device = self._device_of(target.segment.live)
                if device is None:
                    continue
                staging_ = devices.setdefault(device, DeviceStaging(device))
                staging_.elements(target, steps)
        host.finish(staged)
        for each in devices.values():
            each.finish(staged)
        return staged

    def _on_host(self, width: int) -> HostPlaces:
        if width not in self._places:
            vector = self._layout.vectors[width]
            targets = itertools.chain.from_iterable(self._targets(name) for name in vector.names if name in self._segments)
            held = [target for target in targets if self._device_of(target.segment.live) is None]
            self._places[width] = HostPlaces(vector, held)
        return self._places[width]

    def stage_weights(self, weights: Iterable[tuple[str, np.ndarray, int | None]]) -> Staged:
        """Translate whole tensors into writes: name, unsigned bit patterns of shape N, and the fingerprint or None.

        Raises:
            StageError: as `stage`.
            FormatError, ChainError, StoreError: from fetching and decoding; live weights are untouched.
        """
        stagings: dict[Device | None, HostStaging | DeviceStaging] = {}
        staged = Staged()
        for name, bits_N, expected in weights:
            for target in self._targets(name):
                device = self._device_of(target.segment.live)
                if device not in stagings:
                    stagings[device] = HostStaging() if device is None else DeviceStaging(device)
                stagings[device].whole(target, np.require(bits_N, requirements="W"))  # as torch wants it
            staged.fingerprints[name] = expected
        for each in stagings.values():
            each.finish(staged)
        return staged

    def commit(self, staged: Staged) -> Staged:
        """Write a staged version into live memory and update `parts`. Returns `staged`, which now holds the old values.

        After return the new bits are live; compare their fingerprints with the staged ones before serving them. If it
        raised, the old bits are live again, unless it raised CommitError.

        Raises:
            CommitError: the write failed and so did undoing it.
            StageError: live memory was written since this was staged.
        """
        began = time.perf_counter()
        done: list[Swap | Copy] = []
        try:
            self._exchange(staged, done)
            for copy in staged.copies:
                copy.exchange()
                done.append(copy)
            self._synchronize()
            staged.scatter_s = time.perf_counter() - began
            staged.parts = self._parts_after(staged)
        except BaseException:
            self._bring_back(done)
            raise
        staged.before, self.parts = self.parts, self.parts | staged.parts
        return staged

    def _exchange(self, staged: Staged, done: list[Swap | Copy]) -> None:
        """Exchange scattered values on every device, and note each exchange in `done`."""
        for swap in staged.swaps:
            swap.exchange()
            done.append(swap)
        if any(swap.found() != swap.check for swap in staged.swaps):
            raise StageError("Live memory was written by someone else since this version was staged.")

    def _parts_after(self, staged: Staged) -> Parts:
        """Return the parts of the tensors that `staged` names, once all of it is written."""
        parts = {name: self.parts[name] for name in staged.fingerprints}
        for target, gained in itertools.chain.from_iterable(swap.gains for swap in staged.swaps):
            self._set(parts, target, parts[target.name][target.number] + gained)
        for target, value in itertools.chain.from_iterable(read() for read in staged.readouts):
            self._set(parts, target, value)
        return parts

    @staticmethod
    def _set(parts: Parts, target: Target, value: int) -> None:
        held, number = parts[target.name], target.number
        parts[target.name] = (*held[:number], value & fingerprint.MASK, *held[number + 1 :])

    def rollback(self, committed: Staged) -> None:
        """Write the old values of the last commit back.

        Raises:
            CommitError: that failed.
        """
        self._bring_back((*committed.swaps, *committed.copies))
        self.parts = committed.before

    def _bring_back(self, exchanged: Sequence[Swap | Copy]) -> None:
        with undoing():
            for each in exchanged:
                each.exchange()
            self._synchronize()

    def _synchronize(self) -> None:
        for device in self._devices:
            device.synchronize()
