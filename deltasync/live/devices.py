"""Accelerators, as staging and commits use them: their kernels, memory and streams.

Only this module allocates device memory. Tests use a class in its place whose tensors are the host's.
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
"""Bytes left free on a device, for whatever else runs in this process."""

_STEP_BYTES = 2 << 20  # what PyTorch's allocator rounds large requests up to


class Device:
    """An accelerator. The memory that staging one version gives back serves the next one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._largest: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def kernels(self) -> SegmentKernels:
        """The kernels for this device."""
        return segment_kernels(self.device)

    def allocate(self, size_bytes: int, purpose: str) -> torch.Tensor:
        """Allocate bytes on the device. At most one buffer of each `purpose` is used at a time.

        Raises:
            StageError: that would leave less than `RESERVE_BYTES` free; nothing was allocated.
        """
        # Rounded up to a quarter of the next lower power of two, so that sizes that vary a little become equal.
        step = max(_STEP_BYTES, 1 << max(0, size_bytes.bit_length() - 3))
        wanted = -(-size_bytes // step) * step
        with self._lock:
            # A buffer that was given back stays in PyTorch's cache for this stream.
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
        """Allocate bytes on the device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes on the host that the device reads and writes directly."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def free_bytes(self) -> int:
        """Return how many bytes are free, as the device says."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 62

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """Run work inside this context on a stream of the lowest priority, beside the engine's; wait for it at the end."""
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
        """Wait for everything that the calling thread has launched."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


_device = functools.cache(Device)


def device_of(live: torch.Tensor) -> Device | None:
    """Return the accelerator that holds this live memory; None for the host."""
    return None if live.device.type == "cpu" else _device(live.device)
