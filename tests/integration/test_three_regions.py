"""Three regions over slow lines: a relay beside the replicas of each, its kill, an outage, and a day behind."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica, Retention
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.ops import Relay
from deltasync.stores import open_store
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore
from tests.http_faults import FaultProxy, status
from tests.servers.line import Line, Shape
from tests.servers.s3 import MotoServer

pytestmark = pytest.mark.slow

REGIONS = 3
_LINE = Shape(round_trip_s=0.05, bits_per_s=50e6)
_DAY = 80  # versions that a region misses
ELEMENTS = 500_000


class Region:
    """A far region: a line to the channel's bucket that counts, a relay, and two replicas.

    Attributes:
        line: Counts what crosses the line.
        store: The copy, as the first replica reads it.
    """

    def __init__(self, stack: contextlib.ExitStack, server: MotoServer, bucket: str, folder: Path) -> None:
        host, port = server.endpoint.removeprefix("http://").split(":")
        line = stack.enter_context(Line((host, int(port)), _LINE))
        self.line = stack.enter_context(FaultProxy(f"http://127.0.0.1:{line.port}"))
        self._near, self._far = f"file://{folder}", server.url(bucket, endpoint=self.line.url)
        self.restart()
        self.relay.step()
        self.store = FaultyStore(open_store(self._near))
        # the second one may also read over the line
        self.replicas = [Replica(self.store), Replica(f"{self._far} {self._near}")]

    def restart(self) -> None:
        """Another relay, as after a kill: nothing is kept but the copy."""
        self.relay = Relay(ChannelReader(open_store(self._far)), [open_store(self._near)])

    def follow(self, publisher: Publisher, model: dict[str, torch.Tensor]) -> None:
        """Copy all versions, and have all replicas take the newest."""
        copied = None
        while copied != publisher.version:
            self.relay.step()
            copied = None if self.relay.version is None else self.relay.version.version
        self.sync(publisher, model)

    def sync(self, publisher: Publisher, model: dict[str, torch.Tensor]) -> None:
        """Have all replicas take the newest version."""
        self.store.calls.clear()
        for replica in self.replicas:
            before = replica.version or 0
            assert replica.sync(publisher.version, timeout_s=60) >= before
            assert replica.digest == publisher.digest
            assert_same_bits(replica.state_dict(), model)

    def crossed(self) -> list[str]:
        """The records and compactions that crossed the line whole."""
        found = self.line.matching("GET", r"/(versions|compactions)/.*\.safetensors$")
        return [each.path.rpartition("/")[2] for each in found if each.status == 200]


def weights() -> dict[str, torch.Tensor]:
    """Of which a version has more bytes than the end of a record with its document."""
    return {"w": torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}


def change(model: dict[str, torch.Tensor], seed: int) -> None:
    """Add to a tenth of the bits."""
    chosen = torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(seed)) < 0.1
    model["w"].view(torch.int16)[chosen] += 1


@pytest.fixture
def regions(
    s3_server: MotoServer, s3_bucket: str, tmp_path: Path
) -> Iterator[tuple[Publisher, list[Region]]]:
    with contextlib.ExitStack() as stack:
        retention = Retention(compact_every=8)
        publisher = stack.enter_context(
            Publisher(s3_server.url(s3_bucket), anchor_every=1 << 20, retention=retention)
        )
        publisher.publish(weights()).wait(60)
        publisher.flush()
        yield (
            publisher,
            [Region(stack, s3_server, s3_bucket, tmp_path / str(number)) for number in range(REGIONS)],
        )


def test_each_version_crosses_each_line_once_through_kills_and_a_day_behind(
    regions: tuple[Publisher, list[Region]],
) -> None:
    publisher, (near, killed, late) = regions
    model = weights()

    def publish(versions: int) -> None:
        for _ in range(versions):
            change(model, publisher.version)
            publisher.publish(model).wait(60)

    for region in (near, killed, late):
        region.follow(publisher, model)
        region.line.exchanges.clear()
    for number in range(6):
        publish(1)
        if number == 3:
            killed.restart()
        for region in (near, killed, late):
            region.follow(publisher, model)
    for region in (near, late):
        crossed = region.crossed()
        assert len({*crossed}) == len(crossed) == 6
    # a relay that starts again reads the ends of records, and the newest one to find out where it is
    again = Counter(killed.crossed())
    first = next(name for name in again if name.startswith("0000000001."))  # of full weights, which is small
    del again[first]
    assert sorted(again.values()) == [1, 1, 1, 1, 1, 2], again

    publish(1)
    near.relay.step()
    near.line.strike(status(503), times=1 << 30)  # the line is down: replicas go on with the copy
    near.sync(publisher, model)
    near.line.heal()

    publish(_DAY)
    publisher.flush()
    late.line.exchanges.clear()
    late.follow(publisher, model)
    crossed = late.crossed()
    assert len({*crossed}) > _DAY
    # the relay plans as a replica does, with the newest compaction and the records after it, before it copies all
    assert max(Counter(crossed).values()) <= 2 and len(crossed) - len({*crossed}) <= 12
    read = [key for verb, key in late.store.calls if verb == "read"]
    assert any(key.startswith(keys.COMPACTIONS) for key in read)
    assert sum(key.startswith(keys.VERSIONS) for key in read) < _DAY
