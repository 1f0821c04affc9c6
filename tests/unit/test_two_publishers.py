"""Two publishers on one channel: where the store decides who creates, where it does not, and how to go on afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from deltasync import Publisher, Replica, housekeeping, layout, manifest, open_store
from deltasync.errors import CorruptDataError, HeadConflictError, ObjectExistsError, ObjectMissingError
from deltasync.manifest import Head
from deltasync.reader import ChannelReader
from deltasync.retention import Keep
from deltasync.stores import Store
from deltasync.stores.base import Capabilities
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

Weights = dict[str, torch.Tensor]


class LookFirstStore(FaultyStore):
    """A store that cannot decide who creates an object: `create` looks and then overwrites, as on the Hub."""

    capabilities = Capabilities(conditional_put=False)  # type: ignore[assignment]

    def create(self, key: str, data: bytes) -> None:
        try:
            self.inner.read(key)
        except ObjectMissingError:
            pass
        else:
            raise ObjectExistsError(key)
        self._perform("create", key, lambda: self.inner.replace(key, data))


@pytest.fixture
def weights() -> Weights:
    return {"w": torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}


def moved(weights: Weights, by: int) -> Weights:
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["w"].view(torch.int16)[:2] += by
    return changed


def head(store: Store) -> Head:
    return manifest.decode(store.read(layout.HEAD), Head, layout.HEAD)


def test_the_slower_of_two_is_found_out_before_it_moves_head_back(memory_url: str, weights: Weights) -> None:
    """Its replace of head fails after a long wait: before it tries again, it looks."""
    slow_store, store = FaultyStore(open_store(memory_url)), open_store(memory_url)
    slow = Publisher(slow_store, retry_delay_s=0.0)
    slow.publish(weights.items()).wait(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltasync.publish.upload._STALL_S", 0.0)
        gate = slow_store.hold_at("replace", layout.HEAD)
        slow_store.fail_at("replace", layout.HEAD)
        late = slow.publish(moved(weights, 1).items())
        assert gate.entered.wait(60)
        with Publisher(store, resume=True) as successor:
            assert successor.version == 2  # the manifest was there: rolled forward
            successor.publish(moved(weights, 2).items()).wait(60)
        gate.opened.set()
        with pytest.raises(HeadConflictError, match="head to version 3"):
            late.wait(60)
    assert head(store).version == 3
    with pytest.raises(HeadConflictError):
        slow.publish(weights.items())
    with pytest.raises(HeadConflictError):
        slow.close()
    replica = Replica(store)
    assert replica.sync() == 3
    assert_same_bits(replica.state_dict(), moved(weights, 2))


def test_a_number_that_was_forgotten_is_not_used_again_by_a_publisher_that_was_away(
    memory_url: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(memory_url)
    away = Publisher(store, anchor_every=1)
    away.publish(weights.items()).wait(60)
    with Publisher(store, resume=True, anchor_every=1) as successor:
        for by in (1, 2, 3):
            successor.publish(moved(weights, by).items()).wait(60)
    housekeeping.forget(ChannelReader(store), Keep(last=1))  # so that its next number could be created
    monkeypatch.setattr("deltasync.publish.upload._STALL_S", 0.0)
    with pytest.raises(HeadConflictError, match="head to version 4"):
        away.publish(moved(weights, 4).items()).wait(60)
    assert outcome(away.close) is HeadConflictError
    assert ChannelReader(store).versions() == [4]
    replica = Replica(store)
    assert replica.sync() == 4
    assert_same_bits(replica.state_dict(), moved(weights, 3))


def test_whoever_opens_the_channel_of_a_live_publisher_does_not_move_head_back(memory_url: str, weights: Weights) -> None:
    store, second_store = open_store(memory_url), FaultyStore(open_store(memory_url))
    with Publisher(store) as publisher:
        publisher.publish(weights.items()).wait(60)
        listing = second_store.hold_at("list", layout.MANIFESTS)
        opening = threading.Thread(target=lambda: Publisher(second_store, resume=True).close())
        opening.start()
        assert listing.entered.wait(60)
        publisher.publish(moved(weights, 1).items()).wait(60)
        listing.opened.set()
        opening.join()
    assert ("replace", layout.HEAD) not in second_store.calls


class TestWithoutConditionalPut:
    def test_one_publisher_goes_on_undisturbed(self, memory_url: str, weights: Weights) -> None:
        store = LookFirstStore(open_store(memory_url))
        with Publisher(store) as publisher:
            for version in range(1, 6):
                publisher.publish(moved(weights, version).items()).wait(60)
        with Publisher(store, resume=True) as publisher:
            publisher.publish(moved(weights, 9).items()).wait(60)
        replica = Replica(store)
        assert replica.sync() == 6
        assert_same_bits(replica.state_dict(), moved(weights, 9))

    def test_a_stale_head_is_no_conflict(self, memory_url: str, weights: Weights) -> None:
        store = LookFirstStore(open_store(memory_url))
        with Publisher(store) as publisher:
            publisher.publish(weights.items()).wait(60)
            old = store.inner.read(layout.HEAD)
            publisher.publish(moved(weights, 1).items()).wait(60)
            store.tamper(layout.HEAD, lambda data: old)
            publisher.publish(moved(weights, 2).items()).wait(60)
        store.heal()
        assert head(store).version == 3

    @pytest.mark.parametrize("step", ["create manifests/", "read head.json", "replace head.json"])
    def test_a_race_is_detected_by_both_and_the_channel_can_be_resumed(
        self, memory_url: str, weights: Weights, step: str
    ) -> None:
        """The first is held at each step of publishing version 2 while the second publishes its own version 2."""
        store = open_store(memory_url)
        first = Publisher(LookFirstStore(store))
        first.publish(weights.items()).wait(60)
        second = Publisher(LookFirstStore(store), resume=True)
        assert isinstance(first.store, FaultyStore)
        gate = first.store.hold_at(*step.split())  # type: ignore[arg-type]
        ours = first.publish(moved(weights, 1).items())
        assert gate.entered.wait(60)

        theirs = second.publish(moved(weights, 2).items())
        told = [outcome(lambda: theirs.wait(60))]
        first.store.heal()
        told.append(outcome(lambda: ours.wait(60)))
        told.append(outcome(lambda: first.publish(moved(weights, 3).items()).wait(60)))
        told.append(outcome(lambda: second.publish(moved(weights, 4).items()).wait(60)))
        assert HeadConflictError in told
        for publisher in (first, second):
            outcome(publisher.close)

        # Whatever is there now is one of the versions that somebody published, or says that it is damaged.
        replica = Replica(store)
        published = [moved(weights, by) for by in (0, 1, 2, 3, 4)]
        try:
            replica.sync()
        except CorruptDataError as error:
            assert "sha256" in str(error)
        else:
            assert any(torch.equal(replica.state_dict()["w"], state["w"]) for state in published)

        with Publisher(store, resume=True) as publisher:
            publisher.publish(moved(weights, 5).items()).wait(60)
        replica = Replica(store)
        replica.sync()
        assert_same_bits(replica.state_dict(), moved(weights, 5))


def outcome(action: Callable[[], object]) -> type[Exception] | None:
    try:
        action()
    except HeadConflictError as error:
        return type(error)
    return None


def test_a_channel_whose_newest_version_is_damaged_is_resumed_by_full_weights(memory_url: str, weights: Weights) -> None:
    store = open_store(memory_url)
    with Publisher(store) as publisher:
        publisher.publish(weights.items()).wait(60)
        publisher.publish(moved(weights, 1).items()).wait(60)
    store.delete(f"{layout.delta_dir(2)}/{layout.delta_part(1, 1)}")
    with Publisher(store, resume=True) as publisher:
        assert publisher.version == 2
        receipt = publisher.publish(moved(weights, 2).items()).wait(60)
        assert (receipt.version, receipt.kind) == (3, "anchor")
        publisher.publish(moved(weights, 3).items()).wait(60)
    replica = Replica(store)
    assert replica.sync() == 4
    assert_same_bits(replica.state_dict(), moved(weights, 3))


def test_threads_never_publish_one_version_twice(memory_url: str, weights: Weights) -> None:
    store = open_store(memory_url)
    with Publisher(store) as publisher:
        publisher.publish(weights.items()).wait(60)
    publishers = [Publisher(store, resume=True) for _ in range(4)]
    start = threading.Barrier(4)
    told: list[type[Exception] | None] = [None] * 4

    def run(number: int) -> None:
        start.wait()
        told[number] = outcome(lambda: publishers[number].publish(moved(weights, number + 1).items()).wait(60))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = told.index(None)
    assert told.count(None) == 1
    for publisher in publishers:
        outcome(publisher.close)
    replica = Replica(store)
    assert replica.sync() == 2
    assert_same_bits(replica.state_dict(), moved(weights, winner + 1))
