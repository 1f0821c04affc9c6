"""TRL's trainers that generate on a real vLLM server, and publish their adapter alone."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, TrainerCallback

from demo import task
from tests.integration import vllm_server
from tests.integration.async_trainers import make_async_trainer, share_of_digits
from tests.integration.expected_tokens import NEARLY, PROMPT
from tests.integration.test_trl_server import (
    async_options,
    ended_and_continued,
    grpo_config,
    long_answers,
    rewards_of,
)
from tests.integration.trainers import adapter_bits
from tests.integration.vllm_server import Server
from trl_callback import DeltaSyncCallback

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.trl,
    pytest.mark.slow,
    # of torch, while TRL imports it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

LORA = LoraConfig(r=8, lora_alpha=32, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")
STEPS, COMPARED = 40, (1, 8, 16, 24, 32, 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_server.save_model(tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """By `deltasync serve --adapter`'s own settings, without development routes."""
    arguments = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
    with vllm_server.serving(
        checkpoint, *arguments, DELTASYNC_ADAPTER="policy", VLLM_SERVER_DEV_MODE="0"
    ) as server:
        yield server


def apart(server: Server, checkpoint: Path, folder: Path, version: int) -> tuple[float, float]:
    """How far the log probabilities of a reply are from those that PEFT gives with the adapter saved in a
    folder, and from those of the base, in nats.
    """
    body = {
        "model": "policy",
        "prompt": PROMPT,
        "max_tokens": 40,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with server.open("/v1/completions", body, x_deltasync_version=str(version)) as reply:
        assert reply.headers["x-deltasync-versions"] == f"{version}..{version}"
        assert reply.headers["x-deltasync-spans"] == f"[[[{version},40]]]"
        choice = json.load(reply)["choices"][0]
    served, tokens = torch.tensor(choice["logprobs"]["token_logprobs"]), torch.tensor(choice["token_ids"])
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), folder
    )
    ids = torch.cat([torch.tensor(PROMPT), tokens])[None]

    def log_probs() -> torch.Tensor:
        logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        return logits.gather(-1, tokens[:, None])[:, 0]

    with torch.no_grad():
        adapted = log_probs()
        with model.disable_adapter():
            base = log_probs()
    return float((served - adapted).abs().max()), float((served - base).abs().max())


