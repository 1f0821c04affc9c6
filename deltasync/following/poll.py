"""When to ask for the next version (`Poll`), and fetching its parts before its record exists (`Prefetch`)."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Self

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import StoreError
from deltasync.stores.base import ObjectInfo, Store, Watch
from deltasync.threads import Workers

_FIRST_S = 0.02
_FIRST_SHARE = 0.02  # of the interval, where that is more: a long one bounds what many replicas ask at once
_GROWTH = 1.5
_LIVE_S = 30.0
_SCARCE_S = 10.0  # least wait while little is left of a quota
_OUTAGE_S = 5.0  # longest wait between two attempts while the store fails
# Least part of a wait, which is random, so that many replicas do not keep asking at the same moment; during
# an outage, which may begin for all of them at once, they are to be apart soon.
_JITTER, _OUTAGE_JITTER = 0.9, 0.5
# The next version is expected between these multiples of the shortest and the longest of the last times
# between two. Then the waits are this fraction of the longest, or this fraction of the time until or since
# the mean, whichever is less.
_EARLIEST, _LATEST = 0.75, 1.5
_POLLS_APART = 0.03
_POLLS_CLOSE = 0.2


class Poll:
    """Waits between two requests: from 20 ms, or 2 % of the interval, after a version, because another may
    follow soon, up to an interval.

    Trainers publish at a rhythm: around the time at which the next version is due, the waits are short again,
    3 % of the time between two versions, and shorter near that time. A store that announces new objects is
    only asked rarely while that works; one that says that little is left of a quota (`Store.is_scarce`) every
    10 s.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._first_s = self._delay_s = max(_FIRST_S, _FIRST_SHARE * interval_s)
        self._moved_s: float | None = None
        self._between_s: deque[float] = deque(maxlen=4)
        self._watch: Watch | None = None
        self._store: Store | None = None

    @contextlib.contextmanager
    def watching(self, store: Store, on_change: Callable[[ObjectInfo | None], None]) -> Iterator[Self]:
        """Return a context in which the store may announce records: `on_change` is called from another
        thread.
        """
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

    def delay_s(
        self, moved: bool, failure: BaseException | None = None, *, took_announced: bool = False
    ) -> float:
        """Return the seconds to wait.

        Args:
            moved: The last request gave a new version.
            failure: Why it failed.
            took_announced: As `Cursor.took_announced`: nothing is left to take.
        """
        now_s = time.monotonic()
        if moved:
            if self._moved_s is not None:
                self._between_s.append(now_s - self._moved_s)
            self._moved_s, self._delay_s = now_s, self._first_s
        is_outage = isinstance(failure, StoreError)
        longest_s = max(_OUTAGE_S, self._interval_s) if is_outage else self._interval_s
        delay_s = min(self._delay_s, longest_s, math.inf if is_outage else self._due_s(now_s))
        self._delay_s = min(_GROWTH * self._delay_s, longest_s)
        if failure is None and (took_announced or not moved) and self.is_pushed:
            return max(_LIVE_S, self._interval_s)
        if self._store is not None and self._store.is_scarce:
            delay_s = max(delay_s, _SCARCE_S)
        jitter = random.SystemRandom().uniform(_OUTAGE_JITTER if is_outage else _JITTER, 1.0)
        return max(delay_s * jitter, getattr(failure, "wait_s", None) or 0.0)

    def _due_s(self, now_s: float) -> float:
        """Return how long to wait at most, by the rhythm of the last versions."""
        if self._moved_s is None or not self._between_s:
            return math.inf
        since_s, longest_s = now_s - self._moved_s, max(self._between_s)
        if since_s > _LATEST * longest_s:
            return math.inf
        off_s = abs(statistics.fmean(self._between_s) - since_s)
        apart_s = min(_POLLS_APART * longest_s, _POLLS_CLOSE * off_s)
        return max(self._first_s, _EARLIEST * min(self._between_s) - since_s, apart_s)


