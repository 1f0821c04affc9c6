"""Trainers of TRL that take a `weight_transfer`, real but for the rollout worker: it is a stub in this
process.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    TrainerCallback,
)

from deltasync import open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import AckTimeoutError, ConfigError
from deltasync.serve import heartbeat
from demo import model as demo_model
from tests.conftest import assert_same_bits
from tests.integration import trainers
from tests.integration.async_trainers import make_async_trainer, make_distillation_trainer, needs_vllm
from tests.integration.trainers import (
    Bits,
    Fleet,
    Recorder,
    adapter_bits,
    anchor_directory,
    beat,
    merged_bits,
    published_bits,
    run_id,
    saved_bits,
    tiny_moe,
)
from tests.unit.test_trainers_server import Status
from tests.waiting import wait_until
from trl_callback import DeltaSyncCallback, DeltaSyncConfig, DeltaWeightTransfer, compat, gather

checkpoint = trainers.checkpoint

pytestmark = pytest.mark.trl


def test_async_grpo_counts_a_version_only_when_the_fleet_serves_it(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack_timeout_s=60, max_behind=0)
    events: list[str] = []
    live: list[Bits] = []
    with Fleet(url, "left", "right") as fleet:

        def on_version(version: int) -> None:
            if version == 1:
                # All that have reported are waited for, and before version 1 none could name the run it
                # follows.
                wait_until(lambda: len(heartbeat.read_all(open_store(url), run_id(url))) == 2)
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
    # A sample is stamped with a version that the whole fleet serves, so max_staleness bounds how old its
    # weights were.
    assert all(line["sample/staleness_max"] <= 1 for line in logs)
    anchor = AutoModelForCausalLM.from_pretrained(anchor_directory(tmp_path))
    assert_same_bits(gather.held_tensors(anchor), live[0])


def test_async_grpo_names_the_replica_that_lags(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack_timeout_s=8.0, max_behind=0)

    def on_version(version: int) -> None:
        if version == 2:
            first = ChannelReader(open_store(url)).numbered(1).version
            beat(open_store(url), "slow-one", first, "staging", "link is down")

    events: list[str] = []
    with Fleet(url, "quick-one"):
        trainer = make_async_trainer(checkpoint, sync, events, on_version)
        with pytest.raises(AckTimeoutError) as failure:
            trainer.train()
    assert "slow-one" in str(failure.value)
    assert "link is down" in str(failure.value)
    assert "quick-one" not in str(failure.value)
    assert events == ["version 1", "start", "version 2", "stop"]


def test_async_grpo_publishes_experts_one_by_one(tmp_path: Path) -> None:
    checkpoint, url = tmp_path / "checkpoint", f"file://{tmp_path}/channel"
    tiny_moe().save_pretrained(checkpoint)
    demo_model.build_tokenizer().save_pretrained(checkpoint)
    sync = DeltaSyncCallback(url, max_behind=0)
    live: list[Bits] = []
    with Fleet(url, "replica"):
        trainer = make_async_trainer(
            checkpoint, sync, [], lambda _: live.append(saved_bits(trainer.model, tmp_path / "saved"))
        )
        trainer.train()
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in live[0]
    for version, bits in enumerate(live, start=1):
        assert_same_bits(published_bits(url, version), bits)
    assert [record.changed > 0 for record in sync.history] == [True] * 4


def test_experts_beside_adapters_that_trl_merged_are_published_one_by_one(
    memory_url: str, tmp_path: Path
) -> None:
    from peft import get_peft_model
    from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

    model = get_peft_model(tiny_moe(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    transfer = DeltaWeightTransfer(DeltaSyncConfig(memory_url))
    transfer.bind(model)
    transfer.init_weight_transfer()
    model.merge_adapter()
    transfer.send_weights((name, param.detach()) for name, param in _iter_vllm_named_params(model))
    transfer.destroy()
    model.unmerge_adapter()
    assert_same_bits(
        published_bits(memory_url), saved_bits(copy.deepcopy(model).merge_and_unload(), tmp_path)
    )


@pytest.mark.parametrize("adapter_only", [False, True])
def test_async_grpo_publishes_merged_weights_or_the_adapter_and_merges_none_of_its_own(
    adapter_only: bool, checkpoint: Path, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/channel"
    with Fleet(url, "replica"):
        sync = DeltaSyncCallback(url, adapter_only=adapter_only)
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        recorder = Recorder(tmp_path / "saved", adapter_bits if adapter_only else merged_bits)
        trainer = make_async_trainer(checkpoint, sync, [], peft_config=lora, callbacks=[recorder])
        before = trainer.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.clone()
        trainer.train()
    assert torch.equal(
        trainer.model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight, before
    )
    saved = list(recorder.bits.values())
    assert [record.changed > 0 for record in sync.history] == [True] * 4
    assert len(saved) == 4
    for version, bits in enumerate(saved, start=1):
        assert_same_bits(published_bits(url, version), bits)
    if not adapter_only:
        anchor = AutoModelForCausalLM.from_pretrained(anchor_directory(tmp_path))
        assert_same_bits(gather.held_tensors(anchor), saved[0])


def test_async_distillation_syncs_by_the_same_object(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync, events = DeltaSyncCallback(url, max_behind=0), list[str]()
    with Fleet(url, "left", "right") as fleet:

        def on_version(version: int) -> None:
            assert {replica.version for replica in fleet.replicas.values()} == {version}

        trainer = make_distillation_trainer(checkpoint, sync, events, on_version)
        trainer.train()
    assert events == ["version 1", "start", "version 2", "version 3", "version 4", "stop"]
    assert all(record.changed > 0 for record in sync.history)
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


# --- who syncs the weights
# -------------------------------------------------------------------------------------------


def test_a_transfer_that_is_passed_explicitly_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync, events = DeltaSyncCallback(url, max_behind=0), list[str]()
    with Fleet(url, "replica"):
        trainer = make_async_trainer(checkpoint, sync, events, weight_transfer=sync.weight_transfer)
        trainer.train()
    assert events == ["version 1", "start", "version 2", "version 3", "version 4", "stop"]
    assert [(record.version, record.step) for record in sync.history] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


def test_a_transfer_of_another_kind_is_refused_before_training(checkpoint: Path, memory_url: str) -> None:
    class NoTransfer:
        def init_weight_transfer(self) -> None:
            events.append("transfer")

        pause = resume = send_weights = destroy = init_weight_transfer

    events: list[str] = []
    trainer = make_async_trainer(
        checkpoint, DeltaSyncCallback(memory_url), events, weight_transfer=NoTransfer()
    )
    with pytest.raises(
        ConfigError, match=r"AsyncGRPOTrainer syncs its weights with NoTransfer instead of the channel"
    ):
        trainer.train()
    assert "start" not in events


@needs_vllm
def test_a_callback_that_comes_after_the_transfer_was_built_is_refused(
    checkpoint: Path, memory_url: str
) -> None:
    """It was added to a trainer that has TRL's own transfer, and came too late to take its place."""
    events: list[str] = []
    late = DeltaSyncCallback(memory_url)
    trainer = make_async_trainer(checkpoint, TrainerCallback(), events)
    assert type(trainer.weight_transfer).__module__.startswith("trl.")
    # there is no server
    trainer.weight_transfer.init_weight_transfer = trainer.weight_transfer.pause = lambda: None
    trainer.weight_transfer.resume = lambda: None
    trainer.add_callback(late)
    with pytest.raises(
        ConfigError,
        match=r"with WeightTransferClient instead of the channel. Give the callback to the trainer's",
    ):
        trainer.train()
    assert late.history == []


