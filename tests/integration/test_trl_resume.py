"""TRL's trainers that resume from a checkpoint, and GRPO with an engine in its own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from deltasync.errors import ConfigError
from tests.conftest import assert_same_bits
from tests.integration import trainers
from tests.integration.async_trainers import SHARED, make_async_trainer
from tests.integration.trainers import Fleet, FlushEachStep, Recorder, published_bits, run_id
from trl_callback import DeltaSyncCallback

checkpoint = trainers.checkpoint

pytestmark = [
    pytest.mark.trl,
    # of torch, while TRL imports it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def make_async(checkpoint: Path, sync: DeltaSyncCallback, recorder: TrainerCallback, max_steps: int) -> Any:
    return make_async_trainer(checkpoint, sync, [], callbacks=[recorder], max_steps=max_steps, **SAVING)


def make_grpo(
    checkpoint: Path, sync: DeltaSyncCallback, recorder: TrainerCallback, max_steps: int, **settings: Any
) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    shared = {key: value for key, value in SHARED.items() if key != "token_budget"}
    folder = str(checkpoint.parent / "out")
    settings = {
        **shared,
        **SAVING,
        "output_dir": folder,
        "num_generations": 3,
        "max_steps": max_steps,
    } | settings

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        # unequal, so that each step changes weights
        return [float(place) for place in range(len(completion_ids))]

    return GRPOTrainer(
        model=str(checkpoint),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "count from 12"}]] * 8}),
        callbacks=[sync, FlushEachStep(sync), recorder],
    )


@pytest.mark.parametrize("make", [make_async, make_grpo], ids=["AsyncGRPO", "GRPO"])
def test_a_resumed_trainer_goes_on_with_the_next_version(
    make: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/channel"
    settings = {"ack_timeout_s": 60, "max_behind": 0} if make is make_async else {}
    with Fleet(url, "here") as fleet:
        before = DeltaSyncCallback(url, **settings)
        make(checkpoint, before, Recorder(tmp_path / "saved"), max_steps=3).train()
        run = run_id(url)

        sync, recorder = DeltaSyncCallback(url, **settings), Recorder(tmp_path / "saved")
        trainer = make(checkpoint, sync, recorder, max_steps=4)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))

    assert run_id(url) == run
    assert [(record.version, record.step) for record in before.history] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    # Version 5 leads from step 3 back to step 2, by a delta: who followed before fetches no full weights.
    assert [(record.version, record.step) for record in sync.history] == [(5, 2), (6, 3), (7, 4)]
    assert [record.kind for record in sync.history] == ["delta"] * 3
    assert all(record.changed > 0 for record in sync.history)
    for record in sync.history:
        assert_same_bits(published_bits(url, record.version), recorder.bits[record.step])
    logs = [line for line in trainer.state.log_history if "delta_sync/version" in line and line["step"] > 2]
    assert [line["delta_sync/version"] for line in logs if "loss" in line] == [6, 7]
    replica = fleet.replicas["here"]
    replica.sync()
    assert replica.version == 7
    assert_same_bits(replica.state_dict(), recorder.bits[4])


class Colocated:
    """As vLLM's `LLM` in the trainer's process, as far as TRL uses it: it keeps what it was told to load, and
    answers.
    """

    def __init__(self, **_: Any) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.syncs = 0
        model = SimpleNamespace(load_weights=self.loaded.update)
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))

    def reset_prefix_cache(self) -> None:
        self.loaded = {
            name: tensor.detach().to(torch.bfloat16, copy=True) for name, tensor in self.loaded.items()
        }
        self.llm_engine.model_executor.driver_worker.model_runner.model.load_weights = self.loaded.update
        self.syncs += 1

    def generate(self, prompts: list[dict[str, Any]], **_: Any) -> list[Any]:
        def answer(*tokens: int) -> Any:
            logprobs = [{token: SimpleNamespace(logprob=-4.0, rank=1)} for token in tokens]
            return SimpleNamespace(token_ids=list(tokens), logprobs=logprobs)

        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer(12, 13, 14 + place % 3)]
            )
            for place, prompt in enumerate(prompts)
        ]


def test_an_engine_in_the_trainers_process_stays_trls_and_each_step_is_published(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.generation import vllm_generation

    for name, thing in {"is_vllm_available": lambda: True, "LLM": Colocated, "SamplingParams": dict}.items():
        monkeypatch.setattr(vllm_generation, name, thing, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # TRL sets them; so they are taken back
        monkeypatch.delenv(name)
    url = f"file://{tmp_path}/channel"
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    colocate = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    trainer = make_grpo(checkpoint, sync, recorder, max_steps=3, **colocate)
    trainer.train()

    assert [(record.version, record.step) for record in sync.history] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    for record in sync.history:
        assert_same_bits(published_bits(url, record.version), recorder.bits[record.step])
    engine = trainer.vllm_generation.llm
    # once for each batch: by TRL alone, with the weights that the last batch was made of
    assert engine.syncs == 3
    expected = recorder.bits[2]
    assert_same_bits({name: engine.loaded[name] for name in expected}, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs beside the trainer there")
def test_vllm_in_the_trainers_process_needs_a_gpu(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    sync, recorder = DeltaSyncCallback(f"file://{tmp_path}/channel"), Recorder(tmp_path / "saved")
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_grpo(checkpoint, sync, recorder, max_steps=1, use_vllm=True, vllm_mode="colocate")
    assert not (tmp_path / "channel").exists()
