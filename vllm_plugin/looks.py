"""Requests to a store that may hang: an event loop waits for each of them for a time, and they never pile up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

from deltasync.errors import TransientStoreError


class Looks:
    """One request at a time, each in a daemon thread: a process must be able to end while its store hangs.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: Hashable = None
        self._pending: Future[tuple[Any, BaseException | None]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request goes on."""
        return self._pending is not None and not self._pending.done()

    async def take(self, asked: Hashable, action: Callable[[], Any], timeout_s: float) -> Any:
        """What a request returns. One that still goes on is waited for first; its answer counts if it was asked the same.

        Args:
            asked: What is asked.
            action: Called in a thread.
            timeout_s: How long to wait.

        Raises:
            TransientStoreError: time is up. The request goes on in its thread.
            Exception: whatever `action` raises.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self._pending is None:
                self._asked, self._pending = asked, self._begin(action)
            waiting = [asyncio.wrap_future(self._pending)]
            done, _ = await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise TransientStoreError(
                    f"The store has not answered for {timeout_s:g} s; nothing else is asked until it does."
                )
            (result, error), answered = self._pending.result(), self._asked
            self._pending = None
            if answered == asked:
                if error is not None:
                    raise error
                return result

    def _begin(self, action: Callable[[], Any]) -> Future[tuple[Any, BaseException | None]]:
        future: Future[tuple[Any, BaseException | None]] = Future()

        def work() -> None:
            try:
                future.set_result((action(), None))
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                future.set_result((None, error))

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future
