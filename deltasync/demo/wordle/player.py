"""The tiny model that plays: how its games are written as tokens, and the sloppy teacher of its supervised warm-up.

A game is a conversation in TRL's sense. The model guesses by a tool call, the environment's answer is the tool's:

    <|user|><|end|><|assistant|><guess>stale</guess><|end|><|tool|>GXXYX<|end|><|assistant|><guess>...

So a guess is eight tokens, and a letter, its mark and the next guess of this place are always as many tokens apart. The
teacher knows the rules and follows them at about half of the letters only; reinforcement learning has to remove the rest.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltasync.demo.wordle.game import LENGTH, Game, Turn, WordList, answer, word_list

if TYPE_CHECKING:
    from datasets import Dataset

SLOPPY_PROBABILITY = 0.5
"""How often the teacher takes any letter instead of one that the marks allow."""

WARMUP_STEPS = 400
WARMUP_BATCH_SIZE = 16

LEARNING_RATE = 1.5e-4

MAX_GUESS_TOKENS = 10
"""Most tokens of a guess; a well-formed one has eight."""

IGNORE = -100  # label of a token without a loss, PyTorch's default

_PROMPT = [{"role": "user", "content": ""}]
_SPECIAL = ["<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<guess>", "</guess>"]
_WORDS = [*"abcdefghijklmnopqrstuvwxyz", *"GYX", " over"]

_CHAT_TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}<guess>{{ call.function.arguments.word }}</guess>{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

_RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<guess>",
            "close": "</guess>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "guess", "arguments": {"word": "{content}"}}},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each letter and mark, and a chat template with `<guess>` as the only tool."""
    vocabulary = [*_SPECIAL, *_WORDS]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" over|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unk|>",
        additional_special_tokens=_SPECIAL[2:],
    )  # fmt: skip
    tokenizer.chat_template = _CHAT_TEMPLATE.replace("\n", "")
    tokenizer.response_template = _RESPONSE_TEMPLATE
    return tokenizer


def sloppy_guess(words: WordList, turns: list[Turn], rng: random.Random) -> str:
    """Guess as the teacher: at each place a letter that the marks of `turns` allow there, or any."""
    letters = []
    for place in range(LENGTH):
        right = [turn.guess[place] for turn in turns if turn.marks[place] == "G"]
        wrong = {turn.guess[place] for turn in turns}
        allowed = right[:1] or [letter for letter in words.letters if letter not in wrong]
        letters.append(rng.choice(words.letters if rng.random() < SLOPPY_PROBABILITY else allowed))
    return "".join(letters)


def demonstration(rng: random.Random) -> list[dict[str, Any]]:
    """A game of the teacher's, as a conversation that the chat template takes."""
    words = word_list("reduced")
    game = Game(words, rng.getrandbits(32))
    messages: list[dict[str, Any]] = [*_PROMPT]
    while not game.done:
        turn = game.guess(sloppy_guess(words, game.turns, rng))
        call = {"type": "function", "function": {"name": "guess", "arguments": {"word": turn.guess}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "guess", "content": answer(turn.marks, game.done)},
        ]
    return [*messages, {"role": "assistant", "content": ""}]


def demonstration_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both (batch, length); shorter games are padded. Only what the teacher says has labels."""
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    rows, labels = [], []
    for _ in range(WARMUP_BATCH_SIZE):
        row = tokenizer.apply_chat_template(demonstration(rng), return_dict=False)
        speaking, spoken = False, []
        for token in row:
            spoken.append(token if speaking else IGNORE)
            speaking = token != end and (speaking or token == begin)
        rows.append(torch.tensor(row))
        labels.append(torch.tensor(spoken))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, IGNORE)


def game_dataset(seed: int, game_count: int = 1024) -> Dataset:
    """Make the games for TRL.

    Args:
        seed: Determines the games.
        game_count: Rows of the dataset.

    Returns:
        A dataset with the columns `prompt` (a conversation of one empty user message) and `seed` (of the game, which TRL
        hands to the environment).
    """
    from datasets import Dataset

    rng = random.Random(seed)
    seeds = [rng.getrandbits(32) for _ in range(game_count)]
    return Dataset.from_dict({"prompt": [_PROMPT] * game_count, "seed": seeds})
