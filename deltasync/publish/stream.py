"""What may be given to `publish`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized

import torch

from deltasync.errors import ModelMismatchError
from deltasync.publish.sharded import TensorRange

Tensor = torch.Tensor | TensorRange
Tensors = Iterable[tuple[str, Tensor]]
Stream = torch.nn.Module | Mapping[str, Tensor] | Tensors | Callable[[], Tensors]
"""A module, for its `state_dict()`; a mapping of names to tensors; pairs of name and tensor; or a function that returns
those, called when they are read.

A mapping, its items or a list keep their tensors until the publish returns; they are compared together. Anything else, such
as a generator, may free or overwrite a tensor as soon as the next one is asked for.
"""


def tensors_of(stream: Stream) -> Tensors:
    """Pairs of name and tensor, each to be held to `pair_of`; ModelMismatchError if it is something else, or empty."""
    if isinstance(stream, torch.nn.Module):
        stream = stream.state_dict()
    elif callable(stream):
        stream = stream()
    found = stream.items() if isinstance(stream, Mapping) else stream
    if isinstance(found, str | torch.Tensor) or not isinstance(found, Iterable):
        wanted = "a module, a mapping of names to tensors, or pairs of name and tensor"
        raise ModelMismatchError(f"publish() takes {wanted}, not {_shown(stream)}.")
    if isinstance(found, Sized) and not len(found):
        raise ModelMismatchError("There is no tensor to publish.")
    return found


def pair_of(pair: object) -> tuple[str, Tensor]:
    """What a stream gives, if it is a name and a tensor; else ModelMismatchError."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ModelMismatchError(f"What publish() reads is a pair of name and tensor, not {_shown(pair)}.")
    name, tensor = pair
    if not isinstance(name, str):
        raise ModelMismatchError(f"Names of tensors are strings, not {_shown(name)}.")
    if not isinstance(tensor, torch.Tensor | TensorRange):
        hint = "; torch.from_numpy makes one" if type(tensor).__module__ == "numpy" else ""
        raise ModelMismatchError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor{hint}.")
    return name, tensor


def _shown(given: object) -> str:
    return "a Tensor" if isinstance(given, torch.Tensor) else f"{given!r:.100}"
