"""Accelerators, as staging and commits use them: their memory and streams.

Only this module allocates device memory. Tests use a class in its place whose tensors are the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch

from deltasync.errors import StageError, get_logger
from deltasync.kernels.backend import Backend
from deltasync.threads import Workers

logger = get_logger(__name__)

RESERVE_BYTES = 256 << 20
"""Bytes left free on a device, for whatever else runs in this process."""

_STEP_BYTES = 2 << 20  # what PyTorch's allocator rounds large requests up to
_SENT_BYTES = 8 << 20  # of a room of `Device.send`
_ROOMS = 16
_COPIERS = min(16, max(2, os.cpu_count() or 1))
"""Threads that copy between host memory: one alone copies 11 GB/s, which is a fifth of what crosses to a
device.
"""

CHUNK_BYTES = 32 << 20
"""Pinned memory that is registered at once, and kept. The driver holds a lock meanwhile, for which an engine's
launches wait: 12 ms, where 256 MiB took 96.
"""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, and HIP's hipStreamCaptureModeRelaxed


class Chunk:
    """Pinned memory that full weights lie in. Its device takes it back once this is dropped.

    Attributes:
        bytes_B: The memory, uint8.
    """

    def __init__(self, bytes_B: torch.Tensor) -> None:
        self.bytes_B = bytes_B


class Device(Backend):
    """The memory of an accelerator."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._lock = threading.Lock()
        self._chunks: list[torch.Tensor] = []  # that nobody uses

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device, inside of `staging`.

        Raises:
            StageError: that would leave less than `RESERVE_BYTES` free; nothing was allocated.
        """
        # Rounded up to a quarter of the next lower power of two, so that sizes that vary a little become
        # equal.
        step = max(_STEP_BYTES, 1 << max(0, size_bytes.bit_length() - 3))
        wanted = -(-size_bytes // step) * step
        with self._lock:
            if wanted > self.free_bytes() - RESERVE_BYTES and wanted > max(self.cached_bytes(), default=0):
                raise self._short(wanted)
            return self.empty(wanted)[:size_bytes]

    def check_room(self, size_bytes: int) -> None:
        """Check that so many bytes can be allocated, in several parts, inside of `staging`.

        Raises:
            StageError: that would leave less than `RESERVE_BYTES` free.
        """
        missing = size_bytes - (self.free_bytes() - RESERVE_BYTES)
        if missing > 0 and missing > sum(self.cached_bytes()):
            raise self._short(size_bytes)

    def _short(self, size_bytes: int) -> StageError:
        return StageError(
            f"{size_bytes:,} bytes are needed on {self.device}, where {self.free_bytes():,} are free, of which "
            f"{RESERVE_BYTES:,} stay so; leave it more memory (with vLLM: --gpu-memory-utilization)."
        )

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def free_bytes(self) -> int:
        """Return how many bytes are free, as the device says: neither the engine's nor in PyTorch's cache."""
        return torch.cuda.mem_get_info(self.device)[0] if self._is_cuda else 1 << 62

    def cached_bytes(self) -> list[int]:
        """Return the sizes of the free blocks that PyTorch's cache has for the stream of `staging`.

        The allocator serves a request from the blocks of its stream. Those of other streams are the engine's:
        it needs them at its peak, and loses them when an allocation fails. PyTorch lists every block for
        this, so it is asked only where the driver has too little.
        """
        if not self._is_cuda:
            return []
        place = self.device.index, self._stream.cuda_stream
        return [
            block["size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if (segment["device"], segment["stream"]) == place
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the host that the device reads and writes directly. They are the system's again
        once dropped.

        PyTorch's pinned memory would be rounded up to a power of two, and kept for ever.
        """
        if not self._is_cuda:
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        # Private, because shared memory gets no huge pages; but not in forks, where writing would move this
        # process's pages.
        mapped = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError, AttributeError):
                mapped.madvise(getattr(mmap, advice))
        memory = np.frombuffer(mapped, np.uint8)
        # Pages that are there already are registered in a fifth of the time; many threads get them faster.
        pages = memory[:: mmap.PAGESIZE]
        each([functools.partial(part.fill, 0) for part in np.array_split(pages, _COPIERS) if part.size])
        cuda, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device):
            code = int(cuda.cudaHostRegister(address, memory.size, 0))
        if code:
            logger.warning(
                "CUDA cannot pin %d bytes of host memory (error %d), so copies are slower.", size_bytes, code
            )
        else:
            weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(memory)[:size_bytes]

    def chunk(self) -> Chunk:
        """Return pinned memory of `CHUNK_BYTES`, made once and kept: registering it takes longer than filling
        it.
        """
        with self._lock:
            memory = self._chunks.pop() if self._chunks else self.pinned(CHUNK_BYTES)
        chunk = Chunk(memory)
        weakref.finalize(chunk, self._chunks.append, memory).atexit = False
        return chunk

    def send(self, pairs: Iterable[tuple[np.ndarray, torch.Tensor]]) -> None:
        """Copy arrays of integers to the device, on the current stream. The arrays may be dropped after
        return.

        Each tensor has as many elements as its array, contiguous, of the same or a smaller width: they keep
        their lower bits. They go through pinned rooms that stay, filled by several threads, in pieces, so
        that the engine's copies do not wait for all.
        """
        if not self._is_cuda:
            super().send(pairs)
            return
        with self._lock:
            ready: deque[tuple[int, torch.Tensor, Future[None]]] = deque()
            try:
                self._send(pairs, ready)
            finally:  # after an error too, the next call finds rooms that nobody fills
                wait([filled for *_, filled in ready])

    def _send(
        self,
        pairs: Iterable[tuple[np.ndarray, torch.Tensor]],
        ready: deque[tuple[int, torch.Tensor, Future[None]]],
    ) -> None:
        """Send pieces through the rooms. `ready` has those that are being filled: number, target, filling."""
        rooms = itertools.cycle(range(_ROOMS))
        for host, to in pairs:
            width = to.element_size()
            size = _SENT_BYTES // width
            parts = to.view(-1).split(size)  # type: ignore[no-untyped-call]
            for piece, to_N in zip(_cut(host.reshape(-1), size), parts, strict=False):
                if len(ready) == _ROOMS:
                    self._arrive(*ready[0])
                    ready.popleft()
                number = next(rooms)
                room, done = self._rooms[number]
                ready.append((number, to_N, copiers().submit(_fill, done, room, piece, f"i{width}")))
        while ready:
            self._arrive(*ready[0])
            ready.popleft()

    def _arrive(self, number: int, to_N: torch.Tensor, filled: Future[None]) -> None:
        filled.result()
        room, done = self._rooms[number]
        to_N.copy_(room[: to_N.nbytes].view(to_N.dtype), non_blocking=True)
        done.record()

    @functools.cached_property
    def _rooms(self) -> list[tuple[torch.Tensor, torch.cuda.Event]]:
        memory = self.pinned(_ROOMS * _SENT_BYTES)
        return [(room, torch.cuda.Event()) for room in memory.split(_SENT_BYTES)]  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def staging(self, wait: bool = True) -> Iterator[None]:
        """Run work inside this context on a stream beside the engine's; by default wait for it at the end.

        CUDA has no priority below that of the streams that engines use. So staging launches and copies little
        at a time (`table.WRITTEN_AT_ONCE`, `send`), and the engine's work comes between.
        """
        if not self._is_cuda:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                if wait:
                    self._stream.synchronize()

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make what follows on the current stream wait for another stream's event."""
        if self._is_cuda and event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self) -> None:
        """Wait for everything that the calling thread has launched."""
        if self._is_cuda:
            torch.cuda.current_stream(self.device).synchronize()


