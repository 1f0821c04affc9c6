"""What each rank of a sharded trainer does in `test_sharded`: torchrun --nproc-per-node N sharded_ranks.py
FOLDER [CHANNEL]

Every scenario has a channel FOLDER/<scenario> and leaves what it must hold: expected/<version>.pt; and
told.<rank>.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from deltasync import Publisher, Receipt, Retention, limits, open_store
from deltasync.channel import keys, signing
from deltasync.channel.reading import ChannelReader
from deltasync.codec import tiles
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    DeltaSyncError,
    FencedError,
    PublishError,
    PublishPendingError,
    StoreError,
)
from deltasync.publish import encode
from deltasync.trainer.stream import TensorRange
from tests.faults import FaultyStore
from tests.traffic import Traffic

Weights = dict[str, torch.Tensor]
FOLDER = Path(sys.argv[1])
TRAFFIC = Traffic()


class Tiny(nn.Module):
    """Rows that do not divide, fewer rows than ranks, tied, frozen, and a buffer that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(513, 64)
        self.up = nn.Linear(64, 85)
        self.few = nn.Linear(85, 3)
        self.down = nn.Linear(3, 64, bias=False)
        self.down.weight.requires_grad_(False)
        self.head = nn.Linear(64, 513, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, -0.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.few(torch.relu(self.up(self.embed(ids)))))) * self.scale[0]


class Scenario:
    """A channel of its own, what it must hold, and what this rank was told."""

    def __init__(self, name: str) -> None:
        self.folder = FOLDER / name
        self.store = FaultyStore(open_store(f"file://{self.folder}/channel"))
        self.told: list[dict[str, Any]] = []
        self._steps = itertools.count(100)
        if dist.get_rank() == 0:
            (self.folder / "expected").mkdir(parents=True)
        dist.barrier()

    def publisher(self, **settings: Any) -> Publisher:
        return Publisher(
            self.store, group=dist.group.WORLD, retry_delay_s=0.01, peer_timeout_s=150, **settings
        )

    def note(self, receipt: Receipt, moved_bytes: int = 0) -> None:
        numbers = ("version", "kind", "step", "changed", "total", "payload_bytes", "anchor_bytes", "digest")
        known = numbers if receipt.done and receipt._uploaded.exception() is None else numbers[:5]
        self.told.append({name: getattr(receipt, name) for name in known} | {"moved_bytes": moved_bytes})

    def expect(self, version: int, weights: Weights) -> None:
        """Gathered on all ranks: what `version` must hold."""
        served = served_of(weights)
        if dist.get_rank() == 0:
            torch.save(
                {name: value.clone() for name, value in served.items()},
                self.folder / f"expected/{version}.pt",
            )

    def next_step(self) -> int:
        """Another number each time, the same on all ranks."""
        return next(self._steps)

    def publish(self, publisher: Publisher, weights: Weights, step: int | None = None) -> Receipt:
        before = TRAFFIC.moved_bytes
        receipt = publisher.publish(weights.items(), step=self.next_step() if step is None else step).wait(60)
        self.note(receipt, TRAFFIC.moved_bytes - before)
        self.expect(receipt.version, weights)
        return receipt

    def publish_pending(self, publisher: Publisher, weights: Weights, version: int) -> None:
        """Publish a version whose record is stored, while the store does not say so."""
        if dist.get_rank() == 0:
            key = keys.slot(version, "").removesuffix(".safetensors")
            self.store.fail_at("create", key, after=True)
            self.store.fail_at("read", key)
        receipt = publisher.publish(weights.items(), step=self.next_step())
        try:
            receipt.wait(60)
        except PublishPendingError:
            self.note(receipt)
        else:
            raise AssertionError("published")
        self.store.heal()
        self.expect(version, weights)

    def end(self) -> None:
        (self.folder / f"told.{dist.get_rank()}.json").write_text(json.dumps(self.told))
        dist.barrier()


def weights_of(model: nn.Module) -> Weights:
    named = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return named | dict(model.named_buffers())


