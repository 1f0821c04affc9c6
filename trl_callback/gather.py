"""The contents of a checkpoint of a model: the tensors, named and shaped as `save_pretrained` writes them,
and the other files.

A checkpoint may hold tensors under other names or in other shapes than memory does, the experts of a mixture
for example. transformers converts them when it loads a model and converts them back when it saves one; here
that is done for shards, too.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from deltasync.channel import anchors
from deltasync.config import AUTO
from deltasync.errors import ConfigError
from deltasync.opening.adapter_base import AdapterBase
from deltasync.tensors.bits import readable
from deltasync.trainer.stream import (
    MARKS,
    QUANTIZATION,
    TensorRange,
    by_rows,
    empty_like,
    is_range,
    live_tensors,
    module_tensors,
    part_of,
    unwrapped,
)
from trl_callback import adapter

logger = logging.getLogger(__name__)


def is_peft(model: torch.nn.Module) -> bool:
    """Whether the model has adapters, by PEFT or by the integration of transformers; peft itself need not be
    installed.
    """
    return bool(getattr(unwrapped(model), "peft_config", None))


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2, ZeRO-3 or tensor parallelism shards the model, so that this process holds a part of
    it.
    """
    sharded = (hasattr(param, "placements") or hasattr(param, "ds_id") for param in model.parameters())
    return any(isinstance(module, FSDPModule) for module in model.modules()) or any(sharded)


def check_publishable(model: torch.nn.Module, adapter_only: bool | str = False) -> None:
    """Check that the processes hold everything that is to be published, whole or in shards (else
    ConfigError).
    """
    if adapter_only:
        adapter.check(model, adapter_only)
    elif is_peft(model) and not hasattr(unwrapped(model), "merge_and_unload"):
        raise ConfigError(
            "A model with adapters is published by its merged weights, and these adapters cannot be merged. "
            "Use "
            "peft.get_peft_model, with a method that can merge, such as LoRA."
        )
    if is_peft(model) and is_sharded(model) and not adapter_only:
        raise ConfigError(
            "Adapters of a sharded model cannot be merged. Publish the adapter with adapter_only=True, or train "
            "with DDP or ZeRO-2."
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "The parameters are sharded by FSDP1, which DeltaSyncCallback cannot publish. Train with FSDP2."
        )
    if is_sharded(model):
        for name, tensor in model.named_parameters():
            if hasattr(tensor, "placements") and is_range(tensor):  # others are cut again
                part_of(name, tensor)


def check_form_of(model: torch.nn.Module, adapter_only: bool | str = False) -> None:
    """Check before training that a model can be published, and that saving keeps what is trained (else
    ConfigError).
    """
    check_publishable(model, adapter_only)
    if adapter_only:
        return
    if is_peft(model):
        adapter.check_merges(model)
    elif not is_sharded(model):
        held = held_tensors(model)
        check_form(model, held, saved_form(model, held))


