"""Check the server that a trainer generates on: that it follows the channel, serves the trainer's model, and
that its log probabilities are those of the distribution that its tokens are sampled from.

GRPO and AsyncGRPO compare them with the trainer's own. vLLM returns those of the model unless it is started
with `--logprobs-mode processed_logprobs`; they are the same if sampling changes nothing, as with TRL's
defaults.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, DeltaSyncError, NotPublishedError
from deltasync.serve import heartbeat
from deltasync.stores import Store
from trl_callback import adapter

_POLL_S = 0.5

_NEUTRAL: dict[str, tuple[float | None, ...]] = {
    "temperature": (1.0,),
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "vllm_structured_outputs_regex": (None,),
}
"""Fields of TRL's configs, and their values that leave the distribution as it is."""

_UNSAMPLED = ("seed", "max_tokens", "stop", "stop_token_ids")
"""Parameters of vLLM that say nothing of the distribution of a token."""

_OF_CHECKPOINT = ("min_p", "presence_penalty", "frequency_penalty")
"""Fields that vLLM takes from the checkpoint's `generation_config.json` if a request leaves them out, as
TRL's may.
"""


def _sampling_changes(args: Any, model: torch.nn.Module) -> list[str]:
    """The settings that sample from another distribution than the model's, as `name=value`: those of the
    trainer's arguments and of the model's `generation_config`, which is the server's default.
    """
    given = getattr(args, "generation_kwargs", None) or {}  # any parameters of vLLM, before the arguments
    settings = {name: getattr(args, name, values[0]) for name, values in _NEUTRAL.items()}
    settings |= {name: value for name, value in given.items() if name not in _UNSAMPLED}
    changing = {name: value for name, value in settings.items() if value not in _NEUTRAL.get(name, ())}
    defaults = getattr(model, "generation_config", None)
    for name in _OF_CHECKPOINT:
        if (
            name not in given
            and getattr(args, name, None) is None
            and (value := getattr(defaults, name, None))
        ):
            changing[name] = value
    return [f"{name}={value}" for name, value in changing.items()]


