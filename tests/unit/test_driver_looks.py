"""How the driver asks its store, and what it does about answers that are wrong, other than expected, or
missing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from deltasync import limits, open_store
from deltasync.channel import keys
from deltasync.config import ReplicaSettings
from deltasync.errors import StoreError
from deltasync.serve import heartbeat
from deltasync.serve.metrics import Metrics
from tests import driving
from tests.driving import PATIENCE_S, Driver, Engine, Trainer, serving, until
from tests.faults import FaultyStore, flipped

engine = driving.engine  # a fixture

Scene = Callable[[Driver], Coroutine[Any, Any, None]]


@pytest.fixture
def store(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """The store of driver, worker and trainer."""
    store = FaultyStore(open_store(memory_url))
    monkeypatch.setattr("deltasync.serve.engine.open_failover", lambda _: store)
    yield store
    store.heal()


@pytest.fixture
def trainer(store: FaultyStore) -> Trainer:
    return Trainer(store)


def play(engine: Engine, url: str, scene: Scene, **settings: Any) -> None:
    """A scene with a driver that looks only when it is told to."""

    async def body() -> None:
        chosen = ReplicaSettings(channel=url, replica_id="unit", **settings)
        driver = engine.driver = Driver(engine, chosen, Metrics(CollectorRegistry()))
        async with asyncio.timeout(PATIENCE_S):
            await scene(driver)

    asyncio.run(body())


async def follow(driver: Driver) -> None:
    """Look until there is nothing to take."""
    while True:
        await driver.refresh()
        if driver.caught_up:
            return


def served(engine: Engine, driver: Driver, trainer: Trainer) -> bool:
    """Whether the newest version is served with its bits."""
    tip = trainer.channel.tip
    assert tip is not None
    bits = trainer.channel.bits[tip.sha256]["w"]
    return driver.identity == tip and torch.equal(engine.model.w.view(torch.int16), bits.view(torch.int16))


def damage(store: FaultyStore, key: str) -> None:
    store.put(key, flipped(store.read(key, 1 << 30)))


def test_a_version_costs_one_request_of_driver_and_worker_together(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    async def scene(driver: Driver) -> None:
        await follow(driver)
        for number in (2, 3, 4):
            trainer.publish()
            store.calls.clear()
            await driver.refresh()
            assert driver.version == number
            assert trainer.channel.tip is not None
            assert store.calls == [("read", trainer.channel.tip.key)]
            assert served(engine, driver, trainer)
            store.calls.clear()
            await driver.refresh()
            assert store.calls == [("read", keys.slot(number + 1, trainer.channel.epoch))]

    trainer.publish()
    play(engine, memory_url, scene)


def test_records_that_are_too_many_to_hand_over_are_read_by_the_worker(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDED_BYTES", 10)

    async def scene(driver: Driver) -> None:
        await follow(driver)
        trainer.publish()
        store.calls.clear()
        await driver.refresh()
        assert trainer.channel.tip is not None
        assert store.calls == [("read", trainer.channel.tip.key)] * 2
        assert served(engine, driver, trainer)

    trainer.publish()
    play(engine, memory_url, scene)


def test_another_version_of_the_same_number_is_noticed_and_told_apart(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    """A store went back to a backup, and another trainer goes on from there."""

    async def scene(driver: Driver) -> None:
        await follow(driver)
        assert served(engine, driver, trainer)
        assert engine.weight_version == "3"
        channel, lost = trainer.channel, trainer.channel.tip
        assert lost is not None
        store.delete(lost.key)
        channel.tip, channel.epoch = at_2, "000002-0000000a"
        trainer.weights = {name: tensor.clone() for name, tensor in channel.bits[at_2.sha256].items()}
        trainer.weights["w"].view(torch.int16)[7] -= 3
        assert trainer.publish() == 3
        driver.cursor._search.due_s = 0.0  # the next of its looks now and then
        await follow(driver)
        assert served(engine, driver, trainer)
        assert driver.identity != lost and driver.version == 3
        assert driver.status(0).sha256 == channel.tip.sha256
        assert engine.weight_version == f"3-{channel.tip.sha256[:12]}"
        assert driver.commits[-1].anchor
        trainer.publish()
        await follow(driver)
        assert served(engine, driver, trainer)
        assert engine.weight_version == "4"

    trainer.publish()
    trainer.publish()
    at_2 = trainer.channel.tip
    assert at_2 is not None
    trainer.publish()
    play(engine, memory_url, scene)


def test_a_fault_of_the_memory_is_not_taken_for_one_of_the_version(
    engine: Engine, trainer: Trainer, memory_url: str
) -> None:
    async def scene(driver: Driver) -> None:
        await follow(driver)
        engine.model.w.view(torch.int16)[30, 5] ^= 1
        # as if it had flipped after the fingerprint was taken
        engine.worker._deltasync_shard.weights.memory.audit()
        trainer.publish()
        await driver.refresh()
        assert "FingerprintMismatchError" in driver.status(0).error
        await follow(driver)
        assert served(engine, driver, trainer)
        assert not driver.cursor.skips.by_key

    trainer.publish()
    play(engine, memory_url, scene)


def test_a_server_that_has_not_looked_for_long_is_stale(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    async def scene(driver: Driver) -> None:
        await follow(driver)
        status = driver.status(0)
        assert (status.state, driver.not_ready) == ("serving", None)
        assert 0 <= status.followed_s_ago < 5
        for prefix in (keys.VERSIONS, keys.HEAD):
            store.fail_at("read", prefix, times=1000)
        await driver.refresh()
        assert driver.status(0).state == "failed"
        assert driver.not_ready is None, "a short outage"
        driver.health.good_s -= 100
        status = driver.status(0)
        assert (status.state, status.version, status.newest_version) == ("stale", 1, 1)
        assert status.followed_s_ago > 100
        assert status.error.startswith("The channel could last be followed 100 s ago. TransientStoreError")
        assert driver.not_ready is None, "it is the store's fault, which all replicas share"
        driver.health.settings = dataclasses.replace(driver.health.settings, ready_in_outage=False)
        assert driver.not_ready == status.error
        driver._heartbeats.update(driver.status(0))
        await until(lambda: list(store.inner.list(keys.REPLICAS)))
        (beat,) = heartbeat.read_all(store.inner, "run")
        assert (beat.state, beat.serving) == ("stale", trainer.channel.tip)
        store.heal()
        await driver.refresh()
        assert (driver.status(0).state, driver.not_ready) == ("serving", None)

    trainer.publish()
    play(engine, memory_url, scene)


def test_a_replica_whose_credentials_have_ended_is_not_ready(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    async def scene(driver: Driver) -> None:
        await follow(driver)
        for prefix in (keys.VERSIONS, keys.HEAD):
            store.fail_at("read", prefix, times=1000, error=StoreError)
        await driver.refresh()
        driver.health.good_s -= 100
        assert driver.health.settings.ready_in_outage
        assert driver.not_ready is not None and driver.not_ready == driver.status(0).error

    trainer.publish()
    play(engine, memory_url, scene)


@pytest.mark.parametrize(("interval_s", "stale"), [(1.0, True), (10.0, False)])
def test_who_polls_rarely_is_stale_later(
    engine: Engine, trainer: Trainer, memory_url: str, interval_s: float, stale: bool
) -> None:
    async def scene(driver: Driver) -> None:
        await follow(driver)
        driver.health.good_s -= 100
        assert (driver.status(0).state == "stale") is stale

    trainer.publish()
    play(engine, memory_url, scene, poll_interval_s=interval_s)


def test_a_store_that_hangs_from_the_beginning_is_seen_in_the_metrics(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    """Nothing was ever followed: no error is counted, and no version can be behind."""
    registry = CollectorRegistry()

    async def body() -> None:
        store.hold_at("read")
        store.hold_at("list")
        async with driving.following(engine, memory_url, registry) as driver:
            driver.health.good_s -= 100
            driver._observer.followed(driver)  # as the server does each second
            assert driving.value(registry, "deltasync_seconds_since_followed") > 100
            assert (driver.status(0).followed_s_ago, driver.version) == (None, None)
            assert "serves no version" in (driver.not_ready or "")
            store.heal()
            assert await driver.reach(1) == 1
            # the step that reached it still reports
            while (ago_s := driver.status(0).followed_s_ago) is None:
                await asyncio.sleep(0.01)
            assert ago_s < 100

    trainer.publish()
    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_a_heartbeat_without_a_thread_stops_nothing(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has no thread left when the first heartbeat is due."""
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name == "deltasync-heartbeat":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", full)
            async with driving.following(engine, memory_url, CollectorRegistry()) as driver:
                for version in (1, 2):
                    trainer.publish()
                    assert await driver.reach(version) == version
                patch.undo()
                trainer.publish()
                assert await driver.reach(3) == 3
                await until(lambda: [beat.version for beat in heartbeat.read_all(store.inner, "run")] == [3])

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_a_heartbeat_that_hangs_does_not_keep_following_waiting(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    async def body() -> None:
        store.hold_at("put", keys.REPLICAS)
        async with driving.following(engine, memory_url, CollectorRegistry()) as driver:
            for version in (1, 2, 3):
                trainer.publish()
                assert await driver.reach(version) == version
        store.heal()
        beats = [("stopped", 3)]
        await until(lambda: [(b.state, b.version) for b in heartbeat.read_all(store.inner, "run")] == beats)

    asyncio.run(asyncio.wait_for(body(), PATIENCE_S))


def test_status_of_a_server_whose_store_hangs_is_answered(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        trainer.publish()
        assert client.post("/deltasync/sync").json()["version"] == 1
        store.hold_at("read")
        store.hold_at("list")
        before = client.get("/deltasync/status").json()["followed_s_ago"]
        time.sleep(0.3)
        status = client.get("/deltasync/status").json()
        assert status["version"] == 1
        assert status["followed_s_ago"] > 0.2 or before > 0.2
        late = client.post("/deltasync/sync", json={"timeout_s": 0.2})
        assert late.status_code == 504
        store.heal()


def test_a_store_that_hangs_keeps_no_server_from_its_end(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.following.follow._STOP_S", 0.2)
    monkeypatch.setattr("deltasync.serve.heartbeats._LAST_S", 0.2)
    trainer.publish()
    with serving(engine, monkeypatch, CHANNEL=memory_url) as client:
        assert client.post("/deltasync/sync").json()["version"] == 1
        gates = [store.hold_at("read"), store.hold_at("list")]
        for _ in range(6):
            late = client.post("/deltasync/pin", json={"pin": "2", "timeout_s": 0.1})
            assert late.status_code == 504 and "The pin stays: newest." in late.json()["error"]
        # else a failure would never end
        opens = threading.Timer(300, lambda: [gate.opened.set() for gate in gates])
        opens.start()
    assert not any(gate.opened.is_set() for gate in gates)
    opens.cancel()
    store.heal()


def test_callers_cost_no_requests_of_their_own(
    engine: Engine, trainer: Trainer, store: FaultyStore, memory_url: str
) -> None:
    async def scene(driver: Driver) -> None:
        await follow(driver)
        callers = [asyncio.create_task(driver.reach(None)) for _ in range(64)]
        await asyncio.sleep(0)
        trainer.publish()
        store.calls.clear()
        await driver.refresh()
        assert not any(caller.done() for caller in callers), "there may be a newer one"
        await driver.refresh()
        assert [await caller for caller in callers] == [2] * 64
        assert len(store.calls) == 4, "head and two slots at once, then a slot"

    trainer.publish()
    play(engine, memory_url, scene)
