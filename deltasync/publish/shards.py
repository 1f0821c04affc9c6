"""Which part of a tensor a process holds: all of it, a range of its elements, or what cannot be published from here."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from deltasync.errors import ConfigError
from deltasync.tensors.bits import address_of, is_wrapper


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRange:
    """A range of a checkpoint tensor, for trainers that shard in another way than those that `part_of` knows.

    Attributes:
        held: The elements, row-major; any shape, device and floating dtype, may be empty. May be a wrapper subclass.
        start: Flat index of the first of them in the whole tensor.
        shape: The whole tensor's shape.
    """

    held: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Flat index behind the last element."""
        return self.start + self.held.numel()


MARKS = frozenset(("ds_id", "_is_flat_param", "_fsdp_flattened"))
"""Attributes by which DeepSpeed and FSDP1 mark a plain tensor of which `part_of` may find a shard."""


def part_of(name: str, tensor: torch.Tensor | TensorRange) -> TensorRange | None:
    """Return the range of a tensor that this process holds as a shard; None if it holds the tensor whole.

    Shards are a `TensorRange`, a `DTensor`, and parameters of DeepSpeed's ZeRO-3. Of copies over a dimension of a mesh only
    the first one is a range, the others are empty.

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
    if tensor.shape == (0,) and tensor.is_floating_point() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"{name} is empty in this process, as FSDP1 and ZeRO-3 leave what other processes hold. Publish the module "
            "instead of its tensors; if the tensor is empty everywhere, leave it out."
        )
    return None


def check_alike(name: str, tensor: torch.Tensor) -> None:
    """Check that no framework has marked a plain tensor as one that differs between processes.

    Raises:
        ConfigError: DeepSpeed or Megatron has: it is an expert, or a part of a tensor.
    """
    is_expert = getattr(tensor, "allreduce", True) is False
    if is_expert and getattr(tensor, "group_name", "") != "ep_size_1":  # DeepSpeed's, whose experts are on all ranks
        raise ConfigError(f"{name} belongs to an expert: other processes hold other ones under this name. {_LOCAL_CURE}")
    if getattr(tensor, "tensor_model_parallel", False):
        megatron = sys.modules.get("megatron.core.parallel_state")  # which marks parameters also where it cuts none
        if megatron is None or megatron.get_tensor_model_parallel_world_size() > 1:
            raise ConfigError(f"{name} is a part of a tensor that tensor parallelism cuts. {_LOCAL_CURE}")


def check_ignored(module: torch.nn.Module) -> None:
    """Check that DDP keeps all parameters of a module equal in all processes.

    Raises:
        ConfigError: it was told to leave some out, as those of local experts are.
    """
    for part in module.modules():
        ignored = {*(getattr(part, "_ddp_params_and_buffers_to_ignore", None) or ())}
        if left := sorted(ignored & {name for name, param in part.named_parameters() if param.requires_grad}):
            raise ConfigError(f"{left[0]} is left out of DDP, so other processes hold other values. {_LOCAL_CURE}")


_LOCAL_CURE = (
    "Publish from all ranks, each with Publisher(..., group=group), and give what differs the names of the checkpoint, or a "
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

    ZeRO-3 cuts the flattened parameter into as many equal parts as there are processes, padded at the end. This process's
    is in `param.ds_tensor`, in the dtype of training, also while the parameter is gathered for a layer's forward.
    """
    held, shape = param.ds_tensor, tuple(param.ds_shape)
    total = math.prod(shape)
    is_spread = held.numel() == -(-total // dist.get_world_size())
    if held.status.name != "AVAILABLE" or hasattr(held, "ds_quant_scale") or not is_spread:
        raise ConfigError(
            f"{name} is sharded by DeepSpeed in a way that cannot be published: offloaded to NVMe, quantized, or over some "
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
            f"{name}, {list(shape)} placed as {tensor.placements}, holds {list(local.shape)} where torch's chunks have "
            f"{extent}, so its place is not known. Cut it as torch.chunk does, or publish a TensorRange."
        )
    if 0 in extent:
        return nothing
    leading = next((dim for dim, size in enumerate(extent) if size > 1), len(extent))
    if extent[leading + 1 :] != list(shape[leading + 1 :]):
        raise ConfigError(
            f"{name} is placed as {tensor.placements}, so a rank's elements are no range. Publish by_rows(model), from "
            "deltasync.publish.stream, on all ranks: it cuts such tensors by their first dimension instead."
        )
    start = sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(first))
    return TensorRange(local, start, shape)


def _cuts(name: str, tensor: Any) -> list[tuple[int, int]]:
    """The cuts that make a `DTensor`'s shard, in their order: which dimension of the mesh cuts which of the tensor.

    `_StridedShard`, as FSDP2 makes it over tensor parallelism, cuts after the later dimensions of the mesh have.
    """
    cuts, after = list[tuple[int, int]](), list[tuple[int, int]]()
    for at, placement in reversed([*enumerate(tensor.placements)]):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ConfigError(
                f"{name} is placed as {placement}: no rank holds its values. Publish tensor.redistribute(placements=...), "
                "with Replicate() in its place, on all ranks."
            )
        dim %= tensor.ndim
        split = getattr(placement, "split_factor", None)
        if split is None:
            cuts.insert(0, (at, dim))
            continue
        if split != math.prod(tensor.device_mesh.size(other) for other, cut in (*cuts, *after) if cut == dim):
            raise ConfigError(
                f"{name} is placed as {tensor.placements}, which no trainer is known to do. Publish full tensors."
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
    """`places` of the parameters that FSDP2 has gathered and frees again; mixed precision and float8 have rounded them."""
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    found = set[int]()
    if fsdp is not None:
        from torch.distributed._composable_state import _module_state_mapping

        states = [state() for state in list(_module_state_mapping.values())]
        groups = (group for state in states if state is not None for group in getattr(state, "_fsdp_param_groups", ()))
        for param in (param for group in groups for param in group.fsdp_params):
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                found |= places(getattr(whole, "_local_tensor", whole))
    return found


def places(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of the memory that a tensor's values come from, of a wrapper subclass those that it tells."""
    if not is_wrapper(tensor):
        return {address_of(tensor)} - {0}
    if not hasattr(tensor, "__tensor_flatten__"):
        return set()
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return {place for each in inner if isinstance(each, torch.Tensor) for place in places(each)}


_PIECE = 1 << 20  # elements


def pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor in flat pieces on the host, views where possible, each with the index of its first element."""
    if tensor.numel() <= _PIECE or tensor.is_contiguous():
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _PIECE):
            yield start, flat[start : start + _PIECE].cpu()
        return
    row = tensor[0].numel()
    rows = max(1, _PIECE // row)
    for number in range(0, len(tensor), rows):
        for start, piece in pieces(tensor[number : number + rows] if rows > 1 else tensor[number]):
            yield number * row + start, piece
