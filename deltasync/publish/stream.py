"""What `publish` reads: names and tensors, whole ones or the part of one that a rank of a sharded trainer holds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch

from deltasync.errors import ConfigError, ModelMismatchError


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRange:
    """A range of a checkpoint tensor, for trainers that shard in another way than FSDP2's `DTensor`, such as ZeRO.

    Attributes:
        held: The elements, row-major; any shape, device and floating dtype, may be empty.
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
    """Return parameters and persistent buffers by the names of a checkpoint: without wrappers, each storage once.

    They alias the live weights. Of tied ones it is that which `from_pretrained` ties the others to, else the first.
    """
    module = unwrapped(module)
    plain = plain_names(module)
    # Patterns of the names that from_pretrained ties to another one: a list, from transformers 5 on a dict.
    tied = list(getattr(module, "_tied_weights_keys", None) or ())
    params = {plain(name): param for name, param in module.named_parameters(remove_duplicate=False)}
    state = {plain(name): value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        storage: tuple[Any, ...] = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if not tensor.numel() or hasattr(tensor, "placements"):  # of a shard, this process may hold nothing
            storage = (id(params.get(name, name)),)
        known = kept.setdefault(storage, name)
        if known != name and any(re.search(pattern, known) for pattern in tied):
            kept[storage] = name
    names = set(kept.values())
    return {name: tensor for name, tensor in state.items() if name in names}


def pair_of(pair: object) -> tuple[str, Tensor]:
    """Return a pair that a stream gave; raise ModelMismatchError if it is not a name and a tensor."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ModelMismatchError(f"publish() reads pairs of name and tensor, not {_shown(pair)}.")
    name, tensor = pair
    if not isinstance(name, str):
        raise ModelMismatchError(f"Names of tensors are strings, not {_shown(name)}.")
    if not isinstance(tensor, Tensor):
        hint = "; torch.from_numpy makes one" if type(tensor).__module__ == "numpy" else ""
        raise ModelMismatchError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor{hint}.")
    return name, tensor


def _shown(given: object) -> str:
    return "a Tensor" if isinstance(given, torch.Tensor) else f"{given!r:.100}"


def range_of(name: str, tensor: Tensor, rank: int) -> TensorRange:
    """Return the range of a tensor that a rank publishes. Over all ranks each element is published once.

    A whole tensor is published by the first rank; a `DTensor` has to be sharded by its first dimension, or replicated.

    Raises:
        ConfigError: a `DTensor` whose shard is no contiguous range.
    """
    if isinstance(tensor, TensorRange):
        return tensor
    if hasattr(tensor, "placements"):  # a DTensor, whose import takes seconds
        return _range_of_dtensor(name, tensor)
    return TensorRange(tensor if rank == 0 else tensor.new_empty(0), 0, tuple(tensor.shape))


def _range_of_dtensor(name: str, tensor: Any) -> TensorRange:
    from torch.distributed.tensor import Replicate, Shard

    shape = tuple(tensor.shape)
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinates = mesh.get_coordinate()
    is_published, first_row, rows = True, 0, shape[0] if shape else 1
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard and placement.dim == 0:
            chunk = -(-rows // mesh.size(dim))
            begin = min(coordinates[dim] * chunk, rows)
            first_row, rows = first_row + begin, min(chunk, rows - begin)
        elif isinstance(placement, Replicate):
            is_published = is_published and coordinates[dim] == 0
        else:
            raise ConfigError(
                f"{name} is placed as {placement}; only tensors that are sharded by their first dimension, or replicated, "
                "can be published without a gather. Publish tensor.full_tensor() from one rank instead."
            )
    if not is_published:
        return TensorRange(local.new_empty(0), 0, shape)
    assert local.numel() == rows * math.prod(shape[1:])
    return TensorRange(local, first_row * math.prod(shape[1:]), shape)
