"""Faults on the wire: a reverse proxy in front of any HTTP server, honest but for the steps that a test
names.

with FaultProxy(server.url) as proxy:
    proxy.strike(status(503, retry_after_s=1), "PUT", r"/manifests/", times=2)
    ... use proxy.url instead of server.url ...
    assert proxy.count("PUT", r"/manifests/") == 3
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect"}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One request and its reply as the client saw it. Byte counts are of whole messages, headers included.

    Attributes:
        status: Status of the reply, 0 if there was none.
        fault: Name of the fault that struck, empty if the exchange was honest.
        connection: Number of the client's connection, from 1.
    """

    method: str
    path: str
    query: str
    status: int
    bytes_up: int
    bytes_down: int
    fault: str
    connection: int = 0


@dataclasses.dataclass(frozen=True)
class Reply:
    """What goes back to the client.

    Attributes:
        cut_at: Body bytes after which the connection is reset; -1 for before the status line, None for not at
            all.
        wait_s: Before anything is sent.
        pause_s: Before each sixteenth of the body.
        live: An event stream, passed on as it comes.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    cut_at: int | None = None
    wait_s: float = 0.0
    pause_s: float = 0.0
    live: http.client.HTTPResponse | None = None

    def with_body(self, body: bytes) -> Reply:
        """With another body, and the Content-Length that goes with it."""
        headers = [(name, value) for name, value in self.headers if name.lower() != "content-length"]
        return dataclasses.replace(self, headers=[*headers, ("Content-Length", str(len(body)))], body=body)


@dataclasses.dataclass(frozen=True)
class Action:
    """What a fault does.

    Attributes:
        name: For `Exchange.fault`.
        change: From the honest reply to the one that is sent; None for `reply`.
        reply: Sent whatever the server says.
        without: Name of a header of the request that is not passed on.
    """

    name: str
    change: Callable[[Reply], Reply] | None = None
    reply: Reply | None = None
    without: str = ""


def status(code: int, body: bytes = b"", *, retry_after_s: int | None = None) -> Action:
    """An error of the server's, such as 503 with `Retry-After`."""
    retry = [] if retry_after_s is None else [("Retry-After", str(retry_after_s))]
    return Action(
        f"status {code}",
        reply=Reply(code, [("Content-Type", "application/xml"), *retry], b"").with_body(body),
    )


def s3_error(code: int, name: str) -> Action:
    """An error as S3 words it."""
    return status(code, f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{name}</Code></Error>'.encode())


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


def ignored(header: str) -> Action:
    """The server never sees this header of the request, such as If-None-Match."""
    return Action(f"ignored {header}", without=header)


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
            and (
                self.header is None
                or re.search(self.header[1], request.headers.get(self.header[0], "")) is not None
            )
        )


