"""Host memory that stands for that of accelerators, behind the seam that live memory reaches them by."""

from __future__ import annotations

import contextlib
import random
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from deltasync.kernels import SegmentKernels, torch_ops
from deltasync.kernels.table import Table
from deltasync.live.devices import Device, Queue


class StandIn(Device):
    """An accelerator whose tensors are the host's. It counts what is asked of it.

    Args:
        kernels: What runs there; the same as on a GPU under Triton's interpreter, else torch's operations.
        free_bytes: What its driver says; allocations take from it that the cache does not serve.

    Attributes:
        allocated: Bytes of each allocation.
        cache: Sizes of the blocks that were given back, which serve later allocations, as with PyTorch's allocator.
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

    def cached_bytes(self) -> int:
        return max(self.cache, default=0)

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        yield


class LateQueue(Queue):
    """A queue whose copies are made when a test wants it, as on a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[str, Any]] = []
        self.done = 0

    def copy(self, to: torch.Tensor, of: torch.Tensor) -> None:
        self.left.append(("copy", (to, of)))

    def mark(self) -> Any:
        return self, self.done + len(self.left)

    def wait(self, mark: Any) -> None:
        self.left.append(("wait", mark))

    @property
    def is_ready(self) -> bool:
        """Whether its next entry can be worked off now."""
        if not self.left:
            return False
        kind, of = self.left[0]
        return kind == "copy" or of[0].done >= of[1]

    def work(self) -> str:
        """Work off the next entry, and return its kind."""
        kind, of = self.left.pop(0)
        if kind == "copy":
            of[0].copy_(of[1])
        self.done += 1
        return kind


class LateDevice(StandIn):
    """An accelerator whose two queues of copies run late: `run` picks their order, `ticks` counts how long they take."""

    def __init__(self) -> None:
        super().__init__()
        self._late = LateQueue(), LateQueue()

    def queues(self) -> tuple[Queue, Queue]:
        return self._late

    def run(self, seed: int) -> None:
        """Wait for the current stream: make copies until its queue is empty, in one of the orders that the waits allow."""
        choose = random.Random(seed)
        while self._late[0].left:
            choose.choice([queue for queue in self._late if queue.is_ready]).work()

    def ticks(self) -> int:
        """Make all copies, where each queue makes one at a time. Returns the time until the last one."""
        count = 0
        while any(queue.left for queue in self._late):
            count += 1
            for queue in [queue for queue in self._late if queue.is_ready]:
                while queue.is_ready and queue.work() != "copy":
                    pass
        return count


class _Counted:
    def __init__(self, device: StandIn, kernels: types.ModuleType) -> None:
        self._device = device
        self._kernels = kernels

    def _launch(self, name: str, *arguments: object) -> None:
        self._device.fail_at(name)
        getattr(self._kernels, name)(*arguments)
        self._device.launches.append(name)

    def prepare(self, of: Table) -> None:
        self._launch("prepare", of)

    def swap(self, of: Table) -> None:
        self._launch("swap", of)

    def fingerprint(self, of: Table) -> None:
        self._launch("fingerprint", of)

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        self._launch("warm_up", device, dtype)


def on(*devices: Device | None) -> Callable[[torch.Tensor], Device | None]:
    """`device_of` that puts the storages it meets on these devices in turn, None for the host."""
    places: dict[int, Device | None] = {}

    def device_of(live: torch.Tensor) -> Device | None:
        storage = live.untyped_storage().data_ptr()
        return places.setdefault(storage, devices[len(places) % len(devices)])

    return device_of


def kinds(tables: Sequence[Table]) -> int:
    """Launches that these tables take."""
    return sum(len(table.kinds) for table in tables)
