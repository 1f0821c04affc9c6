"""What each rank of a trainer of TRL does in `test_trl_sharded`: torchrun --nproc-per-node N trl_ranks.py
FOLDER SCENARIO...

Every scenario has a channel FOLDER/<scenario>/channel and leaves what it must hold: expected/<version>.pt;
and told.<rank>.json.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from deltasync.errors import DeltaSyncError, StoreError
from demo import model as demo_model
from demo import task
from demo.processes import get_json
from tests.faults import FaultyStore
from tests.integration import trainer_ranks, vllm_server
from tests.integration.async_trainers import make_async_trainer, make_distillation_trainer
from tests.integration.trainers import Fleet, tiny_model, tiny_moe
from trl_callback import DeltaSyncCallback, gather
from trl_callback.gather import as_saved

FOLDER = Path(sys.argv[1])


class Traffic(TorchDispatchMode):
    """Adds up the tensors that torch's collectives are given while it is entered."""

    moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.moved_bytes += sum(
                leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


def whole(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, gathered; on all ranks."""
    held = gather.held_tensors(model)
    tensors = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in held.items()
    }
    return {name: value.to(torch.bfloat16, copy=True) for name, value in as_saved(model, tensors).items()}


class Expected(TrainerCallback):
    """Saves the whole weights after what TRL's callbacks have published; call `save_last` after training."""

    def __init__(self, sync: DeltaSyncCallback, folder: Path) -> None:
        self.sync, self.folder = sync, folder

    def save(self, state: Any, model: Any, version: int) -> None:
        weights = whole(model)
        if dist.get_rank() == 0 and self.sync.weight_transfer.published_step == state.global_step:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, self.folder / f"{version}.pt")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.save(state, model, self.sync.weight_transfer.publisher.version)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.save(state, model, self.sync.weight_transfer.publisher.version)

    def save_last(self, trainer: Any) -> None:
        """The callback publishes the final weights after all other callbacks, and the transfer is closed by
        now.
        """
        self.save(trainer.state, trainer.model, self.sync.history[-1].version)


@contextlib.contextmanager
def measured_syncs(trainer: Any) -> Iterator[dict[str, list[int]]]:
    """Bytes that each sync of the weights gives to collectives, and what TRL's own stream would at the first
    of them.
    """
    moved: dict[str, list[int]] = {"ours": [], "trl": []}
    kind = type(trainer)
    sync_weights = kind._sync_weight_merged

    def measured(self: Any, t0: float) -> Any:
        if not moved["trl"]:
            with Traffic() as traffic:
                deque(kind._streaming_iter(self), maxlen=0)
            moved["trl"].append(traffic.moved_bytes)
        with Traffic() as traffic:
            times = sync_weights(self, t0)
        moved["ours"].append(traffic.moved_bytes)
        return times

    with mock.patch.object(kind, "_sync_weight_merged", measured):  # the callback has its own at the trainer
        yield moved


def url_of(name: str) -> str:
    return f"file://{FOLDER}/{name}/channel"


def checkpoint(kind: str) -> Path:
    """In bfloat16, so that a first version can refer to it."""
    path = FOLDER / kind
    if dist.get_rank() == 0 and not path.exists():
        {"tiny": tiny_model, "moe": tiny_moe}[kind]().to(torch.bfloat16).save_pretrained(path)
        demo_model.build_tokenizer().save_pretrained(path)
    dist.barrier()
    return path


def fsdp2(layer: str = "Qwen3DecoderLayer") -> dict[str, Any]:
    config = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [layer],
    }
    return {"fsdp": True, "fsdp_config": config}


@contextlib.contextmanager
def replicas(name: str, count: int) -> Iterator[None]:
    """In the process of the first rank."""
    names = [f"replica-{number}" for number in range(count)]
    with Fleet(url_of(name), *names) if dist.get_rank() == 0 else contextlib.nullcontext():
        yield


