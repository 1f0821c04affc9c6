"""Which codec a delta takes where the publisher chooses."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.publish.encode import Choice, Cost
from deltasync.publish.writes import MeteredStore
from deltasync.stores.wrapper import WrappedStore
from tests.conftest import assert_same_bits

PACKED, CONTEXT = Cost(1000, 1230, 2e-5, 2e-5, 1e-5), Cost(1000, 865, 6e-5, 9e-5, 6e-5)
"""About what they take for a thousand changed elements."""


class Line(WrappedStore):
    """A store at the end of a line, by a clock that nothing else moves: 50 ms for each object, 1 MB/s."""

    now_s = 0.0

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        self.inner.put(key, data, guard=guard)
        self.now_s += 0.05 + len(data) / 1e6


@pytest.fixture
def line(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> Line:
    made = Line(open_store(memory_url))
    monkeypatch.setattr(time, "perf_counter", lambda: made.now_s)
    return made


def test_the_link_is_timed_without_what_any_object_takes(line: Line) -> None:
    store = MeteredStore(line)
    store.put("head", b"h" * 100)
    assert store.byte_s is None
    store.put("part", bytes(1 << 20))
    assert store.byte_s == pytest.approx(1e-6, rel=0.01)


def test_what_failed_says_nothing_of_the_link(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MeteredStore(line)
    with monkeypatch.context() as patch:
        patch.setattr(Line, "put", lambda *_, **__: 1 / 0)  # at once, as when a connection is refused
        for size in (100, 1 << 20):
            with pytest.raises(ZeroDivisionError):
                store.put("part", bytes(size))
    assert store.byte_s is None
    store.put("head", b"h" * 100)
    store.put("part", bytes(1 << 20))
    assert store.byte_s == pytest.approx(1e-6, rel=0.01)


def test_objects_that_are_put_at_the_same_time_share_the_link(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, now_s = Barrier(4), [0.0]

    class Shared(WrappedStore):
        def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
            together.wait(30)  # all have begun
            now_s[0] = 4.0
            together.wait(30)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    store = MeteredStore(Shared(open_store(memory_url)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.put(f"p{number}", bytes(1_000_000)), range(4)))
    assert store.byte_s == pytest.approx(1e-6)


@pytest.mark.parametrize(("byte_s", "wanted"), [(1e-6, "context"), (1e-10, "packed")])
@pytest.mark.parametrize("groups", [1, 8])
def test_the_codec_is_the_one_that_is_served_sooner(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, byte_s: float, wanted: str, groups: int
) -> None:
    monkeypatch.setattr(MeteredStore, "byte_s", byte_s)
    choice = Choice("auto", MeteredStore(open_store(memory_url)))
    choice.groups = groups
    assert choice.best() == "packed"
    choice.took("context", CONTEXT)
    assert choice.best() == "packed"  # of which nothing is known
    choice.took("packed", PACKED)
    choice.took(wanted, Cost(1000, 1000, 9.0, 9.0, 9.0))  # while a kernel was compiled
    assert choice.best() == wanted


def test_proving_a_group_while_it_is_stored_costs_nothing(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 151 M elements over 30 Mbit/s: `context` was served after 0.94 s, `packed` after 1.17 s.
    monkeypatch.setattr(MeteredStore, "byte_s", 8 / 30e6)
    choice = Choice("auto", MeteredStore(open_store(memory_url)))
    choice.took("packed", Cost(1_615_000, 1_987_000, 0.045, 0.06, 0.05))
    choice.took("context", Cost(1_615_000, 1_410_000, 0.085, 0.25, 0.1))
    assert choice.best() == "context"


def test_without_a_large_object_nothing_is_known_of_the_link(line: Line) -> None:
    choice = Choice("auto", MeteredStore(line))
    choice.took("packed", PACKED)
    choice.took("context", CONTEXT)
    assert choice.best() == "packed"


def test_the_other_codec_is_tried_with_the_first_versions_and_with_every_fiftieth(line: Line) -> None:
    choice = Choice("auto", MeteredStore(line))
    tried = []
    for version in range(2, 102):
        for name in choice.probes(version):
            choice.took(name, CONTEXT)
            tried.append((version, name))
        choice.took(choice.best(), PACKED)
    assert tried == [(version, "context") for version in (2, 3, 4, 50, 100)]


@pytest.mark.parametrize("setting", ["packed", "context", "raw"])
def test_a_codec_that_was_named_is_the_only_one(line: Line, setting: str) -> None:
    choice = Choice(setting, MeteredStore(line))
    choice.took(setting, PACKED)
    assert choice.codecs == (choice.best(),) == (setting,)
    assert not choice.probes(50)


def test_ranks_of_a_sharded_trainer_stay_at_packed() -> None:
    assert Choice("auto", None).codecs == ("packed",)


def test_versions_change_their_codec_and_replicas_have_the_bits(memory_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeteredStore, "byte_s", 1e-3)
    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(400_000, generator=random).bfloat16(), "same": torch.ones(3)}
    replica, codecs = Replica(memory_url), []
    with Publisher(memory_url, codec="auto", dtype="keep") as publisher:
        publisher.publish(weights).wait(60)
        for number in range(4):
            if number != 2:  # a version without a change
                small = weights["w"].abs() < 0.05  # as in training, so that `context` is the smaller one
                weights["w"].view(torch.int16)[small & (torch.rand(400_000, generator=random) < 0.5)] += 1
            version = publisher.publish(weights).wait(60).version
            stored = ChannelReader(open_store(memory_url)).numbered(version)
            assert stored.record.delta is not None
            codecs.append(stored.record.delta.codec)
            assert replica.sync() == version
            assert_same_bits(replica.state_dict(), weights)
    assert codecs == ["packed", "context", "context", "context"]
