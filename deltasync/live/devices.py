"""Devices other than the host, as staging and commits use them: their kernels, their memory, their streams.

The one place that asks for device memory. Tests put another class in its place, whose tensors are the host's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch

from deltasync.errors import StageError
from deltasync.kernels import SegmentKernels, segment_kernels

RESERVE_BYTES = 256 << 20
"""Left free on a device: an allocation that fails there would take memory away from whoever else uses the process."""

_STEP_BYTES = 2 << 20  # what PyTorch's allocator rounds large requests up to


class Device:
    """An accelerator. Its memory for staging comes from one place, so that what one version gives back serves the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._largest: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def kernels(self) -> SegmentKernels:
        """What runs there."""
        return segment_kernels(self.device)

    def allocate(self, size_bytes: int, purpose: str) -> torch.Tensor:
        """Bytes on the device, for one purpose at a time; refused before it is tried where little is free.

        Raises:
            StageError: more than what is free less `RESERVE_BYTES`.
        """
        # Up to a quarter of the next lower power of two, so that sizes that vary a little are the same.
        step = max(_STEP_BYTES, 1 << max(0, size_bytes.bit_length() - 3))
        wanted = -(-size_bytes // step) * step
        with self._lock:
            # What was given back before stays this stream's, in PyTorch's cache.
            if wanted > self._largest.get(purpose, 0):
                free_bytes = self.free_bytes()
                if wanted > free_bytes - RESERVE_BYTES:
                    raise StageError(
                        f"Staging needs {wanted:,} bytes on {self.device}, where {free_bytes:,} are free, of which "
                        f"{RESERVE_BYTES:,} stay so; give vLLM less memory (--gpu-memory-utilization)."
                    )
                self._largest[purpose] = wanted
        return self.empty(wanted)[:size_bytes]

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the host that the device reads and writes without a detour."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def free_bytes(self) -> int:
        """Bytes that nobody has, as far as the device tells."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 62

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """Work beside the engine's: on a stream of its own, of the lowest priority, which has ended at the end."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=0)  # type: ignore[no-untyped-call]  # CUDA's lowest; negative ones are more urgent

    def synchronize(self) -> None:
        """Wait for what the calling thread has launched."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


_device = functools.cache(Device)


def device_of(live: torch.Tensor) -> Device | None:
    """Where live memory lies; None for the host."""
    return None if live.device.type == "cpu" else _device(live.device)
