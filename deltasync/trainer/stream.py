"""What `publish` reads: names and tensors, and which part of each a process holds: all of it, a range of its
elements, or what cannot be published from here.

Also FP8: `fp8_blocks` quantizes weights with a scale for each block, before they are compared. Far fewer bits
change than in bfloat16. The layout is that of DeepSeek-V3's checkpoints, which vLLM and transformers load
with `QUANTIZATION` in config.json: a matrix `name` becomes `name` in float8_e4m3fn and `name + "_scale_inv"`
in float32, one factor for each block of 128 by 128 weights. Scales are powers of two: one that followed the
largest weight of its block exactly would change at every step, and with it many values that are close to a
rounding boundary.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parameter import is_lazy

from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.publish import detect
from deltasync.publish.ranges import Stream as Stream
from deltasync.publish.ranges import Tensor, Tensors
from deltasync.publish.ranges import TensorRange as TensorRange
from deltasync.tensors.bits import address_of, cast, dtype_for, is_wrapper, readable
from deltasync.trainer.form import LEFT_OUT, live_state
from deltasync.trainer.form import plain_names as plain_names
from deltasync.trainer.form import unwrapped as unwrapped


def tensors_of(stream: Stream, alone: bool = False) -> Tensors:
    """Return the stream's pairs, not yet checked (`pair_of`); raise ModelMismatchError if it has none or is
    none. `alone` is as in `module_tensors`.
    """
    if isinstance(stream, torch.nn.Module):
        stream = module_tensors(stream, alone)
    elif callable(stream):
        stream = stream()
    pairs = stream.items() if isinstance(stream, Mapping) else stream
    if isinstance(pairs, str | torch.Tensor) or not isinstance(pairs, Iterable):
        wanted = "a module, a mapping of names to tensors, or pairs of name and tensor"
        raise ModelMismatchError(f"publish() takes {wanted}, not {_shown(stream)}.")
    if isinstance(pairs, Sized) and not len(pairs):
        raise ModelMismatchError("There is no tensor to publish.")
    return pairs


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """As `module_tensors`, by one call for each module; None for one that has to be walked (`live_state`)."""
    if (state := live_state(module)) is not None:
        for name in _doubled(_sharing(state), {}, _tied(module)):
            del state[name]
    return state


def _tied(module: torch.nn.Module) -> list[str]:
    """Return patterns of the names that from_pretrained ties to another one: keys of a dict from transformers 5
    on.
    """
    return list(getattr(unwrapped(module), "_tied_weights_keys", None) or ())


def module_tensors(module: torch.nn.Module, alone: bool = False) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by the names of a checkpoint: without wrappers, each memory
    once.

    They are the live weights, or alias them. Tied ones are one parameter, or begin at one address with one
    dtype, shape and stride; of these it is that which `from_pretrained` ties the others to, else the first.
    Of a model that FSDP2 or ZeRO-3 shards they are this process's shards, also after an evaluation, which
    leaves some parameters gathered. `alone` says whether one of several processes publishes.

    Raises:
        ConfigError: FSDP1 shards a part of the module; or it is published alone, and DDP leaves out some of it.
        ModelMismatchError: its state_dict has a value that is no tensor, such as packed weights or an extra
            state.
    """
    if (live := live_tensors(module)) is not None:
        return live
    if alone:
        _check_ignored(module)
    state, held = _walked(module)
    doubled = _doubled(state, held, _tied(module))
    return {name: tensor for name, tensor in state.items() if name not in doubled}


