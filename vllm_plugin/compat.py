"""The list of all that deltasync uses of vLLM beyond its documented interfaces, and the configurations that
it refuses.

Every entry is looked up when a server starts. If one is missing or takes other arguments, or if deltasync was
not run with this version of vLLM, the server starts with the weights that it loaded, says so in one sentence,
and does not follow. `make check-vllm` looks the entries up in the source of a vLLM that cannot run here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence, Set
from typing import Any

VERSIONS = ("0.32", "0.33")
"""Minor versions of vLLM that deltasync follows with; docs/operations/vllm.md says how each was tested."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One thing in vLLM that deltasync calls, replaces or reads.

    Attributes:
        module: The module that defines it.
        name: Its dotted name within the module.
        arguments: Names of a function's first parameters after `self`, in order; None if it is not a
            function.
        since: The first minor version that has it.
        source_only: Checked in sources, not at start: only instances have it, or it is in another device's
            build.
    """

    module: str
    name: str
    arguments: tuple[str, ...] | None = None
    since: str = VERSIONS[0]
    source_only: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + (
            "" if self.arguments is None else f"({', '.join(self.arguments)})"
        )


_CORE, _CLIENT, _ASYNC = "vllm.v1.engine.core", "vllm.v1.engine.core_client", "vllm.v1.engine.async_llm"
_LOADER, _OFFLOADING = (
    "vllm.model_executor.model_loader",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading",
)
_RELOAD, _MODELS = f"{_LOADER}.reload", "vllm.entrypoints.openai.models.serving"

_MODEL = "vllm_config", "executor_class", "log_stats"

USES = (
    # salt.py, engine.py: caches by version, and calls that are added, in the engine's process
    Use(_CORE, "EngineCore.preprocess_add_request", ("request",)),
    Use(_CORE, "EngineCore.set_weight_version", ("weight_version",)),
    Use(_CORE, "EngineCore.get_weight_version", ()),
    Use(_CORE, "EngineCoreProc._send_abort_outputs", ("aborted_reqs",)),
    Use("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("request_ids", "finished_status")),
    Use(_CORE, "EngineCore.wake_up", ("tags",)),
    Use(_CORE, "EngineCore.pause_scheduler", ("mode", "clear_cache")),
    Use(_CORE, "EngineCore.resume_scheduler", ()),
    Use(_CORE, "EngineCore.is_scheduler_paused", ()),
    Use("vllm.v1.engine", "EngineCoreRequestType.WAKEUP"),
    Use(_CORE, "EngineCoreProc.input_queue", source_only=True),
    Use(_CORE, "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Use(_CORE, "EngineCore.reset_prefix_cache", ("reset_running_requests", "reset_connector")),
    Use(_CORE, "EngineCore.reset_encoder_cache", ()),
    Use("vllm.multimodal.inputs", "MultiModalFeatureSpec"),
    Use(
        "vllm.v1.core.encoder_cache_manager",
        "EncoderCacheManager.check_and_update_cache",
        ("request", "input_id"),
    ),
    Use("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager.free", ("request",)),
    Use("vllm.multimodal.utils", "strip_covered_mm_data", ("mm_features", "num_computed_tokens")),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.prefix_cache_lookup_enabled", ("request",)),
    Use("vllm.v1.core.sched.scheduler", "Scheduler._update_waiting_for_remote_kv", ("request",)),
    Use(f"{_OFFLOADING}.scheduler", "RequestOffloadState.update_offload_keys", ()),
    Use("vllm.v1.request", "Request.update_block_hashes", ()),
    # pauses.py, engine.py, servers.py: the engine client, public but for the two that follow it
    Use(_CLIENT, "AsyncMPClient.__init__", (*_MODEL, "client_addresses", "client_count", "client_index")),
    Use(_ASYNC, "AsyncLLM.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Use(_ASYNC, "AsyncLLM.pause_generation", ("mode",)),
    Use(_ASYNC, "AsyncLLM.resume_generation", ()),
    Use(_ASYNC, "AsyncLLM.is_paused", ()),
    Use(_ASYNC, "AsyncLLM.sleep", ("level", "mode")),
    Use(_ASYNC, "AsyncLLM.wake_up", ("tags",)),
    Use(_ASYNC, "AsyncLLM.update_weight_version", ("new_version",)),
    Use(_CLIENT, "AsyncMPClient.pause_scheduler_async", ("mode", "clear_cache")),
    Use(_CLIENT, "AsyncMPClient._call_utility_async", ("method", "args", "engine")),
    # __init__.py: whether an engine answers
    Use("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ("request_id", "prompt", "params")),
    # versions.py: which weights made which token; __init__.py: whether any should
    Use(_ASYNC, "AsyncLLM.generate", ("prompt", "sampling_params", "request_id")),
    Use(_ASYNC, "AsyncLLM.encode", ("prompt", "pooling_params", "request_id")),
    Use("vllm.outputs", "WeightVersionSpan"),
    # load/: the model as its loader knows it, held by either of vLLM's model runners
    *(
        Use(f"vllm.v1.worker.{runner}", f"GPUModelRunner.{name}", source_only=True)
        for runner in ("gpu.model_runner", "gpu_model_runner")
        for name in ("get_model", "load_config", "model_config", "device")
    ),
    # worker.py: a worker's start, its steps and sleep; copies of weights that an attention makes again
    *(
        Use("vllm.v1.worker.gpu_worker", f"Worker.{name}", source_only=True)
        for name in ("load_model", "execute_model", "reload_weights", "update_weights", "sleep", "wake_up")
    ),
    Use("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", (), source_only=True),
    Use(
        "vllm.v1.attention.backend",
        "AttentionImplBase.process_weights_after_loading",
        ("act_dtype",),
        source_only=True,
    ),
    Use(_LOADER, "get_model_loader", ("load_config",)),
    Use(f"{_LOADER}.default_loader", "DefaultModelLoader.get_all_weights", ("model_config", "model")),
    Use(f"{_RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    Use(f"{_RELOAD}.layerwise", "finalize_layerwise_reload", ("args", "kwargs")),
    Use(f"{_RELOAD}.layerwise", "finalize_layerwise_processing", ("model", "model_config")),
    Use(f"{_RELOAD}.layerwise", "LAYERWISE_INFO"),
    Use(f"{_RELOAD}.layerwise", "_get_original_loader", ("tensor",)),
    Use(f"{_RELOAD}.utils", "get_layer_size", ("layer",)),
    Use(f"{_RELOAD}.meta", "materialize_layer", ("layer", "info")),
    Use(f"{_RELOAD}.meta", "to_meta_tensor", ("tensor",)),
    Use(f"{_RELOAD}.sanitize", "restore_layer_refs", ("tensor", "layer")),
    Use(f"{_RELOAD}.layerwise", "record_metadata_for_reloading", ("model",)),
    # load/layers.py: on CPUs, weights stay where they can be patched
    Use("vllm._custom_ops", "_supports_onednn"),
    Use("vllm.model_executor.layers.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    Use("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", ("vllm_config",)),
    Use("vllm.v1.attention.backends.registry", "AttentionBackendEnum.CPU_MLA"),
    # adapters.py: runtime LoRA
    Use(_MODELS, "OpenAIServingModels.load_lora_adapter", ("request",)),
    Use(_MODELS, "OpenAIServingModels.unload_lora_adapter", ("request",)),
    Use(_MODELS, "OpenAIServingModels.is_base_model", ("model_name",)),
    Use(_ASYNC, "AsyncLLM.add_request", ("request_id",)),
    Use(_ASYNC, "AsyncLLM.abort", ("request_id", "internal")),
    # backend.py: vLLM's own weight-transfer routes
    Use("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine", ("name",)),
    Use("vllm.distributed.parallel_state", "get_world_group", ()),
    # trainer_side.py: a trainer's weights
    *(
        Use("vllm.distributed.weight_transfer.base", f"WeightSource.{name}", arguments, "0.33")
        for name, arguments in {
            "iter_full": (),
            "implements_iter_full": (),
            "owned_names": ("rank",),
            "metadata": None,
        }.items()
    ),
)


def unsuited(version: str) -> str | None:
    """Return why deltasync does not follow with the imported vLLM of this version, in one sentence, or None
    if it does.
    """
    return outside(version) or changed(version)


def outside(version: str) -> str | None:
    """Return why deltasync does not follow with this version of vLLM, in one sentence, or None if it was run
    with it.
    """
    if minor_of(version) in VERSIONS:
        return None
    return (
        f"deltasync was run with vLLM {VERSIONS[0]} to {VERSIONS[-1]}, not with {version}: install one of "
        "these, or a newer "
        "deltasync."
    )


def changed(version: str) -> str | None:
    """Return what the imported vLLM of this version lacks, in one sentence, or None if it has all of
    `USES`.
    """
    wrong = missing([use for use in USES if not use.source_only], minor_of(version), _live_arguments)
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"vLLM {version} is not as deltasync knows it: {wrong[0]} has changed{more}." if wrong else None


def minor_of(version: str) -> str:
    """Return the minor version: `0.32` for `0.32.1`."""
    return ".".join(version.split(".")[:2])


def missing(
    uses: Sequence[Use], minor: str, arguments_of: Callable[[Use], Sequence[str] | None]
) -> list[Use]:
    """Return the uses that this minor version lacks. `arguments_of` lists parameters, and raises for what is
    missing.
    """
    wrong = []
    for use in uses:
        if VERSIONS.index(use.since) > VERSIONS.index(minor):
            continue
        try:
            found = arguments_of(use)
        except (ImportError, OSError, AttributeError, LookupError, TypeError, ValueError):
            wrong.append(use)
            continue
        if use.arguments is not None:
            names = tuple(name for name in found or () if name not in ("self", "cls"))
            if found is None or names[: len(use.arguments)] != use.arguments:
                wrong.append(use)
    return wrong


def _live_arguments(use: Use) -> Sequence[str] | None:
    found: Any = importlib.import_module(use.module)
    for part in use.name.split("."):
        found = getattr(found, part)
    return None if use.arguments is None else list(inspect.signature(inspect.unwrap(found)).parameters)


def unextended(vllm_config: Any) -> str | None:
    """Return that the workers of this configuration cannot follow, in one sentence, or None if they can."""
    from vllm_plugin.worker import DeltaSyncWorkerExtension

    name = vllm_config.parallel_config.worker_extension_cls
    if not name:
        return "vLLM was started without --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension."
    if issubclass(pkgutil.resolve_name(name), DeltaSyncWorkerExtension):
        return None
    return (
        f"vLLM was started with --worker-extension-cls {name}, not with "
        "vllm_plugin.DeltaSyncWorkerExtension: use that, or "
        "a class with both as its bases."
    )


KEYED = frozenset({"OffloadingConnector"})
"""Connectors that keep blocks by their hash, so that salts keep versions apart. Others were not run."""

# Caches that no salt keeps apart by version: their place in the configuration, what they keep, and the
# option.
_CACHES = (
    ("kv_transfer_config", "kv_connector", "keys", "--kv-transfer-config and --kv-offloading-size"),
    ("ec_transfer_config", "ec_connector", "encoder outputs", "EC transfer"),
    ("ec_manager_config", "encoder_cache_manager_cls", "encoder outputs", "encoder_cache_manager_cls"),
)


def refusal(vllm_config: Any, keyed: Set[str] = KEYED) -> str | None:
    """Return why nothing can follow with this configuration, in one sentence, or None if it can.

    Args:
        vllm_config: vLLM's whole configuration.
        keyed: Connectors that do not hand requests keys of other weights; none where requests have no salts.
    """
    for config, name, what, option in _CACHES:
        cache = getattr(getattr(vllm_config, config, None), name, None)
        if cache is not None and cache not in keyed:
            return f"{cache} may hand requests {what} that other weights computed: leave {option} out."
    if (
        getattr(getattr(vllm_config, "speculative_config", None), "draft_lm_head_quantization", None)
        is not None
    ):
        return (
            "draft_lm_head_quantization keeps a copy of lm_head for the drafter, which deltas do not reach: "
            "leave it out of "
            "--speculative-config."
        )
    parallel = vllm_config.parallel_config
    if (
        getattr(parallel, "is_moe_model", False)
        and parallel.data_parallel_size > 1
        and parallel.local_engines_only
    ):
        return (
            "Servers that share experts would take a version at different times: start them as one, without "
            "--data-parallel-rank, --data-parallel-start-rank and load balancing between them."
        )
    if parallel.enable_eplb:
        return "--enable-eplb moves experts to other places at run time, where deltas would not find them: leave it out."
    offload, load = getattr(vllm_config, "offload_config", None), vllm_config.load_config
    if offload is not None and (
        offload.offload_backend == "prefetch"
        or (offload.offload_backend == "auto" and offload.prefetch.offload_group_size > 0)
    ):
        return "Prefetch offloading refills weights from copies that deltas do not reach: use --cpu-offload-gb, or neither."
    if load.load_format == "ipc_cache" and (load.model_loader_extra_config or {}).get("mode") != "copy":
        return (
            "--load-format ipc_cache shares the weights with other processes, which deltas would change too: "
            "add "
            '--model-loader-extra-config \'{"mode": "copy"}\'.'
        )
    return None
