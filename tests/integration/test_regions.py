"""Two regions: a channel on S3, a relay beside the far replicas, and what goes over the line between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltasync import Publisher, Replica
from deltasync.channel.reading import ChannelReader
from deltasync.ops import Relay
from deltasync.stores import open_store
from tests.builders import trained, weights
from tests.conftest import assert_same_bits
from tests.http_faults import FaultProxy, late, s3_error
from tests.servers.s3 import MotoServer

VERSIONS, REPLICAS = 8, 3
_ANSWER_BYTES = 1_200  # headers of a request and of its reply


@pytest.fixture
def proxy(s3_server: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as proxy:
        yield proxy


@pytest.fixture
def direct(s3_server: MotoServer, s3_bucket: str) -> str:
    """The channel's URL without the proxy."""
    return s3_server.url(s3_bucket)


@pytest.fixture
def source(s3_server: MotoServer, s3_bucket: str, proxy: FaultProxy) -> str:
    return s3_server.url(s3_bucket, endpoint=proxy.url)


def test_the_long_line_carries_each_version_once(
    source: str, direct: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    near = f"file://{tmp_path}/near"
    proxy.strike(late(0.02), times=1 << 30)  # a long line: a busy machine may answer later than one at hand
    model = weights()
    with Publisher(direct) as publisher:
        publisher.publish(model).wait(60)
        relay = Relay(ChannelReader(open_store(source)), [open_store(near)])
        relay.step()
        replicas = [Replica(near if number else f"{near} {source}") for number in range(REPLICAS)]
        for replica in replicas:
            replica.sync()
        stored = 0
        for seed in range(-1, VERSIONS):
            if seed == 0:  # before, the relay looked around, as it does after catching up
                proxy.exchanges.clear()
                stored = 0
            model = trained(model, seed + 1)
            publisher.publish(model).wait(60)
            while (
                (copied := relay.step()) is None
                or copied.version is None
                or copied.version.version < publisher.version
            ):
                pass
            stored += copied.bytes
            syncs = [threading.Thread(target=replica.sync) for replica in replicas]
            for thread in syncs:
                thread.start()
            for thread in syncs:
                thread.join()
            for replica in replicas:
                assert replica.digest == publisher.digest
                assert_same_bits(replica.state_dict(), model)
    crossed = [each for each in proxy.matching("GET", r"\.safetensors$") if each.status == 200]
    assert len(crossed) == VERSIONS  # of four that follow: the relay, and three replicas
    assert sum(exchange.bytes_down for exchange in crossed) < stored + VERSIONS * _ANSWER_BYTES


def test_the_far_replica_outlives_its_relays_store(
    source: str, direct: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    near = open_store(f"file://{tmp_path}/near")
    model = weights()
    with Publisher(f"file://{tmp_path}/channel") as publisher:
        publisher.publish(model).wait(60)
        relay = Relay(ChannelReader(publisher.store), [open_store(direct), near])
        relay.step()
        replica = Replica([f"file://{tmp_path}/channel", source])
        replica.sync()
        proxy.strike(s3_error(503, "SlowDown"), times=1 << 30)
        for seed in range(2):
            model = trained(model, seed)
            publisher.publish(model).wait(60)
            relay.step()
            replica.sync()
            assert replica.digest == publisher.digest
            assert_same_bits(replica.state_dict(), model)
