"""Trainers of TRL that take a `weight_transfer`, real but for the rollout worker: it is a stub in this
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import queue
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

import tests.integration.trainers  # noqa: F401 - sets what TRL reads of the environment
from deltasync import Replica
from tests.answers import Answers, Asked
from trl_callback import DeltaSyncCallback

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="TRL makes its rollout worker and its client only where vLLM is installed",
)


class Completions(Answers):
    """A server in vLLM's place for TRL's own rollout worker.

    Args:
        replica: Follows the channel, as the server says.
        complete: Gives the tokens for a request's body, and how many of them each version made, in
            order. A third result says that the request was ended.

    Attributes:
        asked: The version that each request demanded, and the one that was served.
        lags: The maximum lags that requests named.
    """

    def __init__(self, replica: Replica, complete: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
        self.asked = list[tuple[str | None, int]]()
        self.lags = set[str | None]()

        def answer(asked: Asked) -> tuple[int, Any] | tuple[int, Any, dict[str, str]]:
            if asked.path != "/v1/completions":
                served = replica.identity
                status = {"state": "waiting", "run_id": None} if served is None else {
                    "state": "serving", "run_id": replica._follow.reader.channel().run_id, **dataclasses.asdict(served)
                }  # fmt: skip
                return 200, {"data": []} | status
            self.asked.append((asked.headers.get("x-deltasync-version"), replica.version or 0))
            self.lags.add(asked.headers.get("x-deltasync-max-lag"))
            ids, spans, *ended = complete(json.loads(asked.body))
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-2.0] * len(ids)}}
            choice["finish_reason"] = "abort" if ended else "stop"
            versions = {
                "x-deltasync-versions": f"{spans[0][0]}..{spans[-1][0]}",
                "x-deltasync-spans": json.dumps([spans]),
            }
            return 200, {"choices": [choice]}, versions | {"content-type": "application/json"}

        super().__init__(answer)


class StubWorker:
    """A rollout worker in this process, without a server: samples with made-up advantages, stamped with the
    version.

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
    return RolloutSample(
        **fields, old_log_probs=-5 * mask, advantage=float(member - 1), group_id=group, metrics=metrics
    )


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


def share_of_digits(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """How much of an answer are digits, which a model with random weights learns in a few steps; a reward
    function.
    """
    return [statistics.fmean(token in DIGITS for token in ids) for ids in completion_ids]


DIGITS = range(11, 21)  # in the demo's tokenizer

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
    weight_transfer: Any = None,
    stub: bool = True,
    train_dataset: Dataset | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    tools: list[Callable[..., Any]] | None = None,
    **settings: Any,
) -> Any:
    """By the callback alone, unless a `weight_transfer` is given; with TRL's own rollout worker, if not with
    a stub.
    """
    from demo import trl_on_cpu

    trl_on_cpu.prepare()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    trainer = AsyncGRPOTrainer(
        model=str(checkpoint),
        reward_funcs=share_of_digits,
        args=AsyncGRPOConfig(
            **({"output_dir": str(checkpoint.parent / "out"), "num_generations": 3} | SHARED | settings)
        ),
        train_dataset=train_dataset
        or Dataset.from_dict({"prompt": [[{"role": "user", "content": "count from 12"}]] * 8}),
        processing_class=tokenizer,
        rollout_worker=StubWorker(tokenizer, events, on_version, grpo_sample) if stub else None,
        weight_transfer=weight_transfer,
        callbacks=[sync, *callbacks],
        peft_config=peft_config,
        tools=tools,
    )
    if not stub:
        _end_at_once(trainer.rollout_worker)
    return trainer


def _end_at_once(worker: Any) -> None:
    """TRL waits for 15 seconds, and then kills, where its process has samples left that nobody takes any
    more.
    """
    stop = worker.stop

    def stop_and_take() -> None:
        def take() -> None:
            while worker._process is not None:
                with contextlib.suppress(queue.Empty):
                    worker.rollout_buffer.get(timeout=0.1)

        threading.Thread(target=take, daemon=True).start()
        stop()

    worker.stop = stop_and_take


def make_distillation_trainer(
    checkpoint: Path,
    sync: DeltaSyncCallback,
    events: list[str],
    on_version: Callable[[int], None] = lambda version: None,
    **settings: Any,
) -> Any:
    from trl.experimental.async_distillation import (
        AsyncDistillationConfig,
        AsyncDistillationTrainer,
        async_distillation_trainer,
    )

    async_distillation_trainer.get_peak_flops_per_device = lambda *_: None  # it asks CUDA
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return AsyncDistillationTrainer(
        model=str(checkpoint),
        args=AsyncDistillationConfig(
            output_dir=str(checkpoint.parent / "out"),
            teacher_top_k=1,
            model_init_kwargs={"attn_implementation": "sdpa"},  # the default is a kernel for GPUs
            **(SHARED | settings),
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "count from 12"}]] * 8}),
        processing_class=tokenizer,
        rollout_worker=StubWorker(tokenizer, events, on_version, distillation_sample),
        callbacks=[sync],
    )
