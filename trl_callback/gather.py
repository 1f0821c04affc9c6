"""What a checkpoint of a model holds: the tensors, named and shaped as `save_pretrained` writes them, and the other files.

A checkpoint may hold tensors under other names or in other shapes than memory does, the experts of a mixture for example.
transformers converts them when it loads a model and converts them back when it saves one; here that is done for shards, too.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import unwrap_model

from deltasync.channel import anchors
from deltasync.errors import ConfigError
from deltasync.publish.quantize import QUANTIZATION
from deltasync.publish.stream import TensorRange, range_of
from trl_callback import adapter


def is_peft(model: torch.nn.Module) -> bool:
    """Whether the model has adapters, by PEFT or by the integration of transformers; peft itself need not be installed."""
    return bool(getattr(unwrap_model(model), "peft_config", None))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 shards the model, so that this process holds a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(map(_in_zero, model.parameters()))


def check_publishable(model: torch.nn.Module, adapter_only: bool = False) -> None:
    """Check that the processes hold everything that is to be published, whole or in shards.

    Raises:
        ConfigError: the adapters cannot be merged or published alone, or the way of sharding is not supported.
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
    """Return parameters and persistent buffers by their name in memory, each storage once; they alias the live weights.

    Of a sharded tensor it is this process's part: a `DTensor` from FSDP2, a `TensorRange` from ZeRO-3.
    """
    model = unwrap_model(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some parameters gathered
    # Patterns of the names that from_pretrained ties to another one: a list, from transformers 5 on a dict.
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    # Activation checkpointing puts a part into the names of parameters.
    params = {
        name.replace("_checkpoint_wrapped_module.", ""): param
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        storage: tuple[Any, ...] = (tensor.device, tensor.data_ptr(), tensor.shape) if tensor.numel() else (name,)
        if isinstance(tensor, DTensor) or _in_zero(params.get(name)):  # this process may hold nothing of its storage
            storage = (id(params.get(name, name)),)
        known = kept.setdefault(storage, name)
        if known != name and any(re.search(pattern, known) for pattern in tied):
            kept[storage] = name
    names = set(kept.values()) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {
        name: _zero_part(name, params[name]) if _in_zero(params.get(name)) else tensor
        for name, tensor in state.items()
        if name in names
    }


def _in_zero(param: Any) -> bool:
    """Whether DeepSpeed's ZeRO-3 shards this parameter. DeepSpeed itself is not imported."""
    return hasattr(param, "ds_id")


def _zero_part(name: str, param: Any) -> TensorRange:
    """The part of a ZeRO-3 parameter that this process holds.

    ZeRO-3 cuts the flattened parameter into as many equal parts as there are processes, padded at the end. This process's
    is in `param.ds_tensor`, in the dtype of training, also while the parameter is gathered for a layer's forward.
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


def as_saved(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors, all of a model's or some, as a checkpoint holds them."""
    model = unwrap_model(model)
    if not isinstance(model, PreTrainedModel):
        return tensors
    saved: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return saved


def _saved_shapes(model: torch.nn.Module, tensors: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Names and shapes that these tensors have in a checkpoint."""
    meta = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    return {name: tensor.shape for name, tensor in as_saved(model, meta).items()}


def shards_as_saved(model: torch.nn.Module, held: dict[str, Any], rank: int) -> Iterable[tuple[str, Any]]:
    """Return the shards that a rank holds as shards of a checkpoint's tensors, without gathering any.

    A tensor that a checkpoint holds in another form is converted alone, when it is asked for, in memory for all of it.
    If there is no such tensor, these are the items of `held`.

    Raises:
        ConfigError: a checkpoint's tensor is made of several in memory, or of one in another order.
    """
    wanted = _saved_shapes(model, held)
    if all(wanted.get(name) == tensor.shape for name, tensor in held.items()):
        return held.items()
    return _convert_shards(model, held, wanted, rank)


def _convert_shards(
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
        marks = as_saved(model, {name: known})
        for saved_name, values in as_saved(model, {name: whole}).items():
            places = marks[saved_name].flatten().nonzero().flatten()
            start, stop = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
            if wanted.get(saved_name) != values.shape or stop - start != len(places):
                raise ConfigError(
                    f"{name} has another name or shape in memory than in a checkpoint of "
                    f"{type(unwrap_model(model)).__name__}, which cannot be undone for shards. Train this model with DDP."
                )
            yield saved_name, TensorRange(values.flatten()[start:stop], start, tuple(values.shape))


def stream_of(model: torch.nn.Module, adapter_only: bool = False) -> Iterable[tuple[str, Any]]:
    """Return what this process is to publish, as `save_pretrained` would write it, in the dtype of training.

    The tensors of a dict's items alias the live weights or stay in memory; those of an iterator are made when asked for.

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

    If layers share parameters, or a checkpoint's tensor is made of several, all are merged first.
    """
    if adapter.merges_by_layers(model):
        base = adapter.unloaded(model)
        held = held_tensors(base)
        alone = [_saved_shapes(base, {name: tensor}) for name, tensor in held.items()]
        if {name: shape for shapes in alone for name, shape in shapes.items()} == _saved_shapes(base, held):
            for item in adapter.merged_by_layers(model, held):
                yield from as_saved(base, dict([item])).items()
            return
    base = adapter.merged(model)
    yield from as_saved(base, held_tensors(base)).items()


def streamed(stream: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return what a checkpoint of the model holds, while TRL streams its weights.

    TRL leaves out what is frozen, and names the rest as in memory. Its stream is read for adapters only, which are merged
    until it ends, and gathered, if they are sharded too, until the next tensor is asked for; so each is taken by itself.
    """
    if not is_peft(model):
        return stream_of(model)
    if is_sharded(model):
        return stream
    base = adapter.base_of(model)
    return (saved for item in stream for saved in as_saved(base, dict([item])).items())


def loaded_from(model: torch.nn.Module) -> str:
    """Return the checkpoint that `from_pretrained` loaded a model from: a directory, or a model on the Hub at a commit.

    Raises:
        ConfigError: it was not loaded from any.
    """
    config = getattr(adapter.base_of(model), "config", None)
    name, commit = getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)
    if not name:
        raise ConfigError('The model does not say what it was loaded from, so initial="auto" is not for it; name it.')
    return str(name) if commit is None else f"{name}@{commit}"


def checkpoint_files(model: torch.nn.Module, processing_class: Any, dtype: str) -> dict[str, bytes]:
    """Return config, generation config and tokenizer, where there are any, as `save_pretrained` writes them, by file name.

    `dtype` is as `PublisherSettings.dtype`; config.json names the dtype of most tensors.
    """
    model = adapter.base_of(model)
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
