"""The driver's requests to its store, which may hang: each is waited for with a time limit, and they never pile up."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from deltasync.channel import heartbeat
from deltasync.channel.documents import Version
from deltasync.channel.heartbeat import Heartbeat
from deltasync.channel.record import Stored
from deltasync.errors import DeltaSyncError, TransientStoreError
from deltasync.follow import Course, Pin, Poll
from deltasync.stores import ObjectInfo, Store
from vllm_plugin import logger
from vllm_plugin.messages import Status

_FIELDS = [field.name for field in dataclasses.fields(Heartbeat) if field.name != "time_s"]
_LOOK_S = 60.0
_BEAT_S = 60.0
_LAST_BEAT_S = 5.0  # how long the last heartbeat may delay the end of a server

Accusation = tuple[Sequence[Stored], str | None, object]
"""A way that failed, the key of the record that is to blame (None if its bits were not the promised ones), and why."""


class Looks:
    """Runs one request at a time, each in a daemon thread, so that the process can end while its store hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: Hashable = None
        self._pending: Future[tuple[Any, BaseException | None]] | None = None

    async def take(self, asked: Hashable, action: Callable[[], Any], timeout_s: float) -> Any:
        """Call `action` in a thread, and return or raise what it does.

        A request that still runs is waited for first. If it `asked` for the same, its result is returned instead.

        Raises:
            TransientStoreError: time is up. The request goes on in its thread.
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
            except BaseException as error:  # noqa: BLE001 - raised in `take`
                future.set_result((None, error))

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future


class Scout:
    """Asks the course for the next way, and reports failed ways to it.

    Attributes:
        poll: Knows whether the store announces new records; None if nobody polls.
        known: What the store announced of a new record.
        is_asked: Whether somebody waits for a version.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self._looks = Looks("deltasync-look")
        self._anew = False  # the course's last way was not taken
        self._accused: Accusation | None = None
        self.poll: Poll | None = None
        self.known: ObjectInfo | None = None
        self.is_asked = False

    def failed(self, accused: Accusation | None) -> None:
        """Note that the last way was not taken: the next look is due now, and avoids what is `accused`, if anything."""
        self._anew = True
        self._accused = accused or self._accused

    def acquit(self) -> None:
        """Note that the bits in memory were to blame for the last failure, not the way."""
        self._accused, self._anew = None, True

    async def next(self, have: Version | None, pin: Pin) -> list[Stored]:
        """Return what to take now, see `Course.next`."""
        course, told = self._course, self.poll is not None and self.poll.told

        def look() -> list[Stored]:
            accused, known, is_asked, now = self._accused, self.known, self.is_asked, self._anew
            self._accused, self.known, self.is_asked, self._anew = None, None, False, False
            if accused is not None:
                course.refused(*accused)
            if is_asked and (course.stuck is not None or course.problem is not None):
                course.forgive()
                now = True
            return course.next(have, pin=pin, known=known, now=now, told=told)

        way: list[Stored] = await self.ask((have, pin), look)
        return way

    async def ask(self, asked: Hashable, action: Callable[[], Any]) -> Any:
        """Ask the store for something else, see `Looks.take`."""
        return await self._looks.take(asked, action, _LOOK_S)


class Beats:
    """Writes one server's heartbeats in the background, at least every `interval_s`."""

    def __init__(self, store: Store, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._looks = Looks("deltasync-heartbeat")
        self._last: tuple[object, ...] = ()
        self._last_s = -interval_s
        self._writing: asyncio.Task[None] | None = None

    def tell(self, status: Status) -> None:
        """Start to write one if the status changed or the last one is old, unless one is being written."""
        error = None if status.state == "stale" else status.error  # which says for how long
        content, now = (status.epoch, status.sha256, status.state, error), time.monotonic()
        if content == self._last and now - self._last_s < self._interval_s:
            return
        if self._writing is None or self._writing.done():
            self._last, self._last_s = content, now
            self._writing = asyncio.create_task(self._write(status, _BEAT_S), name="deltasync-heartbeat")

    async def stop(self, status: Status) -> None:
        """Write the last one."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write(status, _LAST_BEAT_S)

    async def _write(self, status: Status, timeout_s: float) -> None:
        """Write one. A failure is logged only: nothing depends on heartbeats."""
        document = Heartbeat(**{name: getattr(status, name) for name in _FIELDS})
        try:
            await self._looks.take(document, lambda: heartbeat.write(self._store, document), timeout_s)
        except DeltaSyncError as error:
            logger.warning("deltasync: heartbeat not written: %s", error)
