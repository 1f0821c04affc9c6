"""Real trainers on a CPU, with the callback. Trainers of transformers need no TRL; those marked `trl` do."""

from __future__ import annotations

import itertools
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from deltasync import Replica, heartbeat, open_store
from deltasync.demo import model as demo_model
from deltasync.errors import AckTimeoutError, ChannelInUseError, ConfigError, DeltaSyncError, PublishError
from deltasync.heartbeat import Heartbeat
from deltasync.reader import ChannelReader
from tests.conftest import assert_same_bits
from trl_callback import DeltaSyncCallback, DeltaSyncConfig, DeltaWeightTransfer, gather

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL warns that AsyncGRPOTrainer is experimental when it is imported
os.environ["CI"] = "1"  # no telemetry


Bits = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def tiny_model(tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))


def tiny_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    tiny_model().save_pretrained(path)
    demo_model.build_tokenizer().save_pretrained(path)
    return path


def saved_bits(model: torch.nn.Module, folder: Path) -> Bits:
    """What `save_pretrained` writes, in bfloat16: the reference for what is to be published."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}


def published_bits(url: str, version: int | None = None) -> Bits:
    replica = Replica(url)
    replica.sync(version)
    return replica.state_dict()


def run_id(url: str) -> str:
    return ChannelReader(open_store(url)).channel().run_id


class Recorder(TrainerCallback):
    """Keeps what a checkpoint of each step would hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bits: dict[int, Bits] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.bits[state.global_step] = saved_bits(model, self.folder)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.bits[state.global_step] = saved_bits(model, self.folder)


def make_trainer(model: torch.nn.Module, out: Path, *callbacks: TrainerCallback, max_steps: int = 4) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (32, 12), generator=generator)
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out),
            max_steps=max_steps,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        processing_class=demo_model.build_tokenizer(),
        callbacks=list(callbacks),
    )


