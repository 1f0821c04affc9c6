"""What one rank of a sharded trainer holds of a checkpoint tensor: a contiguous range of its flat elements."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from deltasync.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRange:
    """A range of a checkpoint tensor, for what shards in another way than FSDP2's `DTensor`, such as ZeRO.

    Attributes:
        held: The elements, row-major; any shape, device and floating dtype, may be empty.
        start: Flat index, in the whole tensor, of the first of them.
        shape: The whole tensor's shape.
    """

    held: torch.Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Flat index behind the last element."""
        return self.start + self.held.numel()


def range_of(name: str, tensor: torch.Tensor | TensorRange, rank: int) -> TensorRange:
    """What a rank publishes of a tensor, so that over all ranks each element is published once.

    A whole tensor is published by the first rank; a `DTensor` has to be sharded by its first dimension, or replicated.

    Raises:
        ConfigError: a `DTensor` whose shard is no contiguous range.
    """
    if isinstance(tensor, TensorRange):
        return tensor
    shape = tuple(tensor.shape)
    if hasattr(tensor, "placements"):  # without importing DTensor, which takes a second
        return _range_of_dtensor(name, tensor, shape)
    return TensorRange(tensor if rank == 0 else tensor.new_empty(0), 0, shape)


def _range_of_dtensor(name: str, tensor: Any, shape: tuple[int, ...]) -> TensorRange:
    from torch.distributed.tensor import Replicate, Shard

    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinates = mesh.get_coordinate()
    held, first_row, rows = True, 0, shape[0] if shape else 1
    for dim, placement in enumerate(tensor.placements):
        if type(placement) is Shard and placement.dim == 0:
            chunk = -(-rows // mesh.size(dim))
            begin = min(coordinates[dim] * chunk, rows)
            first_row, rows = first_row + begin, min(chunk, rows - begin)
        elif isinstance(placement, Replicate):
            held = held and coordinates[dim] == 0
        else:
            raise ConfigError(
                f"{name} is placed as {placement}; only tensors that are sharded by their first dimension, or replicated, "
                "can be published without a gather. Publish tensor.full_tensor() from one rank instead."
            )
    if not held:
        return TensorRange(local.new_empty(0), 0, shape)
    assert local.numel() == rows * math.prod(shape[1:])
    return TensorRange(local, first_row * math.prod(shape[1:]), shape)
