"""How much a storm of joins slows the trainer, on one machine that both share.

    python -m benchmarks.storm [--replicas 24] [--megabytes 100] [--json]

A trainer publishes versions of which 1 % changed to a directory, one after the other, while two processes join
as replicas, each one replica at a time, whose weights it drops once they are the newest version: many would not
fit into memory. Then the same two processes only copy each file of the channel that a join reads. What the
trainer waits longer beside joins than beside copies is what joins cost beyond the machine's processors and
memory; copies are made four times as often, to take about as long. A file system that the machine remembers
stands in for the store.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import table
from benchmarks.models import change
from deltasync import Publisher, Replica, Retention
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.stores import open_store

_PROCESSES = 2
_ROUNDS = 2  # of joins, then copies
_COPIES = 4  # for each join
_QUIET = 10  # versions with nothing beside them
_PAUSE_S = 0.1  # from one version to the next


def joins(url: str, count: int) -> int:
    """Join this often. Return how many served the version that was the newest one as they began, or a later one."""
    served = 0
    for _ in range(count):
        newest = ChannelReader(open_store(url)).newest_version()
        assert newest is not None
        served += Replica(url).sync() >= newest.version
    return served


def copies(url: str, count: int) -> int:
    """Copy what a join reads this often; return how often."""
    store = open_store(url)
    reader = ChannelReader(store)
    newest = reader.newest_version()
    assert newest is not None
    chain = find_chain(reader, None, newest)
    files = [
        file
        for stored in chain
        for file in (stored.record.files if stored.use_anchor else stored.record.payload_files)
    ]
    for _ in range(count):
        for file in files:
            bytearray(store.read(file.key, file.bytes))
        for stored in chain:
            bytearray(store.read(stored.key, 1 << 30))
    return count


class Trainer:
    """Publishes to a directory."""

    def __init__(self, url: str, megabytes: float) -> None:
        count = int(megabytes * 1e6 / 2 / 8)
        self._weights = {f"layers.{n}.weight": torch.randn(count).to(torch.bfloat16) for n in range(8)}
        self._publisher, self._step = Publisher(url, retention=Retention()), 0
        self._publisher.publish(self._weights).wait(600)

    def publish(self) -> tuple[float, float]:
        """Publish a version; return the seconds until it is visible, and those of a processor."""
        self._step += 1
        change(self._weights, 0.01, self._step)
        began_s, before_s = time.monotonic(), time.process_time()
        self._publisher.publish(self._weights).wait(600)
        took_s, cpu_s = time.monotonic() - began_s, time.process_time() - before_s
        time.sleep(_PAUSE_S)
        return took_s, cpu_s

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()

    def beside(
        self, url: str, act: Callable[[str, int], int], count: int
    ) -> tuple[list[tuple[float, float]], int]:
        """Publish until two processes have done this many acts; return the times, and the sum of what they return."""
        with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
            pool.map(_ready, range(_PROCESSES))
            each = [count // _PROCESSES] * (_PROCESSES - 1)
            done = pool.starmap_async(act, [(url, part) for part in [count - sum(each), *each]])
            found = [self.publish()]
            while not done.ready():
                found.append(self.publish())
            return found, sum(done.get())


def _ready(_: int) -> None:
    """Have the process import everything, and compute in one thread."""
    torch.set_num_threads(1)


def run(replicas: int, megabytes: float) -> dict[str, Any]:
    """Publish alone, beside joins, and beside copies."""
    with tempfile.TemporaryDirectory(prefix="deltasync-storm-") as folder:
        url = f"file://{Path(folder).resolve()}/channel"
        trainer = Trainer(url, megabytes)
        times: dict[str, list[tuple[float, float]]] = {"alone": [trainer.publish() for _ in range(_QUIET)]}
        counts = {"joins": 0, "copies": 0}
        seconds = {"joins": 0.0, "copies": 0.0}
        for _ in range(_ROUNDS):
            for name, act, each in (("joins", joins, 1), ("copies", copies, _COPIES)):
                began_s = time.monotonic()
                found, count = trainer.beside(url, act, each * replicas // _ROUNDS)
                seconds[name] += time.monotonic() - began_s
                times.setdefault(name, []).extend(found)
                counts[name] += count
        times["alone"] += [trainer.publish() for _ in range(_QUIET)]
        trainer.close()
    return {
        "replicas": replicas,
        "megabytes": megabytes,
        "newest": counts["joins"],
        "seconds": seconds,
        "versions": {name: len(found) for name, found in times.items()},
        "visible_s": {name: statistics.median(took for took, _ in found) for name, found in times.items()},
        "cpu_s": {name: statistics.median(cpu for _, cpu in found) for name, found in times.items()},
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    visible, cpu, versions = result["visible_s"], result["cpu_s"], result["versions"]
    rows = [
        (
            name if name == "alone" else f"{name}, {result['replicas']} of {result['megabytes']:g} MB",
            versions[name],
            f"{visible[name]:.3f} s",
            f"{visible[name] / visible['alone']:.2f}",
            f"{cpu[name]:.3f} s",
        )
        for name in ("alone", "copies", "joins")
    ]
    yield from table(("beside the trainer", "versions", "until visible", "of alone", "its processor"), rows)
    yield ""
    yield (
        f"{result['newest']} of {result['replicas']} joins served the newest version or a later one; a publish "
        f"took {visible['joins'] / visible['copies']:.2f} times as long beside them as beside copies."
    )


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option("--replicas", type=int, default=24, help="replicas that join"),
        common.option("--megabytes", type=float, default=100.0, help="size of the weights"),
    )
