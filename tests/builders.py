"""Models, the next bits of a model, and publishing them: the parts that most tests begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from unittest import mock

import torch

from deltasync import Publisher, Receipt, Replica
from deltasync.publish.agreement import Alone
from deltasync.publish.detect import Difference
from deltasync.publish.log import Log
from deltasync.publish.shadow import Shadow
from deltasync.stores import Store
from deltasync.trainer.source import Source
from deltasync.trainer.stream import Stream
from tests.conftest import assert_same_bits

Weights = Mapping[str, torch.Tensor]

PATIENCE_S = 60.0


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small model in bfloat16, with an empty, a scalar and an integer tensor."""
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(40, 30, generator=random).to(torch.bfloat16),
        "layer.weight": torch.randn(30, 30, generator=random).to(torch.bfloat16),
        "norm": torch.ones(30, dtype=torch.bfloat16),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "ids": torch.arange(7),
    }


def trained(before: Weights, seed: int, fraction: float = 0.02) -> dict[str, torch.Tensor]:
    """Some elements moved by a ulp or two; at least one changes."""
    random = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        if tensor.dtype == torch.bfloat16:
            mask = torch.rand(tensor.shape, generator=random) < fraction
            tensor.view(torch.int16).add_(
                mask * torch.randint(-2, 3, tensor.shape, generator=random, dtype=torch.int16)
            )
    after["ids"][0] += 1
    return after


def publish(publisher: Publisher, weights: Weights, step: int | None = None) -> Receipt:
    """Publish weights, and wait until they are visible."""
    return publisher.publish(weights.items(), step=step).wait(PATIENCE_S)


def assert_holds(channel: str | Store, expected: Weights, version: int | None = None) -> None:
    """A new replica reaches a version, by default the newest one, and has these weights."""
    replica = Replica(channel)
    assert replica.sync(version) == version or version is None
    assert_same_bits(replica.state_dict(), dict(expected))


class Compared:
    """A first stream and its shadow, with which later ones are compared."""

    def __init__(self, weights: Weights, dtype: str = "keep", place: str = "host") -> None:
        self.source = Source(Alone(), dtype, None)
        parts = self.source.first(weights)
        self.shadow = Shadow.of(self.source.specs, parts, place, self.source.devices)

    def compare(self, stream: Stream) -> Difference:
        """Compare a stream; nothing changes."""
        return self.source.compare(self.shadow, stream)

    def take(self, stream: Stream) -> Difference:
        """Compare a stream, and apply the difference."""
        found = self.compare(stream)
        self.shadow.apply(found)
        return found


def finish_maintenance(publisher: Publisher) -> None:
    """Wait until the anchor or the compacted delta that follows a version is stored."""
    publisher._uploader.finisher.maintenance._workers.submit(int).result(PATIENCE_S)  # type: ignore[union-attr]


def wait_for_head(log: Log) -> None:
    """Wait until head names the newest version."""
    log.head.workers.submit(int).result(PATIENCE_S)


def settle(publisher: Publisher) -> None:
    """Wait for all that follows a version: its maintenance, and head."""
    assert publisher._opened.log is not None
    finish_maintenance(publisher)
    wait_for_head(publisher._opened.log)


def in_parts() -> contextlib.AbstractContextManager[object]:
    """While this lasts, no payload goes into its record, as if versions were large."""
    return mock.patch("deltasync.publish.encode.INLINE_BYTES", 0)
