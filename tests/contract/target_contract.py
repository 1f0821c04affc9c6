"""What every target of the follow loop does: `class TestMine(TargetContract)` with a fixture `bench`."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from deltasync import Publisher, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings, parse_pin
from deltasync.errors import ApplyError, CommitError, DeltaSyncError, MissingVersionError, RunMismatchError
from deltasync.following import Follow, Target
from deltasync.serve import heartbeat
from deltasync.serve.heartbeats import HeartbeatWriter
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore, flipped
from tests.waiting import wait_until

NAME = "w"
SHAPE = (40, 30)
FILES = {"adapter_config.json": b'{"r": 2}'}


class End(BaseException):
    """The process ends here."""


class Bench(abc.ABC):
    """A channel, and an engine whose weights follow it."""

    def __init__(self, url: str) -> None:
        self.store = FaultyStore(open_store(url))
        self.weights = {NAME: torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).bfloat16()}
        self.published: dict[int, dict[str, torch.Tensor]] = {}
        self.publisher = self._publisher()
        self.reader = ChannelReader(self.store)
        self.follow = self.follows()

    def _publisher(self, **settings: Any) -> Publisher:
        return Publisher(self.store.inner, dtype="keep", codec="packed", model_files=FILES, **settings)

    def publish(self, count: int = 1) -> int:
        for _ in range(count):
            self.weights[NAME].view(torch.int16)[:3] += 1
            version = self.publisher.publish(self.weights.items(), step=len(self.published)).wait(60).version
            self.published[version] = {NAME: self.weights[NAME].clone()}
        return version

    def follows(self) -> Follow:
        """A new loop over the engine, as after a restart of what drives it."""
        self.reader = ChannelReader(self.store)
        settings = ReplicaSettings(
            replica_id="bench", poll_interval_s=0.02, adapter="policy", channel=self.store.url
        )
        self.beats = HeartbeatWriter(self.store)
        return Follow(self.reader, self.target(settings), settings, prefetch=False, heartbeats=self.beats)

    @abc.abstractmethod
    def target(self, settings: ReplicaSettings) -> Target: ...

    @abc.abstractmethod
    def live(self) -> dict[str, torch.Tensor]:
        """The weights that the engine computes with."""

    @abc.abstractmethod
    def failing_commit(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the weights are written, and then the commit fails."""

    def assert_serves(self, version: int) -> None:
        assert self.follow.version == version and self.follow.error is None
        assert_same_bits(self.live(), self.published[version])

    def close(self) -> None:
        self.store.heal()
        self.follow.stop()
        self.publisher.close()


def _attempt(follow: Follow, steps: int = 12) -> DeltaSyncError | None:
    """Take steps until nothing is left to take. Returns the last error."""
    problem = None
    for _ in range(steps):
        follow.poke()
        try:
            problem = None
            if follow.step():
                return None
        except DeltaSyncError as error:
            problem = error
    return problem


