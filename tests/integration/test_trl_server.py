"""Trainers of TRL that generate on a real vLLM server, with the callback: one server, one channel, run after
run.

The server is started by the README's command alone: prefix caching on, raw log probabilities.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import TrainerCallback

from deltasync import Replica
from deltasync.errors import ChannelInUseError, ConfigError
from demo import task
from tests.conftest import assert_same_bits
from tests.integration import vllm_server
from tests.integration.async_trainers import make_async_trainer, share_of_digits
from tests.integration.test_examples import run_example
from tests.integration.trainers import merged_bits
from tests.integration.vllm_server import Server
from trl_callback import DeltaSyncCallback, gather
from trl_callback.tokens import UNKNOWN, TokenAges

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.trl,
    # of torch, while TRL imports it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["CI"] = "1"  # no telemetry

STEPS, STALE_STEPS = 8, 4
SAMPLES = 8
LEARNING_RATE = 5e-4
LONG_PROMPT = "count from 17 " * 40  # of 280 tokens, more than two blocks of vLLM's KV cache


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without its development routes, which TRL asks for where weights go by NCCL."""
    checkpoint = vllm_server.save_model(tmp_path_factory.mktemp("trl"))
    with vllm_server.serving(checkpoint, VLLM_SERVER_DEV_MODE="0") as server:
        yield server


class Recorder(TrainerCallback):
    """As a `report_to` integration: registered before the callback, it sees the logs before the callback
    does.
    """

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def served_digests(model: Any) -> dict[str, str]:
    return vllm_server.digests(dict(gather.stream_of(model)))


def make_trainer(
    kind: str,
    server: Server,
    folder: Path,
    *callbacks: TrainerCallback,
    max_steps: int = 3,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    """A trainer whose every batch is compared with the server: it generated with the trainer's weights, bit
    for bit.
    """
    import trl

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        model = trainer.model
        adapted = peft_config is not None
        expected = (
            vllm_server.digests(merged_bits(model, folder / "merged")) if adapted else served_digests(model)
        )
        assert server.json("/deltasync/digest")["sha256"] == expected
        return [float(len(set(ids))) for ids in completion_ids]

    config = grpo_config(
        getattr(trl, f"{kind}Config"),
        server,
        folder,
        num_generations=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=max_steps,
        learning_rate=1e-4,
        **settings,
    )
    trainer: Any = getattr(trl, f"{kind}Trainer")(
        model=str(checkpoint_of(server)),
        reward_funcs=reward,
        args=config,
        train_dataset=task.prompt_dataset(0, 8),
        eval_dataset=task.prompt_dataset(1, 1),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
    return trainer


def test_grpo_generates_with_its_own_weights_bit_for_bit(server: Server, tmp_path: Path) -> None:
    recorder, sync = Recorder(), DeltaSyncCallback(server.channel)
    trainer = make_trainer("GRPO", server, tmp_path, recorder, sync)
    trainer.train()

    assert [(record.version, record.step) for record in sync.history] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    # nobody waits for the last
    assert [record.ack_s is not None for record in sync.history] == [True, True, True, False]
    # where all rewards are equal nothing changes
    assert any(record.changed > 0 for record in sync.history[1:])
    replica = Replica(server.channel)
    replica.sync()
    expected = {
        name: tensor.to(replica.state_dict()[name].dtype)
        for name, tensor in trainer.model.state_dict().items()
    }
    assert_same_bits(replica.state_dict(), expected)

    logs = [line for line in recorder.logs if "loss" in line]
    assert [line["delta_sync/version"] for line in logs] == [1, 2, 3]
    for name in (
        "changed_fraction",
        "payload_bytes",
        "bits_per_changed",
        "encode_s",
        "ack_s",
        "upload_s",
        "coalesced",
    ):
        assert all(f"delta_sync/{name}" in line for line in logs[1:]), name
    assert logs[-1]["delta_sync/changed_fraction"] == sync.history[2].changed_fraction


def test_grpo_goes_on_from_a_checkpoint_with_its_weights_on_the_server(
    server: Server, tmp_path: Path
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    before = DeltaSyncCallback(server.channel, resume=True)
    make_trainer("GRPO", server, tmp_path, before, **saving).train()
    sync = DeltaSyncCallback(server.channel, resume=True)
    trainer = make_trainer("GRPO", server, tmp_path, sync, max_steps=4, **saving)
    # each batch is compared with the server
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    last = before.history[-1]
    assert [(record.version - last.version, record.step) for record in sync.history] == [
        (1, 2),
        (2, 3),
        (3, 4),
    ]
    assert [record.kind for record in sync.history] == ["delta"] * 3
    server.wait(lambda status: status["version"] == sync.history[-1].version)
    assert server.json("/deltasync/digest")["sha256"] == served_digests(trainer.model)


def test_rloo_without_vllm_at_the_trainer_asks_the_server_by_its_url(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: False)
    sync = DeltaSyncCallback(server.channel, resume=True, replicas=[server.url])
    trainer = make_trainer("RLOO", server, tmp_path, sync)
    assert not vllm_generation.is_vllm_available()
    trainer.evaluate()  # before there is anything trained: with the initial weights
    assert [(record.step, record.ack_s is not None) for record in sync.history] == [(0, True)]
    trainer.train()
    assert [record.step for record in sync.history] == [0, 1, 2, 3]
    server.wait(lambda status: status["version"] == sync.history[-1].version)
    assert server.json("/deltasync/digest")["sha256"] == served_digests(trainer.model)


def test_grpo_with_an_adapter_generates_with_the_weights_that_trl_merged(
    server: Server, tmp_path: Path
) -> None:
    from peft import LoraConfig

    sync = DeltaSyncCallback(server.channel, resume=True)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer("GRPO", server, tmp_path, sync, peft_config=lora)
    trainer.train()
    assert [record.step for record in sync.history] == [0, 1, 2, 3]
    # where all rewards are equal nothing changes
    assert any(record.changed > 0 for record in sync.history[1:])
    server.wait(lambda status: status["version"] == sync.history[-1].version)
    assert server.json("/deltasync/digest")["sha256"] == served_digests(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "processes"),
    [("grpo.py", 1), ("grpo.py", 2), ("async_grpo.py", 1)],
    ids=["grpo", "grpo-ddp", "async-grpo"],
)
def test_examples(server: Server, tmp_path: Path, example: str, processes: int) -> None:
    before = server.status()["version"] or 0
    run_example(
        example,
        *(
            "--model",
            str(checkpoint_of(server)),
            "--channel",
            server.channel,
            "--vllm_server_base_url",
            server.url,
            "--resume",
        ),
        *("--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false"),
        *(
            "--max_steps",
            "2",
            "--num_generations",
            "4",
            "--per_device_train_batch_size",
            "4",
            "--ack_timeout_s",
            "60",
        ),
        cwd=tmp_path,
        processes=processes,
    )
    assert server.wait(lambda status: status["version"] == status["newest_version"])["version"] > before


def test_a_server_that_follows_another_run_is_refused_before_anything_is_published(
    server: Server, tmp_path: Path
) -> None:
    elsewhere = f"file://{tmp_path}/elsewhere"
    sync = DeltaSyncCallback(elsewhere, replicas=[server.url], ack_timeout_s=1.0)
    with pytest.raises(
        ConfigError, match=f"follows run .* of {server.channel}, and {elsewhere}, .* Nothing was published"
    ):
        make_trainer("GRPO", server, tmp_path / "out", sync)
    assert not (tmp_path / "elsewhere").exists()


def test_a_used_channel_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ChannelInUseError, match="resume=True"):
        make_trainer("GRPO", server, tmp_path, DeltaSyncCallback(server.channel)).train()


def test_not_waiting_is_not_for_an_on_policy_trainer(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on-policy: .* so max_behind=1 does not work"):
        make_trainer("GRPO", server, tmp_path, DeltaSyncCallback(server.channel, max_behind=1))


# --- with a prefix cache that is used, and rewards that are learned
# --------------------------------------------------


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


def counter(server: Server, name: str, of: str = "vllm:") -> float:
    with server.open("/metrics") as reply:
        value = re.search(rf"^{of}{name}_total(?:{{.*}})? (.*)$", reply.read().decode(), re.MULTILINE)
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
        self.expected[publisher.version] = vllm_server.digests(dict(gather.stream_of(model)))
        found = self.server.json("/deltasync/digest")
        assert found["sha256"] == self.expected[found["version"]]
        self.behind.append(publisher.version - found["version"])


def rewards_of(trainer: Any, sync: DeltaSyncCallback) -> list[float]:
    """Each of its steps changed weights and was published."""
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    steps = trainer.args.max_steps
    assert len(rewards) == steps
    assert [record.step for record in sync.history] == [*range(steps + 1)]
    assert all(record.changed > 0 for record in sync.history[1:])
    return rewards


def async_options(server: Server) -> dict[str, Any]:
    """How AsyncGRPO generates on a server."""
    return {
        "vllm_server_base_url": server.url,
        "num_generations": SAMPLES,
        "per_device_train_batch_size": 2 * SAMPLES,
        "max_inflight_tasks": 2 * SAMPLES,
        "queue_maxsize": 2 * SAMPLES,
        "max_staleness": 2,
    }


def test_async_grpo_by_the_callback_alone(server: Server, tmp_path: Path) -> None:
    assert server.status()["logprobs_mode"] == "raw_logprobs"
    sync = DeltaSyncCallback(server.channel, resume=True, ack_timeout_s=120)
    bits = LiveBits(server, sync)
    trainer = make_async_trainer(
        checkpoint_of(server),
        sync,
        [],
        stub=False,
        train_dataset=prompts(),
        callbacks=[bits],
        output_dir=str(tmp_path),
        **async_options(server),
        max_steps=STALE_STEPS,
        learning_rate=LEARNING_RATE,
    )
    with prefixes_found(server):
        trainer.train()
    # its samples are up to three versions old; by them, a few steps may learn nothing
    rewards_of(trainer, sync)
    assert len(bits.behind) == STALE_STEPS and max(bits.behind) <= 1
    # The channel has more versions than this trainer published, and each token is as old as its reply says.
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert all(line["delta_sync/unversioned_token_fraction"] == 0 for line in logs)
    assert all(0 <= line["delta_sync/token_lag_mean"] <= line["delta_sync/token_lag_max"] for line in logs)
    assert all(
        line["sample/staleness_max"] <= 2 and line["delta_sync/token_lag_max"] <= 2 + 1 for line in logs
    )


@contextlib.contextmanager
def ended_and_continued(server: Server, max_lag: int) -> Iterator[None]:
    """The server ends requests at this lag, others continue their answers, and no older token is trained."""
    admit, before = TokenAges.admit, counter(server, "ended_choices", "deltasync_")
    oldest, spread = list[int](), list[int]()

    def admitted(ages: TokenAges, sample: Any) -> bool:
        kept, versions = admit(ages, sample), sample.metrics.versions
        trained = np.asarray(sample.completion_mask, dtype=bool)
        oldest.append(max(ages._lags_of(versions[trained]), default=0))
        spread.append(int(np.ptp(versions[versions != UNKNOWN])))
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenAges, "admit", admitted)
        yield
    continued = sum(versions > max_lag for versions in spread)  # a request has no tokens that far apart
    assert 0 < continued <= counter(server, "ended_choices", "deltasync_") - before
    assert max(oldest) <= max_lag


def long_answers(server: Server) -> dict[str, Any]:
    """Twenty steps, of which each takes two of the eight answers that the server generates at once."""
    sizes = {"num_generations": 2, "per_device_train_batch_size": 2, "queue_maxsize": 2}
    lengths = {"max_inflight_tasks": 8, "max_completion_length": 64, "max_steps": 20}
    return async_options(server) | sizes | lengths


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
    rewards = rewards_of(trainer, sync)
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.1, rewards
    assert bits.behind == [0] * STEPS  # on-policy
    # Blocks of another version in the prefix cache would give other log probabilities than the trainer's:
    # about 0.4 apart.
    apart = [
        line["sampling/sampling_logp_difference/mean"]
        for line in trainer.state.log_history
        if "reward" in line
    ]
    assert statistics.median(apart) < 0.1, apart


def test_another_temperature_needs_processed_log_probabilities(server: Server, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    with pytest.raises(
        ConfigError, match=r"gives raw_logprobs, .* temperature=0\.7: .* --logprobs-mode processed_logprobs"
    ):
        GRPOTrainer(
            model=str(checkpoint_of(server)),
            reward_funcs=share_of_digits,
            args=grpo_config(GRPOConfig, server, tmp_path, temperature=0.7),
            train_dataset=prompts(),
            callbacks=[DeltaSyncCallback(server.channel, resume=True)],
        )


def grpo_config(kind: Any, server: Server, folder: Path, **settings: Any) -> Any:
    on_a_cpu: dict[str, Any] = {
        "output_dir": str(folder),
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "num_generations": SAMPLES,
        "per_device_train_batch_size": 2 * SAMPLES,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return kind(**on_a_cpu | settings)
