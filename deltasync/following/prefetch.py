"""Fetch the parts of a version before its record exists, while the publisher is still uploading other parts.

The guess is the next version of the same log, with as many parts of each rank as the last one. Once that version is due by
the rhythm of the last two, each look asks for the first part of each rank, and if it is there, for the rank's other parts. A
part is used only once a record names its digest (`ChannelReader.fetch`), so a wrong guess costs only a few requests.
"""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord

_MOST_BYTES = 1 << 28
_AT_ONCE = 4
_EARLY, _LATE = 0.7, 3.0  # multiples of the time between the last two versions; the next is expected between these
_WAITS_S = 0.02, 0.04, 0.08, 0.16, 0.32  # between two requests for a part that comes soon
_SOON = 0.1  # how long to wait for the record, as a fraction of the time since the first part came
_SOON_S = 0.02, 0.1  # the shortest and the longest such wait


class Prefetch:
    """Fetches parts ahead for one replica, in its own threads. Not thread-safe."""

    def __init__(self, reader: ChannelReader) -> None:
        self._reader = reader
        self._counts: Counter[int] = Counter()  # parts of each rank in the last version
        self._slot: Slot | None = None
        self._left: dict[int, list[int]] = {}  # numbers of each rank's parts that did not come yet
        self._running: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._taken_s = self._between_s = 0.0
        self._first_s: float | None = None  # when the first part of the slot came
        self._left_bytes = _MOST_BYTES

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
        """Fetch the next part of a rank; if it is there, the others too."""
        if self._fetch(slot, rank, number) and self._pool is not None:
            self._running += [self._pool.submit(self._insist, slot, rank, number) for number in self._left[rank]]

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
