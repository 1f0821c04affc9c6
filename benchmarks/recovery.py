"""How long a replica takes to roll back, and to load full weights again when it finds that its own are wrong.

python benchmarks/recovery.py --elements 596_000_000      the size of Qwen3-0.6B; 8 GB of memory and 2.5 GB of disk

Everything is in one run, so that what disturbs one number disturbs the others: rollback of a version of 1 % changed elements
that does not give the promised bits; the load of an anchor into an empty replica; the same after a bit flipped in memory,
audit included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.follow import Follower

TENSOR = 8_000_000  # elements of one; about as many tensors of a layer have


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=596_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the channel goes; the system's temporary one")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {given.elements:,} elements")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        measure(f"file://{folder}/channel", given.elements, given.repeats)


def measure(url: str, elements: int, repeats: int) -> None:
    """Print the times."""
    weights = {f"w{i}": torch.randn(min(TENSOR, elements - i)).bfloat16() for i in range(0, elements, TENSOR)}
    with Publisher(url, dtype="keep", shard_bytes=1 << 28) as publisher:
        publisher.publish(weights.items()).wait(600)
        for tensor in weights.values():
            tensor.view(torch.int16)[torch.randint(0, tensor.numel(), (tensor.numel() // 100,))] ^= 1
        publisher.publish(weights.items()).wait(600)
    del publisher, weights
    reader = ChannelReader(open_store(url))
    replica = Replica(reader.store)
    replica.sync(1)
    follower = replica._follower
    assert isinstance(follower, Follower)
    commits, rollbacks = zip(*(commit_and_rollback(follower, reader) for _ in range(repeats)), strict=True)
    show("commit of 1 % changed", commits)
    show("rollback of it", rollbacks)
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
    show("load of an anchor", loads)
    show("audit and load again", again)
    print(f"ratio {statistics.median(again) / statistics.median(loads):.2f}")


def commit_and_rollback(follower: Follower, reader: ChannelReader) -> tuple[float, float]:
    """Seconds to write a version, and to put back what that wrote."""
    staged, times = follower.stage([reader.numbered(2)]), [time.perf_counter()]
    committed = follower.commit(staged)
    times.append(time.perf_counter())
    follower.rollback(committed)
    times.append(time.perf_counter())
    return times[1] - times[0], times[2] - times[1]


def show(what: str, seconds: Sequence[float]) -> None:
    """Median, least and most."""
    print(f"{what}: {statistics.median(seconds):.4f} s ({min(seconds):.4f} to {max(seconds):.4f})")


if __name__ == "__main__":
    main()
