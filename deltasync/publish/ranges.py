"""What `publish` is given: names and tensors, or the ranges of tensors that a process holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch

Range = tuple[int, int]
"""The elements of a flat checkpoint tensor that a process holds: index of the first one, and of the one
behind the last.
"""

NOTHING: Range = (0, 0)
"""The range of a tensor of which a process publishes nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRange:
    """A range of a checkpoint tensor, for trainers that shard in a way of their own.

    Attributes:
        held: The elements, row-major; any shape, device and floating dtype, may be empty. May be a wrapper
            subclass.
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
"""A module, for its parameters and buffers; a mapping of names to tensors; pairs of name and tensor; or a
function that returns those, called when they are read.

A mapping, its items or a list keep their tensors until the publish returns; they are compared together.
Anything else, such as a generator, may free or overwrite a tensor as soon as the next one is asked for.
"""
