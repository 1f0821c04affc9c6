"""Tensors as bit patterns: integer views, which are compared, added and hashed instead of floats.

A tensor may have no bits of its own: quantized and float8 weights are wrapper subclasses, which hold other
tensors and compute their values from these. Their address is 0, all alike. `readable` copies their values.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import re
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from deltasync.config import AUTO
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.tensors.specs import ITEM_BYTES, TensorSpec

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes of bit patterns in torch, by the width of an element: it has few operations on unsigned ones."""

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""Those that kernels of a device take."""


def dtype_name(dtype: torch.dtype, tensor: str = "") -> str:
    """Return a dtype's name without `torch.`. Raises ModelMismatchError, which names the tensor, if it is not
    supported.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ModelMismatchError(f"{tensor or 'A tensor'} has dtype {name}, which is not supported.")
    return name


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor. Raises ModelMismatchError, with its name, if its dtype or layout is not
    supported.
    """
    if tensor.layout is not torch.strided:
        raise ModelMismatchError(f"{name} is sparse ({tensor.layout}), which is not supported.")
    return TensorSpec(name, dtype_name(tensor.dtype, name), tuple(tensor.shape))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class decides in Python what its values are, so that its own memory, if any, does
    not have them.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's elements begin in memory, 0 if they are nowhere: of none, on meta, freed,
    sparse, wrapped.
    """
    if (
        is_wrapper(tensor)
        or is_lazy(tensor)
        or tensor.is_meta
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return 0
    return tensor.data_ptr()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its elements in memory by its sizes and strides: not on meta, sparse, nested,
    mkldnn, wrapped.
    """
    is_plain = tensor.layout is torch.strided and not (
        tensor.is_meta or tensor.is_nested or is_wrapper(tensor)
    )
    return is_plain and not tensor._is_zerotensor()


def readable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: the tensor itself, or of a wrapper subclass a plain copy
    in its dtype.

    Raises:
        ModelMismatchError: the values are nowhere, because its memory was freed; or its layout is not
            strided.
        ConfigError: its class does not say its values.
    """
    if is_wrapper(tensor):
        return _values(name, tensor)
    if tensor.layout is not torch.strided:
        raise ModelMismatchError(f"{name} is sparse ({tensor.layout}), which is not supported.")
    if tensor.is_neg():
        return tensor.detach().resolve_neg()  # its memory has the negated values
    if tensor.device.type in ("cpu", "cuda") and tensor.numel() and not tensor.data_ptr():
        raise ModelMismatchError(
            f"{name} has {tensor.numel():,} elements and no memory: it was freed, as FSDP2 frees gathered "
            "parameters. "
            "Publish the module or its state_dict()."
        )
    return tensor


def _values(name: str, tensor: torch.Tensor) -> torch.Tensor:
    problem: Exception | None = None
    with torch.no_grad():
        for read in (_copied, lambda tensor: tensor.dequantize()):
            try:
                found = read(tensor)
            except Exception as error:  # noqa: BLE001 - it is somebody else's code
                problem = problem or error
                continue
            if not is_wrapper(found) and found.shape == tensor.shape:
                return found.to(tensor.dtype)
    reason = (
        "they are wrapped again"
        if problem is None
        else f"{type(problem).__name__}: {problem}".partition("\n")[0]
    )
    raise ConfigError(
        f"{name} is a {type(tensor).__name__}, whose values cannot be read ({reason}). Publish it "
        "dequantized, or leave it "
        "out."
    ) from problem


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor)
    return copy


