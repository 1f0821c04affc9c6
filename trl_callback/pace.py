"""Keeps training at most so many versions ahead of the fleet, and tells the rollouts which version that serves."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable

from deltasync import Receipt
from deltasync.errors import DeltaSyncError


@dataclasses.dataclass(eq=False)
class _Published:
    """One publish.

    Attributes:
        number: How many there were before.
        count: The version that the trainer counts it as, None until it says.
    """

    number: int
    receipt: Receipt
    count: int | None = None


class Pace:
    """Lets training go on while the fleet serves a version that is at most so far behind.

    What is within the bound is waited for in the background, so that training does not pay for the looks at the fleet.

    Args:
        wait_for: Blocks until the fleet serves a version, and raises if it does not in time. Called from several threads.
        max_behind: By how many versions the fleet may lie behind; 0 to wait for each.
    """

    def __init__(self, wait_for: Callable[[Receipt], None], max_behind: int) -> None:
        self._wait_for = wait_for
        self._window: deque[_Published] = deque(maxlen=max_behind + 1)
        self._number = 0
        self._served: _Published | None = None
        self._tell: Callable[[int], None] | None = None
        self._lock = threading.Lock()

    @property
    def served(self) -> int | None:
        """The newest of our versions that the fleet is known to serve; None before the first."""
        return None if self._served is None else self._served.receipt.version

    def keep(self, receipt: Receipt) -> float:
        """Take part in what was just published, and wait until the fleet is near enough.

        Before the first version it serves nothing of ours, so that one is waited for in any case.

        Returns:
            Seconds that it waited.

        Raises:
            Exception: what `wait_for` raises.
        """
        before_s = time.perf_counter()
        newest = _Published(self._number, receipt)
        self._number += 1
        self._window.append(newest)
        due = self._window[0]
        if newest is not due:
            # A daemon, as the process must be able to end while a store or a server hangs.
            threading.Thread(target=self._look, args=(newest,), name="deltasync-pace", daemon=True).start()
        if self._served is None or self._served.number < due.number:
            self._wait_for(due.receipt)
            self._note(due)
        return time.perf_counter() - before_s

    def tell(self, count: int, update: Callable[[int], None]) -> None:
        """Tell the rollouts of the version that the fleet serves, now and as soon as it serves a newer one.

        Args:
            count: What the trainer counts the last publish as.
            update: Takes the version, counted as the trainer does. Also called from other threads, never by two at once.
        """
        with self._lock:
            self._tell = update
            if self._window:
                self._window[-1].count = count
            served = None if self._served is None else self._served.count
            update(count if served is None else served)

    def _look(self, published: _Published) -> None:
        try:
            self._wait_for(published.receipt)
        except (DeltaSyncError, TimeoutError):
            return  # whoever has to wait for it hears why
        self._note(published)

    def _note(self, published: _Published) -> None:
        with self._lock:
            if self._served is not None and self._served.number >= published.number:
                return
            self._served = published
            if self._tell is not None and published.count is not None:
                self._tell(published.count)
