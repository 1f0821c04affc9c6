"""The table of faults: each fault at each step on each store, what is visible meanwhile, and the bits afterwards.

`tests/integration/test_store_faults.py` strikes at HTTP requests, below the client; this strikes at calls of the store.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from deltasync import Publisher, Replica, follow
from deltasync.channel import heartbeat, keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    MissingVersionError,
    NotPublishedError,
    PublishLostError,
    PublishPendingError,
    StoreError,
    TransientStoreError,
)
from tests.builders import Weights, in_parts, settle, trained, weights
from tests.channels import EPOCH, Made
from tests.conftest import assert_same_bits
from tests.faults import FOREVER, FaultyStore, flipped
from tests.hub.fixtures import wait_until
from tests.integration.test_store_faults import assert_all_named
from tests.writers import QUICK, Place, place_of, snapshot

STORES = ["memory", "lease", "file", "s3", "hub"]
PATIENCE_S = 60.0

Strike = Callable[[FaultyStore, str, str], Callable[[], int]]
"""Strikes at an operation with keys of a prefix; what it returns says how often that happened."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Every kind of store; `lease` is memory that does not decide which of two writers wins."""
    found = place_of(request.param, request, tmp_path)
    if request.param == "lease":
        monkeypatch.setattr("deltasync.publish.acquire.Lease", lambda _: QUICK)
    return found


def fails(error: type[Exception], times: int = FOREVER, after: bool = False) -> Strike:
    """Raise at so many calls, before the store performs them or after it did."""

    def strike(store: FaultyStore, operation: str, prefix: str) -> Callable[[], int]:
        fault = store.fail_at(operation, prefix, times=times, after=after, error=error)
        return lambda: fault.hits

    return strike


def changes(change: Callable[[bytes], bytes] | None) -> Strike:
    """Reads answer other bytes; None: they find nothing."""

    def strike(store: FaultyStore, operation: str, prefix: str) -> Callable[[], int]:
        if change is None:
            store.drop(prefix)
        else:
            store.tamper(prefix, change)
        return lambda: sum(call[0] == operation and call[1].startswith(prefix) for call in store.calls)

    return strike


def hangs(store: FaultyStore, operation: str, prefix: str) -> Callable[[], int]:
    """The call is answered after a tenth of a second."""
    gate = store.hold_at(operation, prefix)

    def release() -> None:
        if gate.entered.wait(PATIENCE_S):
            gate.opened.wait(0.1)
            gate.opened.set()

    threading.Thread(target=release).start()
    return gate.entered.is_set


WRITE_FAULTS: dict[str, Strike] = {
    "fails twice": fails(TransientStoreError, times=2),
    "reply lost twice": fails(TransientStoreError, times=2, after=True),
    "hangs": hangs,
    "refused": fails(StoreError, times=1),
    "refused though done": fails(StoreError, times=1, after=True),
    "away": fails(TransientStoreError),
    "away though done": fails(TransientStoreError, after=True),
    "bug": fails(OSError, times=1),
}
READ_FAULTS: dict[str, Strike] = {
    "truncated": changes(lambda data: data[:-2]),  # JSON does without the last one, a line end
    "flipped": changes(flipped),
    "empty": changes(lambda data: b""),
    "longer": changes(lambda data: data + b"\0"),
    "other": changes(lambda data: b"[]"),
    "missing": changes(None),
    "away": fails(TransientStoreError),
    "refused": fails(StoreError),
    "hangs": hangs,
}
SERVED = {"s3": {"reply lost twice", "refused", "away though done"}, "hub": {"reply lost twice"}}
"""Faults of writing that are not slow there."""
PASSING = ("fails twice", "reply lost twice", "hangs")
DAMAGED = ("truncated", "flipped", "empty", "longer", "other", "missing")


def cases(names: str, rows: Sequence[tuple[object, ...]]) -> pytest.MarkDecorator:
    """Each row on each store. On stores behind a server most writes are slow: the same two ways of fencing are in memory."""
    found = []
    for kind in STORES:
        for row in rows:
            quick = kind not in SERVED or row[-1] in READ_FAULTS.keys() - WRITE_FAULTS.keys() | SERVED[kind]
            name = "-".join([kind, *map(str, row)])
            found.append(pytest.param(kind, *row, id=name, marks=() if quick else pytest.mark.slow))
    return pytest.mark.parametrize(f"place, {names}".replace(" ", "").split(","), found, indirect=["place"])


class Outcome(NamedTuple):
    """What comes of a fault.

    Attributes:
        error: The exact class that is raised, or the classes of which one is; None if nothing is.
        visible: The version that is seen right afterwards, None if none is.
    """

    error: type[DeltaSyncError] | tuple[type[DeltaSyncError], ...] | None
    visible: int | None


# Reading


