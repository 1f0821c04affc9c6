"""What `publish` reads: names and tensors, whole ones or the part of one that a rank of a sharded trainer holds.

Also FP8: `fp8_blocks` quantizes weights with a scale for each block, before they are compared. Far fewer bits change than in
bfloat16. The layout is that of DeepSeek-V3's checkpoints, which vLLM and transformers load with `QUANTIZATION` in
config.json: a matrix `name` becomes `name` in float8_e4m3fn and `name + "_scale_inv"` in float32, one factor for each block
of 128 by 128 weights. Scales are powers of two: one that followed the largest weight of its block exactly would change at
every step, and with it many values that are close to a rounding boundary.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parameter import is_lazy

from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.publish.shards import FSDP1_CURE, TensorRange, is_range
from deltasync.tensors.bits import address_of, cast, dtype_for, is_wrapper, readable

__all__ = [
    "Stream",
    "Tensor",
    "TensorRange",
    "Tensors",
    "by_rows",
    "module_tensors",
    "pair_of",
    "plain_names",
    "stays",
    "tensors_of",
    "unwrapped",
]


Tensor = torch.Tensor | TensorRange
Tensors = Iterable[tuple[str, Tensor]]
Stream = torch.nn.Module | Mapping[str, Tensor] | Tensors | Callable[[], Tensors]
"""A module, for its `module_tensors`; a mapping of names to tensors; pairs of name and tensor; or a function that returns
those, called when they are read.

A mapping, its items or a list keep their tensors until the publish returns; they are compared together. Anything else, such
as a generator, may free or overwrite a tensor as soon as the next one is asked for.
"""


def tensors_of(stream: Stream) -> Tensors:
    """Return the stream's pairs, not yet checked (`pair_of`); raise ModelMismatchError if it has none or is none."""
    if isinstance(stream, torch.nn.Module):
        stream = module_tensors(stream)
    elif callable(stream):
        stream = stream()
    pairs = stream.items() if isinstance(stream, Mapping) else stream
    if isinstance(pairs, str | torch.Tensor) or not isinstance(pairs, Iterable):
        wanted = "a module, a mapping of names to tensors, or pairs of name and tensor"
        raise ModelMismatchError(f"publish() takes {wanted}, not {_shown(stream)}.")
    if isinstance(pairs, Sized) and not len(pairs):
        raise ModelMismatchError("There is no tensor to publish.")
    return pairs


