"""Pausing generation for a commit, beside other callers who pause and resume it, put vLLM to sleep, and call
its workers.

vLLM has one switch for all of them. So a commit waits until no other caller uses the switch, makes them wait
meanwhile, and leaves it as it was. `Pauses.guard` catches them in the engine client, whatever route they came
by.

A commit pauses, writes, announces and resumes in one call to each engine (`engine.exchange_here`), or in two
where several shards have to agree. So generation stands still for what the engine's own process does, and for
no reply.

A call that may have changed the weights, which is any call of the workers and waking up from sleep, runs
while generation is paused. It is resumed once the workers know their bits: at once, or when the target has
settled which version they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, NotPublishedError, SleepingError, StageError
from deltasync.following import Follow
from deltasync.serve.engine import Answer, OnLoop, around, is_safe, number_of, open_reader, parse, succeeded
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.metrics import Metrics, total
from deltasync.serve.shards import EngineClient, ShardsTarget
from deltasync.stores.cache import CachedStore
from vllm_plugin import logger
from vllm_plugin.engine import Exchanged, call_engines
from vllm_plugin.versions import LiveVersions

SWITCHED = (
    "pause_generation",
    "resume_generation",
    "sleep",
    "collective_rpc",
    "wake_up",
    "update_weight_version",
)
"""Methods of vLLM's engine client that `Pauses.guard` wraps."""

_DRAIN_S = 60.0  # how long a commit waits for replies that one version makes

Call = Callable[..., Awaitable[Any]]

_Result = TypeVar("_Result")


def generated_tokens() -> int:
    """Return the tokens that vLLM has generated since the server started, by its own metric."""
    return total("vllm:generation_tokens_total")


def running_requests() -> int:
    """Return the requests in flight at the last engine step, by vLLM's own metric."""
    return total("vllm:num_requests_running")


def open_follow(client: EngineClient, settings: ReplicaSettings, metrics: Metrics | None = None) -> Follow:
    """Make the follow loop of one server's workers, which follows `settings.channel` once it is started.

    By default nobody reads its metrics.
    """
    reader = open_reader(settings)
    metrics = Metrics(CollectorRegistry()) if metrics is None else metrics
    target = ShardsTarget(client, reader, settings, metrics, logger)
    prefetch = isinstance(reader.store, CachedStore)  # workers only have the cache in common
    beats = HeartbeatWriter(reader.store)
    return Follow(reader, target, settings, observer=metrics, prefetch=prefetch, heartbeats=beats, log=logger)


