"""The task the demo's model learns: counting without skipping.

The user writes `count from 17`; a perfect answer is `17 18 19 20 ...`, `NUMBER_COUNT` numbers of two digits. The
supervised warm-up shows demonstrations of a teacher who is asked to count and often skips a number, so the model
starts out fluent but sloppy. The reward counts the steps of one, so reinforcement learning has to remove the skips.

Nothing here imports torch, TRL or vLLM: TRL's rollout worker pickles `counting_reward` by name into a child process.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

NUMBER_COUNT = 8
"""Numbers in a perfect answer."""

FIRST_STARTS = range(10, 71)
"""Numbers to count from. An answer which skips at every step still ends below 100: always two digits."""

SKIP_PROBABILITY = 0.6
"""How often the teacher of the warm-up skips a number; one minus it is about the reward at the start."""

_NUMBER = re.compile(r"\d+")


def prompt_text(start: int) -> str:
    """Write the user's message that asks to count from `start`."""
    return f"count from {start}"


def demonstration(start: int, rng: random.Random) -> str:
    """Answer as the sloppy teacher: each number is one or (a skip) two more than the one before it."""
    numbers = [start]
    while len(numbers) < NUMBER_COUNT:
        numbers.append(numbers[-1] + (2 if rng.random() < SKIP_PROBABILITY else 1))
    return " ".join(str(number) for number in numbers)


def prompt_dataset(seed: int, prompt_count: int = 1024) -> Dataset:
    """Make the prompts for TRL.

    Args:
        seed: Determines the order of the prompts.
        prompt_count: Rows of the dataset.

    Returns:
        A dataset with the columns `prompt` (a conversation of one user message) and `start` (an integer, which TRL
        hands to the reward function).
    """
    from datasets import Dataset

    rng = random.Random(seed)
    starts = [rng.choice(FIRST_STARTS) for _ in range(prompt_count)]
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": prompt_text(start)}] for start in starts], "start": starts}
    )


def score(answer: str, start: int) -> float:
    """Compute the fraction of numbers in `answer` that continue the count.

    The first number is right if it equals `start`, every other one if it is one more than the number before it; a
    skip therefore costs one number and not the rest of the answer. Missing and surplus numbers count as wrong.

    Returns:
        Between 0.0 and 1.0; 1.0 for the perfect answer only.
    """
    # Longer digit strings cannot be right, and int() of a very long one raises.
    numbers = [int(text) if len(text) <= 3 else -1 for text in _NUMBER.findall(answer)]
    right_count = 0
    for number, previous in zip(numbers[:NUMBER_COUNT], [start - 1, *numbers], strict=False):
        right_count += number == previous + 1
    return right_count / max(NUMBER_COUNT, len(numbers))


def counting_reward(completions: Sequence[Sequence[dict[str, Any]]], start: Sequence[int], **_: Any) -> list[float]:
    """Score each completion by its column `start`; a reward function in TRL's convention."""
    return [
        score(str(completion[0].get("content") or ""), first) for completion, first in zip(completions, start, strict=True)
    ]
