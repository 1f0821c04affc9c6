"""A publisher that looks after its channel: folds, forgetting and pruning in the background."""

from __future__ import annotations

import pytest
import torch

from deltasync import Publisher, Replica, housekeeping, layout, open_store
from deltasync.config import Retention
from deltasync.errors import ConfigError, TransientStoreError
from deltasync.reader import ChannelReader
from deltasync.stores import Store
from tests.conftest import assert_same_bits
from tests.faults import FOREVER, FaultyStore

Weights = dict[str, torch.Tensor]


def run(count: int) -> list[Weights]:
    random = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(200, 300, generator=random).to(torch.bfloat16), "v": torch.arange(5)}]
    for _ in range(count - 1):
        moved = {name: tensor.clone() for name, tensor in states[-1].items()}
        moved["w"].view(torch.int16)[torch.rand(200, 300, generator=random) < 0.02] += 1
        states.append(moved)
    return states


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


def spans(store: FaultyStore) -> list[tuple[int, int] | None]:
    return [span for info in store.list(layout.FOLDS) if (span := layout.fold_span(info.key)) is not None]


@pytest.mark.parametrize("codec", ["packed", "context"])
def test_folds_are_written_and_give_the_published_bits(store: FaultyStore, codec: str) -> None:
    states = run(14)
    with Publisher(store, codec=codec, retention=Retention(fold_every=4)) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
    assert spans(store) == [(1, 5), (5, 9), (9, 13)]
    replica = Replica(store)
    replica.sync(1)
    store.calls.clear()
    assert replica.sync() == 14
    assert_same_bits(replica.state_dict(), states[-1])
    fetched = [key.split("/")[0] for operation, key in store.calls if operation == "read" and "part-" in key]
    assert sorted(fetched) == ["deltas", "folds", "folds", "folds"]  # by several threads, in any order


def test_a_fold_goes_on_after_a_restart(store: FaultyStore) -> None:
    states = run(8)
    for part in (states[:3], states[3:]):
        with Publisher(store, retention=Retention(fold_every=4), resume=bool(list(store.list("")))) as publisher:
            for state in part:
                publisher.publish(state.items()).wait(60)
    assert spans(store) == [(3, 7)]
    replica = Replica(store)
    replica.sync(3)
    assert replica.sync() == 8
    assert_same_bits(replica.state_dict(), states[-1])


def test_changes_that_join_a_waiting_version_are_in_its_fold(store: FaultyStore) -> None:
    states = run(9)
    with Publisher(store, retention=Retention(fold_every=2)) as publisher:
        publisher.publish(states[0].items()).wait(60)
        publisher.publish(states[1].items()).wait(60)
        gate = store.hold_at("create", layout.manifest(3))
        publisher.publish(states[2].items())  # completes a fold, and is held
        assert gate.entered.wait(60)
        receipts = [publisher.publish(state.items()) for state in states[3:]]
        assert {receipt.version for receipt in receipts} == {4}
        gate.opened.set()
        receipts[-1].wait(60)
        publisher.publish(states[0].items()).wait(60)
    assert spans(store) == [(1, 3), (3, 5)]
    for base, span in ((1, 3), (3, 5)):
        step = next(
            step for step in ChannelReader(store)._list_folds(ChannelReader(store).head()) if step.base_version == base
        )
        replica = Replica(store)
        replica.sync(base)
        assert replica._follower is not None
        reader = replica._reader
        known = {step.version: step.manifest_sha256 for step in reader._steps_back(5, None, 1)}
        staged = replica._follower.stage(type(step)(span, known[span], base, step.payload_bytes, step.fold))
        replica._follower.confirm(replica._follower.commit(staged))
        assert replica.version == span


def test_old_versions_are_forgotten_and_their_bytes_deleted(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.publish.keep._LEAST_BETWEEN", 4)
    states = run(30)
    retention = Retention(keep_last=4, fold_every=3, prune_grace_s=0.0)
    with Publisher(store, anchor_every=5, retention=retention) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
    versions = ChannelReader(store).versions()
    assert versions[-1] == 30
    assert 4 <= len(versions) <= 14
    referred = {version for info in store.list("deltas/") for version in layout.data_versions(info.key)}
    assert referred <= set(versions)
    for version in versions:
        replica = Replica(store)
        assert replica.sync(version) == version
        assert_same_bits(replica.state_dict(), states[version - 1])


class FirstReadsFail(FaultyStore):
    """Every manifest is read in vain once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen: set[str] = set()

    def read(self, key: str, most_bytes: int | None = None) -> bytes:
        if key.startswith(layout.MANIFESTS) and key not in self.seen:
            self.seen.add(key)
            raise TransientStoreError(key)
        return super().read(key, most_bytes)


def test_of_many_reads_some_fail_and_it_forgets_all_the_same(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deltasync.publish.keep._LEAST_BETWEEN", 4)
    with Publisher(
        FirstReadsFail(store.inner), retention=Retention(keep_last=2, prune_grace_s=0.0), anchor_every=2
    ) as publisher:
        for state in run(12):
            publisher.publish(state.items()).wait(60)
    assert "Looking after the channel failed" not in caplog.text
    assert len(ChannelReader(store).versions()) <= 6


class OnceDamaged(FaultyStore):
    """A manifest names another file than it does, the first time that it is read, and no digest of the store's notices."""

    damaged = False

    def read(self, key: str, most_bytes: int | None = None) -> bytes:
        data = super().read(key, most_bytes)
        if key == layout.manifest(2) and not self.damaged:
            self.damaged = True
            return data.replace(b"part-00001", b"part-00000")
        return data


def test_a_manifest_that_is_damaged_on_the_way_does_not_cost_what_it_names(store: FaultyStore) -> None:
    states = run(4)
    with Publisher(store) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
    misled = OnceDamaged(store.inner)
    assert housekeeping.prune(ChannelReader(misled), grace_s=0.0).objects == []
    assert misled.damaged
    replica = Replica(store)
    assert replica.sync(2) == 2
    assert_same_bits(replica.state_dict(), states[1])


def test_failures_of_it_are_only_told(store: FaultyStore, caplog: pytest.LogCaptureFixture) -> None:
    states = run(5)
    store.fail_at("create", layout.FOLDS, times=FOREVER)
    with Publisher(store, retention=Retention(fold_every=2)) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
    assert "Looking after the channel failed" in caplog.text
    replica = Replica(store)
    assert replica.sync() == 5
    assert_same_bits(replica.state_dict(), states[-1])


def test_by_default_everything_stays(store: FaultyStore) -> None:
    with Publisher(store) as publisher:
        for state in run(40):
            publisher.publish(state.items()).wait(60)
    assert ChannelReader(store).versions() == list(range(1, 41))
    assert not any(operation == "delete" for operation, _ in store.calls)


def test_settings_come_from_the_environment_and_are_checked() -> None:
    environ = {"DELTASYNC_FOLD_EVERY": "8", "DELTASYNC_KEEP_LAST": "50", "DELTASYNC_PRUNE_GRACE_S": "60"}
    assert Retention.from_env(environ) == Retention(fold_every=8, keep_last=50, prune_grace_s=60.0)
    for bad in ({"fold_every": 1}, {"fold_every": -1}, {"keep_last": 0}, {"keep_anchors": 0}, {"prune_grace_s": -1.0}):
        with pytest.raises(ConfigError):
            Retention(**bad)  # type: ignore[arg-type]
