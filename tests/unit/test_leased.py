"""A store that decides by claims: who may create, and what a claim, a look and a late request are worth."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltasync import open_store
from deltasync.errors import FencedError, ObjectExistsError, TransientStoreError
from deltasync.stores import Store, leased
from deltasync.stores.leased import CLAIMS, LeasedStore
from tests.faults import FaultyStore
from tests.writers import QUICK


@pytest.fixture
def inner() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def claims(store: Store) -> list[str]:
    return [info.key for info in store.list(CLAIMS)]


def test_only_the_one_with_the_greatest_claim_creates(inner: Store) -> None:
    a, b = QUICK(inner), QUICK(inner)
    a.create("a", b"1")
    b.create("b", b"2")
    for store in (a, b):
        with pytest.raises((FencedError, ObjectExistsError)):
            store.create("a", b"3")
    with pytest.raises(
        FencedError, match=rf"has claimed {inner.url} \(claims/0000000002-\w+\) after this one"
    ):
        a.create("c", b"4")
    assert [claim[:17] for claim in claims(inner)] == ["claims/0000000001", "claims/0000000002"]
    assert (inner.read("a", 9), inner.read("b", 9), [*inner.list("c/")]) == (b"1", b"2", [])


def test_of_two_that_claim_at_once_one_creates(inner: Store) -> None:
    stores = [QUICK(FaultyStore(inner)) for _ in range(2)]
    for store in stores:
        store.inner.hide(lambda key: key.startswith(CLAIMS))  # type: ignore[attr-defined]
        store.claim()
        store.inner.hide(lambda _: False)  # type: ignore[attr-defined]
    first, last = claims(inner)
    assert first[:17] == last[:17]
    outcomes = []
    for number, store in enumerate(stores):
        try:
            store.create("a", b"%d" % number)
            outcomes.append(store)
        except FencedError:
            pass
    assert [store._claim for store in outcomes] == [last]


def test_a_claim_without_an_answer_is_put_again(inner: Store) -> None:
    faulty = FaultyStore(inner)
    store = QUICK(faulty)
    faulty.fail_at("put", CLAIMS, after=True)
    with pytest.raises(TransientStoreError):
        store.claim()
    store.create("a", b"1")
    assert len(claims(inner)) == 1


def test_a_listing_without_this_claim_does_not_count(inner: Store) -> None:
    faulty = FaultyStore(inner)
    store = QUICK(faulty)
    store.create("a", b"1")
    faulty.hide(lambda key: key.startswith(CLAIMS))
    with pytest.raises(TransientStoreError, match="does not list claims/"):
        store.create("b", b"1")
    faulty.hide(lambda _: False)
    inner.delete(*claims(inner))
    with pytest.raises(TransientStoreError, match="does not list claims/"):
        store.create("b", b"1")
    assert not [*inner.list("b")]
    store.create("b", b"1")  # it claims again
    (claim,) = claims(inner)
    inner.delete(claim)  # the store was restored, and another writer has claimed it
    inner.put(f"{claim[:18]}00000000", b"")
    with pytest.raises(FencedError):
        store.create("c", b"1")


def test_a_claim_settles_before_anything_is_created(inner: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(leased.time, "sleep", slept.append)
    store = LeasedStore(inner, settle_s=30.0)
    store.claim()
    store.create("a", b"1")
    assert len(slept) == 1 and 25 < slept[0] <= 30


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Readings of the clock, one after the other; all must be taken."""
    readings: list[float] = []
    monkeypatch.setattr(leased, "boot_s", lambda: readings.pop(0))
    yield readings
    assert not readings


@pytest.mark.parametrize(("began_s", "ended_s"), [(100.0, 109.0), (109.0, 100.0)])
def test_a_look_that_took_too_long_or_saw_the_clock_go_back_is_repeated(
    inner: Store, ticks: list[float], began_s: float, ended_s: float
) -> None:
    faulty = FaultyStore(inner)
    store = LeasedStore(faulty, settle_s=30.0)
    ticks += [0.0, 50.0, began_s, ended_s, 110.0, 110.1, 110.2]
    store.create("a", b"1")
    assert faulty.calls.count(("list", CLAIMS)) == 3  # to claim, and two looks


def test_nothing_is_sent_after_looks_that_all_took_too_long(inner: Store, ticks: list[float]) -> None:
    store = LeasedStore(inner, settle_s=30.0)
    ticks += [0.0, 50.0, 100.0, 109.0, 110.0, 119.0]
    with pytest.raises(TransientStoreError, match="nothing was sent"):
        store.create("a", b"1")
    assert not [*inner.list("a")]


def test_a_put_that_took_long_is_followed_by_a_look(inner: Store, ticks: list[float]) -> None:
    """Its writer stood still, and another one claimed meanwhile: the object is there, and does not count."""
    faulty = FaultyStore(inner)
    store = LeasedStore(faulty, settle_s=30.0)
    ticks += [0.0, 50.0, 100.0, 100.1, 200.0, 200.0]
    gate = faulty.hold_at("put", "a")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(store.create, "a", b"1")
        assert gate.entered.wait(60)
        inner.put(f"{CLAIMS}0000000007-00000000", b"")
        gate.opened.set()
        with pytest.raises(FencedError, match="claims/0000000007"):
            late.result()
    assert inner.read("a", 9) == b"1"