def check(
    args: Any,
    model: torch.nn.Module,
    url: str,
    *,
    compares: bool,
    name: str | None,
    wait_s: float | None,
    adapter_only: bool | str = False,
    channel: Store | None = None,
    named: Collection[str] = (),
) -> dict[str, Any] | None:
    """Ask the server at `url` whether it follows the channel, and whether its answers can be trained with.

    `compares` says whether the trainer compares log probabilities; `name` is the model that it asks for, None
    if it asks the server for it. With `adapter_only` it asks for the server's adapter, the first of
    `adapters` in the status. Returns the status. A server that does not answer is asked for `wait_s`; if that
    is None, the result then is None. `channel` is the trainer's, None to take any; servers that the user has `named` may
    follow it by another URL. Raises ConfigError if the server does not follow it, serves another model, or an
    adapter where the trainer publishes none, could not load the trainer's adapter, or gives log probabilities
    that cannot be compared.
    """
    deadline = time.monotonic() + (wait_s or 0.0)
    while (status := heartbeat.ask_status(url)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if status is None:
        if wait_s is None:
            return None
        raise ConfigError(
            f"The vLLM server at {url} does not answer GET /deltasync/status after {wait_s:g} s."
        )
    if "state" not in status:
        raise ConfigError(heartbeat.follows_nothing(url))
    if channel is not None:
        _check_channel(
            status, url, channel, is_named=url.rstrip("/") in {other.rstrip("/") for other in named}
        )
    if status.get("max_lag") is not None:
        raise ConfigError(
            f"The vLLM server at {url} ends requests that grow old, and the trainer would take what there is of them for "
            "whole answers: start the server without DELTASYNC_MAX_LAG."
        )
    _check_adapter(status, url, model, adapter_only)
    served = [] if adapter_only else heartbeat.ask_models(url)
    if name is not None and served and name not in served:
        raise ConfigError(
            f"The vLLM server at {url} serves the model {served[0]}, and the trainer asks for {name}. Start "
            "the server with "
            f"--served-model-name {name}."
        )
    if not compares:
        return status
    changing, mode = _sampling_changes(args, model), status.get("logprobs_mode")
    if mode == "processed_logprobs" or (not changing and mode in (None, "raw_logprobs")):
        return status
    problem = "does not say which log probabilities it gives" if mode is None else f"gives {mode}"
    sampled = f" with {', '.join(changing)}" if changing else ""
    raise ConfigError(
        f"The vLLM server at {url} {problem}, and the trainer compares its own with those of the tokens as "
        f"sampled{sampled}"
        ": start it with deltasync's worker extension and --logprobs-mode processed_logprobs."
    )


def _check_adapter(
    status: Mapping[str, Any], url: str, model: torch.nn.Module, adapter_only: bool | str
) -> None:
    """Check that a server serves adapters if the trainer publishes one alone, and only then."""
    adapters = status.get("adapters")
    if adapter_only and not adapters:
        raise ConfigError(
            f"This trainer publishes its adapter alone, and the vLLM server at {url} loads none: "
            f"{status.get('error') or 'it follows full weights'}. Start it with deltasync serve --adapter "
            "NAME, or leave adapter_only out."
        )
    if adapters and not adapter_only:
        raise ConfigError(
            f"The vLLM server at {url} loads the channel's versions as the adapter {adapters[0]}, and this "
            "trainer publishes full weights. Set adapter_only=True, or start the server without --adapter."
        )
    if not adapter_only:
        return
    refused = adapter.refused_by_vllm(model, adapter_only)
    if refused:
        raise ConfigError(
            f"vLLM loads no adapter with {' and '.join(refused)}, so the server at {url} would serve no version. Train "
            "a LoRA without, or publish merged weights: leave adapter_only out, and start the server without --adapter."
        )
    rank, largest = adapter.rank_of(model, adapter_only), status.get("max_lora_rank")
    if isinstance(largest, int) and rank > largest:
        raise ConfigError(
            f"This trainer's adapter has rank {rank}, and the vLLM server at {url} loads none above {largest}: start "
            f"it with a --max-lora-rank of at least {rank}, or train an adapter with r={largest}."
        )
    targets: list[str] = status.get("lora_target_modules") or []
    if targets and (outside := adapter.layers_outside(model, targets, adapter_only)):
        raise ConfigError(
            f"This trainer's adapter changes {', '.join(outside)}, and the vLLM server at {url} was started with "
            f"--lora-target-modules {' '.join(targets)}: start it without this option, or train with "
            f"target_modules={targets}."
        )


def _check_channel(status: Mapping[str, Any], url: str, channel: Store, *, is_named: bool) -> None:
    """Check that a server follows this channel, before a version is published for it.

    One that follows a run says which. Before the first version it says the URL, unless it wants a token that
    is unset here.
    """
    run_id, followed = status.get("run_id"), status.get("channel")
    ours: str | None = None
    try:
        ours = ChannelReader(channel).channel().run_id
    except NotPublishedError:
        pass
    except DeltaSyncError:  # opening the channel says it better
        return
    if run_id is not None and run_id != ours:
        here = "has no run yet" if ours is None else f"holds run {ours}"
    elif (
        run_id is None
        and isinstance(followed, str)
        and not is_named
        and _place(followed) != _place(channel.url)
    ):
        here = "is another URL"
    else:
        return
    where = f" of {followed}" if isinstance(followed, str) else ""
    what = f"run {run_id}{where}" if run_id is not None else f"{followed}, which holds no version yet"
    also = "" if run_id is not None else f' If both are one place, name the server: replicas=["{url}"].'
    raise ConfigError(
        f"The vLLM server at {url} follows {what}, and {channel.url}, where this trainer publishes, {here}. "
        "Nothing was "
        f"published. Restart the server with DELTASYNC_CHANNEL={channel.url}.{also}"
    )


def _place(url: str) -> str:
    """Return a channel's URL without options; of a directory the one that links lead to."""
    place = url.partition("?")[0].rstrip("/")
    return os.path.realpath(place.removeprefix("file://")) if place.startswith("file://") else place
