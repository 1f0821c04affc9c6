"""Host memory that stands for that of accelerators, behind the seam that live memory reaches them by."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch

from deltasync.gpu.backend import Accelerator
from deltasync.kernels import torch_ops
from deltasync.kernels.backend import Backend, backend_of
from deltasync.kernels.table import Room, Rows, SegmentKernels, Table, Writes


class StandIn(Accelerator):
    """An accelerator whose tensors are the host's. It counts what is asked of it.

    Args:
        kernels: What runs there; the same as on a GPU under Triton's interpreter, else torch's operations.
        free_bytes: What its driver says; allocations take from it that the cache does not serve.

    Attributes:
        allocated: Bytes of each allocation.
        cache: Sizes of the blocks that were given back, which serve later allocations, as with PyTorch's
            allocator.
        held_bytes: What the driver gave.
        launches: Names of the kernels that were launched for whole tables.
        fail_at: Called before each launch; raises to make it fail.
    """

    def __init__(self, kernels: types.ModuleType = torch_ops, free_bytes: int = 1 << 62) -> None:
        super().__init__(torch.device("cpu"))
        self._kernels = kernels
        self._free_bytes = free_bytes
        self.allocated: list[int] = []
        self.cache: list[int] = []
        self.held_bytes = 0
        self.launches: list[str] = []
        self.fail_at: Callable[[str], None] = lambda name: None

    @property
    def kernels(self) -> SegmentKernels:
        return _Counted(self, self._kernels)

    def empty(self, size_bytes: int) -> torch.Tensor:
        self.allocated.append(size_bytes)
        block = min((size for size in self.cache if size >= size_bytes), default=0)
        if block:
            self.cache.remove(block)
        else:
            block = size_bytes
            self.held_bytes += block
        memory = np.empty(size_bytes, np.uint8)
        weakref.finalize(memory, self.cache.append, block)
        return torch.from_numpy(memory)

    def free_bytes(self) -> int:
        return self._free_bytes - self.held_bytes

    def cached_bytes(self) -> list[int]:
        return self.cache

    @contextlib.contextmanager
    def staging(self, wait: bool = True) -> Iterator[None]:
        yield


class _Counted:
    def __init__(self, device: StandIn, kernels: types.ModuleType) -> None:
        self._device = device
        self._kernels = kernels

    def _launch(self, name: str, *arguments: object) -> None:
        self._device.fail_at(name)
        getattr(self._kernels, name)(*arguments)
        self._device.launches.append(name)

    def prepare(self, of: Writes) -> None:
        self._launch("prepare", of)

    def swap(self, of: Writes) -> None:
        self._launch("swap", of)

    def fingerprint(self, of: Table, rows: Rows, gain_S: torch.Tensor) -> None:
        self._launch("fingerprint", of, rows, gain_S)

    def warm_up(self, room: Room, dtype: torch.dtype) -> None:
        self._launch("warm_up", room, dtype)


def on(*devices: Backend | None) -> Callable[[torch.Tensor], Backend]:
    """`device_of` that puts the storages it meets on these devices in turn, None for the host."""
    places: dict[int, Backend] = {}

    def device_of(live: torch.Tensor) -> Backend:
        storage = live.untyped_storage().data_ptr()
        return places.setdefault(
            storage, devices[len(places) % len(devices)] or backend_of(torch.device("cpu"))
        )

    return device_of
