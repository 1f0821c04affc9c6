"""The task that the demo's model learns: a `Task`, and the one that comes with the demo, counting without
skipping.

The user writes `count from 17`; a perfect answer is `17 18 19 20 ...`, `NUMBER_COUNT` numbers of two digits.
The warm-up shows demonstrations of a teacher who often skips a number; reinforcement learning has to remove
the skips.

Nothing here imports torch, TRL or vLLM: TRL's rollout worker pickles `counting_reward` by name into a child
process.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

NUMBER_COUNT = 8  # numbers in a perfect answer

FIRST_STARTS = range(10, 71)
"""Numbers to count from. An answer that skips at every step still ends below 100: always two digits."""

SKIP_PROBABILITY = 0.6  # how often the teacher skips a number; one minus it is about the reward at the start
LEARNING_RATE = 6e-5  # in 40 steps the reward rises by 0.3; with 4e-5 by 0.2, and a quarter fewer bits change
MAX_COMPLETION_TOKENS = 3 * NUMBER_COUNT + 4  # two digits and a separator each, and some room for surplus

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Task:
    """The task that a demo's model learns. Another package has its task as `TASK` in its module `task`.

    Attributes:
        build_tokenizer: Returns the tokenizer, with a chat template whose answers TRL can parse.
        batch: Returns token ids and labels, both (batch, length), of a step of the supervised warm-up; steps
            count from 1.
        training: Returns options of TRL's `AsyncGRPOConfig` and arguments of its trainer, for a seed and
            environment URL.
        environment: Module that runs as the environment's server (`--host`, `--port`, GET /health); None
            without one.
    """

    build_tokenizer: Callable[[], PreTrainedTokenizerFast]
    batch: Callable[[PreTrainedTokenizerFast, random.Random, int], tuple[torch.Tensor, torch.Tensor]]
    warmup_steps: int  # steps of the warm-up
    training: Callable[[int, str | None], tuple[dict[str, Any], dict[str, Any]]]
    environment: str | None = None
    # environment variable with the bearer token of that server and of the trainer
    token_variable: str | None = None


def prompt_text(start: int) -> str:
    """Return the user's message that asks to count from `start`."""
    return f"count from {start}"


def demonstration(start: int, rng: random.Random) -> str:
    """Return an answer of the sloppy teacher: each number is one or (a skip) two more than the one before
    it.
    """
    numbers = [start]
    while len(numbers) < NUMBER_COUNT:
        numbers.append(numbers[-1] + (2 if rng.random() < SKIP_PROBABILITY else 1))
    return " ".join(str(number) for number in numbers)


def prompt_dataset(seed: int, prompt_count: int = 1024) -> Dataset:
    """Return prompts for TRL: columns `prompt`, a conversation of one user message, and `start`, for the
    reward function.
    """
    from datasets import Dataset

    rng = random.Random(seed)
    starts = [rng.choice(FIRST_STARTS) for _ in range(prompt_count)]
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": prompt_text(start)}] for start in starts], "start": starts}
    )


def score(answer: str, start: int) -> float:
    """Return the fraction of numbers in `answer` that continue the count, 1.0 for the perfect answer only.

    The first number is right if it equals `start`, every other one if it is one more than the number before
    it; a skip therefore costs one number and not the rest of the answer. Missing and surplus numbers count as
    wrong.
    """
    # Longer digit strings cannot be right, and int() of a very long one raises.
    numbers = [int(text) if len(text) <= 3 else -1 for text in _NUMBER.findall(answer)]
    pairs = zip(numbers[:NUMBER_COUNT], [start - 1, *numbers], strict=False)
    return sum(number == previous + 1 for number, previous in pairs) / max(NUMBER_COUNT, len(numbers))


def counting_reward(
    completions: Sequence[Sequence[dict[str, Any]]], start: Sequence[int], **_: Any
) -> list[float]:
    """Return the score of each completion, by its column `start`; a reward function in TRL's convention."""
    return [
        score(str(completion[0].get("content") or ""), first)
        for completion, first in zip(completions, start, strict=True)
    ]


def training(seed: int, environment_url: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options and arguments for TRL: see `Task`."""
    options = {"learning_rate": LEARNING_RATE, "max_completion_length": MAX_COMPLETION_TOKENS}
    return options, {"reward_funcs": counting_reward, "train_dataset": prompt_dataset(seed)}
