"""What replicas cost, counted: `benchmarks.fleet` with few replicas, in one process."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import fleet
from deltasync import open_store
from deltasync.channel import keys
from tests.faults import FaultyStore
from tests.waiting import wait_until

REPLICAS, VERSIONS = 30, 4


def asked(store: FaultyStore) -> Counter[str]:
    """Reads and listings, by the folder, or the file."""
    return Counter(f"{verb} {key.partition('/')[0]}" for verb, key in store.calls)


@pytest.mark.parametrize("count", [1, REPLICAS])
def test_a_version_costs_a_replica_one_read_and_the_trainer_nothing(
    memory_url: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a slow machine a refresh is due, which is another request
    monkeypatch.setattr("deltasync.following.cursor.REFRESH_S", 1e6)
    published, followed = (FaultyStore(open_store(memory_url)) for _ in range(2))
    trainer = fleet.Trainer(published)
    trainer.publish()
    replicas = fleet.Replicas(followed, 0, count)
    assert replicas.take(1) == count
    for number in range(2, VERSIONS + 2):
        wait_until(lambda: trainer.ack(number - 1, 60.0) == count)  # noqa: B023 - heartbeats follow the steps
        published.calls.clear()
        version, _ = trainer.publish()
        wait_until(lambda: ("put", keys.HEAD) in published.calls)
        writes = [key.partition("/")[0] for verb, key in published.calls if verb in ("put", "create")]
        # the record, and head, for any number of replicas; a slow machine may still learn the store's time
        assert sorted({*writes} - {"probe"}) == [keys.HEAD, "versions"] and writes.count("versions") == 1
        followed.calls.clear()
        replicas.take(version)
        found = asked(followed)
        assert found["read versions"] <= 2 * count  # the record, and the one after it, in vain
        rest = found.total() - found["read replicas"] - found["put replicas"] - found["list replicas"]
        assert rest - count <= 1.2 * count  # without the one in vain
        assert found["put replicas"] <= count


def test_a_replica_that_lags_costs_one_listing_and_few_reads_a_look(memory_url: str) -> None:
    published = FaultyStore(open_store(memory_url))
    trainer = fleet.Trainer(published)
    trainer.publish()
    replicas = fleet.Replicas(open_store(memory_url), 0, REPLICAS)
    replicas.take(1)
    wait_until(lambda: trainer.ack(1, 60.0) == REPLICAS)
    version, _ = trainer.publish()
    replicas.take(version, but=1)
    assert "replica-00000" in str(trainer.ack(version, 3.0))
    published.calls.clear()
    error = str(trainer.ack(version, 0.7))
    found = asked(published)
    assert error.count("replica-0") == 1 and found["read replicas"] <= 20 * found["list replicas"]
    replicas.take(version)
    assert trainer.ack(version, 60.0) == REPLICAS
