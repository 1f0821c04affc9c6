"""The heartbeats of a replica in the channel: a `Follow` is given a `HeartbeatWriter`."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import sha256_hex
from deltasync.errors import CorruptDataError, DeltaSyncError, ObjectMissingError, get_logger
from deltasync.following.status import Status
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.serve.life import Life
from deltasync.stores.base import Store
from deltasync.threads import Workers, daemon

logger = get_logger(__name__)

_SCARCE_S = 45.0  # less than `heartbeat.LIVE_S`
# From one look for others of its name to the next, doubled each time: nobody changes names so often.
_LOOK_S, _LONGEST_LOOK_S = 60.0, 3600.0
_TICK_S = 2.0  # how often the thread looks whether a heartbeat is due, and whether this is another life
_OWN = 64  # heartbeats of its own that a writer knows again: an earlier put may take effect late
_TRIES = 4  # identities that are drawn for one heartbeat, where others write each
_LAST_S = 5.0  # how long the last heartbeat may delay the end of a process
_WARNED = "warned"


class HeartbeatWriter:
    """Writes a replica's heartbeats in threads, at least every `interval_s`; neither a hung store nor the
    replica's own work stops the other.

    A channel that is gone gets none, because writing one would make its folder again. While little is left of
    a quota that the trainer shares (`Store.is_scarce`), there is one every `_SCARCE_S`, whatever changes. A
    heartbeat at its key that is not one of its own is a copy's: this replica then takes another identity.
    """

    def __init__(self, store: Store, interval_s: float = 10.0, life: Life | None = None) -> None:
        self._store, self._life = store, life or Life()
        self._interval_s, self._look_s = interval_s, _LOOK_S
        self._workers = Workers(1, "heartbeat")
        self._lock = threading.Lock()
        self._last: tuple[object, ...] = ()
        self._last_s = self._looked_s = -math.inf
        self._has_stopped = False
        self._renewed: Callable[[], object] = lambda: None
        self._own: deque[str] = deque(maxlen=_OWN)  # digests of what it wrote
        # the heartbeats of other boots of this name, as they were at the first look
        self._others: dict[str, object] = {}

    @property
    def boot(self) -> str:
        """Identifies this life of the replica."""
        return self._life.boot

    def run(
        self, status: Callable[[], Status], ended: threading.Event, renewed: Callable[[], object]
    ) -> None:
        """Have heartbeats written from now on, until `ended` is set, however long a step takes.

        Args:
            status: Returns the status; it must not wait for the replica's work.
            ended: Set once no more are wanted.
            renewed: Called after this process was suspended or restored, so that what it knows may be old.
        """
        self._renewed = renewed

        def tick() -> None:
            while not ended.wait(_TICK_S):
                try:
                    self.look()
                    self.update(status(), changed=False)
                except Exception:
                    logger.exception("deltasync could not write a heartbeat")

        try:
            daemon("heartbeat", tick).start()
        except RuntimeError as error:  # no more threads: one after each step has to do
            logger.warning("deltasync: no thread for heartbeats: %s", error)

    def look(self) -> None:
        """As `following.target.Heartbeats.look`. A heartbeat of the new identity is due then."""
        with self._lock:
            if not self._life.check():
                return
            self._last_s = -math.inf
        self._renewed()

    def update(self, status: Status, *, changed: bool = True) -> None:
        """Have a heartbeat written if the last one is old or, if `changed`, the status differs from it.

        An unwritten earlier one is dropped.
        """
        error = None if status.state == "stale" else status.error  # which says for how long
        content = (status.epoch, status.sha256, status.state, error)
        with self._lock:
            now_s = time.monotonic()
            since_s = now_s - self._last_s
            if self._has_stopped or (since_s < _SCARCE_S and self._store.is_scarce):
                return
            if (changed and content != self._last) or since_s >= self._interval_s:
                self._submit(status)
                self._last, self._last_s = content, now_s

    def stop(self, status: Status) -> None:
        """Write the last heartbeat, for a bounded time, unless there is nothing to take back."""
        with self._lock:
            self._has_stopped = True
            if not self._last and status.version is None:
                return
            last = self._submit(status)
        wait([last], _LAST_S)

    def _submit(self, status: Status) -> Future[None]:
        names = Heartbeat.__dataclass_fields__.keys() - {"time_s"}
        self._workers.drop()
        return self._workers.submit(self._write, Heartbeat(**{name: getattr(status, name) for name in names}))

    def _write(self, beat: Heartbeat) -> None:
        try:
            if not self._has_channel(beat):
                return
            data = heartbeat.encode(dataclasses.replace(beat, boot=self._life.boot))
            self._own.append(sha256_hex(data))
            self._store.put(keys.replica(beat.replica_id, self._life.boot), data)
            self._look_for_others(beat)
        except ObjectMissingError:
            pass
        except DeltaSyncError as error:  # nothing depends on heartbeats
            logger.warning("deltasync: heartbeat not written: %s", error)
        except Exception:
            logger.exception("deltasync could not write a heartbeat")

    def _has_channel(self, beat: Heartbeat) -> bool:
        """Whether the channel is there, as the last heartbeat shows. If that is another process's, take
        another identity.
        """
        for _ in range(_TRIES):
            key = keys.replica(beat.replica_id, self._life.boot)
            try:
                there = sha256_hex(self._store.read(key, limits.SMALL_BYTES))
            except ObjectMissingError:
                self._store.read_range(keys.CHANNEL, 0, 1)
                return True
            except CorruptDataError:
                there = ""
            if there in self._own:
                return True
            self._life.renew()
            logger.warning(
                "deltasync: another process writes %s, as after a restore of one snapshot in two places. "
                "This replica has "
                "boot %s from now on.",
                *(key, self._life.boot),
            )
        return False

    def _look_for_others(self, beat: Heartbeat) -> None:
        """Warn of each replica of this name that writes heartbeats while this one runs; one that has ended
        writes none.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < self._look_s:
            return
        boot = self._life.boot
        is_first, self._looked_s = self._looked_s == -math.inf, now_s
        self._look_s = self._look_s if is_first else min(2 * self._look_s, _LONGEST_LOOK_S)
        for other, info in heartbeat.others(self._store, beat.replica_id, boot).items():
            state = info.bytes, info.modified_s, info.content
            before = self._others.setdefault(other, state if is_first or other in self._life.past else None)
            if before not in (state, _WARNED):
                self._others[other] = _WARNED
                logger.warning(
                    "deltasync: another replica is named %s too: its heartbeat %s is not this one's (boot "
                    "%s). They count "
                    "as two; give each its own DELTASYNC_REPLICA_ID.",
                    *(beat.replica_id, info.key, boot),
                )
