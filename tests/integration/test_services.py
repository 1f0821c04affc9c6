"""A channel's life on services that others wrote: versions, a follower, writers that succeed each other, and
every end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica, open_store, ops
from deltasync.channel.reading import ChannelReader
from deltasync.config import Retention
from deltasync.errors import FencedError, PublishPendingError, StoreError, TransientStoreError
from tests.builders import assert_holds, trained, weights
from tests.conftest import assert_same_bits
from tests.servers import clouds
from tests.servers.clouds import Azurite, FakeGcs, Service
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

AWAY_S = 30.0

_PUBLISHER = """
import sys
from deltasync import Publisher
from tests.builders import assert_holds, trained, weights
with Publisher(sys.argv[1]) as publisher:
    model = weights()
    for seed in range(1000):
        publisher.publish(model.items()).wait(60)
        print(seed, flush=True)
        model = trained(model, seed)
"""


@pytest.fixture(params=[Azurite, FakeGcs], ids=lambda kind: kind.__name__)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """One for this test alone, which may kill it."""
    with clouds.running(request.param, tmp_path) as service:
        yield service


@pytest.fixture
def url(service: Service, monkeypatch: pytest.MonkeyPatch) -> str:
    return clouds.channel_url(service, monkeypatch)


class Follower(threading.Thread):
    """Polls a channel; keeps the versions that it saw, and fails of nothing that may pass."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.replica, self.seen, self.errors = Replica(url), [0], list[Exception]()
        self.stop = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stop.wait(0.02):
            try:
                self.seen.append(self.replica.sync())
            except TransientStoreError:
                continue
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.errors.append(error)

    def end_at(self, model: dict[str, torch.Tensor], version: int) -> None:
        """Wait for a version, and compare its bits."""
        wait_until(lambda: self.replica.version == version)
        self.stop.set()
        self.join(60)
        assert_same_bits(self.replica.state_dict(), model)
        assert self.seen == sorted(self.seen)


def test_thirty_versions_and_what_is_done_with_them(url: str, tmp_path: Path) -> None:
    model = weights()
    with Publisher(url, anchor_every=10, retention=Retention(compact_every=5)) as publisher:
        publisher.publish(model.items()).wait(60)
        follower = Follower(url)
        for seed in range(29):
            model = trained(model, seed)
            publisher.publish(model.items()).wait(60)
        follower.end_at(model, 30)
    assert not follower.errors
    reader = ChannelReader(open_store(url))
    assert ops.check(reader, read_data=True).problems == []
    copy = open_store(f"file://{tmp_path}/copy")
    assert ops.copy(reader, copy).problems == []
    ops.gc(reader, ops.KeepPolicy(last=3), grace_s=0)
    for store in (open_store(url), copy):
        assert_holds(store, model, 30)


def test_a_second_writer_and_one_that_was_killed(url: str, service: Service) -> None:
    model = weights()
    first = Publisher(url)
    first.publish(model.items()).wait(60)
    with Publisher(url, resume=True) as second:
        second.publish(model.items()).wait(60)
        with pytest.raises(FencedError):
            first.publish(trained(model, 1).items()).wait(60)
    other = f"{url}2"
    command = [sys.executable, "-c", _PUBLISHER, other]
    environ = {**os.environ, **service.env, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    replica = Replica(other)
    killed_at = replica.sync()
    with Publisher(other, resume=True) as publisher:
        receipt = publisher.publish(model.items())
        receipt.wait(60)
    assert receipt.version > killed_at >= 5
    assert replica.sync() == receipt.version
    assert_same_bits(replica.state_dict(), model)


def test_a_service_that_is_killed_and_comes_back(url: str, service: Service) -> None:
    model = weights()
    with Publisher(url, retry_delay_s=1.0) as publisher:
        publisher.publish(model.items()).wait(60)
        follower = Follower(url)
        time.sleep(5)  # Azurite writes what it knows to disk when it gets to it
        service.kill()
        model = trained(model, 1)
        receipt = publisher.publish(model.items())
        time.sleep(AWAY_S)
        service.start()
        try:
            receipt.wait(120)
        except (StoreError, PublishPendingError):
            model = trained(model, 2)
            receipt = publisher.publish(model.items())
            receipt.wait(120)
        follower.end_at(model, receipt.version)
    assert not follower.errors
