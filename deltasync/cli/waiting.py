"""Report calls that take long, so that a command with a hung store or server does not look as if it had ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltasync.cli.output import echo
from deltasync.stores.base import Store
from deltasync.stores.wrapper import WrappedStore

PATIENCE_S = 4.0  # seconds after which a call is reported
_AGAIN_S = 60.0  # from one report about a store to the next

_Result = TypeVar("_Result")


@contextlib.contextmanager
def reported(call: str, advice: str, is_due: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Print a line on stderr if the block takes longer than `PATIENCE_S` and `is_due` agrees.

    `call` names the call and its place, as in `read of head.json at s3://bucket/run`; `advice` says what to do.
    """

    def report() -> None:
        if is_due():
            echo(f"deltasync: {call} has not finished after {PATIENCE_S:g} s; the command waits. {advice}", err=True)

    timer = threading.Timer(PATIENCE_S, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class ReportedStore(WrappedStore):
    """A store whose slow calls are reported, at most once a minute."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._next_s = 0.0

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Run the call, and report it if it is slow."""
        call = f"{verb} of {key} at {self.url}" if key else f"{verb} of {self.url}"
        with reported(call, f"Ctrl-C ends it; `deltasync doctor {self.url}` tests the store.", self._is_due):
            return action()

    def _is_due(self) -> bool:
        with self._lock:
            if time.monotonic() < self._next_s:
                return False
            self._next_s = time.monotonic() + _AGAIN_S
            return True
