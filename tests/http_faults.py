"""Faults on the wire: a reverse proxy in front of any HTTP server, honest but for the steps that a test names.

with FaultProxy(server.url) as proxy:
    proxy.strike(status(503, retry_after_s=1), "PUT", r"/manifests/", times=2)
    ... use proxy.url instead of server.url ...
    assert proxy.count("PUT", r"/manifests/") == 3
"""

from __future__ import annotations

import dataclasses
import email.utils
import re
import threading
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from tests.servers.reverse_proxy import Action, Exchange, Handler, Reply, ReverseProxy

_REMEMBERED_BYTES = 1 << 20


def status(code: int, body: bytes = b"", *, retry_after_s: int | None = None) -> Action:
    """An error of the server's, such as 503 with `Retry-After`."""
    retry = [] if retry_after_s is None else [("Retry-After", str(retry_after_s))]
    return Action(f"status {code}", reply=Reply(code, [("Content-Type", "application/xml"), *retry], b"").with_body(body))


def s3_error(code: int, name: str) -> Action:
    """An error as S3 words it."""
    return status(code, f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{name}</Code></Error>'.encode())


def swallowed() -> Action:
    """An upload is confirmed, but the server never hears of it."""
    return Action("swallowed", reply=Reply(200, [("ETag", '"0"')], b"").with_body(b""))


def reset() -> Action:
    """The connection is reset instead of a reply."""
    return Action("reset", reply=Reply(0, [], b"", cut_at=-1))


def late(wait_s: float) -> Action:
    """The reply comes so much later."""
    return Action("late", lambda reply: dataclasses.replace(reply, wait_s=wait_s))


def slow(pause_s: float) -> Action:
    """The body comes in sixteen pieces with a pause before each."""
    return Action("slow", lambda reply: dataclasses.replace(reply, pause_s=pause_s))


def truncated() -> Action:
    """The connection is reset in the middle of the body."""
    return Action("truncated", lambda reply: dataclasses.replace(reply, cut_at=len(reply.body) // 2))


def shortened() -> Action:
    """Half of the body, with a Content-Length that agrees with it."""
    return Action("shortened", lambda reply: reply.with_body(reply.body[: len(reply.body) // 2]))


def flipped(at: int | None = None) -> Action:
    """The lowest bit of one byte of the body inverted, by default of the middle one."""

    def flip(reply: Reply) -> Reply:
        if not reply.body:
            return reply
        place = len(reply.body) // 2 if at is None else at
        body = bytearray(reply.body)
        body[place] ^= 1
        return reply.with_body(bytes(body))

    return Action("flipped", flip)


def empty() -> Action:
    """The status of the honest reply, without its body."""
    return Action("empty", lambda reply: reply.with_body(b""))


def killed_upload() -> Action:
    """The connection breaks when half of the request's body is through."""
    return Action("killed upload", kill_upload=True)


def ignored(header: str) -> Action:
    """The server never sees this header of the request, such as If-None-Match."""
    return Action(f"ignored {header}", without=header)


def stale() -> Action:
    """The reply that this request got the last time; an honest one if it never did."""
    return Action("stale", stale=True)


def _seconds(date: str) -> float:
    return email.utils.parsedate_to_datetime(date).timestamp()


@dataclasses.dataclass
class Fault:
    """One planned fault; `hits` counts how often it struck."""

    action: Action
    method: str
    path: str
    query: str
    header: tuple[str, str] | None
    times: int
    after: bool
    hits: int = 0

    def matches(self, request: Handler) -> bool:
        """Whether it strikes at this request."""
        path, _, query = request.path.partition("?")
        return (
            self.hits < self.times
            and re.fullmatch(self.method, request.command) is not None
            and re.search(self.path, unquote(path)) is not None
            and re.search(self.query, query) is not None
            and (self.header is None or re.search(self.header[1], request.headers.get(self.header[0], "")) is not None)
        )


class FaultProxy:
    """The proxy; it serves from its creation until `close`.

    Attributes:
        url: Where it listens.
        exchanges: Everything that went through, each noted just before its reply is sent.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None and parts.port is not None
        self.exchanges: list[Exchange] = []
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._replies: dict[tuple[str, str], Reply] = {}
        self._proxy = ReverseProxy((parts.hostname, parts.port), self)
        self.url = self._proxy.url

    def strike(
        self,
        action: Action,
        method: str = ".*",
        path: str = "",
        *,
        query: str = "",
        header: tuple[str, str] | None = None,
        times: int = 1,
        after: bool = False,
    ) -> Fault:
        """Strike at the next `times` requests that match.

        Args:
            action: What happens.
            method: Pattern of the whole method.
            path: Pattern found in the path, which is unquoted for this.
            query: Pattern found in the query string.
            header: Name of a header and a pattern found in it.
            times: How often.
            after: Whether the server gets the request first; only its reply is lost then.
        """
        fault = Fault(action, method, path, query, header, times, after)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults = []

    def count(self, method: str = ".*", path: str = "", query: str = "") -> int:
        """Number of exchanges that match."""
        return len(self.matching(method, path, query))

    def matching(self, method: str = ".*", path: str = "", query: str = "") -> list[Exchange]:
        """Exchanges that match, as in `strike`."""
        with self._lock:
            return [
                each
                for each in self.exchanges
                if re.fullmatch(method, each.method) and re.search(path, unquote(each.path)) and re.search(query, each.query)
            ]

    def cut(self) -> None:
        """End all connections."""
        self._proxy.cut()

    def close(self) -> None:
        """Stop listening and cut all connections."""
        self._proxy.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def choose(self, request: Handler) -> tuple[Action, bool] | None:
        """What strikes at this request, and whether the server gets it first."""
        with self._lock:
            for fault in self._faults:
                if fault.matches(request):
                    fault.hits += 1
                    return fault.action, fault.after
        return None

    def record(self, exchange: Exchange) -> None:
        """Note what went through."""
        with self._lock:
            self.exchanges.append(exchange)

    def remember(self, request: Handler, reply: Reply) -> None:
        """Keep an honest reply for `stale`."""
        if request.command in ("GET", "HEAD") and reply.status == 200 and len(reply.body) <= _REMEMBERED_BYTES:
            with self._lock:
                self._replies[request.command, request.path] = reply

    def remembered(self, request: Handler) -> Reply | None:
        """What `remember` kept of the same request."""
        with self._lock:
            return self._replies.get((request.command, request.path))
