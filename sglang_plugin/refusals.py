"""What is refused at start, in one sentence: versions of SGLang that were not run, and options that cannot be followed."""

from __future__ import annotations

from typing import Any

from deltasync.errors import ConfigError

VERSIONS = ("0.5.23",)
"""Versions of SGLang that deltasync follows with."""

_KEYS = "hands prompts keys that other weights computed"
_COPIES = "holds copies of weights that deltas do not reach"
_RANKS = "was not run with deltasync"

OPTIONS: tuple[tuple[str, object, str], ...] = (
    ("enable_hierarchical_cache", False, _KEYS),
    ("enable_lmcache", False, _KEYS),
    ("enable_flexkv", False, _KEYS),
    ("radix_cache_backend", None, _KEYS),
    ("enable_unified_cache_external_linker", False, _KEYS),
    ("enable_streaming_session", False, _KEYS),
    ("enable_session_radix_cache", False, _KEYS),
    ("disaggregation_mode", "null", _KEYS),
    ("enable_prefix_mm_cache", False, "hands requests encoder outputs that other weights computed"),
    ("enable_mm_global_cache", False, "hands requests encoder outputs that other weights computed"),
    ("language_only", False, "takes encoder outputs of servers with other weights"),
    ("encoder_only", False, "serves encoder outputs without a scheduler that could follow"),
    ("cpu_offload_gb", 0, _COPIES),
    ("offload_group_size", -1, _COPIES),
    ("ple_offload_embedding", False, _COPIES),
    ("enable_paged_experts", False, _COPIES),
    ("kt_weight_path", None, _COPIES),
    ("weight_cache_mode", "off", "shares the weights with other processes, which deltas would change too"),
    ("enable_eplb", False, "moves experts to other places at run time, where deltas would not find them"),
    ("ep_num_redundant_experts", 0, "holds experts several times, in places that change"),
    ("elastic_ep_backend", None, "moves experts to other places at run time, where deltas would not find them"),
    ("enable_lora", False, "replaces layers whose weights deltas would not find"),
    ("quantization", None, "keeps weights in a layout of its own"),
    ("speculative_algorithm", None, _RANKS),
    ("pp_size", 1, _RANKS),
    ("enable_dp_attention", False, _RANKS),
    ("nnodes", 1, _RANKS),
    ("use_ray", False, _RANKS),
    ("tokenizer_worker_num", 1, "answers in processes that do not know whether this server is ready"),
    ("smg_grpc_mode", False, "answers in a process that does not know whether this server is ready"),
)
"""Options, the only value of each that is followed, and what another one does."""


def check(server_args: Any) -> None:
    """Raise ConfigError for a server that would not follow its channel, or not safely."""
    import sglang
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs

    if sglang.__version__ not in VERSIONS:
        raise ConfigError(
            f"deltasync was run with SGLang {' and '.join(VERSIONS)}, not with {sglang.__version__}: install that, or a "
            "newer deltasync; or leave DELTASYNC_CHANNEL out."
        )
    if envs.SGLANG_RUST_SERVER.get():
        raise ConfigError("SGLang's Rust server has no routes for deltasync: leave SGLANG_RUST_SERVER out.")
    config = resolving_view(server_args)
    for name, followed, what in OPTIONS:
        found = getattr(config, name)
        if found != followed and (found or followed):
            raise ConfigError(
                f"--{name.replace('_', '-')} {found} {what}: leave it out, or serve without DELTASYNC_CHANNEL."
            )
