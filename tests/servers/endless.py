"""A server whose replies do not end."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Endless:
    """Answers every request with an object as S3 does, and goes on until the client hangs up.

    Args:
        announced: The value of Content-Length, and what may follow it in the head.
        piece: A piece of the body, sent over and over.

    Attributes:
        url: Where it listens.
        sent_bytes: Bytes sent of bodies.
    """

    def __init__(self, announced: bytes, piece: bytes) -> None:
        self._head = b'HTTP/1.1 200 OK\r\nETag: "0"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Length: '
        self._head += announced + b"\r\n\r\n"
        self._piece = piece
        self.sent_bytes = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(30)
                    connection.recv(1 << 16)
                    connection.sendall(self._head)
                    while True:
                        connection.sendall(self._piece)
                        self.sent_bytes += len(self._piece)
