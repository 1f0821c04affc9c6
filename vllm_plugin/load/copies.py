"""Copies of weights, and other tensors made from them, that vLLM keeps beside its parameters in attributes of its layers.

FlashInfer, for example, keeps a float32 copy of the attention sinks. A commit that writes the parameter does not change the
copy, so the layer has to make it again, in place, because captured CUDA graphs hold its address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deltasync.errors import ModelMismatchError

NAMES = frozenset(
    (
        "W_UK_T_dcp_qrep",  # latent attention shared over context-parallel ranks: another order
        "_w_uk_packed",  # latent attention on CPUs with AMX
        "_wo_a_packed",  # DeepSeek V4 on CPUs
        "hc_attn_fn_broadcast",  # DeepSeek V4: a sum
        "_fused_w13_fp8",  # the vision tower of dots3: quantized
        "decode_conv1d_weight",  # Kimi K3 on AMD's accelerators, vLLM 0.33: another order
        "mono942",  # DeepSeek V4.1 on AMD's accelerators, vLLM 0.33: packed
    )
)
"""Attributes made from weights in a form that their values do not show: reordered, packed, quantized or summed."""

LATER = {
    "_combined_gate_weight": "_fse_fuse_gate",  # experts whose router and shared expert have one gate: Qwen3-Next on AMD's
    "_merged_conv_weight": None,  # GLM-5 Next
    "_wp_fp32": None,  # its indexer
    "_fused_weight": None,  # Muse Spark, vLLM 0.33
}
"""Attributes that the first forward call makes from weights, and what says that it will, if anything does."""

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


def find(model: torch.nn.Module) -> list[DerivedCopy]:
    """Find the copies that a commit has to refresh, and prove that refreshing works in place. Call it while paused.

    Changes live memory and puts it back.

    Raises:
        ModelMismatchError: a copy is not made again in place.
    """
    parameters = list(model.parameters())
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    loaded = {_storage(tensor) for tensor in model.state_dict().values()}  # vLLM fills other buffers by itself
    by_start: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() > 1:
            by_start.setdefault(_start(parameter.data), []).append(parameter.data)
    copies = []
    for holder in _holders(model):
        for name in LATER.keys() & vars(holder).keys():
            asked = LATER[name]
            if asked is None or getattr(holder, asked, True):
                raise _refusal(DerivedCopy(holder, name, dtype))
        for name, tensor in _tensors(holder):
            is_known = name in NAMES
            if not is_known and (_storage(tensor) in loaded or not _is_copy(tensor, by_start)):
                continue
            copy = DerivedCopy(holder, name, dtype)
            if is_known or not _refreshes(copy, tensor):
                raise _refusal(copy)
            copies.append(copy)
    return copies


def _refusal(copy: DerivedCopy) -> ModelMismatchError:
    return ModelMismatchError(
        f"vLLM keeps what it made from a weight in {copy} and does not make it anew in place, so this model cannot be "
        "updated."
    )


def _holders(model: torch.nn.Module) -> Iterator[Any]:
    """Yield modules, and objects that those hold, such as an attention's `impl`."""
    seen: set[int] = set()
    for module in model.modules():
        for holder in (module, *filter(_is_plain, vars(module).values())):
            if id(holder) not in seen:
                seen.add(id(holder))
                yield holder


def _tensors(holder: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the attributes and buffers of an object that may be made from weights."""
    for name, value in (*vars(holder).items(), *_buffers(holder).items()):
        tensors = value if isinstance(value, tuple) else (value,)
        yield from ((name, each) for each in tensors if _may_be_made(name, each))


def _buffers(holder: Any) -> dict[str, torch.Tensor | None]:
    return holder._buffers if isinstance(holder, torch.nn.Module) else {}


def _may_be_made(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or name in NAMES)


def _is_plain(value: object) -> bool:
    """Whether a value is an object of vLLM's that processes a module's weights, or makes something of them later."""
    if isinstance(value, torch.nn.Module | torch.Tensor | type) or not hasattr(value, "__dict__"):
        return False
    return callable(getattr(value, "process_weights_after_loading", None)) or not LATER.keys().isdisjoint(vars(value))


def _start(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a tensor and its copies have in common, in any dtype."""
    return tensor.device, *tensor.detach().reshape(-1)[:2].to(torch.bfloat16).tolist()


def _is_copy(tensor: torch.Tensor, by_start: dict[tuple[object, ...], list[torch.Tensor]]) -> bool:
    """Whether a tensor begins as a parameter does, to the end of the shorter one: a copy, or one of several in a row."""
    if tensor.is_meta or tensor.numel() < 2:
        return False
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
    attributes, buffers, before = dict(vars(copy.holder)), dict(_buffers(copy.holder)), tensor.clone()
    try:
        with torch.no_grad():
            tensor.neg_().sub_(1)
        refresh([copy])
        return getattr(copy.holder, copy.name) is tensor and torch.equal(tensor, before)
    except Exception:  # noqa: BLE001 - whatever it is, this copy is not made again
        return False
    finally:
        vars(copy.holder).update(attributes)
        _buffers(copy.holder).update(buffers)
        with torch.no_grad():
            tensor.copy_(before)


def refresh(copies: Sequence[DerivedCopy]) -> None:
    """Have the holders make these copies again. Mutates live memory."""
    with torch.no_grad():
        for copy in copies:
            copy.holder.process_weights_after_loading(copy.dtype)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
