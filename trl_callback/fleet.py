"""The replicas of a training run: how far they may lag behind it, and their numbers for its logs."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from deltasync import Receipt
from deltasync.errors import DeltaSyncError
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.stores import Store
from deltasync.threads import daemon

_REFRESH_EVERY_S = 5.0


class Fleet:
    """Reads the state of the replicas in the background, from the servers at `urls` or from the channel's
    heartbeats.
    """

    def __init__(self, store: Store, urls: Sequence[str]) -> None:
        self._store = store
        self._urls = urls
        self._read_s = -_REFRESH_EVERY_S
        self._seen: list[Heartbeat] | None = None
        self._beats: tuple[str, heartbeat.FleetHeartbeats] | None = None

    def metrics(self, run_id: str, newest_version: int, published: Mapping[int, str]) -> dict[str, float]:
        """Return the number of live replicas and the lag of the slowest one, in versions; empty if there is
        no new state.

        `published` has the digests of this publisher's versions. A replica with another digest for a number
        counts as serving none.
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
                self._beats = run_id, heartbeat.FleetHeartbeats(self._store, run_id)
            self._seen = heartbeat.ask(self._urls, run_id) if self._urls else self._beats[1].refresh()
        except DeltaSyncError:
            self._seen = None  # the next read may succeed


def _served_version(beat: Heartbeat, published: Mapping[int, str]) -> int:
    """Return the version that a replica serves, 0 for none. A version before this publisher counts by its
    number.
    """
    serving = beat.serving
    if serving is None or published.get(serving.version, serving.sha256) != serving.sha256:
        return 0
    return serving.version


class Pace:
    """Lets training continue while the fleet serves a version at most `max_behind` behind.

    A thread waits for the versions within the bound. `wait_for` blocks until the fleet serves a version, and
    raises if it does not in time.
    """

    def __init__(self, wait_for: Callable[[Receipt], None], max_behind: int) -> None:
        self._wait_for = wait_for
        # the last publications; some may share a version
        self._window: deque[Receipt] = deque(maxlen=max_behind + 1)
        self._counts: dict[int, int] = {}  # the trainer's own number of each version, once known
        self._errors: dict[int, BaseException] = {}  # from waiting for a version
        self._update: Callable[[int], None] | None = None
        self._waits = False  # whether the thread runs
        self._changed = threading.Condition()
        # the newest version that the fleet is known to serve; None before the first
        self.served: int | None = None

    def keep(self, receipt: Receipt) -> float:
        """Add a published version, wait until the fleet is close enough (always for the first version), and
        return the seconds.
        """
        before_s = time.perf_counter()
        with self._changed:
            self._window.append(receipt)
            due = self._window[0].version
            self._errors.pop(due, None)  # until now training did not depend on it
            if not self._waits:
                self._waits = True
                daemon("watch", self._refresh).start()
            self._changed.wait_for(lambda: due in self._errors or self._serves(due))
            if due in self._errors:
                raise self._errors[due]
        return time.perf_counter() - before_s

    def report(self, count: int, update: Callable[[int], None]) -> None:
        """Report the version that the fleet serves with `update`, now and whenever it serves a newer one.

        `count` is the trainer's own number of the last publication, and `update` takes such numbers. The
        thread calls it too, but never two threads at once.
        """
        with self._changed:
            self._update = update
            if self._window:
                self._counts[self._window[-1].version] = count
            update(count if self.served is None else self._counts.get(self.served, count))

    def _serves(self, version: int) -> bool:
        return self.served is not None and self.served >= version

    def _refresh(self) -> None:
        """Wait for each version in turn, until the fleet serves it or the wait fails."""
        while True:
            with self._changed:
                waiting = (each for each in self._window if each.version not in self._errors)
                due = next((each for each in waiting if not self._serves(each.version)), None)
                if due is None:
                    self._waits = False
                    return
            error: BaseException | None = None
            try:
                self._wait_for(due)
            except BaseException as found:  # noqa: BLE001 - `keep` raises it if training depends on this version
                error = found
            with self._changed:
                if error is not None:
                    self._errors[due.version] = error
                elif not self._serves(due.version):
                    self.served = due.version
                    if self._update is not None and due.version in self._counts:
                        self._update(self._counts[due.version])
                self._changed.notify_all()