class AdapterBits(TrainerCallback):
    """Before each step, holds the adapter that the server loaded to the trainer's; at some versions, what it
    computes to what PEFT does.
    """

    def __init__(
        self,
        server: Server,
        sync: DeltaSyncCallback,
        checkpoint: Path,
        folder: Path,
        compared: tuple[int, ...] = COMPARED,
    ) -> None:
        self.server, self.sync, self.checkpoint, self.folder = server, sync, checkpoint, folder
        self.compared = compared  # counted from 1, of the versions before each step
        self.expected: dict[int, dict[str, str]] = {}
        self.apart: list[tuple[float, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.compare(model)

    def compare(self, model: Any) -> None:
        publisher = self.sync.weight_transfer.publisher
        assert publisher is not None
        version = publisher.version
        tensors = adapter_bits(model, self.folder)
        self.expected[version] = vllm_server.digests(tensors)
        found = self.server.json("/deltasync/digest")
        assert found["sha256"] == self.expected[found["version"]]
        if len(self.expected) in self.compared:
            self.server.wait(lambda status: status["version"] >= version)
            save_file(tensors, self.folder / "adapter_model.safetensors", {"format": "pt"})
            self.apart.append(apart(self.server, self.checkpoint, self.folder, version))


def train_async(
    server: Server,
    checkpoint: Path,
    folder: Path,
    sync: DeltaSyncCallback,
    *callbacks: TrainerCallback,
    steps: int = STEPS,
    max_lag: int = 2,
    **settings: Any,
) -> list[float]:
    """The rewards of these steps of an adapter."""
    trainer = make_async_trainer(
        checkpoint,
        sync,
        [],
        stub=False,
        train_dataset=task.prompt_dataset(0, 8),
        callbacks=callbacks,
        peft_config=copy.deepcopy(LORA),  # PEFT notes the base in it
        output_dir=str(folder),
        **async_options(server) | {"max_steps": steps, "learning_rate": 2e-3} | settings,
    )
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert all(line["delta_sync/unversioned_token_fraction"] == 0 for line in logs)
    assert all(line["delta_sync/token_lag_max"] <= max_lag + 1 for line in logs)
    return rewards_of(trainer, sync)


def test_async_grpo_generates_with_its_own_adapter(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    sync = DeltaSyncCallback(server.channel, adapter_only=True, ack_timeout_s=120)
    bits = AdapterBits(server, sync, checkpoint, tmp_path / "adapter", compared=(1, 4))
    train_async(server, checkpoint, tmp_path / "out", sync, bits, steps=4)
    assert len(bits.apart) == 2
    assert max(adapted for adapted, _ in bits.apart) < NEARLY < bits.apart[1][1], bits.apart
    listed = [each["id"] for each in server.json("/v1/models")["data"]]
    assert sorted(listed) == sorted([str(checkpoint), *server.status()["adapters"]])


def test_async_grpo_learns_by_its_adapter_as_by_merged_weights(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    sync = DeltaSyncCallback(server.channel, adapter_only=True, resume=True, ack_timeout_s=120)
    bits = AdapterBits(server, sync, checkpoint, tmp_path / "adapter")
    alone = train_async(server, checkpoint, tmp_path / "alone", sync, bits)
    assert len(bits.apart) == len(COMPARED)
    assert max(adapted for adapted, _ in bits.apart) < NEARLY, bits.apart
    assert bits.apart[-1][1] > 5 * NEARLY, bits.apart

    other = vllm_server.save_model(tmp_path / "merged")
    with vllm_server.serving(other) as full:
        merged = train_async(
            full, other, tmp_path / "out", DeltaSyncCallback(full.channel, ack_timeout_s=120)
        )
    for rewards in (alone, merged):
        assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.2, rewards
    assert abs(statistics.fmean(alone[-5:]) - statistics.fmean(merged[-5:])) < 0.2, (alone, merged)


def test_async_grpo_continues_answers_that_grew_old_with_its_newer_adapter(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    sync = DeltaSyncCallback(
        server.channel, adapter_only=True, resume=True, ack_timeout_s=120, max_token_lag=1
    )
    bits = AdapterBits(server, sync, checkpoint, tmp_path / "adapter", compared=(20,))
    with ended_and_continued(server, 1):
        train_async(server, checkpoint, tmp_path / "out", sync, bits, max_lag=1, **long_answers(server))
    assert len(bits.expected) == 20
    assert bits.apart[0][0] < NEARLY, bits.apart


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trainers_on_policy_generate_with_their_own_adapter(
    kind: str, server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    import trl

    sync = DeltaSyncCallback(server.channel, adapter_only=True, resume=True, ack_timeout_s=120)

    def reward(**columns: Any) -> list[float]:
        bits = vllm_server.digests(adapter_bits(trainer.model, tmp_path / "adapter"))
        assert server.json("/deltasync/digest")["sha256"] == bits
        return share_of_digits(**columns)

    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    trainer: Any = getattr(trl, f"{kind}Trainer")(
        model=str(checkpoint),
        reward_funcs=reward,
        args=grpo_config(getattr(trl, f"{kind}Config"), server, tmp_path, max_steps=3, **settings),
        train_dataset=task.prompt_dataset(0, 8),
        eval_dataset=task.prompt_dataset(1, 1),
        callbacks=[sync],
        peft_config=copy.deepcopy(LORA),  # PEFT notes the base in it
    )
    trainer.evaluate()  # before there is anything trained: with the initial adapter
    trainer.train()
    assert trainer.vllm_generation.vllm_client.model == "policy"
    assert [record.step for record in sync.history] == [0, 1, 2, 3]
    apart = [
        line["sampling/sampling_logp_difference/mean"]
        for line in trainer.state.log_history
        if "sampling/sampling_logp_difference/mean" in line
    ]
    assert kind == "RLOO" or (len(apart) >= 3 and max(apart) < NEARLY)
