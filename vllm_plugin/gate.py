"""Between which two steps several workers exchange their weights, agreed upon by themselves.

Every worker of an engine runs the same steps in the same order, so that "after step S" is the same point on all of them,
under tensor and pipeline parallelism alike. A worker that is held before step S + 1 keeps no other from finishing step S,
because no step needs anything of a later one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from deltasync.errors import ApplyError, CommitError

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

Count = tuple[int, bool]
"""Steps that a worker has begun, and whether it is in the last of them."""


class Gate:
    """Counts one worker's steps, and holds it between two of them.

    One thread runs the steps, another one holds. `patience_s` is how long a step waits for a release that does not come.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._begun = 0
        self._running = False
        self._limit: int | None = None
        self._writing = False

    def begin(self) -> None:
        """Begin a step, once it is not held.

        Raises:
            CommitError: the hold never ended, and the weights may be of another version than other workers'.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._limit is None or self._begun < self._limit, self._patience_s):
                if self._writing:
                    raise CommitError(
                        f"For {self._patience_s:g} s nobody has told this worker whether its last commit holds on all "
                        "workers. The weights are uncertain: restart the server."
                    )
                logger.error("deltasync: held for %g s without a commit; going on without it", self._patience_s)
                self._limit = None
            self._begun += 1
            self._running = True

    def end(self) -> None:
        """End the step, if one is running."""
        with self._changed:
            self._running = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step, or a part of the one that is running."""
        if self._running:
            yield
            return
        self.begin()
        try:
            yield
        finally:
            self.end()

    def hold(self, limit: int | None, wait_s: float) -> Count:
        """Begin no step after the first `limit` ones, unless that has happened; wait a little for the last of them to end.

        Args:
            limit: None to change nothing.
            wait_s: Longest wait.
        """
        with self._changed:
            if limit is not None and self._begun <= limit:
                self._limit = limit
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._begun == limit and not self._running, wait_s)
            return self._begun, self._running

    def write(self) -> None:
        """Say that weights are about to be written; from now on only `release` lets the worker go.

        Raises:
            ApplyError: the worker is not held, or no longer; nothing may be written.
        """
        with self._changed:
            if self._limit != self._begun or self._running:
                raise ApplyError("This worker is not held between two steps, so nothing was written.")
            self._writing = True

    def release(self) -> None:
        """Let the worker go on."""
        with self._changed:
            self._limit, self._writing = None, False
            self._changed.notify_all()


def meet(ask: Callable[[int | None], Sequence[Count]], patience_s: float) -> int:
    """Hold all workers between the same two steps.

    Where steps begin faster than they are asked about, the place to meet is moved ahead, further each time. Where no steps
    are left to get there, it is moved back.

    Args:
        ask: `Gate.hold` of every worker with this limit.
        patience_s: How long to try.

    Returns:
        The number of steps that all of them have done. Release them afterwards, also if this raises.

    Raises:
        ApplyError: they did not meet in time.
    """
    deadline = time.monotonic() + patience_s
    counts = ask(None)
    limit, ahead = max(begun for begun, _ in counts), 0
    while time.monotonic() < deadline:
        before, counts = counts, ask(limit)
        furthest = max(begun for begun, _ in counts)
        idle = all(count == (furthest, False) for count in counts)
        if idle and furthest == limit:
            return limit
        if furthest > limit:
            ahead = max(1, 2 * ahead)
            limit = furthest + ahead
        elif idle and counts == before:
            limit = furthest
    raise ApplyError(f"The workers did not come to rest between the same two steps within {patience_s:g} s.")
