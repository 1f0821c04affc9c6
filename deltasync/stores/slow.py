"""Log requests that have had no answer for long, while they wait."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from deltasync.threads import daemon

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
_IDLE_S = 60.0  # after which the thread ends


class _Watcher:
    """Watches the requests of this process from one thread, which runs while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[float, str]] = {}
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watched(self, place: str, after_s: float) -> Iterator[None]:
        """Log a warning if the block takes longer than `after_s`. `place` names what it asks for."""
        name = 0
        with self._changed:
            name = max(self._waiting, default=0) + 1
            self._waiting[name] = time.monotonic() + after_s, f"{place} has had no answer for {after_s:g} s; waiting on."
            if self._thread is None:
                self._thread = daemon("watch", self._run)
                self._thread.start()
            elif len(self._waiting) == 1:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waiting.pop(name, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now_s = time.monotonic()
                for name, (due_s, message) in list(self._waiting.items()):
                    if now_s >= due_s:
                        logger.warning("%s", message)
                        self._waiting[name] = float("inf"), message
                due_s = min((due_s for due_s, _ in self._waiting.values()), default=now_s + _IDLE_S)
                if not self._changed.wait(min(max(due_s - now_s, 0.01), _IDLE_S)) and not self._waiting:
                    self._thread = None
                    return


watched = _Watcher().watched
