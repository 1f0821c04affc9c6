"""What a checkpoint of a model holds: the tensors, named as `save_pretrained` names them, and the files next to them."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import unwrap_model

from deltasync import anchor
from deltasync.errors import ConfigError
from deltasync.quantize import QUANTIZATION
from trl_callback import adapter


def is_peft(model: torch.nn.Module) -> bool:
    """Whether the model has adapters, by PEFT or by the integration of transformers; peft itself need not be installed."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether this process holds a part only, by FSDP2."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def check_publishable(model: torch.nn.Module, adapter_only: bool = False) -> None:
    """Check that the processes hold all that is to be published, the model or its adapter, whole or in FSDP2's shards.

    Raises:
        ConfigError: adapters cannot be merged, or are not the one that is wanted; or it is sharded in another way.
    """
    if adapter_only:
        adapter.check(model)
    elif is_peft(model) and not hasattr(unwrap_model(model), "merge_and_unload"):
        raise ConfigError(
            "A model with adapters is published by its merged weights, and these adapters cannot be merged. Use "
            "peft.get_peft_model, with a method that can merge, such as LoRA."
        )
    if is_peft(model) and is_sharded(model):
        raise ConfigError("Adapters of a model that is sharded by FSDP2 cannot be published. Train with DDP.")
    if any(hasattr(param, "ds_id") for param in model.parameters()):
        raise ConfigError(
            "The parameters are sharded by DeepSpeed's ZeRO-3, which DeltaSyncCallback cannot publish. Train with FSDP2, "
            "ZeRO-2 or DDP."
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError("The parameters are sharded by FSDP1, which DeltaSyncCallback cannot publish. Train with FSDP2.")


def held_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their name in memory, each storage once; they alias the live weights."""
    model = unwrap_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some parameters gathered
    # Patterns of the names that from_pretrained ties to another one: a list, from transformers 5 on a dict.
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    params = {_plain(name): id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place: tuple[Any, ...] = (tensor.device, tensor.data_ptr(), tensor.shape) if tensor.numel() else (name,)
        if isinstance(tensor, DTensor):  # whose storage this process may hold nothing of
            place = (params.get(name, name),)
        known = kept.setdefault(place, name)
        if known != name and any(re.search(pattern, known) for pattern in tied):
            kept[place] = name
    names = set(kept.values())
    return {name: tensor for name, tensor in state.items() if name in names and name not in ignored}


def checkpoint_tensors(model: torch.nn.Module, adapter_only: bool = False) -> dict[str, torch.Tensor]:
    """Collect what `save_pretrained` would write, in the dtype of training; tensors may alias the live weights.

    Adapters are merged into copies, or the adapter is all.

    Raises:
        ConfigError: the model cannot be published, see `check_publishable`.
    """
    check_publishable(model, adapter_only)
    if adapter_only:
        return adapter.tensors(model)
    if is_peft(model):
        model = adapter.merged(model)
    held = held_tensors(model)
    if not is_sharded(model):
        return _as_saved(model, held)
    if renamed := _renamed(model, held):
        raise ConfigError(
            f"{renamed[0]} and {len(renamed) - 1} other tensors have other names or shapes in memory than in a checkpoint "
            f"of {type(unwrap_model(model)).__name__}, which cannot be undone for shards. Train this model with DDP."
        )
    return held


def check_names(model: torch.nn.Module) -> None:
    """Check that tensors are named in memory as in the checkpoint, as TRL's stream supposes.

    Raises:
        ConfigError: transformers fuses or renames some when it loads them, e.g. the experts of a mixture.
    """
    fused = _renamed(model, held_tensors(model))
    if fused:
        raise ConfigError(
            f"{fused[0]} and {len(fused) - 1} other tensors have other names or shapes in memory than in a checkpoint of "
            f"{type(unwrap_model(model)).__name__}, and TRL streams them as in memory, which replicas cannot load. Use "
            "DeltaSyncCallback without weight_transfer, which undoes that."
        )


def complete(stream: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """TRL's stream, then what a checkpoint holds besides: frozen parameters and persistent buffers.

    The stream of a model with adapters or shards is left as it is: TRL merges and gathers while it streams.
    """
    streamed = set()
    for name, tensor in stream:
        streamed.add(name)
        yield name, tensor
    if is_peft(model) or is_sharded(model):
        return
    for name, tensor in held_tensors(model).items():
        if name not in streamed:
            yield name, tensor


def loaded_from(model: torch.nn.Module) -> str:
    """The checkpoint that `from_pretrained` loaded a model from: a directory, or a model on the Hub at a commit.

    Raises:
        ConfigError: it was not loaded from any.
    """
    config = getattr(adapter.without(model), "config", None)
    name, commit = getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)
    if not name:
        raise ConfigError('The model does not say what it was loaded from, so initial="auto" is not for it; name it.')
    return str(name) if commit is None else f"{name}@{commit}"


def checkpoint_files(model: torch.nn.Module, processing_class: Any, dtype: str) -> dict[str, bytes]:
    """Config, generation config and tokenizer, as `save_pretrained` writes them, by file name.

    Args:
        model: The model; one without a config gets none.
        processing_class: Tokenizer or processor, None for none.
        dtype: Name of the dtype that the weights are served in, or `keep`.
    """
    model = adapter.without(model)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, PreTrainedModel):
            config = copy.deepcopy(model.config)
            config.dtype = {"keep": str(model.dtype).removeprefix("torch."), "fp8": "bfloat16"}.get(dtype, dtype)
            if dtype == "fp8":
                config.quantization_config = QUANTIZATION
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        return anchor.companion_files(Path(folder))


def _renamed(model: torch.nn.Module, held: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are saved under other names, or in other shapes."""
    meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held.items()}
    saved = {name: tensor.shape for name, tensor in _as_saved(model, meta).items()}
    return sorted(name for name, tensor in held.items() if saved.get(name) != tensor.shape)


def _plain(name: str) -> str:
    """A parameter's name without what activation checkpointing puts into it."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _as_saved(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = unwrap_model(model)
    if not isinstance(model, PreTrainedModel):
        return tensors
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved
