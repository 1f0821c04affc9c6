"""Trainers of TRL that take a `weight_transfer`, real but for the rollout worker: it is a stub in this process."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from deltasync import Replica, heartbeat, open_store
from deltasync.demo import model as demo_model
from deltasync.errors import AckTimeoutError
from deltasync.heartbeat import Heartbeat
from tests.conftest import assert_same_bits
from tests.integration.trainers import (
    Bits,
    Fleet,
    published_bits,
    record_merges,
    run_id,
    saved_bits,
    tiny_model,
)
from trl_callback import DeltaSyncCallback, gather

pytestmark = pytest.mark.trl


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    tiny_model().save_pretrained(path)
    demo_model.build_tokenizer().save_pretrained(path)
    return path


# --- AsyncGRPOTrainer ------------------------------------------------------------------------------------------------


class StubWorker:
    """A rollout worker in this process, without a server: samples with made-up advantages, stamped with the version.

    Refills when TRL says that a version is synced; calls `on_version` then.
    """

    def __init__(
        self,
        tokenizer: Any,
        events: list[str],
        on_version: Callable[[int], None],
        make_sample: Callable[..., Any],
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._tokenizer = tokenizer
        self._events = events
        self._on_version = on_version
        self._version = 0
        self._samples = self._sample(make_sample)

    def start(self) -> None:
        self._events.append("start")
        self._fill()

    def stop(self) -> None:
        self._events.append("stop")

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version
        self._events.append(f"version {model_version}")
        self._on_version(model_version)
        self._fill()

    def check_health(self, stale_after_s: float) -> None:
        pass

    def _fill(self) -> None:
        for sample in itertools.islice(self._samples, 24):
            self.rollout_buffer.put(sample)

    def _sample(self, make_sample: Callable[..., Any]) -> Iterator[Any]:
        question = [{"role": "user", "content": "count from 12"}]
        prompt = self._tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        for group in itertools.count():
            for member in range(3):
                answer = [*self._tokenizer.encode(f"12 13 {member}"), self._tokenizer.eos_token_id]
                yield make_sample(
                    group,
                    member,
                    prompt=question,
                    completion=[{"role": "assistant", "content": ""}],
                    input_ids=np.asarray(prompt + answer, dtype=np.int64),
                    completion_mask=np.asarray([0] * len(prompt) + [1] * len(answer), dtype=np.int64),
                    model_version=self._version,
                )


def grpo_sample(group: int, member: int, **fields: Any) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    mask = fields["completion_mask"].astype(np.float32)
    metrics = {"reward": float(member), "reward_std": 1.0}
    return RolloutSample(**fields, old_log_probs=-5 * mask, advantage=float(member - 1), group_id=group, metrics=metrics)


def distillation_sample(group: int, member: int, **fields: Any) -> Any:
    """The teacher would say the same token everywhere, and another one with half of the probability."""
    from trl.experimental.async_distillation.async_rollout_worker import RolloutSample

    length = len(fields["input_ids"])
    return RolloutSample(
        **fields,
        teacher_topk_ids=np.tile(np.asarray([member, member + 1]), (length, 1)),
        teacher_topk_logprobs=np.tile(np.log(np.asarray([0.6, 0.3], dtype=np.float32)), (length, 1)),
        metrics={},
        teacher_id="default",
        prompt_id=group,
    )


SHARED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 3,
    "max_completion_length": 8,
    "token_budget": -1,
    "max_steps": 3,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def make_async_trainer(
    checkpoint: Path,
    sync: DeltaSyncCallback,
    events: list[str],
    on_version: Callable[[int], None] = lambda version: None,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    from deltasync.demo import trl_on_cpu

    trl_on_cpu.prepare()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return AsyncGRPOTrainer(
        model=str(checkpoint),
        reward_funcs=lambda **_: [0.0],
        args=AsyncGRPOConfig(output_dir=str(checkpoint.parent / "out"), num_generations=3, **(SHARED | settings)),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "count from 12"}]] * 8}),
        processing_class=tokenizer,
        rollout_worker=StubWorker(tokenizer, events, on_version, grpo_sample),
        weight_transfer=sync.weight_transfer,
        callbacks=[sync],
        peft_config=peft_config,
    )


def test_async_grpo_counts_a_version_only_when_the_fleet_serves_it(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack="all", ack_timeout_s=60)
    events: list[str] = []
    live: list[Bits] = []
    with Fleet(url, "left", "right") as fleet:

        def on_version(version: int) -> None:
            if version == 1:
                # "all" means all that have reported, and before version 1 none could name the run it follows.
                deadline = time.monotonic() + 60
                while len(heartbeat.read_all(open_store(url), run_id(url))) < 2 and time.monotonic() < deadline:
                    time.sleep(0.01)
            assert {replica.version for replica in fleet.replicas.values()} == {version}
            live.append(saved_bits(trainer.model, tmp_path / "saved"))
            for replica in fleet.replicas.values():
                assert_same_bits(replica.state_dict(), live[-1])

        trainer = make_async_trainer(checkpoint, sync, events, on_version, max_staleness=1)
        trainer.train()

    assert events == ["version 1", "start", "version 2", "version 3", "version 4", "stop"]
    assert [(record.version, record.step) for record in sync.history] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert sync.history[0].kind == "anchor"
    for version, bits in enumerate(live, start=1):
        assert_same_bits(published_bits(url, version), bits)
    assert all(record.ack_s is not None for record in sync.history)
    assert all(record.changed > 0 for record in sync.history)

    logs = [line for line in trainer.state.log_history if "loss" in line]
    # What TRL logs after a step is what was known when its callbacks had run.
    assert [line["delta_sync/version"] for line in logs] == [2, 3, 4]
    # A sample is stamped with a version that the whole fleet serves, so max_staleness bounds how old its weights were.
    assert all(line["sample/staleness_max"] <= 1 for line in logs)
    anchor = AutoModelForCausalLM.from_pretrained(tmp_path / "channel" / "anchors" / f"{1:010d}")
    assert_same_bits(gather.held_tensors(anchor), live[0])


def test_async_grpo_fails_when_no_replica_acknowledges(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack_timeout_s=1.0)
    events: list[str] = []
    trainer = make_async_trainer(checkpoint, sync, events)
    with pytest.raises(AckTimeoutError, match="no replica has ever reported"):
        trainer.train()
    assert events == ["stop"]
    assert Replica(url).sync() == 1  # it is published all the same


def test_async_grpo_names_the_replica_that_lags(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack="all", ack_timeout_s=2.0)

    def on_version(version: int) -> None:
        if version == 2:
            heartbeat.write(
                open_store(url),
                Heartbeat(replica_id="slow-one", run_id=run_id(url), version=1, state="staging", error="link is down"),
            )

    events: list[str] = []
    with Fleet(url, "quick-one"):
        trainer = make_async_trainer(checkpoint, sync, events, on_version)
        with pytest.raises(AckTimeoutError) as failure:
            trainer.train()
    assert "slow-one" in str(failure.value)
    assert "link is down" in str(failure.value)
    assert "quick-one" not in str(failure.value)
    assert events == ["version 1", "start", "version 2", "stop"]


def test_async_grpo_publishes_frozen_weights_too(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack="none")
    trainer = make_async_trainer(checkpoint, sync, [])
    trainer.model.model.layers[0].requires_grad_(False)
    expected = saved_bits(trainer.model, tmp_path / "saved").keys()
    trainer.train()
    assert published_bits(url).keys() == expected
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))
    assert all(record.ack_s is None for record in sync.history)


def test_async_grpo_publishes_the_weights_that_trl_merged(checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    url = f"file://{tmp_path}/channel"
    with Fleet(url, "replica"):
        sync = DeltaSyncCallback(url)
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        trainer = make_async_trainer(checkpoint, sync, [], peft_config=lora)
        merged = record_merges(trainer.model)
        trainer.train()
    assert [record.changed > 0 for record in sync.history] == [True] * 4
    assert len(merged) == 4
    for version, bits in enumerate(merged, start=1):
        assert_same_bits(published_bits(url, version), bits)
    anchor = AutoModelForCausalLM.from_pretrained(tmp_path / "channel" / "anchors" / f"{1:010d}")
    assert_same_bits(gather.held_tensors(anchor), merged[0])


def test_without_an_acknowledgement_the_version_runs_ahead_of_the_fleet(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack="none")
    served: list[int] = []
    replica = Replica(url)

    def on_version(version: int) -> None:
        served.append(replica.version or 0)
        if version == 1:
            transfer = sync.weight_transfer.publisher
            assert transfer is not None
            transfer.flush()
            replica.sync()

    make_async_trainer(checkpoint, sync, [], on_version).train()
    assert served == [0, 1, 1, 1]  # while TRL counted 1, 2, 3, 4


def test_async_distillation_syncs_by_the_same_object(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_distillation import (
        AsyncDistillationConfig,
        AsyncDistillationTrainer,
        async_distillation_trainer,
    )

    monkeypatch.setattr(async_distillation_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks CUDA
    url = f"file://{tmp_path}/channel"
    sync, events = DeltaSyncCallback(url, ack=2), list[str]()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with Fleet(url, "left", "right") as fleet:

        def on_version(version: int) -> None:
            assert {replica.version for replica in fleet.replicas.values()} == {version}

        trainer = AsyncDistillationTrainer(
            model=str(checkpoint),
            args=AsyncDistillationConfig(
                output_dir=str(tmp_path / "out"),
                teacher_top_k=1,
                model_init_kwargs={"attn_implementation": "sdpa"},  # the default is a kernel for GPUs
                **SHARED,
            ),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "count from 12"}]] * 8}),
            processing_class=tokenizer,
            rollout_worker=StubWorker(tokenizer, events, on_version, distillation_sample),
            weight_transfer=sync.weight_transfer,
            callbacks=[sync],
        )
        trainer.train()
    assert events == ["version 1", "start", "version 2", "version 3", "version 4", "stop"]
    assert all(record.changed > 0 for record in sync.history)
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))
