"""One writer after another, and stores that go back in time: no replica ever has wrong bits, and no wrong one counts."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import huggingface_hub.constants
import torch

from deltasync import Publisher, Replica
from deltasync.channel import heartbeat, keys
from deltasync.channel.documents import VersionId
from deltasync.channel.heartbeat import Heartbeat
from deltasync.channel.reading import ChannelReader
from deltasync.errors import AckTimeoutError, ConfigError, FencedError, MissingVersionError, NotPublishedError
from tests.faults_matrix.matrix import (
    PATIENCE_S,
    REPEATS,
    Lab,
    Seen,
    assert_holds,
    expecting,
    listening,
    publish,
    row,
    timed,
    weights,
)
from tests.faults_matrix.places import Open, chosen, everywhere, open_at, short_leases, url_of
from tests.http_faults import ignored
from tests.processes import PROCESSES, end_with_parent
from tests.writers import restore, snapshot

_FOREVER = 10_000


def _serves(version: VersionId, run_id: str) -> Heartbeat:
    return Heartbeat(
        replica_id="a",
        run_id=run_id,
        state="serving",
        version=version.version,
        epoch=version.epoch,
        sha256=version.sha256,
    )


def _restored(open_: Open) -> Seen:
    """Versions 4 and 5 are lost with the backup; 4 to 6 are others."""
    store, replica = open_(), Replica(open_())
    with Publisher(open_()) as first:
        for seed in (1, 2, 3):
            publish(first, seed)
        saved = snapshot(store)
        for seed in (4, 5):
            publish(first, seed)
        assert replica.sync() == 5
        lost, run_id = replica.identity, str(first.run_id)
        assert lost is not None
    restore(store, saved)
    with Publisher(open_(), resume=True) as second, listening() as warned:
        for seed, version in ((14, 4), (15, 5)):
            assert publish(second, seed) == version
        heartbeat.write(store, _serves(lost, run_id))
        with expecting(AckTimeoutError):
            heartbeat.wait_for(store, run_id, 5, second.published, 0.0)
        with timed() as took:
            assert replica.sync() == 5
        assert_holds(replica, 15)
        assert replica.identity is not None and replica.identity != lost
        heartbeat.write(store, _serves(replica.identity, run_id))
        assert heartbeat.wait_for(store, run_id, 5, second.published, 0.0)
        assert publish(second, 16) == replica.sync() == 6
    return Seen(warned.one("full weights"), took[0])


def _restored_epochs(open_: Open) -> Seen:
    """The store forgets epochs, so that the new one is less than that of the version that a replica has."""
    store, replica = open_(), Replica(open_())
    with Publisher(open_()) as first:
        publish(first, 1)
    saved = snapshot(store)
    for seed in (2, 3, 4):
        with Publisher(open_(), resume=True) as writer:
            publish(writer, seed)
    assert replica.sync() == 4
    restore(store, saved)
    with Publisher(open_(), resume=True) as second, listening() as warned:
        for seed in (12, 13):
            publish(second, seed)
        with timed() as took:
            for _ in range(12):  # of as many looks one is a listing
                replica.sync()
        assert_holds(replica, 13)
        assert publish(second, 14) == replica.sync() == 4
        assert_holds(replica, 14)
    return Seen(warned.one("not in the store any more"), took[0])


def _zombie(open_: Open) -> Seen:
    """The old writer goes on when the new one has published."""
    replica, zombie = Replica(open_()), Publisher(open_())
    for seed in (1, 2):
        publish(zombie, seed)
    with Publisher(open_(), resume=True) as successor:
        assert publish(successor, 13) == 3
        for seed in (3, 4):
            with expecting(FencedError) as said:
                publish(zombie, seed)
        with timed() as took:
            assert replica.sync() == 3
        assert_holds(replica, 13)
        with contextlib.suppress(FencedError):
            zombie.close()
        assert publish(successor, 14) == replica.sync() == 4
        assert_holds(replica, 14)
    return Seen(said[0], took[0])


def _zombie_restored(open_: Open) -> Seen:
    """The store forgot the epoch of a writer that goes on, so that nothing fences it; two logs may grow for a while."""
    store = open_()
    with Publisher(open_()) as first:
        for seed in (1, 2):
            publish(first, seed)
    saved = snapshot(store)
    zombie = Publisher(open_(), resume=True)
    publish(zombie, 3)
    replica, published = Replica(open_()), dict[str | None, int]()
    assert replica.sync() == 3
    restore(store, saved)
    successor, said = Publisher(open_(), resume=True), ""
    for number in range(4):
        for publisher, seed in ((successor, 23 + number), (zombie, 33 + number)):
            try:
                publish(publisher, seed)
                published[publisher.digest] = seed
            except FencedError as error:
                said = f"FencedError: {error}"
    with timed() as took:
        replica.sync()
    assert_holds(replica, published.get(replica.digest, 3))
    fresh = Replica(open_())
    with contextlib.suppress(MissingVersionError):  # if the zombie has the greater epoch: what it builds on is lost
        fresh.sync()
        assert_holds(fresh, published[fresh.digest])
    for publisher in (successor, zombie):
        with contextlib.suppress(FencedError):
            publisher.close()
    assert said
    with Publisher(open_(), resume=True) as last:
        publish(last, 50)
    for each in (replica, fresh):
        each.sync()
        assert_holds(each, 50)
    return Seen(said, took[0])


def _train(url: str, environ: Mapping[str, str], told: Connection) -> None:
    """Publish until another publisher does; tells each version, then the error."""
    end_with_parent()
    torch.set_num_threads(1)
    os.environ.update(environ)
    huggingface_hub.constants.ENDPOINT = environ.get("HF_ENDPOINT", "")
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    with short_leases():
        publisher = Publisher(open_at(url))
        for seed in itertools.count(1):
            time.sleep(0.05)
            try:
                told.send(publisher.publish(weights(seed).items(), step=seed).wait(PATIENCE_S).version)
            except FencedError as error:
                told.send(f"FencedError: {error}")
                return


def _suspended(kind: str, lab: Lab) -> Seen:
    """The old writer is suspended at a moment of chance, and goes on when the new one has published."""
    url = url_of(lab, kind)
    environ = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "HF_"))}
    if kind == "hub":
        environ = dict(lab.request.getfixturevalue("hub").env)
    receiver, sender = PROCESSES.Pipe(duplex=False)
    old = PROCESSES.Process(target=_train, args=(url, environ, sender))
    old.start()
    sender.close()
    served: dict[VersionId, int] = {}
    replica = Replica(open_at(url))

    def follow() -> None:
        with contextlib.suppress(NotPublishedError):
            replica.sync()
            assert replica.identity is not None
            served[replica.identity] = int(replica.state_dict()["step"])
            assert_holds(replica, served[replica.identity])

    try:
        while receiver.recv() < 3:
            follow()
        time.sleep(random.Random(lab.folder.name).uniform(0, 0.05))
        assert old.pid is not None
        os.kill(old.pid, signal.SIGSTOP)
        follow()
        with Publisher(open_at(url), resume=True) as new:
            for seed in (2001, 2002):
                publish(new, seed)
                follow()
            os.kill(old.pid, signal.SIGCONT)
            resumed_s = time.perf_counter()
            said = receiver.recv()
            while not isinstance(said, str):
                said = receiver.recv()
            took_s = time.perf_counter() - resumed_s
            publish(new, 2003)
        follow()
        assert_holds(replica, 2003)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(old.pid or 0, signal.SIGCONT)
        old.join(PATIENCE_S)
    reader = ChannelReader(open_at(url))
    history = list(reader.versions())
    assert history[0] == replica.identity
    assert [version.version for version in history] == list(range(len(history), 0, -1))
    for version in history[:5]:
        step, again = reader.record(version).record.step, Replica(open_at(url))
        assert step is not None
        again.sync(version.version)
        assert_holds(again, step)
        assert served.get(version, step) == step
    return Seen(said, took_s)


def _suspended_everywhere(lab: Lab) -> Seen:
    seen = []
    url_of(lab, "hub")  # its fixtures patch too, and so come first
    with short_leases():
        for kind in chosen(lab):
            for number in range(REPEATS if kind == "file" else 1):
                folder = lab.folder / f"{kind} {number}"
                folder.mkdir()
                seen.append(_suspended(kind, Lab(folder, lab.request)))
    return Seen(seen[0].said, max(each.recovered_s for each in seen), len(seen))


def _replayed(open_: Open) -> Seen:
    store, replica = open_(), Replica(open_())
    with Publisher(open_()) as publisher:
        publish(publisher, 1)
        publish(publisher, 2)
        old = store.read(keys.HEAD, 1 << 30)
        for seed in (3, 4, 5):
            publish(publisher, seed)
        assert replica.sync() == 5
        store.put(keys.HEAD, old)
        assert replica.sync() == 5
        fresh = Replica(open_())
        with timed() as took:
            assert fresh.sync() == 5
        assert_holds(fresh, 5)
        store.put(keys.HEAD, old)
        assert publish(publisher, 6) == replica.sync() == fresh.sync() == 6
        assert store.read(keys.HEAD, 1 << 30) != old
    return Seen("(nothing)", took[0])


def _ignoring(lab: Lab) -> Seen:
    """A lease takes the place of the seal; what was begun with seals is not written by this way."""
    service = lab.request.getfixturevalue("s3_service")
    with short_leases(), listening() as warned:
        service.proxy.strike(ignored("If-None-Match"), "PUT", times=_FOREVER)
        old, replica = Publisher(service.url), Replica(service.url)
        for seed in (1, 2):
            publish(old, seed)
        with Publisher(service.url, resume=True) as new:
            assert publish(new, 13) == 3
            with expecting(FencedError):
                publish(old, 3)
            with contextlib.suppress(FencedError):
                old.close()
            with timed() as took:
                assert replica.sync() == 3
            assert_holds(replica, 13)
        other = service.url.replace("/run?", "/other?")
        service.proxy.heal()
        with Publisher(other) as sealing:
            publish(sealing, 1)
        service.proxy.strike(ignored("If-None-Match"), "PUT", times=_FOREVER)
        with expecting(ConfigError):
            Publisher(other, resume=True)
    return Seen(warned.one("does not decide"), took[0])


_PART = "One writer after another"
row(
    _PART, "the store is restored from a backup", noticed="the digest of the version", back="full weights, at the next look"
)(everywhere(_restored))
row(
    _PART,
    "the store is restored from a backup that knows fewer epochs",
    noticed="the record of the version, which is gone",
    back="full weights, at the next look that lists; where records are signed, a restart of the replica",
)(everywhere(_restored_epochs))
row(_PART, "a writer goes on after another has opened the channel", noticed="the seal, or the epoch", back="the new writer")(
    everywhere(_zombie)
)
row(
    _PART,
    "a writer goes on whose epoch a restored store does not know",
    noticed="head, by the lesser of the two",
    back="the greater epoch",
)(everywhere(_zombie_restored))
row(
    _PART,
    "a writer is suspended (SIGSTOP) while another opens the channel",
    noticed="the seal, or the epoch",
    back="stopping",
)(_suspended_everywhere)
row(_PART, "an old head is put back", noticed="by nobody: head is a hint", back="a listing")(everywhere(_replayed))
row(_PART, "the store ignores If-None-Match", noticed="the probe at opening", back="a lease in the place of the seal")(
    _ignoring
)
