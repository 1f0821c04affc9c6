from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo import train
from wordle import player
from wordle.game import Game, word_list


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """As the trainer loads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    player.build_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.trl
def test_trl_reads_each_guess_and_every_turn_continues_the_tokens_before_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

    assert is_chat_template_prefix_preserving(tokenizer)
    messages = player.demonstration(random.Random(3))
    tokens: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            messages[:number], add_generation_prompt=True, return_dict=False
        )
        assert prompt[: len(tokens)] == tokens
        tokens = tokenizer.apply_chat_template(messages[: number + 1], return_dict=False)
        assert tokens[: len(prompt)] == prompt
        said = tokens[len(prompt) :]
        assert len(said) <= player.MAX_GUESS_TOKENS
        assert parse_response(tokenizer, said, prefix=prompt) == message
    assert tokenizer.unk_token_id not in tokens


@pytest.mark.trl
@pytest.mark.parametrize("said", ["<|end|>", "stale<|end|>", "</guess><|end|>", "GX"])
def test_what_is_no_guess_ends_the_game(tokenizer: PreTrainedTokenizerFast, said: str) -> None:
    from trl.chat_template_utils import parse_response

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": ""}], add_generation_prompt=True, return_dict=False
    )
    assert parse_response(tokenizer, tokenizer.encode(said), prefix=prompt).get("tool_calls") is None


def test_the_warm_up_teaches_what_the_teacher_says_and_nothing_else(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens, labels = player.demonstration_batch(tokenizer, random.Random(0), player.WARMUP_STEPS)
    assert tokens.shape == labels.shape and len(tokens) == player.WARMUP_BATCH_SIZE
    rng = random.Random(0)
    for row in labels:
        words = guesses_of(player.demonstration(rng))
        expected = "".join(f"<guess>{word}</guess><|end|>" for word in words) + "<|end|>"
        assert tokenizer.decode(row[row != player.IGNORE]) == expected
    assert bool((tokens[labels != player.IGNORE] == labels[labels != player.IGNORE]).all())


def guesses_of(messages: list[dict[str, Any]]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return [call["function"]["arguments"]["word"] for call in calls]


def test_the_careful_teacher_keeps_right_letters_and_tries_no_letter_twice_at_a_place() -> None:
    for seed in range(100):
        messages = player.demonstration(random.Random(seed), careless_probability=0.0)
        tried: list[set[str]] = [set() for _ in range(5)]
        shown = ["....."] + [message["content"] for message in messages if message["role"] == "tool"]
        for guess, before in zip(guesses_of(messages), shown, strict=False):
            for place, letter in enumerate(guess):
                assert (
                    letter == before[place].lower() if before[place].isupper() else letter not in tried[place]
                )
                tried[place].add(letter)
        assert shown[-1].endswith(" over")


def test_being_careful_pays() -> None:
    words, rng, scores = word_list("reduced"), random.Random(0), []
    for careful in (False, True):
        games = [Game(words, seed) for seed in range(400)]
        for game in games:
            while not game.done:
                game.guess(
                    player.careful_guess(words, game.turns, rng)
                    if careful
                    else "".join(rng.choices("aelst", k=5))
                )
        scores.append(statistics.mean(game.score for game in games))
    assert scores[0] < 0.25 and scores[1] > 0.6


def test_the_trainer_needs_the_environment_for_wordle_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--model", "m", "--channel", "c", "--server-url", "s", "--metrics", "m", "--published", "p"]
    assert train.parse_args(needed).task == "counting"
    assert (
        train.parse_args([*needed, "--task", "wordle", "--environment-url", "https://e"]).environment_url
        == "https://e"
    )
    for wrong in (["--task", "wordle"], ["--environment-url", "https://e"]):
        with pytest.raises(SystemExit):
            train.parse_args([*needed, *wrong])
        assert "--task wordle needs --environment-url" in capsys.readouterr().err
