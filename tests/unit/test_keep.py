"""A publisher that looks after its channel: compactions and garbage collection in the background."""

from __future__ import annotations

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.payloads import delta
from deltasync.channel.reading import ChannelReader
from deltasync.config import Retention
from deltasync.errors import PublishError
from deltasync.live import HostMemory
from deltasync.ops import check
from deltasync.ops.compactor import Collector
from tests.builders import assert_holds, finish_maintenance
from tests.channels import made
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


def spans(store: FaultyStore) -> list[tuple[int, int]]:
    return [(span.base, span.version) for span, _ in ChannelReader(store).compactions()]


def versions(store: FaultyStore) -> list[int]:
    return sorted(version.version for version in ChannelReader(store).versions())


def assert_compaction_gives(store: FaultyStore, states: list[Weights], base: int, version: int) -> None:
    """The bits of a version, from those of a base, by the compaction alone."""
    reader = ChannelReader(store)
    (key,) = [info.key for span, info in reader.compactions() if (span.base, span.version) == (base, version)]
    memory, tensors = HostMemory.on_host(reader.specs)
    for name, tensor in states[base - 1].items():
        tensors[name].copy_(tensor)
    memory.audit()
    memory.commit(memory.stage(delta(reader, reader.stored(key), memory.gather)))
    assert_same_bits(tensors, states[version - 1])


@pytest.mark.parametrize("codec", ["packed", "context"])
def test_compactions_are_written_and_give_the_published_bits(store: FaultyStore, codec: str) -> None:
    states = run(14)
    with Publisher(store, codec=codec, retention=Retention(compact_every=4)) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
            finish_maintenance(publisher)
    assert spans(store) == [(1, 5), (1, 9), (1, 13)]
    for base, version in spans(store):
        assert_compaction_gives(store, states, base, version)
    replica = Replica(store)
    replica.sync(1)
    store.calls.clear()
    assert replica.sync() == 14
    assert_same_bits(replica.state_dict(), states[-1])
    fetched = [
        key.split("/")[0]
        for operation, key in store.calls
        if operation == "read" and key.startswith(keys.COMPACTIONS)
    ]
    assert fetched == ["compactions"]


def test_a_compaction_begins_at_the_full_weights_after_a_restart_too(store: FaultyStore) -> None:
    states = run(8)
    for part in (states[:3], states[3:]):
        with Publisher(
            store, retention=Retention(compact_every=4), resume=bool(list(store.list("")))
        ) as publisher:
            for state in part:
                publisher.publish(state.items()).wait(60)
    assert spans(store) == [(1, 5)]
    assert_compaction_gives(store, states, 1, 5)
    replica = Replica(store)
    replica.sync(3)
    assert replica.sync() == 8
    assert_same_bits(replica.state_dict(), states[-1])


def test_a_compaction_has_the_bits_of_its_version_while_later_ones_are_published(store: FaultyStore) -> None:
    states = run(9)
    with Publisher(store, retention=Retention(compact_every=2)) as publisher:
        publisher.publish(states[0].items()).wait(60)
        publisher.publish(states[1].items()).wait(60)
        # which the compaction looks for first
        gate = store.hold_at("read", keys.slot(1, "")[: -len(".safetensors")])
        for state in states[2:]:
            publisher.publish(state.items()).wait(60)
        assert gate.entered.wait(60)
        assert publisher.version == 9 and not spans(store)
        gate.opened.set()
        finish_maintenance(publisher)
        publisher.publish(states[0].items()).wait(60)
    assert spans(store) == [(1, 3), (1, 10)]
    for base, version in spans(store):
        assert_compaction_gives(store, [*states, states[0]], base, version)


def test_no_compaction_is_stored_of_steps_from_full_weights_that_are_gone(store: FaultyStore) -> None:
    """A late joiner starts from other ones, which its steps do not start from."""
    states = run(7)
    with Publisher(store, anchor_every=3, retention=Retention(compact_every=2)) as publisher:
        for state in states[:5]:
            publisher.publish(state.items()).wait(60)
            finish_maintenance(publisher)
        store.hide(lambda key: key.startswith(f"{keys.ANCHORS}0000000004"))
        for state in states[5:]:
            publisher.publish(state.items()).wait(60)
            finish_maintenance(publisher)
    store.heal()
    assert (1, 6) not in spans(store)
    assert check(ChannelReader(store), read_data=True).exit_code == 0


def test_after_a_version_that_is_lost_compactions_begin_at_the_new_full_weights(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.publish.encode.INLINE_BYTES", 0)
    states = run(7)
    with Publisher(store, retries=0, retention=Retention(compact_every=2)) as publisher:
        publisher.publish(states[0].items()).wait(60)
        store.fail_at("put", keys.PARTS)
        with pytest.raises(PublishError):
            publisher.publish(states[1].items()).wait(60)
        for state in states[2:]:
            publisher.publish(state.items()).wait(60)
            finish_maintenance(publisher)
    assert spans(store) == [(2, 4), (2, 6)]
    for base, version in spans(store):
        assert_compaction_gives(store, [states[0], *states[2:]], base, version)


def test_old_versions_are_forgotten_and_their_bytes_deleted(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.ops.compactor._LEAST_BETWEEN", 4)
    monkeypatch.setattr("deltasync.publish.encode.INLINE_BYTES", 0)
    states = run(30)
    retention = Retention(keep_last=4, compact_every=3, grace_s=0.0)
    with Publisher(store, anchor_every=5, retention=retention) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
            finish_maintenance(publisher)
    left = versions(store)
    assert left[-1] == 30
    assert 4 <= len(left) <= 14
    files = [keys.file_of(info.key) for prefix in (keys.PARTS, keys.ANCHORS) for info in store.list(prefix)]
    assert {file.version for file in files if file is not None} <= {
        slot.version for slot, _ in ChannelReader(store).slots()
    }
    replica = Replica(store)
    for version in left[-4:]:
        assert replica.sync(version) == version
        assert_same_bits(replica.state_dict(), states[version - 1])


def test_a_collection_reads_new_records_only(store: FaultyStore) -> None:
    channel = made(store, 40, compactions=[(1, 30)])
    collector = Collector(ChannelReader(store), Retention(keep_last=5, grace_s=0.0))
    collector.collect()
    assert channel.tip is not None
    stored = channel.delta(channel.bits[channel.tip.sha256])
    channel.head()
    store.bytes_read.clear()
    collector.collect()
    documents = [key for verb, key, _ in store.bytes_read if verb == "read" and key.endswith(".safetensors")]
    assert documents == [stored.key]
    assert [slot.version for slot, _ in ChannelReader(store).slots()] == [1, *range(30, 42)]
    assert check(ChannelReader(store)).problems == []
    assert Replica(store).sync() == 41


def test_failures_of_it_are_only_told(store: FaultyStore, caplog: pytest.LogCaptureFixture) -> None:
    states = run(5)
    store.fail_at("put", keys.COMPACTIONS, times=FOREVER)
    with Publisher(store, retries=0, retention=Retention(compact_every=2)) as publisher:
        for state in states:
            publisher.publish(state.items()).wait(60)
    assert "Channel maintenance failed" in caplog.text
    assert_holds(store, states[-1], 5)


def test_by_default_everything_stays(store: FaultyStore) -> None:
    with Publisher(store) as publisher:
        for state in run(40):
            publisher.publish(state.items()).wait(60)
    assert versions(store) == list(range(1, 41))
    assert not any(operation == "delete" and not key.startswith("probe/") for operation, key in store.calls)
