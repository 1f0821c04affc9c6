"""Tensors of wrapper subclasses, as quantized and float8 weights are: without memory of their own, at address
0.

They stand for torchao's, which the tests do not install: `Scaled` for int8 and NF4 weights, `Forwarding` for
the float8 weights of FSDP2, and the others for classes that tell their values in one way only, or not at all.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """int8 values times a scale, of which every operation computes the values."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Quantize a weight."""
        scale = weight.detach().abs().amax() / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        """The values, of the dtype of the scale."""
        return self.values.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].values, args[0].scale)
        if func is aten.clone.default:
            return cls(args[0].values.clone(), args[0].scale.clone())
        args, kwargs = tree_map_only(cls, cls.plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class OnlyDequantized(Scaled):
    """One whose values `dequantize` alone tells, as most of torchao's inference formats."""

    def dequantize(self) -> torch.Tensor:
        return self.plain()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (aten.detach.default, aten.clone.default):
            raise AssertionError("not implemented\nby this class")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Mute(OnlyDequantized):
    """One that does not tell its values."""

    def dequantize(self) -> torch.Tensor:
        raise NotImplementedError("dequantize")


class Again(OnlyDequantized):
    """One that answers with itself."""

    def dequantize(self) -> torch.Tensor:
        return self


class Forwarding(torch.Tensor):
    """Another tensor, wrapped again by each operation with which FSDP2 cuts a parameter."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.held, (args, kwargs or {}))
        found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, found) if func in _CUTTING else found


_CUTTING = {
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
}
