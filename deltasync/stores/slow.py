"""Say which requests have had no answer for long, while they wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

PATIENCE_S = 10.0


@contextlib.contextmanager
def watched(after_s: float, report: Callable[[], object]) -> Iterator[None]:
    """Call `report`, in a thread, if the block takes longer than `after_s`."""
    timer = threading.Timer(after_s, report)
    timer.daemon, timer.name = True, "deltasync-watch"
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
