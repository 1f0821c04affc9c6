"""Which tokens given weights make, by transformers: the proof of what digests cannot see, that vLLM computes
with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integration.vllm_server import Server

PROMPT = [5, 6, 7, 8, 9]
NEARLY = 0.25  # nats between the likeliest token and one that bfloat16 takes for it


def greedy(server: Server, model: str | None = None, token_count: int = 40, **headers: str) -> list[int]:
    """The likeliest tokens after `PROMPT`, as a server makes them.

    Args:
        server: To ask.
        model: Name of an adapter; None for the model itself.
        token_count: How many.
        **headers: Of the request, with underscores for dashes.
    """
    body = {
        "model": model or server.json("/v1/models")["data"][0]["id"],
        "prompt": PROMPT,
        "max_tokens": token_count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    tokens: list[int] = server.json("/v1/completions", body, **headers)["choices"][0]["token_ids"]
    return tokens


def shortfall(checkpoint: Path, weights: Mapping[str, torch.Tensor], tokens: list[int]) -> float:
    """By how much, in nats, one of these tokens is less likely than the likeliest one, at most.

    Args:
        checkpoint: With the model's configuration.
        weights: Its weights; rounded to bfloat16, as they are served.
        tokens: After `PROMPT`.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.float32)
    served = {name: tensor.to(torch.bfloat16).float() for name, tensor in weights.items()}
    missing = model.load_state_dict(served, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        logits = (
            model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        )
    chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.max(-1).values - chosen).max())
