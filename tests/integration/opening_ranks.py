"""What each rank does in `test_ranks`, by torchrun: opening_ranks.py FOLDER. Scenarios assert for
themselves.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.errors import ConfigError, DeltaSyncError, PublishError, StoreError
from deltasync.trainer import ranks
from deltasync.trainer.stream import TensorRange
from tests.faults import FaultyStore
from tests.waiting import wait_until

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
LAST = int(os.environ["WORLD_SIZE"]) - 1


def stream(weights: torch.Tensor) -> list[tuple[str, TensorRange]]:
    """The rows of this rank."""
    rows = len(weights) // (LAST + 1)
    held = weights[RANK * rows : (RANK + 1) * rows]
    return [("w", TensorRange(held, RANK * rows * weights.shape[1], tuple(weights.shape)))]


def told(action: Callable[[], Any], kind: type[DeltaSyncError], *words: str) -> None:
    """All ranks raise, the others with the number of the one that failed."""
    dist.barrier()
    try:
        action()
    except kind as error:
        assert all(word in str(error) for word in words), error
        assert RANK == LAST or f"ank {LAST}" in str(error), error
    else:
        raise AssertionError("not refused")
    dist.barrier()


def publisher(name: str, **options: Any) -> Publisher:
    return Publisher(f"file://{FOLDER}/{name}", group=dist.group.WORLD, **{"peer_timeout_s": 60, **options})


def groups() -> None:
    """One rank is in one more process group than the others."""
    dist.new_group([0])
    with publisher("groups") as opened:
        opened.publish(stream(torch.zeros(8, 4)), step=0).wait(60)
    # A group of some ranks, which has numbers of its own, in another order.
    some = dist.new_group([0, LAST], use_local_synchronization=False)
    if RANK in (0, LAST):
        with Publisher(f"file://{FOLDER}/some", group=some, peer_timeout_s=60) as opened:
            half = TensorRange(torch.full((16,), float(RANK)), 16 * (RANK == LAST), (8, 4))
            opened.publish([("w", half)], step=0).wait(60)
    dist.barrier()
    if RANK == 0:
        replica = Replica(f"file://{FOLDER}/some")
        replica.sync()
        assert replica.state_dict()["w"].view(-1).tolist() == [0.0] * 16 + [float(LAST)] * 16


def failures() -> None:
    """What fails at the last rank alone is told to all."""
    if RANK == LAST:
        os.environ["DELTASYNC_RETRIES"] = "many"
    told(lambda: publisher("failures"), ConfigError, "DELTASYNC_RETRIES")
    os.environ.pop("DELTASYNC_RETRIES", None)

    files = FOLDER / "missing" if RANK == LAST else {"config.json": b"{}"}
    told(lambda: publisher("failures", model_files=files), ConfigError, "missing")

    store = FaultyStore(open_store(f"file://{FOLDER}/failures"))
    if RANK == LAST:
        store.fail_at("put", "", error=StoreError)
    told(
        lambda: Publisher(store, group=dist.group.WORLD, peer_timeout_s=60),
        StoreError,
        "cannot be written from this rank",
    )

    elsewhere = f"file://{FOLDER}/elsewhere-{RANK == LAST}"
    told(
        lambda: Publisher(elsewhere, group=dist.group.WORLD, peer_timeout_s=60),
        ConfigError,
        f"rank {LAST}",
        "all hosts share",
    )

    with publisher("steps") as opened:
        weights = torch.zeros(8, 4)
        wrong: Any = "1" if RANK == LAST else 1
        told(lambda: opened.publish(stream(weights), step=wrong), ConfigError, "step must be")
        try:
            opened.publish(stream(weights))
        except ConfigError as error:
            assert "name the step" in str(error)
        else:
            raise AssertionError("no step")
        try:
            opened.publish(stream(weights), step=RANK)
        except PublishError as error:
            assert "publishes step" in str(error)
        else:
            raise AssertionError("different steps")
        assert opened.publish(stream(weights), step=1).wait(60).version == 1


def lost_again() -> None:
    """A rank that cannot store its parts any more: the second version that is lost so is raised."""
    store = FaultyStore(open_store(f"file://{FOLDER}/lost"))
    opened, weights, raised = (
        Publisher(store, group=dist.group.WORLD, peer_timeout_s=60, retries=0),
        torch.zeros(8, 4),
        0,
    )
    opened.publish(stream(weights), step=0).wait(60)
    if RANK == LAST:
        store.fail_at("put", keys.PARTS, error=StoreError, times=1000)
    for _ in range(5):
        weights += 1
        try:
            opened.publish(stream(weights), step=0).wait(60)
        except PublishError as error:
            raised += "lost for one cause" in str(error)
        dist.barrier()
    assert raised == 1
    opened.close()


def slow() -> None:
    """An upload may take longer than the timeout for ranks, and who is waited for is logged."""
    for late in (0, LAST):
        store = FaultyStore(open_store(f"file://{FOLDER}/slow-{late}"))
        opened, weights = Publisher(store, group=dist.group.WORLD, peer_timeout_s=2), torch.zeros(8, 4)
        opened.publish(stream(weights), step=0).wait(60)
        if late == RANK:
            gate = store.hold_at("put", keys.VERSIONS if late == 0 else keys.PARTS)
            gate = store.hold_at("create", keys.VERSIONS) if late == 0 else gate
            threading.Timer(5, gate.opened.set).start()
        weights += 1
        receipt = opened.publish(stream(weights), step=0)
        opened.close()
        assert receipt.done
        if RANK == 0:
            replica = Replica(store)
            assert replica.sync() == 2 and replica.state_dict()["w"].eq(1).all()
        dist.barrier()


def late() -> None:
    """A rank that comes late is named in the log of those who wait."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    ranks.logger.addHandler(handler)
    ranks.SAID_AFTER_S = 0.5
    with publisher("late") as opened:
        if RANK == LAST:
            time.sleep(2)
        opened.publish(stream(torch.zeros(8, 4)), step=0).wait(60)
    ranks.logger.removeHandler(handler)
    if RANK == 0:
        assert any(f"Waiting for rank {LAST} to publish" in line for line in lines), lines


