"""PEFT models: publish the adapter alone, as `save_pretrained` writes it, or merge it into copies of the
adapted layers.
"""

from __future__ import annotations

import collections
import copy
import itertools
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deltasync.errors import ConfigError
from deltasync.tensors.bits import is_wrapper, readable
from deltasync.trainer.stream import module_tensors, part_of, plain_names, unwrapped

_AROUND_BASE = re.compile(r"\.((token_adapter\.)?base_layer|original_module)\b")
"""Attributes with which PEFT's layers hold the layer that they replace."""

_UNKNOWN_TO_VLLM = (
    *("use_dora", "use_bdlora", "use_qalora", "lora_bias", "modules_to_save", "layer_replication"),
    *("alora_invocation_tokens", "trainable_token_indices"),
    *("kasa_config", "monteclora_config", "arrow_config"),
)
"""Settings of a LoRA that vLLM does not compute with."""

_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Named values of `init_lora_weights` that leave the base model's weights as they are."""


def check(model: torch.nn.Module, adapter_only: bool | str = True) -> None:
    """Check that the model has the named adapter, or exactly one active one, publishable without the base
    model (else ConfigError).
    """
    peft_model: Any = unwrapped(model)
    if not hasattr(peft_model, "get_base_model"):
        raise ConfigError(
            f"adapter_only=True needs a PEFT model, and {type(peft_model).__name__} is none: make it one "
            "with "
            "peft.get_peft_model, or leave adapter_only out."
        )
    names = peft_model.active_adapters if adapter_only is True else [*peft_model.peft_config]
    if adapter_only is True and len(names) != 1:
        raise ConfigError(
            f"adapter_only=True needs one active adapter, and {len(names)} are active: "
            f"{', '.join(names)}. Activate one with set_adapter, or name one: adapter_only={names[0]!r}."
        )
    if adapter_only is not True and adapter_only not in names:
        raise ConfigError(
            f"adapter_only names the adapter {adapter_only}, and the model has {', '.join(names)}."
        )
    if any(getattr(peft_model.peft_config[name], "is_prompt_learning", False) for name in names):
        return  # its tensors are computed from the trained parameters
    state = peft_model.state_dict(keep_vars=True)
    known = {id(tensor) for name in names for tensor in tensors(model, name, state).values()}
    for name, param in peft_model.named_parameters():
        count = getattr(param, "ds_numel", param.numel())
        if param.requires_grad and count and id(param) not in known:
            raise ConfigError(
                f"adapter_only=True publishes the adapter alone, but {name} is trained and not part of it. "
                "Freeze it, or "
                "leave adapter_only out."
            )


def check_merges(model: torch.nn.Module) -> None:
    """Check that the adapters can be merged into what is trained; a layer that is tied to another cannot
    (ConfigError).
    """
    peft_model: Any = unwrapped(model)
    modules, layers = (
        dict(peft_model.get_base_model().named_modules()),
        _adapted_layers(peft_model.get_base_model()),
    )
    adapted = {
        id(module.base_layer.weight): name
        for name, module in modules.items()
        if isinstance(getattr(getattr(module, "base_layer", None), "weight", None), torch.nn.Parameter)
    }
    for name, module in modules.items():
        one = adapted.get(id(getattr(module, "weight", None)))
        if one is not None and name not in layers and _layer_of(name, layers) is None:
            raise ConfigError(
                f"The adapter of {one} would be merged into weights that {name} shares, so the merged "
                "weights would differ "
                "from the trained ones. Adapt neither, or untie the embeddings (tie_word_embeddings=False)."
            )
    kinds, wrapped = {}, {}
    for name, layer in layers.items():
        inner, weight = getattr(layer, "base_layer", None), _weight(layer)
        kinds[type(layer), type(inner), getattr(inner, "bias", None) is not None] = layer
        if isinstance(weight, torch.Tensor) and is_wrapper(weight):
            wrapped[type(layer), type(weight)] = name, layer
    try:
        if merges_by_layers(model):
            for layer in kinds.values():
                _merged_layer(layer, peft_model)
        else:
            merged(model)
        unmerged = [name for name, layer in wrapped.values() if not _merge_shows(layer, peft_model)]
    except Exception as error:
        methods = {
            str(getattr(config.peft_type, "value", config.peft_type))
            for config in peft_model.peft_config.values()
        }
        raise ConfigError(
            "A model with adapters is published as its merged weights, and PEFT cannot merge these "
            f"({', '.join(sorted(methods))}): {type(error).__name__}: {error}"
        ) from error

    for name in unmerged:
        raise ConfigError(
            "A model with adapters is published as its merged weights, and what PEFT merges into "
            f"{name}.weight, a "
            f"{type(_weight(layers[name])).__name__}, is lost. Load the base unquantized, or publish with "
            "adapter_only=True."
        )


def _weight(layer: Any) -> Any:
    return getattr(getattr(layer, "base_layer", None), "weight", None)


