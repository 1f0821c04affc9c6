"""Host memory that stands for that of accelerators, behind the seam that live memory reaches them by."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence

import torch

from deltasync.kernels import SegmentKernels, torch_ops
from deltasync.kernels.table import Table
from deltasync.live.devices import Device


class StandIn(Device):
    """An accelerator whose tensors are the host's. It counts what is asked of it.

    Args:
        kernels: What runs there; the same as on a GPU under Triton's interpreter, else torch's operations.
        free_bytes: What its driver says; allocations take from it.

    Attributes:
        allocated: Bytes of each allocation.
        launches: Names of the kernels that were launched for whole tables.
        fail_at: Called before each launch; raises to make it fail.
    """

    def __init__(self, kernels: types.ModuleType = torch_ops, free_bytes: int = 1 << 62) -> None:
        super().__init__(torch.device("cpu"))
        self._kernels = kernels
        self._free_bytes = free_bytes
        self.allocated: list[int] = []
        self.launches: list[str] = []
        self.fail_at: Callable[[str], None] = lambda name: None

    @property
    def kernels(self) -> SegmentKernels:
        return _Counted(self, self._kernels)

    def empty(self, size_bytes: int) -> torch.Tensor:
        self.allocated.append(size_bytes)
        return super().empty(size_bytes)

    def free_bytes(self) -> int:
        return self._free_bytes - sum(self.allocated)

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        yield


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
