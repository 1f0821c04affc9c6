"""The loops over elements, one module per machine: diff, fingerprint, scatter, and its two halves, prepare and swap.

`reference` is plain numpy and the truth; `cpu` is numba, compiled once per machine (the cache lies beside the module)
and free of the GIL; `gpu` and `gpu_diff` are Triton; `torch_ops` serves any other device. What a module has of them equals
the reference, against which all are property-tested.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    import torch


class DeviceKernels(Protocol):
    """What memory on a device needs of a module of kernels."""

    def prepare(
        self,
        key: int,
        dest: torch.Tensor,
        dest_index_K: torch.Tensor,
        data_K: torch.Tensor,
        absolute: bool,
        index_K: torch.Tensor,
    ) -> tuple[torch.Tensor, int, int]:
        """As `reference.prepare`, on signed views; all tensors on the device of `dest`."""

    def swap(self, writes: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> int:
        """As `reference.swap`, on signed views of one device; memory and values are mutated."""

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compile what the others need on this device for signed views of this dtype, so that no commit waits for it."""


class DeviceDiff(Protocol):
    """What compares tensors on a device with the shadows there, many at a time."""

    def add(self, name: str, shadow_N: torch.Tensor, new_N: torch.Tensor, expected: int) -> None:
        """Compare a tensor now or in `finish`; both stay until then. See `gpu_diff.Diff.add`."""

    def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By name, of the tensors that changed, `reference.diff` of the shadow before and after; waits for the device."""

    def drop(self) -> None:
        """Forget what was added and not finished; the shadows of that hold neither old nor new bits."""


ACCELERATORS = {"cuda"}
"""Types of devices that Triton's kernels serve. Tests add the CPU, so that the same code runs on it, kernels interpreted."""


def _has_triton(device: torch.device) -> bool:
    return device.type in ACCELERATORS and importlib.util.find_spec("triton") is not None


def device_kernels(device: torch.device) -> DeviceKernels:
    """The kernels for tensors of a device other than the CPU: `gpu` for CUDA where triton is installed, else `torch_ops`."""
    name = "gpu" if _has_triton(device) else "torch_ops"
    return cast(DeviceKernels, importlib.import_module(f"deltasync.kernels.{name}"))


def device_diff(device: torch.device) -> DeviceDiff:
    """A comparison on a device, chosen as `device_kernels` is."""
    name = "gpu_diff" if _has_triton(device) else "torch_ops"
    return cast(DeviceDiff, importlib.import_module(f"deltasync.kernels.{name}").Diff(device))
