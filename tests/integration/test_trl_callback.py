"""Real trainers on a CPU, with the callback. Trainers of transformers need no TRL; those marked `trl` do."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, ItemsView, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainerCallback,
)

from deltasync import Replica, open_store, ops
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ChannelInUseError, ConfigError, PublishError
from deltasync.trainer import stream
from deltasync.trainer.stream import TensorRange
from demo import model as demo_model
from tests.conftest import assert_same_bits
from tests.docs.pages import metrics
from tests.http_faults import FaultProxy, status
from tests.integration.trainers import (
    TOKEN_METRICS,
    FlushEachStep,
    Recorder,
    anchor_directory,
    beat,
    make_trainer,
    published_bits,
    run_id,
    saved_bits,
    tiny_model,
    tiny_moe,
)
from tests.servers.s3 import KEYS, MotoServer
from tests.waiting import wait_until
from trl_callback import DeltaSyncCallback, DeltaSyncConfig, DeltaWeightTransfer, compat, gather
from trl_callback.gather import shards_as_saved

# --- any trainer of transformers
# -------------------------------------------------------------------------------------


def test_routers_in_float32_beside_matrices_in_bfloat16(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    model = tiny_moe()
    sync = DeltaSyncCallback(url, served_dtype="bfloat16,*.mlp.gate.weight=float32")
    make_trainer(model, tmp_path / "out", sync, max_steps=2).train()
    model.save_pretrained(tmp_path / "saved")
    expected = {
        name: tensor if name.endswith(".mlp.gate.weight") else tensor.to(torch.bfloat16)
        for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items()
    }
    assert sum(tensor.dtype == torch.float32 for tensor in expected.values()) == 2
    assert_same_bits(published_bits(url), expected)
    (folder,) = (tmp_path / "channel" / "anchors").glob("0000000001.*")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, True), (torch.bfloat16, True), (torch.float32, False)]
)
def test_the_channel_has_the_dtype_of_the_policy_where_that_has_16_bits(
    tmp_path: Path, dtype: torch.dtype, wide: bool
) -> None:
    url = f"file://{tmp_path}/channel"
    model = tiny_model().to(dtype)
    if wide:
        model.model.register_parameter("more", torch.nn.Parameter(torch.full((32,), 1.001)))
    make_trainer(model, tmp_path / "out", DeltaSyncCallback(url), max_steps=2, optim="sgd").train()
    served = torch.float16 if dtype is torch.float16 else torch.bfloat16
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert_same_bits(published_bits(url), {name: tensor.to(served) for name, tensor in saved.items()})
    config = json.loads((anchor_directory(tmp_path) / "config.json").read_text())
    assert config["dtype"] == str(served).removeprefix("torch.")


class Averaging(torch.optim.SGD):
    """Two sets of weights, as schedule-free optimizers have: `eval` brings the average of all steps, `train`
    the others.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.others: dict[torch.Tensor, torch.Tensor] = {
            param: param.detach().clone() for group in self.param_groups for param in group["params"]
        }
        self.is_training = True

    def step(self, closure: Any = None) -> None:
        assert self.is_training
        super().step(closure)
        for param, average in self.others.items():
            average.lerp_(param.detach(), 0.25)

    def _switch(self, is_training: bool) -> None:
        if self.is_training != is_training:
            self.is_training = is_training
            for param, other in self.others.items():
                held = param.detach().clone()
                param.data.copy_(other)
                other.copy_(held)

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eval_strategy": "steps", "eval_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 3},
        {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 3,
            "load_best_model_at_end": True,
        },
    ],
    ids=["no evaluation", "evaluated at the end", "evaluated before", "best model"],
)
def test_the_final_version_of_two_sets_of_weights_is_what_is_saved(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    url, model = f"file://{tmp_path}/channel", tiny_model()
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    trainer = make_trainer(model, tmp_path / "out", recorder, sync, FlushEachStep(sync), **settings)
    trainer.optimizer = optimizer = Averaging(model.parameters())
    trainer.train()
    assert not optimizer.is_training
    final = published_bits(url)
    assert_same_bits(final, saved_bits(model, tmp_path / "saved"))
    trainer.evaluate()
    assert_same_bits(final, saved_bits(model, tmp_path / "saved"))
    assert_same_bits(published_bits(url, 3), recorder.bits[2])
    assert sum("Averaging has two sets of weights" in record.message for record in caplog.records) == 1


class Once(torch.utils.data.IterableDataset[Any]):
    """Rows that can be read once."""

    def __init__(self, rows: Any) -> None:
        self._rows = iter(rows)

    def __iter__(self) -> Iterator[Any]:
        yield from self._rows


@pytest.mark.parametrize(
    "stop", ["on_substep_end", "on_step_end", "on_epoch_end", "on_log", "on_evaluate", "on_save", "data"]
)
def test_the_final_version_is_the_average_however_training_stops(tmp_path: Path, stop: str) -> None:
    class Stop(TrainerCallback):
        pass

    def stop_now(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= 4

    setattr(Stop, stop, stop_now)
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "logging_steps": 1,
    }
    if stop != "on_evaluate":
        settings |= {"eval_strategy": "no"}
    url, model = f"file://{tmp_path}/channel", tiny_model()
    sync = DeltaSyncCallback(url)
    more = (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        if stop == "on_substep_end"
        else {}
    )
    if stop == "data":
        more = {"accelerator_config": {"dispatch_batches": False}}
    trainer = make_trainer(model, tmp_path / "out", sync, Stop(), max_steps=40, **settings, **more)
    trainer.optimizer = optimizer = Averaging(model.parameters())
    if stop == "data":
        trainer.train_dataset = Once(trainer.train_dataset)
    trainer.train()
    assert not optimizer.is_training
    assert 4 <= trainer.state.global_step < 40
    final = published_bits(url)
    assert_same_bits(final, saved_bits(model, tmp_path / "saved"))
    optimizer.train()
    assert any(
        not torch.equal(final[name], bits) for name, bits in saved_bits(model, tmp_path / "moved").items()
    )


def test_other_optimizers_have_one_set_of_weights() -> None:
    from accelerate import Accelerator

    model = torch.nn.Linear(2, 2)
    for optimizer in (torch.optim.AdamW(model.parameters()), None):
        assert compat.averages(optimizer) is None
    assert compat.averages(Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters()))) is None
    average = Averaging(model.parameters())
    assert compat.averages(Accelerator(cpu=True).prepare(average)) is average


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_callback_is_pickled_by_its_settings(tmp_path: Path, when: str) -> None:
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel", publish_steps=2)
    if when == "after":
        make_trainer(tiny_model(), tmp_path / "out", sync, max_steps=1).train()
    for other in (pickle.loads(pickle.dumps(sync)), copy.deepcopy(sync)):
        assert type(other) is DeltaSyncCallback
        assert other.config == sync.config
        assert other.history == []


