"""A small HTTP server whose answers a test gives."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self


class Asked(NamedTuple):
    """A request; the names of its headers are in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes
    method: str


Answer = Callable[[Asked], tuple[int, Any] | tuple[int, Any, Mapping[str, str]]]
"""Status, body (bytes, or a document), and headers."""


class Answers:
    """Answers every request by a function, from threads, while the block goes on."""

    def __init__(self, answer: Answer, host: str = "127.0.0.1") -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                sent = self.rfile.read(int(headers.get("content-length", 0)))
                code, body, *more = answer(Asked(self.path, headers, sent, self.command))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                for name, value in {"content-length": str(len(data)), **(more[0] if more else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
