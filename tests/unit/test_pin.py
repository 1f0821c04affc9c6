"""Pins: their text, their requests, their route. tests/contract/target_contract.py has which versions they lead to."""

from __future__ import annotations

import time

import pytest

from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings, parse_pin
from deltasync.errors import ConfigError
from deltasync.following import Cursor
from deltasync.stores import Store, open_store
from tests import driving
from tests.channels import made
from tests.driving import Engine, Trainer, serving
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
