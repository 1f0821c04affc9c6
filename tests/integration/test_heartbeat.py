from __future__ import annotations

import threading
import time

import pytest

from deltasync import heartbeat
from deltasync.errors import AckTimeoutError, ConfigError, StoreError, TransientStoreError
from deltasync.heartbeat import Heartbeat
from deltasync.stores import Store, open_store
from tests.faults import FaultyStore

RUN = "run-1"
LONG_AGO_S = 2 * heartbeat.LIVE_S


@pytest.fixture
def store(channel_url: str) -> Store:
    return open_store(channel_url)


def beat(
    store: Store,
    replica_id: str,
    version: int | None,
    state: str = "serving",
    *,
    error: str | None = None,
    age_s: float = 0.0,
    run_id: str = RUN,
) -> None:
    time_s = time.time() - age_s
    heartbeat.write(
        store, Heartbeat(replica_id=replica_id, run_id=run_id, version=version, state=state, error=error, time_s=time_s)
    )


def wait(store: Store, version: int, ack: str, timeout_s: float = 0.0) -> list[str]:
    return [found.replica_id for found in heartbeat.wait_for(store, RUN, version, ack, timeout_s)]


def test_any_needs_one_replica(store: Store) -> None:
    beat(store, "ahead", 4)
    beat(store, "late", 1)
    assert wait(store, 3, "any") == ["ahead"]


def test_all_needs_every_live_replica(store: Store) -> None:
    beat(store, "ahead", 4)
    beat(store, "late", 1, "staging")
    with pytest.raises(AckTimeoutError) as failure:
        wait(store, 3, "all")
    assert "late" in str(failure.value)
    assert "ahead" not in str(failure.value)
    beat(store, "late", 3, "staging")  # already on its way to the next one
    assert wait(store, 3, "all") == ["ahead", "late"]


def test_all_passes_over_a_dead_replica_but_needs_a_live_one(store: Store) -> None:
    beat(store, "alive", 3)
    beat(store, "dead", 1, age_s=LONG_AGO_S)
    assert wait(store, 3, "all") == ["alive"]
    beat(store, "alive", 3, age_s=LONG_AGO_S)
    with pytest.raises(AckTimeoutError, match="no replica is live") as failure:
        wait(store, 3, "all")
    assert "alive" in str(failure.value)
    assert "dead" in str(failure.value)


def test_any_takes_an_old_heartbeat_that_serves_the_version(store: Store) -> None:
    beat(store, "silent", 3, age_s=LONG_AGO_S)
    assert wait(store, 3, "any") == ["silent"]


@pytest.mark.parametrize("ack", ["any", "all"])
def test_a_failed_replica_lags_whatever_it_serves_and_is_named_with_its_error(store: Store, ack: str) -> None:
    beat(store, "broken", 3, "failed", error="disk full")
    with pytest.raises(AckTimeoutError) as failure:
        wait(store, 3, ack)
    assert "broken" in str(failure.value)
    assert "disk full" in str(failure.value)


def test_replicas_of_another_run_do_not_count(store: Store) -> None:
    beat(store, "stranger", 9, run_id="run-2")
    with pytest.raises(AckTimeoutError, match="no replica has ever reported"):
        wait(store, 3, "any")


def test_a_replica_that_has_no_version_yet_lags(store: Store) -> None:
    beat(store, "new", None, "waiting")
    with pytest.raises(AckTimeoutError, match="new"):
        wait(store, 1, "any")


def test_waits_until_the_version_is_served_and_not_much_longer(store: Store) -> None:
    beat(store, "replica", 1)
    later = threading.Timer(0.3, beat, (store, "replica", 2))
    later.start()
    before = time.monotonic()
    assert wait(store, 2, "all", timeout_s=20) == ["replica"]
    assert 0.25 < time.monotonic() - before < 5
    later.join()


def test_gives_up_in_time(store: Store) -> None:
    before = time.monotonic()
    with pytest.raises(AckTimeoutError):
        wait(store, 2, "any", timeout_s=0.3)
    assert 0.3 <= time.monotonic() - before < 5


def test_a_transient_error_is_tried_again(store: Store) -> None:
    faulty = FaultyStore(store)
    beat(store, "replica", 2)
    fault = faulty.fail_at("read", "replicas/", times=2, error=TransientStoreError)
    assert wait(faulty, 2, "any", timeout_s=20) == ["replica"]
    assert fault.hits == 2


def test_a_lasting_error_is_raised(store: Store) -> None:
    faulty = FaultyStore(store)
    beat(store, "replica", 2)
    faulty.fail_at("read", "replicas/", error=StoreError)
    with pytest.raises(StoreError):
        wait(faulty, 2, "any", timeout_s=20)


def test_refuses_an_unknown_ack(store: Store) -> None:
    with pytest.raises(ConfigError):
        wait(store, 2, "none")
