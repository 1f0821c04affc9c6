"""PEFT: the adapter alone as `save_pretrained` writes it, or merged into copies of the layers that it adapts."""

from __future__ import annotations

import copy
import tempfile
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


def merged(model: torch.nn.Module) -> Any:
    """The base model with its adapters merged, by PEFT itself, into copies of the layers that they adapt.

    The live layers stay as they are, bit for bit, which merging and unmerging them would not do. Everything else of the
    result is shared with the live model. Takes the memory of those layers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    peft_model: Any = unwrap_model(model)
    layers = [module for module in peft_model.modules() if isinstance(module, BaseTunerLayer)]
    adapted = {id(param) for layer in layers for param in layer.parameters()}
    shared = {id(param): param for param in peft_model.parameters() if id(param) not in adapted}
    return copy.deepcopy(peft_model, shared).merge_and_unload()


def without(model: torch.nn.Module) -> torch.nn.Module:
    """The base model of a PEFT model, its layers still adapted; any other model itself."""
    found: Any = unwrap_model(model)
    base: torch.nn.Module = found.get_base_model() if hasattr(found, "get_base_model") else found
    return base