class Pauses(EngineClient):
    """The switch of one engine, as vLLM's engine client `engine` reaches it, and the way to its workers.

    The follow loop's thread calls what `EngineClient` has; the rest runs on the engine client's event loop.

    Attributes:
        on_use: Called when the follow loop should see whether the workers know their bits.

    Args:
        live: The versions that were live, where this notes others.
        recomputes: Whether requests drop what older weights have computed, in each commit.
    """

    def __init__(self, engine: Any, run: OnLoop, live: LiveVersions, *, recomputes: bool = False) -> None:
        self._engine, self._core, self._run, self._recomputes = engine, engine.engine_core, run, recomputes
        self._live = live
        # As they are before `guard` wraps them for other callers.
        self._call_first, self._resume_all, self._announce = (
            engine.collective_rpc,
            engine.resume_generation,
            engine.update_weight_version,
        )
        self._others = 0
        self._other_caller = False
        self._exchanged: Exchanged | None = None  # the last one of the body of `exclusive`
        self._idle_s = 0.0  # when the pause began
        self._free = asyncio.Condition()
        self._single_version_replies = 0  # replies that one version makes
        self._draining = False
        self.on_use: Callable[[], object] = lambda: None

    # In the follow loop's thread

    def call(self, method: str, *args: object) -> list[Answer]:
        """As `EngineClient.call`: of the workers of all engines."""
        return self._run(self._called(method, args))

    def announce(self, name: str) -> None:
        """As `EngineClient.announce`."""
        self._run(self._announce(name))
        self._live.note(number_of(name))

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """As `EngineClient.committing`: in a pause."""
        exclusive = self.exclusive()
        self._run(exclusive.__aenter__())
        try:
            yield
        except BaseException as error:
            self._run(exclusive.__aexit__(type(error), error, None))
            raise
        self._run(exclusive.__aexit__(None, None, None))

    def exchange(self, call: Sequence[Any], name: str | None) -> list[Answer]:
        """As `EngineClient.exchange`."""
        number = None if name is None else number_of(name)
        if number is not None:
            self._live.expect(number)
        answers = self._run(self.exchange_all(call, name))
        if number is not None and not any("error" in answer for answer in answers):
            self._live.note(number)
        return answers

    def release(self) -> None:
        """As `EngineClient.release`: generation resumes."""
        self._run(self.resume_held())

    def cancel(self) -> None:
        """As `EngineClient.cancel`."""
        self._run.cancel()

    def running_requests(self) -> int:
        """As `EngineClient.running_requests`."""
        return running_requests()

    def generated_tokens(self) -> int:
        """As `EngineClient.generated_tokens`."""
        return generated_tokens()

    # On the event loop

    async def _called(self, method: str, args: tuple[object, ...]) -> list[Answer]:
        if len(self._core.core_engines) < 2:
            return list(await self._call_first(method, args=args))
        by_engine = await call_engines(self._core, "collective_rpc", method, None, args, None)
        # vLLM's own RPC returns those of the first engine
        return [reply for replies in by_engine for reply in replies]

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Let nobody else use the switch in the body, which calls `exchange_all`; then restore what it was.

        Replies that one version makes are waited for, unless generation is paused already. If the body raises
        an error that is not safe (`is_safe`), it stays paused until a body succeeds or `resume_held`.
        """
        async with self._alone(asks=False):
            was_held = self.held
            if self._single_version_replies and not was_held:
                self._other_caller = await self._engine.is_paused()
                if not self._other_caller:
                    await self._drain()
            self._exchanged, self._idle_s = None, time.monotonic()
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

    async def exchange_all(self, call: Sequence[Any], name: str | None) -> list[Answer]:
        """Pause, and make a call of all workers, in the body of `exclusive`; the last one has the version's name.

        If that one succeeds, the version is announced, and generation goes on, unless another caller has
        paused it.
        """
        is_first = self._exchanged is None
        resumes = None if is_first and not self.held else not self._other_caller
        if len(self._core.core_engines) > 1:
            resumes = False  # they resume together, or wait for each other for ever
        arguments = [*call], name, is_first and self._recomputes, resumes
        found = [
            Exchanged(*each) for each in await call_engines(self._core, "deltasync_exchange", *arguments)
        ]
        if is_first:
            self._idle_s = max(each.idle_s for each in found)
            if not self.held:
                self._other_caller = any(each.was_paused for each in found)
        self._exchanged = found[0]
        return [answer for each in found for answer in each.answers]

    @contextlib.asynccontextmanager
    async def _alone(self, *, asks: bool = True) -> AsyncIterator[None]:
        """Let nobody else use the switch in the body, and note how it stands, if `asks`."""
        async with self._free:
            await self._free.wait_for(lambda: not self._others and not self._draining)
            if asks and not self.held:
                self._other_caller = await self._engine.is_paused()
            yield

    async def _drain(self) -> None:
        """Wait until no reply is under way that one version makes, while new ones wait; StageError after
        `_DRAIN_S`.
        """
        self._draining = True
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._free.wait_for(lambda: not self._single_version_replies)
        except TimeoutError:
            raise StageError(
                f"Replies that one version makes have not ended for {_DRAIN_S:g} s; it is still live."
            ) from None
        finally:
            self._draining = False
            self._free.notify_all()

    async def resume_held(self) -> None:
        """Resume generation if it is held: it is known again which version the weights are."""
        async with self._free:
            if self.held:
                await self._resume()

    async def _resume(self) -> None:
        self.held = True  # if resuming fails, the next `resume_held` tries again
        if not self._other_caller:
            await self._resume_all()
        self.held = False
        self._free.notify_all()

    async def _pause(self) -> None:
        # As `pause_generation`, without its 20 ms of sleep in which the last outputs reach their readers, and
        # without taking back that another client's pause refuses new requests.
        await self._core.pause_scheduler_async(mode="keep", clear_cache=False)

    @contextlib.asynccontextmanager
    async def other_caller(self) -> AsyncIterator[None]:
        """Let another caller use the switch in the body, once no commit is running and generation is not
        held.
        """
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
    async def single_version(self) -> AsyncIterator[None]:
        """Let no commit begin in the body, unless generation is paused already."""
        async with self._free:
            await self._free.wait_for(lambda: not self._draining)
            self._single_version_replies += 1
        try:
            yield
        finally:
            async with self._free:
                self._single_version_replies -= 1
                self._free.notify_all()

    async def guard(self) -> None:
        """Make all other callers of the engine client use the switch by turns. Its class is left as it is.

        All engines stay paused when they wake up from sleep, until somebody resumes them. So do those that an
        API server before this one has paused for a commit, until the target has settled which version they
        hold.
        """
        engine = self._engine
        self.held |= any(await call_engines(self._core, "deltasync_guard"))
        for name in ("pause_generation", "resume_generation", "sleep"):
            around(engine, name)(self._by_turns)
        around(engine, "collective_rpc")(functools.partial(self._proven, wakes=False))
        around(engine, "wake_up")(functools.partial(self._proven, wakes=True))

        @around(engine, "update_weight_version")
        async def refuse(_: Call, new_version: str) -> None:
            raise ConfigError(
                f"This server follows a channel, which names its weights; they are not {new_version[:40]!r}."
            )

    async def _by_turns(self, call: Call, *args: Any, **kwargs: Any) -> Any:
        async with self.other_caller():
            return await call(*args, **kwargs)

    async def _proven(self, call: Call, *args: Any, wakes: bool, **kwargs: Any) -> Any:
        async with self._alone():
            # should this end in the middle, the follow loop looks at the weights
            before, self.held = self.held, True
            try:
                if not before and not self._other_caller:
                    await self._pause()
                return await call(*args, **kwargs)
            finally:
                self.used = True
                if wakes and not any(await call_engines(self._core, "deltasync_asleep")):
                    self._other_caller = False
                    await self._pause()  # again, to wait until all engines are
                if not before and await self._settled():
                    await self._resume()
                else:
                    self.on_use()

    async def _settled(self) -> bool:
        """Whether all workers know which bits they hold, or hold none that anybody computes with."""
        try:
            answers = await self._called("deltasync_call", ("settled",))
            return all(succeeded([parse(answer, bool) for answer in answers]))
        except NotPublishedError:
            return True
        except SleepingError:
            return self._other_caller
        except Exception:  # whatever it is: then the follow loop finds out
            logger.exception("deltasync could not ask the workers about their weights")
            return False