def served_of(weights: Weights) -> Weights:
    """Gathered on all ranks: weights as a channel has them, in bfloat16 but for the scale."""
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in weights.items()
    }
    rounded = {name for name, value in whole.items() if value.is_floating_point() and name != "scale"}
    return {
        name: value.detach().to(torch.bfloat16) if name in rounded else value for name, value in whole.items()
    }


def trainer(mesh: DeviceMesh, seed: int = 0) -> tuple[Tiny, Callable[[], Weights]]:
    torch.manual_seed(seed)
    model = Tiny()
    for layer in (model.up, model.few):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def step() -> Weights:
        ids = torch.randint(513, (4, 5))
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return weights_of(model)

    return model, step


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def train() -> None:
    """Every kind of version: first, delta, without changes, delta with an anchor of several files,
    resumed.
    """
    limits.WEIGHT_FILE_BYTES = 20_000
    for codec in ("packed", "context", "raw"):
        scenario = Scenario(f"train-{codec}")
        model, step = trainer(world())
        assert any(p.to_local().numel() == 0 for p in model.parameters()) or dist.get_rank() < 3
        settings = {"codec": codec, "anchor_every": 3, "model_files": {"config.json": b"{}"}}
        if codec == "raw" and dist.get_rank() == 0:  # the other ranks have no key
            signing.new_key(scenario.folder / "key", "first rank")
            settings["signing_key"] = scenario.folder / "key"
        with scenario.publisher(**settings) as publisher:
            assert publisher.run_id is None
            scenario.publish(publisher, weights_of(model), step=0)
            scenario.publish(publisher, step(), step=1)
            scenario.publish(publisher, weights_of(model), step=1)
            scenario.publish(publisher, step(), step=2)
        with scenario.publisher(**settings, resume=True) as publisher:
            assert publisher.version == 4
            scenario.publish(publisher, step(), step=3)
        scenario.end()


def resume_from(folder: Path) -> None:
    """Go on with the channel of another number of ranks."""
    model, step = trainer(world(), seed=1)
    scenario = Scenario("resumed")
    scenario.store = FaultyStore(open_store(f"file://{folder}"))
    with scenario.publisher(resume=True, anchor_every=3) as publisher:
        scenario.publish(publisher, weights_of(model), step=10)
        scenario.publish(publisher, step(), step=11)
    scenario.end()


def resumed_step() -> None:
    """The first weights of a resumed run are those of their step, an older one and the newest, or no rank
    publishes.
    """
    scenario = Scenario("resumed-step")
    model, step = trainer(world())
    states: list[Weights] = []
    with scenario.publisher() as publisher:
        for number in range(3):
            states.append(
                {
                    name: value.detach().clone()
                    for name, value in (step() if number else weights_of(model)).items()
                }
            )
            scenario.publish(publisher, states[-1], step=number)
    for number in (1, 2):
        with scenario.publisher(resume=True) as publisher:
            try:
                publisher.publish(step().items(), step=number)
            except ChannelInUseError as error:
                scenario.told.append(
                    {"tensors": dict(error.tensors), "fraction": error.changed_fraction, "said": str(error)}
                )
            else:
                raise AssertionError("published")
            scenario.publish(publisher, states[number], step=number)
    with scenario.publisher(resume="overwrite") as publisher:
        scenario.publish(publisher, step(), step=2)
    scenario.end()


def failures() -> None:
    """A rank whose stream, or store, fails takes the others along; the next publish is right on all of
    them.
    """
    scenario = Scenario("failures")
    model, step = trainer(world())
    last = dist.get_world_size() - 1
    publisher = scenario.publisher()
    scenario.publish(publisher, weights_of(model))

    def broken(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:3]
        if dist.get_rank() == last:
            raise OverflowError("the stream broke")
        yield from list(weights.items())[3:]

    weights = step()
    try:
        publisher.publish(broken(weights), step=scenario.next_step())
    except OverflowError:
        assert dist.get_rank() == last
    except PublishError as error:
        assert (
            dist.get_rank() != last
            and f"Rank {last} failed" in str(error)
            and "the stream broke" in str(error)
        )
    else:
        raise AssertionError("published")
    assert publisher.version == 1
    assert scenario.publish(publisher, weights).kind == "delta"

    for failing in (0, last):
        if dist.get_rank() == failing:
            scenario.store.fail_at("put", keys.PARTS, error=StoreError, times=1)
        lost = publisher.publish(step().items(), step=scenario.next_step())
        try:
            lost.wait(60)
        except PublishError as error:
            assert "failed by the test" in str(error)
            scenario.note(lost)
        else:
            raise AssertionError("published")
        receipt = scenario.publish(publisher, step())
        assert (receipt.version, receipt.kind) == (lost.version, "anchor")
    publisher.close()

    scenario.store.heal()
    stale = scenario.publisher(resume=True)
    scenario.publish(stale, step())
    other = scenario.publisher(resume=True)
    scenario.publish(other, step())
    for _ in range(2):
        try:
            stale.publish(step().items(), step=scenario.next_step()).wait(60)
        except FencedError:
            continue
        raise AssertionError("two publishers")
    other.close()
    scenario.end()


