"""Second copies of the shadow in the memory of accelerators: where they go, and what differs from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from deltasync.kernels import ACCELERATORS, DeviceDiff, device_diff
from deltasync.tensors.bits import cast, int_view, served_dtype

logger = logging.getLogger(__name__)

LEFT_FREE = 0.1
"""Fraction of a device's memory that `auto` leaves free when it takes copies. It drops them when half of that is in use."""

HELD_BYTES = 512 << 20
"""Most bytes of converted tensors that wait for a comparison. Tensors that need no conversion take no memory."""

FIRST_GUESS = 1 / 32
"""Fraction of a tensor that is expected to change, before anything is known."""

PIECE_BYTES = 32 << 20
"""Most bytes that cross to the host at once, through pinned memory. A power of two, up to which PyTorch would round it."""

Steps = tuple[str, np.ndarray, np.ndarray]
"""A tensor's name, where its range differs, and by which steps."""

Difference = Steps | tuple[str, None, torch.Tensor]
"""The same; or None and the new values, to compare on the host (`on_host`)."""


class DeviceCopies:
    """Copies of the shadow's ranges on the devices that their tensors come from.

    A tensor that has a copy is compared there (`DeviceDiff`), and only what changed crosses to the host. The others are
    compared on the host, and as long as there is room, a clone of their new bits becomes their copy: nothing is uploaded.
    A device's copies are given up for good when a comparison runs out of memory, and with `auto` also when PyTorch's
    allocator had to free its cache or others took the memory.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}  # the copies, signed
        self._diffs: dict[torch.device, DeviceDiff] = {}
        self._retries: dict[torch.device, int] = {}  # of the allocator, when the last copy had been taken
        self._full: set[torch.device] = set()
        self._room: dict[torch.device, int] = {}  # bytes left in this publish
        self._expected: dict[str, int] = {}
        self._waiting: dict[str, tuple[torch.Tensor, str]] = {}  # with its served dtype
        self._waiting_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._held.values())

    def begin(self, placement: str) -> None:
        """Begin a stream: with `auto`, give up the copies of devices whose memory is short."""
        self._room = {}
        if placement == "auto":
            for device in {copy.device for copy in self._held.values()}:
                if self._is_short(device):
                    self._give_up(device, "its memory is short")

    def clear(self) -> None:
        """Drop all copies, because they may hold other bits than the host. They are made again."""
        self._held.clear()
        self._waiting.clear()
        self._waiting_bytes = 0
        for diff in self._diffs.values():
            diff.drop()

    def forget(self, name: str) -> None:
        """Drop the copy of a tensor that is compared on the host."""
        self._held.pop(name, None)

    def differences(self, name: str, held: torch.Tensor, dtype: str, placement: str, lasting: bool) -> Iterator[Difference]:
        """Take a tensor's range; yield what differs in the tensors that have been compared by now.

        A `lasting` tensor keeps its memory and bits until `rest` is called, so it may wait; others are compared at once.
        """
        copy = self._held.get(name)
        if copy is None or copy.device != held.device:
            self.forget(name)
            if held.numel():
                yield name, None, self._cloned(name, held, dtype, placement)
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
        """Compare all tensors that wait, and yield what differs."""
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
        """Yield the waiting tensors of a device that has no memory left, to be compared on the host."""
        self._give_up(device, "it ran out of memory")
        if device in self._diffs:
            self._diffs[device].drop()
        for name in [name for name, (tensor, _) in self._waiting.items() if tensor.device == device]:
            yield name, None, self._waiting.pop(name)[0]

    def _cloned(self, name: str, held: torch.Tensor, dtype: str, placement: str) -> torch.Tensor:
        """Take a copy of a tensor's served bits and return it; return the tensor if a copy may not stay there."""
        device, served = held.device, served_dtype(held, dtype)
        if placement == "host" or device in self._full or (placement == "auto" and device.type not in ACCELERATORS):
            return held
        if placement == "auto":
            size_bytes = held.numel() * served.itemsize
            if device not in self._room:
                self._room[device] = room_bytes(device)
            if self._room[device] < size_bytes:
                return held
            self._room[device] -= size_bytes
        try:
            copy = int_view(cast(held, dtype))
            self._held[name] = copy.clone() if copy.data_ptr() == held.data_ptr() else copy
        except torch.OutOfMemoryError:
            self._full.add(device)
            return held
        return self._held[name].view(served)

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
    """Return the bytes of a CUDA device's memory that copies may take.

    They are the free bytes and those in the allocator's cache, less what this process needed at its peak, less `LEFT_FREE`.
    Memory for activations, which training needs between two publishes, is free during a publish and needed again afterwards.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    needed_bytes = max(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    return int(free_bytes + torch.cuda.memory_reserved(device) - needed_bytes - LEFT_FREE * total_bytes)


def on_host(held: torch.Tensor, dtype: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor of an accelerator, cast, in flat pieces on the host, each with the index of its first element.

    A piece is valid until the next one is asked for, which crosses meanwhile.
    """
    flat, is_cuda, itemsize = held.detach().reshape(-1), held.is_cuda, served_dtype(held, dtype).itemsize
    size = PIECE_BYTES // itemsize
    room_bytes = min(PIECE_BYTES, flat.numel() * itemsize)
    rooms = [torch.empty(room_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]

    def send(start: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        piece = cast(flat[start : start + size], dtype)
        room = rooms[start // size % 2][: piece.nbytes].view(piece.dtype)
        room.copy_(piece, non_blocking=True)
        return room, torch.cuda.current_stream(held.device).record_event() if is_cuda else None

    coming = send(0)
    for start in range(0, flat.numel(), size):
        (room, done), following = coming, start + size
        if following < flat.numel():
            coming = send(following)
        if done is not None:
            done.synchronize()
        yield start, room


def _alloc_retries(device: torch.device) -> int:
    """Return how often PyTorch's allocator found the device full and freed its cache."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _as_compared(held: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor as `DeviceDiff.add` takes it. It rounds float32 to bfloat16 itself, without a copy."""
    if held.dtype == torch.float32 and served_dtype(held, dtype) == torch.bfloat16:
        return held.detach().contiguous().reshape(-1)
    return int_view(cast(held, dtype))
