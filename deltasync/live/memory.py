"""STAGE and COMMIT: live weights as segments of memory, and the only code that writes them.

A segment says where a part of a checkpoint tensor lies in live memory. A replica on the host has one segment per tensor;
vLLM's fused, stacked and sliced parameters have as many as its loader copies (`vllm_plugin.load_plan`). Everything else
follows from them: gathering a tensor, translating flat checkpoint indices to addresses, writing, and undoing.

    staged = memory.stage(patches)      # decoded, translated, on the device; live weights untouched
    report = memory.commit(staged)      # live weights mutated, old values kept in the report
    memory.rollback(report)             # the old bits again
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from deltasync import fingerprint
from deltasync.bits import int_view, signed_view, tensor_of
from deltasync.errors import CommitError, StageError
from deltasync.kernels import cpu, device_kernels
from deltasync.types import Patch, TensorSpec, index_dtype

_DIFFERS = -1

Region = tuple[int, tuple[tuple[int, int], ...]]
"""Elements of a flat tensor: the first one, then (size, stride) of each dimension, the largest stride first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A part of a checkpoint tensor and its place in live memory.

    Attributes:
        live: Signed-integer view of the live memory, any stride; writing to it writes the weights.
        stride, offset: Where the same elements lie in the flat checkpoint tensor; their shape is `live.shape`.
    """

    live: torch.Tensor
    stride: tuple[int, ...]
    offset: int

    def region(self) -> Region:
        """Which elements of the checkpoint tensor it holds."""
        dims: list[tuple[int, int]] = []
        for stride, size in sorted(zip(self.stride, self.live.shape, strict=True), reverse=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:
                dims[-1] = dims[-1][0] * size, stride
            else:
                dims.append((size, stride))
        return self.offset, tuple(dims)

    def source(self, flat_N: torch.Tensor) -> torch.Tensor:
        """The segment's view of a flat checkpoint tensor."""
        return flat_N.as_strided(self.live.shape, self.stride, self.offset)

    def flat(self) -> torch.Tensor:
        """The live memory from the segment's first to its last element, gaps included, shape [span]."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.live.shape, self.live.stride(), strict=True))
        return self.live.as_strided((span if self.live.numel() else 0,), (1,))

    def span(self) -> tuple[int, int]:
        """Range of the flat checkpoint tensor that the segment lies in, gaps included."""
        if not self.live.numel():
            return self.offset, self.offset
        last = sum((size - 1) * stride for size, stride in zip(self.live.shape, self.stride, strict=True))
        return self.offset, self.offset + last + 1

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The segment as runs of consecutive checkpoint elements.

        Returns:
            First flat checkpoint index of each run, int64[R], and the runs' unsigned bit patterns on the host, shape [R, L].
        """
        order = sorted(range(self.live.ndim), key=lambda dim: -self.stride[dim])
        shape, stride = ([of[dim] for dim in order] for of in (self.live.shape, self.stride))
        ends_in_run = bool(shape) and stride[-1] == 1
        outer = list(zip(shape, stride, strict=True))[: -1 if ends_in_run else None]
        start_R = np.full(1, self.offset, np.int64)
        for size, step in outer:
            start_R = (start_R[:, None] + np.arange(size) * step).reshape(-1)
        bits = _unsigned(self.live.permute(order).contiguous().cpu())
        return start_R, bits.reshape(start_R.size, shape[-1] if ends_in_run else 1)

    def locate(self, index_K: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Addresses of checkpoint elements.

        Args:
            index_K: Flat checkpoint indices, ascending.

        Returns:
            Positions in `index_K` of those that lie in this segment, None for all of them; and where in `flat()` they lie.
        """
        if self.stride == (1,) and self.live.is_contiguous():
            low, high = np.searchsorted(index_K, (self.offset, self.offset + self.live.numel()))
            at = None if (low, high) == (0, index_K.size) else np.arange(low, high)
            return at, index_K[low:high] - index_K.dtype.type(self.offset)
        rest = index_K.astype(np.int64) - self.offset
        inside = rest >= 0
        dest = np.zeros_like(rest)
        # A view of a row-major tensor: dividing by the strides, largest first, recovers the coordinates.
        dims = sorted(zip(self.stride, self.live.shape, self.live.stride(), strict=True), reverse=True)
        for stride, size, live_stride in dims:
            if size == 1:
                continue
            coordinate = rest // stride
            rest = rest - coordinate * stride
            inside &= coordinate < size
            dest += coordinate * live_stride
        inside &= rest == 0
        if inside.all():
            return None, dest
        at = np.flatnonzero(inside)
        return at, dest[at]


@dataclasses.dataclass(frozen=True, slots=True)
class _Swap:
    """Elements of one segment to write: nothing is left for the commit but to exchange values with live memory.

    Attributes:
        dest: Live memory, and `dest_index_K` positions in it.
        value_K: The new bits; from the commit on, the old ones.
        gained: What the segment's fingerprint gains.
        check: What `swap` returns if live memory is what it was when this was staged.
    """

    name: str
    segment: int
    dest: torch.Tensor
    dest_index_K: torch.Tensor
    value_K: torch.Tensor
    gained: int
    check: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A whole segment to overwrite."""

    name: str
    segment: int
    live: torch.Tensor
    source: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """One version, ready to commit.

    Attributes:
        swaps, copies: What to write; only `LiveMemory` looks inside.
        fingerprints: What the fingerprint of each tensor that the version names must be afterwards.
    """

    swaps: tuple[_Swap, ...]
    copies: tuple[_Copy, ...]
    fingerprints: Mapping[str, int]

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        return sum(swap.value_K.numel() for swap in self.swaps) + sum(copy.source.numel() for copy in self.copies)

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes beside the live weights, on their device, until the commit is confirmed."""
        swaps = sum(swap.dest_index_K.nbytes + swap.value_K.nbytes for swap in self.swaps)
        return swaps + sum(2 * copy.source.nbytes for copy in self.copies)


Parts = dict[str, tuple[int, ...]]
"""Fingerprints of the segments of tensors, by tensor name."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did.

    Attributes:
        parts: Fingerprint of each segment of each tensor that the version names, afterwards.
        scatter_s: Seconds during which live weights were being written.
        staged: What was committed.
        overwritten: Old values of its copies; those of its swaps are in them.
    """

    parts: Parts
    scatter_s: float
    staged: Staged
    overwritten: tuple[torch.Tensor, ...]


class LiveMemory:
    """Live weights in checkpoint coordinates, all of them or a shard.

    Args:
        specs: The channel's tensor table.
        segments: Where each tensor lies: a list, be it empty, for every tensor. Over all shards the regions of a tensor
            cover it, and two of them are the same or have no element in common.

    Attributes:
        regions: Which elements each segment holds, by tensor name.
        parts: Fingerprint of each segment, as of the last commit or `audit`; empty until the first `audit`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], segments: Mapping[str, list[Segment]]) -> None:
        self._specs = specs
        self._segments = segments
        self._keys = {name: fingerprint.tensor_key(name) for name in specs}
        self.regions = {name: [segment.region() for segment in held] for name, held in segments.items()}
        self.parts: Parts = {}

    @classmethod
    def on_host(cls, specs: Mapping[str, TensorSpec]) -> tuple[LiveMemory, dict[str, torch.Tensor]]:
        """Zeroed host tensors of these specs and the memory over them.

        Raises:
            StageError: this machine has less memory.
        """
        model_bytes = sum(spec.element_count * spec.item_bytes for spec in specs.values())
        if model_bytes > (held := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
            raise StageError(f"The channel's tensors have {model_bytes:,} bytes, this machine {held:,} bytes of memory.")
        bits = {name: np.zeros(spec.element_count, spec.bits_dtype) for name, spec in specs.items()}
        tensors = {name: tensor_of(bits[name], spec) for name, spec in specs.items()}
        segments = {name: [Segment(int_view(tensor), (1,), 0)] for name, tensor in tensors.items()}
        return cls(specs, segments), tensors

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor, if this memory holds the whole model; see `combine`."""
        return combine([self.regions], [self.parts])

    def gather(self, name: str) -> np.ndarray:
        """Copy of a tensor's bit patterns out of live memory, flat, unsigned, on the host.

        Raises:
            StageError: not all of the tensor is in live memory.
        """
        segments = self._place(name)
        spec = self._specs[name]
        held = sum(math.prod(size for size, _ in dims) for _, dims in set(self.regions[name]))
        if held != spec.element_count:
            raise StageError(f"Only {held} elements of {spec} are in this worker's memory; publish with codec='packed'.")
        flat_N = np.empty(spec.element_count, spec.bits_dtype)
        for segment in segments:
            segment.source(signed_view(flat_N)).copy_(segment.live)
        return flat_N

    def _place(self, name: str) -> list[Segment]:
        if name not in self._segments:
            raise StageError(f"{name} has no addressable place in live memory.")
        return self._segments[name]

    def held(self, name: str) -> np.ndarray | None:
        """Ranges of a tensor outside which it has no element in live memory, as `codec.Wanted` gives them."""
        if name not in self._segments:
            return None  # for `stage` to refuse
        spans = [segment.span() for segment in self._segments[name]]
        whole = (0, self._specs[name].element_count)
        return None if whole in spans else np.array(spans, np.int64).reshape(-1, 2)

    def audit(self) -> None:
        """Recompute `parts` from every bit of live memory."""
        self.parts = {name: tuple(self._part(name, at) for at in range(len(self._place(name)))) for name in self._specs}

    def _part(self, name: str, at: int) -> int:
        return cpu.fingerprint_runs(self._keys[name], *self._segments[name][at].runs())

    def read(self, name: str) -> list[bytes]:
        """Bits of each segment of a tensor, in the order of its region's dimensions."""
        return [segment.runs()[1].tobytes() for segment in self._place(name)]

    def differs(self, name: str, bits_N: np.ndarray) -> bool:
        """Whether any element in live memory has other bits than this whole tensor, flat and unsigned."""
        flat_N = signed_view(bits_N)
        return any(not torch.equal(s.source(flat_N), s.live.cpu()) for s in self._place(name))

    def stage(self, patches: Iterable[tuple[Patch, int]]) -> Staged:
        """Translate decoded patches into writes and put them on the device.

        Args:
            patches: Each with the fingerprint its tensor must have afterwards.

        Raises:
            StageError: a patch names a tensor that has no place in live memory.
            FormatError, ChainError, StoreError: from fetching and decoding; live weights are untouched.
        """
        swaps: list[_Swap] = []
        copies: list[_Copy] = []
        fingerprints = {}
        for patch, expected in patches:
            for at, segment in enumerate(self._place(patch.name)):
                write = _write_of(self._keys[patch.name], patch, at, segment)
                if isinstance(write, _Copy):
                    copies.append(write)
                elif write.value_K.numel():
                    swaps.append(write)
            fingerprints[patch.name] = expected
        return Staged(tuple(swaps), tuple(copies), fingerprints)

    def commit(self, staged: Staged) -> CommitReport:
        """Write a staged version into live memory and update `parts`. Mutates the live weights, and only that.

        After return the new bits are live; compare their fingerprints with the staged ones before serving them. If it
        raised, the old bits are live again, except for:

        Raises:
            CommitError: the write failed and so did undoing it.
            StageError: live memory is not what it was when this was staged.
        """
        before = time.perf_counter()
        overwritten: list[torch.Tensor] = []
        self._exchange(staged)
        try:
            for copy in staged.copies:
                overwritten.append(copy.live.clone())
                copy.live.copy_(copy.source)
            scatter_s = time.perf_counter() - before
            new = self._parts_after(staged)
        except BaseException:
            self._undo(staged, overwritten)
            raise
        self.parts |= new
        return CommitReport(new, scatter_s, staged, tuple(overwritten))

    def _parts_after(self, staged: Staged) -> Parts:
        """Fingerprints of the segments of the tensors that it names, once all of it is written."""
        parts = {name: list(self.parts[name]) for name in staged.fingerprints}
        for swap in staged.swaps:
            parts[swap.name][swap.segment] += swap.gained
        for copy in staged.copies:
            parts[copy.name][copy.segment] = self._part(copy.name, copy.segment)
        return {name: tuple(value & fingerprint.MASK for value in values) for name, values in parts.items()}

    def rollback(self, report: CommitReport, parts: Parts) -> None:
        """Write the old values of a commit back.

        Args:
            report: Of the last commit.
            parts: A copy of `self.parts` from before that commit.
        """
        self._undo(report.staged, report.overwritten)
        self.parts = dict(parts)

    def _exchange(self, staged: Staged) -> None:
        """Exchange the new values with the old ones; undone if those are not what they were."""
        if _swap(staged.swaps) != sum(each.check for each in staged.swaps) & fingerprint.MASK:
            _swap(staged.swaps)
            raise StageError("Live memory was written by someone else since this version was staged.")

    def _undo(self, staged: Staged, overwritten: Sequence[torch.Tensor]) -> None:
        try:
            for copy, old in zip(staged.copies, overwritten, strict=False):
                copy.live.copy_(old)
            _swap(staged.swaps)
        except Exception as error:
            raise CommitError(f"A commit could not be undone, the weights are uncertain, reload them: {error}.") from error


def combine(regions: Sequence[Mapping[str, list[Region]]], parts: Sequence[Parts]) -> dict[str, int]:
    """Fingerprints of tensors from those of their segments.

    Args:
        regions: Of each shard.
        parts: Of each shard, in the same order: for each tensor a fingerprint per segment.

    Returns:
        For each tensor the sum over its regions, each taken once; -1, which is no fingerprint, where two copies differ.
    """
    found: dict[str, dict[Region, int]] = {}
    for held, of_shard in zip(regions, parts, strict=True):
        for name, values in of_shard.items():
            by_region = found.setdefault(name, {})
            for region, value in zip(held[name], values, strict=True):
                if by_region.setdefault(region, value) != value:
                    by_region[region] = _DIFFERS
    return {
        name: -1 if _DIFFERS in by_region.values() else sum(by_region.values()) & fingerprint.MASK
        for name, by_region in found.items()
    }


def model_fingerprint(fingerprints: Mapping[str, int]) -> int:
    """Fingerprint of a model from those of its tensors; -1 if one of them is -1."""
    return -1 if -1 in fingerprints.values() else sum(fingerprints.values()) & fingerprint.MASK


def _write_of(key: int, patch: Patch, number: int, segment: Segment) -> _Swap | _Copy:
    """What a patch writes to a segment."""
    live = segment.live
    if patch.index_K is not None:
        at, dest_index_K = segment.locate(patch.index_K)
        data_K, index_K = (x if at is None else x[at] for x in (patch.data, patch.index_K))
        absolute = patch.absolute
    else:
        # The whole tensor. Often little of it differs, and what is not written need not be undone.
        source = segment.source(signed_view(patch.data)).contiguous()
        new_N, old_N = (_unsigned(view.reshape(-1)) for view in (source, live.contiguous().cpu()))
        at, _ = cpu.diff(old_N, new_N)
        if at.size > new_N.size // 8:
            return _Copy(patch.name, number, live, source.to(live.device))
        coordinates = np.unravel_index(at, live.shape) if live.ndim else ()
        dest_index_K, index_K = np.zeros((2, at.size), np.int64)
        index_K += segment.offset
        for coordinate, live_stride, stride in zip(coordinates, live.stride(), segment.stride, strict=True):
            dest_index_K += coordinate * live_stride
            index_K += coordinate * stride
        data_K, absolute = new_N[at], True
    dest = segment.flat()
    dest_index_K = np.ascontiguousarray(dest_index_K, index_dtype(dest.numel()))
    if live.device.type == "cpu":
        cpu.warm_up(data_K.dtype, dest_index_K.dtype)
        new_K, gained, check = cpu.prepare(key, _unsigned(dest), dest_index_K, data_K, absolute, index_K)
        return _Swap(patch.name, number, dest, torch.from_numpy(dest_index_K), signed_view(new_K), gained, check)
    kernels = device_kernels(live.device)
    kernels.warm_up(live.device, live.dtype)
    dest_index, data, index = (
        x.to(live.device) for x in (torch.from_numpy(dest_index_K), signed_view(data_K), torch.from_numpy(index_K))
    )
    return _Swap(patch.name, number, dest, dest_index, *kernels.prepare(key, dest, dest_index, data, absolute, index))


def _swap(swaps: Sequence[_Swap]) -> int:
    """Exchange all values with live memory; returns the sum of the checks."""
    check = 0
    for device in {swap.dest.device for swap in swaps}:
        writes = [(swap.dest, swap.dest_index_K, swap.value_K) for swap in swaps if swap.dest.device == device]
        if device.type == "cpu":
            check += cpu.swap([(_unsigned(dest), at_K.numpy(), _unsigned(value_K)) for dest, at_K, value_K in writes])
        else:
            check += device_kernels(device).swap(writes)
    return check & fingerprint.MASK


def _unsigned(view: torch.Tensor) -> np.ndarray:
    array: np.ndarray = view.numpy()
    return array.view(f"u{array.itemsize}")
