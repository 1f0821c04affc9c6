"""What a checkpoint of a model holds: the tensors, named as `save_pretrained` names them, and the files next to them."""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import unwrap_model

from deltasync.channel import anchors
from deltasync.errors import ConfigError
from deltasync.publish.quantize import QUANTIZATION
from deltasync.publish.stream import TensorRange
from trl_callback import adapter
from trl_callback.saved_form import as_saved, on_meta, shards_as_saved


def is_peft(model: torch.nn.Module) -> bool:
    """Whether the model has adapters, by PEFT or by the integration of transformers; peft itself need not be installed."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether this process holds a part only, by FSDP2 or ZeRO-3."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(map(_in_zero, model.parameters()))


def check_publishable(model: torch.nn.Module, adapter_only: bool = False) -> None:
    """Check that the processes hold all that is to be published, the model or its adapter, whole or in shards.

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
        raise ConfigError("Adapters of a sharded model cannot be published. Train with DDP or ZeRO-2.")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError("The parameters are sharded by FSDP1, which DeltaSyncCallback cannot publish. Train with FSDP2.")


def held_tensors(model: torch.nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by their name in memory, each storage once; they alias the live weights.

    A sharded one is this process's part: a `DTensor` from FSDP2, a `TensorRange` from ZeRO-3.
    """
    model = unwrap_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some parameters gathered
    # Patterns of the names that from_pretrained ties to another one: a list, from transformers 5 on a dict.
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    # Activation checkpointing puts a part into the names of parameters.
    params = {
        name.replace("_checkpoint_wrapped_module.", ""): param
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place: tuple[Any, ...] = (tensor.device, tensor.data_ptr(), tensor.shape) if tensor.numel() else (name,)
        if isinstance(tensor, DTensor) or _in_zero(params.get(name)):  # whose storage this process may hold nothing of
            place = (id(params.get(name, name)),)
        known = kept.setdefault(place, name)
        if known != name and any(re.search(pattern, known) for pattern in tied):
            kept[place] = name
    names = set(kept.values()) - set(ignored)
    held = {name: tensor for name, tensor in state.items() if name in names}
    return {name: _zero_part(name, params[name]) if _in_zero(params.get(name)) else held[name] for name in held}


def _in_zero(param: Any) -> bool:
    """Whether DeepSpeed's ZeRO-3 shards this parameter. DeepSpeed itself is not imported."""
    return hasattr(param, "ds_id")


def _zero_part(name: str, param: Any) -> TensorRange:
    """What this process holds of a parameter that ZeRO-3 shards.

    It cuts the flattened parameter into as many equal parts as there are processes, padded at the end, and keeps this
    process's in `param.ds_tensor`, in the dtype of training, also while the parameter is gathered for a layer's forward.
    """
    held, shape = param.ds_tensor, tuple(param.ds_shape)
    total = math.prod(shape)
    is_spread = held.numel() == -(-total // dist.get_world_size())
    if held.status.name != "AVAILABLE" or hasattr(held, "ds_quant_scale") or not is_spread:
        raise ConfigError(
            f"{name} is sharded by DeepSpeed in a way that DeltaSyncCallback cannot publish: offloaded to NVMe, quantized, "
            "or over some of the processes only. Use ZeRO-3 without these; offloading to the CPU is fine."
        )
    start = min(dist.get_rank() * held.numel(), total)
    return TensorRange(held[: total - start], start, shape)


def stream_of(model: torch.nn.Module, adapter_only: bool = False) -> Iterable[tuple[str, Any]]:
    """What this process is to publish, as `save_pretrained` would write it, in the dtype of training.

    The items of a dict alias the live weights or keep their tensors; those of an iterator are made when asked for.

    Raises:
        ConfigError: the model cannot be published, see `check_publishable`.
    """
    check_publishable(model, adapter_only)
    if adapter_only:
        return adapter.tensors(model).items()
    if is_sharded(model):
        return shards_as_saved(model, held_tensors(model), dist.get_rank())
    if is_peft(model):
        return _merged(model)
    return as_saved(model, held_tensors(model)).items()


def _merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A PEFT model as a checkpoint holds it, adapters merged into a copy of one layer at a time.

    Where layers share parameters, or several tensors become one of a checkpoint, all are merged first.
    """
    if adapter.merges_by_layers(model):
        base = adapter.unloaded(model)
        meta = on_meta(held_tensors(base))
        alone = {name: shape for item in meta.items() for name, shape in _saved_shapes(base, dict([item])).items()}
        if alone == _saved_shapes(base, meta):
            for item in adapter.merged_by_layers(model, meta):
                yield from as_saved(base, dict([item])).items()
            return
    base = adapter.merged(model)
    yield from as_saved(base, held_tensors(base)).items()


def _saved_shapes(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in as_saved(model, tensors).items()}


def streamed(stream: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """What a checkpoint of the model holds, while TRL streams it.

    TRL leaves out what is frozen, and names the rest as in memory. Its stream is read for adapters only, which are merged
    until it ends, and gathered, if they are sharded too, until the next tensor is asked for; so each is taken by itself.
    """
    if not is_peft(model):
        return stream_of(model)
    if is_sharded(model):
        return stream
    base = adapter.without(model)
    return (saved for item in stream for saved in as_saved(base, dict([item])).items())


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
    """Config, generation config and tokenizer, as `save_pretrained` writes them, by file name, as far as there are any.

    `dtype` is as `PublisherSettings.dtype`; config.json says what most tensors have.
    """
    model = adapter.without(model)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, PreTrainedModel):
            config, default = copy.deepcopy(model.config), dtype.partition(",")[0]
            config.dtype = {"keep": str(model.dtype).removeprefix("torch."), "fp8": "bfloat16"}.get(default, default)
            if dtype == "fp8":
                config.quantization_config = QUANTIZATION
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        return anchors.companion_files(Path(folder))
