"""The loops over elements: diff, fingerprint, scatter and its two halves, prepare and swap. Each module has some of them.

`reference` is plain numpy and defines the results; property tests compare all other modules with it. `cpu`, `cpu_diff`,
`cpu_rows`, `classes` and `class_fit` are numba, compiled once per machine (the cache is next to the module), and release the
GIL. `gpu_segments` and `gpu_diff` are Triton. `torch_ops` serves all other devices.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deltasync.kernels import classes as classes
    from deltasync.kernels import cpu as cpu
    from deltasync.kernels import cpu_diff as cpu_diff
    from deltasync.kernels import cpu_rows as cpu_rows
    from deltasync.kernels.table import Rows, Table, Writes


def __getattr__(name: str) -> object:
    """Import a module with numba when it is first used as `kernels.cpu`: what runs on a GPU alone needs no numba."""
    if name not in ("classes", "cpu", "cpu_diff", "cpu_rows"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


class SegmentKernels(Protocol):
    """The kernels for live memory on a device. With Triton, any number of segments takes the same number of launches."""

    def prepare(self, of: Writes) -> None:
        """Turn steps into new bits, without writing live memory.

        The sums become what the writes will add to fingerprints, and the checksum that `swap` will find.
        """

    def swap(self, of: Writes) -> None:
        """Exchange values with live memory; a second call restores everything.

        This may return once the kernel is launched. If it raises, live memory is unchanged, unless it raises CommitError.
        """

    def fingerprint(self, of: Table, rows: Rows, gain_S: torch.Tensor) -> None:
        """Sum the fingerprints of all elements of some lines into `gain_S`, int64 by line; those of others become 0."""

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compile the kernels for signed views of this dtype, so that no commit waits for the compiler."""


class DeviceDiff(Protocol):
    """Compares a trainer's tensors on a device with their shadows there, many at a time."""

    def add(self, name: str, shadow_N: torch.Tensor, new_N: torch.Tensor, expected: int) -> None:
        """Compare a tensor with its shadow, now or in `finish`; both must stay until then. See `gpu_diff.Diff.add`."""

    def finish(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Wait for the device. Return, by name of each changed tensor, `reference.diff` of its shadow before and after."""

    def drop(self) -> None:
        """Forget the tensors that were added and not finished. Their shadows may hold a mixture of old and new bits."""


ACCELERATORS = {"cuda"}
"""Device types that the Triton kernels serve. Tests add the CPU, to run the same code in Triton's interpreter."""


def segment_kernels(device: torch.device) -> SegmentKernels:
    """Return the kernels for live memory on a device: `gpu_segments` on CUDA if triton is installed, else `torch_ops`."""
    name = "gpu_segments" if _has_triton(device) else "torch_ops"
    return cast(SegmentKernels, importlib.import_module(f"deltasync.kernels.{name}"))


def device_diff(device: torch.device) -> DeviceDiff:
    """Return a comparison on a device: by `gpu_diff` on CUDA if triton is installed, else by `torch_ops`."""
    name = "gpu_diff" if _has_triton(device) else "torch_ops"
    return cast(DeviceDiff, importlib.import_module(f"deltasync.kernels.{name}").Diff(device))


def _has_triton(device: torch.device) -> bool:
    return device.type in ACCELERATORS and importlib.util.find_spec("triton") is not None


__all__ = [
    "ACCELERATORS",
    "DeviceDiff",
    "SegmentKernels",
    "class_fit",
    "classes",
    "coder",
    "compiled",
    "counts",
    "cpu",
    "cpu_diff",
    "cpu_rows",
    "device_diff",
    "gpu_classes",
    "gpu_coder",
    "rans",
    "segment_kernels",
    "table",
]
