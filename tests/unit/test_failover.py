"""A channel and copies of it: the nearest is read, another one where that fails or lags, and nobody goes back
by that.
"""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import TypeVar

import pytest

from deltasync import Replica
from deltasync.channel import documents, failover, keys
from deltasync.channel.documents import Head
from deltasync.channel.failover import FailoverStore, open_failover
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, NotPublishedError, StoreError
from deltasync.ops import Relay
from deltasync.stores import Store, open_store
from tests.channels import Made, filled, states_of
from tests.conftest import assert_same_bits
from tests.faults import FOREVER, FaultyStore
from tests.waiting import wait_until

STATES = states_of(8)

_Result = TypeVar("_Result")


class Region:
    """A channel that is far, a copy that is near, and a replica that knows both."""

    def __init__(self, url: str) -> None:
        self.source, self.copy = open_store(url), open_store(f"{url}-copy")
        self.made, _ = filled(self.source, STATES[:2])
        self.relay = Relay(ChannelReader(self.source), [self.copy])
        self.relay.step()
        self.far, self.near = FaultyStore(self.source), FaultyStore(self.copy)
        self.far.slow_s = dict.fromkeys(("read", "list", "put", "create", "delete"), 0.03)
        self.store = FailoverStore([self.far, self.near])
        self.replica = Replica(self.store)

    def publish(self, state: int, *, relayed: bool = True) -> None:
        self.made.delta(STATES[state], parts=1)
        self.made.head()
        if relayed:
            self.relay.step()

    def assert_serves(self, made: Made) -> None:
        self.replica.sync()
        assert made.tip is not None and self.replica.identity == made.tip
        assert_same_bits(self.replica.state_dict(), made.bits[made.tip.sha256])


@pytest.fixture
def region(memory_url: str) -> Region:
    return Region(memory_url)


def test_the_nearest_is_read_and_the_channel_is_written_to(region: Region) -> None:
    for state in (2, 3):
        region.publish(state)
        region.assert_serves(region.made)
    assert (
        region.far.calls[0] == ("read", keys.HEAD) and len(region.far.calls) == 2
    )  # to find out how far it is, and what it has
    region.store.put("replicas/one.json", b"{}")
    assert region.source.read("replicas/one.json", 9) == b"{}"
    assert region.store.url == region.source.url


def test_where_it_fails_another_one_is_read(region: Region) -> None:
    region.assert_serves(region.made)
    fault = region.near.fail_at("read", times=FOREVER)
    for state in (2, 3):
        region.publish(state)
        region.assert_serves(region.made)
    assert fault.hits


def test_nobody_goes_back_by_changing_over(region: Region) -> None:
    near = region.near.fail_at("read", times=FOREVER)
    region.publish(2, relayed=False)
    region.assert_serves(region.made)  # from the channel, which is ahead of its copy
    served, near.times = region.replica.identity, 0
    far = region.far.fail_at("read", times=FOREVER)
    with pytest.raises(StoreError):
        region.replica.sync()
    assert region.replica.identity == served
    region.publish(3)  # now the copy has what was served, and more
    region.assert_serves(region.made)
    assert far.hits


def test_a_copy_that_lags_is_left(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    region.assert_serves(region.made)
    assert region.store.nearest is region.near
    monkeypatch.setattr(failover, "REVIEW_S", 0.0)
    region.store._due_s = 0.0
    region.publish(2, relayed=False)
    wait_until(lambda: region.replica.sync() and region.store.nearest is region.far)
    region.assert_serves(region.made)
    region.relay.step()
    wait_until(lambda: region.replica.sync() and region.store.nearest is region.near)  # it has caught up
    region.assert_serves(region.made)


def test_the_head_of_a_copy_is_not_believed(region: Region) -> None:
    region.assert_serves(region.made)
    tip = region.made.tip
    assert tip is not None and region.store.nearest is region.near
    lie = Head(run_id=region.made.run_id, version=999, epoch=tip.epoch, sha256=tip.sha256)
    region.copy.put(keys.HEAD, documents.encode(lie))
    region.publish(2, relayed=False)
    for _ in range(2):
        region.store._review()
    region.assert_serves(region.made)


def test_a_record_that_no_head_names_yet_keeps_nobody_from_changing_over(region: Region) -> None:
    region.assert_serves(region.made)
    region.made.delta(STATES[2])  # and the trainer is killed before it moves head
    tip = region.made.tip
    assert tip is not None
    region.copy.put(tip.slot.key, region.source.read(tip.slot.key, 1 << 20))
    region.assert_serves(region.made)
    region.near.fail_at("read", times=FOREVER)
    region.assert_serves(region.made)
    assert region.store.nearest is region.far


def test_other_channels_are_refused(region: Region, memory_url: str) -> None:
    other = open_store(f"{memory_url}-other")
    made = Made(other, run_id="another")
    made.create(STATES[0])
    made.anchor(STATES[0])
    made.head()
    with pytest.raises(
        ConfigError, match=r"memory://.* and memory://.*-other hold different runs; name one channel and"
    ):
        Replica(FailoverStore([region.source, other])).sync()


def test_another_channels_head_at_a_copy_refuses_only_as_long_as_it_is_there(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who may write to the copy can store one: head is not signed."""
    monkeypatch.setattr(failover, "REVIEW_S", 0.0)
    made = Made(open_store(f"memory://{uuid.uuid4().hex}"), run_id="another")
    made.create(STATES[0])
    made.anchor(STATES[0])
    made.head()
    before = region.far.read(keys.HEAD, 1 << 20)
    region.far.put(keys.HEAD, made.store.read(keys.HEAD, 1 << 20))
    with pytest.raises(ConfigError, match="hold different runs"):
        list(region.store.list(""))
    region.far.put(keys.HEAD, before)
    region.assert_serves(region.made)


def test_a_store_that_does_not_answer_is_waited_for_once(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "_PATIENCE_S", 0.2)
    gate = region.far.hold_at("read", keys.HEAD)
    region.assert_serves(region.made)
    region.publish(2)
    region.assert_serves(region.made)
    assert gate.entered.is_set() and region.far.calls == []
    asking = [thread for thread in threading.enumerate() if thread.name == "deltasync-fetch"]
    assert asking and all(thread.daemon for thread in asking), "a process can end while a store hangs"
    gate.opened.set()


def test_several_urls(tmp_path: Path, memory_url: str) -> None:
    urls = f"{memory_url}  file://{tmp_path}/copy"
    for channel in (urls, urls.split(), tuple(urls.split())):
        store = open_failover(channel)
        assert isinstance(store, FailoverStore) and store.url == open_store(memory_url).url
    for one in (memory_url, [memory_url], f" {memory_url} ", tmp_path, f"{tmp_path}/a folder"):
        assert not isinstance(open_failover(one), FailoverStore)
    for wrong in ("", [], "s3://bucket/run s3//bucket/copy", 7):
        with pytest.raises(ConfigError):
            open_failover(wrong)  # type: ignore[arg-type]


def test_a_channel_that_is_not_there_yet(memory_url: str) -> None:
    source: Store = open_store(memory_url)
    replica = Replica(f"{memory_url} {memory_url}-copy")
    with pytest.raises(NotPublishedError):
        replica.sync()
    made, _ = filled(source, STATES[:1])
    replica.sync()
    assert replica.identity == made.tip
