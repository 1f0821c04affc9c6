"""Tensors as bit patterns: the integer views that everything here compares, adds and hashes."""

from __future__ import annotations

import fnmatch

import numpy as np
import torch

from deltasync.errors import ModelMismatchError
from deltasync.tensors.specs import ITEM_BYTES, TensorSpec

# torch computes on signed integers only; as views they carry the same bits.
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`.

    Raises:
        ModelMismatchError: deltasync does not carry this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ModelMismatchError(f"Tensors of dtype {name} are not supported.")
    return name


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor as it is."""
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def int_view(tensor: torch.Tensor) -> torch.Tensor:
    """Flat signed-integer view, shape N, on the tensor's device; shares memory when the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_SIGNED[flat.element_size()])


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Flat unsigned bit patterns on the host, shape N; shares memory with a contiguous CPU tensor."""
    view: np.ndarray = int_view(tensor).cpu().numpy()
    return view.view(f"u{view.itemsize}")


def signed_view(bits_N: np.ndarray) -> torch.Tensor:
    """Flat bit patterns on the host as `int_view` has them; shares memory when they are contiguous."""
    return torch.from_numpy(np.ascontiguousarray(bits_N).view(f"i{bits_N.itemsize}"))


def tensor_of(bits_N: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Tensor of `spec` over the memory of `bits_N` (writable, contiguous)."""
    return signed_view(bits_N).view(getattr(torch, spec.dtype)).reshape(spec.shape)


_PIECE = 1 << 17  # elements that stay in the cache

_LARGEST = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
}
"""Largest bit pattern without its sign that is no NaN."""


def nan_bounds(spec: TensorSpec) -> tuple[int, int]:
    """The sign's complement as a mask, and the largest masked bit pattern that is no NaN; no integer pattern is NaN."""
    mask = (1 << (8 * spec.item_bytes - 1)) - 1
    return mask, _LARGEST.get(spec.dtype, mask)


def has_nan(bits_N: np.ndarray, spec: TensorSpec) -> bool:
    """Whether one of these bit patterns of a tensor, shape N, is a NaN."""
    mask, largest = (bits_N.dtype.type(bound) for bound in nan_bounds(spec))
    pieces = (bits_N[first : first + _PIECE] for first in range(0, bits_N.size if mask != largest else 0, _PIECE))
    return any(((piece & mask) > largest).any() for piece in pieces)


def dtype_for(name: str, rule: str) -> str:
    """The dtype, or `keep`, that a rule such as `bfloat16,*.router.*=float32` gives a tensor; the last match decides."""
    default, *parts = rule.split(",")
    patterns = (part.rpartition("=") for part in reversed(parts))
    return next((dtype for pattern, _, dtype in patterns if fnmatch.fnmatchcase(name, pattern)), default)


def served_dtype(tensor: torch.Tensor, dtype: str) -> torch.dtype:
    """The dtype that `cast` gives a tensor."""
    if dtype == "keep" or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor.dtype
    return getattr(torch, dtype)


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """`tensor` in this dtype, rounded to nearest even; unchanged unless of floats of 16 bits or more, and with `keep`."""
    return tensor.detach().to(served_dtype(tensor, dtype))
