"""The replicas, as training sees them: how far they may lag behind it, and what its logs say about them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from deltasync import Receipt
from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.errors import DeltaSyncError
from deltasync.stores.base import Store

_LOOK_EVERY_S = 5.0


class Fleet:
    """Looks at the replicas in the background, when metrics are asked for and the last look is old.

    It asks the servers at `urls`; without any, it reads the heartbeats in the channel's store.
    """

    def __init__(self, store: Store, urls: Sequence[str]) -> None:
        self._store = store
        self._urls = urls
        self._looked_s = -_LOOK_EVERY_S
        self._seen: list[Heartbeat] | None = None
        self._beats: tuple[str, heartbeat.Heartbeats] | None = None

    def metrics(self, run_id: str, newest_version: int, published: Mapping[int, str]) -> dict[str, float]:
        """Return how many replicas are live and how many versions the slowest is behind; empty before a look has ended.

        `published` has the digests of our versions. A replica that serves another version of such a number serves none of
        ours.
        """
        seen, self._seen = self._seen, None
        if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            _in_background(self._refresh, run_id)
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
            self._seen = None  # the next look may succeed


def _served_version(beat: Heartbeat, published: Mapping[int, str]) -> int:
    """The version that a replica serves, 0 for none. One from before this publisher counts by its number."""
    serving = beat.serving
    if serving is None or published.get(serving.version, serving.sha256) != serving.sha256:
        return 0
    return serving.version


@dataclasses.dataclass(eq=False)
class _Published:
    """One publish; several may have joined one version."""

    number: int  # how many there were before
    receipt: Receipt
    count: int | None = None  # the version that the trainer counts it as, once it says
    error: BaseException | None = None  # of the wait for it


class Pace:
    """Lets training go on while the fleet serves a version that is at most `max_behind` behind.

    One thread waits for the versions within the bound, so that training does not pay for the looks at the fleet. `wait_for`
    blocks until the fleet serves a version, and raises if it does not in time.
    """

    def __init__(self, wait_for: Callable[[Receipt], None], max_behind: int) -> None:
        self._wait_for = wait_for
        self._window: deque[_Published] = deque(maxlen=max_behind + 1)
        self._number = 0
        self._served: _Published | None = None
        self._tell: Callable[[int], None] | None = None
        self._looks = False  # whether the thread runs
        self._changed = threading.Condition()

    @property
    def served(self) -> int | None:
        """The newest of our versions that the fleet is known to serve; None before the first."""
        return None if self._served is None else self._served.receipt.version

    def keep(self, receipt: Receipt) -> float:
        """Add a version that was just published, wait until the fleet is near enough, and return the seconds that took.

        Before the first version the fleet serves nothing of ours, so that one is waited for in any case.

        Raises:
            BaseException: what `wait_for` raises.
        """
        before_s = time.perf_counter()
        with self._changed:
            self._window.append(_Published(self._number, receipt))
            self._number += 1
            due = self._window[0]
            due.error = None  # that was nobody's concern until now
            if not self._looks:
                self._looks = True
                threading.Thread(target=self._refresh, name="deltasync-replicas", daemon=True).start()
            self._changed.wait_for(lambda: due.error is not None or self._serves(due))
        if due.error is not None:
            raise due.error
        return time.perf_counter() - before_s

    def tell(self, count: int, update: Callable[[int], None]) -> None:
        """Tell the rollouts which version the fleet serves, now and as soon as it serves a newer one.

        The trainer counts the last publish as `count`, and `update` takes versions counted so. It is also called from the
        other thread, never by two at once.
        """
        with self._changed:
            self._tell = update
            if self._window:
                self._window[-1].count = count
            served = None if self._served is None else self._served.count
            update(count if served is None else served)

    def _serves(self, published: _Published) -> bool:
        return self._served is not None and self._served.number >= published.number

    def _refresh(self) -> None:
        """Wait for one version after the other, until the fleet serves all or it is known why not."""
        while True:
            with self._changed:
                due = next((each for each in self._window if each.error is None and not self._serves(each)), None)
                if due is None:
                    self._looks = False
                    return
            try:
                self._wait_for(due.receipt)
            except BaseException as error:  # noqa: BLE001 - `keep` raises it if training has to wait for this version
                with self._changed:
                    due.error = error
                    self._changed.notify_all()
                continue
            with self._changed:
                if not self._serves(due):
                    self._served = due
                    if self._tell is not None and due.count is not None:
                        self._tell(due.count)
                self._changed.notify_all()


def _in_background(look: Callable[..., None], *arguments: object) -> None:
    """Run it in a daemon thread, as the process must be able to end while a store or a server hangs."""
    threading.Thread(target=look, args=arguments, name="deltasync-replicas", daemon=True).start()
