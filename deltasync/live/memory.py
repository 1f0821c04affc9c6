"""STAGE and COMMIT: live weights in checkpoint coordinates, and the only code that writes them.

    staged = memory.stage(patches)      # decoded, translated, on the device; live weights untouched
    report = memory.commit(staged)      # live weights mutated, old values kept in what was staged
    memory.rollback(report)             # the old bits again

`segments` says where they lie, `staging` makes exchanges of patches, `exchange` does and undoes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from deltasync import kernels
from deltasync.errors import FingerprintMismatchError, StageError
from deltasync.live import staging
from deltasync.live.devices import Device, device_of
from deltasync.live.exchange import Copy, Swap, Target, undo
from deltasync.live.segments import Parts, Segment, combine, unsigned
from deltasync.live.staging import DeviceReadout, DeviceStaging, HostReadout, HostStaging, Readout, Staging
from deltasync.tensors import Patch, Region, TensorSpec, fingerprint, region_size, weight_bytes
from deltasync.tensors.bits import int_view, signed_view, tensor_of


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """One version, ready to commit.

    Attributes:
        swaps, copies: What to write; only `LiveMemory` looks inside. From the commit on they hold the old values.
        readouts: Read the fingerprints of what is copied.
        fingerprints: What the fingerprint of each tensor that the version names must be afterwards, None where only the
            model's is known.
    """

    swaps: Sequence[Swap]
    copies: Sequence[Copy]
    readouts: Sequence[Readout]
    fingerprints: Mapping[str, int | None]

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        return sum(swap.changed for swap in self.swaps) + sum(copy.changed for copy in self.copies)

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes beside the live weights, on their device, until the commit is confirmed."""
        rooms = {copy.room_2B.data_ptr(): copy.room_2B.nbytes for copy in self.copies}
        return sum(swap.nbytes for swap in self.swaps) + sum(rooms.values())


