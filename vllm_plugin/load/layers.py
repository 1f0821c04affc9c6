"""vLLM's loader and its layers: copies as the loader expects them, and weights that stay patchable."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.serve import derived, load_plan
from deltasync.serve.engine import around
from vllm_plugin import logger


def restore(twin: torch.nn.Module, module: torch.nn.Module) -> None:
    """Give a copy of a module what its loader expects for parameters that vLLM changed after loading, and its
    own `load_weights`.
    """
    if hasattr(vars(twin).get("load_weights"), "deltasync_refuses"):
        del twin.load_weights
    twin._parameters |= _loadable(module)  # type: ignore[arg-type]


def computed_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a layer's parameters that vLLM added after loading the model; none if it also changed others in
    the layer.
    """
    recorded = _recorded(layer)
    if recorded is None or _is_changed(layer, recorded):
        return {}
    names = layer._parameters.keys() - recorded.keys() - {"bias"}  # vLLM does not record a bias
    return {name: tensor for name in sorted(names) if (tensor := layer._parameters[name]) is not None}


LOADER = load_plan.Loader("vLLM", restore, computed_parameters)
"""How vLLM loads models."""


@contextlib.contextmanager
def alone(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have vLLM's online FP8, in the body, find the largest values of layers that workers divide in these whole
    weights, which are on the host, instead of asking the other workers.

    Workers load twins while all of them compute: a collective would wait for a worker whose twin failed, or
    would be taken for another one.
    """
    online: Any = sys.modules.get("vllm.model_executor.layers.quantization.online.fp8")
    if not hasattr(online, "amax_for_tp_weight_quant"):
        yield
        return
    reduce = online.amax_for_tp_weight_quant
    matrices = [weight for weight in weights if weight.ndim > 1]

    def of_whole(amax: torch.Tensor, is_sharded: bool) -> torch.Tensor:
        if not is_sharded:
            return amax
        rows = [matrix.abs().amax(-1, keepdim=True) for matrix in matrices]
        found = torch.stack(rows if amax.ndim > 1 else [row.max().reshape(1) for row in rows])
        return found.amax(0).to(amax)

    online.amax_for_tp_weight_quant = of_whole
    try:
        yield
    finally:
        online.amax_for_tp_weight_quant = reduce


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Have vLLM process a layer, in the body, when its reload is finalized, with all of its weights.

    By itself it does so once it has counted as many elements as the layer has. It then drops what comes later:
    of experts' FP8 with a scale for each tensor two projections share the scale of the input, which counts twice.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    size = layerwise.get_layer_size
    layerwise.get_layer_size = lambda _: sys.maxsize
    try:
        yield
    finally:
        layerwise.get_layer_size = size


def draft(runner: Any) -> tuple[torch.nn.Module | None, bool]:
    """Return the draft model of either of vLLM's model runners, and whether the model's own checkpoint has
    it.
    """
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    model = getattr(drafter, "model", None)
    if not isinstance(model, torch.nn.Module):
        return None, False
    config = runner.speculative_config
    return model, config.method == "mtp" and config.draft_model_config.model == runner.model_config.model


def checkpoint(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a vLLM model runner loaded its model from.

    Raises:
        ModelMismatchError: it was not loaded from a checkpoint that can be read again.
    """
    yield from _checkpoint(runner.load_config, runner.model_config, runner.get_model())


def draft_checkpoint(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As `checkpoint`, of the draft that has one of its own."""
    config, (model, _) = runner.speculative_config, draft(runner)
    yield from _checkpoint(config.draft_load_config or runner.load_config, config.draft_model_config, model)


def _checkpoint(load_config: Any, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ModelMismatchError(
            f"vLLM loaded its weights by {type(loader).__name__}, so it cannot be proven where they are. "
            "Serve a checkpoint, without --load-format."
        )
    yield from loader.get_all_weights(model_config, model)


def _loadable(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return those of a layer's parameters that vLLM put others in the place of, as its weight loaders expect
    them: meta tensors of all if any has another dtype or shape now, otherwise views of the others.
    """
    recorded = _recorded(layer) or {}
    is_changed, now = _is_changed(layer, recorded), layer._parameters
    # of a class of vLLM's, whose methods load it, before; a plain parameter after `replace_parameter`
    wanted = {
        name: each for name, each in recorded.items() if is_changed or type(each) is not type(now[name])
    }
    if not wanted:
        return {}
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    found = {name: restore_layer_refs(to_meta_tensor(tensor), layer) for name, tensor in wanted.items()}
    for name, tensor in found.items():
        tensor.weight_loader = _get_original_loader(tensor)
        if not is_changed:
            found[name] = view = now[name].data  # type: ignore[union-attr]
            view.__class__, view.__dict__ = tensor.__class__, tensor.__dict__
    return found


def _is_changed(layer: torch.nn.Module, recorded: dict[str, torch.Tensor]) -> bool:
    """Whether a parameter has another dtype or shape than before vLLM changed the layer."""
    return any(_layout(layer._parameters.get(name)) != _layout(tensor) for name, tensor in recorded.items())


def _recorded(layer: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the parameters before loading, as vLLM keeps them for its layerwise reload, or None if it does
    not.
    """
    layerwise = sys.modules.get("vllm.model_executor.model_loader.reload.layerwise")
    info = None if layerwise is None else layerwise.LAYERWISE_INFO.get(layer)
    return None if info is None else info.restore_metadata[0]


def _layout(tensor: torch.Tensor | None) -> tuple[torch.dtype, torch.Size] | None:
    return None if tensor is None else (tensor.dtype, tensor.shape)


def note_models() -> None:
    """Make vLLM note a model before it loads weights, to see what that changes. Call before a model is
    configured.
    """
    from vllm.model_executor.model_loader import utils

    @around(utils, "record_metadata_for_reloading")
    def note(record: Any, model: torch.nn.Module) -> None:
        derived.note_built(model)
        record(model)


LATER = {
    # experts whose router and shared expert have one gate: Qwen3-Next on AMD's
    "_combined_gate_weight": "_fse_fuse_gate",
    "_merged_conv_weight": None,  # GLM-5 Next
    "_wp_fp32": None,  # its indexer
    "_fused_weight": None,  # Muse Spark, vLLM 0.33
}
"""As `derived.find` takes them: what loading makes is seen by itself; these do not exist yet when a channel
is opened.
"""


def keep_weights_addressable() -> None:
    """Make vLLM's layers on CPUs use weights as loaded. Call before a model is configured; does nothing on
    GPUs.

    By default vLLM repacks them for oneDNN or SGL kernels, and those of latent attention for AMX, and frees
    the original, so no address holds a checkpoint element.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    configure = CpuPlatform.check_and_update_config

    @functools.wraps(configure)
    def check_and_update_config(vllm_config: Any) -> None:
        if vllm_config.attention_config.backend is None and getattr(
            vllm_config.model_config, "use_mla", False
        ):
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        configure(vllm_config)

    vllm._custom_ops._supports_onednn = False
    around(utils, "check_cpu_sgl_kernel")(lambda *_: False)
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    logger.info("deltasync keeps weights on CPUs unpacked so that they can be patched in place")


def prepare_reload(layer: Any) -> None:
    """Make vLLM repack an expert layer on a CPU when it is loaded again: it only does so when it builds the
    kernel.
    """
    from vllm.platforms import current_platform

    if (
        current_platform.is_cpu()
        and getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None
    ):
        layer.quant_method.moe_kernel = None
