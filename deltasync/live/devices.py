"""Accelerators, as staging and commits use them: their kernels, memory and streams.

Only this module allocates device memory. Tests use a class in its place whose tensors are the host's.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from deltasync.errors import StageError, get_logger
from deltasync.kernels import SegmentKernels, segment_kernels

logger = get_logger(__name__)

RESERVE_BYTES = 256 << 20
"""Bytes left free on a device, for whatever else runs in this process."""

_STEP_BYTES = 2 << 20  # what PyTorch's allocator rounds large requests up to
_SENT_BYTES = 8 << 20  # that `Device.send` copies at once


class Queue:
    """Copies that are made in order, on a CUDA stream or, without one, at once. Copies of two streams overlap."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """Copy one tensor to another. On a stream, both must stay until it was waited for."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark behind all copies so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Make later copies wait for those of another queue before its mark."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)


class Device:
    """An accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kernels(self) -> SegmentKernels:
        """The kernels for this device."""
        return segment_kernels(self.device)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device, inside of `staging`.

        Raises:
            StageError: that would leave less than `RESERVE_BYTES` free; nothing was allocated.
        """
        # Rounded up to a quarter of the next lower power of two, so that sizes that vary a little become equal.
        step = max(_STEP_BYTES, 1 << max(0, size_bytes.bit_length() - 3))
        wanted = -(-size_bytes // step) * step
        with self._lock:
            if wanted > self.cached_bytes():
                free_bytes = self.free_bytes()
                if wanted > free_bytes - RESERVE_BYTES:
                    raise StageError(
                        f"Staging needs {wanted:,} bytes on {self.device}, where {free_bytes:,} are free, of which "
                        f"{RESERVE_BYTES:,} stay so; give vLLM less memory (--gpu-memory-utilization)."
                    )
            return self.empty(wanted)[:size_bytes]

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def free_bytes(self) -> int:
        """Return how many bytes are free, as the device says: neither the engine's nor in PyTorch's cache."""
        return torch.cuda.mem_get_info(self.device)[0] if self._is_cuda else 1 << 62

    def cached_bytes(self) -> int:
        """Return the largest free block that PyTorch's cache has for the stream of `staging`.

        The allocator serves a request from the blocks of its stream. Those of other streams are the engine's: it needs them
        at its peak, and loses them when an allocation fails.
        """
        if not self._is_cuda:
            return 0
        place = self.device.index, self._stream.cuda_stream
        blocks = (
            block["size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if (segment["device"], segment["stream"]) == place
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )
        return max(blocks, default=0)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the host that the device reads and writes directly. They are the system's again once dropped.

        PyTorch's pinned memory would be rounded up to a power of two, and kept for ever.
        """
        if not self._is_cuda:
            return torch.empty(size_bytes, dtype=torch.uint8)
        memory = np.frombuffer(mmap.mmap(-1, max(1, size_bytes)), np.uint8)
        cuda, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            code = int(cuda.cudaHostRegister(address, memory.size, 0))
        if code:
            logger.warning("CUDA cannot pin %d bytes of host memory (error %d), so copies are slower.", size_bytes, code)
        else:
            weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(memory)[:size_bytes]

    def send(self, host: torch.Tensor, to: torch.Tensor) -> None:
        """Copy bytes to the device, on the current stream. `host` may be dropped after return.

        They go through a little pinned memory, in pieces, so that the engine's own copies need not wait for all of them.
        """
        if not self._is_cuda:
            to.copy_(host)
            return
        with self._lock:
            for number, first in enumerate(range(0, host.numel(), _SENT_BYTES)):
                piece = host[first : first + _SENT_BYTES]
                room, done = self._rooms[number % 2]
                done.synchronize()
                room[: piece.numel()].copy_(piece)
                to[first : first + _SENT_BYTES].copy_(room[: piece.numel()], non_blocking=True)
                done.record()

    @functools.cached_property
    def _rooms(self) -> list[tuple[torch.Tensor, torch.cuda.Event]]:
        return [(self.pinned(_SENT_BYTES), torch.cuda.Event()) for _ in range(2)]  # type: ignore[no-untyped-call]

    def queues(self) -> tuple[Queue, Queue]:
        """Return two queues of copies: the current stream, and another, for the other direction."""
        if not self._is_cuda:
            return Queue(), Queue()
        return Queue(torch.cuda.current_stream(self.device)), Queue(self._leaving)

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """Run work inside this context on a stream beside the engine's; wait for it at the end.

        CUDA has no priority below that of the streams that engines use. So staging launches and copies little at a time
        (`table.ROWS_AT_ONCE`, `send`), and the engine's work comes between.
        """
        if not self._is_cuda:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @functools.cached_property
    def _leaving(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait for everything that the calling thread has launched."""
        if self._is_cuda:
            torch.cuda.current_stream(self.device).synchronize()


_device = functools.cache(Device)


def device_of(live: torch.Tensor) -> Device | None:
    """Return the accelerator that holds this live memory; None for the host."""
    return None if live.device.type == "cpu" else _device(live.device)
