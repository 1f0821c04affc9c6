"""One bad byte, for ever, in one object of each kind: all replicas are right again by the next anchor."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import pytest

from deltasync import Publisher, Replica
from deltasync.channel import heartbeat, keys
from deltasync.channel.heartbeat import Heartbeat
from deltasync.config import Retention
from deltasync.errors import AckTimeoutError, DeltaSyncError
from deltasync.stores import Store
from tests.builders import in_parts
from tests.faults_matrix.matrix import Seen, assert_holds, expecting, listening, publish, row, timed
from tests.faults_matrix.places import DECIDING, PLACES, Open, everywhere

_FOLDED = 20  # versions: further than a replica follows the log without looking for compactions


def spoil(store: Store, prefix: str) -> None:
    """Invert a bit in the first half of the first object there; in a record, that is its body."""
    key = min(info.key for info in store.list(prefix))
    data = bytearray(store.read(key, 1 << 30))
    data[len(data) // 4] ^= 1
    store.put(key, bytes(data))


def _slots(version: int) -> str:
    """Where the slots of a version begin."""
    return keys.slot(version, "").removesuffix(".safetensors")


class _Run:
    """A channel with an anchor every four versions, a replica at version 2 and the publisher there too."""

    def __init__(self, open_: Open, retention: Retention | None = None) -> None:
        self.open, self.retention = open_, retention or Retention()
        self.store, self.replica = open_(), Replica(open_())
        self.publisher = Publisher(open_(), anchor_every=None if retention else 4, retention=self.retention)
        self.seed = 0
        self.publish(2)
        assert self.replica.sync() == 2

    def publish(self, version: int) -> None:
        """Publish up to that version."""
        while self.seed < version:
            self.seed += 1
            assert publish(self.publisher, self.seed) == self.seed

    def reopen(self) -> None:
        """Another publisher goes on."""
        self.publisher.close()
        self.publisher = Publisher(self.open(), anchor_every=4, retention=self.retention, resume=True)

    def end(self, said: str) -> Seen:
        """By the next anchor, and after a new writer, all replicas are right."""
        with timed() as took:
            assert self.replica.sync() == self.seed
        assert_holds(self.replica, self.seed)
        fresh = Replica(self.open())
        assert fresh.sync() == self.seed
        assert_holds(fresh, self.seed)
        self.reopen()
        self.publish(self.seed + 2)
        self.publisher.close()
        for replica in (self.replica, fresh, Replica(self.open())):
            assert replica.sync() == self.seed
            assert_holds(replica, self.seed)
        return Seen(said, took[0])


def _on_the_way(prefix: str, open_: Open) -> Seen:
    """What leads to version 3 is damaged, and it alone."""
    with in_parts() if prefix == keys.PARTS else contextlib.nullcontext():
        run = _Run(open_)
        run.publish(3)
        spoil(run.store, _slots(3) if prefix == keys.VERSIONS else f"{prefix}0000000003")
        with contextlib.suppress(DeltaSyncError):
            run.replica.sync()
        assert_holds(run.replica, 2)
        run.publish(4)
        with expecting(DeltaSyncError) as said:
            run.replica.sync()
        assert_holds(run.replica, 2)
        run.publish(5)
        return run.end(said[0])


def _untold(open_: Open) -> Seen:
    """What nothing but the digest of version 3 covers, and that is named by version 4."""
    run = _Run(open_)
    run.publish(3)
    newest = run.publisher._log.tip  # type: ignore[union-attr]
    assert newest is not None
    data = run.store.read(newest.key, 1 << 30)
    at = data.rindex(b'"created_at":"') + len('"created_at":"2026-11-22T16:00:0')
    run.store.put(newest.key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert run.replica.sync() == 3
    assert_holds(run.replica, 3)  # by the fingerprint
    found = run.replica.identity
    assert found is not None and found != newest
    run_id = str(run.publisher.run_id)
    beat = Heartbeat(replica_id="a", run_id=run_id, state="serving", version=3, epoch=found.epoch, sha256=found.sha256)
    heartbeat.write(run.store, beat)
    with pytest.raises(AckTimeoutError):
        heartbeat.wait_for(run.store, run_id, 3, run.publisher.published, 0.0)
    run.publish(4)
    with expecting(DeltaSyncError) as said:
        run.replica.sync()
    assert_holds(run.replica, 3)
    run.publish(5)
    return run.end(said[0])


def _first_anchor(open_: Open) -> Seen:
    run = _Run(open_)
    run.publish(3)
    spoil(run.store, f"{keys.ANCHORS}0000000001")
    assert run.replica.sync() == 3
    with expecting(DeltaSyncError) as said:
        Replica(open_()).sync()
    run.publish(5)
    return run.end(said[0])


def _announced(prefix: str, open_: Open) -> Seen:
    """Not needed by anybody: there is another way."""
    run = _Run(open_)
    run.publish(5)
    spoil(run.store, prefix)
    with listening() as warned:
        assert Replica(open_()).sync() == 5
    return run.end(next(iter(warned.messages), "(nothing)"))


def _compaction(open_: Open) -> Seen:
    run = _Run(open_, Retention(compact_every=4))
    run.publish(_FOLDED)
    compactions: list[str] = []
    deadline = time.monotonic() + 30
    while not compactions:  # written in the background
        assert time.monotonic() < deadline
        time.sleep(0.05)
        compactions = [info.key for info in run.store.list(keys.COMPACTIONS) if keys.compaction_of(info.key)]
    assert run.replica.sync(1) == 1  # from where compactions lead
    spoil(run.store, max(compactions))
    with listening() as warned:
        assert run.replica.sync() == _FOLDED
    return run.end(next(iter(warned.messages), "(nothing)"))


def _opening(open_: Open) -> Seen:
    run = _Run(open_)
    run.reopen()
    run.publish(3)
    spoil(run.store, keys.EPOCHS)
    return run.end("(nothing)")


def _head(open_: Open) -> Seen:
    run = _Run(open_)
    spoil(run.store, keys.HEAD)
    assert Replica(open_()).sync() == 2
    run.publish(3)
    return run.end("(nothing)")


def _seal(open_: Open) -> Seen:
    run = _Run(open_)
    run.reopen()
    spoil(run.store, _slots(3))
    with listening() as warned:
        with contextlib.suppress(DeltaSyncError):
            run.replica.sync()
        assert_holds(run.replica, 2)
        run.publish(3)
        return run.end(next(iter(warned.messages), "(nothing)"))


_AS_DAMAGE, _NEXT_ANCHOR, _AT_ONCE = (
    "its digest, or its own contradictions",
    "the next anchor",
    "another way, in the same sync",
)
_ROWS: dict[str, tuple[Callable[[Open], Seen], str, tuple[str, ...]]] = {
    "a record": (functools.partial(_on_the_way, keys.VERSIONS), _NEXT_ANCHOR, PLACES),
    "a record, where nothing tells before the next one": (_untold, _NEXT_ANCHOR, PLACES),
    "a part": (functools.partial(_on_the_way, keys.PARTS), _NEXT_ANCHOR, PLACES),
    "a file of the first anchor": (_first_anchor, _NEXT_ANCHOR, PLACES),
    "a file of an announced anchor": (functools.partial(_announced, f"{keys.ANCHORS}0000000005"), _AT_ONCE, PLACES),
    "the announcement of an anchor": (functools.partial(_announced, keys.ANNOUNCEMENTS), _AT_ONCE, PLACES),
    "a compaction": (_compaction, _AT_ONCE, PLACES),
    "an epoch's document": (_opening, "nothing to come back from", PLACES),
    "head": (_head, "the next publish", PLACES),
    "a seal": (_seal, "the new epoch's first version", DECIDING),
}
for _what, (_run, _back, _kinds) in _ROWS.items():
    row("One bad byte, for ever", f"a byte of {_what} is bad", noticed=_AS_DAMAGE, back=_back)(everywhere(_run, _kinds))
