"""The cost of each tensor: models of many small tensors and of few large ones, with as many elements.

    python -m benchmarks.tensors [--elements 20000000] [--many 20000] [--few 30] [--changed 0.01] [--rounds 7] [--json]

Publishes to memory and follows from there: the time that `publish` holds the trainer, in its thread alone;
the process's time until the version is visible, the held time included, and of the replica's sync. The
difference between both models, by the tensors that one has more, is the cost of a tensor. All times are CPU
times, the median of the rounds; the wire has the payload's bytes that the model of many tensors takes more,
for each tensor that changed. Then a step of a mixture of experts, 18,432 tensors of 64 x 24 elements, of
which 5 % change. Takes a minute.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import table
from deltasync import Publisher, Replica, open_store

_EXPERTS = 18_432, (64, 24), 0.05  # tensors, their shape, fraction of them that change
_BARS = {"held_us": 5.0, "publish_us": 5.0, "sync_us": 5.0, "wire_bytes": 20.0, "held_ms": 30.0}

Weights = dict[str, torch.Tensor]


def run(elements: int, many: int, few: int, changed: float, rounds: int) -> dict[str, Any]:
    """Measure all: `models`, the medians of each; `tensor`, the cost of each; `experts`, those of the step;
    `bars`.
    """
    models = {}
    for count in (few, many):
        random = torch.Generator().manual_seed(0)
        weights = _model(count, (elements // count,), random)

        def step(weights: Weights = weights, random: torch.Generator = random) -> None:
            for tensor in weights.values():
                tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < changed] += 1

        models[count] = measure(weights, step, rounds)
    more = {key: models[many][key] - models[few][key] for key in models[few]}
    tensors = more["changed_tensors"]
    cost = {f"{what}_us": 1e6 * more[f"{what}_s"] / (many - few) for what in ("held", "publish", "sync")}
    cost["wire_bytes"] = more["payload_bytes"] / tensors
    random = torch.Generator().manual_seed(1)
    count, shape, part = _EXPERTS
    weights = _model(count, shape, random)

    def route() -> None:
        for name in torch.randperm(count, generator=random)[: int(part * count)].tolist():
            tensor = weights[str(name)]
            tensor.view(torch.int16)[torch.rand(tensor.shape, generator=random) < 0.1] += 1

    experts = measure(weights, route, rounds)
    return {
        "elements": elements,
        "changed_fraction": changed,
        "models": {str(count): found for count, found in models.items()},
        "tensor": cost,
        "experts": {"tensors": count, "shape": list(shape), **experts},
        "bars": _BARS,
    }


def _model(count: int, shape: tuple[int, ...], random: torch.Generator) -> Weights:
    return {str(at): (0.02 * torch.randn(shape, generator=random)).to(torch.bfloat16) for at in range(count)}


def measure(weights: Weights, step: Callable[[], None], rounds: int) -> dict[str, float]:
    """Publish and follow a version after each step; return medians."""
    found: dict[str, list[float]] = {}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    with Publisher(store, codec="packed", anchor_every=1 << 30) as publisher:
        publisher.publish(weights).wait()
        replica = Replica(store)
        replica.sync()
        for number in range(rounds + 2):  # the first two compile, and meet new memory
            before = {name: tensor.clone() for name, tensor in weights.items()}
            step()
            changed = sum(not torch.equal(tensor, weights[name]) for name, tensor in before.items())
            process_s, thread_s, began_s = time.process_time(), time.thread_time(), time.perf_counter()
            receipt = publisher.publish(weights)
            held_s, wall_s = time.thread_time() - thread_s, time.perf_counter() - began_s
            receipt.wait()
            publish_s, process_s = time.process_time() - process_s, time.process_time()
            replica.sync()
            sync_s = time.process_time() - process_s
            if number >= 2:
                row = {"held_s": held_s, "held_wall_s": wall_s, "publish_s": publish_s, "sync_s": sync_s}
                for key, value in (
                    row | {"payload_bytes": receipt.payload_bytes, "changed_tensors": changed}
                ).items():
                    found.setdefault(key, []).append(value)
        followed = replica.state_dict()
    for name, tensor in weights.items():
        assert torch.equal(followed[name].view(torch.int16), tensor.view(torch.int16)), (
            f"{name} has other bits"
        )
    return {key: statistics.median(values) for key, values in found.items()}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    cost, bars = result["tensor"], result["bars"]
    columns = ("held_s", "publish_s", "sync_s")
    rows = [
        (
            f"{int(count):,} tensors",
            *(f"{1e3 * found[column]:.1f}" for column in columns),
            f"{found['payload_bytes']:,.0f}",
        )
        for count, found in result["models"].items()
    ]
    yield f"{result['elements']:,} elements, {result['changed_fraction']:.1%} changed; CPU time"
    yield from table(("", "held, ms", "publish, ms", "sync, ms", "payload, bytes"), rows)
    yield (
        f"each tensor: held {cost['held_us']:.2f} us (bar {bars['held_us']:g}), publish "
        f"{cost['publish_us']:.2f} us "
        f"(bar {bars['publish_us']:g}), sync {cost['sync_us']:.2f} us (bar {bars['sync_us']:g}), "
        f"{cost['wire_bytes']:.1f} bytes on the wire (bar {bars['wire_bytes']:g})"
    )
    experts = result["experts"]
    yield (
        f"a step of {experts['tensors']:,} tensors of {' x '.join(map(str, experts['shape']))}, "
        f"{experts['changed_tensors']:,.0f} of them changed: held {1e3 * experts['held_wall_s']:.1f} ms "
        f"(bar {bars['held_ms']:g}), {1e3 * experts['held_s']:.1f} ms of CPU time"
    )


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option("--elements", type=int, default=20_000_000, help="elements of each model"),
        common.option("--many", type=int, default=20_000, help="tensors of one model"),
        common.option("--few", type=int, default=30, help="tensors of the other"),
        common.option(
            "--changed", type=float, default=0.01, help="fraction of the elements that a version changes"
        ),
        common.option("--rounds", type=int, default=7, help="versions to measure"),
    )
