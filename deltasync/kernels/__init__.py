"""The loops over elements, one module per machine: diff, fingerprint, scatter, and its two halves, prepare and swap.

`reference` is plain numpy and the truth; `cpu` is numba, compiled once per machine (the cache lies beside the module)
and free of the GIL; `gpu_segments` and `gpu_diff` are Triton; `torch_ops` serves any other device. What a module has of them
equals the reference, against which all are property-tested.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deltasync.kernels import cpu as cpu
    from deltasync.kernels.table import Table


def __getattr__(name: str) -> object:
    """`cpu`, imported when it is first used as `kernels.cpu`: what happens on a GPU alone needs no numba."""
    if name != "cpu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.cpu")


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


class DeviceDiff(Protocol):
    """What compares a trainer's tensors on a device with the shadows there, many at a time."""

    def add(self, name: str, shadow_N: torch.Tensor, new_N: torch.Tensor, expected: int) -> None:
        """Compare a tensor now or in `finish`; both stay until then. See `gpu_diff.Diff.add`."""

    def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By name, of the tensors that changed, `reference.diff` of the shadow before and after; waits for the device."""

    def drop(self) -> None:
        """Forget what was added and not finished; the shadows of that hold neither old nor new bits."""


ACCELERATORS = {"cuda"}
"""Types of devices that Triton's kernels serve. Tests add the CPU, so that the same code runs on it, kernels interpreted."""


def segment_kernels(device: torch.device) -> SegmentKernels:
    """The kernels for live memory on a device: `gpu_segments` for CUDA where triton is installed, else `torch_ops`."""
    name = "gpu_segments" if _has_triton(device) else "torch_ops"
    return cast(SegmentKernels, importlib.import_module(f"deltasync.kernels.{name}"))


def device_diff(device: torch.device) -> DeviceDiff:
    """A comparison on a device, likewise by `gpu_diff` or `torch_ops`."""
    name = "gpu_diff" if _has_triton(device) else "torch_ops"
    return cast(DeviceDiff, importlib.import_module(f"deltasync.kernels.{name}").Diff(device))


def _has_triton(device: torch.device) -> bool:
    return device.type in ACCELERATORS and importlib.util.find_spec("triton") is not None


__all__ = [
    "ACCELERATORS",
    "DeviceDiff",
    "SegmentKernels",
    "coder",
    "counts",
    "cpu",
    "device_diff",
    "rans",
    "segment_kernels",
    "table",
]
