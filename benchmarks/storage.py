"""The bytes that a channel stores for each byte of delta, and those that a late joiner fetches, with default
settings.

    python -m benchmarks.storage [--elements 8e6] [--versions 210] [--changed 0.01 0.001] [--json]

A model of bfloat16 weights is published to a store in memory. In each version a random share of its elements
moves by one step up or down. The benchmark counts the bytes of deltas, compactions and anchors after the
first version, and those that a replica reads when it joins after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import common
from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.stores import Store
from deltasync.stores.base import ObjectInfo, WrappedStore
from deltasync.tensors.bits import bits_of

Weights = dict[str, torch.Tensor]

TENSORS = 24


def run(elements: float, versions: int, changed: Iterable[float]) -> list[dict[str, Any]]:
    """Measure a run for each changed fraction."""
    return [measure(int(elements), each, versions) for each in changed]


def measure(elements: int, changed: float, versions: int, **options: Any) -> dict[str, Any]:
    """Publish a run and join it; `options` are the publisher's."""
    store = open_store(f"memory://storage-{changed}-{versions}-{np.random.default_rng().integers(1 << 62)}")
    random, weights = np.random.default_rng(0), model(elements)
    with Publisher(store, **options) as publisher:
        publisher.publish(weights).wait(600)
        first = {info.key for info in store.list("")}
        for _ in range(versions):
            move(random, weights, changed)
            publisher.publish(weights).wait(600)
    sizes = {info.key: info.bytes for info in store.list("") if info.key not in first}
    reading = _Reads(store)
    replica = Replica(reading)
    replica.sync()
    joined = replica.state_dict()
    assert all(np.array_equal(bits_of(joined[name]), bits_of(tensor)) for name, tensor in weights.items())
    full_bytes = sum(tensor.nbytes for tensor in weights.values())
    delta_bytes = _sum(sizes, keys.VERSIONS) + sum(size for key, size in sizes.items() if is_part(key))
    compacted_bytes = _sum(sizes, keys.COMPACTIONS) + sum(
        size for key, size in sizes.items() if is_compaction_part(key)
    )
    anchor_bytes = _sum(sizes, keys.ANCHORS) + _sum(sizes, keys.ANNOUNCEMENTS)
    compactions = sorted((span.version, span.base) for span, _ in ChannelReader(store).compactions())
    return {
        "elements": elements,
        "changed_fraction": changed,
        "versions": versions,
        "full_bytes": full_bytes,
        "delta_bytes": delta_bytes,
        "compaction_bytes": compacted_bytes,
        "anchor_bytes": anchor_bytes,
        "compactions": [[base, version] for version, base in compactions],
        "stored_per_delta": (delta_bytes + compacted_bytes + anchor_bytes) / delta_bytes,
        "joiner_bytes": reading.bytes,
        "joiner_of_full": reading.bytes / full_bytes,
        "worst_joiner_of_full": worst(store, full_bytes),
    }


def model(elements: int) -> Weights:
    """Return weights of about so many elements."""
    generator, columns = torch.Generator().manual_seed(0), 64
    rows = elements // TENSORS // columns
    return {
        f"layers.{number}.weight": torch.empty(rows, columns, dtype=torch.bfloat16).normal_(
            std=0.02, generator=generator
        )
        for number in range(TENSORS)
    }


def move(random: np.random.Generator, weights: Weights, changed: float) -> None:
    """Move a share of the elements by one step."""
    for tensor in weights.values():
        bits_N = bits_of(tensor)
        index_K = np.unique(random.integers(0, bits_N.size, round(changed * bits_N.size)))
        bits_N[index_K] += random.choice([1, (1 << 16) - 1], index_K.size).astype(bits_N.dtype)


def worst(store: Store, full_bytes: int) -> float:
    """Return the most that a joiner of any version fetches, by the bytes of full weights: of what leads there
    at the end.
    """
    reader = ChannelReader(store)
    deltas = {slot.version: reader.document(info).payload_bytes for slot, info in reader.slots()}
    ends = {span.version: reader.document(info).payload_bytes for span, info in reader.compactions()}
    most = after = 0
    for version in sorted(deltas):
        after = ends[version] if version in ends else after + deltas[version] * (version > 1)
        most = max(most, after)
    return 1 + most / full_bytes


def is_compaction_part(key: str) -> bool:
    """Whether a key is that of a part of a compaction."""
    return key.startswith(keys.PARTS) and "/compaction-" in key


def is_part(key: str) -> bool:
    """Whether a key is that of a part of a delta."""
    return key.startswith(keys.PARTS) and "/compaction-" not in key


def lines(found: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a table."""
    heads = ("changed", "deltas", "compactions", "anchors", "stored/delta", "joiner/full", "worst joiner")
    rows = [
        (
            f"{row['changed_fraction']:.2%}",
            *(f"{row[name] / 1e6:.2f} MB" for name in ("delta_bytes", "compaction_bytes", "anchor_bytes")),
            f"{row['stored_per_delta']:.3f}",
            f"{row['joiner_of_full']:.3f}",
            f"{row['worst_joiner_of_full']:.3f}",
        )
        for row in found
    ]
    yield from common.table(heads, rows)


class _Reads(WrappedStore):
    """Counts the bytes of objects that are read."""

    bytes = 0

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        data = super().read(key, most_bytes, known)
        self.bytes += len(data)
        return data


def _sum(sizes: dict[str, int], prefix: str) -> int:
    return sum(size for key, size in sizes.items() if key.startswith(prefix))


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option("--elements", type=float, default=8e6),
        common.option("--versions", type=int, default=210, help="published after the first"),
        common.option("--changed", type=float, nargs="+", default=[0.01, 0.001]),
    )