def nothing_left() -> None:
    """Closed publishers leave no thread and no descriptor."""
    process, counts = psutil.Process(), []

    def held() -> tuple[int, int]:
        return process.num_threads(), process.num_fds()

    for number in range(6):
        with publisher("left", resume=number > 0) as opened:
            opened.publish(stream(torch.zeros(8, 4)), step=0).wait(60)
        dist.barrier()
        counts.append(held())
    wait_until(lambda: held() <= counts[1], told=lambda: (counts, held()))  # idle threads stay for a second


def alone() -> None:
    """A rank that publishes without a group refuses what it holds for a moment, in part, or otherwise than
    the others.
    """
    model = fully_shard(
        nn.Linear(8, 8, bias=False), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    with torch.no_grad():
        model(torch.ones(2, 8))
    experts = nn.Linear(8, 8, bias=False)
    experts.weight.allreduce = False  # type: ignore[assignment]
    ignored = nn.Linear(8, 8, bias=False)
    ignored._ddp_params_and_buffers_to_ignore = ["weight"]  # type: ignore[assignment]
    streams: list[tuple[Any, str]] = [
        (lambda: model.named_parameters(), "gathered by FSDP2"),
        (lambda: dict(model.named_parameters()), "gathered by FSDP2"),
        (model, "holds only a part"),  # which gathers nothing any more
        (experts, "belongs to an expert"),
        (lambda: experts.named_parameters(), "belongs to an expert"),
        (ignored, "is left out of DDP"),
    ]
    for number, (given, words) in enumerate(streams):
        with Publisher(f"file://{FOLDER}/alone-{RANK}-{number}") as opened:
            try:
                opened.publish(given)
            except ConfigError as error:
                assert words in str(error) and "group" in str(error) and "weight" in str(error), error
            else:
                raise AssertionError(words)
    with Publisher(f"file://{FOLDER}/alone-{RANK}") as opened:
        assert opened.publish(nn.Linear(8, 8)).wait(60).version == 1


def destroyed() -> None:
    """Process groups may end before the publisher does."""
    opened, weights = publisher("destroyed"), torch.zeros(8, 4)
    opened.publish(stream(weights), step=0).wait(60)
    dist.barrier()
    dist.destroy_process_group()
    weights += 1
    assert opened.publish(stream(weights), step=0).wait(60).version == 2
    opened.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scenario in (groups, failures, lost_again, late, nothing_left, slow, alone):
        scenario()
        print(RANK, scenario.__name__, flush=True)
        dist.barrier()
    destroyed()