def _walked(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the state of any module, and its live parameters and buffers. Raises as `module_tensors`."""
    for part in module.modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(part).__mro__):
            raise ConfigError(f"The parameters of {type(part).__name__} are sharded by FSDP1. {FSDP1_CURE}")
    module = unwrapped(module)
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()
    plain = plain_names(module)
    params = {plain(name): param for name, param in module.named_parameters(remove_duplicate=False)}
    state = {plain(name): value for name, value in module.state_dict().items() if value is not None}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ModelMismatchError(
                f"{name} in the module's state_dict is no tensor but a {type(value).__name__}, which no "
                "channel carries: "
                "publish the pairs of name and tensor that replicas need, instead of the module."
            )
    # A state dict has detached tensors, without what frameworks have noted about parameters.
    state |= {name: param for name, param in params.items() if _is_marked(param) and name in state}
    buffers = {plain(name): buffer for name, buffer in module.named_buffers(remove_duplicate=False)}
    return state, buffers | params


def _sharing(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those of many tensors that may share memory; no Python is called for the others."""
    try:
        address_T = detect.addresses_of([*state.values()])
    except RuntimeError:  # one of another layout has none
        return dict(state)
    found, count = np.unique(address_T, return_counts=True)
    names = [*state] if len(found) < len(state) else []
    return {names[t]: state[names[t]] for t in np.flatnonzero(np.isin(address_T, found[count > 1]))}


def _doubled(
    state: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor], tied: Sequence[str]
) -> set[str]:
    """Return the names of tensors that have the memory of another one. `held` has live ones of detached
    ones.
    """
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        identity: tuple[Any, ...] = (id(held.get(name, tensor)),)
        if address := address_of(tensor):
            identity = (tensor.device, address, tensor.dtype, tensor.shape, tensor.stride())
        known = kept.setdefault(identity, name)
        if known != name and any(re.search(pattern, known) for pattern in tied):
            kept[identity] = name
    return state.keys() - kept.values()


def stays(pairs: Tensors) -> bool:
    """Whether a stream keeps its tensors until the publish returns (`Stream`), and each of them has its
    values in memory.
    """
    if not isinstance(pairs, ItemsView | Sequence):
        return False
    given: Iterator[Any] = (tensor for _, tensor in map(pair_of, pairs))
    held = (
        tensor.held if isinstance(tensor, TensorRange) else getattr(tensor, "_local_tensor", tensor)
        for tensor in given
    )
    return not any(map(is_wrapper, held))


def _is_marked(param: torch.nn.Parameter) -> bool:
    """Whether a framework has noted on a parameter that processes hold different parts of it, or different
    ones.
    """
    is_local = not getattr(param, "allreduce", True) or getattr(param, "tensor_model_parallel", False)
    return hasattr(param, "ds_id") or is_local


