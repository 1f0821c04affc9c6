"""Check that a server's log probabilities are those of the distribution that its tokens are sampled from.

GRPO and AsyncGRPO compare them with the trainer's own. vLLM returns those of the model unless it is started with
`--logprobs-mode processed_logprobs`; they are the same if sampling changes nothing, as with TRL's defaults.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from deltasync.channel import heartbeat
from deltasync.errors import ConfigError

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

_OF_CHECKPOINT = ("min_p", "presence_penalty", "frequency_penalty")
"""Fields that vLLM takes from the checkpoint's `generation_config.json` if a request leaves them out, as TRL's may."""


def _sampling_changes(args: Any, model: torch.nn.Module) -> list[str]:
    """The settings that sample from another distribution than the model's, as `name=value`.

    They are in the trainer's arguments and the model's `generation_config`, which is the server's default.
    """
    settings = {name: getattr(args, name, values[0]) for name, values in _NEUTRAL.items()}
    changing = {name: value for name, value in settings.items() if value not in _NEUTRAL[name]}
    defaults = getattr(model, "generation_config", None)
    for name in _OF_CHECKPOINT:
        if getattr(args, name, None) is None and (value := getattr(defaults, name, None)):
            changing[name] = value
    changing |= getattr(args, "generation_kwargs", None) or {}  # any parameters of vLLM
    return [f"{name}={value}" for name, value in changing.items()]


def check(args: Any, model: torch.nn.Module, url: str, wait_s: float | None = None) -> bool:
    """Ask the server at `url` whether its log probabilities can be compared with the trainer's.

    A server that does not answer is asked again for `wait_s`; if that is None, the answer is False.

    Raises:
        ConfigError: they cannot, or the server does not tell and sampling changes the distribution.
    """
    changing = _sampling_changes(args, model)
    deadline = time.monotonic() + (wait_s if wait_s is not None and changing else 0.0)
    while (status := heartbeat.ask_status(url)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if status is None and wait_s is None:
        return False
    mode = None if status is None else status.get("logprobs_mode")
    if mode == "processed_logprobs" or (not changing and mode in (None, "raw_logprobs")):
        return True
    problem = "does not tell what its log probabilities are" if mode is None else f"gives {mode}"
    sampled = f" with {', '.join(changing)}" if changing else ""
    raise ConfigError(
        f"The vLLM server at {url} {problem}, and the trainer compares its own with those of the tokens as sampled{sampled}"
        ": start it with deltasync's worker extension and --logprobs-mode processed_logprobs."
    )
