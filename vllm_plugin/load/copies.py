"""Copies of weights, and other tensors made from them, that vLLM keeps beside its parameters in attributes of its layers.

FlashInfer, for example, keeps a float32 copy of the attention sinks. A commit that writes the parameter does not change the
copy, so the layer has to make it again, in place, because captured CUDA graphs hold its address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live.plan import held_tensors
from vllm_plugin.load.layers import holders, is_made, is_object, may_be_made

LATER = {
    "_combined_gate_weight": "_fse_fuse_gate",  # experts whose router and shared expert have one gate: Qwen3-Next on AMD's
    "_merged_conv_weight": None,  # GLM-5 Next
    "_wp_fp32": None,  # its indexer
    "_fused_weight": None,  # Muse Spark, vLLM 0.33
}
"""Attributes that the first forward call makes from weights, and what says that it will, if anything does.

What loading makes is seen by itself; these do not exist yet when a channel is opened.
"""

_HEAD = 1024  # elements that are compared first
_PART = 16  # fewest elements in which a copy of another size is alike


@dataclasses.dataclass(frozen=True)
class DerivedCopy:
    """A copy: `holder.name` is a tensor that was made from a parameter."""

    holder: Any
    name: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{type(self.holder).__name__}.{self.name}"


def find(model: torch.nn.Module, covered: Set[int], reloaded: Set[torch.nn.Module]) -> list[DerivedCopy]:
    """Find the copies that a commit has to refresh, and prove that refreshing works in place. Call it while paused.

    A copy is what loading the weights made or changed, and what begins as a parameter does. Changes live memory and puts it
    back.

    Args:
        model: As vLLM has loaded it.
        covered: Storages that commits write, and their addresses.
        reloaded: Modules that are loaded again with all that they hold.

    Raises:
        ModelMismatchError: a copy is not made again in place.
    """
    parameters = list(model.parameters())
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    loaded = covered | {_storage(tensor) for tensor in model.state_dict().values()}  # vLLM fills other buffers by itself
    by_start: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() > 1:
            by_start.setdefault(_start(parameter.data), []).append(parameter.data)
    copies = []
    for module in model.modules():
        for holder in (module, *filter(is_object, vars(module).values())):
            for name in LATER.keys() & vars(holder).keys():
                asked = LATER[name]
                if asked is None or getattr(holder, asked, True):
                    raise _refusal(DerivedCopy(holder, name, dtype))
    for holder in holders(model):
        for name, tensor in held_tensors(holder).items() if holder not in reloaded else ():
            if _storage(tensor) in loaded or not may_be_made(tensor):
                continue
            if is_made(model, holder, name) or _is_copy(tensor, by_start):
                copy = DerivedCopy(holder, name, dtype)
                if not _refreshes(copy, tensor):
                    raise _refusal(copy)
                copies.append(copy)
    return copies


def _refusal(copy: DerivedCopy) -> ModelMismatchError:
    return ModelMismatchError(
        f"vLLM keeps what it made from a weight in {copy} and does not make it anew in place, so this model cannot be "
        "updated."
    )


def _start(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a tensor and its copies have in common, in any dtype."""
    return tensor.device, *tensor.detach().reshape(-1)[:2].to(torch.bfloat16).tolist()


def _is_copy(tensor: torch.Tensor, by_start: dict[tuple[object, ...], list[torch.Tensor]]) -> bool:
    """Whether a tensor begins as a parameter does, to the end of the shorter one: a copy, or one of several in a row."""
    flat = tensor.detach().reshape(-1)
    for source in by_start.get(_start(tensor), ()):
        size = min(flat.numel(), source.numel())
        if size < _PART and flat.numel() != source.numel():
            continue
        head, part = flat[: min(size, _HEAD)], source.reshape(-1)[:size]
        # One repeated value: scales and the like, which values cannot tell from weights.
        if not (head == head[0]).all() and _equal(head, part[:_HEAD]) and _equal(flat[:size], part):
            return True
    return False


def _equal(copy: torch.Tensor, source: torch.Tensor) -> bool:
    return torch.equal(copy.to(source.dtype), source)


def _refreshes(copy: DerivedCopy, tensor: torch.Tensor) -> bool:
    """Whether the holder makes a copy again in place. Its value is restored."""
    if not callable(getattr(copy.holder, "process_weights_after_loading", None)):
        return False
    held = copy.holder._buffers if isinstance(copy.holder, torch.nn.Module) else {}
    attributes, buffers, before = dict(vars(copy.holder)), dict(held), tensor.clone()
    try:
        with torch.no_grad():
            tensor.neg_().sub_(1)
        refresh([copy])
        return held_tensors(copy.holder)[copy.name] is tensor and torch.equal(tensor, before)
    except Exception:  # noqa: BLE001 - whatever it is, this copy is not made again
        return False
    finally:
        vars(copy.holder).update(attributes)
        held.update(buffers)
        with torch.no_grad():
            tensor.copy_(before)


def refresh(copies: Sequence[DerivedCopy]) -> None:
    """Have the holders make these copies again. Mutates live memory."""
    with torch.no_grad():
        for copy in copies:
            copy.holder.process_weights_after_loading(copy.dtype)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
