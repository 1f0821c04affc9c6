"""Functions in processes of their own, forked from one that has imported everything, which takes a fraction of a second."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from numba.core.registry import cpu_target

PATIENCE_S = 300.0  # for what takes half a second: a busy machine is no failure
PROCESSES = multiprocessing.get_context("forkserver")
# This module among them, for what follows: half of what loading the first kernel takes.
PROCESSES.set_forkserver_preload([__name__, "tests.integration.test_kill_publisher", "tests.soak.ends"])
for _context in (cpu_target.target_context, cpu_target.typing_context):
    _context.refresh()
# Whenever it starts a process, multiprocessing asks all others how they ended, and whoever asks second hears 255.
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