_WRAPPERS = {
    "AveragedModel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Classes that hold a module and add their attribute's name to the names of its tensors, which no checkpoint has."""


def _wrapped(module: torch.nn.Module) -> str | None:
    """The attribute in which a wrapper holds its module; None for any other module."""
    return next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of all wrappers, such as those of `torch.compile` and DDP."""
    while (attribute := _wrapped(module)) is not None:
        module = getattr(module, attribute)
    return module


def plain_names(module: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the wrappers inside of a module from the names of its tensors and modules."""
    found = ((name, _wrapped(part)) for name, part in module.named_modules(remove_duplicate=False))
    inner = {f"{name}.{attribute}".lstrip(".") for name, attribute in found if attribute is not None}

    def plain(name: str) -> str:
        parts = name.split(".") if inner else [name]
        return ".".join(part for end, part in enumerate(parts, start=1) if ".".join(parts[:end]) not in inner)

    return plain


def module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by the names of a checkpoint: without wrappers, each memory once.

    They alias the live weights. Tied ones are one parameter, or begin at one address with one dtype, shape and stride; of
    these it is that which `from_pretrained` ties the others to, else the first. Of a
    model that FSDP2 or ZeRO-3 shards they are this process's shards, also after an evaluation, which leaves some parameters
    gathered.

    Raises:
        ConfigError: FSDP1 shards a part of the module.
    """
    for part in module.modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(part).__mro__):
            raise ConfigError(f"The parameters of {type(part).__name__} are sharded by FSDP1. {FSDP1_CURE}")
    module = unwrapped(module)
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()
    plain = plain_names(module)
    # Patterns of the names that from_pretrained ties to another one: a list, from transformers 5 on a dict.
    tied = list(getattr(module, "_tied_weights_keys", None) or ())
    params = {plain(name): param for name, param in module.named_parameters(remove_duplicate=False)}
    state = {plain(name): value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    # A state dict has detached tensors, without what frameworks have noted about parameters.
    state |= {name: param for name, param in params.items() if _is_marked(param) and name in state}
    held = {plain(name): buffer for name, buffer in module.named_buffers(remove_duplicate=False)} | params
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        identity: tuple[Any, ...] = (id(held.get(name, tensor)),)
        if address := address_of(tensor):
            identity = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        known = kept.setdefault(identity, name)
        if known != name and any(re.search(pattern, known) for pattern in tied):
            kept[identity] = name
    names = set(kept.values())
    return {name: tensor for name, tensor in state.items() if name in names}


def stays(pairs: Tensors) -> bool:
    """Whether a stream keeps its tensors until the publish returns (`Stream`), and each of them has its values in memory."""
    if not isinstance(pairs, ItemsView | Sequence):
        return False
    given: Iterator[Any] = (tensor for _, tensor in map(pair_of, pairs))
    held = (tensor.held if isinstance(tensor, TensorRange) else getattr(tensor, "_local_tensor", tensor) for tensor in given)
    return not any(map(is_wrapper, held))


def _is_marked(param: torch.nn.Parameter) -> bool:
    """Whether a framework has noted on a parameter that processes hold different parts of it, or different ones."""
    is_local = not getattr(param, "allreduce", True) or getattr(param, "tensor_model_parallel", False)
    return hasattr(param, "ds_id") or is_local


def by_rows(stream: Stream) -> Callable[[], Tensors]:
    """Return a stream in which every `DTensor` is cut by its first dimension, so that a rank's elements are a range.

    Tensor parallelism cuts half of its matrices by columns. Such a tensor is redistributed when it is read, which is a
    collective: the tensors come in the same order on all ranks.
    """

    def cut(stream: Stream) -> Iterator[tuple[str, Tensor]]:
        from torch.distributed.tensor import DTensor, Shard

        for name, tensor in map(pair_of, tensors_of(stream)):
            if isinstance(tensor, DTensor) and not is_range(tensor):
                with torch.no_grad():
                    rows = [each if each.is_replicate() else Shard(0) for each in tensor.placements]
                    shard: Any = tensor.detach()
                    yield name, shard.redistribute(placements=rows)
            else:
                yield name, tensor

    return lambda: cut(stream)


def pair_of(pair: object) -> tuple[str, Tensor]:
    """Return a pair that a stream gave, its name without wrappers'.

    Raises:
        ModelMismatchError: it is not a name and a tensor.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ModelMismatchError(f"publish() reads pairs of name and tensor, not {_shown(pair)}.")
    name, tensor = pair
    if not isinstance(name, str):
        raise ModelMismatchError(f"Names of tensors are strings, not {_shown(name)}.")
    if not isinstance(tensor, Tensor):
        hint = "; torch.from_numpy makes one" if type(tensor).__module__ == "numpy" else ""
        raise ModelMismatchError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor{hint}.")
    if isinstance(tensor, torch.Tensor) and is_lazy(tensor):
        raise ModelMismatchError(f"{name} is not initialized; run a forward first, which gives it its shape.")
    if isinstance(tensor, torch.Tensor) and tensor.is_nested:
        raise ModelMismatchError(f"{name} is a nested tensor, which is not supported.")
    return _plain_name(name), tensor


_WRAPPER_NAMES = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Attributes that no model has of itself, and no checkpoint."""


def _plain_name(name: str) -> str:
    if not any(wrapper in name for wrapper in _WRAPPER_NAMES):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def _shown(given: object) -> str:
    return "a Tensor" if isinstance(given, torch.Tensor) else f"{given!r:.100}"


BLOCK = 128
SCALE = "_scale_inv"
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
"""`quantization_config` of a model that `fp8_blocks` quantized."""

_LARGEST = 448.0  # of float8_e4m3fn
_KEPT = re.compile(r"(^|\.)(embed_tokens|wte|lm_head|gate|router)\.weight$")  # and all that are no matrices


def fp8_blocks(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantize the weights of linear layers; embeddings, the output layer, routers and norms become bfloat16.

    Tensors that servers keep exactly are kept, see `dtype_for`.

    Args:
        named_tensors: Whole tensors of a checkpoint; experts one by one.

    Raises:
        ConfigError: a tensor is a shard.
    """
    for name, tensor in named_tensors:
        if isinstance(tensor, TensorRange) or hasattr(tensor, "placements"):  # a DTensor, whose import takes seconds
            raise ConfigError(f"{name} is a shard, which cannot be quantized by blocks; train with DDP, or serve bfloat16.")
        tensor = readable(name, tensor)
        if tensor.ndim != 2 or not tensor.is_floating_point() or not name.endswith(".weight") or _KEPT.search(name):
            yield name, cast(tensor, dtype_for(name, "bfloat16"))
            continue
        values, scale = quantize(tensor)
        yield name, values
        yield name + SCALE, scale


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, float8_e4m3fn of the same shape, and scales, float32[ceil(rows / 128), ceil(columns / 128)]."""
    rows, columns = weight.shape
    padded = functional.pad(weight.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    # The least power of two that brings the largest weight into range; 1 for a block of zeros.
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=(1, 3)) / _LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scale = torch.where(mantissa == 0, torch.ones_like(scale), scale)
    scaled = blocks / scale[:, None, :, None]
    values = torch.where(torch.isinf(scaled), math.nan, scaled).to(torch.float8_e4m3fn)  # which has no infinity
    return values.reshape(padded.shape)[:rows, :columns].contiguous(), scale
