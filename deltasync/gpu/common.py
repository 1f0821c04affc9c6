"""Helpers of all Triton kernels: types of elements, and the device of a launch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
"""The type of bit patterns of elements of so many bytes."""


@triton.jit
def popcount(bits):
    """Count the ones of uint32 in a form that LLVM recognizes as one instruction."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


def unsigned(view: torch.Tensor) -> torch.Tensor:
    """Return bit patterns as unsigned integers of the same memory."""
    return view.view(getattr(torch, f"uint{8 * view.element_size()}"))


def on(device: torch.device) -> Any:
    """Launch kernels on a device; Triton would take the current one. Its interpreter takes tensors of the
    host.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
