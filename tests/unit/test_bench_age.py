"""The cost of a long run, counted: `benchmarks.age` with fewer versions."""

from __future__ import annotations

import pytest

from benchmarks import age
from deltasync import Replica, open_store
from deltasync.channel import keys, record
from deltasync.channel.reading import ChannelReader
from tests.channels import made


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = age.run([1_000, 10_000])
    return found


@pytest.mark.parametrize("what", age.MEASURED)
def test_a_run_of_ten_thousand_versions_costs_no_more_requests_than_one_of_a_thousand(
    measured: dict[str, list[dict[str, float]]], what: str
) -> None:
    short, long = (row["requests"] for row in measured[what])
    assert long <= 1.25 * short


def test_what_is_filled_in_is_what_a_writer_stores(memory_url: str) -> None:
    store = open_store(memory_url)
    age.fill(store, 1_012)
    reader = ChannelReader(store)
    for number in (3, 10, 99, 100, 101, 1_000, 1_012):
        found = reader.numbered(number)
        assert found.data == record.encode(found.record, found.key, None, None).data
        assert found.record.base == reader.numbered(number - 1).version and found.record.step == number - 1
    assert [span.version for span, _ in reader.compactions()] == [500, 1_000]
    assert Replica(store).sync() == 1_012


def test_a_listing_counts_as_its_pages(memory_url: str) -> None:
    store = age.Counted(open_store(memory_url))
    made(store, 2)
    for number in range(1_001):
        store.put(f"{keys.REPLICAS}{number}", b"")
    store.requests.clear()
    assert len(list(store.list(keys.REPLICAS))) == 1_001 and not list(store.list("none/"))
    assert store.requests == {"list": 3}
