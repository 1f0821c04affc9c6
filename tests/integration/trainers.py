"""What the tests of the trainers share: tiny models, what was published, replicas in threads."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from deltasync import Replica, open_store
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.errors import DeltaSyncError
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.stores import Store
from demo import model as demo_model
from trl_callback import DeltaSyncCallback

# TRL warns that AsyncGRPOTrainer is experimental when it is imported
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["CI"] = "1"  # no telemetry

Bits = dict[str, torch.Tensor]

TOKEN_METRICS = {
    "token_lag_mean",
    "token_lag_p95",
    "token_lag_max",
    "stale_token_fraction",
    "unversioned_token_fraction",
    "masked_tokens",
}
"""What the logs say under `delta_sync/` of the tokens that AsyncGRPO trains."""

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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model with the demo's tokenizer."""
    path = tmp_path / "checkpoint"
    tiny_model().save_pretrained(path)
    demo_model.build_tokenizer().save_pretrained(path)
    return path


def tiny_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
        )
    )


def saved_bits(model: torch.nn.Module, folder: Path) -> Bits:
    """What `save_pretrained` writes, in bfloat16: the reference for what is to be published."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {
        name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()
    }


def published_bits(url: str, version: int | None = None) -> Bits:
    replica = Replica(url)
    replica.sync(version)
    return replica.state_dict()


def merged_bits(model: Any, folder: Path) -> Bits:
    """What a checkpoint of a PEFT model holds once PEFT has merged the adapters into a copy, in bfloat16."""
    return saved_bits(copy.deepcopy(model).merge_and_unload(), folder)


def adapter_bits(model: Any, folder: Path) -> Bits:
    """The adapter's tensors as PEFT saves them, in bfloat16 as they are served."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    return {name: tensor.to(torch.bfloat16) for name, tensor in saved.items()}


def run_id(url: str) -> str:
    return ChannelReader(open_store(url)).channel().run_id


def beat(
    store: Store, replica_id: str, served: VersionId | None, state: str = "serving", error: str | None = None
) -> None:
    """Write the heartbeat of a replica."""
    run = ChannelReader(store).channel().run_id
    identity = (None, None, None) if served is None else (served.version, served.epoch, served.sha256)
    version, epoch, sha256 = identity
    told = Heartbeat(
        replica_id=replica_id,
        run_id=run,
        version=version,
        epoch=epoch,
        sha256=sha256,
        state=state,
        error=error,
    )
    heartbeat.write(store, told)


def anchor_directory(folder: Path, version: int = 1) -> Path:
    """The checkpoint of a version in the channel below a folder."""
    (found,) = (folder / "channel" / "anchors").glob(f"{version:010d}.*")
    return found


class Recorder(TrainerCallback):
    """Keeps what a checkpoint of each step would hold."""

    def __init__(self, folder: Path, bits_of: Callable[[Any, Path], Bits] = saved_bits) -> None:
        self.folder, self.bits_of = folder, bits_of
        self.bits: dict[int, Bits] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.bits[state.global_step] = self.bits_of(model, self.folder)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.bits[state.global_step] = self.bits_of(model, self.folder)


class FlushEachStep(TrainerCallback):
    """Waits for each upload: no version is left out or joins another because this machine is busy."""

    def __init__(self, sync: DeltaSyncCallback) -> None:
        self.sync = sync

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (publisher := self.sync.weight_transfer.publisher) is not None:
            publisher.flush()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        publisher = self.sync.weight_transfer.publisher
        assert publisher is not None
        publisher.flush()


def make_trainer(
    model: torch.nn.Module, out: Path, *callbacks: TrainerCallback, max_steps: int = 4, **settings: Any
) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (32, 12), generator=generator)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-4,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), max_steps=max_steps, **(defaults | settings)),
        train_dataset=examples,
        eval_dataset=examples,
        processing_class=demo_model.build_tokenizer(),
        callbacks=list(callbacks),
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
            before = replica.identity
            try:
                replica.sync()
            except DeltaSyncError:  # nothing is published yet
                continue
            if replica.identity != before:
                assert replica.identity is not None
                beat(self._store, replica_id, replica.identity)

    def __enter__(self) -> Fleet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
