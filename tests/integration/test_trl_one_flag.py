"""The callback alone, and a vLLM server started by the README's command alone: prefix caching on, raw log probabilities."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from deltasync.errors import ConfigError
from tests.integration import vllm_server
from tests.integration.async_trainers import make_async_trainer, share_of_digits
from tests.integration.vllm_server import Server
from trl_callback import DeltaSyncCallback, gather

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.trl,
    # of torch, while TRL imports it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

STEPS = 8
SAMPLES = 8
LEARNING_RATE = 5e-4
LONG_PROMPT = "count from 17 " * 40  # of 280 tokens, more than two blocks of vLLM's KV cache


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = vllm_server.save_model(tmp_path_factory.mktemp("one-flag"))
    with vllm_server.serving(checkpoint, VLLM_SERVER_DEV_MODE="0") as server:
        yield server


def checkpoint_of(server: Server) -> Path:
    return Path(server.channel.removeprefix("file://")).parent / "model"


def prompts() -> Dataset:
    questions = [f"{LONG_PROMPT}{start}" for start in range(10, 20)]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in questions]})


@contextlib.contextmanager
def prefixes_found(server: Server) -> Iterator[None]:
    """Most of the prompts' tokens are found in the prefix cache, as the samples of a prompt share them."""
    queried, found = (counter(server, f"prefix_cache_{name}") for name in ("queries", "hits"))
    yield
    queried = counter(server, "prefix_cache_queries") - queried
    found = counter(server, "prefix_cache_hits") - found
    assert found > queried / 2, (found, queried)


def counter(server: Server, name: str) -> float:
    with server.open("/metrics") as reply:
        value = re.search(rf"^vllm:{name}_total{{.*}} (.*)$", reply.read().decode(), re.MULTILINE)
    assert value is not None
    return float(value[1])


class LiveBits(TrainerCallback):
    """Holds the server's memory to the trainer's weights, by sha256, once TRL says that they are synced."""

    def __init__(self, server: Server, sync: DeltaSyncCallback) -> None:
        self.server, self.sync = server, sync
        self.expected: dict[int, dict[str, str]] = {}
        self.behind: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.compare(model)

    def compare(self, model: Any) -> None:
        publisher = self.sync.weight_transfer.publisher
        assert publisher is not None
        self.expected[publisher.version] = vllm_server.digests(gather.checkpoint_tensors(model))
        found = self.server.json("/deltasync/digest")
        assert found["sha256"] == self.expected[found["version"]]
        self.behind.append(publisher.version - found["version"])


def assert_learned(trainer: Any, sync: DeltaSyncCallback) -> None:
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert len(rewards) == STEPS
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.1, rewards
    assert [record.step for record in sync.history] == [*range(STEPS + 1)]
    assert all(record.changed > 0 for record in sync.history[1:])


def test_async_grpo_by_the_callback_alone(server: Server, tmp_path: Path) -> None:
    assert server.status()["logprobs_mode"] == "raw_logprobs"
    sync = DeltaSyncCallback(server.channel, ack="all", ack_timeout_s=120)
    bits = LiveBits(server, sync)
    trainer = make_async_trainer(
        checkpoint_of(server),
        sync,
        [],
        stub=False,
        train_dataset=prompts(),
        callbacks=[bits],
        output_dir=str(tmp_path),
        vllm_server_base_url=server.url,
        num_generations=SAMPLES,
        per_device_train_batch_size=2 * SAMPLES,
        max_inflight_tasks=2 * SAMPLES,
        queue_maxsize=2 * SAMPLES,
        max_staleness=2,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
    )
    with prefixes_found(server):
        trainer.train()
    assert_learned(trainer, sync)
    assert len(bits.behind) == STEPS and max(bits.behind) <= 1


def test_grpo_by_the_callback_alone(server: Server, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    sync = DeltaSyncCallback(server.channel, resume=True, ack_timeout_s=120)
    bits = LiveBits(server, sync)

    def reward(**columns: Any) -> list[float]:
        bits.compare(trainer.model)
        return share_of_digits(**columns)

    trainer = GRPOTrainer(
        model=str(checkpoint_of(server)),
        reward_funcs=reward,
        args=grpo_config(GRPOConfig, server, tmp_path),
        train_dataset=prompts(),
        callbacks=[sync],
    )
    with prefixes_found(server):
        trainer.train()
    assert_learned(trainer, sync)
    assert bits.behind == [0] * STEPS  # on-policy
    # Blocks of another version in the prefix cache would give other log probabilities than the trainer's: about 0.4 apart.
    apart = [line["sampling/sampling_logp_difference/mean"] for line in trainer.state.log_history if "reward" in line]
    assert statistics.median(apart) < 0.1, apart


def test_another_temperature_needs_processed_log_probabilities(server: Server, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    with pytest.raises(ConfigError, match=r"gives raw_logprobs, .* temperature=0\.7: .* --logprobs-mode processed_logprobs"):
        GRPOTrainer(
            model=str(checkpoint_of(server)),
            reward_funcs=share_of_digits,
            args=grpo_config(GRPOConfig, server, tmp_path, temperature=0.7),
            train_dataset=prompts(),
            callbacks=[DeltaSyncCallback(server.channel, resume=True)],
        )


def grpo_config(kind: Any, server: Server, folder: Path, **settings: Any) -> Any:
    return kind(
        output_dir=str(folder),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.url,
        num_generations=SAMPLES,
        per_device_train_batch_size=2 * SAMPLES,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