def other_shards() -> None:
    """Flat partitions as ZeRO has them, whole tensors on all ranks, copies of shards, and what is refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scenario = Scenario("other")
    torch.manual_seed(0)
    flat, whole = torch.randn(7, 5), torch.randn(4, 4)
    width = -(-flat.numel() // size)
    if size == 4:
        copies = distribute_tensor(
            torch.randn(6, 2), init_device_mesh("cpu", (2, 2)), [dist.tensor.Replicate(), Shard(0)]
        )
    else:
        copies = distribute_tensor(torch.randn(6, 2), world(), [dist.tensor.Replicate()])

    def stream() -> Iterator[tuple[str, torch.Tensor | TensorRange]]:
        held = flat.flatten()[rank * width : (rank + 1) * width]
        yield "flat", TensorRange(held, min(rank * width, 35), (7, 5))
        yield "whole", whole
        yield "copies", copies
        yield "ids", torch.arange(5)

    publisher = scenario.publisher()
    for version in (1, 2):
        scenario.note(publisher.publish(stream(), step=scenario.next_step()).wait(60))
        scenario.expect(version, {"flat": flat, "whole": whole, "copies": copies, "ids": torch.arange(5)})
        flat[2] += 1
        whole[1] += 1
        copies += 1
    publisher.close()

    def refuses(kind: type[DeltaSyncError], named: Callable[[], Any]) -> None:
        try:
            named()
        except kind:
            return
        raise AssertionError("not refused")

    sharded = distribute_tensor(torch.randn(8, 8), world(), [Shard(0)])
    columns = distribute_tensor(torch.randn(8, 8), world(), [Shard(1)])
    url = f"file://{scenario.folder}/none"
    refuses(ConfigError, lambda: Publisher(url).publish([("w", sharded)]))
    refuses(ConfigError, lambda: Publisher(url, group=dist.group.WORLD).publish([("w", columns)], step=0))
    half = TensorRange(torch.zeros(4), 0, (8,))
    refuses(DeltaSyncError, lambda: Publisher(url, group=dist.group.WORLD).publish([("w", half)], step=0))
    refuses(
        DeltaSyncError,
        lambda: Publisher(url, group=dist.group.WORLD).publish(iter([(f"w{rank}", whole)]), step=0),
    )
    scenario.end()


def free_start() -> None:
    """The first version is a checkpoint that all ranks can read; nothing is collected, whatever the weights
    are.
    """
    model, step = trainer(world())
    scenario = Scenario("free")
    start = served_of(weights_of(model))
    if dist.get_rank() == 0:
        (scenario.folder / "start").mkdir()
        start.pop("head.weight")  # tied
        save_file(start, scenario.folder / "start/model.safetensors")
    dist.barrier()
    scenario.expect(1, weights_of(model))
    with scenario.publisher(initial=scenario.folder / "start", retries=0) as publisher:
        step()
        if dist.get_rank() == dist.get_world_size() - 1:
            scenario.store.fail_at("put", keys.PARTS, error=StoreError)
        lost = publisher.publish(weights_of(model).items(), step=scenario.next_step())
        try:
            lost.wait(60)
        except PublishError:
            scenario.note(lost)
        scenario.publish(publisher, step())
        scenario.publish(publisher, step())
    scenario.end()

    same = Scenario("free-same")
    model, step = trainer(world())
    with same.publisher(initial=scenario.folder / "start") as publisher:
        same.publish(publisher, weights_of(model))
        same.publish(publisher, step())
    same.end()


def other_adapter() -> None:
    """An adapter whose config has changed when its trainer resumes: replicas learn that from full weights
    only.
    """
    _, step = trainer(world())
    scenario = Scenario("adapter")
    for config in (b'{"lora_alpha": 1}', b'{"lora_alpha": 2}'):
        resumes = (scenario.folder / "channel/channel.json").exists()
        dist.barrier()
        with scenario.publisher(resume=resumes, model_files={"adapter_config.json": config}) as publisher:
            scenario.publish(publisher, step())
            scenario.publish(publisher, step())
    scenario.end()


def messages() -> None:
    """As many tensors, of the same names, as Qwen3-0.6B has; what ranks send each other depends on nothing
    else.
    """
    scenario = Scenario("messages")
    layer = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "q_norm",
        "k_norm",
        "gate_proj",
        "up_proj",
        "down_proj",
        "input",
        "post",
    )
    names = [f"model.layers.{number}.self_attn.{name}.weight" for number in range(28) for name in layer]
    weights = {
        name: distribute_tensor(torch.zeros(6, 2), world(), [Shard(0)]) for name in ("embed", "norm", *names)
    }
    assert len(weights) == 310
    with scenario.publisher() as publisher:
        scenario.publish(publisher, weights)
        for few in (names, names[:4], names[:4]):
            for name in few:
                weights[name] += 1
            scenario.publish(publisher, weights)
    scenario.end()


def compacting() -> None:
    """Each rank makes its parts of compactions. If a rank's store fails, only the compaction is lost.

    Version 3 is visible, but its publisher does not learn that before the next one.
    """
    scenario = Scenario("compacted")
    model, step = trainer(world())
    weights = weights_of(model)
    for fails in (False, True, False):
        resumes = (scenario.folder / "channel/channel.json").exists()
        dist.barrier()
        with scenario.publisher(resume=resumes, retries=0, retention=Retention(compact_every=3)) as publisher:
            for number in range(3 if resumes else 4):
                if not resumes and number == 2:
                    scenario.publish_pending(publisher, weights, 3)
                else:
                    scenario.publish(publisher, weights)
                weights = step()
                if fails and number == 0 and dist.get_rank() == dist.get_world_size() - 1:
                    folder = keys.parts_folder(7, max(ChannelReader(scenario.store).epochs()), 0)
                    scenario.store.fail_at(
                        "put", f"{folder}/{keys.compaction_part(1, dist.get_rank(), 1)}", error=StoreError
                    )
    scenario.end()


def afforded() -> None:
    """By default compactions, and anchors once these would be no smaller, are paid by the bytes of deltas."""
    scenario = Scenario("afforded")
    torch.manual_seed(0)
    whole = torch.randn(64, 1000, dtype=torch.bfloat16)
    with scenario.publisher() as publisher:
        for number in range(120):
            step = torch.zeros_like(whole, dtype=torch.int16)
            changed = torch.randperm(whole.numel())[: whole.numel() // (100 if number < 60 else 2)]
            step.view(-1)[changed] = torch.randint(1, 1 << 15, (changed.numel(),), dtype=torch.int16)
            whole.view(torch.int16).bitwise_xor_(step)
            weights = {"w": distribute_tensor(whole.float(), world(), [Shard(0)])}
            if number % 10 == 9:
                scenario.publish(publisher, weights)
            else:
                publisher.publish(weights.items(), step=scenario.next_step()).wait(60)
    scenario.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    tiles.BLOCK = 1 << 10  # so that ranks have other blocks of a tensor
    encode.INLINE_BYTES = 0  # so that the first rank has parts too
    dist.init_process_group("gloo")
    train()
    resumed_step()
    failures()
    other_shards()
    free_start()
    other_adapter()
    messages()
    compacting()
    afforded()
    if len(sys.argv) > 2:
        resume_from(Path(sys.argv[2]))
    dist.destroy_process_group()
