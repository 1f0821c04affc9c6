"""Channels in a bucket of the Hub: told of changes, followed by another process, and what faults do to
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from deltasync import Publisher, Replica, follow
from deltasync.channel import keys
from deltasync.clouds.hub import HubStore
from deltasync.errors import DeltaSyncError, NotPublishedError, TransientStoreError
from deltasync.following import Poll
from deltasync.following.status import Status
from deltasync.serve import heartbeat
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.life import Life
from tests.builders import in_parts
from tests.conftest import assert_same_bits
from tests.contract import test_hub_watch
from tests.contract.test_hub_watch import Told
from tests.hub.fixtures import LEASE, ROOT, HubServer, running_server
from tests.waiting import wait_until

store = test_hub_watch.store


@pytest.fixture(autouse=True)
def short_leases() -> Iterator[None]:
    """Publishers wait for two seconds instead of thirty."""
    with mock.patch("deltasync.opening.acquire.LeasedStore", LEASE):
        yield


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: a hundred elements differ from those of the one before."""
    weights = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number in range(2, version + 1):
        index = torch.randint(100_000, (100,), generator=torch.Generator().manual_seed(number))
        weights.view(torch.int16).view(-1)[index] ^= 1
    return {"a": weights[0].reshape(100, 500), "b": weights[1].reshape(50, 1000)}


class TestChannel:
    def test_publishing_goes_on_after_a_fault_of_each_request(
        self, hub_channel: HubStore, hub: HubServer
    ) -> None:
        with Publisher(hub_channel, retry_delay_s=0.01) as publisher:
            publisher.publish(weights_of(1).items()).wait(60)
            for version, step in enumerate(("batch", "write_token", "xorb", "shard", "resolve"), start=2):
                hub.arm(step, times=4, status=503)
                hub.arm(step, times=2, reset=True, after=True)
                publisher.publish(weights_of(version).items()).wait(60)
                hub.reset()
        replica = Replica(hub_channel)
        for version in range(1, 7):
            assert replica.sync(version) == version
            assert_same_bits(replica.state_dict(), weights_of(version))

    def test_a_flipped_bit_anywhere_is_found_and_the_version_before_stays(
        self, hub_channel: HubStore, hub: HubServer
    ) -> None:
        with in_parts(), Publisher(hub_channel) as publisher:
            for version in (1, 2):
                publisher.publish(weights_of(version).items()).wait(60)
        struck = 0
        for download in range(4):  # record, part, head, whatever else
            hub.reset()
            replica = Replica(HubStore(hub_channel.url))
            replica.sync(1)
            before = hub.requests().get("data", 0)
            hub.arm("data", skip=download, flip=True)
            with contextlib.suppress(DeltaSyncError):  # or it is read again
                replica.sync()
            struck += hub.requests().get("data", 0) > before + download
            if replica.version == 1:
                assert_same_bits(replica.state_dict(), weights_of(1))
                replica.sync()
            assert_same_bits(replica.state_dict(), weights_of(2))
        assert struck

    def test_a_hub_that_goes_away(self, monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
        monkeypatch.setattr("deltasync.clouds.hub._RETRY_DELAY_S", 0.01)
        with running_server() as server:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
            store = HubStore("hf://buckets/user/gone/run")
            with Publisher(store) as publisher:
                publisher.publish(weights_of(1).items()).wait(60)
            replica = Replica(store)
            replica.sync()
            told = Told(store, keys.VERSIONS)
            wait_until(lambda: told.watch.live)
        with pytest.raises(TransientStoreError):
            replica.sync()
        assert_same_bits(replica.state_dict(), weights_of(1))
        wait_until(lambda: not told.watch.live)
        told.watch.close()

    def test_a_replica_follows_another_process_by_being_told(self, hub: HubServer, store: HubStore) -> None:
        """A version every 30 ms at most; the replica may skip some, and has the right bits of each that it
        takes.
        """
        store.delete(keys.HEAD)  # which made the bucket
        changed, replica, taken = threading.Event(), Replica(store), set()
        watch = store.watch(keys.VERSIONS, lambda _: changed.set())
        assert watch is not None
        wait_until(lambda: watch.live)
        command = [sys.executable, "-W", "error", "-c", _PUBLISH, store.url]
        with subprocess.Popen(command, cwd=ROOT, env=hub.env, stdout=subprocess.PIPE, text=True) as process:
            try:
                while replica.version != 12:
                    assert changed.wait(60), "not told"
                    changed.clear()
                    try:
                        version = replica.sync()
                    except NotPublishedError:
                        continue
                    taken.add(version)
                    assert_same_bits(replica.state_dict(), weights_of(version))
                assert process.wait(30) == 0
            finally:
                process.kill()
                watch.close()
            assert process.stdout is not None
            printed = process.stdout.read().split()
        live = b"".join(
            tensor.view(torch.uint8).numpy().tobytes() for tensor in replica.state_dict().values()
        )
        assert printed == [hashlib.sha256(live).hexdigest()]
        assert len(taken) > 1


_PUBLISH = """
import hashlib, sys, time, torch
from unittest import mock
from deltasync import Publisher
from deltasync.clouds.hub import HubStore
from tests.integration.test_hub_faults import weights_of
from tests.hub.fixtures import LEASE
with mock.patch("deltasync.opening.acquire.LeasedStore", LEASE), Publisher(HubStore(sys.argv[1])) as publisher:
    for version in range(1, 13):
        publisher.publish(weights_of(version).items()).wait(60)
        time.sleep(0.03)
print(hashlib.sha256(b"".join(t.view(torch.uint8).numpy().tobytes() for t in weights_of(12).values())).hexdigest())
"""


class Module(torch.nn.Module):
    """The model of `weights_of`."""

    def __init__(self) -> None:
        super().__init__()
        for name, weight in weights_of(1).items():
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=False))