def _merge_shows(layer: Any, peft_model: Any) -> bool:
    """Whether other adapters would merge to other weights. PEFT adds in place, for which a wrapper subclass
    may be deaf.
    """
    other = _copy_sharing_others(layer, [layer], peft_model)
    for name, param in other.named_parameters():
        if not name.startswith("base_layer."):
            param.detach().add_(1)
    before, after = (readable("", _merged_layer(each, peft_model).weight) for each in (layer, other))
    return not torch.equal(before, after)


def name_of(model: torch.nn.Module, adapter_only: bool | str = True) -> str:
    """Return the name of the adapter to publish: the given one, or the active one."""
    if isinstance(adapter_only, str):
        return adapter_only
    peft_model: Any = unwrapped(model)
    (name,) = peft_model.active_adapters
    return str(name)


def tensors(
    model: torch.nn.Module, adapter_only: bool | str = True, held: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their names in `adapter_model.safetensors`; they alias the live weights.

    They equal those of `save_pretrained(..., save_embedding_layers=False)`, which sends no request to the
    Hub. They are taken from `held`, by the names of the model's state dict, or from that.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, torch.Tensor] = get_peft_model_state_dict(
        unwrapped(model),
        state_dict=held,
        adapter_name=name_of(model, adapter_only),
        save_embedding_layers=False,
    )
    return state


def shards(model: torch.nn.Module, adapter_only: bool | str = True) -> dict[str, Any]:
    """Return this process's parts of `tensors`, of a sharded model: `DTensor`s, or of ZeRO-3 `TensorRange`s.

    Raises:
        ConfigError: PEFT would save a tensor that it computes, as prompts are.
    """
    held = module_tensors(model)
    found, known = tensors(model, adapter_only, held), {id(tensor) for tensor in held.values()}
    for name, tensor in found.items():
        if id(tensor) not in known:
            raise ConfigError(
                f"{name} of the adapter is computed when it is saved, which cannot be done for shards. Train "
                "with DDP or ZeRO-2."
            )
    return {
        name: part_of(name, tensor) if hasattr(tensor, "ds_id") else tensor for name, tensor in found.items()
    }


def identity(model: torch.nn.Module, adapter_only: bool | str = True) -> tuple[str, dict[str, Any]]:
    """Return the name and the configuration of an adapter."""
    peft_model: Any = unwrapped(model)
    name = name_of(model, adapter_only)
    return name, peft_model.peft_config[name].to_dict()


def refused_by_vllm(model: torch.nn.Module, adapter_only: bool | str = True) -> list[str]:
    """Return the settings of an adapter with which vLLM does not load it (`vllm/lora/peft_helper.py`)."""
    _, config = identity(model, adapter_only)
    method = str(getattr(config["peft_type"], "value", config["peft_type"]))
    refused = {"peft_type": method != "LORA", "bias": config.get("bias", "none") != "none"}
    start = config.get("init_lora_weights")
    refused["init_lora_weights"] = isinstance(start, str) and start.lower() not in _PLAIN_STARTS
    refused |= {name: bool(config.get(name)) for name in _UNKNOWN_TO_VLLM}
    values = config | {"peft_type": method}
    return [f"{name}={values[name]}" for name, is_refused in refused.items() if is_refused]


def rank_of(model: torch.nn.Module, adapter_only: bool | str = True) -> int:
    """Return the largest rank of an adapter's layers, as vLLM takes it from the configuration."""
    _, config = identity(model, adapter_only)
    return max([config["r"], *(config["rank_pattern"] or {}).values()])


def layers_outside(
    model: torch.nn.Module, targets: Collection[str], adapter_only: bool | str = True
) -> list[str]:
    """Return the last names of the adapted layers that are not among a server's `--lora-target-modules`.

    The result is empty where the server names layers that the model here does not have, as fused ones, which
    may hold them.
    """
    name, modules = name_of(model, adapter_only), dict(base_of(model).named_modules())
    last = {each: each.rpartition(".")[2] for each in modules}
    if not set(targets) <= {*last.values(), *last}:
        return []
    adapted = [
        each
        for each, module in modules.items()
        if any(name in getattr(module, factors, ()) for factors in ("lora_A", "lora_embedding_A"))
    ]
    return sorted({last[each] for each in adapted if not {each, last[each]} & set(targets)})


