"""The driver's heartbeats: written in the background, so that a store which hangs keeps it from nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.errors import DeltaSyncError
from deltasync.stores import Store
from vllm_plugin.looks import Looks

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

_FIELDS = [field.name for field in dataclasses.fields(Heartbeat) if field.name != "time_s"]
_WRITE_S = 60.0
_STOP_S = 5.0  # that the last one may keep a server that ends


class Beats:
    """Heartbeats of one server.

    Args:
        store: The channel's.
        interval_s: Longest time between two.
    """

    def __init__(self, store: Store, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._looks = Looks("deltasync-heartbeat")
        self._last: tuple[object, ...] = ()
        self._last_s = -interval_s
        self._writing: asyncio.Task[None] | None = None

    def tell(self, status: Mapping[str, Any]) -> None:
        """Begin to write one if something in the status changed or the last one is old, unless one is being written."""
        error = None if status["state"] == "stale" else status["error"]  # which tells for how long
        told, now = (status["epoch"], status["sha256"], status["state"], error), time.monotonic()
        if told == self._last and now - self._last_s < self._interval_s:
            return
        if self._writing is None or self._writing.done():
            self._last, self._last_s = told, now
            self._writing = asyncio.create_task(self._write(status, _WRITE_S), name="deltasync-heartbeat")

    async def stop(self, status: Mapping[str, Any]) -> None:
        """Write the last one."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        await self._write(status, _STOP_S)

    async def _write(self, status: Mapping[str, Any], timeout_s: float) -> None:
        """Write one. A failure is logged: heartbeats are never needed."""
        document = Heartbeat(**{name: status[name] for name in _FIELDS})
        try:
            await self._looks.take(document, lambda: heartbeat.write(self._store, document), timeout_s)
        except DeltaSyncError as error:
            logger.warning("deltasync: heartbeat not written: %s", error)
