"""PEFT: the adapter alone as `save_pretrained` writes it, or merged into copies of the layers that it adapts."""

from __future__ import annotations

import collections
import copy
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import unwrap_model

from deltasync.errors import ConfigError


def check(model: torch.nn.Module) -> None:
    """Check that the model has one adapter that can be published without the model.

    Raises:
        ConfigError: it has none, or several are active.
    """
    peft_model: Any = unwrap_model(model)
    if not hasattr(peft_model, "get_base_model"):
        raise ConfigError(
            f"adapter_only=True publishes the adapter of a PEFT model, and {type(peft_model).__name__} is none: make it one "
            "with peft.get_peft_model, or leave adapter_only out."
        )
    if len(peft_model.active_adapters) != 1:
        raise ConfigError(
            f"adapter_only=True publishes one adapter, and {len(peft_model.active_adapters)} are active: "
            f"{', '.join(peft_model.active_adapters)}. Activate one with set_adapter."
        )


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The active adapter's tensors by their names in `adapter_model.safetensors`; they alias the live ones.

    Those of `save_pretrained(..., save_embedding_layers=False)`, which does not ask the Hub.
    """
    from peft import get_peft_model_state_dict

    peft_model: Any = unwrap_model(model)
    (name,) = peft_model.active_adapters
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False)
    return found


def files(model: torch.nn.Module) -> dict[str, bytes]:
    """`adapter_config.json` of the active adapter, by file name."""
    peft_model: Any = unwrap_model(model)
    (name,) = peft_model.active_adapters
    with tempfile.TemporaryDirectory() as folder:
        peft_model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
        (path,) = Path(folder).rglob("adapter_config.json")
        return {path.name: path.read_bytes()}


def unloaded(model: torch.nn.Module) -> Any:
    """The base model without its adapters. It shares all weights with the live model, which stays as it is."""
    peft_model: Any = unwrap_model(model)
    weights = itertools.chain(peft_model.parameters(), peft_model.buffers())
    return copy.deepcopy(peft_model, {id(weight): weight for weight in weights}).unload()


def merges_by_layers(model: torch.nn.Module) -> bool:
    """Whether `merged_by_layers` is for this model: no adapted layer shares parameters, and all merge as most methods do."""
    from peft.tuners.tuners_utils import BaseTuner

    peft_model: Any = unwrap_model(model)
    method = getattr(type(peft_model.base_model), "_unload_and_optionally_merge", None)
    modules = peft_model.modules()
    places = collections.Counter(id(param) for module in modules for param in module.parameters(recurse=False))
    adapted = itertools.chain.from_iterable(
        layer.parameters() for layer in _adapted_layers(peft_model.get_base_model()).values()
    )
    return method is BaseTuner._unload_and_optionally_merge and all(places[id(param)] == 1 for param in adapted)


def merged_by_layers(model: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's tensors with its adapters merged, by PEFT itself, into a copy of one layer at a time.

    The live layers stay as they are, bit for bit, which merging and unmerging them would not do. What is not adapted aliases
    the live model. `names` are the tensors of `unloaded(model)`, those of a layer one after the other.
    """
    peft_model: Any = unwrap_model(model)
    base: Any = peft_model.get_base_model()
    layers, live = _adapted_layers(base), base.state_dict()
    for place, group in itertools.groupby(names, lambda name: _layer_of(name, layers)):
        if place is None:
            yield from ((name, live[name]) for name in group)
            continue
        state = _merged_layer(layers[place], peft_model).state_dict(prefix=f"{place}.")
        for name in group:
            yield name, state.pop(name)
        del state  # before the next layer is copied


def merged(model: torch.nn.Module) -> Any:
    """The base model with all its adapters merged, by PEFT itself, into copies of the layers that they adapt.

    As `merged_by_layers`, but with all copies at once.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    peft_model: Any = unwrap_model(model)
    layers = [module for module in peft_model.modules() if isinstance(module, BaseTunerLayer)]
    adapted = {id(param) for layer in layers for param in layer.parameters()}
    shared = {id(param): param for param in peft_model.parameters() if id(param) not in adapted}
    return copy.deepcopy(peft_model, shared).merge_and_unload()


def _adapted_layers(base: torch.nn.Module) -> dict[str, Any]:
    """What PEFT replaces when it merges, by name; none of them lies in another."""
    found: dict[str, Any] = {}
    for name, module in base.named_modules():
        replaced = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
        if replaced and _layer_of(name, found) is None:
            found[name] = module
    return found


def _layer_of(name: str, layers: Mapping[str, Any]) -> str | None:
    """Which of the layers a name lies in."""
    parts = name.split(".")
    return next((found for end in range(1, len(parts)) if (found := ".".join(parts[:end])) in layers), None)


def _merged_layer(layer: Any, peft_model: Any) -> Any:
    """A copy of one layer, merged and unloaded as `merge_and_unload` does it."""
    own = {id(param) for param in layer.parameters()}
    alone = copy.deepcopy(layer, {id(param): param for param in peft_model.parameters() if id(param) not in own})
    if hasattr(alone, "unload_and_optionally_merge_module"):
        return alone.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    alone.merge(safe_merge=False, adapter_names=None)
    return alone.get_base_layer()


def without(model: torch.nn.Module) -> torch.nn.Module:
    """The base model of a PEFT model, its layers still adapted; any other model itself."""
    found: Any = unwrap_model(model)
    base: torch.nn.Module = found.get_base_model() if hasattr(found, "get_base_model") else found
    return base
