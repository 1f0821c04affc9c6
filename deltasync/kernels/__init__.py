"""The loops over elements, one module per machine: diff, fingerprint, scatter, and its two halves, prepare and swap.

`reference` is plain numpy and the truth; `cpu` is numba, compiled once per machine (the cache lies beside the module)
and free of the GIL; `gpu` is Triton; `torch_ops` serves any other device. What a module has of them equals the reference,
against which all are property-tested.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
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

    def diff_and_update(self, shadow_N: torch.Tensor, new_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reference.diff`, on signed views; `shadow_N` is mutated and then equals `new_N`."""

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compile what the others need on this device for signed views of this dtype, so that no commit waits for it."""


@functools.cache
def device_kernels(device: torch.device) -> DeviceKernels:
    """The kernels for tensors of a device other than the CPU: `gpu` for CUDA where triton is installed, else `torch_ops`."""
    has_triton = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return cast(DeviceKernels, importlib.import_module(f"deltasync.kernels.{'gpu' if has_triton else 'torch_ops'}"))
