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
import time
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from deltasync import fingerprint
from deltasync.bits import int_view, tensor_of
from deltasync.errors import CommitError, StageError
from deltasync.kernels import cpu, device_kernels
from deltasync.types import Patch, TensorSpec


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
class _Scatter:
    """Elements of one segment to write: positions in `dest`, data, and checkpoint indices for the fingerprint."""

    name: str
    dest: torch.Tensor
    dest_index_K: torch.Tensor
    data_K: torch.Tensor
    absolute: bool
    index_K: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A whole segment to overwrite."""

    name: str
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


@dataclasses.dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did.

    Attributes:
        fingerprints: Of each tensor that the version names, afterwards.
        scatter_s: Seconds during which live weights were being written.
        undo: Old values, in the order of the writes.
    """

    fingerprints: Mapping[str, int]
    scatter_s: float
    undo: tuple[tuple[_Scatter | _Copy, torch.Tensor], ...]


class LiveMemory:
    """Live weights in checkpoint coordinates.

    Args:
        specs: The channel's tensor table.
        segments: Where each tensor lies; together the segments of a tensor cover it exactly once.

    Attributes:
        fingerprints: Of every tensor, as of the last commit or `audit`; empty until the first `audit`.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], segments: Mapping[str, list[Segment]]) -> None:
        self._specs = specs
        self._segments = segments
        self._keys = {name: fingerprint.tensor_key(name) for name in specs}
        self.fingerprints: dict[str, int] = {}

    @classmethod
    def on_host(cls, specs: Mapping[str, TensorSpec]) -> tuple[LiveMemory, dict[str, torch.Tensor]]:
        """Zeroed host tensors of these specs and the memory over them."""
        bits = {name: np.zeros(spec.element_count, spec.bits_dtype) for name, spec in specs.items()}
        tensors = {name: tensor_of(bits[name], spec) for name, spec in specs.items()}
        segments = {name: [Segment(int_view(tensor), (1,), 0)] for name, tensor in tensors.items()}
        return cls(specs, segments), tensors

    @property
    def total_fingerprint(self) -> int:
        """Fingerprint of the model, from those of the tensors."""
        return sum(self.fingerprints.values()) & fingerprint.MASK

    def gather(self, name: str) -> np.ndarray:
        """Copy of a tensor's bit patterns out of live memory, flat, unsigned, on the host.

        Raises:
            StageError: the tensor has no place in live memory.
        """
        if name not in self._segments:
            raise StageError(f"{name} has no addressable place in live memory.")
        segments = self._segments[name]
        spec = self._specs[name]
        flat_N = torch.empty(spec.element_count, dtype=segments[0].live.dtype)
        for segment in segments:
            segment.source(flat_N).copy_(segment.live)
        return flat_N.numpy().view(spec.bits_dtype)

    def held(self, name: str) -> np.ndarray | None:
        """Ranges of a tensor outside which it has no element in live memory, as `codec.Wanted` gives them."""
        if name not in self._segments:
            return None  # for `stage` to refuse
        spans = [segment.span() for segment in self._segments[name]]
        whole = (0, self._specs[name].element_count)
        return None if whole in spans else np.array(spans, np.int64).reshape(-1, 2)

    def audit(self) -> None:
        """Recompute `fingerprints` from every bit of live memory."""
        self.fingerprints = {name: cpu.fingerprint(self._keys[name], self.gather(name)) for name in self._specs}

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
            if patch.name not in self._segments:
                raise StageError(f"{patch.name} has no addressable place in live memory.")
            sparse = self._sparse(patch)
            writes += self._copies(patch) if sparse is None else self._scatters(sparse)
            changed += patch.changed if sparse is None else sparse.changed
            fingerprints[patch.name] = expected
        return Staged(tuple(writes), changed, fingerprints)

    def _sparse(self, patch: Patch) -> Patch | None:
        """The patch with indices; None if it covers a whole tensor of which more than an eighth really changes."""
        if patch.index_K is not None:
            return patch
        index_K, _ = cpu.diff(self.gather(patch.name), patch.data)
        if index_K.size > patch.data.size // 8:
            return None
        return Patch(patch.name, index_K, patch.data[index_K], absolute=True)

    def _copies(self, patch: Patch) -> list[_Scatter | _Copy]:
        flat_N = _signed(patch.data)
        segments = self._segments[patch.name]
        return [_Copy(patch.name, s.live, s.source(flat_N).to(s.live.device)) for s in segments]

    def _scatters(self, patch: Patch) -> list[_Scatter | _Copy]:
        assert patch.index_K is not None
        found: list[_Scatter | _Copy] = []
        for segment in self._segments[patch.name]:
            at, dest_index_K = segment.locate(patch.index_K)
            if dest_index_K.size == 0:
                continue
            data_K, index_K = (x if at is None else x[at] for x in (patch.data, patch.index_K))
            device = segment.live.device
            if device.type != "cpu":
                device_kernels(device).warm_up(device, segment.live.dtype)
            moved = (torch.from_numpy(dest_index_K).to(device), _signed(data_K).to(device))
            index = torch.from_numpy(index_K).to(device)
            found.append(_Scatter(patch.name, segment.flat(), *moved, patch.absolute, index))
        return found

    def commit(self, staged: Staged) -> CommitReport:
        """Write a staged version into live memory and update `fingerprints`. Mutates the live weights, and only that.

        After return the new bits are live; compare `report.fingerprints` with the staged ones before serving them. If it
        raised, the old bits are live again, except for:

        Raises:
            CommitError: the write failed and so did undoing it.
        """
        before = time.perf_counter()
        undo: list[tuple[_Scatter | _Copy, torch.Tensor]] = []
        added: dict[str, int] = {}
        try:
            for write in staged.writes:
                old, gained = self._write(write)
                undo.append((write, old))
                added[write.name] = added.get(write.name, 0) + gained
        except BaseException:
            _undo(undo)
            raise
        scatter_s = time.perf_counter() - before
        copied = {write.name for write in staged.writes if isinstance(write, _Copy)}
        for name, gained in added.items():
            if name in copied:
                self.fingerprints[name] = cpu.fingerprint(self._keys[name], self.gather(name))
            else:
                self.fingerprints[name] = (self.fingerprints[name] + gained) & fingerprint.MASK
        return CommitReport({name: self.fingerprints[name] for name in staged.fingerprints}, scatter_s, tuple(undo))

    def rollback(self, report: CommitReport, fingerprints: Mapping[str, int]) -> None:
        """Write the old values of a commit back.

        Args:
            report: Of the last commit.
            fingerprints: `self.fingerprints` from before that commit.
        """
        _undo(list(report.undo))
        self.fingerprints = dict(fingerprints)

    def _write(self, write: _Scatter | _Copy) -> tuple[torch.Tensor, int]:
        """Do one write; returns the old values and what it adds to the tensor's fingerprint (0 for a copy)."""
        if isinstance(write, _Copy):
            old = write.live.clone()
            write.live.copy_(write.source)
            return old, 0
        if write.dest.device.type != "cpu":
            return device_kernels(write.dest.device).scatter(
                self._keys[write.name], write.dest, write.dest_index_K, write.data_K, write.absolute, write.index_K
            )
        old_K, gained = cpu.scatter(
            self._keys[write.name],
            _unsigned(write.dest),
            write.dest_index_K.numpy(),
            _unsigned(write.data_K),
            write.absolute,
            write.index_K.numpy(),
        )
        return _signed(old_K), gained


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
