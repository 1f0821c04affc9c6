"""Specs of tensors.

Shape suffixes: N elements of a tensor, K changed elements of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from deltasync.errors import ModelMismatchError

_DTYPES = {
    "bfloat16": (2, "BF16"),
    "float16": (2, "F16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "int8": (1, "I8"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "int16": (2, "I16"),
    "int32": (4, "I32"),
    "int64": (8, "I64"),
}
ITEM_BYTES = {name: size for name, (size, _) in _DTYPES.items()}
"""Bytes of one element, by torch's name of the dtype without `torch.`."""

SAFETENSORS_DTYPES = {name: entry for name, (_, entry) in _DTYPES.items()}
"""The name that safetensors has for each of these dtypes."""


def index_dtype(element_count: int) -> np.dtype:
    """Return the dtype of flat indices into a tensor: int32, or int64 from 2**31 elements on."""
    return np.dtype(np.int32 if element_count < 1 << 31 else np.int64)


Region = tuple[int, tuple[tuple[int, int], ...]]
"""Elements of a flat tensor: the index of the first, then (size, stride) of each dimension, the largest
stride first.
"""


def region_size(region: Region) -> int:
    """Return the number of elements."""
    return math.prod(size for size, _ in region[1])


def region_end(region: Region) -> int:
    """Return the index behind the region's last element; the region's offset if it is empty."""
    offset, dims = region
    return offset + 1 + sum((size - 1) * stride for size, stride in dims) if region_size(region) else offset


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch's name without `torch.`) and shape of a checkpoint tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """N, 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.element_count * self.item_bytes

    @property
    def bits_dtype(self) -> np.dtype:
        """The unsigned integer dtype of the element's bit pattern."""
        return np.dtype(f"u{self.item_bytes}")

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


def weight_elements(specs: Iterable[TensorSpec]) -> int:
    """Return the number of elements of a model."""
    return sum(spec.element_count for spec in specs)


def weight_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the number of bytes of a model's weights."""
    return sum(spec.nbytes for spec in specs)


def check_specs(channel: dict[str, TensorSpec], model: dict[str, TensorSpec], who: str) -> None:
    """Compare the tensor table of a model with a channel's.

    Raises:
        ModelMismatchError: names the first few tensors that are missing, unknown or different.
    """
    if channel == model:
        return
    problems = [f"{name} is missing" for name in channel.keys() - model.keys()]
    problems += [f"{name} is not in the channel" for name in model.keys() - channel.keys()]
    problems += [
        f"{model[name]} should be {channel[name]}"
        for name in channel.keys() & model.keys()
        if model[name] != channel[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + ("; ..." if len(problems) > 5 else "")
        raise ModelMismatchError(f"{who} does not match the channel in {len(problems)} tensors: {shown}.")
