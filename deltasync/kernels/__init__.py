"""The loops over elements: diff, fingerprint, scatter and its two halves, prepare and swap. Each module has
some of them.

`reference` is plain numpy and defines the results; property tests compare all other modules with it. `native`
is the C extension. Those of live memory are `host_segments`, which calls it, `deltasync.gpu.segments` in
Triton, and `torch_ops` for other devices.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from deltasync.kernels.table import SegmentKernels


ACCELERATORS = {"cuda"}
"""Device types that the Triton kernels serve. Tests add the CPU, to run the same code in Triton's
interpreter.
"""


def segment_kernels(device: torch.device) -> SegmentKernels:
    """Return the kernels for live memory on a device: `gpu.segments` on CUDA if triton is installed, else
    `torch_ops`.
    """
    name = "gpu.segments" if compares(device) else "kernels.torch_ops"
    return cast("SegmentKernels", importlib.import_module(f"deltasync.{name}"))


def compares(device: torch.device) -> bool:
    """Whether weights on a device can be compared there: on CUDA if triton is installed."""
    return device.type in ACCELERATORS and importlib.util.find_spec("triton") is not None


__all__ = [
    "ACCELERATORS",
    "backend",
    "compares",
    "host_segments",
    "native",
    "rans",
    "segment_kernels",
    "table",
]
