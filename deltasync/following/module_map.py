"""Find the tensors of a channel among those of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live import Segment
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import dtype_name, int_view

Names = Callable[[str], str | Sequence[str] | None]
"""Returns the channel's name for a tensor of a module's state_dict: one name, several for tensors that lie one after the
other, or are stacked, along the first dimension, or None for a tensor that the channel does not have."""

_WRAPPERS = ("_orig_mod.", "base_model.model.")  # torch.compile's, peft's
_AROUND_BASE = ".base_layer."  # peft's


def plain_name(name: str) -> str | None:
    """Return a tensor's checkpoint name in a module that torch.compile or peft has wrapped; None for an adapter's own."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return None if ".lora_" in name else name.replace(_AROUND_BASE, ".")


def places(
    state: Mapping[str, Any], specs: Mapping[str, TensorSpec], names: Names
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Find the channel's tensors in a model's state_dict, whose tensors are live memory.

    Returns:
        A view of live memory for each tensor, with its shape and dtype; and the ties. A tensor that shares its memory with
        another is a copy instead of a view, and the second mapping has the name of the other.

    Raises:
        ModelMismatchError: a tensor is on one side only, or has another shape or dtype there.
    """
    found: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    owners: dict[tuple[int, int, torch.device], str] = {}  # by memory
    strange: dict[str, torch.Tensor] = {}  # whose names the channel does not have
    for own, tensor in state.items():
        named = names(own)
        if named is None or not isinstance(tensor, torch.Tensor):
            continue
        if not any(name in specs for name in ([named] if isinstance(named, str) else named)):
            strange[own] = tensor
            continue
        for name, part in _parts(own, tensor, named, specs):
            other = owners.setdefault(_memory(part), name)
            if other != name:
                ties[name], part = other, part.detach().clone()
            elif name in found:
                raise ModelMismatchError(f"Two tensors of the module are {name}, the second of them {own}.")
            found[name] = part
    unknown = [own for own, tensor in strange.items() if _memory(tensor) not in owners]
    lacking = specs.keys() - found.keys()
    if unknown or lacking:
        sides = ((lacking, "is in the channel and not in the module"), (unknown, "is in the module and not in the channel"))
        problems = "; ".join(f"{min(side)} (and {len(side) - 1} more) {where}" for side, where in sides if side)
        raise ModelMismatchError(f"{problems}. Map the names of the module to the channel's by `names`.")
    return found, ties


def _parts(
    own: str, tensor: torch.Tensor, named: str | Sequence[str], specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the channel's tensors that lie in one of the module's, each checked against its spec."""
    if tensor.is_meta:
        raise ModelMismatchError(f"{own} is on the meta device: it has no memory to be patched.")
    first = 0
    for name in [named] if isinstance(named, str) else named:
        spec = specs.get(name)
        is_stacked = spec is not None and not isinstance(named, str) and tensor.ndim > len(spec.shape)
        rows = 0 if spec is None or isinstance(named, str) or not spec.shape else 1 if is_stacked else spec.shape[0]
        part = tensor if isinstance(named, str) else tensor.detach()[first : first + rows]
        part = part.squeeze(0) if is_stacked else part
        if spec is None or (dtype_name(part.dtype, own), tuple(part.shape)) != (spec.dtype, spec.shape):
            wanted = "nothing" if spec is None else f"{spec.dtype} of shape {list(spec.shape)}"
            raise ModelMismatchError(
                f"{own} is {dtype_name(part.dtype)} of shape {list(part.shape)} where {name} should lie, which is {wanted} "
                "in the channel."
            )
        first += rows
        yield name, part
    if first not in (0, tensor.shape[0] if tensor.ndim else 0):
        raise ModelMismatchError(f"{own} has {tensor.shape[0]} rows, and what lies in it {first}.")


def _memory(tensor: torch.Tensor) -> tuple[int, int, torch.device]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.device


def segment(tensor: torch.Tensor) -> Segment:
    """Return the segment of a whole tensor in its own memory, with any strides."""
    live = tensor.detach()
    if live.is_contiguous():
        return Segment(int_view(live), (1,), 0)
    strides = torch.empty(live.shape, device="meta").stride()
    return Segment(live.view(int_view(live[:0]).dtype), strides, 0)
