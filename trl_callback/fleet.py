"""The replicas of a training run: how far they may lag behind it, and their numbers for its logs."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from deltasync import Receipt
from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.errors import DeltaSyncError
from deltasync.stores.base import Store
from deltasync.threads import daemon

_REFRESH_EVERY_S = 5.0


class Fleet:
    """Reads the state of the replicas in the background, from the servers at `urls` or from the channel's heartbeats."""

    def __init__(self, store: Store, urls: Sequence[str]) -> None:
        self._store = store
        self._urls = urls
        self._read_s = -_REFRESH_EVERY_S
        self._seen: list[Heartbeat] | None = None
        self._beats: tuple[str, heartbeat.Heartbeats] | None = None

    def metrics(self, run_id: str, newest_version: int, published: Mapping[int, str]) -> dict[str, float]:
        """Return the number of live replicas and the lag of the slowest one, in versions; empty if there is no new state.

        `published` has the digests of this publisher's versions. A replica with another digest for a number counts as
        serving none.
        """
        seen, self._seen = self._seen, None
        if time.monotonic() - self._read_s >= _REFRESH_EVERY_S:
            self._read_s = time.monotonic()
            # A daemon, because the process must be able to end while a store or a server hangs.
            daemon("watch", functools.partial(self._refresh, run_id)).start()
        if seen is None:
            return {}
        live = [beat for beat in seen if heartbeat.is_live(beat)]
        metrics: dict[str, float] = {"delta_sync/replicas": len(live)}
        if served := [_served_version(beat, published) for beat in live if beat.pin is None]:
            metrics["delta_sync/served_lag"] = max(0, newest_version - min(served))
        return metrics

    def _refresh(self, run_id: str) -> None:
        try:
            if self._beats is None or self._beats[0] != run_id:
                self._beats = run_id, heartbeat.Heartbeats(self._store, run_id)
            self._seen = heartbeat.ask(self._urls, run_id) if self._urls else self._beats[1].refresh()
        except DeltaSyncError:
            self._seen = None  # the next read may succeed


def _served_version(beat: Heartbeat, published: Mapping[int, str]) -> int:
    """Return the version that a replica serves, 0 for none. A version before this publisher counts by its number."""
    serving = beat.serving
    if serving is None or published.get(serving.version, serving.sha256) != serving.sha256:
        return 0
    return serving.version


@dataclasses.dataclass(eq=False)
class _Published:
    """One publication; several may have been merged into one version."""

    number: int  # of earlier publications
    receipt: Receipt
    count: int | None = None  # the trainer's own number of the version, once known
    error: BaseException | None = None  # from waiting for it


class Pace:
    """Lets training continue while the fleet serves a version at most `max_behind` behind.

    A thread waits for the versions within the bound. `wait_for` blocks until the fleet serves a version, and raises if it
    does not in time.
    """

    def __init__(self, wait_for: Callable[[Receipt], None], max_behind: int) -> None:
        self._wait_for = wait_for
        self._window: deque[_Published] = deque(maxlen=max_behind + 1)
        self._number = 0
        self._served: _Published | None = None
        self._update: Callable[[int], None] | None = None
        self._waits = False  # whether the thread runs
        self._changed = threading.Condition()

    @property
    def served(self) -> int | None:
        """The newest version that the fleet is known to serve; None before the first."""
        return None if self._served is None else self._served.receipt.version

    def keep(self, receipt: Receipt) -> float:
        """Add a published version, wait until the fleet is close enough (always for the first version), and return the
        seconds.
        """
        before_s = time.perf_counter()
        with self._changed:
            self._window.append(_Published(self._number, receipt))
            self._number += 1
            due = self._window[0]
            due.error = None  # until now training did not depend on it
            if not self._waits:
                self._waits = True
                daemon("watch", self._refresh).start()
            self._changed.wait_for(lambda: due.error is not None or self._serves(due))
        if due.error is not None:
            raise due.error
        return time.perf_counter() - before_s

    def report(self, count: int, update: Callable[[int], None]) -> None:
        """Report the version that the fleet serves with `update`, now and whenever it serves a newer one.

        `count` is the trainer's own number of the last publication, and `update` takes such numbers. The thread calls it
        too, but never two threads at once.
        """
        with self._changed:
            self._update = update
            if self._window:
                self._window[-1].count = count
            served = None if self._served is None else self._served.count
            update(count if served is None else served)

    def _serves(self, published: _Published) -> bool:
        return self._served is not None and self._served.number >= published.number

    def _refresh(self) -> None:
        """Wait for each version in turn, until the fleet serves it or the wait fails."""
        while True:
            with self._changed:
                due = next((each for each in self._window if each.error is None and not self._serves(each)), None)
                if due is None:
                    self._waits = False
                    return
            try:
                self._wait_for(due.receipt)
            except BaseException as error:  # noqa: BLE001 - `keep` raises it if training depends on this version
                with self._changed:
                    due.error = error
                    self._changed.notify_all()
                continue
            with self._changed:
                if not self._serves(due):
                    self._served = due
                    if self._update is not None and due.count is not None:
                        self._update(due.count)
                self._changed.notify_all()