def held_tensors(model: torch.nn.Module, live: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return parameters and persistent buffers by their name in memory, each storage once; they alias the
    live weights.

    Of a sharded tensor it is this process's part: a `DTensor` from FSDP2, a `TensorRange` from ZeRO-3. `live`
    are the tensors, where none is marked as a shard; by default they are asked for.
    """
    if live is None:
        live = {
            name: part_of(name, tensor) if hasattr(tensor, "ds_id") else tensor
            for name, tensor in module_tensors(model).items()
        }
    for name in getattr(unwrapped(model), "_keys_to_ignore_on_save", None) or ():
        live.pop(name, None)
    return live


@torch.no_grad()
def as_saved(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors, all of a model's or some, as a checkpoint holds them.

    Of a model that was dequantized when it was loaded, the checkpoint has the weights as they are trained.
    """
    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        return tensors
    loaded = getattr(model, "_weight_conversions", None) or ()
    operations = [operation for each in loaded for operation in getattr(each, "operations", ())]
    is_foreign = any(
        type(operation).__module__ != revert_weight_conversion.__module__ for operation in operations
    )
    if not is_foreign or _is_quantized(model):
        return revert_weight_conversion(model, tensors)
    # With the quantizer's, which transformers does not distinguish from the model's, weights would be
    # quantized again.
    model._weight_conversions = [
        *(
            each
            for each in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(each, PrefixChange)
        ),
        *(each for each in loaded if isinstance(each, PrefixChange)),
    ]
    try:
        return revert_weight_conversion(model, tensors)
    finally:
        model._weight_conversions = loaded


def _is_quantized(model: torch.nn.Module) -> bool:
    """Whether the model holds weights in a quantized dtype."""
    return any(param.element_size() < 2 or not param.is_floating_point() for param in model.parameters())


def saved_form(model: torch.nn.Module, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return names, shapes and dtypes that a checkpoint has for these tensors, as tensors without values."""
    meta = {
        name: torch.empty(tensor.shape, dtype=getattr(tensor, "held", tensor).dtype, device="meta")
        for name, tensor in tensors.items()
    }
    return as_saved(model, meta)


def check_form(model: torch.nn.Module, held: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a checkpoint holds just the elements of all of a model's tensors, in the same dtypes (else
    ConfigError).
    """

    def elements(tensors: Mapping[str, Any]) -> dict[torch.dtype, int]:
        counts: dict[torch.dtype, int] = {}
        for tensor in tensors.values():
            dtype = getattr(tensor, "held", tensor).dtype
            counts[dtype] = counts.get(dtype, 0) + math.prod(tensor.shape)
        return {dtype: count for dtype, count in counts.items() if count}

    before, after = elements(held), elements(saved)
    odd = [*filter(_ODD.search, saved)]
    if before != after or odd:
        raise ConfigError(
            f"A checkpoint of {type(unwrapped(model)).__name__} would not hold what is trained: "
            f"{_shown(before)} in memory, "
            f"{_shown(after)} saved{f', as {odd[0]}' if odd else ''}. Load it unquantized."
        )


_ODD = re.compile(r"[$^*\\]")
"""Characters of a pattern, in a name that a conversion has not made."""


def _shown(counts: Mapping[torch.dtype, int]) -> str:
    return " and ".join(f"{count:,} {str(dtype).removeprefix('torch.')}" for dtype, count in counts.items())


def shards_as_saved(model: torch.nn.Module, held: dict[str, Any], rank: int) -> Iterable[tuple[str, Any]]:
    """Return the shards that a rank holds as shards of a checkpoint's tensors, without gathering any.

    A tensor that a checkpoint holds in another form is converted alone, when it is asked for, in memory for
    all of it. If there is no such tensor, these are the items of `held`. A checkpoint's tensor that is made
    of several in memory, or of one in another order, is refused (ConfigError).
    """
    saved = saved_form(model, held)
    check_form(model, held, saved)
    wanted = {name: tensor.shape for name, tensor in saved.items()}
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
        shard: Any = dict(by_rows([(name, tensor)])())[name]
        part = part_of(name, shard) or TensorRange(
            shard if rank == 0 else shard.new_empty(0), 0, tuple(shard.shape)
        )
        here, local = slice(part.start, part.stop), readable(name, part.held)
        whole = local.new_empty(part.shape)
        whole.view(-1)[here] = local.flatten()
        known = torch.zeros(part.shape, dtype=torch.bool, device=whole.device)
        known.view(-1)[here] = True
        marks = as_saved(model, {name: known})
        for saved_name, values in as_saved(model, {name: whole}).items():
            places = marks[saved_name].flatten().nonzero().flatten()
            start, stop = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
            if wanted.get(saved_name) != values.shape or stop - start != len(places):
                raise ConfigError(
                    f"{name} has another name or shape in memory than in a checkpoint of "
                    f"{type(unwrapped(model)).__name__}, which cannot be undone for shards. Train this model "
                    "with DDP."
                )
            yield saved_name, TensorRange(values.flatten()[start:stop], start, tuple(values.shape))


def stream_of(model: torch.nn.Module, adapter_only: bool | str = False) -> Iterable[tuple[str, Any]]:
    """Return what this process is to publish, as `save_pretrained` would write it, in the dtype of training.

    The tensors of a dict's items alias the live weights or stay in memory; those of an iterator are made when
    asked for. Raises like `check_publishable`.
    """
    live = None if adapter_only or is_peft(model) else live_tensors(model)
    if live is not None and all(map(MARKS.isdisjoint, map(vars, live.values()))):
        return _whole(model, live).items()  # without shards, which the checks below find with four walks
    check_publishable(model, adapter_only)
    if is_sharded(model):
        held = adapter.shards(model, adapter_only) if adapter_only else held_tensors(model)
        shards = held.items() if adapter_only else shards_as_saved(model, held, dist.get_rank())
        columns = any(hasattr(tensor, "placements") and not is_range(tensor) for tensor in held.values())
        return by_rows(shards)() if columns else shards
    if adapter_only:
        return adapter.tensors(model, adapter_only).items()
    if is_peft(model):
        return _merged(model)
    return _whole(model).items()


def _whole(model: torch.nn.Module, live: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of a model that is neither sharded nor adapted; `live` as in
    `held_tensors`.
    """
    held = held_tensors(model, live)
    saved = as_saved(model, held)
    check_form(model, held, saved)
    return saved


def _merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A PEFT model as a checkpoint holds it, adapters merged into a copy of one layer at a time.

    If layers share parameters, or a checkpoint's tensor is made of several, all are merged first.
    """
    if adapter.merges_by_layers(model):
        base = adapter.unloaded(model)
        held = held_tensors(base)
        saved = saved_form(base, held)
        check_form(base, held, saved)
        alone = [saved_form(base, {name: tensor}) for name, tensor in held.items()]
        shapes = {name: tensor.shape for each in alone for name, tensor in each.items()}
        if shapes == {name: tensor.shape for name, tensor in saved.items()}:
            for item in adapter.merged_by_layers(model, held):
                yield from as_saved(base, dict([item])).items()
            return
    yield from _whole(adapter.merged(model)).items()


def adapter_base_of(model: torch.nn.Module) -> AdapterBase:
    """Return the base model of an adapter; of a sharded model what this process adds to it
    (`AdapterBase.summed`).
    """
    base, tensors = adapter.base_of(model), adapter.base_tensors(model)
    name = "" if not getattr(getattr(base, "config", None), "_name_or_path", None) else loaded_from(model)
    is_quantized = _is_quantized(base) or bool(adapter.packed_layers(base))
    if not is_sharded(model):
        saved = tensors if is_quantized else as_saved(base, tensors)
        return AdapterBase.of(name, saved.items())
    rank = dist.get_rank()
    parts = {each: _part(each, tensor, rank) for each, tensor in tensors.items()}
    return AdapterBase.of(name, parts.items() if is_quantized else shards_as_saved(base, parts, rank))


def _part(name: str, tensor: torch.Tensor, rank: int) -> TensorRange:
    """Return what a rank adds to a tensor of a sharded model; of one that all hold whole the first rank adds
    it.
    """
    whole = TensorRange(tensor if rank == 0 else empty_like(tensor), 0, tuple(tensor.shape))
    return part_of(name, tensor) or whole


def loaded_from(model: torch.nn.Module) -> str:
    """Return the checkpoint that `from_pretrained` loaded a model from: a directory, or a model on the Hub at
    a commit.
    """
    config = getattr(adapter.base_of(model), "config", None)
    name, commit = getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)
    if not name:
        raise ConfigError(
            'The model does not name the checkpoint that it was loaded from. Name it instead of initial="auto".'
        )
    return str(name) if commit is None else f"{name}@{commit}"


def served_dtypes(model: torch.nn.Module, dtype: str) -> str:
    """Return a rule for served dtypes that keeps what transformers always holds in float32, unless the rule
    says other.

    `auto` becomes the dtype of 16 bits that the whole model is served in; it stays where some tensors have
    another one.
    """
    names = getattr(adapter.base_of(model), "_keep_in_fp32_modules_strict", None) or ()
    default, *patterns = dtype.split(",")
    if default == AUTO:
        main, others = _main_dtype(model)
        default = AUTO if others else main
    kept = [f"*{name}*=keep" for name in sorted(names)] if default not in ("keep", "fp8") else []
    return ",".join([default, *kept, *patterns])


def _main_dtype(model: torch.nn.Module) -> tuple[str, bool]:
    """Return `float16` if most elements have it, else `bfloat16`, and whether any tensor has the other one of
    these.
    """
    counts: dict[torch.dtype, int] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + getattr(tensor, "ds_numel", tensor.numel())
    is_half = counts.get(torch.float16, 0) > sum(
        count for dtype, count in counts.items() if dtype in _OTHER_FLOATS
    )
    return ("float16" if is_half else "bfloat16"), (torch.bfloat16 if is_half else torch.float16) in counts


_OTHER_FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def checkpoint_files(model: torch.nn.Module, processing_class: Any, dtype: str) -> dict[str, bytes]:
    """Return config, generation config and tokenizer, where there are any, as `save_pretrained` writes them,
    by file name.

    `dtype` is as `PublisherSettings.dtype`; config.json names the dtype of most tensors, and whether these
    are tied and quantized. A file that cannot be saved is left out, with a warning.
    """
    is_adapted = is_peft(model) and hasattr(unwrapped(model), "get_base_model")
    model = unwrapped(adapter.unloaded(model) if is_adapted else model)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, PreTrainedModel):
            config = _config(model, dtype)
            if model._auto_class is not None:  # its code was loaded from a checkpoint, and a config names it
                _guarded("code", lambda: custom_object_save(model, folder, config=config))
            config.save_pretrained(folder)
            if model.can_generate():
                _guarded("generation config", lambda: model.generation_config.save_pretrained(folder))
        if processing_class is not None:
            _guarded("tokenizer or processor", lambda: processing_class.save_pretrained(folder))
        return anchors.read_model_files(Path(folder))


def _guarded(what: str, save: Callable[[], object]) -> None:
    try:
        save()
    except Exception as error:  # noqa: BLE001 - training needs no such file, and any error may occur
        reason = str(error).partition("\n")[0]
        logger.warning(
            "Checkpoints of the channel will have no %s: %s: %s", what, type(error).__name__, reason
        )


def _config(model: PreTrainedModel, dtype: str) -> Any:
    """The config of the published weights, which may differ from the model's."""
    config, default = copy.deepcopy(model.config), dtype.partition(",")[0]
    named = {"keep": str(model.dtype).removeprefix("torch."), "fp8": "bfloat16", AUTO: _main_dtype(model)[0]}
    config.dtype = named.get(default, default)
    if dtype == "fp8":
        config.quantization_config = QUANTIZATION
    elif hasattr(config, "quantization_config") and not _is_quantized(model):
        del config.quantization_config
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    # transformers gives a head that was trained apart the weights of the embeddings, if a config says that
    # they are tied.
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    if any(re.search(pattern, name) for name in held_tensors(model) for pattern in tied):
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False
    return config
