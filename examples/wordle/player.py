"""The tiny model that plays: how its games are written as tokens, and the sloppy teacher of its supervised
warm-up.

A game is a conversation in TRL's sense. The model guesses by a tool call, the environment's answer is the
tool's:

    <|user|><|end|><|assistant|><guess>stale</guess><|end|><|tool|>S..l.<|end|><|assistant|><guess>...

So a guess is eight tokens, and a right letter and the next guess of its place are always as many tokens
apart. The teacher knows the rules, but is careless in many games; reinforcement learning has to do away with
carelessness.
"""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from wordle.game import LENGTH, Game, Turn, WordList, answer, word_list

if TYPE_CHECKING:
    from datasets import Dataset

# how many games the teacher plays by any letters, instead of by those that the marks allow
CARELESS_PROBABILITY = 0.6
CAREFUL_STEPS = 120  # the first steps of the warm-up, all careful, so that there is a rule to find

WARMUP_STEPS = 240
WARMUP_BATCH_SIZE = 16

LEARNING_RATE = 1.5e-4

MAX_GUESS_TOKENS = 10  # most tokens of a guess; a well-formed one has eight
IGNORE = -100  # label of a token without a loss, PyTorch's default

_PROMPT = [{"role": "user", "content": ""}]
_SPECIAL = ["<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<guess>", "</guess>"]
_WORDS = [*string.ascii_letters, ".", " over"]

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
            "transform": {
                "type": "function",
                "function": {"name": "guess", "arguments": {"word": "{content}"}},
            },
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each letter and mark, and a chat template with `<guess>` as the only
    tool.
    """
    vocabulary = [*_SPECIAL, *_WORDS]
    backend = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<|unk|>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" over|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unk|>",
        additional_special_tokens=_SPECIAL[2:],
    )  # fmt: skip
    tokenizer.chat_template = _CHAT_TEMPLATE.replace("\n", "")
    tokenizer.response_template = _RESPONSE_TEMPLATE
    return tokenizer


def careful_guess(words: WordList, turns: list[Turn], rng: random.Random) -> str:
    """Guess as the careful teacher: at each place the right letter if it was found, else one not tried there
    yet.
    """
    letters = []
    for place in range(LENGTH):
        right = [turn.guess[place] for turn in turns if turn.marks[place] == "G"]
        tried = {turn.guess[place] for turn in turns}
        letters.append(rng.choice(right[:1] or [letter for letter in words.letters if letter not in tried]))
    return "".join(letters)


def demonstration(
    rng: random.Random, careless_probability: float = CARELESS_PROBABILITY
) -> list[dict[str, Any]]:
    """A game of the teacher's, as a conversation that the chat template takes."""
    words = word_list("reduced")
    game = Game(words, rng.getrandbits(32))
    careless = rng.random() < careless_probability
    messages: list[dict[str, Any]] = [*_PROMPT]
    while not game.done:
        turn = game.guess(
            "".join(rng.choices(words.letters, k=LENGTH))
            if careless
            else careful_guess(words, game.turns, rng)
        )
        call = {"type": "function", "function": {"name": "guess", "arguments": {"word": turn.guess}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "guess", "content": answer(turn.guess, turn.marks, game.done)},
        ]
    return [*messages, {"role": "assistant", "content": ""}]


def demonstration_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both (batch, length), for this step of the warm-up.

    Shorter games are padded. Only what the teacher says has labels.
    """
    begin, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    careless_probability = 0.0 if step <= CAREFUL_STEPS else CARELESS_PROBABILITY
    rows, labels = [], []
    for _ in range(WARMUP_BATCH_SIZE):
        row = tokenizer.apply_chat_template(demonstration(rng, careless_probability), return_dict=False)
        speaking, spoken = False, []
        for token in row:
            spoken.append(token if speaking else IGNORE)
            speaking = token != end and (speaking or token == begin)
        rows.append(torch.tensor(row))
        labels.append(torch.tensor(spoken))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, IGNORE)


def game_dataset(seed: int, game_count: int = 1024) -> Dataset:
    """Make games for TRL, determined by the seed.

    Returns a dataset with the columns `prompt` (a conversation of one empty user message) and `seed` (of the
    game, which TRL passes to the environment).
    """
    from datasets import Dataset

    rng = random.Random(seed)
    seeds = [rng.getrandbits(32) for _ in range(game_count)]
    return Dataset.from_dict({"prompt": [_PROMPT] * game_count, "seed": seeds})
