"""The loops over elements: diff, fingerprint, scatter and its two halves, prepare and swap. Each module has some of them.

`reference` is plain numpy and defines the results; property tests compare all other modules with it. `native` is the C
extension. `gpu_segments` and `gpu_diff` are Triton. `torch_ops` serves all other devices.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

    from deltasync.kernels.table import Rows, Table, Writes


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


ACCELERATORS = {"cuda"}
"""Device types that the Triton kernels serve. Tests add the CPU, to run the same code in Triton's interpreter."""


def segment_kernels(device: torch.device) -> SegmentKernels:
    """Return the kernels for live memory on a device: `gpu_segments` on CUDA if triton is installed, else `torch_ops`."""
    name = "gpu_segments" if compares(device) else "torch_ops"
    return cast(SegmentKernels, importlib.import_module(f"deltasync.kernels.{name}"))


def compares(device: torch.device) -> bool:
    """Whether weights on a device can be compared there: on CUDA if triton is installed."""
    return device.type in ACCELERATORS and importlib.util.find_spec("triton") is not None


__all__ = [
    "ACCELERATORS",
    "SegmentKernels",
    "compares",
    "gpu_classes",
    "gpu_coder",
    "gpu_diff",
    "groups",
    "native",
    "rans",
    "segment_kernels",
    "table",
]
