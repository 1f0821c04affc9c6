"""Parts that are fetched before their record: when, how often, and what is used of them."""

from __future__ import annotations

import math
import threading
import time
import types
from concurrent.futures import Future

import pytest

from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.following import Replica
from deltasync.stores import open_store
from tests.builders import trained
from tests.channels import EPOCH, Made, made
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore
from tests.waiting import wait_until


def _holds(replica: Replica, channel: Made) -> None:
    assert replica.digest is not None
    assert_same_bits(replica.state_dict(), channel.bits[replica.digest])


@pytest.mark.parametrize("under_way", [False, True])
def test_parts_are_fetched_before_their_record(
    memory_url: str, under_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.following.poll._EARLY", 0.0)
    monkeypatch.setattr("deltasync.following.poll._LATE", math.inf)
    store = FaultyStore(open_store(memory_url))
    channel = made(store, 2)
    reader = ChannelReader(store)
    replica = Replica(reader)
    replica.sync()
    for seed in (50, 51):  # the next version may have parts if the last one had
        channel.delta(trained(channel.bits[channel.tip.sha256], seed), parts=2)
        replica.sync()
    folder, came = keys.parts_folder(5, EPOCH), list[bytes]()
    parts = [f"{folder}/{keys.part(0, number)}" for number in (1, 2)]
    gate = store.hold_at("read", parts[-1])
    if not under_way:
        gate.opened.set()
    store.tamper(folder, lambda data: came.append(data) or data)
    last = channel.delta(trained(channel.bits[channel.tip.sha256], 52), parts=2)
    assert [file.key for file in last.record.payload_files] == parts
    record = store.read(last.key, 1 << 20)
    store.delete(last.key)
    # The last part may have been asked for once already, just before it was stored.
    wait_until(lambda: replica.sync() and set(parts) <= reader.prefetched.keys())
    store.put(last.key, record)
    threading.Timer(0.2, gate.opened.set).start()
    assert replica.sync() == 5
    _holds(replica, channel)
    assert [came.count(store.inner.read(key, 1 << 20)) for key in parts] == [1, 1]
    assert len(came) == 2, "none is fetched again"


def test_parts_are_asked_for_when_they_are_due_and_only_so_often(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now_s, sleep=sleep)
    monkeypatch.setattr("deltasync.following.poll.time", clock)
    store = FaultyStore(open_store(memory_url))
    channel = made(store, 2)
    replica = Replica(store)
    replica.sync()
    for seed in (50, 51):
        channel.delta(trained(channel.bits[channel.tip.sha256], seed), parts=3)
        replica.poll()
        now_s += 10.0
    last = channel.delta(trained(channel.bits[channel.tip.sha256], 52), parts=3)
    names = [file.key for file in last.record.payload_files]
    data = {key: store.read(key, 1 << 20) for key in (*names, last.key)}
    store.delete(*data)
    prefetch = replica._follow.cursor._prefetch
    assert prefetch is not None

    def asked(at_s: float) -> list[int]:
        """How often each part was read in one poll at a time after the last version."""
        nonlocal now_s
        now_s = 110.0 + at_s
        store.calls.clear()
        replica.poll()
        while not all(future.done() for future in prefetch._running):
            time.sleep(0.001)
        return [store.calls.count(("read", key)) for key in names]

    assert [asked(at_s) for at_s in (0.1, 2.0, 6.9)] == [[0, 0, 0]] * 3
    assert [asked(at_s) for at_s in (7.1, 10.0, 29.9)] == [[1, 0, 0]] * 3
    assert asked(30.1) == [0, 0, 0]
    for key in (names[0], names[2]):
        store.put(key, data[key])
    first, second, third = asked(9.0)
    assert (first, third) == (1, 1) and 1 < second <= 8
    assert asked(12.0) == [0, 1, 0]
    store.put(names[1], data[names[1]])
    store.put(last.key, data[last.key])
    assert asked(13.0) == [0, 1, 0]
    assert replica.version == 5
    _holds(replica, channel)


def test_a_part_that_was_fetched_too_early_is_fetched_again_if_it_is_another(memory_url: str) -> None:
    store = open_store(memory_url)
    channel = made(store, 2)
    reader = ChannelReader(store)
    last = channel.delta(trained(channel.bits[channel.tip.sha256], 52), parts=1)
    held = reader.prefetched[last.record.payload_files[0].key] = Future[bytes]()
    held.set_result(b"left by somebody else")
    replica = Replica(reader)
    replica.sync()
    _holds(replica, channel)