# multiples of the time between the last two versions; the next is expected between these
_EARLY, _LATE = 0.7, 3.0
_WAITS_S = 0.02, 0.04, 0.08, 0.16, 0.32  # between two requests for a part that comes soon
_SOON = 0.1  # how long to wait for the record, as a fraction of the time since the first part came
_SOON_S = 0.02, 0.1  # the shortest and the longest such wait


class Prefetch:
    """Fetches the parts of a version for one replica, in its own threads, while the publisher still uploads
    others.

    The guess is the next version of the same log, with as many parts of each rank as the last one. Once that
    version is due by the rhythm of the last two, each poll asks for the first part of each rank, and if it is
    there, for the rank's other parts. A part is used only once a record names its digest
    (`ChannelReader.fetch`), so a wrong guess costs only a few requests. Not thread-safe.
    """

    def __init__(self, reader: ChannelReader) -> None:
        self._reader = reader
        self._counts: Counter[int] = Counter()  # parts of each rank in the last version
        self._slot: Slot | None = None
        self._left: dict[int, list[int]] = {}  # numbers of each rank's parts that did not come yet
        self._running: list[Future[None]] = []
        self._workers = Workers(limits.PREFETCHES_AT_ONCE, "fetch")
        self._taken_s = self._between_s = 0.0
        self._first_s: float | None = None  # when the first part of the slot came
        self._left_bytes = limits.PREFETCHED_BYTES

    def took(self, stored: StoredRecord) -> None:
        """Note that a version was found; the next one is expected to have as many parts."""
        now = time.monotonic()
        self._between_s, self._taken_s = now - self._taken_s, now
        names = (file.key.rpartition("/")[2] for file in stored.record.payload_files)
        self._counts = Counter(int(name[:3]) for name in names if name[:3].isdigit())
        self._slot = None

    def expect(self, slot: Slot) -> bool:
        """Ask for the parts of a slot that has no record yet, unless requests are under way.

        If parts have come, so that the record must come soon, waits a moment and returns True.
        """
        since_s = time.monotonic() - self._taken_s
        if not self._counts or not _EARLY * self._between_s <= since_s <= _LATE * self._between_s:
            return False
        if all(future.done() for future in self._running):
            if slot != self._slot:
                self._slot, self._left_bytes, self._first_s = slot, limits.PREFETCHED_BYTES, None
                self._left = {rank: list(range(1, count + 1)) for rank, count in self._counts.items()}
                self._reader.prefetched.clear()
            self._running = []  # before anything begins that adds to it
            for rank, left in self._left.items():
                if left:
                    self._running.append(self._workers.submit(self._begin, slot, rank, left[0]))
        least_s, most_s = _SOON_S
        wait_s = 0.0 if self._first_s is None else max(least_s, _SOON * (time.monotonic() - self._first_s))
        if slot != self._slot or not 0 < wait_s <= most_s:
            return False
        time.sleep(wait_s)
        return True

    def _begin(self, slot: Slot, rank: int, number: int) -> None:
        """Fetch the next part of a rank; if it is there, the others too."""
        if self._fetch(slot, rank, number):
            self._running += [
                self._workers.submit(self._insist, slot, rank, number) for number in self._left[rank]
            ]

    def _insist(self, slot: Slot, rank: int, number: int) -> None:
        """Fetch a part that is being stored by now."""
        for wait_s in (*_WAITS_S, 0.0):
            if slot != self._slot or self._fetch(slot, rank, number):
                return
            time.sleep(wait_s)

    def _fetch(self, slot: Slot, rank: int, number: int) -> bool:
        if self._left_bytes <= 0:
            return False
        key = f"{keys.parts_folder(slot.version, slot.epoch)}/{keys.part(rank, number)}"
        size = self._reader.fetch_ahead(key, self._left_bytes)
        if size and slot == self._slot:
            self._left_bytes -= size
            self._left[rank].remove(number)
            self._first_s = self._first_s or time.monotonic()
        return size > 0