def test_the_best_model_is_what_is_published_last(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")

    def worse(_: Any) -> dict[str, float]:
        return {"score": -float(trainer.state.global_step)}

    trainer = make_trainer(
        tiny_model(),
        tmp_path / "out",
        *(sync, recorder),
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    trainer.compute_metrics = worse
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best, last = recorder.bits[2], recorder.bits[4]
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert_same_bits(published_bits(url), best)
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "loaded"))


@pytest.mark.parametrize(
    "make_model", [tiny_model, lambda: tiny_model(tied=False), tiny_moe], ids=["tied", "untied", "moe"]
)
def test_every_step_is_published_bit_for_bit(
    make_model: Callable[[], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/channel"
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    trainer = make_trainer(make_model(), tmp_path / "out", sync, recorder)
    trainer.train()
    said = f"deltasync: publishing to {url}, which begins with version 1, with codec context."
    assert f"{said} To see versions and replicas: deltasync watch {url}\n" in capfd.readouterr().err

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


def test_the_final_weights_are_in_the_logs_though_the_store_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_callback.patience.PatientStore.is_behind", lambda self: True)
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url)
    trainer = make_trainer(tiny_model(), tmp_path / "out", sync)
    trainer.train()
    # the first joins the last if its upload had not begun
    assert [record.step for record in sync.history] in ([0, 4], [4])
    assert trainer.state.log_history[-2]["delta_sync/version"] == sync.history[-1].version
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


@pytest.mark.parametrize("make_model", [tiny_model, tiny_moe], ids=["tied", "moe"])
def test_an_anchor_is_a_checkpoint_with_a_tokenizer(make_model: Callable[[], Any], tmp_path: Path) -> None:
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel", anchor_every=1)
    trainer = make_trainer(make_model(), tmp_path / "out", sync, max_steps=2)
    trainer.train()
    sync.weight_transfer.destroy()  # waits for anchors, which no version waits for

    anchor = tmp_path / "exported"
    ops.export(ChannelReader(open_store(f"file://{tmp_path}/channel")), sync.history[-1].version, anchor)
    loaded, info = AutoModelForCausalLM.from_pretrained(anchor, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16  # from its config.json
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.model.state_dict().items()}
    assert_same_bits(loaded.state_dict(), expected)
    tokenizer = AutoTokenizer.from_pretrained(anchor)
    assert tokenizer.chat_template == demo_model.build_tokenizer().chat_template


def test_publishes_every_n_steps_and_the_final_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(DeltaSyncConfig(url, codec="raw"), publish_steps=3)

    trainer = make_trainer(tiny_model(), tmp_path / "out", sync, FlushEachStep(sync), max_steps=4)
    with caplog.at_level("INFO", logger="trl_callback"):
        trainer.train()
    assert [record.step for record in sync.history] == [0, 3, 4]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("trl_callback")]
    assert [line.split()[0] for line in lines] == ["version=1", "version=2", "version=3"]
    fields = ["version", "changed_fraction", "payload_bytes", "bits_per_changed", "encode_s", "ack_s"]
    assert [field.partition("=")[0] for field in lines[0].split()] == fields
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


