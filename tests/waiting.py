"""Waiting for what another thread or process does, on machines that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], timeout_s: float = 60.0, told: Callable[[], object] = str
) -> float:
    """Wait for a condition and return how long it took; if it takes too long, fail, and say what is
    `told`.
    """
    started = time.perf_counter()
    while not condition():
        assert time.perf_counter() - started < timeout_s, told()
        time.sleep(0.005)
    return time.perf_counter() - started
