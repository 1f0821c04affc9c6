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
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from deltasync import fingerprint
from deltasync.bits import int_view, tensor_of
from deltasync.errors import CommitError, StageError
from deltasync.kernels import cpu, device_kernels
from deltasync.types import Patch, TensorSpec

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
class _Prepared:
    """A scatter worked out beforehand, on the host: nothing is left for the commit but to exchange new for old.

    Attributes:
        old_K: What is there now; by the commit, what was there.
        gained: What the fingerprint gains, if nothing changes in between.
    """

    old_K: np.ndarray
    new_K: np.ndarray
    gained: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Scatter:
    """Elements of one segment to write: positions in `dest`, data, and checkpoint indices for the fingerprint."""

    name: str
    segment: int
    dest: torch.Tensor
    dest_index_K: torch.Tensor
    data_K: torch.Tensor
    absolute: bool
    index_K: torch.Tensor
    prepared: _Prepared | None


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
        writes: What to write; only `LiveMemory` looks inside.
        changed: Elements that will be written.
        fingerprints: What the fingerprint of each tensor that the version names must be afterwards.
    """

    writes: tuple[_Scatter | _Copy, ...]
    changed: int
    fingerprints: Mapping[str, int]


Parts = dict[str, tuple[int, ...]]
"""Fingerprints of the segments of tensors, by tensor name."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did.

    Attributes:
        parts: Fingerprint of each segment of each tensor that the version names, afterwards.
        scatter_s: Seconds during which live weights were being written.
        undo: Old values, in the order of the writes.
    """

    parts: Parts
    scatter_s: float
    undo: tuple[tuple[_Scatter | _Copy, torch.Tensor], ...]


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
        """Zeroed host tensors of these specs and the memory over them."""
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
            segment.source(_signed(flat_N)).copy_(segment.live)
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
        flat_N = _signed(bits_N)
        return any(not torch.equal(s.source(flat_N), s.live.cpu()) for s in self._place(name))

    def stage(self, patches: Iterable[tuple[Patch, int]]) -> Staged:
        """Translate decoded patches into writes and put them on the device.

        Args:
            patches: Each with the fingerprint its tensor must have afterwards.

        Raises:
            StageError: a patch names a tensor that has no place in live memory.
            FormatError, ChainError, StoreError: from fetching and decoding; live weights are untouched.
        """
        writes: list[_Scatter | _Copy] = []
        fingerprints = {}
        changed = 0
        for patch, expected in patches:
            for at, segment in enumerate(self._place(patch.name)):
                write, size = _write_of(self._keys[patch.name], patch, at, segment)
                if size:
                    writes.append(write)
                    changed += size
            fingerprints[patch.name] = expected
        return Staged(tuple(writes), changed, fingerprints)

    def commit(self, staged: Staged) -> CommitReport:
        """Write a staged version into live memory and update `parts`. Mutates the live weights, and only that.

        After return the new bits are live; compare their fingerprints with the staged ones before serving them. If it
        raised, the old bits are live again, except for:

        Raises:
            CommitError: the write failed and so did undoing it.
        """
        before = time.perf_counter()
        undo: list[tuple[_Scatter | _Copy, torch.Tensor]] = []
        added: dict[tuple[str, int], int] = {}
        try:
            for write in staged.writes:
                old, gained = self._write(write)
                undo.append((write, old))
                at = write.name, write.segment
                added[at] = added.get(at, 0) + gained
        except BaseException:
            _undo(undo)
            raise
        scatter_s = time.perf_counter() - before
        for name in staged.fingerprints:
            self.parts[name] = tuple(
                (part + added.get((name, at), 0)) & fingerprint.MASK for at, part in enumerate(self.parts[name])
            )
        return CommitReport({name: self.parts[name] for name in staged.fingerprints}, scatter_s, tuple(undo))

    def rollback(self, report: CommitReport, parts: Parts) -> None:
        """Write the old values of a commit back.

        Args:
            report: Of the last commit.
            parts: A copy of `self.parts` from before that commit.
        """
        _undo(list(report.undo))
        self.parts = dict(parts)

    def _write(self, write: _Scatter | _Copy) -> tuple[torch.Tensor, int]:
        """Do one write; returns the old values and what it adds to the segment's fingerprint."""
        if isinstance(write, _Copy):
            old = write.live.clone()
            write.live.copy_(write.source)
            return old, self._part(write.name, write.segment) - self.parts[write.name][write.segment]
        if write.dest.device.type != "cpu":
            return device_kernels(write.dest.device).scatter(
                self._keys[write.name], write.dest, write.dest_index_K, write.data_K, write.absolute, write.index_K
            )
        if write.prepared is not None:
            ready, dest, dest_index_K = write.prepared, _unsigned(write.dest), write.dest_index_K.numpy()
            if not cpu.exchange(dest, dest_index_K, ready.new_K, ready.old_K):
                return _signed(ready.old_K), ready.gained
            dest[dest_index_K] = ready.old_K  # live memory changed since staging: work it out anew
        old_K, gained = cpu.scatter(
            self._keys[write.name],
            _unsigned(write.dest),
            write.dest_index_K.numpy(),
            _unsigned(write.data_K),
            write.absolute,
            write.index_K.numpy(),
        )
        return _signed(old_K), gained


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