def test_a_lost_upload_fails_the_training_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltasync.errors import StoreError
    from deltasync.stores.local import LocalStore

    create = LocalStore.create

    def full(self: LocalStore, key: str, data: bytes) -> None:
        if key.startswith(keys.VERSIONS):
            raise StoreError("the disk is full")
        create(self, key, data)

    monkeypatch.setattr(LocalStore, "create", full)
    trainer = make_trainer(
        tiny_model(), tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel"), max_steps=1
    )
    with pytest.raises(PublishError, match="the disk is full"):
        trainer.train()


def test_buffers_are_published_and_ties_that_are_declared_keep_the_right_name(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.register_buffer("kept", torch.arange(3))
    model.model.register_buffer("scratch", torch.arange(3), persistent=False)
    names = dict(gather.stream_of(model)).keys()
    assert "model.kept" in names
    assert "model.scratch" not in names
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_tensors_that_stay_are_handed_over_as_a_dicts_items() -> None:
    """So that the publisher compares them together; those that are made one at a time come from an
    iterator.
    """
    with mock.patch.object(stream, "live_state", wraps=stream.live_state) as read:
        assert isinstance(gather.stream_of(tiny_model()), ItemsView)
    assert read.call_count == 1
    held = gather.held_tensors(tiny_model())
    assert isinstance(shards_as_saved(tiny_model(), held, 0), ItemsView)
    experts = tiny_moe()
    assert isinstance(shards_as_saved(experts, gather.held_tensors(experts), 0), Iterator)


def test_shards_of_experts_are_parts_of_what_a_checkpoint_holds(tmp_path: Path) -> None:
    model, ranks = tiny_moe(), 3
    found: dict[str, list[TensorRange]] = {}
    for rank in range(ranks):
        held = {}
        for name, tensor in gather.held_tensors(model).items():
            size = -(-tensor.numel() // ranks)  # as ZeRO-3 cuts them, through the middle of an expert
            held[name] = TensorRange(
                tensor.flatten()[rank * size :][:size], min(rank * size, tensor.numel()), tensor.shape
            )
        for name, part in shards_as_saved(model, held, rank):
            found.setdefault(name, []).append(part)
    whole = {}
    for name, parts in found.items():
        held_parts = [part for part in parts if part.held.numel()]
        assert [part.start for part in held_parts] == [0, *(part.stop for part in held_parts[:-1])]
        whole[name] = (
            torch.cat([part.held.flatten() for part in held_parts]).view(parts[0].shape).to(torch.bfloat16)
        )
    assert_same_bits(whole, saved_bits(model, tmp_path))


# --- starting from a checkpoint
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_a_checkpoint_that_both_sides_have_is_not_uploaded(named: bool, tmp_path: Path) -> None:
    checkpoint, url = tmp_path / "checkpoint", f"file://{tmp_path}/channel"
    tiny_model().to(torch.bfloat16).save_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    sync, recorder = (
        DeltaSyncCallback(url, initial=str(checkpoint) if named else "auto"),
        Recorder(tmp_path / "saved"),
    )
    make_trainer(model, tmp_path / "out", sync, recorder).train()
    assert not list((tmp_path / "channel").glob("anchors/**/*"))
    assert_same_bits(published_bits(url, 1), recorder.bits[0])
    assert_same_bits(published_bits(url), recorder.bits[4])


def test_a_model_that_was_loaded_from_nowhere_has_no_initial_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(
        tiny_model(), tmp_path / "out", DeltaSyncCallback(f"file://{tmp_path}/channel", initial="auto")
    )
    with pytest.raises(ConfigError, match="loaded from"):
        trainer.train()


# --- resuming
# --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_continues_its_run_though_it_is_older_than_the_head(tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    sync = DeltaSyncCallback(url)
    make_trainer(tiny_model(), out, sync, FlushEachStep(sync), max_steps=4, **saving).train()
    run, version = run_id(url), Replica(url).sync()

    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    trainer = make_trainer(tiny_model(), out, sync, recorder, FlushEachStep(sync), max_steps=5, **saving)
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert run_id(url) == run
    # The first version goes back from step 4 to step 2.
    assert (sync.history[0].version, sync.history[0].step) == (version + 1, 2)
    assert 0 < sync.history[0].changed < sync.history[0].total
    assert sync.history[-1].step == 5
    for record in sync.history:
        assert_same_bits(published_bits(url, record.version), recorder.bits[record.step])

    # And it can be resumed once more, from what the resumed trainer saved.
    again = DeltaSyncCallback(url)
    make_trainer(tiny_model(), out, again, max_steps=6).train(
        resume_from_checkpoint=str(out / "checkpoint-4")
    )
    assert run_id(url) == run
    assert again.history[-1].step == 6


def test_a_new_run_in_a_used_channel_is_refused_unless_asked_for(tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    make_trainer(tiny_model(), tmp_path / "other", DeltaSyncCallback(url), max_steps=1).train()
    with pytest.raises(ChannelInUseError, match="resume=True"):
        make_trainer(tiny_model(), out, DeltaSyncCallback(url), max_steps=1).train()
    elsewhere = DeltaSyncCallback(f"file://{tmp_path}/elsewhere")
    make_trainer(tiny_model(), out, elsewhere, max_steps=1, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ChannelInUseError):  # the checkpoint is of another run than the channel's
        stranger = make_trainer(tiny_model(), out, DeltaSyncCallback(url), max_steps=2)
        stranger.train(resume_from_checkpoint=str(out / "checkpoint-1"))

    run, version = run_id(url), Replica(url).sync()
    trainer = make_trainer(tiny_model(), out, DeltaSyncCallback(url, resume=True), max_steps=2)
    trainer.train()
    assert run_id(url) == run
    assert Replica(url).sync() > version
    assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


@pytest.mark.parametrize("restore", [False, True])
def test_a_checkpoint_from_before_the_callback_was_added(tmp_path: Path, restore: bool) -> None:
    url, out = f"file://{tmp_path}/channel", tmp_path / "out"
    make_trainer(tiny_model(), out, max_steps=1, save_strategy="steps", save_steps=1).train()
    settings = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": restore}
    for steps in (2, 3):  # the second one restores the state that the first one saved
        sync = DeltaSyncCallback(url)
        trainer = make_trainer(tiny_model(), out, sync, max_steps=steps, **settings)
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{steps - 1}"))
        assert sync.history[-1].step == steps
        assert_same_bits(published_bits(url), saved_bits(trainer.model, tmp_path / "saved"))


# --- metrics
# ---------------------------------------------------------------------------------------------------------


class Integration(TrainerCallback):
    """As wandb's or tensorboard's: registered by `report_to`, before any callback of the user."""

    logs: ClassVar[list[dict[str, Any]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.parametrize("added", ["to the constructor", "later"])
def test_integrations_see_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: str) -> None:
    from transformers.integrations import integration_utils

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Integration)
    monkeypatch.setattr(Integration, "logs", [])
    monkeypatch.setattr("trl_callback.fleet._REFRESH_EVERY_S", 0.0)
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url)

    class Replicas(TrainerCallback):
        """One that keeps up and one that stays at version 1; waits for the last look at them."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for thread in threading.enumerate():
                if thread.name == "deltasync-watch":
                    thread.join(60)
            publisher = sync.weight_transfer.publisher
            assert publisher is not None
            for replica_id, version in (("quick", publisher.version), ("slow", 1)):
                served = ChannelReader(publisher.store).numbered(version).version
                beat(publisher.store, replica_id, served)
            if state.global_step == 3:  # another version of a number that is ours is none of ours
                beat(publisher.store, "stranger", VersionId(2, served.epoch, "0" * 64))

    first = [sync] if added == "to the constructor" else []
    trainer = make_trainer(tiny_model(), tmp_path / "out", *first, max_steps=4, report_to=["tensorboard"])
    if not first:
        trainer.add_callback(sync)
    trainer.add_callback(FlushEachStep(sync))  # the first version is not part of the second
    trainer.add_callback(Replicas())  # after what it waits for
    trainer.train()

    logs = [line for line in Integration.logs if "loss" in line]
    assert [line["delta_sync/version"] for line in logs] == [record.version for record in sync.history[1:]]
    for name in (
        "payload_bytes",
        "bits_per_changed",
        "changed_fraction",
        "held_s",
        "encode_s",
        "upload_s",
        "coalesced",
    ):
        assert all(f"delta_sync/{name}" in line for line in logs), name
    # A look is taken in the background, so it is in the logs of the next step.
    assert [line["delta_sync/replicas"] for line in logs[1:]] == [2, 2, 3]
    assert [line["delta_sync/served_lag"] for line in logs[1:]] == [2, 3, 5]
    names = {name.removeprefix("delta_sync/") for name in logs[-1] if name.startswith("delta_sync/")}
    documented = {name.removeprefix("delta_sync/") for name in metrics() if name.startswith("delta_sync/")}
    assert len(names) == 10 and names | {"ack_s", "served_version"} | TOKEN_METRICS == documented
    assert trainer.state.log_history[0].keys() >= logs[0].keys()


# --- a store that is not there
# ---------------------------------------------------------------------------------------


WARN_AFTER_S = 1.0


class Outage(TrainerCallback):
    """The store is down from one step to another one; the step after the first waits until that was
    noticed.
    """

    def __init__(self, proxy: FaultProxy, sync: DeltaSyncCallback, first: int, last: int) -> None:
        self._proxy, self._transfer, self._first, self._last = proxy, sync.weight_transfer, first, last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._transfer.publisher is not None
        if state.global_step == self._first:
            self._transfer.publisher.flush()
            self._proxy.strike(status(503), times=1 << 30)
        if state.global_step == self._first + 1:
            wait_until(lambda: self._transfer._store.trouble)
            time.sleep(2 * WARN_AFTER_S)
        if state.global_step == self._last:
            self._proxy.heal()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultProxy]]:
    """The URL of a channel on a real S3 server, and the proxy that its requests pass."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(MotoServer()) as server, FaultProxy(server.endpoint) as proxy:
        yield server.url(server.new_bucket(), endpoint=proxy.url), proxy


def test_training_goes_on_without_its_store_and_all_bits_are_right_afterwards(
    s3: tuple[str, FaultProxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, proxy = s3
    monkeypatch.setattr("trl_callback.patience._WARN_AFTER_S", WARN_AFTER_S)
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved")
    trainer = make_trainer(
        tiny_model(), tmp_path / "out", recorder, Outage(proxy, sync, 3, 12), sync, max_steps=15
    )
    with caplog.at_level("WARNING", logger="trl_callback"):
        trainer.train()
    during = [record for record in sync.history if 3 < record.step <= 12]
    assert len(during) <= 2  # one that was on its way, and one that waited
    assert sync.history[-1].step == 15
    for record in sync.history:
        assert_same_bits(published_bits(url, record.version), recorder.bits[record.step])
    lines = [record.getMessage() for record in caplog.records if record.name == "trl_callback.patience"]
    assert len([line for line in lines if "Training goes on" in line]) == 1
    assert all("503" in line for line in lines if "Training goes on" in line)


def test_a_store_that_is_away_at_the_end_is_given_up_and_reported(
    s3: tuple[str, FaultProxy], tmp_path: Path
) -> None:
    url, proxy = s3
    sync = DeltaSyncCallback(url, ack_timeout_s=1.0)
    trainer = make_trainer(tiny_model(), tmp_path / "out", Outage(proxy, sync, 1, 99), sync, max_steps=3)
    with pytest.raises(
        PublishError, match=r"1 s after the end of training, and was given up\. Last error: .*503"
    ):
        trainer.train()
    assert sync.weight_transfer.publisher is None  # training again would open the channel again
    proxy.heal()
    assert Replica(url).sync() == 1


# --- settings and the bare transfer
# ----------------------------------------------------------------------------------


def test_a_transfer_without_a_model_says_what_is_missing(memory_url: str) -> None:
    with pytest.raises(ConfigError, match="callbacks="):
        DeltaWeightTransfer(DeltaSyncConfig(memory_url)).init_weight_transfer()


def test_only_the_first_sync_of_a_training_is_compared_with_the_channel(memory_url: str) -> None:
    """TRL's client opens the transfer before each sync. A training from step 0 makes steps that the channel
    has anew.
    """
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = tiny_model()
        transfer = DeltaWeightTransfer(DeltaSyncConfig(memory_url, resume=seed > 0))
        transfer.bind(model)
        transfer.begin(together=False)
        for transfer.step in range(3):
            transfer.init_weight_transfer()
            transfer.send_weights(iter(model.named_parameters()))
            assert transfer.publisher is not None
            transfer.publisher.flush()
            with torch.no_grad():
                model.lm_head.weight += 0.5
        transfer.destroy()
    assert Replica(memory_url).sync() == 6


def test_an_upload_that_hangs_is_not_waited_for_longer_than_asked(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    store = type(open_store(memory_url))
    create = store.create

    def hang(self: Any, key: str, data: bytes) -> None:
        if key.startswith(keys.VERSIONS):
            opened.wait(60)
        create(self, key, data)

    monkeypatch.setattr(store, "create", hang)
    model = tiny_model()
    transfer = DeltaWeightTransfer(DeltaSyncConfig(memory_url, ack_timeout_s=0.2))
    transfer.bind(model)
    transfer.init_weight_transfer()
    transfer.send_weights(iter(model.named_parameters()))
    with pytest.raises(TimeoutError):
        transfer.resume()
    # after the uploads were given up; the request that is under way still counts
    threading.Timer(1.0, opened.set).start()
    transfer.destroy()
    assert Replica(memory_url).sync() == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"codec": "zip"},
        {"served_dtype": "int4"},
        {"anchor_every": 0},
        {"publish_steps": 0},
        {"replicas": ["10.0.0.5"]},
        {"ack_timeout_s": 0.0},
        {"max_behind": -1},
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
    (config,) = parser.parse_args_into_dataclasses(
        ["--channel", "memory://x", "--anchor_every", "7", "--resume"]
    )
    assert config == DeltaSyncConfig("memory://x", anchor_every=7, resume=True)
    (config,) = parser.parse_args_into_dataclasses(
        ["--channel", "memory://x", "--max_behind", "2", "--replicas", "http://a", "http://b:80"]
    )
    assert config == DeltaSyncConfig("memory://x", max_behind=2, replicas=["http://a", "http://b:80"])
    assert "--ack_timeout_s" in parser.format_help()


def test_importing_the_callback_imports_neither_trl_nor_vllm() -> None:
    code = "import sys, trl_callback; print(*[name for name in ('trl', 'vllm') if name in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert loaded.stdout.split() == []


def test_a_trainer_without_a_stream_of_weights_cannot_leave_out_gathering(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
            compat.replace_stream(lambda: None)

    with pytest.raises(ConfigError, match=r"Trainer has no stream of weights .* 1\.11 to 1\.16"):
        make_trainer(tiny_model(), tmp_path / "out", Asks()).train()


@pytest.mark.trl
def test_trl_parses_both_configs(tmp_path: Path) -> None:
    from trl import TrlParser
    from trl.experimental.async_grpo import AsyncGRPOConfig

    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--dtype", "bfloat16"]
    arguments += ["--channel", "memory://parsed", "--served_dtype", "float16", "--max_behind", "2"]
    trainer, sync = TrlParser((AsyncGRPOConfig, DeltaSyncConfig)).parse_args_and_config(arguments)
    assert trainer.dtype == "bfloat16"
    assert sync == DeltaSyncConfig("memory://parsed", served_dtype="float16", max_behind=2)
