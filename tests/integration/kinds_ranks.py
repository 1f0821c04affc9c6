"""What each rank does in `test_kinds`, for each way of cutting a model: kinds_ranks.py FOLDER KIND..., by
torchrun.

A first version, a delta, one after an evaluation, and one after a restart; on a channel that is there, of
other ranks, two more. Each version is compared with the whole model. FOLDER/<kind>.<rank>.json says what
came, or how it was refused. A kind may be a loop of guides/sharded.md, by what its first line says it needs:
it runs as printed, and its last version is compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from deltasync import Publisher, Replica
from deltasync.errors import DeltaSyncError
from deltasync.trainer.stream import TensorRange, by_rows
from tests.integration.test_kinds import LOOPS
from tests.wrapped import Forwarding, OnlyDequantized, Scaled

FOLDER = Path(sys.argv[1])
Weights = dict[str, torch.Tensor]


class Tiny(nn.Module):
    """Rows that do not divide by 4, and fewer rows than ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, width)
        self.down = nn.Linear(width, 16, bias=False)
        self.few = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.down(torch.relu(self.up(x))))


class Case:
    """A model that is cut in some way.

    Attributes:
        stream: What this rank hands over, anew for each publish.
        whole: All of the model, gathered on all ranks.
        step: Trains one step, or changes the weights.
        evaluate: A forward without a backward.
        given: What a loop of the guide calls it.
    """

    def __init__(
        self, stream: Callable[[], Any], whole: Callable[[], Weights], step: Callable[[], None]
    ) -> None:
        self.stream, self.whole, self.step = stream, whole, step
        self.evaluate: Callable[[], object] = lambda: None
        self.given: dict[str, Any] = {}


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def of_module(model: nn.Module, stream: Callable[[], Any] | None = None) -> Case:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(
            torch.randn(4, 16, generator=torch.Generator().manual_seed(7))
        ).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    case = Case(
        stream or (lambda: model),
        lambda: {plain(name): full(value) for name, value in model.state_dict().items()},
        step,
    )

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.randn(4, 16))

    case.evaluate = evaluate
    case.given = {"model": model}
    return case


def of_tensors(weights: Weights, stream: Callable[[], Any], *, seed: int = 0) -> Case:
    """Tensors that every rank knows, of which it hands over a part."""

    def step() -> None:
        for value in weights.values():
            value.view(-1)[::3] += 1

    return Case(stream, lambda: {name: value.clone() for name, value in weights.items()}, step)


def made(width: int = 30) -> Tiny:
    torch.manual_seed(0)
    return Tiny(width)


def mesh(*sizes: int) -> DeviceMesh:
    names = ("dp", "tp")[-len(sizes) :] if len(sizes) > 1 else ("dp",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def fsdp2(**options: Any) -> Tiny:
    model = made()
    for layer in (model.up, model.down, model.few):
        fully_shard(layer, **options)
    return fully_shard(model, **options)  # type: ignore[return-value]


def bf16() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def size() -> int:
    return dist.get_world_size()


def wrapped_shards() -> Case:
    """As float8 training holds them: each shard is a wrapper subclass."""
    model = made()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    for layer in (model.up, model.down, model.few):
        layer.weight = nn.Parameter(Forwarding(layer.weight.detach()))
        fully_shard(layer)
    case = of_tensors(weights, lambda: model)

    def step() -> None:
        for name, param in model.named_parameters():
            local: Any = param.detach().to_local()
            getattr(local, "held", local).add_(1)
            weights[name] += 1

    case.step = step
    return case


def wrapped() -> Case:
    """Quantized weights that each rank holds whole."""
    values = whole_weights()
    weights: dict[str, Scaled] = {name: Scaled.of(values[name]) for name in "ab"} | {
        "c": OnlyDequantized.of(values["c"])
    }

    def step() -> None:
        for value in weights.values():
            value.values.view(-1)[::3] += 1

    return Case(lambda: weights, lambda: {name: value.plain() for name, value in weights.items()}, step)


def root_only() -> Case:
    return of_module(fully_shard(made(), mp_policy=bf16()))


def named(model: nn.Module) -> Case:
    return of_module(model, lambda: model.named_parameters())


def state_dict(model: nn.Module) -> Case:
    return of_module(model, lambda: model.state_dict().items())


def checkpointed() -> Case:
    model = made()
    model.up = checkpoint_wrapper(model.up)  # type: ignore[assignment]
    fully_shard(model.up)
    fully_shard(model)
    return of_module(model)


def compiled() -> Case:
    model = torch.compile(fsdp2(), backend="eager")
    case = of_module(model, lambda: model)
    return case


def tensor_parallel(model: nn.Module | None = None, tp: DeviceMesh | None = None) -> nn.Module:
    model = made(32) if model is None else model
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (size(),)) if tp is None else tp, plan)


