"""Which versions a replica takes: by itself, in a replica on the host, in the driver, in what trainers wait for."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from prometheus_client import CollectorRegistry

from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings, parse_pin
from deltasync.errors import AckTimeoutError, ConfigError, MissingVersionError
from deltasync.following import Cursor, Replica
from deltasync.stores import Store, open_store
from tests import driving
from tests.builders import trained
from tests.channels import made
from tests.conftest import assert_same_bits
from tests.driving import Engine, Trainer, following, serving
from tests.faults import FaultyStore

engine, registry, trainer = driving.engine, driving.registry, driving.trainer  # fixtures


@pytest.fixture
def store(channel_url: str) -> Store:
    return open_store(channel_url)


@pytest.mark.parametrize(("text", "pin"), [("newest", None), ("7", 7)])
def test_a_pin_is_read_and_said(text: str, pin: int | None) -> None:
    assert parse_pin(text) == pin
    assert ReplicaSettings(pin=text).pin == text


@pytest.mark.parametrize("text", ["", "0", "-1", "every 10", "2 behind", "7 ahead", "1" * 19, "\N{FULLWIDTH DIGIT SEVEN}"])
def test_what_is_no_pin_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="newest or a version"):
        parse_pin(text)
    with pytest.raises(ConfigError, match="newest or a version"):
        ReplicaSettings(pin=text)


def _settled(replica: Replica, pin: int | None) -> int:
    """The version at which polls find nothing more to take."""
    version = None
    while version != replica.poll(pin=pin):
        version = replica.version
    assert version is not None
    return version


def test_a_replica_goes_back_and_on_again(store: Store) -> None:
    channel = made(store, 6)
    replica = Replica(store)
    assert _settled(replica, None) == 6
    for pin, number in ((3, 3), (5, 5), (None, 6), (1, 1), (None, 6)):
        assert _settled(replica, pin) == number
        assert_same_bits(replica.state_dict(), channel.bits[replica.digest or ""])
    with pytest.raises(MissingVersionError, match="Version 7 is not published; the newest is version 6"):
        replica.poll(pin=7)
    assert replica.version == 6
    assert channel.tip is not None
    channel.delta(trained(channel.bits[channel.tip.sha256], 7))
    channel.head()
    assert replica.poll(pin=7) == 7  # at once, although it was not there before


def test_staying_at_a_version_costs_no_requests_between_looks(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    made(store, 4)
    cursor, pin = Cursor(ChannelReader(store)), 2
    have = cursor.next(None, pin=pin)[-1].version  # full weights, first
    have = cursor.next(have, pin=pin)[-1].version
    assert have.version == 2
    before = len(store.calls)
    for _ in range(10):
        assert cursor.next(have, pin=pin) == []
    assert len(store.calls) == before
    assert cursor.next(have, pin=pin, refresh=True) == [] and len(store.calls) > before


def test_another_version_of_the_pinned_number_is_noticed(store: Store) -> None:
    """As after a restored backup: version 3 was served, and is now another one."""
    channel = made(store, 2)
    base = channel.tip
    assert base is not None
    channel.delta(trained(channel.bits[base.sha256], 7))
    replica = Replica(store)
    assert replica.sync(3) == 3
    lost = replica.identity
    assert lost is not None
    store.delete(lost.key)
    channel.tip, channel.epoch = base, "000002-0000000a"
    channel.delta(trained(channel.bits[base.sha256], 8))
    another = channel.tip
    channel.delta(trained(channel.bits[another.sha256], 9))
    channel.head()
    assert replica.sync(3) == 3
    assert replica.identity == another != lost
    assert_same_bits(replica.state_dict(), channel.bits[another.sha256])


def test_a_server_is_pinned_while_it_follows(
    engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry
) -> None:
    async def body() -> None:
        bits = {}
        for _ in range(4):
            version = trainer.publish()
            bits[version] = trainer.weights["w"].clone()
        async with following(engine, memory_url, registry, pin="2") as driver:
            assert await driver.reach(2) == 2
            assert torch.equal(engine.model.w, bits[2])
            assert (driver.not_ready, driver.status(0).pin, engine.weight_version) == (None, "2", "2")
            for where, version in (("4", 4), ("1", 1), ("3", 3), ("newest", 4)):
                driver.set_pin(parse_pin(where))
                await driver.reach(None)
                assert (driver.version, engine.weight_version) == (version, str(version))
                assert torch.equal(engine.model.w, bits[version]) and driver.not_ready is None
            assert driver.status(0).pin is None

    asyncio.run(body())


def test_the_route_pins_and_answers_when_it_is_served(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        trainer.publish()
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert client.post("/deltasync/sync").json()["version"] == 3
        assert client.post("/deltasync/pin", json={"pin": "1"}).json()["version"] == 1
        assert client.get("/deltasync/status").json()["pin"] == "1"
        late = client.post("/deltasync/sync", json={"version": 3, "timeout_s": 0.2})
        assert late.status_code == 409
        assert late.json()["error"] == "This replica is pinned to version 1 and will not serve version 3."
        before = time.monotonic()
        wrong = client.post("/deltasync/pin", json={"pin": "99", "timeout_s": 60})
        assert wrong.status_code == 409 and "Version 99 is not in" in wrong.json()["error"]
        assert "The pin stays: 1." in wrong.json()["error"] and time.monotonic() - before < 30
        assert client.get("/deltasync/status").json()["pin"] == "1"
        for body in ({"pin": "7 ahead"}, {"pin": 1}, {}, {"pin": "1", "version": 2}):
            assert client.post("/deltasync/pin", json=body).status_code == 422
        assert client.post("/deltasync/pin", json={"pin": "newest"}).json()["version"] == 3
        assert client.get("/deltasync/status").json()["pin"] is None


def test_nobody_waits_for_a_pinned_replica(store: Store) -> None:
    channel = made(store, 3)
    assert channel.tip is not None
    run_id, tip = ChannelReader(store).run_id or "", channel.tip
    published = {tip.version: tip.sha256}

    def beat(name: str, version: int, pin: str | None) -> None:
        heartbeat.write(
            store,
            Heartbeat(
                replica_id=name, run_id=run_id, version=version, epoch=tip.epoch, sha256=tip.sha256, state="serving", pin=pin
            ),
        )

    beat("evaluation", 1, "1")
    with pytest.raises(AckTimeoutError, match=r"no replica is live\. Last heard of: evaluation \(\d+ s ago, pinned: 1\)"):
        heartbeat.wait_for(store, run_id, tip.version, published, 0.0)
    beat("serving", tip.version, None)
    (found,) = heartbeat.wait_for(store, run_id, tip.version, published, 5.0)
    assert found.replica_id == "serving"