class TargetContract:
    @pytest.fixture
    def bench(self, memory_url: str) -> Iterator[Bench]:
        raise NotImplementedError

    def test_every_version_is_served_with_its_bits(self, bench: Bench) -> None:
        for count in (1, 1, 3, 1):
            version = bench.publish(count)
            assert bench.follow.catch_up() == version
            bench.assert_serves(version)
        assert [commit.version for commit in bench.follow.commits][-1] == version

    @pytest.mark.parametrize(("text", "at"), [("2", 2), ("4", 4), ("newest", 5), ("1", 1)])
    def test_pins(self, bench: Bench, text: str, at: int) -> None:
        bench.publish(5)
        for start in (3, None):
            bench.follow.set_pin(start)
            bench.follow.catch_up(start)
            bench.follow.set_pin(parse_pin(text))
            assert bench.follow.catch_up(parse_pin(text)) == at
            bench.assert_serves(at)
            assert bench.follow.not_ready is None

    def test_a_pin_to_a_version_that_is_not_there_changes_nothing(self, bench: Bench) -> None:
        bench.publish(2)
        bench.follow.start()
        assert bench.follow.wait(2) == 2
        with pytest.raises(MissingVersionError):
            bench.follow.set_pin(99)
        assert bench.follow.pin is None
        bench.follow.set_pin(1)
        assert bench.follow.wait(1) == 1
        with pytest.raises(ApplyError, match="pinned to version 1"):
            bench.follow.wait(2, timeout_s=60)

    def test_a_gap_is_waited_out_and_bridged(self, bench: Bench) -> None:
        bench.publish(2)
        bench.follow.catch_up()
        bench.publish(2)
        (gap,) = (info.key for info in bench.store.inner.list(keys.VERSIONS) if "0000000003." in info.key)
        data = bench.store.inner.read(gap, 1 << 30)
        bench.store.inner.delete(gap)
        # head is written behind the record
        wait_until(lambda: isinstance(_attempt(bench.follow), MissingVersionError))
        assert bench.follow.state == "failed" and bench.follow.version == 2
        assert_same_bits(bench.live(), bench.published[2])
        bench.store.inner.put(gap, data)
        assert bench.follow.catch_up() == 4
        bench.assert_serves(4)

    @pytest.mark.parametrize("heals", ["record", "next"])
    def test_a_damaged_record_is_a_failure_until_there_is_a_way_on(self, bench: Bench, heals: str) -> None:
        bench.publish(2)
        bench.follow.catch_up()
        bench.publish()
        (key,) = (info.key for info in bench.store.inner.list(keys.VERSIONS) if "0000000003." in info.key)
        bench.store.tamper(key, flipped)
        assert _attempt(bench.follow) is not None
        for _ in range(3):  # also between two refreshes
            with contextlib.suppress(DeltaSyncError):
                bench.follow.step()
            assert bench.follow.state == "failed" and key in (bench.follow.error or "")
        assert_same_bits(bench.live(), bench.published[2])
        if heals == "record":
            bench.store.heal()
        else:  # the trainer resumes, and begins with full weights
            bench.publisher.close()
            bench.publisher = bench._publisher(resume=True, anchor_every=1)
            bench.publish(2)
        assert bench.follow.catch_up() == max(bench.published)
        bench.assert_serves(max(bench.published))

    @pytest.mark.parametrize("what", ["deleted", "foreign"])
    def test_a_channel_that_is_gone_is_a_failure_and_is_not_made_again(self, bench: Bench, what: str) -> None:
        bench.publish(2)
        bench.follow.start()
        bench.follow.wait(2)
        inner, run_id = bench.store.inner, bench.publisher.run_id
        assert run_id is not None
        bench.publisher.close()
        # Else it may be written after the channel is gone.
        wait_until(
            lambda: (
                [(beat.version, beat.state) for beat in heartbeat.read_all(inner, run_id)] == [(2, "serving")]
            )
        )
        inner.delete(*[info.key for info in inner.list("")])
        if what == "foreign":
            bench.publisher = bench._publisher()
            bench.publish(3)
            expected = RunMismatchError.__name__
        else:
            expected = "NotPublishedError"
        bench.follow.poke()
        wait_until(lambda: bench.follow.state == "failed" and expected in (bench.follow.error or ""))
        for _ in range(20):
            assert bench.follow.state == "failed" and expected in (bench.follow.error or "")
            time.sleep(0.01)
        assert bench.follow.version == 2
        if what == "deleted":
            bench.beats.update(bench.follow.status(0))
            bench.follow.stop()
            assert list(inner.list("")) == []

    def test_a_store_that_hangs_is_seen_and_left(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("deltasync.following.state.STALE_S", 0.3)
        monkeypatch.setattr("deltasync.following.state.STALE_POLLS", 0)
        monkeypatch.setattr("deltasync.following.follow._STOP_S", 0.3)
        monkeypatch.setattr("deltasync.serve.heartbeats._TICK_S", 0.01)
        bench.beats._interval_s = 0.05
        bench.publish()
        bench.follow.start()
        bench.follow.wait(1)
        bench.store.hold_at("read", keys.VERSIONS)
        wait_until(lambda: bench.follow.state == "stale")
        assert bench.follow.not_ready is None and "could last be followed" in (bench.follow.error or "")
        run_id = bench.publisher.run_id
        if run_id is not None:  # which go on, and say it
            wait_until(
                lambda: [beat.state for beat in heartbeat.read_all(bench.store.inner, run_id)] == ["stale"]
            )
        bench.follow.stop()  # while the store still hangs

    def test_a_commit_that_fails_leaves_the_version_before(self, bench: Bench) -> None:
        bench.publish(2)
        bench.follow.catch_up()
        bench.publish()
        with bench.failing_commit():
            with pytest.raises(DeltaSyncError) as caught:
                bench.follow.step()
            assert not isinstance(caught.value, CommitError)
            assert bench.follow.state == "failed"
        _attempt(bench.follow)
        assert bench.follow.version == 3
        bench.assert_serves(3)

    @pytest.mark.parametrize("where", ["open", "stage", "commit", "settle"])
    def test_an_end_at_each_step_and_a_new_loop(self, bench: Bench, where: str) -> None:
        bench.publish(2)
        if where != "open":
            bench.follow.catch_up()
            bench.publish()
        target = bench.follow.target
        original = getattr(target, where)

        def ends(*arguments: Any) -> Any:
            original(*arguments)
            raise End

        with mock.patch.object(target, where, ends), pytest.raises(End):
            if where == "settle":
                bench.follow.audit()
            bench.follow.catch_up()
        bench.follow.stop()
        bench.follow = bench.follows()
        assert bench.follow.catch_up() == max(bench.published)
        bench.assert_serves(max(bench.published))