def int_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat signed-integer view, shape N, on the tensor's device; of a non-contiguous tensor, a
    copy.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(SIGNED[flat.element_size()])


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Return flat unsigned bit patterns on the host, shape N; they share the memory of a contiguous CPU
    tensor.
    """
    view = int_view(tensor).cpu()
    if not view.numel():
        return np.empty(0, f"u{view.element_size()}")
    if not (address := view.data_ptr()):
        raise ModelMismatchError(
            f"A {type(tensor).__name__} of {view.numel():,} elements has no memory to read its bits from."
        )
    # Not by `numpy()`, after which torch refuses to resize the storage, as FSDP does with a trainer's
    # parameters.
    memory: Any = (ctypes.c_byte * view.nbytes).from_address(address)
    memory.owner = view  # lives as long as the array does
    return np.frombuffer(memory, f"u{view.element_size()}")


def signed_view(bits_N: np.ndarray) -> torch.Tensor:
    """Return flat bit patterns on the host as a signed tensor, like `int_view`; of non-contiguous ones, a
    copy.
    """
    return torch.from_numpy(np.ascontiguousarray(bits_N).view(f"i{bits_N.itemsize}"))


def tensor_of(bits_N: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor of `spec` over the memory of `bits_N`, which is writable and contiguous."""
    return signed_view(bits_N).view(getattr(torch, spec.dtype)).reshape(spec.shape)


_PIECE = 1 << 18  # elements, so that a piece stays in the processor's cache

_LARGEST = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
    "float8_e4m3fn": 0x7E,
    "float8_e5m2": 0x7C,
}
"""Largest bit pattern, without the sign bit, that is not NaN."""


def nan_bounds(spec: TensorSpec) -> tuple[int, int]:
    """Return the mask of all bits but the sign, and the largest masked bit pattern that is not NaN."""
    mask = (1 << (8 * spec.item_bytes - 1)) - 1
    return mask, _LARGEST.get(spec.dtype, mask)


def has_nan(bits_N: np.ndarray, spec: TensorSpec) -> bool:
    """Whether any of a tensor's bit patterns, shape N, is NaN."""
    mask, largest = (bits_N.dtype.type(bound) for bound in nan_bounds(spec))
    pieces = (
        bits_N[first : first + _PIECE] for first in range(0, bits_N.size if mask != largest else 0, _PIECE)
    )
    return any((piece & mask).max() > largest for piece in pieces)


_EXACT = re.compile(
    r"(^|[._])(A_log|D|dt_bias"  # of state-space layers
    r"|e_score_correction_bias|expert_bias|routing_bias"  # of routers
    # of quantized formats
    r"|scales?|scale_inv|scale_[0-9]+|zeros|zero_points?|qzeros|absmax|quant_map|SCB|amax|inv_freq)$"
)
"""Names of tensors that servers do not multiply with in the dtype of most weights, but keep as a checkpoint
has them.
"""


def dtype_for(name: str, rule: str) -> str:
    """Return a tensor's dtype, `auto` or `keep`, by a rule like `auto,*.router.*=float32`; the last match
    counts.

    Without a match, what servers keep exactly is kept, whatever the rule's first dtype is.
    """
    default, *parts = rule.split(",")
    default = "keep" if _EXACT.search(name) else default
    patterns = (part.rpartition("=") for part in reversed(parts))
    return next((dtype for pattern, _, dtype in patterns if fnmatch.fnmatchcase(name, pattern)), default)


@functools.cache
def served_name(name: str, dtype: torch.dtype, rule: str) -> str:
    """Return the name of the dtype in which a tensor of this name and dtype is published by a rule; see
    `dtype_for`.
    """
    return dtype_name(_served(dtype, dtype_for(name, rule)), name)


def _served(given: torch.dtype, dtype: str) -> torch.dtype:
    if dtype == "keep" or not given.is_floating_point or given.itemsize < 2:
        return given
    if dtype == AUTO:
        return given if given.itemsize == 2 else torch.bfloat16
    return getattr(torch, dtype)


def served_dtype(tensor: torch.Tensor, dtype: str) -> torch.dtype:
    """Return the dtype that `cast` gives a tensor."""
    return _served(tensor.dtype, dtype)


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Cast floats of 16 bits or more to this dtype, to nearest even; for `auto` and `keep` see
    `PublisherSettings`.
    """
    return tensor.detach().to(served_dtype(tensor, dtype))