class TestQuota:
    def test_a_replica_that_is_told_of_versions_asks_for_one_and_a_half_paths_a_version_at_most(
        self, hub_channel: HubStore, hub_url: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DELTASYNC_REPLICA_ID", "r")
        versions = 8
        with Publisher(hub_channel) as publisher:
            publisher.publish(weights_of(1).items()).wait(60)
            with follow(Module(), hub_url) as following:
                following.wait(1)
                wait_until(lambda: following._follow._poll.is_pushed)
                time.sleep(1.0)  # what connecting and the first heartbeat take
                hub.reset()
                hub.set(log=True)
                for version in range(2, versions + 2):
                    publisher.publish(weights_of(version).items()).wait(60)
                    wait_until(lambda: following.version == version)  # noqa: B023
                    time.sleep(0.3)  # until its heartbeat is there
                asked = [entry[3] for entry in hub.ask("GET", "/_log") if entry[1] == "resolve"]
        # The publisher reads head, which replicas read only now and then, and looks once at each slot. A
        # heartbeat's writer looks at the last one first.
        resolved = sum("head.json" not in path for path in asked) - versions
        assert versions <= resolved <= 1.5 * versions, asked

    def test_little_is_left_for_what_can_wait(self, hub_channel: HubStore, hub: HubServer) -> None:
        hub_channel.put(keys.CHANNEL, b"{}")
        assert not hub_channel.is_scarce
        hub.set(limits={"api": 40, "resolvers": 100}, window_s=3600.0)
        writer = HeartbeatWriter(hub_channel, 0.01, Life())
        sent = 0
        while not hub_channel.is_scarce:
            writer.update(Status(replica_id="r", channel=hub_channel.url, state="serving", version=sent + 1))
            sent += 1
            time.sleep(0.05)
            assert sent < 5_000
        left = [beat for beat in range(20) if hub_channel.is_scarce and _told(writer, hub_channel, beat)]
        with Poll(0.05).watching(hub_channel, lambda _: None) as poll:
            assert not left and poll.delay_s(moved=False) >= 9.0
        hub_channel.put("head.json", b"1")  # what cannot wait has a quarter of the quota
        hub.set(limits={"api": 1000, "resolvers": 1000})  # and in the next window there is enough of it
        hub_channel.put("head.json", b"2")
        assert not hub_channel.is_scarce
        assert _told(writer, hub_channel, 30)
        writer.stop(Status(replica_id="r", channel=hub_channel.url, state=heartbeat.STOPPED))


def _told(writer: HeartbeatWriter, store: HubStore, state: int) -> bool:
    """Whether a heartbeat of a new state is written."""
    before = writer._last
    writer.update(Status(replica_id="r", channel=store.url, state=f"state {state}"))
    return writer._last != before
