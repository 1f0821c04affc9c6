"""FOLLOW: when to look at head again."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

from deltasync import layout
from deltasync.stores.base import Store

_FIRST_S = 0.02
_GROWTH = 1.5
_LIVE_S = 30.0


class Poll:
    """How long to wait between two looks at head: from 20 ms, because the next version may follow soon, up to an interval.

    Where the store tells of changes it is only looked at rarely, while that works.

    Args:
        store: The channel's store.
        interval_s: Longest wait.
        on_change: Called from another thread when head may have changed: look at once.
    """

    def __init__(self, store: Store, interval_s: float, on_change: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._delay_s = _FIRST_S
        self._watch = store.watch(layout.HEAD, on_change)

    def delay_s(self, moved: bool, settled: bool = True) -> float:
        """Seconds to wait now.

        Args:
            moved: Whether the last look brought a new version.
            settled: Whether nothing is left to do until head changes.
        """
        if moved:
            self._delay_s = _FIRST_S
        delay_s = min(self._delay_s, self._interval_s)
        self._delay_s = min(_GROWTH * self._delay_s, self._interval_s)
        if settled and not moved and self._watch is not None and self._watch.live:
            return max(_LIVE_S, self._interval_s)
        # So that many replicas do not ask at the same moment for ever.
        return delay_s * random.uniform(0.9, 1.0)

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
