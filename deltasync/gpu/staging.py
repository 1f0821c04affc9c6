"""Full weights for the memory of an accelerator: they cross while others are copied, and are compared there."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch

from deltasync.gpu.devices import Chunk, Device, copiers
from deltasync.live import Segment, Staged
from deltasync.live.staging import FEW, SegmentTable, Staging, Steps, positions

_PIECE_BYTES = 16 << 20
_DIFFERING_BYTES = 64 << 20
"""Most bytes, on a device, of the positions and values of full weights. Segments beyond that are copied."""

_JOB_BYTES = 4 << 20
"""Fewest bytes of full weights that a thread copies at once; pieces of small tensors are joined."""

_JOBS = 32
"""Most of those that are under way."""

_ALIGNED = 16  # bytes
_COUNTS = 4096  # pieces whose counts are allocated at once


class _Pinned(NamedTuple):
    """A part of a line's segment, and its new bits in pinned memory, flat, in row-major order."""

    places: SegmentTable
    line: int
    segment: Segment
    new_N: torch.Tensor


class DeviceStaging(Staging):
    """Threads copy full weights into pinned memory while those before cross; the host waits for the device
    once, in `finish`.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._device: Device = device
        self._chunks: list[Chunk] = []
        self._left_B = torch.empty(0, dtype=torch.uint8, device="cpu")  # of the last chunk
        self._pieces: list[_Pinned] = []
        self._job: list[_Copied] = []
        self._job_bytes = self._compared = 0
        self._jobs: deque[tuple[Future[None], int]] = deque()  # and behind which piece each ends
        # of differing elements, on the device, of `_COUNTS` pieces each
        self._counts: list[torch.Tensor] = []
        with device.staging():
            self._room = device.allocate(2 * _PIECE_BYTES).view(2, -1)

    def _add(self, places: SegmentTable, line: int, segment: Segment, bits_N: np.ndarray) -> None:
        for piece in segment.pieces(_PIECE_BYTES // places.table.width):
            new_N = self._pinned(piece.live.nbytes).view(piece.live.dtype)
            self._pieces.append(_Pinned(places, line, piece, new_N))
            self._job.append((new_N.numpy(), _source(piece, bits_N), self._chunks[-1]))
            self._job_bytes += new_N.nbytes
            if self._job_bytes >= _JOB_BYTES:
                self._submit()

    def _pinned(self, size_bytes: int) -> torch.Tensor:
        taken = -(-size_bytes // _ALIGNED) * _ALIGNED
        if self._left_B.numel() < taken:
            self._chunks.append(self._device.chunk())
            self._left_B = self._chunks[-1].bytes_B
        found, self._left_B = self._left_B[:size_bytes], self._left_B[taken:]
        return found

    def _submit(self) -> None:
        if self._job:
            self._jobs.append((copiers().submit(_copy, self._job), len(self._pieces)))
            self._job, self._job_bytes = [], 0
        if len(self._jobs) >= _JOBS:
            self._compare()

    def _compare(self) -> None:
        """Compare the pieces of the oldest job with live memory, and count what differs, without a wait."""
        copied, last = self._jobs.popleft()
        copied.result()
        with self._device.staging(wait=False):
            for number in range(self._compared, last):
                if number % _COUNTS == 0:
                    self._counts.append(self._device.allocate(8 * _COUNTS).view(torch.int64))
                differs, _ = self._differs(self._pieces[number])
                torch.sum(differs.view(-1), 0, dtype=torch.int64, out=self._counts[-1][number % _COUNTS])
        self._compared = last

    def _differs(self, piece: _Pinned) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which elements of a piece differ, and its new bits, on the device until the next call."""
        live = piece.segment.live
        came = self._room[0, : live.nbytes].view(live.dtype).view(live.shape)
        differs = self._room[1, : live.numel()].view(torch.bool).view(live.shape)
        came.copy_(piece.new_N.view(live.shape), non_blocking=True)
        torch.ne(live, came, out=differs)
        return differs, came

    def finish(self, staged: Staged) -> None:
        """Add what was collected to `staged`."""
        self._submit()
        while self._jobs:
            self._compare()
        with self._device.staging():
            self._divide()
            self._add_elements(staged)
            if self._copied:
                self._add_copies(staged, self._room[0], self._chunks)

    def _divide(self) -> None:
        """Divide the pieces that crossed into those of which little differs, in each piece of a segment, and
        the others.
        """
        counts = (each[: self._compared - at * _COUNTS].cpu().numpy() for at, each in enumerate(self._counts))
        count_P, few_bytes = np.concatenate([*counts, np.zeros(0, np.int64)]), 0
        parts = [piece.places.table.lines[piece.line].part for piece in self._pieces]
        for first, last in _spans(parts):
            held, count = self._pieces[first:last], int(count_P[first:last].sum())
            size_bytes = count * (4 + held[0].places.table.width)
            counted = [(piece, int(n)) for piece, n in zip(held, count_P[first:last], strict=True) if n]
            is_few = all(n <= piece.new_N.numel() // FEW for piece, n in counted)
            if is_few and few_bytes + size_bytes <= _DIFFERING_BYTES:
                few_bytes += size_bytes
                self._few += [(p.places, p.line, n, functools.partial(self._steps, p)) for p, n in counted]
            else:
                self._copied += [
                    (p.places, p.line, [(p.segment.live, p.new_N, self._saved(p))]) for p, _ in counted
                ]

    def _steps(self, piece: _Pinned) -> Steps:
        differs, came = self._differs(piece)
        position_K = positions(
            piece.places.table.lines[piece.line], piece.segment, differs.view(-1).nonzero().view(-1)
        )
        return position_K, came.masked_select(differs) - piece.segment.live.masked_select(differs)

    def _saved(self, piece: _Pinned) -> torch.Tensor:
        """Return the old bits of a piece, saved on the host now: only new ones cross in the pause."""
        live, old_N = piece.segment.live, self._pinned(piece.new_N.nbytes).view(piece.new_N.dtype)
        held = live
        if not live.is_contiguous():
            held = self._room[0, : live.nbytes].view(live.dtype).view(live.shape).copy_(live)
        old_N.view(live.shape).copy_(held, non_blocking=True)
        return old_N


_Copied = tuple[np.ndarray, np.ndarray, Chunk]
"""The array that a thread writes, the one that it reads, and the chunk that it writes to: held until it has."""


def _copy(job: Sequence[_Copied]) -> None:
    for to_N, source, _ in job:
        np.copyto(to_N.reshape(source.shape), source)


def _source(piece: Segment, bits_N: np.ndarray) -> np.ndarray:
    """Return a segment's view of a whole tensor's flat unsigned bits, as signed integers; it is only read."""
    signed_N = bits_N.view(f"i{bits_N.itemsize}")
    strides = [stride * bits_N.itemsize for stride in piece.stride]
    if not piece.live.numel():
        return signed_N[:0]
    return np.lib.stride_tricks.as_strided(
        signed_N[piece.offset :], tuple(piece.live.shape), strides, writeable=False
    )


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each run of equal numbers begins and ends."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[first]:
            yield first, at
            first = at
