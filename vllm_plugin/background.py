"""Requests of the driver to its store, which may hang: each is waited for, for a time, and they never pile up."""

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
from deltasync.replicas import Course, Pin, Poll
from deltasync.stores import ObjectInfo, Store
from vllm_plugin import logger
from vllm_plugin.messages import Status

_FIELDS = [field.name for field in dataclasses.fields(Heartbeat) if field.name != "time_s"]
_LOOK_S = 60.0
_BEAT_S = 60.0
_LAST_BEAT_S = 5.0  # that the last one may keep a server that ends

Accusation = tuple[Sequence[Stored], str | None, object]
"""A way that failed, the key of the record that is to blame (None where the bits were not the promised ones), and why."""


class Looks:
    """One request at a time, each in a daemon thread of this name: a process must be able to end while its store hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: Hashable = None
        self._pending: Future[tuple[Any, BaseException | None]] | None = None

    async def take(self, asked: Hashable, action: Callable[[], Any], timeout_s: float) -> Any:
        """What `action`, called in a thread, returns or raises.

        A request that still goes on is waited for first; its answer counts if it was `asked` the same.

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
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                future.set_result((None, error))

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future


class Scout:
    """Asks the course where to go, and tells it what became of the last way.

    Attributes:
        poll: When to ask; None if only who is asked decides.
        known: What the store told of a new record.
        is_asked: Somebody waits for a version.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self._looks = Looks("deltasync-look")
        self._anew = False  # what the course thinks was done was not
        self._accused: Accusation | None = None
        self.poll: Poll | None = None
        self.known: ObjectInfo | None = None
        self.is_asked = False

    def failed(self, accused: Accusation | None) -> None:
        """The last way was not taken; look anew, and if that way was to blame, for another one."""
        self._anew = True
        self._accused = accused or self._accused

    def acquit(self) -> None:
        """The bits in memory were to blame, and not the last way."""
        self._accused, self._anew = None, True

    async def next(self, have: Version | None, pin: Pin) -> list[Stored]:
        """What to take now, see `Course.next`."""
        if self._accused is not None:
            self._course.refused(*self._accused)
            self._accused = None
        course, known, told = self._course, self.known, self.poll is not None and self.poll.told
        again = self.is_asked and (course.stuck is not None or course.problem is not None)
        if again:
            course.forgive()
        now = self._anew or again
        self.known, self.is_asked, self._anew = None, False, False
        way: list[Stored] = await self.ask((have, pin), lambda: course.next(have, pin=pin, known=known, now=now, told=told))
        return way

    async def ask(self, asked: Hashable, action: Callable[[], Any]) -> Any:
        """Ask the store something else, see `Looks.take`."""
        return await self._looks.take(asked, action, _LOOK_S)


class Beats:
    """Heartbeats of one server, at least every `interval_s`, written beside the driver's other work."""

    def __init__(self, store: Store, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._looks = Looks("deltasync-heartbeat")
        self._last: tuple[object, ...] = ()
        self._last_s = -interval_s
        self._writing: asyncio.Task[None] | None = None

    def tell(self, status: Status) -> None:
        """Begin to write one if something in the status changed or the last one is old, unless one is being written."""
        error = None if status.state == "stale" else status.error  # which tells for how long
        told, now = (status.epoch, status.sha256, status.state, error), time.monotonic()
        if told == self._last and now - self._last_s < self._interval_s:
            return
        if self._writing is None or self._writing.done():
            self._last, self._last_s = told, now
            self._writing = asyncio.create_task(self._write(status, _BEAT_S), name="deltasync-heartbeat")

    async def stop(self, status: Status) -> None:
        """Write the last one."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write(status, _LAST_BEAT_S)

    async def _write(self, status: Status, timeout_s: float) -> None:
        """Write one. A failure is logged: heartbeats are never needed."""
        document = Heartbeat(**{name: getattr(status, name) for name in _FIELDS})
        try:
            await self._looks.take(document, lambda: heartbeat.write(self._store, document), timeout_s)
        except DeltaSyncError as error:
            logger.warning("deltasync: heartbeat not written: %s", error)
