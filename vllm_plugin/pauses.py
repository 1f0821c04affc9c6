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
        held: Whether generation stays paused because a commit left weights that no version has.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._others = 0
        self._by_another = False
        self._free = asyncio.Condition()
        self.last_s = 0.0
        self.held = False

    @contextlib.asynccontextmanager
    async def paused(
        self, clear_cache: bool, is_safe: Callable[[BaseException], bool] = lambda _: True
    ) -> AsyncIterator[None]:
        """Generation is paused, and afterwards again as it was before.

        Args:
            clear_cache: Forget keys and values of running requests.
            is_safe: Whether the weights are those of a version though the body raised this. If not, generation stays
                paused, until a body succeeds or `release` is called.
        """
        async with self._free:
            await self._free.wait_for(lambda: not self._others)
            if not self.held:
                is_paused = getattr(self._engine, "is_paused", None)
                self._by_another = is_paused is not None and await is_paused()
            before = time.perf_counter()
            try:
                await self._pause(clear_cache)
                yield
                self.held = False
            except BaseException as error:
                self.held = self.held or not is_safe(error)
                raise
            finally:
                await self._resume()
                self.last_s = time.perf_counter() - before

    async def release(self) -> None:
        """End holding generation: it is known which version the weights are."""
        async with self._free:
            if self.held:
                self.held = False
                await self._resume()

    async def _resume(self) -> None:
        if not self.held:
            self._free.notify_all()
            if not self._by_another:
                await self._engine.resume_generation()

    async def _pause(self, clear_cache: bool) -> None:
        pause = getattr(getattr(self._engine, "engine_core", None), "pause_scheduler_async", None)
        if clear_cache or pause is None:
            await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
        else:
            # All that `pause_generation` does, but for 20 ms of sleep in which the last outputs reach their readers.
            await pause(mode="keep", clear_cache=False)

    @contextlib.asynccontextmanager
    async def by_another(self) -> AsyncIterator[None]:
        """Another client pauses or resumes, once no commit is going on and generation is not held."""
        async with self._free:
            await self._free.wait_for(lambda: not self.held)
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