def files(model: torch.nn.Module, adapter_only: bool | str = True) -> dict[str, bytes]:
    """Return `{"adapter_config.json": bytes}` of an adapter."""
    peft_model: Any = unwrapped(model)
    # Shards cannot be saved, and of what is saved only the configuration is read.
    nothing = {name: torch.empty(0, device="cpu") for name in peft_model.state_dict()}
    with tempfile.TemporaryDirectory() as folder:
        peft_model.save_pretrained(
            folder,
            selected_adapters=[name_of(model, adapter_only)],
            save_embedding_layers=False,
            state_dict=nothing,
        )
        (path,) = Path(folder).rglob("adapter_config.json")
        return {path.name: path.read_bytes()}


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the base model of a PEFT model, with its layers still adapted; another model without its
    wrappers.
    """
    found: Any = unwrapped(model)
    return unwrapped(found.get_base_model()) if hasattr(found, "get_base_model") else found


def base_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the base model's original tensors under their original names; of the packed ones an empty tensor
    of uint8.
    """
    base = base_of(model)
    layers, packed, found = _adapted_layers(base), packed_layers(base), {}
    for name, tensor in module_tensors(base).items():
        owner, _, rest = name.partition(".weight")
        if owner in packed and rest:  # what bitsandbytes stores beside the weight
            continue
        if owner in packed and name.endswith(".weight"):
            tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        layer = _layer_of(name, layers)
        inner = "" if layer is None else name.removeprefix(layer)
        own = _AROUND_BASE.sub("", inner)
        if layer is None or own != inner:
            found[f"{layer or name}{own}"] = tensor
    return found


def packed_layers(base: torch.nn.Module) -> set[str]:
    """Return the names of the layers whose weight bitsandbytes packs, in whatever dtype stores it."""
    plain = plain_names(base)
    return {plain(name) for name, module in base.named_modules() if hasattr(module, "quant_state")}


def unloaded(model: torch.nn.Module) -> Any:
    """Return a base model without adapters that shares all weights with the live model, which is not
    changed.
    """
    peft_model: Any = unwrapped(model)
    weights = itertools.chain(peft_model.parameters(), peft_model.buffers())
    return copy.deepcopy(peft_model, {id(weight): weight for weight in weights}).unload()


def merges_by_layers(model: torch.nn.Module) -> bool:
    """Whether `merged_by_layers` can merge this model: PEFT merges each layer alone, and adapted layers share
    nothing.
    """
    from peft.tuners.tuners_utils import BaseTuner

    peft_model: Any = unwrapped(model)
    method = getattr(type(peft_model.base_model), "_unload_and_optionally_merge", None)
    uses = collections.Counter(
        id(param) for module in peft_model.modules() for param in module.parameters(recurse=False)
    )
    layers = _adapted_layers(peft_model.get_base_model()).values()
    return (
        method is BaseTuner._unload_and_optionally_merge
        and all(uses[id(param)] == 1 for layer in layers for param in layer.parameters())
        and not any(unwrapped(module) is not module for module in peft_model.modules())
    )


def merged_by_layers(model: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base model's tensors with its adapters merged. PEFT merges into a copy of one layer at a
    time.

    The live layers are not changed; merging and unmerging them would change their bits. Tensors that are not
    adapted alias the live model. `names` are the tensors of `unloaded(model)`, grouped by layer.
    """
    peft_model: Any = unwrapped(model)
    base: Any = peft_model.get_base_model()
    layers, live = _adapted_layers(base), base.state_dict()
    for layer_name, group in itertools.groupby(names, lambda name: _layer_of(name, layers)):
        if layer_name is None:
            yield from ((name, live[name]) for name in group)
            continue
        state = _merged_layer(layers[layer_name], peft_model).state_dict(prefix=f"{layer_name}.")
        for name in group:
            yield name, state.pop(name)
        del state  # before the next layer is copied


def merged(model: torch.nn.Module) -> Any:
    """Return the base model with its adapters merged. PEFT merges into copies of all adapted layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    peft_model: Any = unwrapped(model)
    layers = [module for module in peft_model.modules() if isinstance(module, BaseTunerLayer)]
    return _copy_sharing_others(peft_model, layers, peft_model).merge_and_unload()


def _adapted_layers(base: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that PEFT replaces when it merges, by name. None of them contains another."""
    layers: dict[str, Any] = {}
    for name, module in base.named_modules():
        replaced = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
        if replaced and _layer_of(name, layers) is None:
            layers[name] = module
    return layers


def _layer_of(name: str, layers: Mapping[str, Any]) -> str | None:
    parts = name.split(".")
    return next((prefix for end in range(1, len(parts)) if (prefix := ".".join(parts[:end])) in layers), None)


def _merged_layer(layer: Any, peft_model: Any) -> Any:
    """Return a copy of one layer, merged and unloaded like `merge_and_unload` does."""
    alone = _copy_sharing_others(layer, [layer], peft_model)
    if getattr(alone, "merged", False):
        return alone.get_base_layer()
    if hasattr(alone, "unload_and_optionally_merge_module"):
        return alone.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    alone.merge(safe_merge=False, adapter_names=None)
    return alone.get_base_layer()


def _copy_sharing_others(module: Any, copied: Iterable[Any], peft_model: Any) -> Any:
    """Return a deep copy of a module that shares all parameters of the PEFT model except those of the
    `copied` layers.
    """
    own = {id(param) for layer in copied for param in layer.parameters()}
    return copy.deepcopy(
        module, {id(param): param for param in peft_model.parameters() if id(param) not in own}
    )
