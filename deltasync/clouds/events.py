"""A thread reads the Hub's feed of changes to a bucket, `GET /api/buckets/{id}/events`.

The feed consists of server-sent events:

    ready      the feed has caught up: later changes follow
    changes    paths that were added, updated or deleted, and the cursor after them
    reset      the cursor is too old to replay the missed changes: anything may have changed
    reconnect  the client must connect again, with the cursor given here
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
from huggingface_hub import get_session

from deltasync import limits
from deltasync.clouds.hub_api import asked_wait_s
from deltasync.clouds.xet import request_headers
from deltasync.errors import UNREADABLE_JSON, describe, get_logger
from deltasync.stores.base import ObjectInfo
from deltasync.threads import daemon

if TYPE_CHECKING:
    import httpx2 as httpx

logger = get_logger(__name__)

# connect, read (the Hub pings every 30 s), write, wait for a connection
_TIMEOUT_S = (10.0, 90.0, 10.0, 10.0)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0
_KNOWN = ("ready", "changes", "reset", "reconnect")
_UNAVAILABLE = (401, 403, 404, 429, 501)
_UNAVAILABLE_DELAY_S = 60.0
_GOOD_S = 5.0  # a connection that lasted longer resets the delay
_JOIN_S = 2.0


class _Change(msgspec.Struct, rename="camel"):
    path: str
    op: str = ""
    size: int | None = None
    xet_hash: str | None = None


class _Event(msgspec.Struct):
    cursor: str | int | None = None
    changes: list[_Change] = []


describe(_Event)


class EventWatch:
    """Reports the files under `prefix` that are stored in the bucket whose feed is at `url`. See `Watch`.

    `on_change` is called from the thread with each file, whose key is its path, or with None if changes may
    have been missed.
    """

    def __init__(self, url: str, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> None:
        self._url = url
        self._prefix = prefix
        self._on_change = on_change
        self._cursor: str | int | None = None
        self._live = False
        self._asked_s = 0.0
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        # Held while the callback runs. The callback itself may close the watch.
        self._reporting = threading.RLock()
        self._thread = daemon("watch", self._run)
        self._thread.start()

    @property
    def live(self) -> bool:
        """Whether changes are reported now. False in a forked child, which has no copy of the thread."""
        return self._live and self._thread.is_alive()

    def close(self) -> None:
        self._closed.set()
        with self._reporting:
            self._live = False
        connection = self._socket
        # in a forked child the connection is still the parent's
        if connection is not None and self._thread.is_alive():
            # This wakes the thread from its read. SSLSocket.shutdown would remove the TLS state that the
            # reader uses.
            with contextlib.suppress(OSError):  # the connection ended by itself
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        delay_s = 0.0
        while not self._closed.wait(delay_s * random.SystemRandom().uniform(0.5, 1.0)):
            started = time.monotonic()
            self._asked_s = 0.0
            try:
                available = self._follow()
            except Exception as error:  # noqa: BLE001 - after any error, connect again
                logger.debug("%s ended: %s", self._url, error)
                available = True
            self._live, self._socket = False, None
            if not available or self._asked_s:  # at least half of the delay is waited
                delay_s = max(0.0 if available else _UNAVAILABLE_DELAY_S, 2 * self._asked_s)
            elif time.monotonic() - started > _GOOD_S:
                delay_s = _FIRST_DELAY_S
            else:
                delay_s = min(max(2 * delay_s, _FIRST_DELAY_S), _LONGEST_DELAY_S)

    def _follow(self) -> bool:
        """Read one connection to its end. Return False if the Hub offers no feed."""
        params = {} if self._cursor is None else {"cursor": self._cursor}
        headers = request_headers() | {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
        with get_session().stream(
            "GET", self._url, params=params, headers=headers, timeout=_TIMEOUT_S
        ) as response:
            if response.status_code == 400:
                self._cursor = None
            if response.status_code != 200:
                self._asked_s = asked_wait_s(response.headers) or 0.0
                return response.status_code not in _UNAVAILABLE
            self._socket = response.extensions["network_stream"].get_extra_info("socket")
            if self._closed.is_set():
                return True  # `close` ran before `_socket` was set
            for name, event in _events(response):
                self._handle(name, event)
                if name == "reconnect":
                    break
        return True

    def _handle(self, name: str, event: _Event) -> None:
        if name == "reset":
            self._cursor = None
        elif event.cursor is not None:
            self._cursor = event.cursor
        if name == "ready":
            self._live = True
        if name in ("ready", "reset"):
            self._report(None)
        for change in event.changes:
            if change.path.startswith(self._prefix) and change.op != "delete":
                known = change.size is not None
                self._report(
                    ObjectInfo(change.path, change.size or 0, content=change.xet_hash) if known else None
                )

    def _report(self, stored: ObjectInfo | None) -> None:
        with self._reporting:
            if self._closed.is_set():
                return
            try:
                self._on_change(stored)
            except Exception:
                logger.exception("The callback for changes of %s failed.", self._prefix)


def _events(response: httpx.Response) -> Iterator[tuple[str, _Event]]:
    """Yield the known events of a stream with their names.

    An unreadable event is yielded as `ready`, which reports that changes may have been missed; the feed
    continues.
    """
    name, data = "", ""
    for line in _lines(response.iter_bytes()):
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            data += value
        elif not line:
            if data and name in _KNOWN:
                try:
                    event = name, msgspec.json.decode(data, type=_Event)
                except UNREADABLE_JSON as error:
                    logger.debug("skipped an unreadable event: %s", error)
                    event = "reset" if name == "reset" else "ready", _Event()
                yield event
            name, data = "", ""


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield lines that end with CR, LF or both. Other line separators may be part of file names."""
    rest = b""
    for piece in pieces:
        rest += piece
        *lines, rest = re.split(rb"\r\n|\n|\r(?!$)", rest)
        if len(rest) > limits.EVENT_BYTES:
            raise ValueError("a line of the feed is too long")
        yield from (line.decode("utf-8", "replace") for line in lines)