# --- any trainer of transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_model", [tiny_model, lambda: tiny_model(tied=False), tiny_moe], ids=["tied", "untied", "moe"])
def test_every_step_is_published_bit_for_bit(make_model: Callable[[], Any], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    trainer = make_trainer(make_model(), tmp_path / "out", sync, recorder)
    trainer.train()

    # Versions whose upload had not begun joined the next one, so not every step has a version.
    steps = [record.step for record in sync.history]
    assert steps[-1] == 4
    assert steps == sorted(set(steps))
    assert [record.version for record in sync.history] == list(range(1, len(steps) + 1))
    assert sync.history[0].kind == "anchor"
    for record in sync.history:
        assert_same_bits(published_bits(url, record.version), recorder.bits[record.step])
    assert_same_bits(published_bits(url), recorder.bits[4])

    last = trainer.state.log_history[-2]  # the one after it sums up the run
    assert last["delta_sync/version"] == sync.history[-1].version
    assert last["delta_sync/changed_fraction"] == sync.history[-1].changed_fraction > 0
    assert "delta_sync/ack_s" not in last


@pytest.mark.parametrize("make_model", [tiny_model, tiny_moe], ids=["tied", "moe"])
def test_an_anchor_is_a_checkpoint_with_a_tokenizer(make_model: Callable[[], Any], tmp_path: Path) -> None:
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel", anchor_every=1)
    trainer = make_trainer(make_model(), tmp_path / "out", sync, max_steps=2)
    trainer.train()

    anchor = tmp_path / "channel" / "anchors" / f"{sync.history[-1].version:010d}"
    loaded, info = AutoModelForCausalLM.from_pretrained(anchor, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16  # from its config.json
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.model.state_dict().items()}
    assert_same_bits(loaded.state_dict(), expected)
    tokenizer = AutoTokenizer.from_pretrained(anchor)
    assert tokenizer.chat_template == demo_model.build_tokenizer().chat_template


def test_publishes_every_n_steps_and_the_final_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(DeltaSyncConfig(url, codec="raw"), publish_steps=3)

    class Flush(TrainerCallback):
        """Waits for each upload, so that no version joins another."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            publisher = sync._transfer.publisher
            assert publisher is not None
            publisher.flush()

    trainer = make_trainer(tiny_model(), tmp_path / "out", sync, Flush(), max_steps=4)
    with caplog.at_level("INFO", logger="trl_callback"):
        trainer.train()
    assert [record.step for record in sync.history] == [0, 3, 4]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("trl_callback")]
    assert [line.split()[0] for line in lines] == ["version=1", "version=2", "version=3"]
    fields = ["version", "changed_fraction", "payload_bytes", "bits_per_changed", "encode_s", "ack_s"]
    assert [field.partition("=")[0] for field in lines[0].split()] == fields
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


def test_resuming_goes_on_with_the_run(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    make_trainer(tiny_model(), tmp_path / "out", DeltaSyncCallback(url), max_steps=1).train()
    run, version = run_id(url), Replica(url).sync()
    with pytest.raises(ChannelInUseError):
        make_trainer(tiny_model(), tmp_path / "out", DeltaSyncCallback(url), max_steps=1).train()
    trainer = make_trainer(tiny_model(), tmp_path / "out", DeltaSyncCallback(url, resume=True), max_steps=2)
    trainer.train()
    assert run_id(url) == run
    assert Replica(url).sync() > version
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


def test_a_lost_upload_fails_the_training_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltasync.errors import StoreError
    from deltasync.stores.local import LocalStore

    def full(self: LocalStore, key: str, data: bytes) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(LocalStore, "create", full)
    trainer = make_trainer(tiny_model(), tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel"), max_steps=1)
    with pytest.raises(PublishError, match="the disk is full"):
        trainer.train()


def test_refuses_adapters_and_shards_when_the_trainer_is_made(memory_url: str, tmp_path: Path) -> None:
    adapted = tiny_model()
    adapted.peft_config = {"default": SimpleNamespace()}  # what PEFT leaves on a model; it is not installed here
    with pytest.raises(ConfigError, match="PEFT"):
        make_trainer(adapted, tmp_path / "out", DeltaSyncCallback(memory_url))
    sharded = tiny_model()
    sharded.lm_head.weight.ds_id = 7  # what ZeRO-3 leaves on a parameter
    with pytest.raises(ConfigError, match="sharded"):
        make_trainer(sharded, tmp_path / "out", DeltaSyncCallback(memory_url))


def test_buffers_are_published_and_ties_that_are_declared_keep_the_right_name(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.register_buffer("kept", torch.arange(3))
    model.model.register_buffer("scratch", torch.arange(3), persistent=False)
    names = gather.checkpoint_tensors(model).keys()
    assert "model.kept" in names
    assert "model.scratch" not in names
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


# --- AsyncGRPOTrainer ------------------------------------------------------------------------------------------------


class StubWorker:
    """A rollout worker in this process, without a server: samples with made-up advantages, stamped with the version.

    Refills when TRL says that a version is synced; calls `on_version` then.
    """

    def __init__(self, tokenizer: Any, events: list[str], on_version: Callable[[int], None]) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._tokenizer = tokenizer
        self._events = events
        self._on_version = on_version
        self._version = 0
        self._samples = self._sample()

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

    def _sample(self) -> Iterator[Any]:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        question = [{"role": "user", "content": "count from 12"}]
        prompt = self._tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        for group in itertools.count():
            for member in range(3):
                answer = [*self._tokenizer.encode(f"12 13 {member}"), self._tokenizer.eos_token_id]
                yield RolloutSample(
                    prompt=question,
                    completion=[{"role": "assistant", "content": ""}],
                    input_ids=np.asarray(prompt + answer, dtype=np.int64),
                    completion_mask=np.asarray([0] * len(prompt) + [1] * len(answer), dtype=np.int64),
                    old_log_probs=np.asarray([0.0] * len(prompt) + [-5.0] * len(answer), dtype=np.float32),
                    advantage=float(member - 1),
                    model_version=self._version,
                    group_id=group,
                    metrics={"reward": float(member), "reward_std": 1.0},
                )


class Fleet:
    """Replicas in threads that follow a channel and write heartbeats."""

    def __init__(self, url: str, *replica_ids: str) -> None:
        self.replicas = {replica_id: Replica(url) for replica_id in replica_ids}
        self._store = open_store(url)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._follow, args=item) for item in self.replicas.items()]

    def _follow(self, replica_id: str, replica: Replica) -> None:
        while not self._over.wait(0.01):
            before = replica.version
            try:
                version = replica.sync()
            except DeltaSyncError:  # nothing is published yet
                continue
            if version != before:
                run = ChannelReader(self._store).channel().run_id
                heartbeat.write(self._store, Heartbeat(replica_id=replica_id, run_id=run, version=version, state="serving"))

    def __enter__(self) -> Fleet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def make_async_trainer(
    checkpoint: Path, sync: DeltaSyncCallback, events: list[str], on_version: Callable[[int], None] = lambda version: None
) -> Any:
    from datasets import Dataset

    from deltasync.demo import trl_on_cpu

    trl_on_cpu.prepare()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return AsyncGRPOTrainer(
        model=str(checkpoint),
        reward_funcs=lambda **_: [0.0],
        args=AsyncGRPOConfig(
            output_dir=str(checkpoint.parent / "out"),
            learning_rate=1e-3,
            per_device_train_batch_size=3,
            num_generations=3,
            max_completion_length=8,
            token_budget=-1,
            max_steps=3,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "count from 12"}]] * 8}),
        processing_class=tokenizer,
        rollout_worker=StubWorker(tokenizer, events, on_version),
        weight_transfer=sync.weight_transfer,
        callbacks=[sync],
    )


@pytest.mark.trl
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

        trainer = make_async_trainer(checkpoint, sync, events, on_version)
        trainer.train()

    assert events == ["version 1", "start", "version 2", "version 3", "version 4", "stop"]
    assert [(record.version, record.step) for record in sync.history] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert sync.history[0].kind == "anchor"
    for version, bits in enumerate(live, start=1):
        assert_same_bits(published_bits(url, version), bits)
    assert all(record.ack_s is not None for record in sync.history)
    assert all(record.changed > 0 for record in sync.history)

    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["delta_sync/version"] for line in logs] == [2, 3, 4]
    anchor = AutoModelForCausalLM.from_pretrained(tmp_path / "channel" / "anchors" / f"{1:010d}")
    assert_same_bits(gather.held_tensors(anchor), live[0])


@pytest.mark.trl
def test_async_grpo_fails_when_no_replica_acknowledges(checkpoint: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, ack_timeout_s=1.0)
    events: list[str] = []
    trainer = make_async_trainer(checkpoint, sync, events)
    with pytest.raises(AckTimeoutError, match="no replica has ever reported"):
        trainer.train()
    assert events == ["stop"]
    assert Replica(url).sync() == 1  # it is published all the same


@pytest.mark.trl
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


@pytest.mark.trl
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


@pytest.mark.trl
def test_a_trl_that_takes_no_weight_transfer_is_refused(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.experimental.async_grpo

    class Trainer:
        def __init__(self, model: str) -> None: ...

    monkeypatch.setattr(trl.experimental.async_grpo, "AsyncGRPOTrainer", Trainer)
    with pytest.raises(ConfigError, match=r"1\.9 to 1\.16"):
        DeltaSyncCallback(memory_url).weight_transfer  # noqa: B018 - a property that checks


@pytest.mark.trl
def test_trl_parses_both_configs(tmp_path: Path) -> None:
    from trl import TrlParser
    from trl.experimental.async_grpo import AsyncGRPOConfig

    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--dtype", "bfloat16"]
    arguments += ["--channel", "memory://parsed", "--served_dtype", "float16", "--ack", "all"]
    trainer, sync = TrlParser((AsyncGRPOConfig, DeltaSyncConfig)).parse_args_and_config(arguments)
    assert trainer.dtype == "bfloat16"
    assert sync == DeltaSyncConfig("memory://parsed", served_dtype="float16", ack="all")


# --- settings and the bare transfer ----------------------------------------------------------------------------------


def test_a_transfer_without_a_model_says_what_is_missing(memory_url: str) -> None:
    with pytest.raises(ConfigError, match="callbacks="):
        DeltaWeightTransfer(DeltaSyncConfig(memory_url)).init_weight_transfer()


def test_a_transfer_refuses_a_model_that_trl_would_stream_under_other_names(memory_url: str) -> None:
    transfer = DeltaWeightTransfer(DeltaSyncConfig(memory_url))
    transfer.bind(tiny_moe())
    with pytest.raises(ConfigError, match="experts"):
        transfer.init_weight_transfer()


def test_an_upload_that_hangs_is_not_waited_for_longer_than_asked(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    store = type(open_store(memory_url))
    create = store.create

    def hang(self: Any, key: str, data: bytes) -> None:
        opened.wait(60)
        create(self, key, data)

    monkeypatch.setattr(store, "create", hang)
    model = tiny_model()
    transfer = DeltaWeightTransfer(DeltaSyncConfig(memory_url, ack_timeout_s=0.2))
    transfer.bind(model)
    transfer.init_weight_transfer()
    before = time.monotonic()
    transfer.send_weights(iter(model.named_parameters()))
    with pytest.raises(TimeoutError):
        transfer.resume()
    assert time.monotonic() - before < 10
    opened.set()
    transfer.destroy()
    assert Replica(memory_url).sync() == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": "zip"},
        {"served_dtype": "int4"},
        {"anchor_every": 0},
        {"publish_steps": 0},
        {"ack": "most"},
        {"ack_timeout_s": 0.0},
        {"channel": "ftp://x"},
        {"chanel": "memory://x"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DeltaSyncCallback(**({"channel": "memory://x"} | wrong))


def test_the_config_is_a_command_line() -> None:
    parser = HfArgumentParser(DeltaSyncConfig)
    (config,) = parser.parse_args_into_dataclasses(["--channel", "memory://x", "--anchor_every", "7", "--resume"])
    assert config == DeltaSyncConfig("memory://x", anchor_every=7, resume=True)
    assert "--ack_timeout_s" in parser.format_help()


def test_importing_the_callback_imports_neither_trl_nor_vllm() -> None:
    code = "import sys, trl_callback; print(*[name for name in ('trl', 'vllm') if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert loaded.stdout.split() == []