def fsdp2_over_tp() -> Case:
    two = mesh(size() // 2, 2)
    model = fully_shard(tensor_parallel(tp=two["tp"]), mesh=two["dp"])
    return of_module(model, lambda: by_rows(model))


def fsdp1(use_orig_params: bool) -> Callable[[], Case]:
    def make() -> Case:
        model = FullyShardedDataParallel(
            made(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        return of_module(model)

    return make


def whole_weights() -> Weights:
    torch.manual_seed(0)
    return {"a": torch.randn(14, 6), "b": torch.randn(5), "c": torch.randn(8, 4, 2)}


def placed(placements: list[Any], *sizes: int, sub: str | None = None) -> Callable[[], Case]:
    def make() -> Case:
        weights = {name: value for name, value in whole_weights().items() if value.ndim > 1}
        device_mesh = mesh(*(sizes or (size(),)))
        parts = {name: distribute_tensor(value, device_mesh, placements) for name, value in weights.items()}
        case = of_tensors(weights, lambda: parts)
        change = case.step

        def step() -> None:
            change()
            for name, value in weights.items():
                parts[name].to_local().copy_(distribute_tensor(value, device_mesh, placements).to_local())

        case.step = step
        return case

    return make


def copies_and_shards() -> Case:
    """Shards over tensor parallelism, and copies over the other dimension of the mesh that the `DTensor` does
    not know.
    """
    weights, two = whole_weights(), mesh(size() // 2, 2)
    return of_tensors(
        weights,
        lambda: {name: distribute_tensor(value, two["tp"], [Shard(0)]) for name, value in weights.items()},
    )


def without_this_rank() -> Case:
    weights, half = whole_weights(), DeviceMesh("cpu", list(range(size() // 2)))
    return of_tensors(weights, lambda: {name: in_half(value, half) for name, value in weights.items()})


def in_half(value: torch.Tensor, half: DeviceMesh) -> DTensor:
    rank, chunks = dist.get_rank(), value.chunk(half.size())
    local = chunks[rank].clone() if rank < min(half.size(), len(chunks)) else value[:0].clone()
    return DTensor.from_local(
        local, half, [Shard(0)], shape=value.shape, stride=value.stride(), run_check=False
    )


def ranges() -> Case:
    weights = whole_weights()

    def stream() -> Iterator[tuple[str, TensorRange]]:
        for name, value in weights.items():
            width = -(-value.numel() // size())
            start = min(dist.get_rank() * width, value.numel())
            yield name, TensorRange(value.view(-1)[start : start + width], start, tuple(value.shape))

    case = of_tensors(weights, stream)
    case.given = {"shards": {name: (part.held, part.start, part.shape) for name, part in stream()}}
    return case


def replicated() -> Case:
    weights = whole_weights()
    return of_tensors(weights, lambda: weights)


def stages() -> Case:
    """Pipeline parallelism, experts by their global numbers: each rank has tensors of its own."""
    torch.manual_seed(0)
    weights = {f"layers.{number}.weight": torch.randn(6, 4) for number in range(8)} | {"norm": torch.randn(4)}
    each = 8 // size()
    numbers = range(each * dist.get_rank(), each * (dist.get_rank() + 1))
    own = {f"layers.{number}.weight": weights[f"layers.{number}.weight"] for number in numbers} | {
        "norm": weights["norm"]
    }
    return of_tensors(weights, lambda: own)


def strided() -> Case:
    """Shards whose elements are not in the order of the tensor in memory."""
    weights, device_mesh = {"a": torch.randn(14, 6), "c": torch.randn(8, 4, 2)}, mesh(size())
    rows = {name: distribute_tensor(value, device_mesh, [Shard(0)]) for name, value in weights.items()}
    parts = {
        name: DTensor.from_local(
            torch.empty_like(row.to_local().transpose(0, -1)).transpose(0, -1),
            device_mesh,
            [Shard(0)],
            run_check=False,
            shape=row.shape,
            stride=row.stride(),
        )
        for name, row in rows.items()
    }
    case = of_tensors(weights, lambda: parts)
    change = case.step

    def fill() -> None:
        for name, value in weights.items():
            parts[name].to_local().copy_(distribute_tensor(value, device_mesh, [Shard(0)]).to_local())

    def step() -> None:
        change()
        fill()

    fill()
    case.step = step
    return case


def without_elements() -> Case:
    weights = {"a": torch.randn(14, 6), "none": torch.empty(0, 4)}
    return of_tensors(weights, lambda: weights)


def other_dtype() -> Case:
    weights = {"a": torch.randn(14, 6)}
    return of_tensors(weights, lambda: weights if dist.get_rank() == 0 else {"a": weights["a"].long()})


def other_buffers() -> Case:
    weights = {"a": torch.ones(14, 6), "running_mean": torch.full((3,), float(dist.get_rank()))}
    return of_tensors(weights, lambda: weights)


def local_experts() -> Case:
    torch.manual_seed(dist.get_rank())
    weights = {"experts.0.weight": torch.randn(6, 4)}
    return of_tensors(weights, lambda: weights)


def empties() -> Case:
    weights = whole_weights()
    return of_tensors(
        weights, lambda: weights if dist.get_rank() == 0 else dict.fromkeys(weights, torch.empty(0))
    )


def partial() -> Case:
    from torch.distributed.tensor import Partial

    weights, device_mesh = whole_weights(), mesh(size())
    return of_tensors(
        weights, lambda: {n: DTensor.from_local(v, device_mesh, [Partial()]) for n, v in weights.items()}
    )


def uneven() -> Case:
    weights, device_mesh = {"w": torch.randn(size() + 3, 2)}, mesh(size())
    rows = 4 if dist.get_rank() == size() - 1 else 1

    def stream() -> dict[str, DTensor]:
        local = weights["w"][-rows:].clone()
        return {
            "w": DTensor.from_local(local, device_mesh, [Shard(0)], shape=weights["w"].shape, stride=(2, 1))
        }

    return of_tensors(weights, stream)


def zero3() -> Case:
    import deepspeed

    model = made()
    model.few.weight.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)

    def forward() -> torch.Tensor:
        return engine(torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16())

    def step() -> None:
        engine.backward(forward().float().square().mean())
        engine.step()

    def whole() -> Weights:
        found = {}
        for name, param in model.named_parameters():
            with deepspeed.zero.GatheredParameters([param]):
                found[name] = param.detach().clone()
        return found

    case = Case(lambda: engine, whole, step)
    case.evaluate = torch.no_grad()(forward)
    case.given = {"engine": engine}
    return case


OF_LOOPS: dict[str, Callable[[], Case]] = {
    "FSDP2": lambda: root_only(),
    "tensor parallelism": lambda: of_module(tensor_parallel()),
    "shards of another kind": lambda: ranges(),
    "DDP": lambda: of_module(DistributedDataParallel(made())),
    "DeepSpeed ZeRO-3": zero3,
}


def run_loop(name: str) -> dict[str, Any]:
    """Run the loop as printed; return that it was."""
    case, url = OF_LOOPS[name](), f"file://{FOLDER}/{name.replace(' ', '-')}"
    acts = {"train": lambda _: case.step(), "evaluate": lambda _: case.evaluate()}
    exec(LOOPS[name], {"torch": torch, "Publisher": Publisher, "url": url, "steps": 3, **acts, **case.given})
    whole = {name.removeprefix("module."): value for name, value in case.whole().items()}
    dist.barrier()
    served = Replica(url)
    served.sync()
    assert_serves(served, whole, name)
    return {"loop": name}


def assert_serves(served: Replica, whole: Weights, *what: object) -> None:
    found = served.state_dict()
    assert found.keys() == whole.keys(), (what, found.keys() ^ whole.keys())
    for name, value in whole.items():
        served_bits, bits = found[name].view(torch.int16), value.bfloat16().view(torch.int16)
        assert found[name].shape == value.shape and torch.equal(served_bits, bits), (what, name)


KINDS: dict[str, Callable[[], Case]] = {
    "fsdp2": lambda: of_module(fsdp2()),
    "fsdp2 state_dict": lambda: state_dict(fully_shard(made(), mp_policy=bf16())),
    "fsdp2 mixed precision": lambda: of_module(fsdp2(mp_policy=bf16())),
    "fsdp2 root": root_only,
    "fsdp2 without reshard": lambda: of_module(fsdp2(reshard_after_forward=False)),
    "fsdp2 named_parameters": lambda: named(fully_shard(made(), mp_policy=bf16())),
    "fsdp2 checkpointed": checkpointed,
    "fsdp2 compiled": compiled,
    "fsdp2 compiled named_parameters": lambda: (
        lambda model: of_module(model, lambda: model.named_parameters())
    )(torch.compile(fsdp2(), backend="eager")),
    "hsdp": lambda: of_module(fsdp2(mesh=mesh(2, size() // 2))),
    "fsdp2 wrapper subclasses": wrapped_shards,
    "fsdp1": fsdp1(False),
    "fsdp1 use_orig_params": fsdp1(True),
    "tensor parallel": lambda: (lambda model: of_module(model))(tensor_parallel()),
    "tensor parallel by rows": lambda: (lambda model: of_module(model, lambda: by_rows(model)))(
        tensor_parallel()
    ),
    "fsdp2 over tensor parallel": fsdp2_over_tp,
    "Shard(0)": placed([Shard(0)]),
    "Shard(0), not contiguous": strided,
    "Shard(1)": placed([Shard(1)]),
    "Replicate": placed([Replicate()]),
    "Replicate, Shard(0)": lambda: placed([Replicate(), Shard(0)], 2, size() // 2)(),
    "Shard(0), Shard(0)": lambda: placed([Shard(0), Shard(0)], 2, size() // 2)(),
    "Partial": partial,
    "uneven rows": uneven,
    "shards of one dimension, copies of another": copies_and_shards,
    "mesh without a rank": without_this_rank,
    "TensorRange": ranges,
    "whole on all ranks": replicated,
    "wrapper subclasses on all ranks": wrapped,
    "pipeline stages, experts by global names": stages,
    "experts by local names": local_experts,
    "empty on other ranks": empties,
    "without elements": without_elements,
    "another dtype on one rank": other_dtype,
    "buffers that differ": other_buffers,
}


def run(kind: str) -> dict[str, Any]:
    """Publish; return the versions and how they came, or the refusal."""
    case, url = KINDS[kind](), f"file://{FOLDER}/{kind.replace(' ', '-')}"
    told: dict[str, Any] = {"versions": []}
    served = Replica(url)

    def publish(publisher: Publisher, step: int) -> None:
        receipt = publisher.publish(case.stream(), step=step).wait(150)
        whole = case.whole()
        if dist.get_rank() == 0:
            served.sync()
            assert_serves(served, whole, kind, step)
        told["versions"].append([receipt.version, receipt.kind])
        dist.barrier()

    def opened(**more: Any) -> Publisher:
        return Publisher(url, group=dist.group.WORLD, peer_timeout_s=150, **more)

    step = 0
    resumes = any((FOLDER / kind.replace(" ", "-")).glob("channel.json"))
    dist.barrier()
    try:
        if resumes:
            with opened(resume=True) as publisher:
                publish(publisher, 10)
                case.step()
                publish(publisher, 11)
            return told
        with opened() as publisher:
            publish(publisher, 0)
            for step in (1, 2):
                case.step()
                case.evaluate()
                publish(publisher, step)
        with opened(resume=True) as publisher:
            case.step()
            step = 3
            publish(publisher, 3)
    except DeltaSyncError as error:
        told["refused"] = [step, type(error).__name__, str(error)]
    dist.barrier()
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "DeepSpeed ZeRO-3":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    FOLDER.mkdir(exist_ok=True)
    for each in sys.argv[2:]:
        told = run_loop(each) if each in LOOPS else run(each)
        (FOLDER / f"{each.replace(' ', '-')}.{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
