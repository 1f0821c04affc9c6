"""Pins: their text and their requests. tests/contract/target_contract.py has which versions they lead to."""

from __future__ import annotations

import pytest

from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings, parse_pin
from deltasync.errors import ConfigError
from deltasync.following import Cursor
from deltasync.stores import open_store
from tests.channels import made
from tests.faults import FaultyStore


@pytest.mark.parametrize(("text", "pin"), [("newest", None), ("7", 7)])
def test_a_pin_is_read_and_said(text: str, pin: int | None) -> None:
    assert parse_pin(text) == pin
    assert ReplicaSettings(pin=text).pin == text


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "every 10", "2 behind", "7 ahead", "1" * 19, "\N{FULLWIDTH DIGIT SEVEN}"]
)
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
