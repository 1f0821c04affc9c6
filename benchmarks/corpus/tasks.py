"""Tasks of the runs: prompts and rewards in TRL's conventions, judged by rules alone.

`counting` is the demo's, for its own small model. The others are for models that were taught to chat.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from demo import task as demo_task
from wordle import game

Rows = list[dict[str, Any]]
Completions = Sequence[Sequence[dict[str, Any]]]

ROW_COUNT = 4000
_SUBJECTS = (
    "fruits",
    "colours",
    "animals",
    "cities",
    "tools",
    "sports",
    "rivers",
    "metals",
    "planets",
    "instruments",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        rows: Makes the dataset: `prompt`, a conversation, and what the reward function needs.
        reward: Scores each completion, by the columns of its row.
        max_completion_tokens: Longer completions are cut.
    """

    rows: Callable[[random.Random], Rows]
    reward: Callable[..., list[float]]
    max_completion_tokens: int


def _asked(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def _texts(completions: Completions) -> list[str]:
    return [str(completion[0]["content"]) for completion in completions]


def _additions(rng: random.Random) -> Rows:
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(ROW_COUNT)]
    return [_asked(f"What is {x} plus {y}? Answer with a number.", answer=x + y) for x, y in pairs]


def addition_reward(completions: Completions, answer: Sequence[int], **_: Any) -> list[float]:
    """Return 1.1 where the last number is the sum, 0.1 for another number, 0 for none."""
    found = [re.findall(r"\d+", text.replace(",", "")) for text in _texts(completions)]
    return [
        0.1 * bool(numbers) + (numbers[-1:] == [str(wanted)])
        for numbers, wanted in zip(found, answer, strict=True)
    ]


def _lists(rng: random.Random) -> Rows:
    drawn = [(rng.randint(2, 4), rng.choice(_SUBJECTS)) for _ in range(ROW_COUNT)]
    return [
        _asked(f"Name {n} {subject}. Answer with a JSON list of strings only.", length=n)
        for n, subject in drawn
    ]


def format_reward(completions: Completions, length: Sequence[int], **_: Any) -> list[float]:
    """Return 1 for a JSON list of that many strings and nothing else, 0.5 for another list, 0.1 for an
    opening bracket.
    """
    return [
        _list_score(text.strip(), wanted) for text, wanted in zip(_texts(completions), length, strict=True)
    ]


def _list_score(text: str, length: int) -> float:
    try:
        found = json.loads(text)
    except ValueError:
        return 0.1 if text.startswith("[") else 0.0
    if not isinstance(found, list):
        return 0.0
    return 1.0 if len(found) == length and all(isinstance(each, str) for each in found) else 0.5


def _guesses(rng: random.Random) -> Rows:
    words = game.word_list("full").secrets
    rows = []
    for _ in range(ROW_COUNT):
        secret, guess = rng.sample(words, 2)
        marks = game.marks(guess, secret)
        text = (
            f"A secret word has five letters. The guess {guess} got {marks}: G is a right letter, Y one that "
            "is elsewhere "
            "in the word, X one that is not in it. Answer with another word of five letters that fits."
        )
        rows.append(_asked(text, guess=guess, marks=marks))
    return rows


def wordle_reward(
    completions: Completions, guess: Sequence[str], marks: Sequence[str], **_: Any
) -> list[float]:
    """Return 0.1 for a word of five letters, plus up to 0.9: the share of the marks that it would give the
    guess as well.
    """
    scores = []
    for text, guessed, wanted in zip(_texts(completions), guess, marks, strict=True):
        words = re.findall(rf"\b[a-z]{{{game.LENGTH}}}\b", text.lower())
        scores.append(0.1 + 0.9 * _share(game.marks(guessed, words[-1]), wanted) if words else 0.0)
    return scores


def _share(found: str, wanted: str) -> float:
    return sum(a == b for a, b in zip(found, wanted, strict=True)) / len(wanted)


def _counts(rng: random.Random) -> Rows:
    starts = [rng.choice(demo_task.FIRST_STARTS) for _ in range(ROW_COUNT)]
    return [_asked(demo_task.prompt_text(start), start=start) for start in starts]


TASKS = {
    "counting": Task(_counts, demo_task.counting_reward, demo_task.MAX_COMPLETION_TOKENS),
    "addition": Task(_additions, addition_reward, 24),
    "format": Task(_lists, format_reward, 32),
    "wordle": Task(_guesses, wordle_reward, 24),
}
"""By name."""
