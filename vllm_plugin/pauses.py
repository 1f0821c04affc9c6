"""Pausing generation for a commit beside other clients, who may pause and resume it too, and send vLLM to sleep.

vLLM has one switch for all of them. So a commit waits until no other client is at it, keeps them waiting meanwhile, and
leaves it as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_PATHS = ("/pause", "/resume", "/sleep", "/wake_up")


class Pauses:
    """The switch of one engine.

    Args:
        engine: vLLM's engine client, or something like it; without `is_paused` nobody else pauses it.

    Attributes:
        last_s: Length of the last pause for a commit.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._others = 0
        self._free = asyncio.Condition()
        self.last_s = 0.0

    @contextlib.asynccontextmanager
    async def paused(self, clear_cache: bool) -> AsyncIterator[None]:
        """Generation is paused, and afterwards again as it was before.

        Args:
            clear_cache: Forget keys and values of running requests.
        """
        async with self._free:
            await self._free.wait_for(lambda: not self._others)
            is_paused = getattr(self._engine, "is_paused", None)
            already = is_paused is not None and await is_paused()
            before = time.perf_counter()
            try:
                await self._pause(clear_cache)
                yield
            finally:
                if not already:
                    await self._engine.resume_generation()
                self.last_s = time.perf_counter() - before

    async def _pause(self, clear_cache: bool) -> None:
        pause = getattr(getattr(self._engine, "engine_core", None), "pause_scheduler_async", None)
        if clear_cache or pause is None:
            await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
        else:
            # All that `pause_generation` does, but for 20 ms of sleep in which the last outputs reach their readers.
            await pause(mode="keep", clear_cache=False)

    @contextlib.asynccontextmanager
    async def by_another(self) -> AsyncIterator[None]:
        """Another client pauses or resumes, once no commit is going on."""
        async with self._free:
            self._others += 1
        try:
            yield
        finally:
            async with self._free:
                self._others -= 1
                self._free.notify_all()


class PausesOfOthers:
    """ASGI middleware that knows of other clients' pauses.

    Args:
        app: What is wrapped.
        pauses: Of the driver, None without one.
    """

    def __init__(self, app: ASGIApp, pauses: Callable[[], Pauses | None]) -> None:
        self._app = app
        self._pauses = pauses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or whatever else a server has to say."""
        pauses = self._pauses() if scope["type"] == "http" and scope["path"].endswith(_PATHS) else None
        async with contextlib.nullcontext() if pauses is None else pauses.by_another():
            await self._app(scope, receive, send)
