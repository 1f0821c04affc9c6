"""vLLM's layers, which vLLM changes after loading: copies as its loader expects them, and weights that stay patchable."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from deltasync.live.plan import held_tensors
from deltasync.tensors.bits import int_view
from vllm_plugin import logger


def as_loaded(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[torch.nn.Module, torch.nn.Module]]:
    """Return a model for `load_weights`, without LoRA's wrappers, and with meta tensors for parameters that vLLM changed.

    Its modules are copies that share all other tensors with `model`, which is not touched. Also returns their originals.
    """
    copies: dict[torch.nn.Module, torch.nn.Module] = {}

    def copy_of(module: torch.nn.Module) -> torch.nn.Module:
        if any(base.__name__ == "BaseLayerWithLoRA" for base in type(module).__mro__):
            module = module.base_layer  # type: ignore[assignment]
        if module not in copies:
            twin = copies[module] = copy.copy(module)
            if hasattr(vars(twin).get("load_weights"), "deltasync_refuses"):
                del twin.load_weights
            twin._parameters = {**module._parameters, **_before_changes(module)}  # type: ignore[dict-item]
            twin._buffers = dict(module._buffers)
            twin._modules = {name: child and copy_of(child) for name, child in module._modules.items()}
        return copies[module]

    return copy_of(model), {twin: module for module, twin in copies.items()}


def computed_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's parameters that vLLM added after loading the model; none if it also changed others in the layer."""
    recorded = _recorded(layer)
    if recorded is None or _before_changes(layer):
        return {}
    names = layer._parameters.keys() - recorded.keys() - {"bias"}  # vLLM does not record a bias
    return {name: tensor for name in sorted(names) if (tensor := layer._parameters[name]) is not None}


def _before_changes(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's parameters as they were before vLLM changed them: meta tensors with weight loaders, or none."""
    recorded = _recorded(layer) or {}
    if all(_layout(layer._parameters.get(name)) == _layout(tensor) for name, tensor in recorded.items()):
        return {}
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    before = {name: restore_layer_refs(to_meta_tensor(tensor), layer) for name, tensor in recorded.items()}
    for tensor in before.values():
        tensor.weight_loader = _get_original_loader(tensor)
    return before


def _recorded(layer: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the parameters before loading, as vLLM keeps them for its layerwise reload, or None if it does not."""
    layerwise = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    info = None if layerwise is None else layerwise.LAYERWISE_INFO.get(layer)
    return None if info is None else info.restore_metadata[0]


def _layout(tensor: torch.Tensor | None) -> tuple[torch.dtype, torch.Size] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape)


@dataclasses.dataclass(frozen=True)
class _Built:
    """A model before its weights were loaded: names of its modules, and the sums of what it held beside parameters."""

    modules: frozenset[str]
    sums: dict[tuple[int, str], int]


_built: weakref.WeakKeyDictionary[torch.nn.Module, _Built] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[torch.nn.Module, set[tuple[int, str]]] = weakref.WeakKeyDictionary()


def note_built() -> None:
    """Make vLLM note a model before it loads weights, to see what that changes. Call before a model is configured."""
    from vllm.model_executor.model_loader import utils

    record = utils.record_metadata_for_reloading

    @functools.wraps(record)
    def record_metadata_for_reloading(model: torch.nn.Module) -> None:
        _built[model] = _Built(frozenset(name for name, _ in model.named_modules()), _sums(model))
        record(model)

    utils.record_metadata_for_reloading = record_metadata_for_reloading


def note_loaded(model: torch.nn.Module) -> None:
    """Note what loading weights changed beside a model's parameters. Only the first call for a model does something."""
    if model in _built and model not in _made:
        before = _built[model].sums
        _made[model] = {key for key, value in _sums(model).items() if before.get(key) != value}


def is_complete(model: torch.nn.Module) -> bool:
    """Whether a model is known to have all modules with which it was built: its loader then ignores what it ignored."""
    return model in _built and _built[model].modules <= {name for name, _ in model.named_modules()}


def is_made(model: torch.nn.Module, holder: Any, name: str) -> bool:
    """Whether loading weights is known to have changed `holder.name`, or to have made it."""
    return (id(holder), name) in _made.get(model, ())


def _sums(model: torch.nn.Module) -> dict[tuple[int, str], int]:
    """Return the sums of the bits of tensors that holders have beside parameters, and that are not one repeated value."""
    return {
        (id(holder), name): int(int_view(tensor).sum())
        for holder in holders(model)
        for name, tensor in held_tensors(holder).items()
        if not isinstance(tensor, torch.nn.Parameter) and may_be_made(tensor)
    }


def may_be_made(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values may come from weights: floating point, and not one repeated value as default scales are."""
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() < 2:
        return False
    flat = int_view(tensor)
    return not bool((flat == flat[0]).all())


def holders(model: torch.nn.Module) -> Iterator[Any]:
    """Yield modules, and objects that those hold and that process weights, such as an attention's `impl`."""
    seen: set[int] = set()
    for module in model.modules():
        for holder in (module, *filter(_processes, vars(module).values())):
            if id(holder) not in seen:
                seen.add(id(holder))
                yield holder


def _processes(value: object) -> bool:
    return is_object(value) and callable(getattr(value, "process_weights_after_loading", None))


def is_object(value: object) -> bool:
    """Whether a module's attribute may hold tensors in attributes of its own, without being a module."""
    return not isinstance(value, torch.nn.Module | torch.Tensor | type) and hasattr(value, "__dict__")


def keep_weights_addressable() -> None:
    """Make vLLM's layers on CPUs use weights as loaded. Call before a model is configured; does nothing on GPUs.

    By default vLLM repacks them for oneDNN or SGL kernels, and those of latent attention for AMX, and frees the original, so
    no address holds a checkpoint element.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    @functools.wraps(utils.check_cpu_sgl_kernel)
    def check_cpu_sgl_kernel(*_: object) -> bool:
        return False

    configure = CpuPlatform.check_and_update_config

    @functools.wraps(configure)
    def check_and_update_config(vllm_config: Any) -> None:
        if vllm_config.attention_config.backend is None and getattr(vllm_config.model_config, "use_mla", False):
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        configure(vllm_config)

    vllm._custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = check_cpu_sgl_kernel
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    logger.info("deltasync keeps weights on CPUs unpacked so that they can be patched in place")


def prepare_reload(layer: Any) -> None:
    """Make vLLM repack an expert layer on a CPU when it is loaded again: 0.31 only does so when it builds the kernel."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
        layer.quant_method.moe_kernel = None
