"""When to ask for the next version again, and the records that the store announced."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Self

from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.errors import StoreError
from deltasync.stores.base import ObjectInfo, Store, Watch

_MOST_KNOWN = 64  # announced records that wait for a step
_FIRST_S = 0.02
_GROWTH = 1.5
_LIVE_S = 30.0
_SCARCE_S = 10.0  # least wait while little is left of a quota
_OUTAGE_S = 5.0  # longest wait between two attempts while the store fails
# The next version is expected between these multiples of the shortest and the longest of the last times between two. Then
# the waits are this fraction of the longest, or this fraction of the time until or since the mean, whichever is less.
_EARLIEST, _LATEST = 0.75, 1.5
_POLLS_APART = 0.03
_POLLS_CLOSE = 0.2


class Announcements:
    """Records that a store announced, by key, until a step takes them. Adding is thread-safe.

    Attributes:
        is_taken: Whether the last step took the newest record that was announced, so that nothing is left to take.
    """

    def __init__(self) -> None:
        self._records: dict[str, ObjectInfo] = {}
        self.is_taken = False

    def add(self, info: ObjectInfo) -> None:
        """Note an announced record."""
        if len(self._records) >= _MOST_KNOWN:
            self._records = {}
        self._records[info.key] = info

    def take(self) -> dict[str, ObjectInfo]:
        """Return the announced records, and forget them."""
        self.is_taken, taken, self._records = False, self._records, {}
        return taken

    def committed(self, taken: Mapping[str, ObjectInfo], live: str, newest: VersionId | None) -> None:
        """Keep those of the `taken` records that are later than `newest`; `live` is the key of the committed one."""
        later = {key: info for key, info in taken.items() if _is_later(key, newest)}
        self._records = later | self._records
        self.is_taken = not later and live in taken and newest is not None and live == newest.key


def _is_later(key: str, newest: VersionId | None) -> bool:
    slot = keys.slot_of(key)
    return slot is not None and (newest is None or slot.newness > newest.slot.newness)


class Poll:
    """Waits between two requests: from 20 ms after a version, because another may follow soon, up to an interval.

    Trainers publish at a rhythm: around the time at which the next version is due, the waits are short again, 3 % of the
    time between two versions, and shorter near that time. A store that announces new objects is only asked rarely while that
    works; one that says that little is left of a quota (`Store.is_scarce`) every 10 s.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._delay_s = _FIRST_S
        self._moved_s: float | None = None
        self._between_s: deque[float] = deque(maxlen=4)
        self._watch: Watch | None = None
        self._store: Store | None = None

    @contextlib.contextmanager
    def watching(self, store: Store, on_change: Callable[[ObjectInfo | None], None]) -> Iterator[Self]:
        """Return a context in which the store may announce records: `on_change` is called from another thread."""
        self._store, self._watch = store, store.watch(keys.VERSIONS, on_change)
        try:
            yield self
        finally:
            if self._watch is not None:
                self._watch.close()
            self._watch = None

    @property
    def is_pushed(self) -> bool:
        """Whether the store announces new records at present."""
        return self._watch is not None and self._watch.live

    def delay_s(self, moved: bool, failure: BaseException | None = None, announced: bool = False) -> float:
        """Return the seconds to wait.

        Args:
            moved: The last request gave a new version.
            failure: Why it failed.
            announced: The new version is the newest that the store announced: the next one will be announced, too.
        """
        now_s = time.monotonic()
        if moved:
            if self._moved_s is not None:
                self._between_s.append(now_s - self._moved_s)
            self._moved_s, self._delay_s = now_s, _FIRST_S
        is_outage = isinstance(failure, StoreError)
        longest_s = max(_OUTAGE_S, self._interval_s) if is_outage else self._interval_s
        delay_s = min(self._delay_s, longest_s, math.inf if is_outage else self._due_s(now_s))
        self._delay_s = min(_GROWTH * self._delay_s, longest_s)
        if failure is None and (announced or not moved) and self.is_pushed:
            return max(_LIVE_S, self._interval_s)
        if self._store is not None and self._store.is_scarce:
            delay_s = max(delay_s, _SCARCE_S)
        # Random, so that many replicas do not keep asking at the same moment.
        return max(delay_s * random.uniform(0.9, 1.0), getattr(failure, "wait_s", None) or 0.0)

    def _due_s(self, now_s: float) -> float:
        """Return how long to wait at most, by the rhythm of the last versions."""
        if self._moved_s is None or not self._between_s:
            return math.inf
        since_s, longest_s = now_s - self._moved_s, max(self._between_s)
        if since_s > _LATEST * longest_s:
            return math.inf
        off_s = abs(statistics.fmean(self._between_s) - since_s)
        apart_s = min(_POLLS_APART * longest_s, _POLLS_CLOSE * off_s)
        return max(_FIRST_S, _EARLIEST * min(self._between_s) - since_s, apart_s)