@dataclasses.dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit of `staged` did.

    Attributes:
        parts: Fingerprint of each segment of each tensor that the version names, afterwards.
        scatter_s: Seconds during which live weights were being written.
        before: All `LiveMemory.parts` before it.
    """

    parts: Parts
    scatter_s: float
    staged: Staged
    before: Parts


class LiveMemory:
    """Live weights in checkpoint coordinates, all of them or a shard.

    `segments` say where each tensor of the table lies: a list, be it empty, for every one. Over all shards the regions of a
    tensor cover it, and two of them are the same or have no element in common.

    Attributes:
        regions: Which elements each segment holds, by tensor name.
        parts: Fingerprint of each segment, as of the last commit or `audit`; empty until the first `audit`.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        segments: Mapping[str, list[Segment]],
        device_of: Callable[[torch.Tensor], Device | None] = device_of,
    ) -> None:
        self._specs = specs
        self._segments = segments
        self._device_of = device_of
        self._keys = {name: fingerprint.tensor_key(name) for name in specs}
        self.regions = {name: [segment.region() for segment in held] for name, held in segments.items()}
        self.parts: Parts = {}
        places = (device_of(segment.live) for held in segments.values() for segment in held)
        self._devices = {device for device in places if device is not None}

    @classmethod
    def on_host(cls, specs: Mapping[str, TensorSpec]) -> tuple[LiveMemory, dict[str, torch.Tensor]]:
        """Zeroed host tensors of these specs and the memory over them.

        Raises:
            StageError: this machine has less memory.
        """
        model_bytes = weight_bytes(specs.values())
        if hasattr(os, "sysconf") and model_bytes > (held := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
            raise StageError(f"The channel's tensors have {model_bytes:,} bytes, this machine {held:,} bytes of memory.")
        try:
            bits = {name: np.zeros(spec.element_count, spec.bits_dtype) for name, spec in specs.items()}
        except MemoryError:  # Windows promises no more than it has
            raise StageError(f"The channel's tensors have {model_bytes:,} bytes, more than this machine has left.") from None
        tensors = {name: tensor_of(bits[name], spec) for name, spec in specs.items()}
        segments = {name: [Segment(int_view(tensor), (1,), 0)] for name, tensor in tensors.items()}
        return cls(specs, segments), tensors

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor, if this memory holds the whole model; see `combine`."""
        return combine([self.regions], [self.parts])

    def gather(self, name: str) -> np.ndarray:
        """Copy of a tensor's bit patterns out of live memory, flat, unsigned, on the host; zeros outside of `regions`."""
        flat_N = np.zeros(self._specs[name].element_count, self._specs[name].bits_dtype)
        for segment in self._place(name):
            segment.source(signed_view(flat_N)).copy_(segment.live)
        return flat_N

    def bits(self, name: str) -> np.ndarray:
        """As `gather`; live memory itself where they lie there so, which is not to be changed."""
        segments = self._place(name)
        if len(segments) == 1 and self._device_of(segments[0].live) is None and segments[0].is_flat(self._specs[name]):
            return unsigned(segments[0].flat())
        return self.gather(name)

    def _place(self, name: str) -> list[Segment]:
        if name not in self._segments:
            raise StageError(f"{name} has no addressable place in live memory.")
        return self._segments[name]

    def held(self, name: str) -> Sequence[Region] | None:
        """What live memory holds of a tensor, as `codec.Wanted` gives it."""
        if name not in self._segments:
            return None  # for `stage` to refuse
        whole = self._specs[name].element_count
        return None if any(region_size(region) == whole for region in self.regions[name]) else self.regions[name]

    def audit(self) -> None:
        """Recompute `parts` from every bit of live memory."""
        found = {name: [0] * len(self._place(name)) for name in self._specs}
        targets: dict[Device | None, list[Target]] = {}
        for target in itertools.chain.from_iterable(map(self._targets, self._specs)):
            targets.setdefault(self._device_of(target.segment.live), []).append(target)
        for device, held in targets.items():
            with contextlib.nullcontext() if device is None else device.staging():
                for target, value in (HostReadout(held) if device is None else DeviceReadout(device, held)).read():
                    found[target.name][target.number] = value
        self.parts = {name: tuple(values) for name, values in found.items()}

    def _targets(self, name: str) -> list[Target]:
        return [Target(name, at, segment, self._keys[name]) for at, segment in enumerate(self._place(name))]

    def warm_up(self) -> None:
        """Compile what commits to an accelerator need, so that none waits for it."""
        for segment in itertools.chain.from_iterable(self._segments.values()):
            device = self._device_of(segment.live)
            if device is not None:
                device.kernels.warm_up(device.device, segment.live.dtype)

    def read(self, name: str) -> list[bytes]:
        """Bits of each segment of a tensor, in the order of its region's dimensions."""
        return [segment.runs()[1].tobytes() for segment in self._place(name)]

    def differs(self, name: str, flat_N: torch.Tensor) -> bool:
        """Whether any element in live memory has other bits than a whole tensor's, a signed view on any device."""
        for segment in self._place(name):
            device = self._device_of(segment.live)
            if device is None:
                if not torch.equal(segment.source(flat_N).cpu(), segment.live):
                    return True
            elif staging.differs(device, segment, flat_N):
                return True
        return False

    def load(self, weights: Iterable[tuple[str, np.ndarray, int]]) -> None:
        """Write full weights into host memory that holds no version, whole tensors, without a second copy of any.

        Takes name, unsigned bit patterns of shape N and fingerprint of each tensor. Mutates the live weights and `parts`; if
        it raises, some of them are written, and `parts` may be incomplete.

        Raises:
            FingerprintMismatchError: a tensor has another one.
            FormatError, StoreError: from fetching them.
        """
        for name, bits_N, expected in weights:
            (segment,) = self._place(name)
            found = kernels.cpu.take(self._keys[name], bits_N, unsigned(segment.flat()))
            self.parts[name] = (found,)
            if found != expected:
                raise FingerprintMismatchError(f"{name} does not have the published bits.")

    def patch(self, patches: Iterable[tuple[Patch, int]]) -> dict[str, int]:
        """Apply patches to host memory that nobody uses, whole tensors, without what would undo them.

        Mutates the live weights and `parts`; if it raises, some of them are written. Returns the fingerprints that came with
        the last patch of each tensor, which are not compared here.
        """
        wanted = {}
        for patch, wanted[patch.name] in patches:
            (segment,), key = self._place(patch.name), self._keys[patch.name]
            bits_N, (part,) = unsigned(segment.flat()), self.parts[patch.name]
            if patch.index_K is None:
                part = kernels.cpu.take(key, patch.data, bits_N)
            else:
                step_K = patch.data - bits_N[patch.index_K] if patch.absolute else patch.data
                part += kernels.cpu.add(key, bits_N, patch.index_K, step_K, (0, 0))[0]
            self.parts[patch.name] = (part & fingerprint.MASK,)
        return wanted

    def stage(self, patches: Iterable[tuple[Patch, int | None]]) -> Staged:
        """Translate decoded patches into writes and put them on the device.

        Each comes with the fingerprint that its tensor must have afterwards, or None.

        Raises:
            StageError: a patch names a tensor that has no place in live memory, or its device has too little memory.
            FormatError, ChainError, StoreError: from fetching and decoding; live weights are untouched.
        """
        stagings: dict[Device | None, Staging] = {}
        fingerprints = {}
        for patch, expected in patches:
            for target in self._targets(patch.name):
                device = self._device_of(target.segment.live)
                if device not in stagings:
                    stagings[device] = HostStaging() if device is None else DeviceStaging(device)
                stagings[device].add(target, patch)
            fingerprints[patch.name] = expected
        finished = [each.finish() for each in stagings.values()]
        swaps, copies, readouts = (
            (tuple(itertools.chain.from_iterable(each)) for each in zip(*finished, strict=True))
            if finished
            else ((), (), ())
        )
        return Staged(swaps, copies, readouts, fingerprints)

    def commit(self, staged: Staged) -> CommitReport:
        """Write a staged version into live memory and update `parts`. Mutates the live weights, and only that.

        After return the new bits are live; compare their fingerprints with the staged ones before serving them. If it
        raised, the old bits are live again, except for:

        Raises:
            CommitError: the write failed and so did undoing it.
            StageError: live memory is not what it was when this was staged.
        """
        began = time.perf_counter()
        self._exchange(staged)
        copied: list[Copy] = []
        try:
            for copy in staged.copies:
                copy.exchange()
                copied.append(copy)
            self._synchronize()
            scatter_s = time.perf_counter() - began
            new = self._parts_after(staged)
        except BaseException:
            undo(lambda: self._bring_back((*staged.swaps, *copied)))
            raise
        before, self.parts = self.parts, self.parts | new
        return CommitReport(new, scatter_s, staged, before)

    def _parts_after(self, staged: Staged) -> Parts:
        """Fingerprints of the segments of the tensors that it names, once all of it is written."""
        parts = {name: list(self.parts[name]) for name in staged.fingerprints}
        for target, gained in itertools.chain.from_iterable(swap.gains for swap in staged.swaps):
            parts[target.name][target.number] += gained
        for target, value in itertools.chain.from_iterable(readout.read() for readout in staged.readouts):
            parts[target.name][target.number] = value
        return {name: tuple(value & fingerprint.MASK for value in values) for name, values in parts.items()}

    def rollback(self, report: CommitReport) -> None:
        """Write the old values of the last commit back.

        Raises:
            CommitError: that failed.
        """
        undo(lambda: self._bring_back((*report.staged.swaps, *report.staged.copies)))
        self.parts = report.before

    def _exchange(self, staged: Staged) -> None:
        """Exchange the new values with the old ones on every device; undone if those are not what they were."""
        done: list[Swap] = []
        try:
            for swap in staged.swaps:
                swap.exchange()
                done.append(swap)
            if any(swap.found() != swap.check for swap in done):
                raise StageError("Live memory was written by someone else since this version was staged.")
        except BaseException:
            undo(lambda: self._bring_back(done))
            raise

    def _bring_back(self, exchanged: Sequence[Swap | Copy]) -> None:
        for each in exchanged:
            each.exchange()
        self._synchronize()

    def _synchronize(self) -> None:
        for device in self._devices:
            device.synchronize()