class Scene:
    """A channel, and its reader's way to the store; the payload of version 2 is in a part."""

    def __init__(self, place: Place) -> None:
        self.store = FaultyStore(place.store)
        self.made = Made(place.store)
        self.bits: dict[int, Weights] = {1: weights()}
        self.bits[2] = trained(self.bits[1], 1)
        self.made.create(self.bits[1])
        self.made.anchor(self.bits[1])
        self.made.head()

    def second(self) -> None:
        """The trainer publishes version 2."""
        self.made.delta(self.bits[2], parts=1, inline=False)
        self.made.head()

    def holds(self, replica: Replica, version: int | None) -> None:
        """The replica has that version, with its bits."""
        assert replica.version == version
        if version is None:
            with pytest.raises(NotPublishedError):
                replica.state_dict()
        else:
            assert_same_bits(replica.state_dict(), self.bits[version])


READ_STEPS = {
    "channel": keys.CHANNEL,
    "head": keys.HEAD,
    "anchor's record": keys.slot(1, EPOCH),
    "record": keys.slot(2, EPOCH),
    "anchor": keys.ANCHORS,
    "part": keys.PARTS,
    "list": "",
}
_REFUSED = (CorruptDataError, MissingVersionError)
_FOLLOWER = ("record", "part")


def reading(joins: bool, step: str, fault: str) -> Outcome:
    """A replica that `joins` has nothing yet; the other one has version 1."""
    before = 1 if not joins or step == "part" or (step == "record" and fault in DAMAGED) else None
    if fault == "hangs":
        return Outcome(None, 2)
    if fault == "away":
        return Outcome(TransientStoreError, before)
    if fault == "refused":
        return Outcome(StoreError, before)
    if step == "head":
        return Outcome(None, 2)  # a hint
    if step == "channel":
        return Outcome(NotPublishedError if fault == "missing" else CorruptDataError, None)
    if step == "record" and fault == "missing":
        return Outcome(None, 1)  # not there yet
    return Outcome(_REFUSED, before)


READS = [
    ("joins" if joins else "follows", step, fault)
    for joins in (True, False)
    for step in READ_STEPS
    for fault in READ_FAULTS
    if (joins or step in _FOLLOWER) and (step != "list" or fault not in DAMAGED)
]


@cases("who, step, fault", READS)
def test_a_reader(place: Place, who: str, step: str, fault: str) -> None:
    """It has the bits of a version, or none, and reaches the newest once the store is well; it writes nothing."""
    joins = who == "joins"
    scene, expected = Scene(place), reading(joins, step, fault)
    replica = Replica(scene.store)
    if not joins:
        replica.sync()
    scene.second()
    before = snapshot(place.store)
    scene.store.calls.clear()
    struck = READ_FAULTS[fault](scene.store, "list" if step == "list" else "read", READ_STEPS[step])
    for _ in range(1 if expected.visible == 2 else 2):
        if expected.error is None:
            replica.sync()
        else:
            with pytest.raises(expected.error) as caught:
                replica.sync()
            assert isinstance(expected.error, tuple) or type(caught.value) is expected.error
            assert READ_STEPS[step] in str(caught.value) or expected.error is NotPublishedError
        scene.holds(replica, expected.visible)
    assert struck()
    scene.store.heal()
    assert replica.sync() == 2
    scene.holds(replica, 2)
    if step == "part":  # what it had before is not read again
        assert sum(key.startswith(keys.ANCHORS) for _, key in scene.store.calls) == joins
    late = Replica(scene.store)
    assert late.sync() == 2
    scene.holds(late, 2)
    assert snapshot(place.store) == before


# Publishing

WRITE_STEPS = {
    "channel": keys.CHANNEL,
    "anchor": keys.ANCHORS,
    "first record": keys.VERSIONS,
    "part": keys.PARTS,
    "record": keys.VERSIONS,
    "head": keys.HEAD,
}
_FIRST = ("channel", "anchor", "first record")


def publishing(decides: bool, step: str, fault: str) -> Outcome:
    """Of version 1 for the steps that only it has, of version 2 for the others."""
    number = 1 if step in _FIRST else 2
    before = number - 1 or None
    if fault in PASSING or step == "head":
        return Outcome(None, number)
    if step in ("anchor", "part") or (step == "channel" and not fault.startswith("away")):
        return Outcome(PublishLostError, before)
    if fault == "away though done" and decides:
        return Outcome(None, number)  # the slot is taken, by the same bytes
    return Outcome(PublishPendingError, number if fault.endswith("though done") and step != "channel" else before)


