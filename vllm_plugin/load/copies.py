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

_HEAD = 1024  # elements that are compared first


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
    by_size: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        by_size.setdefault((parameter.numel(), parameter.device), []).append(parameter.data)
    copies = []
    for holder, name, tensor in _attributes(model):
        is_known = name in NAMES
        if not is_known and (_storage(tensor) in loaded or not _is_copy(tensor, by_size)):
            continue
        copy = DerivedCopy(holder, name, dtype)
        if is_known or not _refreshes(copy, tensor):
            raise ModelMismatchError(
                f"vLLM keeps what it made from a weight in {copy} and does not make it anew in place, so this model cannot "
                "be updated."
            )
        copies.append(copy)
    return copies


def _attributes(model: torch.nn.Module) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yield tensors in attributes and buffers of modules, and of objects that those hold, such as an attention's `impl`."""
    seen: set[int] = set()
    for module in model.modules():
        plain = [value for value in vars(module).values() if _is_plain(value)]
        for holder in (module, *plain):
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for name, value in (*vars(holder).items(), *_buffers(holder).items()):
                tensors = value if isinstance(value, tuple) else (value,)
                yield from ((holder, name, each) for each in tensors if _may_be_made(name, each))


def _buffers(holder: Any) -> dict[str, torch.Tensor | None]:
    return holder._buffers if isinstance(holder, torch.nn.Module) else {}


def _may_be_made(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or name in NAMES)


def _is_plain(value: object) -> bool:
    """Whether a value is an object of vLLM's that processes a module's weights."""
    return not isinstance(value, torch.nn.Module | torch.Tensor | type) and callable(
        getattr(value, "process_weights_after_loading", None)
    )


def _is_copy(tensor: torch.Tensor, by_size: dict[tuple[int, torch.device], list[torch.Tensor]]) -> bool:
    sources = by_size.get((tensor.numel(), tensor.device), ())
    if not sources or tensor.numel() < 2:  # most have no source, such as the KV cache, which is too large to compare
        return False
    flat = tensor.detach().reshape(-1)
    if bool((flat[:_HEAD] == flat[0]).all()):
        return False  # one repeated value: scales and the like, which values cannot tell from weights
    alike = (source.reshape(-1) for source in sources)
    return any(_equal(flat[:_HEAD], source[:_HEAD]) and _equal(flat, source) for source in alike)


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
