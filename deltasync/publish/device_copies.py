"""The shadow's second copies, in the memory of accelerators: where they may be, and what differs from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from deltasync.kernels import ACCELERATORS, DeviceDiff, device_diff
from deltasync.tensors.bits import bits_of, cast, int_view, served_dtype, signed_view

logger = logging.getLogger(__name__)

LEFT_FREE = 0.1
"""Part of a device's memory that `auto` leaves free when it takes copies. With less than half of it, it gives them up."""

HELD_BYTES = 512 << 20
"""Bytes of converted tensors that wait for a comparison. Tensors that are compared as they are take no memory."""

FIRST_GUESS = 1 / 32
"""Part of a tensor that may have changed, before anything is known."""

Difference = tuple[str, np.ndarray | None, np.ndarray]
"""A tensor's name, where its range differs, and by which steps; None and the new bits for one to compare on the host."""


class DeviceCopies:
    """Copies of the shadow's ranges, which are only read, on the devices that their tensors come from.

    A tensor that has a copy is compared there, and only what changed crosses to the host; `DeviceDiff` says how. Copies are
    taken as long as there is room. They are given up, for good, when the device runs out of memory in a comparison, and with
    `auto` also where PyTorch's allocator has had to free what it kept, or others took the memory.
    """

    def __init__(self, bits: dict[str, np.ndarray]) -> None:
        self._bits = bits
        self._held: dict[str, torch.Tensor] = {}  # signed views
        self._diffs: dict[torch.device, DeviceDiff] = {}
        self._retries: dict[torch.device, int] = {}  # of the allocator, when the last copy had been taken
        self._full: set[torch.device] = set()
        self._room: dict[torch.device, int] = {}  # of this publish
        self._expected: dict[str, int] = {}
        self._waiting: dict[str, tuple[torch.Tensor, str]] = {}  # with its served dtype
        self._waiting_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._held.values())

    def begin(self, placement: str) -> None:
        """Before each stream: with `auto`, look at the memory of the devices again."""
        self._room = {}
        if placement == "auto":
            for device in {copy.device for copy in self._held.values()}:
                if self._is_short(device):
                    self._give_up(device, "its memory is short")

    def clear(self) -> None:
        """Drop all copies, because they may hold other bits than the host; they are made again."""
        self._held.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        for diff in self._diffs.values():
            diff.drop()

    def differences(self, name: str, held: torch.Tensor, dtype: str, placement: str, lasting: bool) -> Iterator[Difference]:
        """What differs in this tensor's range, and in others that waited for it; not in all that wait still.

        It is compared at once unless it is `lasting`: then it keeps its memory and bits until `rest` was called.
        """
        copy = self._held.get(name)
        if copy is None and held.numel():
            copy = self._copy_to(held.device, name, placement)
        if copy is None or copy.device != held.device:
            self._held.pop(name, None)
            if held.numel():
                yield name, None, bits_of(cast(held, dtype))
            return
        try:
            new = _as_compared(held, dtype)
            self._waiting[name] = cast(held, "keep"), dtype
            if new.data_ptr() != held.data_ptr():
                self._waiting_bytes += new.nbytes
            if held.device not in self._diffs:
                self._diffs[held.device] = device_diff(held.device)
            expected = self._expected.get(name, int(FIRST_GUESS * held.numel()))
            self._diffs[held.device].add(name, copy, new, expected)
        except torch.OutOfMemoryError:
            self._waiting[name] = held, dtype
            yield from self._on_host(held.device)
        if not lasting or self._waiting_bytes > HELD_BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[Difference]:
        """What differs, of all tensors that still wait."""
        for device, diff in self._diffs.items():
            try:
                found = diff.finish()
            except torch.OutOfMemoryError:
                yield from self._on_host(device)
                continue
            done = [name for name, (tensor, _) in self._waiting.items() if tensor.device == device]
            for name in done:
                del self._waiting[name]
                self._expected[name] = found[name][0].size if name in found else 0
                if name in found:
                    yield name, *found.pop(name)
        self._waiting_bytes = 0
        for device in self._room:
            if device not in self._full:
                self._retries[device] = _alloc_retries(device)

    def _on_host(self, device: torch.device) -> Iterator[Difference]:
        """As `rest`, on the host, for a device that has no memory left; what is under way there is forgotten."""
        self._give_up(device, "it ran out of memory")
        if device in self._diffs:
            self._diffs[device].drop()
        for name in [name for name, (tensor, _) in self._waiting.items() if tensor.device == device]:
            yield name, None, bits_of(cast(*self._waiting.pop(name)))

    def _copy_to(self, device: torch.device, name: str, placement: str) -> torch.Tensor | None:
        """A new copy on a device, if it goes there. Asked for each tensor, so that what fits goes there."""
        if placement == "host" or device in self._full or (placement == "auto" and device.type not in ACCELERATORS):
            return None
        bits = self._bits[name]
        if placement == "auto":
            if device not in self._room:
                self._room[device] = room_bytes(device)
            if self._room[device] < bits.nbytes:
                return None
            self._room[device] -= bits.nbytes
        try:
            self._held[name] = signed_view(bits).to(device, copy=True)
        except torch.OutOfMemoryError:
            self._full.add(device)
        return self._held.get(name)

    def _is_short(self, device: torch.device) -> bool:
        """Whether the device's memory has run out since the last copy was taken, or nearly would at the next step."""
        total_bytes = torch.cuda.mem_get_info(device)[1]
        retried = _alloc_retries(device) > self._retries.get(device, 0)
        return retried or room_bytes(device) < -LEFT_FREE / 2 * total_bytes

    def _give_up(self, device: torch.device, why: str) -> None:
        given = [name for name, copy in self._held.items() if copy.device == device]
        size_bytes = sum(self._held.pop(name).nbytes for name in given)
        self._full.add(device)
        logger.warning("Weights of %s are compared on the host from now on: %s. freed_bytes=%d", device, why, size_bytes)


def room_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device's memory that copies may take.

    What is free, and what PyTorch's allocator keeps but this process did not even need at its peak: what it needs between
    two publishes, for activations, is free while a publish looks, and has to be there again afterwards. Less `LEFT_FREE`.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    needed_bytes = max(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    return int(free_bytes + torch.cuda.memory_reserved(device) - needed_bytes - LEFT_FREE * total_bytes)


def _alloc_retries(device: torch.device) -> int:
    """How often PyTorch's allocator found the device full and freed what it kept."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _as_compared(held: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor as `DeviceDiff.add` takes it: float32 that is served in bfloat16 is rounded there, without a copy."""
    if held.dtype == torch.float32 and served_dtype(held, dtype) == torch.bfloat16:
        return held.detach().contiguous().reshape(-1)
    return int_view(cast(held, dtype))
