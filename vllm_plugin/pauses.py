"""Pausing generation for a commit, beside other callers who pause and resume it, put vLLM to sleep, and call its workers.

vLLM has one switch for all of them. So a commit waits until no other caller uses the switch, makes them wait meanwhile, and
leaves it as it was. `Pauses.guard` catches them in the engine client, whatever route they came by.

A call that may have changed the weights, which is any call of the workers and waking up from sleep, runs while generation is
paused. It is resumed once the workers know their bits: at once, or when the target has settled which version they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from deltasync.errors import ConfigError, NotPublishedError, SleepingError
from deltasync.following.engine import is_safe, succeeded
from vllm_plugin import engine as engines
from vllm_plugin import logger
from vllm_plugin.workers import parse

Call = Callable[..., Awaitable[Any]]


class Pauses:
    """The switch of one engine.

    Attributes:
        last_s: Seconds that the last pause for a commit took.
        held: Whether generation stays paused, because the weights are uncertain.
        used: Whether another caller has used the switch. The target resets it.
        on_use: Called when the follow loop should see whether the workers know their bits.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._others = 0
        self._by_another = False
        self._free = asyncio.Condition()
        self._undivided = 0  # replies that one version makes
        self._draining = False
        self.last_s = 0.0
        self.held = self.used = False
        self.on_use: Callable[[], object] = lambda: None

    @contextlib.asynccontextmanager
    async def paused(self, clear_cache: bool) -> AsyncIterator[None]:
        """Pause generation for the body, then restore what it was. `clear_cache` drops the keys of running requests.

        Replies that one version makes are waited for, unless generation is paused already.
        If the body raises an error that is not safe (`is_safe`), it stays paused until a body succeeds or `release`.
        """
        async with self._alone():
            if not self.held and not self._by_another:
                await self._drain()
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

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let nobody else use the switch in the body, and note how it stood."""
        async with self._free:
            await self._free.wait_for(lambda: not self._others and not self._draining)
            if not self.held:
                self._by_another = await self._engine.is_paused()
            yield

    async def _drain(self) -> None:
        """Wait until no reply is under way that one version makes, while new ones wait."""
        self._draining = True
        try:
            await self._free.wait_for(lambda: not self._undivided)
        finally:
            self._draining = False

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
        if pause is None:
            await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
            return
        # As `pause_generation`, without its 20 ms of sleep in which the last outputs reach their readers, and without
        # taking back that another client's pause refuses new requests.
        await pause(mode="keep", clear_cache=False)
        if clear_cache:
            await engines.recompute(self._engine)

    @contextlib.asynccontextmanager
    async def by_another(self) -> AsyncIterator[None]:
        """Let another caller use the switch in the body, once no commit is running and generation is not held."""
        async with self._free:
            await self._free.wait_for(lambda: not self.held and not self._draining)
            self._others += 1
        try:
            yield
        finally:
            self.used = True
            async with self._free:
                self._others -= 1
                self._free.notify_all()

    @contextlib.asynccontextmanager
    async def undivided(self) -> AsyncIterator[None]:
        """Let no commit begin in the body, unless generation is paused already."""
        async with self._free:
            await self._free.wait_for(lambda: not self._draining)
            self._undivided += 1
        try:
            yield
        finally:
            async with self._free:
                self._undivided -= 1
                self._free.notify_all()

    async def guard(self, engine: Any) -> None:
        """Make all other callers of this engine client use the switch by turns. Its class is left as it is."""
        await engines.guard(engine)
        for name in ("pause_generation", "resume_generation", "sleep"):
            setattr(engine, name, self._by_turns(getattr(engine, name)))
        engine.collective_rpc = self._proven(engine.collective_rpc)
        engine.wake_up = self._proven(engine.wake_up, wakes=True)

        async def update_weight_version(new_version: str) -> None:
            raise ConfigError(f"This server follows a channel, which names its weights; they are not {new_version[:40]!r}.")

        engine.update_weight_version = update_weight_version

    def _by_turns(self, call: Call) -> Call:
        @functools.wraps(call)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            async with self.by_another():
                return await call(*args, **kwargs)

        return wrapped

    def _proven(self, call: Call, *, wakes: bool = False) -> Call:
        @functools.wraps(call)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            async with self._alone():
                before, self.held = self.held, True  # should this end in the middle, the follow loop looks at the weights
                try:
                    if not before and not self._by_another:
                        await self._pause(clear_cache=False)
                    return await call(*args, **kwargs)
                finally:
                    self.used = True
                    if wakes and not await engines.is_asleep(self._engine):
                        self._by_another = False
                        await self._pause(clear_cache=False)  # again, to wait until all engines are
                    if not before and await self._settled():
                        await self._resume()
                    else:
                        self.on_use()

        return wrapped

    async def _settled(self) -> bool:
        """Whether all workers know which bits they hold, or hold none that anybody computes with."""
        try:
            answers = await engines.call_workers(self._engine, "deltasync_call", ("settled",))
            return all(succeeded([parse(answer, bool) for answer in answers]))
        except NotPublishedError:
            return True
        except SleepingError:
            return self._by_another
        except Exception:  # whatever it is: then the follow loop finds out
            logger.exception("deltasync could not ask the workers about their weights")
            return False