def run(name: str, trainer: Any, sync: DeltaSyncCallback, events: list[str]) -> None:
    """Train, and leave what this rank was told; whatever it was, all ranks come to the end."""
    expected = Expected(sync, FOLDER / name / "expected")
    trainer.add_callback(expected)
    error = None
    with measured_syncs(trainer) as moved:
        try:
            trainer.train()
            expected.save_last(trainer)
        except (DeltaSyncError, OverflowError) as raised:
            error = [type(raised).__name__, str(raised)]
    told = {
        "history": [[record.version, record.step, record.kind, record.changed] for record in sync.history],
        "events": events,
        "error": error,
        "moved_bytes": moved,
        "weight_bytes": sum(param.numel() * param.element_size() for param in trainer.model.parameters()),
    }
    (FOLDER / name).mkdir(exist_ok=True)
    (FOLDER / name / f"told.{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()


def async_grpo(name: str, sync: DeltaSyncCallback, kind: str = "tiny", **settings: Any) -> None:
    AcceleratorState._reset_state()
    events: list[str] = []
    trainer = make_async_trainer(checkpoint(kind), sync, events, **(fsdp2() | settings))
    run(name, trainer, sync, events)


def shards() -> None:
    """The first version is the checkpoint, the last one, between two syncs of TRL, is the callback's."""
    sync = DeltaSyncCallback(
        url_of("shards"), initial=str(checkpoint("tiny")), ack_timeout_s=120, max_behind=0
    )
    with replicas("shards", 2):
        async_grpo("shards", sync, weight_sync_steps=2)


def moe() -> None:
    """Experts are one tensor in memory, sharded by the expert, and many in a checkpoint."""
    sync = DeltaSyncCallback(url_of("moe"), initial=str(checkpoint("moe")), ack_timeout_s=120)
    with replicas("moe", 1):
        async_grpo("moe", sync, "moe", **fsdp2("Qwen3MoeDecoderLayer"))


def distillation() -> None:
    AcceleratorState._reset_state()
    sync, events = DeltaSyncCallback(url_of("distillation"), ack_timeout_s=120), list[str]()
    with replicas("distillation", 1):
        trainer = make_distillation_trainer(checkpoint("tiny"), sync, events, **fsdp2())
        run("distillation", trainer, sync, events)


def lost_upload() -> None:
    """The second rank cannot store its part of the second version."""
    sync = DeltaSyncCallback(url_of("lost_upload"), ack_timeout_s=120, max_behind=0)
    store = FaultyStore(sync.weight_transfer._store.inner)
    sync.weight_transfer._store.inner = store
    if dist.get_rank() == 1:
        store.fail_at("put", "parts/", error=StoreError)
    with replicas("lost_upload", 1):
        async_grpo("lost_upload", sync)


def lost_stream() -> None:
    """The second rank cannot read its weights the second time."""
    sync = DeltaSyncCallback(url_of("lost_stream"), ack_timeout_s=120)
    stream_of = gather.stream_of

    def broken(model: Any, adapter_only: bool = False) -> Iterator[tuple[str, Any]]:
        yield from list(stream_of(model, adapter_only))[:3]
        if dist.get_rank() == 1 and sync.weight_transfer.published_step is not None:
            raise OverflowError("the stream broke")
        yield from list(stream_of(model, adapter_only))[3:]

    gather.stream_of = broken
    try:
        with replicas("lost_stream", 1):
            async_grpo("lost_stream", sync)
    finally:
        gather.stream_of = stream_of


def unheard() -> None:
    async_grpo("unheard", DeltaSyncCallback(url_of("unheard"), ack_timeout_s=1.0))


def grpo() -> None:
    on_server("GRPO")


def rloo() -> None:
    on_server("RLOO")


def on_server(method: str) -> None:
    """On a real server, which FOLDER/server.json tells of; each batch is held to what it serves."""
    import trl

    server = json.loads((FOLDER / "server.json").read_text())
    AcceleratorState._reset_state()
    compared: list[bool] = []

    def digest_is_ours() -> bool:
        ours = vllm_server.digests(whole(trainer.model))
        return bool(get_json(f"{server['url']}/deltasync/digest")["sha256"] == ours)

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        compared.append(digest_is_ours())
        return [float(len(set(ids))) for ids in completion_ids]

    sync = DeltaSyncCallback(server["channel"], initial=server["model"])
    config = getattr(trl, f"{method}Config")(
        output_dir=str(FOLDER / "out"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server["url"],
        num_generations=4,
        per_device_train_batch_size=2,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **fsdp2(),
    )
    dataset = task.prompt_dataset(0, 8)
    trainer = getattr(trl, f"{method}Trainer")(
        model=server["model"], reward_funcs=reward, args=config, train_dataset=dataset, callbacks=[sync]
    )
    generation = trainer.vllm_generation
    moved = []
    sync_weights = generation.sync_weights

    def measured() -> None:
        with Traffic() as traffic:
            sync_weights()
        moved.append(traffic.moved_bytes)

    generation.sync_weights = measured
    trainer.train()
    told = {
        "history": [[record.version, record.step, record.kind, record.changed] for record in sync.history],
        "compared": compared,
        "moved_bytes": moved,
        "final": vllm_server.digests(whole(trainer.model)),
    }
    (FOLDER / f"{method.lower()}.{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer_ranks.let_accelerate_shard_on_cpu()
    for scenario in sys.argv[2:]:
        globals()[scenario]()
    dist.destroy_process_group()
