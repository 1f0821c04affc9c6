from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from benchmarks import fleet
from deltasync import Publisher, Replica, follow, open_store
from deltasync.errors import NotPublishedError, StoreError
from deltasync.following import Poll
from deltasync.stores import ObjectInfo, Store
from tests.faults import FaultyStore
from tests.waiting import wait_until


@dataclasses.dataclass
class Bell:
    """A watch that the test rings."""

    ring: Callable[[ObjectInfo | None], None]
    live: bool = True
    closed: bool = False

    def close(self) -> None:
        self.closed = True


class WatchedStore(FaultyStore):
    """A store that tells of changes at once."""

    bell: Bell | None = None
    infos: set[ObjectInfo | None] = set()  # noqa: RUF012 - replaced; those with which records were read

    def read(self, key: str, most_bytes: int, info: ObjectInfo | None = None) -> bytes:
        if key.startswith("versions/"):
            self.infos.add(info)
        return super().read(key, most_bytes, info)

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Bell:
        self.bell = Bell(on_change)
        return self.bell

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if self.bell is not None and key.startswith("versions/"):
            self.bell.ring(ObjectInfo(key, len(data)))


@pytest.fixture
def store(memory_url: str) -> Store:
    return open_store(memory_url)


def test_the_wait_grows_up_to_the_interval_and_begins_anew_after_a_version(store: Store) -> None:
    with Poll(0.1).watching(store, lambda _: None) as poll:
        waits = [poll.delay_s(moved=False) for _ in range(10)]
        assert waits[0] <= 0.02
        assert all(0.9 * 0.1 <= wait <= 0.1 for wait in waits[5:])
        assert all(later > 1.3 * wait for wait, later in itertools.pairwise(waits[:4]))
        assert poll.delay_s(moved=True) <= 0.02


def test_an_interval_below_the_first_wait_is_kept(store: Store) -> None:
    with Poll(0.001).watching(store, lambda _: None) as poll:
        assert poll.delay_s(moved=False) <= 0.001


def test_looks_are_often_when_the_next_version_is_due(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("deltasync.following.poll.time.monotonic", lambda: now_s)

    def looks_until(version_s: float) -> list[float]:
        """Look until a version that appears then is found; when it was looked."""
        nonlocal now_s
        found = []
        while not found or now_s < version_s:
            now_s += poll.delay_s(moved=not found)
            found.append(now_s)
        return found

    with Poll(1.0).watching(store, lambda _: None) as poll:
        late_s = [looks_until(4.0 * number)[-1] - 4.0 * number for number in range(1, 8)]
        assert max(late_s[2:]) <= 0.13  # 3 % of the time between two, that between the looks at them included
        assert len(looks_until(4.0 * 8)) < 65
        assert looks_until(4.0 * 9)[-1] - 4.0 * 9 <= 0.03  # on the beat
        assert len(looks_until(now_s + 100)) < 65 + 100 / 0.9  # the rhythm ended: back to the interval


def test_a_long_interval_bounds_how_often_many_replicas_ask_for_a_version_that_is_due() -> None:
    (often, most), (seldom, few) = (fleet.in_vain(interval_s, between_s=10.0) for interval_s in (1.0, 10.0))
    assert most <= 55 and few <= 6  # in a second: a fiftieth of the interval apart, less a tenth
    assert seldom < 0.75 * often


@pytest.mark.parametrize("away_s", [30.0, 600.0])
def test_after_an_outage_that_began_for_all_at_once_replicas_do_not_ask_all_at_once(
    away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(0)
    monkeypatch.setattr(random, "SystemRandom", lambda: drawn)
    assert fleet.herd(1000, away_s) < 3  # times what they would ask spread evenly; of 50 if none waited


def test_a_store_that_tells_of_changes_is_hardly_looked_at(store: Store) -> None:
    watched = WatchedStore(store)
    with Poll(1.0).watching(watched, lambda _: None) as poll:
        assert watched.bell is not None
        assert poll.delay_s(moved=False) == 30.0
        assert poll.delay_s(moved=True) <= 0.02  # the next version may be there already
        assert poll.delay_s(moved=True, took_announced=True) == 30.0  # it would have been told
        assert poll.delay_s(moved=True) <= 0.02
        assert poll.delay_s(moved=False, failure=StoreError("away")) < 0.1  # what failed is tried again
        watched.bell.live = False
        assert poll.delay_s(moved=False) <= 1.0
    assert watched.bell.closed


def test_a_replica_waits_for_a_version_without_asking_all_the_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.following.poll._LIVE_S", 3600.0)
    watched = WatchedStore(store)
    weights = {"w": torch.zeros(3)}
    with Publisher(watched) as publisher:
        replica = Replica(watched)
        with pytest.raises(NotPublishedError):
            replica.sync(timeout_s=0.2)
        assert watched.calls.count(("read", "channel.json")) <= 3
        timer = threading.Timer(0.3, lambda: publisher.publish(weights.items()))
        timer.start()
        assert replica.sync(1, timeout_s=60) == 1  # told by the store: the next look would be in an hour
        timer.join()


def test_a_version_that_was_told_is_the_only_request_and_several_are_one_commit(store: Store) -> None:
    watched = WatchedStore(store)
    weights, told = {"w": torch.zeros(64)}, set[ObjectInfo]()
    with Publisher(store, dtype="keep") as publisher:
        publisher.publish(weights.items()).wait(60)
        with follow(_module(), watched) as following:
            following.wait(1)
            wait_until(lambda: watched.bell)  # its loop asks no more, unless it is told
            time.sleep(0.2)
            watched.calls.clear()
            watched.infos = set()
            for newest, count in ((2, 1), (3, 1), (6, 3)):
                with following._follow.between_steps():  # the loop waits until all are told
                    for _ in range(count):
                        weights["w"][:2] += 1
                        receipt = publisher.publish(weights.items()).wait(60)
                        tip = publisher._opened.log.tip  # type: ignore[union-attr]
                        assert tip is not None and tip.version == receipt.version
                        watched.bell.ring(ObjectInfo(tip.key, receipt.payload_bytes))
                        told.add(ObjectInfo(tip.key, receipt.payload_bytes))
                wait_until(lambda: following.version == newest)  # noqa: B023
            assert [commit.version for commit in following._follow.commits] == [2, 3, 6]
            time.sleep(0.2)
            asked = [key for verb, key in watched.calls if verb == "read" and key.startswith("versions/")]
            assert len(asked) == 5 and watched.infos == told  # nothing was asked for that was not told


def test_publishing_and_following_draw_nothing_from_the_users_generators(store: Store) -> None:
    """A run with a seed is the same with a channel and without, retries and looks included."""

    def states() -> list[object]:
        return [random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()]

    before, away = states(), FaultyStore(store)
    with (
        Publisher(away, dtype="keep", retry_delay_s=0.001) as publisher,
        follow(_module(), store, poll_interval_s=0.01) as following,
    ):
        for value in range(3):
            away.fail_at("create", times=2)
            receipt = publisher.publish([("w", torch.full((64,), float(value)))])
            following.wait(receipt.wait(60).version)
    assert states() == before


def _module() -> torch.nn.Module:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
    return module
