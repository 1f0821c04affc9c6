"""Fetch the parts of a version before its record exists, while the publisher is still uploading the others.

Guessed is the next version of the same log, from as many ranks as wrote parts of the last one. A part is used only once a
record names its digest (`ChannelReader.fetch`), so a wrong guess costs a request and nothing else.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored

_MOST_BYTES = 1 << 28
_AT_ONCE = 4
_LATE = 3.0  # times the time between the last two versions; after that, none is expected


class Prefetch:
    """What one replica fetches ahead, in threads of its own. Not thread-safe."""

    def __init__(self, reader: ChannelReader) -> None:
        self._reader = reader
        self._ranks: dict[int, int] = {}  # the number of the part to ask each rank for next
        self._slot: Slot | None = None
        self._running: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._taken_s = self._between_s = 0.0
        self._left_bytes = _MOST_BYTES

    def took(self, stored: Stored) -> None:
        """A version was found; the next one may have parts if it has."""
        now = time.monotonic()
        self._between_s, self._taken_s = now - self._taken_s, now
        names = (file.key.rpartition("/")[2] for file in stored.record.payload_files)
        self._ranks = {int(name[:3]): 1 for name in names if name[:3].isdigit()}
        self._slot = None

    def look(self, slot: Slot) -> None:
        """The record of a slot is not there yet: ask for the parts that come next, unless a request is under way."""
        late = time.monotonic() - self._taken_s > _LATE * self._between_s
        if not self._ranks or late or any(not future.done() for future in self._running):
            return
        if slot != self._slot:
            self._slot, self._left_bytes = slot, _MOST_BYTES
            self._ranks = dict.fromkeys(self._ranks, 1)
            self._reader.held.clear()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="deltasync-ahead")
        self._running = [self._pool.submit(self._fetch, slot, rank) for rank in self._ranks]

    def _fetch(self, slot: Slot, rank: int) -> None:
        """Parts of one rank, until one is not there yet."""
        folder = keys.parts_folder(slot.version, slot.epoch)
        while self._left_bytes > 0 and slot == self._slot:
            key = f"{folder}/{keys.part(rank, self._ranks[rank])}"
            size = self._reader.fetch_ahead(key, self._left_bytes)
            if not size:
                return
            self._left_bytes -= size
            self._ranks[rank] += 1
