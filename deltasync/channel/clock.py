"""The time by a store's clock. This machine's clock may differ from it by any amount."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable

from deltasync.channel import keys
from deltasync.errors import StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, Store

_PROBE = keys.probe(f"{keys.TOOL}00000000")  # one key for all, so that killed processes leave only one object
_MEASURED_S = 3600.0  # in which two clocks of computers differ by much less than a second more
_TEXT = b"deltasync wrote this to read the store's clock; it may be deleted.\n"


class StoreClock:
    """Tells the time by a store's clock, in seconds since 1970, never more than it is.

    Each object in a listing shows a time that has passed; `measure` stores one to learn what time it is now.
    Between them `time.monotonic` counts. So an age by this clock is too small rather than too large: who
    decides by it waits or keeps too long, and never misses or deletes what is in use.

    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead_s = -math.inf  # of `time.monotonic`, at least
        self._may_write = True
        self._measured_s = -math.inf

    @property
    def is_measured(self) -> bool:
        """Whether the time is known, and not only that it is not earlier."""
        return time.monotonic() - self._measured_s < _MEASURED_S

    @property
    def now_s(self) -> float:
        """The time; -infinity while no object was seen."""
        return time.monotonic() + self._ahead_s

    def age_s(self, modified_s: float) -> float:
        """Return for how long at least an object is stored; 0 if the store does not say when it was."""
        return max(0.0, self.now_s - modified_s) if modified_s else 0.0

    def note(self, infos: Iterable[ObjectInfo]) -> None:
        """Learn from a listing that has ended: the times of its objects have passed."""
        newest_s = max((info.modified_s for info in infos), default=0.0)
        if newest_s:
            self._ahead_s = max(self._ahead_s, newest_s - time.monotonic())

    def measure(self) -> None:
        """Store a small object, see when that was, and delete it. Nothing is learned where this machine may
        not write.

        Raises:
            TransientStoreError: the store does not answer.
        """
        if not self._may_write:
            return
        try:
            self._store.put(_PROBE, _TEXT)
            times_s = [info.modified_s for info in self._store.list(_PROBE) if info.modified_s]
        except TransientStoreError:
            raise
        except StoreError:
            self._may_write = False
            return
        if times_s:  # a listing may lag
            self._measured_s = time.monotonic()
            self._ahead_s = times_s[0] - self._measured_s
        with contextlib.suppress(StoreError):  # a trainer may have no right to delete
            self._store.delete(_PROBE)
