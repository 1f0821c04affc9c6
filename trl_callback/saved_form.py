"""Tensors that a checkpoint holds under other names or in other shapes than memory does, such as the experts of a mixture.

transformers converts them when it loads a model and undoes that when it saves one. Here it undoes it for shards, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import unwrap_model

from deltasync.errors import ConfigError
from deltasync.publish.stream import TensorRange, range_of


def as_saved(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors, all of a model's or some, as a checkpoint holds them."""
    model = unwrap_model(model)
    if not isinstance(model, PreTrainedModel):
        return tensors
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved


def on_meta(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stand-ins without data for whole tensors."""
    return {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}


def shards_as_saved(model: torch.nn.Module, held: dict[str, Any], rank: int) -> Iterable[tuple[str, Any]]:
    """What this rank's process holds of a model's tensors, as parts of the tensors of a checkpoint. Nothing is gathered.

    A tensor that has another form is converted on its own, when it is asked for, in memory for all of it; what other
    processes hold of it is left out. Where none has, these are the items of a dict.

    Raises:
        ConfigError: a tensor of a checkpoint comes from several in memory, or not in order.
    """
    wanted = {name: tensor.shape for name, tensor in as_saved(model, on_meta(held)).items()}
    if all(wanted.get(name) == tensor.shape for name, tensor in held.items()):
        return held.items()
    return _converted(model, held, wanted, rank)


def _converted(
    model: torch.nn.Module, held: dict[str, Any], wanted: dict[str, torch.Size], rank: int
) -> Iterator[tuple[str, Any]]:
    for name, tensor in held.items():
        if wanted.get(name) == tensor.shape:
            yield name, tensor
            continue
        part = range_of(name, tensor, rank)
        here = slice(part.start, part.stop)
        whole = part.held.new_empty(part.shape)
        whole.view(-1)[here] = part.held.flatten()
        known = torch.zeros(part.shape, dtype=torch.bool, device=whole.device)
        known.view(-1)[here] = True
        converted, marks = as_saved(model, {name: whole}), as_saved(model, {name: known})
        for saved, values in converted.items():
            places = marks[saved].flatten().nonzero().flatten()
            start, stop = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
            if wanted.get(saved) != values.shape or stop - start != len(places):
                raise ConfigError(
                    f"{name} has another name or shape in memory than in a checkpoint of "
                    f"{type(unwrap_model(model)).__name__}, which cannot be undone for shards. Train this model with DDP."
                )
            yield saved, TensorRange(values.flatten()[start:stop], start, tuple(values.shape))
