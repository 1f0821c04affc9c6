"""A long line to a server, for programs on one host: a TCP proxy that passes bytes on later, and no faster
than its width.

with Line(("127.0.0.1", port), Shape(round_trip_s=0.05, bits_per_s=100e6)) as line:
    ... use line.port instead of port ...

All connections share its width. A new one takes a round trip, as it does on a real line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import socket
import threading
import time

_CHUNK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """How long and how wide a line is."""

    round_trip_s: float = 0.0
    bits_per_s: float = math.inf


class Line:
    """The proxy; it serves from its creation until `close`.

    Args:
        target: Host and port of the server.
        shape: Delay and rate of the line; may be changed at any time.
    """

    def __init__(self, target: tuple[str, int], shape: Shape) -> None:
        self.shape = shape
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free_s = {"up": 0.0, "down": 0.0}
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self._target)
            with self._lock:
                self._sockets += [near, far]
            opened_s = time.monotonic() + self.shape.round_trip_s
            for way, source, sink in (("up", near, far), ("down", far, near)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(
                    target=self._take, args=(way, source, under_way, opened_s), daemon=True
                ).start()
                threading.Thread(target=_give, args=(sink, under_way), daemon=True).start()

    def _take(
        self,
        way: str,
        source: socket.socket,
        under_way: queue.SimpleQueue[tuple[float, bytes]],
        from_s: float,
    ) -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            shape, came_s = self.shape, max(time.monotonic(), from_s)
            with self._lock:
                sent_s = max(came_s, self._free_s[way]) + 8 * len(data) / shape.bits_per_s
                self._free_s[way] = sent_s
            under_way.put((sent_s + shape.round_trip_s / 2, data))


def _give(sink: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        due_s, data = under_way.get()
        if (early_s := due_s - time.monotonic()) > 0:
            time.sleep(early_s)
        try:
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
        except OSError:
            return