def _write_of(key: int, patch: Patch, number: int, segment: Segment) -> tuple[_Scatter | _Copy, int]:
    """What a patch writes to a segment, and how many elements."""
    if patch.index_K is not None:
        at, dest_index_K = segment.locate(patch.index_K)
        data_K, index_K = (x if at is None else x[at] for x in (patch.data, patch.index_K))
        absolute = patch.absolute
    else:
        # The whole tensor. Often little of it differs, and what is not written need not be undone.
        source = segment.source(_signed(patch.data)).contiguous()
        new_N, old_N = (_unsigned(view.reshape(-1)) for view in (source, segment.live.contiguous().cpu()))
        at, _ = cpu.diff(old_N, new_N)
        if at.size > new_N.size // 8:
            return _Copy(patch.name, number, segment.live, source.to(segment.live.device)), new_N.size
        coordinates = np.unravel_index(at, segment.live.shape) if segment.live.ndim else ()
        dest_index_K, index_K = np.zeros((2, at.size), np.int64)
        index_K += segment.offset
        for coordinate, live_stride, stride in zip(coordinates, segment.live.stride(), segment.stride, strict=True):
            dest_index_K += coordinate * live_stride
            index_K += coordinate * stride
        data_K, absolute = new_N[at], True
    device = segment.live.device
    if device.type != "cpu":
        device_kernels(device).warm_up(device, segment.live.dtype)
    prepared = None
    if device.type == "cpu" and dest_index_K.size:
        prepared = _Prepared(*cpu.prepare(key, _unsigned(segment.flat()), dest_index_K, data_K, absolute, index_K))
    dest, data, index = (x.to(device) for x in (torch.from_numpy(dest_index_K), _signed(data_K), torch.from_numpy(index_K)))
    return _Scatter(patch.name, number, segment.flat(), dest, data, absolute, index, prepared), dest_index_K.size


def _undo(done: list[tuple[_Scatter | _Copy, torch.Tensor]]) -> None:
    try:
        for write, old in reversed(done):
            if isinstance(write, _Copy):
                write.live.copy_(old)
            else:
                write.dest[write.dest_index_K] = old
    except Exception as error:
        raise CommitError(f"A commit could not be undone, the weights are uncertain, reload them: {error}.") from error


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(f"i{bits.itemsize}"))


def _unsigned(view: torch.Tensor) -> np.ndarray:
    array: np.ndarray = view.numpy()
    return array.view(f"u{array.itemsize}")
