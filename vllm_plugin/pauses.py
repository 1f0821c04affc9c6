"""Pausing generation for a commit, beside other callers who pause and resume it, put vLLM to sleep, and call its workers.

vLLM has one switch for all of them. So a commit waits until no other caller uses the switch, makes them wait meanwhile, and
leaves it as it was. `Pauses.guard` catches them in the engine client, whatever route they came by.

A commit pauses, writes, announces and resumes in one call to each engine (`engine.exchange`), or in two where several shards
have to agree. So generation stands still for what the engine's own process does, and for no reply.

A call that may have changed the weights, which is any call of the workers and waking up from sleep, runs while generation is
paused. It is resumed once the workers know their bits: at once, or when the target has settled which version they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
        last_s: Seconds that the last pause for a commit took: from the end of the last step, as far as that is known.
        held: Whether generation stays paused, because the weights are uncertain.
        used: Whether another caller has used the switch. The target resets it.
        on_use: Called when the follow loop should see whether the workers know their bits.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._others = 0
        self._by_another = False
        self._exchanged: engines.Exchanged | None = None  # the last one of the body of `committing`
        self._idle_s = 0.0  # when the pause began
        self._free = asyncio.Condition()
        self._clears = False  # whether the pause drops the keys of running requests
        self._undivided = 0  # replies that one version makes
        self._draining = False
        self.last_s = 0.0
        self.held = self.used = False
        self.on_use: Callable[[], object] = lambda: None

    @contextlib.asynccontextmanager
    async def committing(self, clear_cache: bool) -> AsyncIterator[None]:
        """Let nobody else use the switch in the body, which calls `exchange`; then restore what it was.

        Replies that one version makes are waited for, unless generation is paused already.
        If the body raises an error that is not safe (`is_safe`), it stays paused until a body succeeds or `release`.
        `clear_cache` drops the keys of running requests.
        """
        async with self._alone(asks=False):
            was_held = self.held
            if self._undivided and not was_held:
                self._by_another = await self._engine.is_paused()
                if not self._by_another:
                    await self._drain()
            self._exchanged, self._idle_s, self._clears = None, time.monotonic(), clear_cache
            try:
                yield
                self.held = False
            except BaseException as error:
                if not is_safe(error):
                    self.held = True
                    await self._pause()  # should the call have failed before
                raise
            finally:
                resumed_s = None if self._exchanged is None else self._exchanged.resumed_s
                if resumed_s is None and not self.held and (was_held or self._exchanged is not None):
                    await self._resume()
                self._free.notify_all()
                self.last_s = (time.monotonic() if resumed_s is None else resumed_s) - self._idle_s

    async def exchange(self, call: Sequence[Any], name: str | None) -> list[Any]:
        """Pause, and make a call of all workers, in the body of `committing`; the last one has the version's name.

        If that one succeeds, the version is announced, and generation goes on, unless another caller has paused it.
        """
        is_first = self._exchanged is None
        resumes = None if is_first and not self.held else not self._by_another
        found = await engines.exchange(self._engine, call, name, is_first and self._clears, resumes)
        if is_first:
            self._idle_s = found.idle_s
            if not self.held:
                self._by_another = found.was_paused
        self._exchanged = found
        return found.answers

    @contextlib.asynccontextmanager
    async def _alone(self, *, asks: bool = True) -> AsyncIterator[None]:
        """Let nobody else use the switch in the body, and note how it stands, if `asks`."""
        async with self._free:
            await self._free.wait_for(lambda: not self._others and not self._draining)
            if asks and not self.held:
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

    async def _pause(self) -> None:
        pause = getattr(self._engine.engine_core, "pause_scheduler_async", None)
        if pause is None:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            return
        # As `pause_generation`, without its 20 ms of sleep in which the last outputs reach their readers, and without
        # taking back that another client's pause refuses new requests.
        await pause(mode="keep", clear_cache=False)

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
                        await self._pause()
                    return await call(*args, **kwargs)
                finally:
                    self.used = True
                    if wakes and not await engines.is_asleep(self._engine):
                        self._by_another = False
                        await self._pause()  # again, to wait until all engines are
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