class FaultProxy(ThreadingHTTPServer):
    """The proxy; it serves from its creation until `close`. One thread per connection.

    Requests and replies are held in memory as a whole, but for event streams. The Host header is passed on as
    it came, because request signatures cover it.

    Attributes:
        url: Where it listens.
        exchanges: Everything that went through, each noted just before its reply is sent.
    """

    daemon_threads = False
    request_queue_size = 128

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None and parts.port is not None
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = (parts.hostname, parts.port)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.exchanges: list[Exchange] = []
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._connections = itertools.count(1)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

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
                if re.fullmatch(method, each.method)
                and re.search(path, unquote(each.path))
                and re.search(query, each.query)
            ]

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

    def close(self) -> None:
        """Stop listening, cut all connections and wait for their threads."""
        self.shutdown()
        self._thread.join()
        self.cut()
        self.server_close()

    def cut(self) -> None:
        """End all connections, as a server does with those that are idle."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def number(self) -> int:
        """Of a client's new connection."""
        with self._lock:
            return next(self._connections)

    def keep(self, connection: socket.socket) -> None:
        """Note a connection, to be cut by `close`."""
        with self._lock:
            self._sockets.add(connection)

    def forget(self, connection: socket.socket) -> None:
        """The connection has ended."""
        with self._lock:
            self._sockets.discard(connection)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error of ours."""

    def __exit__(self, *_: object) -> None:
        self.close()


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, and one to the server for it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: FaultProxy

    def setup(self) -> None:
        self._upstream: http.client.HTTPConnection | None = None
        self.server.keep(self.request)
        self._number = self.server.number()
        super().setup()

    def finish(self) -> None:
        self._drop_upstream()
        with contextlib.suppress(OSError):
            super().finish()
        self.server.forget(self.request)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        chosen = self.server.choose(self)
        action, after = chosen if chosen is not None else (None, False)
        up = len(self.raw_requestline) + _header_bytes(self.headers.items())
        if action is not None and action.without:
            del self.headers[action.without]
        body = self._read_body()
        up += len(body)
        if action is not None and action.reply is not None:
            if after:
                self._forward(body)
            reply = action.reply
        else:
            reply = self._forward(body)
            if action is not None and action.change is not None:
                reply = action.change(reply)
        self._send(reply, up, action)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def _record(self, code: int, up: int, down: int, action: Action | None) -> None:
        path, _, query = self.path.partition("?")
        name = "" if action is None else action.name
        self.server.record(Exchange(self.command, path, query, code, up, down, name, self._number))

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _connection(self) -> http.client.HTTPConnection:
        """To the server; a new one if the server has closed the last."""
        if self._upstream is not None and self._upstream.sock is not None:
            if not select.select([self._upstream.sock], [], [], 0)[0]:
                return self._upstream
            self._drop_upstream()
        self._upstream = http.client.HTTPConnection(*self.server.target)
        self._upstream.connect()
        self._upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.keep(self._upstream.sock)
        return self._upstream

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            if self._upstream.sock is not None:
                self.server.forget(self._upstream.sock)
            self._upstream.close()
            self._upstream = None

    def _begin(self, length: int | None) -> http.client.HTTPConnection:
        connection = self._connection()
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                connection.putheader(name, value)
        if length is not None:
            connection.putheader("Content-Length", str(length))
        connection.endheaders()
        return connection

    def _forward(self, body: bytes) -> Reply:
        """The server's own reply."""
        has_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        connection = self._begin(len(body) if has_body else None)
        if body:
            connection.send(body)
        response = connection.getresponse()
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP]
        if response.headers.get_content_type() == "text/event-stream":
            return Reply(response.status, [*headers, ("Connection", "close")], b"", live=response)
        reply = Reply(response.status, headers, response.read())
        if response.will_close:
            self._drop_upstream()
        framed = "Content-Length" in response.headers or response.status in (204, 304)
        return reply if framed else reply.with_body(reply.body)

    def _send(self, reply: Reply, up: int, action: Action | None) -> None:
        line = f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, '')}\r\n"
        head = (line + "".join(f"{name}: {value}\r\n" for name, value in reply.headers) + "\r\n").encode(
            "latin-1"
        )
        body = b"" if self.command == "HEAD" else reply.body
        if reply.cut_at == -1:
            head = b""
        if reply.cut_at is not None:
            body = body[: max(reply.cut_at, 0)]
        self._record(reply.status, up, len(head) + len(body), action)
        time.sleep(reply.wait_s)
        self.wfile.write(head)
        step = max(1, -(-len(body) // 16)) if reply.pause_s else len(body) or 1
        for start in range(0, len(body), step):
            if reply.pause_s:
                self.wfile.flush()
                time.sleep(reply.pause_s)
            self.wfile.write(body[start : start + step])
        self.wfile.flush()
        if reply.live is not None:
            self.close_connection = True
            while piece := reply.live.read1(1 << 16):
                self.wfile.write(piece)
                self.wfile.flush()
        if reply.cut_at is not None:
            self._reset()

    def _reset(self) -> None:
        """End the connection with RST instead of FIN."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()  # for real once `finish` has closed the files on it


def _header_bytes(headers: Sequence[tuple[str, str]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers) + 2
