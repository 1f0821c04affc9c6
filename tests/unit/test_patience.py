from __future__ import annotations

import logging

import pytest
import torch

from deltasync import Publisher, open_store
from deltasync.errors import PublishError, StoreError, TransientStoreError
from tests.faults import FOREVER, FaultyStore
from trl_callback import patience
from trl_callback.patience import Backlog, PatientStore


@pytest.fixture
def faulty(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock.now)
    return clock


def publish(publisher: Publisher, backlog: Backlog, value: float) -> float:
    receipt = publisher.publish([("w", torch.full((8,), value))])
    backlog.add(receipt)
    return receipt.held_s


def test_while_a_version_waits_encoding_takes_a_twentieth_of_the_time(
    faulty: FaultyStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = PatientStore(faulty)
    backlog = Backlog(store)
    with Publisher(store) as publisher:
        publish(publisher, backlog, 0.0)
        publisher.flush()
        assert not backlog.is_full()
        gate = faulty.hold_at("create", "versions/")
        publish(publisher, backlog, 1.0)
        assert gate.entered.wait(60)
        assert not backlog.is_full()  # nothing waits yet
        for value in (2.0, 3.0):
            held_s = publish(publisher, backlog, value)
            assert backlog.is_full()
            clock.now += 19.9 * held_s
            assert backlog.is_full()
            clock.now += 0.2 * held_s
            assert not backlog.is_full()
        assert publisher.version == 3

        clock.now += 60.0
        with caplog.at_level(logging.WARNING, logger="trl_callback"):
            backlog.is_full()
            backlog.is_full()
            faulty.heal()
            publisher.flush()
            assert not backlog.is_full()
        first, second = (record.getMessage() for record in caplog.records if record.name.startswith("trl_callback"))
        assert "has not stored version 2 for" in first
        assert "has stored all versions" in second


def test_what_cannot_be_stored_is_not_encoded_anew_each_step(faulty: FaultyStore, clock: Clock) -> None:
    store = PatientStore(faulty)
    backlog = Backlog(store)
    publisher = Publisher(store)
    faulty.fail_at("create", times=FOREVER, error=StoreError)
    held_s = publish(publisher, backlog, 0.0)
    with pytest.raises(PublishError):
        publisher.flush()
    assert backlog.is_full()
    clock.now += 21 * held_s
    assert not backlog.is_full()
    faulty.heal()
    publish(publisher, backlog, 1.0)
    publisher.close()
    assert not backlog.is_full()


def test_a_store_remembers_its_trouble_and_can_be_given_up(faulty: FaultyStore) -> None:
    store = PatientStore(faulty)
    faulty.fail_at("create", error=TransientStoreError)
    with pytest.raises(TransientStoreError):
        store.create("a", b"1")
    assert isinstance(store.trouble, TransientStoreError)
    store.create("a", b"1")
    assert store.trouble is None
    assert store.read("a", 1 << 30) == b"1"
    assert [info.key for info in store.list("")] == ["a"]
    store.give_up()
    with pytest.raises(StoreError, match="was given up"):
        store.read("a", 1 << 30)
