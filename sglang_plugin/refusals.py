"""Refusals at start, in one sentence: versions of SGLang that were not run, options and models that cannot be
followed.
"""

from __future__ import annotations

from typing import Any

import torch

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError

VERSIONS = ("0.5.23",)  # of SGLang

OPTIONS: dict[str, dict[str, object]] = {
    "hands prompts keys that other weights computed": {
        **{
            "enable_hierarchical_cache": False,
            "enable_lmcache": False,
            "enable_flexkv": False,
            "radix_cache_backend": None,
        },
        **{"enable_unified_cache_external_linker": False, "enable_streaming_session": False},
        **{"enable_session_radix_cache": False, "disaggregation_mode": "null"},
    },
    "hands requests encoder outputs that other weights computed": {
        **{
            "enable_prefix_mm_cache": False,
            "enable_mm_global_cache": False,
            "language_only": False,
            "encoder_only": False,
        },
    },
    "holds weights in copies, places or processes that deltas do not reach": {
        **{
            "cpu_offload_gb": 0,
            "offload_group_size": -1,
            "ple_offload_embedding": False,
            "enable_paged_experts": False,
        },
        **{
            "kt_weight_path": None,
            "weight_cache_mode": "off",
            "enable_eplb": False,
            "ep_num_redundant_experts": 0,
        },
        **{"elastic_ep_backend": None},
    },
    "was not run with deltasync": {
        **{
            "speculative_algorithm": None,
            "pp_size": 1,
            "dp_size": 1,
            "attn_dp_size": 1,
            "moe_dp_size": 1,
            "dwdp_size": 1,
        },
        **{"attn_cp_size": 1, "dcp_size": 1, "ep_size": 1, "nnodes": 1, "use_ray": False},
        **{"tokenizer_worker_num": 1, "smg_grpc_mode": False},
    },
}
"""The effect of options, and the only value of each with which a server follows."""

ADAPTER_OPTIONS: dict[str, dict[str, object]] = {
    "unloads versions of the adapter that requests may name": {"max_loaded_loras": None},
    "was not run with an adapter's channel": {
        **{"enable_memory_saver": False, "enable_lora_overlap_loading": False},
        **{"experts_shared_outer_loras": False, "quantization": None},
    },
}
"""As `OPTIONS`, of a server that follows an adapter."""

QUANTIZATIONS = ("fp8", "w8a8_fp8")
"""What SGLang may make of weights, proven to be made as a fresh server makes it."""


def check(server_args: Any) -> None:
    """Raise ConfigError for a server that would not follow its channel, or not safely."""
    import sglang
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs

    if sglang.__version__ not in VERSIONS:
        raise ConfigError(
            f"deltasync was run with SGLang {' and '.join(VERSIONS)}, not with {sglang.__version__}: install "
            "that, or a "
            "newer deltasync; or leave DELTASYNC_CHANNEL out."
        )
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError("SGLang's Rust server has no routes for deltasync: leave SGLANG_RUST_SERVER out.")
    settings, config = ReplicaSettings.from_env(), resolving_view(server_args)
    settings.check_no_max_lag()
    _check_adapter(settings.adapter, config)
    _check_quantization(config.quantization)
    for what, options in (OPTIONS | (ADAPTER_OPTIONS if settings.adapter else {})).items():
        for name, followed in options.items():
            found = getattr(config, name)
            if found != followed and (found or followed):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {found} {what}: leave it out, or serve without "
                    "DELTASYNC_CHANNEL."
                )


def _check_adapter(adapter: str | None, config: Any) -> None:
    """Raise ConfigError for a server whose LoRA does not fit what its channel holds."""
    if adapter is None and config.enable_lora:
        raise ConfigError(
            "--enable-lora holds weights in copies that deltas do not reach: leave it out, or name the adapter "
            "that the channel holds by DELTASYNC_ADAPTER."
        )
    if adapter is not None and not config.enable_lora:
        raise ConfigError("DELTASYNC_ADAPTER is set, but SGLang was started without --enable-lora.")
    if adapter is not None and adapter in (config.served_model_name, config.model_path):
        raise ConfigError(f"The adapter cannot be named {adapter}, as the model that SGLang serves.")


def check_model(model: Any) -> None:
    """Raise ConfigError for a model, as SGLang has loaded it, whose weights are not where deltas reach
    them.
    """
    if (quantization := getattr(model, "quant_config", None)) is not None:
        _check_quantization(quantization.get_name())
        for name, parameter in model.named_parameters():
            if made := [key for key, each in vars(parameter).items() if isinstance(each, torch.Tensor)]:
                raise ConfigError(
                    f"SGLang keeps {name}.{made[0]}, made of weights, where deltas do not reach it."
                )
    if any(getattr(module, "use_intel_amx_backend", False) for module in model.modules()):
        raise ConfigError("SGLang has packed this model's weights for AMX, where deltas do not reach them.")


def _check_quantization(name: str | None) -> None:
    if name is not None and name not in QUANTIZATIONS:
        raise ConfigError(
            f"Weights that SGLang quantizes by {name} were not run with deltasync: serve with --quantization "
            f"{' or '.join(QUANTIZATIONS)}, or without quantization."
        )