@cases("step, fault", list(itertools.product(WRITE_STEPS, WRITE_FAULTS)))
def test_a_publisher(place: Place, step: str, fault: str) -> None:
    """No version is lost unless that is said, none has other bits, and it goes on when the store is well."""
    store = place.writer()
    creates = place.decides and (step == "channel" or "record" in step)
    expected, state, bits = publishing(place.decides, step, fault), weights(), dict[int, Weights]()
    publisher = Publisher(store, retries=2, retry_delay_s=0.001, anchor_every=3)

    def publish() -> str:
        nonlocal state
        state = trained(state, len(bits) + 1)
        receipt = publisher.publish(state.items())
        bits[receipt.version] = state
        try:
            return receipt.wait(PATIENCE_S).kind
        except PublishLostError:
            del bits[receipt.version]
            raise
        finally:
            settle(publisher)

    with in_parts():
        if step not in _FIRST:
            publish()
        struck = WRITE_FAULTS[fault](store, "create" if creates else "put", WRITE_STEPS[step])
        if expected.error is None:
            assert publish() == ("anchor" if step in _FIRST else "delta")
        else:
            with pytest.raises(DeltaSyncError) as caught:
                publish()
            assert type(caught.value) is expected.error
            assert "next publish puts" in str(caught.value) or expected.error is PublishLostError
        assert struck()
        assert _visible(place, bits) == expected.visible
        store.heal()
        kinds = [publish(), publish()]
    publisher.close()
    # A loss leaves its number to the next version, which builds on nothing that was lost.
    assert (kinds[0] == "anchor") == (expected.error is PublishLostError or len(bits) == 2)
    assert list(bits) == list(range(1, len(bits) + 1))
    assert [version.version for version in ChannelReader(place.store).versions()] == list(bits)[::-1]
    witness = Replica(place.store)
    for version, expected_bits in bits.items():
        witness.sync(version)
        assert_same_bits(witness.state_dict(), expected_bits)
    place.journal.check(place.store)
    assert_all_named(place.store)


def _visible(place: Place, bits: dict[int, Weights]) -> int | None:
    """The version that a new replica gets, with its bits."""
    replica = Replica(place.store)
    with contextlib.suppress(NotPublishedError):
        version = replica.sync()
        assert_same_bits(replica.state_dict(), bits[version])
    return replica.version


# Taking a channel over

OPEN_STEPS = {
    "channel": ("read", keys.CHANNEL),
    "head": ("read", keys.HEAD),
    "list": ("list", ""),
    "claim": ("put", keys.EPOCHS),
    "probe": ("create", "probe/"),
    "seal": ("create", keys.VERSIONS),
}


OPENS = [
    (step, fault)
    for step in OPEN_STEPS
    for fault in list(WRITE_FAULTS)[:-1]
    if step != "probe" or fault in PASSING  # a store that refuses it is taken for one that does not decide
]


@cases("step, fault", OPENS)
def test_a_publisher_that_takes_over(place: Place, step: str, fault: str) -> None:
    """It opens the channel at its end, or says that it could not, and the next one does."""
    if step in ("probe", "seal") and not place.decides:
        pytest.skip("a lease is claimed; nothing is created")
    first, second, third = weights(), trained(weights(), 1), trained(weights(), 2)
    with Publisher(place.writer()) as publisher:
        publisher.publish(first.items()).wait(PATIENCE_S)
    store = place.writer("b")
    struck = WRITE_FAULTS[fault](store, *OPEN_STEPS[step])
    settings: dict[str, Any] = {"resume": True, "retries": 2, "retry_delay_s": 0.001}
    bits: dict[int, Weights] = {1: first}
    found: Publisher | None = None
    if fault in PASSING or (step == "seal" and fault == "away though done"):
        found = Publisher(store, **settings)
    else:
        with pytest.raises(StoreError) as caught:
            Publisher(store, **settings)
        assert type(caught.value) is (TransientStoreError if fault.startswith("away") else StoreError)
    assert struck()
    assert _visible(place, bits) == 1
    store.heal()
    with Publisher(place.writer("c"), **settings) if found is None else found as publisher:
        receipt = publisher.publish(second.items()).wait(PATIENCE_S)
        assert (receipt.version, receipt.kind) == (2, "delta")
        bits[2] = second
        receipt = publisher.publish(third.items()).wait(PATIENCE_S)
        bits[3] = third
    assert _visible(place, bits) == 3
    place.journal.check(place.store)


# Heartbeats


class Module(torch.nn.Module):
    """A model of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(16, 4, dtype=torch.bfloat16), requires_grad=False)


@cases("fault", [(fault,) for fault in list(WRITE_FAULTS)[:-1]])
def test_a_replica_follows_on_while_its_heartbeat_fails(place: Place, fault: str) -> None:
    store, model = FaultyStore(place.store), Module()
    made = Made(place.store)
    made.create(model.state_dict())
    made.anchor(model.state_dict())
    struck = WRITE_FAULTS[fault](store, "put", keys.REPLICAS)
    with follow(model, store, poll_interval_s=0.01) as following:
        for version in (2, 3):
            after = {"w": torch.full((16, 4), version, dtype=torch.bfloat16)}
            made.delta(after)
            made.head()
            following.wait(version, timeout_s=PATIENCE_S)
            assert_same_bits(model.state_dict(), after)
        wait_until(struck)
        store.heal()
    (beat,) = heartbeat.read_all(place.store, made.run_id)
    assert (beat.version, beat.state) == (3, heartbeat.STOPPED)