def by_rows(stream: Stream) -> Callable[[], Tensors]:
    """Return a stream in which every `DTensor` is cut by its first dimension, so that a rank's elements are a
    range.

    Tensor parallelism cuts half of its matrices by columns. Such a tensor is redistributed when it is read,
    which is a collective: the tensors come in the same order on all ranks.
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


MARKS = frozenset(("ds_id", "_is_flat_param", "_fsdp_flattened"))
"""Attributes by which DeepSpeed and FSDP1 mark a plain tensor of which `part_of` may find a shard."""


def part_of(name: str, tensor: torch.Tensor | TensorRange) -> TensorRange | None:
    """Return the range of a tensor that this process holds as a shard; None if it holds the tensor whole.

    Shards are a `TensorRange`, a `DTensor`, and parameters of DeepSpeed's ZeRO-3. Of copies over a dimension
    of a mesh only the first one is a range, the others are empty.

    Raises:
        ConfigError: it is a shard that is no range, or of which this process does not know the place.
    """
    if isinstance(tensor, TensorRange):
        return tensor
    if hasattr(tensor, "placements"):  # a DTensor, whose import takes seconds
        return _range_of_dtensor(name, tensor)
    if hasattr(tensor, "ds_id"):
        return _range_of_zero(name, tensor)
    if getattr(tensor, "_is_flat_param", False) or getattr(tensor, "_fsdp_flattened", False):
        raise ConfigError(f"{name} is sharded by FSDP1. {FSDP1_CURE}")
    if (
        tensor.shape == (0,)
        and tensor.is_floating_point()
        and dist.is_initialized()
        and dist.get_world_size() > 1
    ):
        raise ConfigError(
            f"{name} is empty in this process, as FSDP1 and ZeRO-3 leave what other processes hold. Publish "
            "the module "
            "instead of its tensors; if the tensor is empty everywhere, leave it out."
        )
    return None


def check_alike(name: str, tensor: torch.Tensor) -> None:
    """Check that no framework has marked a plain tensor as one that differs between processes.

    Raises:
        ConfigError: DeepSpeed or Megatron has: it is an expert, or a part of a tensor.
    """
    is_expert = getattr(tensor, "allreduce", True) is False
    # DeepSpeed's, whose experts are on all ranks
    if is_expert and getattr(tensor, "group_name", "") != "ep_size_1":
        raise ConfigError(
            f"{name} belongs to an expert: other processes hold other ones under this name. {_LOCAL_CURE}"
        )
    if getattr(tensor, "tensor_model_parallel", False):
        # which marks parameters also where it cuts none
        megatron = sys.modules.get("megatron.core.parallel_state")
        if megatron is None or megatron.get_tensor_model_parallel_world_size() > 1:
            raise ConfigError(f"{name} is a part of a tensor that tensor parallelism cuts. {_LOCAL_CURE}")


def _check_ignored(module: torch.nn.Module) -> None:
    """Check that DDP keeps all parameters of a module equal in all processes.

    Raises:
        ConfigError: it was told to leave some out, as those of local experts are.
    """
    for part in module.modules():
        ignored = {*(getattr(part, LEFT_OUT, None) or ())}
        if left := sorted(ignored & {name for name, param in part.named_parameters() if param.requires_grad}):
            raise ConfigError(
                f"{left[0]} is left out of DDP, so other processes hold other values. {_LOCAL_CURE}"
            )


_LOCAL_CURE = (
    "Publish from all ranks, each with Publisher(..., group=group), and give what differs the names of the "
    "checkpoint, or a "
    "TensorRange."
)

FSDP1_CURE = (
    "Use FSDP2 (fully_shard), or publish from one rank, without a group, what get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) gathers on all ranks."
)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor without elements, of a tensor's dtype and device."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _range_of_zero(name: str, param: Any) -> TensorRange:
    """The part of a ZeRO-3 parameter that this process holds. DeepSpeed itself is not imported.

    ZeRO-3 cuts the flattened parameter into as many equal parts as there are processes, padded at the end.
    This process's is in `param.ds_tensor`, in the dtype of training, also while the parameter is gathered for
    a layer's forward.
    """
    held, shape = param.ds_tensor, tuple(param.ds_shape)
    total = math.prod(shape)
    is_spread = held.numel() == -(-total // dist.get_world_size())
    if held.status.name != "AVAILABLE" or hasattr(held, "ds_quant_scale") or not is_spread:
        raise ConfigError(
            f"{name} is sharded by DeepSpeed in a way that cannot be published: offloaded to NVMe, "
            "quantized, or over some "
            "of the processes only. Use ZeRO-3 without these; offloading to the CPU is fine."
        )
    start = min(dist.get_rank() * held.numel(), total)
    return TensorRange(held[: total - start], start, shape)


def _range_of_dtensor(name: str, tensor: Any) -> TensorRange:
    shape, mesh, local = tuple(tensor.shape), tensor.device_mesh, tensor.to_local().detach()
    nothing = TensorRange(empty_like(local), 0, shape)
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return nothing  # this rank is not in the mesh
    first, extent = [0] * len(shape), list(shape)
    for mesh_dim, dim in _cuts(name, tensor):
        chunk = -(-extent[dim] // mesh.size(mesh_dim))
        begin = min(coordinates[mesh_dim] * chunk, extent[dim])
        first[dim], extent[dim] = first[dim] + begin, min(chunk, extent[dim] - begin)
    if any(each.is_replicate() and coordinates[at] for at, each in enumerate(tensor.placements)):
        return nothing  # a copy
    if tuple(local.shape) != tuple(extent):
        raise ConfigError(
            f"{name}, {list(shape)} placed as {tensor.placements}, holds {list(local.shape)} where torch's "
            "chunks have "
            f"{extent}, so its place is not known. Cut it as torch.chunk does, or publish a TensorRange."
        )
    if 0 in extent:
        return nothing
    leading = next((dim for dim, size in enumerate(extent) if size > 1), len(extent))
    if extent[leading + 1 :] != list(shape[leading + 1 :]):
        raise ConfigError(
            f"{name} is placed as {tensor.placements}, so a rank's elements are no range. Publish "
            "by_rows(model), from "
            "deltasync.trainer.stream, on all ranks: it cuts such tensors by their first dimension instead."
        )
    start = sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(first))
    return TensorRange(local, start, shape)


def _cuts(name: str, tensor: Any) -> list[tuple[int, int]]:
    """The cuts that make a `DTensor`'s shard, in their order: which dimension of the mesh cuts which of the
    tensor.

    `_StridedShard`, as FSDP2 makes it over tensor parallelism, cuts after the later dimensions of the mesh
    have.
    """
    cuts, after = list[tuple[int, int]](), list[tuple[int, int]]()
    for at, placement in reversed([*enumerate(tensor.placements)]):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ConfigError(
                f"{name} is placed as {placement}: no rank holds its values. Publish "
                "tensor.redistribute(placements=...), "
                "with Replicate() in its place, on all ranks."
            )
        dim %= tensor.ndim
        split = getattr(placement, "split_factor", None)
        if split is None:
            cuts.insert(0, (at, dim))
            continue
        if split != math.prod(tensor.device_mesh.size(other) for other, cut in (*cuts, *after) if cut == dim):
            raise ConfigError(
                f"{name} is placed as {tensor.placements}, which no trainer is known to do. Publish full "
                "tensors."
            )
        after.append((at, dim))
    return cuts + after


def is_range(tensor: Any) -> bool:
    """Whether a `DTensor`'s shard is a range of the whole tensor, on all ranks."""
    return all(
        placement.is_replicate() or math.prod(tensor.shape[: placement.dim % tensor.ndim]) == 1
        for placement in tensor.placements
        if not placement.is_partial()
    )


