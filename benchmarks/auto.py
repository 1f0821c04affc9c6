"""How soon a version is served with `codec="auto"`, `packed` and `context`, over links from 10 Mbit/s to 10 Gbit/s.

    python -m benchmarks.auto [--json]

Three channels in one process get the same versions in turn. Their store is in memory, behind a simulated link in each
direction: an object waits for those before it, then for its own bytes and a round trip. Times go from the beginning of
`publish` until a host replica has the bits. All times are measured, none is computed; both ends share the cores of one
machine. The data come from the simulation of `benchmarks.codec`: one step there and back. Takes three minutes.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.codec import simulate
from deltasync import Publisher, Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.errors import NotPublishedError
from deltasync.stores.base import ObjectInfo
from deltasync.stores.wrapper import WrappedStore
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import tensor_of

CODECS = ("packed", "context", "auto")
ELEMENTS = (1 << 24, 9 << 24)
"""With 1 % changed the first size makes one group, stored in the record, and the second two, the first stored as a part."""
MBITS = (10, 30, 100, 300, 1000, 10_000)
ROUND_TRIP_S = 0.005
_WARM_UP = 4  # versions until both codecs were tried, and the link is no longer known by the first version alone
_VERSIONS, _SLOW_VERSIONS, _SLOW_MBITS = 8, 4, 100
_CHANGED = 0.0107
_SIMULATED = 1 << 24


class Line(WrappedStore):
    """A store behind a link of `bits_per_s`, which may be changed at any time; None for no link."""

    bits_per_s: float | None = None

    def __init__(self, url: str) -> None:
        super().__init__(open_store(url))
        self._lock = threading.Lock()
        self._free_s = 0.0

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        self._pass(len(data))
        self.inner.create(key, data)

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        """See `Store.put`."""
        self._pass(len(data))
        self.inner.put(key, data, guard=guard)

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        """See `Store.read`."""
        self._pass(0)
        data = self.inner.read(key, most_bytes, known)
        self._pass(len(data), 0.0)
        return data

    def _pass(self, size: int, round_trip_s: float = ROUND_TRIP_S) -> None:
        if self.bits_per_s is None:
            return
        with self._lock:
            self._free_s = max(time.perf_counter(), self._free_s) + 8 * size / self.bits_per_s
            until_s = self._free_s + round_trip_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


class Channel:
    """One codec's publisher and replica."""

    def __init__(self, codec: str) -> None:
        url = f"memory://{uuid.uuid4().hex}"
        self.up, self.down = Line(url), Line(url)
        self.publisher = Publisher(self.up, codec=codec, dtype="keep", anchor_every=1 << 30)
        self.replica = Replica(self.down)
        self._reader = ChannelReader(self.up.inner)

    def serve(self, spec: TensorSpec, bits_N: np.ndarray) -> tuple[float, str | None]:
        """Publish a version and follow it; return the seconds that took, and the codec."""
        began_s = time.perf_counter()
        receipt = self.publisher.publish([(spec.name, tensor_of(bits_N, spec))])
        while self.replica.version != receipt.version:
            with contextlib.suppress(NotPublishedError):
                self.replica.poll()
        seconds = time.perf_counter() - began_s
        assert (self.replica.state_dict()[spec.name].view(torch.int16).numpy() == bits_N.view(np.int16)).all()
        delta = self._reader.numbered(receipt.version).record.delta
        return seconds, None if delta is None else delta.codec


def measure(element_count: int) -> list[dict[str, Any]]:
    """Measure one size: median seconds until a version is served, the codec that `auto` chose, its loss to the best."""
    states = [np.tile(bits_N, element_count // _SIMULATED) for bits_N in simulate.delta(_CHANGED, _SIMULATED)]
    spec = TensorSpec("w", "bfloat16", states[0].shape)
    channels = {codec: Channel(codec) for codec in CODECS}
    for channel in channels.values():
        channel.serve(spec, states[0])
    rows, number = [], 0
    for mbit_s in MBITS:
        common.say(f"{element_count:,} elements, {mbit_s} Mbit/s")
        for channel in channels.values():
            channel.up.bits_per_s = channel.down.bits_per_s = 1e6 * mbit_s
        found: dict[str, list[tuple[float, str | None]]] = {codec: [] for codec in CODECS}
        for _ in range(_WARM_UP + (_SLOW_VERSIONS if mbit_s < _SLOW_MBITS else _VERSIONS)):
            number += 1
            for at in range(len(CODECS)):
                codec = CODECS[(number + at) % len(CODECS)]
                found[codec].append(channels[codec].serve(spec, states[number % 2]))
        seconds = {codec: statistics.median(each[0] for each in served[_WARM_UP:]) for codec, served in found.items()}
        rows.append({
            "elements": element_count,
            "mbit_s": mbit_s,
            "served_s": seconds,
            "auto_took": Counter(str(each[1]) for each in found["auto"][_WARM_UP:]),
            "loss": seconds["auto"] / min(seconds["packed"], seconds["context"]) - 1,
        })  # fmt: skip
    for channel in channels.values():
        channel.publisher.close()
    return rows


def lines(result: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the result as lines of text."""
    rows = []
    for row in result:
        size = f"{row['elements'] / 1e6:.0f} M, {row['mbit_s'] / 1000:g} Gbit/s"
        times = (f"{1e3 * row['served_s'][codec]:.0f} ms" for codec in CODECS)
        took = ", ".join(f"{count} {codec}" for codec, count in row["auto_took"].items())
        rows.append((size, *times, took, f"{row['loss']:+.0%}"))
    yield from common.table(("elements, link", *(f"`{codec}`" for codec in CODECS), "`auto` took", "loss"), rows)


def run(elements: Sequence[int]) -> list[dict[str, Any]]:
    """Measure each size."""
    return [row for element_count in elements for row in measure(element_count)]


if __name__ == "__main__":
    sizes = common.option("--elements", type=int, nargs="+", default=ELEMENTS, help="sizes, multiples of 16,777,216")
    common.command(__doc__, run, lines, sizes)
