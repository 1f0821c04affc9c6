"""What a channel can do to its readers and writers, and memory to a replica."""

from __future__ import annotations

import dataclasses

import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel import documents, keys
from deltasync.channel.reading import ChannelReader
from deltasync.errors import FencedError, MissingVersionError, NotPublishedError, RunMismatchError
from deltasync.stores import Store
from tests.builders import in_parts
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore
from tests.faults_matrix.matrix import (
    PATIENCE_S,
    Lab,
    Seen,
    assert_holds,
    expecting,
    listening,
    publish,
    row,
    timed,
    weights,
    wrong_promise,
)


@dataclasses.dataclass
class Run:
    """A channel at version 3, its publisher, and a replica at version 2."""

    store: Store
    publisher: Publisher
    replica: Replica


def _run(lab: Lab, **settings: object) -> Run:
    store = open_store(f"file://{lab.folder}/channel")
    publisher, replica = Publisher(store, **settings), Replica(store)  # type: ignore[arg-type]
    for seed in (1, 2, 3):
        publish(publisher, seed)
        if seed == 2:
            replica.sync()
    return Run(store, publisher, replica)


def _recovers(run: Run, seed: int, version: int) -> float:
    """Seconds of the sync that brings the replica to that model."""
    with timed() as took:
        assert run.replica.sync() == version
    assert_holds(run.replica, seed)
    return took[0]


@row(
    "The channel",
    "head is rewound to an older version",
    noticed="by nobody: head is a hint",
    back="nothing to come back from",
)
def _rewound(lab: Lab) -> Seen:
    run = _run(lab)
    run.replica.sync()
    head = ChannelReader(run.store).head()
    first = ChannelReader(run.store).numbered(1).version
    assert head is not None
    run.store.put(keys.HEAD, documents.encode(dataclasses.replace(head, version=1, sha256=first.sha256)))
    with listening() as warned:
        assert run.replica.sync() == 3
        assert_holds(run.replica, 3)
        assert Replica(run.store).sync() == 3
        assert publish(run.publisher, 4) == 4
    assert warned.messages == []
    return Seen("(nothing)", _recovers(run, 4, 4))


@row("The channel", "another run takes the channel's place", noticed="the run's id", back="a restart of the replica")
def _swapped(lab: Lab) -> Seen:
    run = _run(lab)
    run.publisher.close()
    for info in list(run.store.list("")):
        run.store.delete(info.key)
    with Publisher(run.store) as other:
        publish(other, 7)
        with expecting(RunMismatchError) as said:
            run.replica.sync()
        assert_holds(run.replica, 2)
        run.replica = Replica(run.store)
        return Seen(said[0], _recovers(run, 7, 1))


@row("The channel", "a delta is pruned under its reader", noticed="the missing object", back="an anchor, in the same sync")
def _delta_pruned(lab: Lab) -> Seen:
    with in_parts():
        return _vanishes(lab, keys.PARTS, 2, anchor_every=1)


@row(
    "The channel", "an anchor is pruned under its reader", noticed="the missing object", back="another one, in the same sync"
)
def _anchor_pruned(lab: Lab) -> Seen:
    return _vanishes(lab, f"{keys.ANCHORS}0000000003", None, anchor_every=2)


def _vanishes(lab: Lab, prefix: str, first: int | None, anchor_every: int) -> Seen:
    """What a replica planned to read is gone when it reads it."""
    run = _run(lab, anchor_every=anchor_every)
    store = FaultyStore(run.store)
    run.replica = Replica(store)
    if first is not None:
        run.replica.sync(first)
    store.drop(prefix)
    with listening() as warned:
        seconds = _recovers(run, 3, 3)
    return Seen(warned.one("Planning around it"), seconds)


@row(
    "The channel",
    "the only way to the newest version is pruned under its reader",
    noticed="the missing object",
    back="the next anchor",
)
def _all_pruned(lab: Lab) -> Seen:
    with in_parts():
        run = _run(lab, anchor_every=4)
        for info in list(run.store.list(f"{keys.PARTS}0000000003")):
            run.store.delete(info.key)
        with expecting(MissingVersionError) as said:
            run.replica.sync()
        assert_holds(run.replica, 2)
        assert publish(run.publisher, 4) == 4
        with expecting(MissingVersionError):
            run.replica.sync()
        assert publish(run.publisher, 5) == 5  # announces an anchor
    return Seen(said[0], _recovers(run, 5, 5))


@row("The channel", "two publishers write", noticed="the seal in the next slot", back="stopping one of them")
def _two_publishers(lab: Lab) -> Seen:
    run = _run(lab)
    other = Publisher(run.store, resume=True)
    assert publish(other, 4) == 4
    with expecting(FencedError) as said:
        publish(run.publisher, 5)
    with expecting(FencedError):
        run.publisher.close()
    seconds = _recovers(run, 4, 4)
    assert publish(other, 6) == 5
    other.close()
    _recovers(run, 6, 5)
    return Seen(said[0], seconds)


def _flip(replica: Replica, changes_next: bool) -> None:
    """Invert a bit of one element that version 3 changes, or of one that it does not."""
    live = replica.state_dict()["w"].view(-1).view(torch.int16)
    differs = live != weights(3)["w"].view(-1).view(torch.int16)
    at = int(torch.nonzero(differs if changes_next else ~differs)[0])
    live[at] ^= 1 << 4


@row(
    "A replica's memory",
    "a bit flips in an element that the next version changes",
    noticed="the fingerprint after the commit",
    back="rollback, audit, then an anchor, in the same sync",
)
def _flipped_where_it_changes(lab: Lab) -> Seen:
    run = _run(lab)
    _flip(run.replica, changes_next=True)
    with listening() as warned:
        seconds = _recovers(run, 3, 3)
    return Seen(warned.one("did not give"), seconds)


@row(
    "A replica's memory",
    "a bit flips in an element that no version changes",
    noticed="an audit (vLLM: each hour; Replica.audit)",
    back="an anchor, by the next sync",
)
def _flipped_elsewhere(lab: Lab) -> Seen:
    run = _run(lab)
    assert run.replica.audit()
    _flip(run.replica, changes_next=False)
    run.replica.sync()
    with listening() as warned:
        assert not run.replica.audit()
    with expecting(NotPublishedError):
        run.replica.state_dict()
    return Seen(warned.one("not those of version 3"), _recovers(run, 3, 3))


@row(
    "A replica's memory",
    "a version promises other bits than its delta gives",
    noticed="the fingerprint after the commit",
    back="rollback at once; the next anchor",
)
def _wrong_promise(lab: Lab) -> Seen:
    run = _run(lab, anchor_every=4)
    with wrong_promise():
        publish(run.publisher, 4)
    run.replica.sync(3)
    with listening() as warned, expecting(MissingVersionError):
        run.replica.sync()
    assert_holds(run.replica, 3)
    assert publish(run.publisher, 5) == 5  # announces an anchor
    return Seen(warned.one("did not give"), _recovers(run, 5, 5))


@row(
    "The trainer",
    "weights with NaN are published",
    noticed="a look at what changed",
    back="nothing to come back from: bits are bits",
)
def _nan(lab: Lab) -> Seen:
    run = _run(lab)
    model = weights(3)
    model["w"][5, 7:9] = torch.tensor([float("nan"), float("inf")])
    with listening() as warned:
        run.publisher.publish(model.items()).wait(PATIENCE_S)
    with timed() as took:
        assert run.replica.sync() == 4
    assert_same_bits(run.replica.state_dict(), model)
    return Seen(warned.one("NaN"), took[0])
