"""The loops over elements, one module per machine: diff, fingerprint, scatter, and its two halves, prepare and swap.

`reference` is plain numpy and the truth; `cpu` is numba, compiled once per machine (the cache lies beside the module)
and free of the GIL; `gpu` and `gpu_segments` are Triton; `torch_ops` serves any other device. What a module has of them
equals the reference, against which all are property-tested.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

    from deltasync.kernels.table import Table


class DeviceKernels(Protocol):
    """What a trainer's tensors on a device need of a module of kernels."""

    def diff_and_update(self, shadow_N: torch.Tensor, new_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reference.diff`, on signed views; `shadow_N` is mutated and then equals `new_N`."""


class SegmentKernels(Protocol):
    """What live memory on a device needs of a module of kernels: each a constant number of launches for a whole table."""

    def prepare(self, of: Table) -> None:
        """Turn a table's values into new bits; its sums say what that adds to fingerprints, and what `swap` will find."""

    def swap(self, of: Table) -> None:
        """Exchange the values of a table with live memory; if it raised, nothing was exchanged."""

    def fingerprint(self, of: Table) -> None:
        """Sum the fingerprints of all elements of the segments of a table without positions."""

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compile the others for signed views of this dtype, so that no commit waits for it."""


@functools.cache
def device_kernels(device: torch.device) -> DeviceKernels:
    """The kernels for tensors of a device other than the CPU: `gpu` for CUDA where triton is installed, else `torch_ops`."""
    return cast(DeviceKernels, importlib.import_module(f"deltasync.kernels.{'gpu' if _has_triton(device) else 'torch_ops'}"))


@functools.cache
def segment_kernels(device: torch.device) -> SegmentKernels:
    """Likewise for live memory: `gpu_segments` or `torch_ops`."""
    name = "gpu_segments" if _has_triton(device) else "torch_ops"
    return cast(SegmentKernels, importlib.import_module(f"deltasync.kernels.{name}"))


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
