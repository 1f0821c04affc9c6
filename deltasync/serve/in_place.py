"""Adapters that modules follow in place: the names that PEFT saves their tensors by, and what has to be equal beside
these, the scaling and the base model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import CorruptDataError, MissingVersionError, ModelMismatchError
from deltasync.opening import adapter_base
from deltasync.opening.adapter_base import AdapterBase

CONFIG = "adapter_config.json"
"""PEFT's file. It has the scaling of an adapter, which is in none of its weights."""

_ADAPTERS_OWN = re.compile(r"\.(lora_\w+)\.[^.]+(\.weight|\.bias)?$")
_MAGNITUDE = "lora_magnitude_vector"  # DoRA's, which PEFT saves without `.weight`
_SCALING = "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"


def is_adapter(names: Collection[str]) -> bool:
    """Whether a channel with tensors of these names holds an adapter alone, as PEFT saves it."""
    return all(name.startswith("base_model.") for name in names) and any(".lora_" in name for name in names)


def adapter_name(own: str) -> str | None:
    """Return the name by which PEFT saves a tensor of a PEFT model; None for one of the base."""
    own = own.replace("_orig_mod.", "")
    if ".modules_to_save." in own:
        return re.sub(r"\.modules_to_save\.[^.]+", "", own)
    match = _ADAPTERS_OWN.search(own)
    if match is None:
        return None
    suffix = "" if match[1] == _MAGNITUDE else match[2] or ""
    return f"{own[: match.start()]}.{match[1]}{suffix}"


def model_file(reader: ChannelReader, stored: StoredRecord, name: str) -> bytes | None:
    """Return a file beside an anchor's weights; None if there is none.

    Raises:
        CorruptDataError, MissingVersionError: with `key`: it cannot be read.
    """
    anchor = stored.record.anchor
    if anchor is None:
        return None
    wanted = f"{anchor.directory}/{name}"
    try:
        return next((reader.fetch(file) for file in anchor.model_files if file.key == wanted), None)
    except (CorruptDataError, MissingVersionError) as error:
        error.key = stored.key
        raise


def config_of(reader: ChannelReader, stored: StoredRecord) -> dict[str, Any]:
    """Return the configuration of the adapter beside an anchor; PEFT's fields.

    Raises:
        ModelMismatchError: the channel has none, or one that says no scaling.
    """
    found = model_file(reader, stored, CONFIG)
    if found is None:
        raise ModelMismatchError(
            f"{reader.store.url} holds an adapter without its {CONFIG}, which has the scaling: publish it in "
            "`model_files`."
        )
    try:
        config: dict[str, Any] = json.loads(found)
        scaling(config, "")
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, re.error) as error:
        raise ModelMismatchError(f"{CONFIG} of {reader.store.url} says no scaling: {error!r}.") from error
    return config


def check_config(config: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raise ModelMismatchError if a module's adapter does not compute as the channel's, by their configurations."""
    unlike = [name for name in _SCALING if (config.get(name) or None) != (held.get(name) or None)]
    if unlike:
        raise ModelMismatchError(
            f"The channel's adapter has {unlike[0]}={config.get(unlike[0])}, and the module's "
            f"{held.get(unlike[0])}: make the module's with the channel's {CONFIG}."
        )


def scaling(config: Mapping[str, Any], path: str) -> float:
    """Return what PEFT multiplies the product of the adapter of a module with."""

    def of(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        named = ((patterns or {})[each] for each in patterns or () if re.match(rf"(.*\.)?({each})$", path))
        return next(named, default)

    rank, alpha = (
        of(config.get("rank_pattern"), config["r"]),
        of(config.get("alpha_pattern"), config["lora_alpha"]),
    )
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def check_base(
    reader: ChannelReader, stored: StoredRecord, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Compare a module's base with that of the adapter beside an anchor, as far as the channel says it.

    Raises:
        ModelMismatchError: the adapter was trained on another model.
    """
    found = model_file(reader, stored, adapter_base.FILE)
    if found is None:
        return
    trained_on = AdapterBase.decode(found)
    held = AdapterBase.of("", ((name, each) for name, each in tensors if name in trained_on.tensors)).tensors
    different = [name for name, digest in held.items() if digest != trained_on.tensors[name]]
    if different:
        raise ModelMismatchError(
            f"The adapter of {reader.store.url} was trained on {trained_on.name or 'another model'}, and the "
            f"module has other weights, such as {different[0]}: follow with the model that it was trained on."
        )
