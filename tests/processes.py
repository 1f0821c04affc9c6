"""Functions in processes of their own, forked from one that has imported everything, which takes a fraction
of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

PATIENCE_S = 300.0  # for what takes half a second: a busy machine is no failure
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, "tests.kills.test_publisher"])
# Whenever it starts a process, multiprocessing asks all others how they ended, and whoever asks second hears
# 255.
_asking = threading.Lock()


def in_a_process(function: Callable[..., None], *args: Any) -> tuple[int | None, Any]:
    """Call `function(*args, sender)` in a process and wait for its end. Threads may do this at once.

    Returns:
        Its exit code, None if it still runs, and what it sent first, None if it sent nothing.
    """
    receiver, sender = PROCESSES.Pipe(duplex=False)
    with receiver:
        with sender, _asking:
            child = PROCESSES.Process(target=function, args=(*args, sender))
            child.start()
        try:
            sent = receiver.recv() if receiver.poll(PATIENCE_S) else None
        except EOFError:
            sent = None
        wait([child.sentinel], PATIENCE_S)
        with _asking:
            child.join(0)
            return child.exitcode, sent


def living(pids: list[int]) -> list[int]:
    """Those that have not ended; a zombie has."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
                found.append(pid)
    return found


def wait_for_end(pids: list[int], timeout_s: float = 60.0) -> None:
    """Until none of them is living."""
    wait_until(
        lambda: not living(pids),
        timeout_s,
        lambda: [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in living(pids)],
    )
