"""The time in which a replica rolls back, and loads full weights again when it finds that its own are wrong.

    python -m benchmarks.recovery [--elements 596_000_000] [--json]

The default is the size of Qwen3-0.6B, and needs 8 GB of memory and 2.5 GB of disk.

One run measures three things, so that a disturbance affects all of them: the rollback of a version that
changed 1 % of the elements; the load of an anchor into an empty replica; and the same after a flipped bit in
memory, audit included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import table
from deltasync import Publisher, Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.following import LiveWeights

TENSOR = 8_000_000  # elements of a tensor, about as many as those of a layer have


def run(elements: int, repeats: int, folder: Path | None) -> dict[str, Any]:
    """Measure with a channel in a temporary directory, made in `folder` if that is given."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        return measure(f"file://{name}/channel", elements, repeats)


def measure(url: str, elements: int, repeats: int) -> dict[str, Any]:
    """Measure the seconds of each repeat."""
    weights = {f"w{i}": torch.randn(min(TENSOR, elements - i)).bfloat16() for i in range(0, elements, TENSOR)}
    with Publisher(url, dtype="keep") as publisher:
        publisher.publish(weights.items()).wait(600)
        for tensor in weights.values():
            tensor.view(torch.int16)[torch.randint(0, tensor.numel(), (tensor.numel() // 100,))] ^= 1
        publisher.publish(weights.items()).wait(600)
    del publisher, weights
    reader = ChannelReader(open_store(url))
    replica = Replica(reader.store)
    replica.sync(1)
    follower = replica._target.weights
    assert isinstance(follower, LiveWeights)
    commits, rollbacks = zip(*(commit_and_rollback(follower, reader) for _ in range(repeats)), strict=True)
    loads, again = [], []
    for number in range(repeats):
        fresh, before = Replica(reader.store), time.perf_counter()
        fresh.sync(1)
        loads.append(time.perf_counter() - before)
        replica.state_dict()["w0"].view(torch.int16)[number] ^= 1 << 3
        before = time.perf_counter()
        assert not replica.audit()
        replica.sync(1)
        again.append(time.perf_counter() - before)
        assert replica.fingerprints == fresh.fingerprints
        del fresh
    return {
        "elements": elements,
        "commit_s": commits,
        "rollback_s": rollbacks,
        "load_s": loads,
        "audit_and_load_s": again,
        "ratio": statistics.median(again) / statistics.median(loads),
    }


def commit_and_rollback(follower: LiveWeights, reader: ChannelReader) -> tuple[float, float]:
    """Return the seconds to write a version, and those to restore what it overwrote."""
    staged, times = follower.stage([reader.numbered(2)]), [time.perf_counter()]
    committed = follower.commit(staged)
    times.append(time.perf_counter())
    follower.rollback(committed)
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    texts = {
        "commit_s": "commit of 1 % changed",
        "rollback_s": "rollback of it",
        "load_s": "load of an anchor into an empty replica",
        "audit_and_load_s": "after a flipped bit: audit, and load again",
    }
    rows = [(text, f"{statistics.median(result[key]):.3f} s") for key, text in texts.items() if key in result]
    yield from table((f"{result['elements']:,} elements", "median"), rows, words=2)


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option("--elements", type=int, default=596_000_000),
        common.option("--repeats", type=int, default=5),
        common.option(
            "--folder", type=Path, default=None, help="directory for the channel; default: a temporary one"
        ),
    )
