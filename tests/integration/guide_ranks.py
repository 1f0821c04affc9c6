"""The loops of guides/sharded.md as printed, on each rank of torchrun: guide_ranks.py FOLDER LOOP...

LOOP is what a block's first line says it needs. FOLDER/<number of the loop> is its channel, whose last version is compared
with the whole model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from deltasync import Publisher, Replica
from tests.integration.test_guide_loops import LOOPS

Weights = dict[str, torch.Tensor]
STEPS = 3


class Tiny(nn.Module):
    """Rows that do not divide by 4, fewer rows than ranks, a frozen parameter and a buffer."""

    def __init__(self, width: int = 30) -> None:
        super().__init__()
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 16, bias=False)
        self.few = nn.Linear(16, 3)
        self.few.weight.requires_grad_(False)
        self.register_buffer("factor", torch.tensor([1.5, -0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.down(torch.relu(self.up(x)))) * self.factor[0]


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def batch(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)


def of_module(model: nn.Module) -> tuple[dict[str, Any], Callable[[], Weights]]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)

    def train(model: nn.Module) -> None:
        model(batch(torch.float32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch(torch.float32))

    def gathered() -> Weights:
        return {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}

    return {"model": model, "train": train, "evaluate": evaluate}, gathered


def fsdp2() -> tuple[dict[str, Any], Callable[[], Weights]]:
    """Only the root is sharded, with mixed precision: an evaluation leaves it gathered, and rounded."""
    size = dist.get_world_size()
    copies = {"mesh_shape": (2, size // 2), "mesh_dim_names": ("copies", "shards")}
    mesh = init_device_mesh("cpu", **(copies if size > 2 else {"mesh_shape": (size,)}))
    return of_module(fully_shard(Tiny(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))


def tensor_parallel() -> tuple[dict[str, Any], Callable[[], Weights]]:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return of_module(parallelize_module(Tiny(32), init_device_mesh("cpu", (dist.get_world_size(),)), plan))


def shards_of_another_kind() -> tuple[dict[str, Any], Callable[[], Weights]]:
    weights = {"a": torch.randn(14, 6), "b": torch.randn(5)}
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = {}
    for name, value in weights.items():
        width = -(-value.numel() // size)
        start = min(rank * width, value.numel())
        shards[name] = (value.view(-1)[start : start + width], start, tuple(value.shape))

    def train(shards: Any) -> None:
        for value in weights.values():
            value.view(-1)[::3] += 1

    return {"shards": shards, "train": train}, lambda: weights


def zero3() -> tuple[dict[str, Any], Callable[[], Weights]]:
    import deepspeed

    model = Tiny()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def train(engine: Any) -> None:
        engine.backward(engine(batch(torch.bfloat16)).float().square().mean())
        engine.step()

    def evaluate(engine: Any) -> None:
        with torch.no_grad():
            engine(batch(torch.bfloat16))

    def gathered() -> Weights:
        found = dict(model.named_buffers())
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                found[name] = param.detach().clone()
        return found

    return {"engine": engine, "train": train, "evaluate": evaluate}, gathered


MAKES: dict[str, Callable[[], tuple[dict[str, Any], Callable[[], Weights]]]] = {
    "FSDP2": fsdp2,
    "tensor parallelism": tensor_parallel,
    "shards of another kind": shards_of_another_kind,
    "DDP": lambda: of_module(DistributedDataParallel(Tiny())),
    "DeepSpeed ZeRO-3": zero3,
}


def run(name: str, url: str) -> None:
    torch.manual_seed(0)
    given, gathered = MAKES[name]()
    exec(LOOPS[name], {"torch": torch, "Publisher": Publisher, "url": url, "steps": STEPS, **given})
    expected = gathered()
    dist.barrier()
    replica = Replica(url)
    replica.sync()
    found = replica.state_dict()
    assert found.keys() == expected.keys(), (name, found.keys() ^ expected.keys())
    for tensor, value in expected.items():
        bits = value.bfloat16().view(torch.int16)
        assert found[tensor].shape == value.shape and torch.equal(found[tensor].view(torch.int16), bits), (name, tensor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "DeepSpeed ZeRO-3":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    for number, loop in enumerate(sys.argv[2:]):
        assert re.search(r"\.publish\(", LOOPS[loop])
        run(loop, f"file://{Path(sys.argv[1])}/{number}")
        dist.barrier()
    dist.destroy_process_group()
