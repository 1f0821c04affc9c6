"""Pausing generation for a commit, beside other clients who pause and resume it, and put vLLM to sleep.

vLLM has one switch for all of them. So a commit waits until no other client uses the switch, makes them wait meanwhile, and
leaves it as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_plugin.messages import is_safe

_PATHS = ("/pause", "/resume", "/sleep", "/wake_up")


class Pauses:
    """The switch of one engine.

    Attributes:
        last_s: Seconds that the last pause for a commit took.
        held: Whether generation stays paused, because a commit left uncertain weights.
        used: Whether another client has used the switch. The driver resets it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._others = 0
        self._by_another = False
        self._free = asyncio.Condition()
        self.last_s = 0.0
        self.held = self.used = False

    @contextlib.asynccontextmanager
    async def paused(self, clear_cache: bool) -> AsyncIterator[None]:
        """Pause generation for the body, then restore what it was. `clear_cache` drops the keys of running requests.

        If the body raises an error that is not safe (`is_safe`), it stays paused until a body succeeds or `release`.
        """
        async with self._free:
            await self._free.wait_for(lambda: not self._others)
            if not self.held:
                self._by_another = await self._engine.is_paused()
            before = time.perf_counter()
            try:
                await self._pause(clear_cache)
                yield
                self.held = False
            except BaseException as error:
                self.held = self.held or not is_safe(error)
                raise
            finally:
                if not self.held:
                    await self._resume()
                self.last_s = time.perf_counter() - before

    async def release(self) -> None:
        """Resume generation if it is held: it is known again which version the weights are."""
        async with self._free:
            if self.held:
                await self._resume()

    async def _resume(self) -> None:
        self.held = True  # if resuming fails, the next `release` tries again
        if not self._by_another:
            await self._engine.resume_generation()
        self.held = False
        self._free.notify_all()

    async def _pause(self, clear_cache: bool) -> None:
        pause = getattr(self._engine.engine_core, "pause_scheduler_async", None)
        if clear_cache or pause is None:
            await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
        else:
            # As `pause_generation`, without its 20 ms of sleep in which the last outputs reach their readers.
            await pause(mode="keep", clear_cache=False)

    @contextlib.asynccontextmanager
    async def by_another(self) -> AsyncIterator[None]:
        """Let another client use the switch in the body, once no commit is running and generation is not held."""
        async with self._free:
            await self._free.wait_for(lambda: not self.held)
            self._others += 1
        try:
            yield
        finally:
            self.used = True
            async with self._free:
                self._others -= 1
                self._free.notify_all()


def other_pauses(app: ASGIApp, pauses: Callable[[], Pauses | None]) -> ASGIApp:
    """ASGI middleware that makes other clients' pauses wait for the driver's commits, and commits for them."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        switch = pauses() if scope["type"] == "http" and scope["path"].endswith(_PATHS) else None
        async with contextlib.nullcontext() if switch is None else switch.by_another():
            await app(scope, receive, send)

    return call
