from __future__ import annotations

import logging

import pytest
import torch

from deltasync import Publisher, open_store
from deltasync.errors import PublishError, StoreError, TransientStoreError
from tests.faults import FOREVER, FaultyStore
from trl_callback import patience
from trl_callback.patience import PatientStore


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


def publish(publisher: Publisher, store: PatientStore, value: float) -> float:
    receipt = publisher.publish([("w", torch.full((8,), value))])
    store.expect(receipt)
    return receipt.held_s


def test_while_a_version_waits_encoding_takes_a_twentieth_of_the_time(
    faulty: FaultyStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store = PatientStore(faulty)
    with Publisher(store) as publisher:
        publish(publisher, store, 0.0)
        publisher.flush()
        assert not store.is_behind()
        gate = faulty.hold_at("create", "versions/")
        publish(publisher, store, 1.0)
        assert gate.entered.wait(60)
        assert not store.is_behind()  # nothing waits yet
        for value in (2.0, 3.0):
            held_s = publish(publisher, store, value)
            assert store.is_behind()
            clock.now += 19.9 * held_s
            assert store.is_behind()
            clock.now += 0.2 * held_s
            assert not store.is_behind()
        assert publisher.version == 3

        clock.now += 60.0
        with caplog.at_level(logging.WARNING, logger="trl_callback"):
            store.is_behind()
            store.is_behind()
            faulty.heal()
            publisher.flush()
            assert not store.is_behind()
        first, second = (
            record.getMessage() for record in caplog.records if record.name.startswith("trl_callback")
        )
        assert "has not stored version 2 for" in first
        assert "has stored all versions" in second


def test_what_cannot_be_stored_is_not_encoded_anew_each_step(faulty: FaultyStore, clock: Clock) -> None:
    store = PatientStore(faulty)
    publisher = Publisher(store)
    faulty.fail_at("create", times=FOREVER, error=StoreError)
    held_s = publish(publisher, store, 0.0)
    with pytest.raises(PublishError):
        publisher.flush()
    assert store.is_behind()
    clock.now += 21 * held_s
    assert not store.is_behind()
    faulty.heal()
    publish(publisher, store, 1.0)
    publisher.close()
    assert not store.is_behind()


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