@needs_vllm
def test_the_next_trainer_has_a_transfer_of_its_own(
    checkpoint: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    built = async_grpo_trainer.WeightTransferClient
    with monkeypatch.context() as broken, pytest.raises(TypeError):
        # the constructor fails before it builds a transfer
        broken.setattr(async_grpo_trainer, "VLLMClient", None)
        make_async_trainer(checkpoint, DeltaSyncCallback(memory_url), [])
    assert async_grpo_trainer.WeightTransferClient is not built
    assert isinstance(make_async_trainer(checkpoint, TrainerCallback(), []).weight_transfer, built)
    sync = DeltaSyncCallback(memory_url)
    assert make_async_trainer(checkpoint, sync, []).weight_transfer is sync.weight_transfer
    assert async_grpo_trainer.WeightTransferClient is built


def test_adapters_that_the_server_could_load_are_merged_all_the_same(
    checkpoint: Path, memory_url: str
) -> None:
    """TRL would ask the server, of which there is none here."""
    sync = DeltaSyncCallback(memory_url)
    trainer = make_async_trainer(checkpoint, sync, [], peft_config=LoraConfig(target_modules=["q_proj"]))
    assert trainer.weight_transfer is sync.weight_transfer
    assert not trainer._lora_sync


def test_a_trl_without_a_transfer_to_replace_is_refused_at_once(
    checkpoint: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    monkeypatch.delattr(async_grpo_trainer, "WeightTransferClient")
    with pytest.raises(
        ConfigError, match=r"AsyncGRPOTrainer of TRL .* has no weight transfer .* 1\.9 to 1\.16"
    ):
        make_async_trainer(checkpoint, DeltaSyncCallback(memory_url), [])


@pytest.mark.parametrize(
    ("name", "method"), [("send_weights", lambda self: None), ("register", lambda self: None)]
)
def test_a_trl_that_calls_its_transfer_otherwise_is_refused_before_training(
    name: str, method: Any, checkpoint: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    monkeypatch.setattr(async_grpo_trainer.WeightTransferProtocol, name, method, raising=False)
    events: list[str] = []
    trainer = make_async_trainer(checkpoint, DeltaSyncCallback(memory_url), events)
    with pytest.raises(ConfigError, match=rf"in another form \({name}\) .* 1\.9 to 1\.16"):
        trainer.train()
    assert "start" not in events


@needs_vllm
def test_log_probabilities_of_another_distribution_are_refused_before_training(
    checkpoint: Path, memory_url: str
) -> None:
    server = Status()
    server.answer = {"state": "waiting", "logprobs_mode": "raw_logprobs"}
    sync = DeltaSyncCallback(memory_url)
    settings: dict[str, Any] = {"vllm_server_base_url": server.url, "stub": False, "temperature": 0.7}
    trainer = make_async_trainer(checkpoint, sync, [], **settings)
    with pytest.raises(
        ConfigError, match=r"gives raw_logprobs, .* with temperature=0\.7: .* --logprobs-mode processed_l"
    ):
        trainer.train()
    assert sync.history == []  # not even published

    server.answer = 503  # it starts to answer once it serves a version
    sync = DeltaSyncCallback(memory_url, replicas=[server.url])
    trainer = make_async_trainer(checkpoint, sync, [], **settings)
    publish = sync.weight_transfer.publish

    def publish_and_start(stream: Any) -> None:
        publish(stream)
        sync.weight_transfer.flush()
        reader = ChannelReader(open_store(memory_url))
        served = dataclasses.asdict(reader.numbered(1).version)
        server.answer = {"logprobs_mode": "raw_logprobs", "run_id": reader.channel().run_id, **served}

    sync.weight_transfer.publish = publish_and_start  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="gives raw_logprobs"):
        trainer.train()
    assert [record.version for record in sync.history] == [1]
    assert trainer.state.global_step == 0
    server.close()


@pytest.mark.parametrize(
    ("settings", "compares"),
    [
        ("AsyncGRPOConfig", True),
        ("AsyncDistillationConfig", False),
        ("GRPOConfig", True),
        ("RLOOConfig", False),
    ],
)
def test_who_compares_log_probabilities(settings: str, compares: bool, tmp_path: Path) -> None:
    import trl
    from trl.experimental import async_distillation, async_grpo

    (kind,) = (
        getattr(place, settings) for place in (trl, async_distillation, async_grpo) if settings in dir(place)
    )
    args = kind(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert compat.compares_logprobs(args) is compares
    assert compat.streams_weights(args) is settings.startswith("Async")
    if settings == "GRPOConfig":
        args.vllm_importance_sampling_correction = False
        assert not compat.compares_logprobs(args)