@functools.cache
def copiers() -> Workers:
    """Return the threads that copy host memory."""
    # a thread starts in the time that a piece takes to be copied
    return Workers(_COPIERS, "copy", idle_s=10.0)


def each(actions: list[Callable[[], None]]) -> None:
    """Run actions in those threads, and wait for all of them. Raises what one of them raised."""
    done = [copiers().submit(action) for action in actions]
    wait(done)
    for future in done:
        future.result()


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread allocate and wait while another one captures a CUDA graph.

    Otherwise a capture in its default mode forbids both to every thread, and ends with an error itself. See
    cuThreadExchangeStreamCaptureMode in NVIDIA's driver API; PyTorch's allocator does the same for cudaMalloc.
    """
    exchange, mode = _capture_mode(), ctypes.c_int(_RELAXED)
    changed = exchange is not None and exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchange is not None and changed:
            exchange(ctypes.byref(mode))


@functools.cache
def _capture_mode() -> Any:
    """Return the driver's function that exchanges a thread's capture mode; None where there is none."""
    library, name = ("libamdhip64.so", "hip") if torch.version.hip else ("libcuda.so.1", "cu")
    try:
        return getattr(ctypes.CDLL(library), f"{name}ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):
        return None


def _cut(host_N: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield consecutive parts of an array, of at most so many elements."""
    return (host_N[first : first + size] for first in range(0, host_N.size, size))


def _fill(done: torch.cuda.Event, room: torch.Tensor, piece: np.ndarray, to: str) -> None:
    """Fill a room once what was in it has left; integers keep the lower bits that `to` has."""
    done.synchronize()
    bits = piece.view(to) if piece.itemsize == np.dtype(to).itemsize else piece
    np.copyto(room.numpy()[: piece.size * np.dtype(to).itemsize].view(to), bits, casting="unsafe")
