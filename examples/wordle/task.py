"""Wordle as a task of the demo: `python examples/demo --task wordle`."""

from __future__ import annotations

import functools
import os
from typing import Any

from demo.task import Task
from wordle import player
from wordle.client import WordleEnvironment
from wordle.game import GUESSES
from wordle.protocol import TOKEN_VARIABLE


def training(seed: int, environment_url: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """TRL plays the games by calling the environment's tool, and asks it for the reward. See `Task`."""
    assert environment_url is not None
    factory = functools.partial(WordleEnvironment, environment_url, os.environ.get(TOKEN_VARIABLE))
    options = {
        "learning_rate": player.LEARNING_RATE,
        "max_completion_length": player.MAX_GUESS_TOKENS,
        "max_tool_calling_iterations": GUESSES,
    }
    return options, {"environment_factory": factory, "train_dataset": player.game_dataset(seed)}


TASK = Task(
    player.build_tokenizer,
    player.demonstration_batch,
    player.WARMUP_STEPS,
    training,
    environment="wordle",
    token_variable=TOKEN_VARIABLE,
)
