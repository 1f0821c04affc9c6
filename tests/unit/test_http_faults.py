from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.http_faults import (
    FaultProxy,
    flipped,
    ignored,
    killed_upload,
    reset,
    s3_error,
    shortened,
    stale,
    truncated,
)


class _Echo(BaseHTTPRequestHandler):
    """Answers with what it got and how often it was asked."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"data: 1\n\n")
            self.wfile.flush()
            self.server.more.wait(10)  # type: ignore[attr-defined]
            self.wfile.write(b"data: 2\n\n")
            self.close_connection = True
            return
        reply = f"{self.command} {self.path} {self.headers['Host']} {self.asked} ".encode() + body
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else reply)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # of a client that went away


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    _Echo.asked = 0
    with _Server(("127.0.0.1", 0), _Echo) as server:
        server.more = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: ThreadingHTTPServer) -> Iterator[FaultProxy]:
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    yield connection
    connection.close()


def _ask(client: http.client.HTTPConnection, method: str = "GET", path: str = "/a", body: object = None) -> bytes:
    client.request(method, path, body, encode_chunked=not isinstance(body, bytes | None))  # type: ignore[arg-type]
    return client.getresponse().read()


def test_an_honest_exchange_is_passed_on_and_counted(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    host = proxy.url.removeprefix("http://")
    assert _ask(client, "PUT", "/a%20b?c=d", b"xyz") == f"PUT /a%20b?c=d {host} 1 xyz".encode()
    assert _ask(client, "HEAD") == b""
    assert _ask(client) == f"GET /a {host} 3 ".encode()
    assert [each.method for each in proxy.exchanges] == ["PUT", "HEAD", "GET"]
    assert proxy.count("PUT", "/a b", "c=d") == 1
    put = proxy.exchanges[0]
    assert put.bytes_up == len(f"PUT /a%20b?c=d HTTP/1.1\r\nHost: {host}\r\n") + len(
        "Accept-Encoding: identity\r\nContent-Length: 3\r\n\r\nxyz"
    )
    assert put.bytes_down > len(f"PUT /a%20b?c=d {host} 1 xyz")


def test_a_chunked_body_is_passed_on(client: http.client.HTTPConnection) -> None:
    assert _ask(client, "POST", "/a", iter([b"one", b"two"])).endswith(b" onetwo")


def test_an_event_stream_is_passed_on_as_it_comes(server: ThreadingHTTPServer, client: http.client.HTTPConnection) -> None:
    client.request("GET", "/events")
    with client.getresponse() as reply:
        assert reply.read1() == b"data: 1\n\n"
        server.more.set()  # type: ignore[attr-defined]
        assert reply.read() == b"data: 2\n\n"


def test_closing_ends_an_event_stream(server: ThreadingHTTPServer) -> None:
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        client = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
        client.request("GET", "/events")
        reply = client.getresponse()
        assert reply.read1() == b"data: 1\n\n"
    server.more.set()  # type: ignore[attr-defined]
    reply.close()
    client.close()


def test_a_fault_strikes_where_it_was_told_to_and_so_often(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    fault = proxy.strike(s3_error(503, "SlowDown"), "GET", "^/b", query="x=1", header=("X-Test", "yes"), times=2)
    for path, header in (("/a?x=1", "yes"), ("/b?x=2", "yes"), ("/b?x=1", "no")):
        client.request("GET", path, headers={"X-Test": header})
        assert client.getresponse().read().startswith(b"GET ")
    for _ in range(3):
        client.request("GET", "/b?x=1", headers={"X-Test": "yes"})
        client.getresponse().read()
    assert fault.hits == 2
    assert [each.status for each in proxy.exchanges] == [200, 200, 200, 503, 503, 200]
    assert _Echo.asked == 4


@pytest.mark.parametrize(("after", "asked"), [(False, 0), (True, 1)])
def test_a_reset_comes_before_or_after_the_server_got_it(
    proxy: FaultProxy, client: http.client.HTTPConnection, after: bool, asked: int
) -> None:
    proxy.strike(reset(), after=after)
    with pytest.raises(ConnectionResetError):
        _ask(client, "PUT", "/a", b"x")
    assert _Echo.asked == asked


def test_a_killed_upload_never_arrives(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    proxy.strike(killed_upload())
    with pytest.raises(ConnectionResetError):
        _ask(client, "PUT", "/a", bytes(1000))
    assert 500 < proxy.exchanges[0].bytes_up < 700
    client.close()
    assert _ask(client).startswith(b"GET")


def test_a_truncated_body_breaks_off(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    proxy.strike(truncated(), "PUT")
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        _ask(client, "PUT", "/a", bytes(10_000))


def test_bodies_can_be_shortened_flipped_and_stale(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    first = _ask(client)
    proxy.strike(stale())
    assert _ask(client) == first
    proxy.strike(shortened())
    assert len(_ask(client)) == len(first) // 2
    proxy.strike(flipped(0))
    assert _ask(client)[:3] == b"FET"
    assert _ask(client)[:3] == b"GET"


def test_a_header_can_be_kept_from_the_server(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    proxy.strike(ignored("Host"), "PUT")
    proxy.strike(ignored("X-Unknown"), "PUT")
    assert _ask(client, "PUT", body=b"body") == b"PUT /a None 1 body"
    assert _ask(client, "PUT", body=b"body") == f"PUT /a {proxy.url.removeprefix('http://')} 2 body".encode()
    assert [exchange.fault for exchange in proxy.exchanges] == ["ignored Host", "ignored X-Unknown"]


def test_connections_are_numbered_and_can_be_cut(proxy: FaultProxy, client: http.client.HTTPConnection) -> None:
    for number in (1, 1, 2):
        _ask(client)
        assert proxy.exchanges[-1].connection == number
        if len(proxy.exchanges) == 2:
            proxy.cut()
            with pytest.raises((http.client.HTTPException, OSError)):
                _ask(client)
            client.close()
