"""Fetch the parts of a version before its record exists, while the publisher is still uploading the others.

Guessed is the next version of the same log, with as many parts of each rank as the last one. A rank is asked for its first
part at each look, once the version is due by the rhythm of the last two; when it is there, for all others at once. A part is
used only once a record names its digest (`ChannelReader.fetch`), so a wrong guess costs a few requests and nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored

_MOST_BYTES = 1 << 28
_AT_ONCE = 4
_EARLY, _LATE = 0.7, 3.0  # times the time between the last two versions; one is expected between these
_WAITS_S = 0.02, 0.04, 0.08, 0.16, 0.32  # between two requests for a part that comes soon
_SOON = 0.1  # of the time since the first part came: wait so long for the record
_SOON_S = 0.02, 0.1  # but at least and at most so long


class Prefetch:
    """What one replica fetches ahead, in threads of its own. Not thread-safe."""

    def __init__(self, reader: ChannelReader) -> None:
        self._reader = reader
        self._counts: Counter[int] = Counter()  # parts of each rank in the last version
        self._slot: Slot | None = None
        self._left: dict[int, list[int]] = {}  # numbers of parts of each rank that did not come yet
        self._running: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._taken_s = self._between_s = 0.0
        self._first_s: float | None = None  # when the first part of the slot came
        self._left_bytes = _MOST_BYTES

    def took(self, stored: Stored) -> None:
        """A version was found; the next one may have parts if it has."""
        now = time.monotonic()
        self._between_s, self._taken_s = now - self._taken_s, now
        names = (file.key.rpartition("/")[2] for file in stored.record.payload_files)
        self._counts = Counter(int(name[:3]) for name in names if name[:3].isdigit())
        self._slot = None

    def look(self, slot: Slot) -> bool:
        """The record of a slot is not there yet: ask for parts, unless requests are under way.

        Returns whether parts have come, so that the record comes soon; waits a moment then.
        """
        since_s = time.monotonic() - self._taken_s
        if not self._counts or not _EARLY * self._between_s <= since_s <= _LATE * self._between_s:
            return False
        if all(future.done() for future in self._running):
            if slot != self._slot:
                self._slot, self._left_bytes, self._first_s = slot, _MOST_BYTES, None
                self._left = {rank: list(range(1, count + 1)) for rank, count in self._counts.items()}
                self._reader.held.clear()
            self._pool = self._pool or ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltasync-ahead")
            self._running = []  # before anything begins that adds to it
            for rank, left in self._left.items():
                if left:
                    self._running.append(self._pool.submit(self._begin, slot, rank, left[0]))
        least_s, most_s = _SOON_S
        wait_s = 0.0 if self._first_s is None else max(least_s, _SOON * (time.monotonic() - self._first_s))
        if slot != self._slot or not 0 < wait_s <= most_s:
            return False
        time.sleep(wait_s)
        return True

    def _begin(self, slot: Slot, rank: int, number: int) -> None:
        """The part of a rank that comes next; if it is there, the others too."""
        if self._fetch(slot, rank, number) and self._pool is not None:
            self._running += [self._pool.submit(self._insist, slot, rank, number) for number in self._left[rank]]

    def _insist(self, slot: Slot, rank: int, number: int) -> None:
        """A part that is being stored by now."""
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