def gathered_places() -> set[int]:
    """`places` of the parameters that FSDP2 has gathered and frees again; mixed precision and float8 have
    rounded them.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    found = set[int]()
    if fsdp is not None:
        from torch.distributed._composable_state import _module_state_mapping

        states = [state() for state in list(_module_state_mapping.values())]
        groups = (
            group
            for state in states
            if state is not None
            for group in getattr(state, "_fsdp_param_groups", ())
        )
        for param in (param for group in groups for param in group.fsdp_params):
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                found |= addresses_of(getattr(whole, "_local_tensor", whole))
    return found


def addresses_of(tensor: torch.Tensor) -> set[int]:
    """Return the data pointers of a tensor, or of the tensors inside a wrapper subclass."""
    if not is_wrapper(tensor):
        return {address_of(tensor)} - {0}
    if not hasattr(tensor, "__tensor_flatten__"):
        return set()
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return {place for each in inner if isinstance(each, torch.Tensor) for place in addresses_of(each)}


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
        # a DTensor, whose import takes seconds
        if isinstance(tensor, TensorRange) or hasattr(tensor, "placements"):
            raise ConfigError(
                f"{name} is a shard, which cannot be quantized by blocks; train with DDP, or serve bfloat16."
            )
        tensor = readable(name, tensor)
        if (
            tensor.ndim != 2
            or not tensor.is_floating_point()
            or not name.endswith(".weight")
            or _KEPT.search(name)
        ):
            yield name, cast(tensor, dtype_for(name, "bfloat16"))
            continue
        values, scale = quantize(tensor)
        yield name, values
        yield name + SCALE, scale


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, float8_e4m3fn of the same shape, and scales, float32[ceil(rows / 128), ceil(columns /
    128)].
    """
    rows, columns = weight.shape
    padded = functional.pad(weight.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    # The least power of two that brings the largest weight into range; 1 for a block of zeros.
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=(1, 3)) / _LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scale = torch.where(mantissa == 0, torch.ones_like(scale), scale)
    scaled = blocks / scale[:, None, :, None]
    # which has no infinity
    values = torch.where(torch.isinf(scaled), math.nan, scaled).to(torch.float8_e4m3fn)
    return values.reshape(padded.shape)[:rows, :columns].contiguous(), scale
