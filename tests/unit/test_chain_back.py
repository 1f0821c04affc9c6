"""Going back to an older version: deltas and compactions are undone where that reads less than full weights."""

from __future__ import annotations

import asyncio

import pytest
import torch
from prometheus_client import CollectorRegistry

from deltasync.channel import keys
from deltasync.channel.plan import find_chain_back, is_revert, payload_bytes
from deltasync.channel.reading import ChannelReader
from deltasync.following import Pin, Replica
from deltasync.stores import open_store
from tests import driving
from tests.builders import Weights, trained, weights
from tests.channels import EPOCH, Made
from tests.conftest import assert_same_bits
from tests.driving import Engine, Trainer, following
from tests.faults import FaultyStore

engine, registry, trainer = driving.engine, driving.registry, driving.trainer  # fixtures


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


def _made(store: FaultyStore, count: int, codec_name: str = "packed") -> Made:
    channel = Made(store, codec_name=codec_name)
    model: Weights = weights() | {"embed": torch.randn(400, 300).to(torch.bfloat16)}
    channel.create(model)
    channel.anchor(model)
    for seed in range(1, count):
        model = trained(model, seed)
        channel.delta(model, parts=seed % 3)
    channel.head()
    return channel


def _anchors_read(store: FaultyStore) -> list[str]:
    return [key for _, key in store.calls if key.startswith(keys.anchor_folder(1, EPOCH))]


def _goes(replica: Replica, channel: Made, store: FaultyStore, version: int) -> list[str]:
    """Files of full weights that were read to go there."""
    store.calls.clear()
    assert replica.sync(version) == version
    assert_same_bits(replica.state_dict(), channel.bits[replica.digest or ""])
    assert replica.audit()
    return _anchors_read(store)


def test_deltas_are_undone(store: FaultyStore) -> None:
    channel = _made(store, 20)
    replica = Replica(store)
    assert _goes(replica, channel, store, 20)
    for version in (19, 16, 18, 2, 20, 1, 3):
        assert not _goes(replica, channel, store, version), version


def test_compactions_are_undone(store: FaultyStore) -> None:
    channel = _made(store, 30)
    reader = ChannelReader(store)
    versions = {version.version: version for version in reader.versions()}
    channel.compaction(versions[5], versions[25])
    replica = Replica(store)
    replica.sync()
    assert not _goes(replica, channel, store, 4)
    way = find_chain_back(reader, versions[30], reader.record(versions[4]))
    assert is_revert(way) and [stored.is_compaction for stored in way] == [False] * 5 + [True, False, False]
    assert payload_bytes(way) == sum(stored.record.payload_bytes for stored in way[:-1])
    # A record between is gone, and the compaction leads over it.
    store.delete(versions[15].key)
    assert not _goes(replica, channel, store, 30) and not _goes(replica, channel, store, 4)


@pytest.mark.parametrize("codec_name", ["context", "raw"])
def test_what_cannot_be_undone_takes_full_weights(store: FaultyStore, codec_name: str) -> None:
    channel = _made(store, 4, codec_name)
    replica = Replica(store)
    replica.sync()
    assert _goes(replica, channel, store, 2)


def test_an_anchor_between_takes_full_weights(store: FaultyStore) -> None:
    channel = _made(store, 3)
    assert channel.tip is not None
    channel.anchor(trained(channel.bits[channel.tip.sha256], 7))
    channel.delta(trained(channel.bits[channel.tip.sha256], 8))
    channel.head()
    replica = Replica(store)
    replica.sync()
    assert _goes(replica, channel, store, 2)
    assert replica.sync() == 5
    assert not _goes(replica, channel, store, 4)


def test_a_tensor_that_was_replaced_is_undone(store: FaultyStore) -> None:
    channel = _made(store, 2)
    assert channel.tip is not None
    before = channel.bits[channel.tip.sha256]
    channel.delta(dict(before) | {"embed": torch.randn(400, 300).to(torch.bfloat16)})
    channel.head()
    replica = Replica(store)
    replica.sync()
    for version in (2, 3):
        assert not _goes(replica, channel, store, version), version


def test_damage_on_the_way_back_takes_full_weights(store: FaultyStore) -> None:
    channel = _made(store, 8)
    replica = Replica(store)
    replica.sync()
    part = next(key for _, key in store.calls if key.startswith(keys.parts_folder(8, EPOCH)))
    store.put(part, b"damaged")
    assert _goes(replica, channel, store, 6)


def test_a_compaction_that_lies_is_found_out(store: FaultyStore) -> None:
    channel = _made(store, 30)
    versions = {version.version: version for version in ChannelReader(store).versions()}
    replica = Replica(store)
    replica.sync()
    true = channel.bits[versions[5].sha256]
    channel.bits[versions[5].sha256] = channel.bits[versions[6].sha256]
    channel.compaction(versions[5], versions[25])
    channel.bits[versions[5].sha256] = true
    store.delete(versions[15].key)
    assert _goes(replica, channel, store, 4)


def test_another_branch_takes_full_weights(store: FaultyStore) -> None:
    """Version 4 was served; then a backup of version 2 was restored and trained on to another version 4."""
    channel = _made(store, 4)
    replica = Replica(store)
    replica.sync()
    for number in (3, 4):
        store.delete(keys.slot(number, EPOCH))
    channel.tip = next(ChannelReader(store).versions())
    for seed in (30, 31):
        channel.delta(trained(channel.bits[channel.tip.sha256], seed))
    channel.head()
    assert _goes(replica, channel, store, 3)


def test_a_server_undoes(engine: Engine, trainer: Trainer, memory_url: str, registry: CollectorRegistry) -> None:
    async def body() -> None:
        bits = {}
        for _ in range(4):
            version = trainer.publish()
            bits[version] = trainer.weights["w"].clone()
        async with following(engine, memory_url, registry) as driver:
            await driver.reach(4)
            for where, version in (("3", 3), ("1 behind", 3), ("1", 1), ("newest", 4)):
                driver.set_pin(Pin.parse(where))
                await driver.reach(None)
                assert (driver.version, engine.weight_version) == (version, str(version))
                assert torch.equal(engine.model.w, bits[version])
                assert not driver.commits[-1].anchor and driver.commits[-1].payload_bytes < bits[version].nbytes

    asyncio.run(body())
