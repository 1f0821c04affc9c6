"""The page: as one file, or served on loopback during a run."""

from __future__ import annotations

import importlib.resources
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import msgspec

from deltasync.errors import ConfigError, DeltaSyncError, get_logger, printable_in
from deltasync.ops.dashboard.observe import ChannelObserver, ChannelSnapshot
from deltasync.threads import daemon

logger = get_logger(__name__)

_HEADERS_AT_ONCE = 16  # versions whose payload headers are read before the page is updated
_PARTS = "page.css", "charts.js", "page.js"
_PLACE = b'<script type="application/json" id="data">null</script>'
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src "
    "data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(snapshot: ChannelSnapshot | None = None) -> bytes:
    """Return the self-contained page. Without a snapshot, the page fetches `data.json` repeatedly."""
    folder = importlib.resources.files("deltasync.ops.dashboard")
    template = folder.joinpath("page.html").read_bytes()
    for name in _PARTS:
        template = template.replace(b"{{%s}}" % name.encode(), folder.joinpath(name).read_bytes())
    if snapshot is None:
        return template
    # The data is inside a script element, so no text in it may close that element.
    data = _encode(snapshot).replace(b"<", rb"\u003c")
    return template.replace(_PLACE, _PLACE.replace(b"null", data))


class PageServer:
    """Refreshes `observer` in a thread, and serves its snapshots to this machine only. No other thread uses
    `observer`.

    Port 0 means any free port; `interval_s` is the time between two refreshes.
    """

    def __init__(self, observer: ChannelObserver, port: int, interval_s: float) -> None:
        self._observer, self._interval_s = observer, interval_s
        self._stop = threading.Event()
        self.data = b"null"
        try:
            self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except OSError as error:
            raise ConfigError(f"Port {port} on 127.0.0.1 cannot be used: {error.strerror}.") from None
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/"
        self._thread = daemon("watch", self._refresh)

    def run(self) -> None:
        """Serve until an exception such as Ctrl-C."""
        self._thread.start()
        self._http.serve_forever(poll_interval=0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._http.server_close()

    def _refresh(self) -> None:
        while not self._stop.is_set():
            try:
                self._show(self._observer.refresh())
                while not self._stop.is_set() and self._observer.read_headers(_HEADERS_AT_ONCE):
                    self._show(self._observer.snapshot())
                self._show(self._observer.snapshot())
            except DeltaSyncError as error:
                self._show(self._observer.snapshot(error=str(error)))
            except Exception as error:
                logger.exception("Reading the channel failed unexpectedly.")
                self._show(self._observer.snapshot(error=f"Unexpected {type(error).__name__}: {error}"))
            self._stop.wait(self._interval_s)

    def _show(self, snapshot: ChannelSnapshot) -> None:
        self.data = _encode(snapshot)


def _encode(snapshot: ChannelSnapshot) -> bytes:
    return msgspec.json.encode(printable_in(msgspec.to_builtins(snapshot)))


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A foreign page whose host name resolves to this address (DNS rebinding) must not read this one.
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403, "Only for this machine")
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", page())
            elif self.path == "/data.json":
                self._answer("application/json", server.data)
            else:
                self.send_error(404)

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", _POLICY),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: there is a request every few seconds."""

    return Handler
