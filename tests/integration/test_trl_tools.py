"""TRL's AsyncGRPO with a tool: a conversation of two turns has tokens of two versions, and some that no
version made.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo import model as demo_model
from tests.conftest import assert_same_bits
from tests.integration import trainers
from tests.integration.async_trainers import Completions, make_async_trainer, needs_vllm
from tests.integration.trainers import Fleet, published_bits, saved_bits
from tests.waiting import wait_until
from trl_callback import DeltaSyncCallback
from trl_callback.tokens import UNKNOWN, TokenAges

pytestmark = pytest.mark.trl

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
ANSWER = "the sum is 42"
PATIENCE_S = 60.0


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable character and for each of the template's marks; the demo's chat
    template.
    """
    demo = demo_model.build_tokenizer()
    marks = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ]
    words = {word: at for at, word in enumerate([*marks, *string.printable])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"</?tool_(call|response)>|[\s\S]"), behavior="isolated"
    )
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=marks[2],
        pad_token=marks[0],
        unk_token="?",
        additional_special_tokens=[marks[1]],
    )
    tokenizer.chat_template = demo.chat_template
    return tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    torch.manual_seed(0)
    sizes = trainers.SIZES | {"vocab_size": 128, "max_position_embeddings": 2048}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(path)
    letters_tokenizer().save_pretrained(path)
    return path


def _turns(
    fleet: Fleet, tokenizer: PreTrainedTokenizerFast
) -> Callable[..., tuple[list[int], list[tuple[int, int]]]]:
    """Asks for the tool, by version 1, and answers when its result is there, by the version that the fleet
    serves.

    The third group gets its answers once that is a later version; TRL takes each group one step ahead.
    """
    called = tokenizer.convert_tokens_to_ids("<tool_response>")
    (replica,) = fleet.replicas.values()
    answers = itertools.count()

    def turn(asked: dict[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
        text, version = CALL, 1
        if called in asked["prompt"]:
            number = next(answers)
            wait_until(lambda: number < 6 or replica.version != 1)
            assert replica.version is not None
            text, version = ANSWER + "2" * number, replica.version
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        return ids, [(version, len(ids))]

    return turn


@needs_vllm
def test_each_turn_has_its_own_version(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/channel"
    taken: list[Any] = []
    add_batch = TokenAges.add_batch

    def note(self: TokenAges, samples: Any) -> None:
        taken.extend(samples := list(samples))
        add_batch(self, samples)

    monkeypatch.setattr(TokenAges, "add_batch", note)
    sync = DeltaSyncCallback(url, ack_timeout_s=60, max_behind=0, max_token_lag=0)
    tokenizer = letters_tokenizer()
    with (
        Fleet(url, "replica") as fleet,
        Completions(fleet.replicas["replica"], _turns(fleet, tokenizer)) as server,
    ):
        trainer = make_async_trainer(
            checkpoint,
            sync,
            [],
            stub=False,
            tools=[add],
            vllm_server_base_url=server.url,
            max_inflight_tasks=3,
            queue_maxsize=3,
            max_staleness=9,
        )
        trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logs) == 3 and all(line["delta_sync/unversioned_token_fraction"] == 0 for line in logs)
    assert taken
    masked = set()
    for sample in taken:
        ids, mask = np.asarray(sample["input_ids"]), np.asarray(sample["completion_mask"], dtype=bool)
        versions = sample["metrics"].versions
        made = versions != UNKNOWN
        (first, second) = np.split(
            np.flatnonzero(made), np.flatnonzero(np.diff(np.flatnonzero(made)) > 1) + 1
        )
        assert tokenizer.decode(ids[first]) == f"{CALL}<|im_end|>" and tokenizer.decode(
            ids[second]
        ).startswith(ANSWER)
        assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(ids[first[-1] + 1 : second[0]])
        (asked,), (answered,) = set(versions[first].tolist()), set(versions[second].tolist())
        assert asked == 1 and not mask[~made].any() and mask[second].all()
        masked.add((answered > 1, not mask[first].any()))
    # What an older version had asked for is not trained once a newer one has answered; by then that is one
    # version old.
    assert (False, False) in masked and (True, True) in masked and (True, False) not in masked
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))
