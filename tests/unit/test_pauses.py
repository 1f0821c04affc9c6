"""The one switch that pauses generation, between commits and other callers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from deltasync.errors import ConfigError, NotPublishedError, SleepingError, StageError
from deltasync.serve.engine import OnLoop, answer
from vllm_plugin.engine import exchange_here
from vllm_plugin.pauses import Pauses
from vllm_plugin.versions import LiveVersions


class Engine:
    """The switch as vLLM's engine client has it, and one worker.

    Attributes:
        settled: Whether the worker knows its bits; an error that it replies with instead.
        asleep: Whether memory is gone.
        slow_s: How long another client's pause takes.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.events: list[str] = []
        self.settled: bool | Exception = True
        self.asleep, self.guarded, self.slow_s = False, False, 0.0
        self.engine_core = SimpleNamespace(
            core_engines=[b"0"], _call_utility_async=self.call, pause_scheduler_async=self.pause_scheduler
        )

    async def call(self, method: str, *args: Any, engine: bytes) -> Any:
        if method == "deltasync_guard":
            self.guarded = True
            return False
        if method == "deltasync_exchange":
            return self.exchange(*args)
        return self.asleep

    def exchange(self, call: list[str], name: str | None, recomputes: bool, resumes: bool | None) -> Any:
        core = SimpleNamespace(
            deltasync_paused=False,
            is_scheduler_paused=lambda: self.is_off,
            pause_scheduler=self.switch_off,
            deltasync_recompute=lambda: self.events.append("recompute"),
            collective_rpc=lambda *_: [answer(lambda: self.events.append(call[0]))],
            set_weight_version=lambda name: self.events.append(name),
            resume_scheduler=self.switch_on,
        )
        return [*exchange_here(core, call, name, recomputes, resumes)]  # type: ignore[misc]  # not a future

    def switch_off(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and not clear_cache, (
            "vLLM would drop the cache of inputs in one process before it does in the other"
        )
        if not self.is_off:
            self.events.append("pause")
        self.is_off = True

    async def pause_scheduler(self, *, mode: str, clear_cache: bool) -> None:
        self.switch_off(mode, clear_cache)

    def switch_on(self) -> None:
        self.events.append("resume")
        self.is_off = False

    async def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Any]:
        if method == "deltasync_call":
            return [answer(lambda: self.reply())]
        self.events.append(f"{method} {'paused' if self.is_off else 'running'}")
        return []

    def reply(self) -> bool:
        if isinstance(self.settled, Exception):
            raise self.settled
        return self.settled

    async def sleep(self) -> None:
        self.is_off = self.asleep = True
        self.events.append("sleep")

    async def wake_up(self) -> None:
        self.asleep, self.is_off = False, self.guarded
        self.events.append("wake up")

    async def abort(self) -> str:
        return f"{self.is_off}"

    async def is_paused(self) -> bool:
        return self.is_off

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.events.append("another begins")
        await asyncio.sleep(self.slow_s)  # vLLM waits for running requests
        self.is_off = True
        self.events.append("another has paused")

    async def resume_generation(self) -> None:
        self.switch_on()

    async def update_weight_version(self, version: str) -> None:
        self.events.append(version)


def pauses_of(engine: Engine, *, recomputes: bool = False) -> Pauses:
    return Pauses(engine, OnLoop(asyncio.get_running_loop()), LiveVersions(), recomputes=recomputes)


@pytest.mark.parametrize("calls", [["commit"], ["commit", "confirm"]])
@pytest.mark.parametrize("already", [False, True])
def test_it_is_afterwards_as_before(already: bool, calls: list[str]) -> None:
    async def body() -> None:
        engine = Engine()
        engine.is_off = already
        pauses = pauses_of(engine, recomputes=True)
        for fails in (False, True):
            engine.events.clear()
            try:
                async with pauses.exclusive():
                    for call in calls:
                        is_last = call == calls[-1] and not fails
                        await pauses.exchange_all([call], "7" if is_last else None)
                        assert engine.is_off is (already or not is_last), (
                            "the last call has resumed by itself"
                        )
                    if fails:
                        raise StageError
            except StageError:
                assert fails
            switched, named = [] if already else ["pause"], [] if fails else ["7"]
            assert engine.events == [*switched, "recompute", *calls, *named, *([] if already else ["resume"])]
            assert engine.is_off is already
            assert pauses.last_s > 0

    asyncio.run(body())


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_with_a_step_under_way_exchanges_once_it_has_ended(fails: bool) -> None:
    events: list[str] = []
    pausing: Future[None] = Future()
    core = SimpleNamespace(
        deltasync_paused=False,
        is_scheduler_paused=lambda: False,
        pause_scheduler=lambda **_: pausing,
        collective_rpc=lambda *call: (
            events.append("commit") or [{"error": {}} if fails else {"result": None}]
        ),  # type: ignore[func-returns-value]
        set_weight_version=events.append,
        resume_scheduler=lambda: events.append("resume"),
        deltasync_wakeup=b"wake up",
        input_queue=SimpleQueue(),  # the engine's loop waits for it, and would not see that it was resumed
    )
    exchanged = exchange_here(core, ["commit", True], "7", recomputes=False, resumes=None)
    assert isinstance(exchanged, Future)
    assert events == [] and not exchanged.done()
    pausing.set_result(None)
    assert events == (["commit"] if fails else ["commit", "7", "resume"])
    assert core.input_queue.empty() is fails
    assert (exchanged.result().resumed_s is None) is fails


def test_a_pause_that_fails_is_said_to_whoever_commits() -> None:
    pausing: Future[None] = Future()
    core = SimpleNamespace(
        deltasync_paused=False, is_scheduler_paused=lambda: False, pause_scheduler=lambda **_: pausing
    )
    exchanged = exchange_here(core, ["commit", True], "7", recomputes=False, resumes=None)
    pausing.set_exception(RuntimeError("no device"))
    assert isinstance(exchanged, Future)
    with pytest.raises(RuntimeError, match="no device"):
        exchanged.result()


def test_a_commit_waits_for_a_pause_that_is_under_way_and_keeps_the_next_one_waiting() -> None:
    async def body() -> list[str]:
        engine = Engine()
        pauses, done = pauses_of(engine), engine.events
        engine.slow_s = 0.02
        await pauses.guard()

        async def another() -> None:
            await engine.pause_generation(mode="wait", clear_cache=True)

        async def commit() -> None:
            async with pauses.exclusive():
                await asyncio.sleep(0.02)
                await pauses.exchange_all(["commit"], "7")

        first = asyncio.create_task(another())
        await asyncio.sleep(0.001)
        committing = asyncio.create_task(commit())
        await first
        await asyncio.sleep(0.005)
        await another()
        await committing
        assert engine.is_off
        return done

    waited = ["another begins", "another has paused", "commit", "7"]
    assert asyncio.run(body()) == [*waited, "another begins", "another has paused"]


def test_other_calls_do_not_wait() -> None:
    async def body() -> None:
        engine = Engine()
        pauses = pauses_of(engine)
        await pauses.guard()
        async with pauses.exclusive():
            await pauses.exchange_all(["commit"], None)
            assert await engine.abort() == "True"
        with pytest.raises(ConfigError, match="which names its weights"):
            await engine.update_weight_version("mine")

    asyncio.run(body())


@pytest.mark.parametrize("before", ["running", "paused"])
@pytest.mark.parametrize(
    ("settled", "held"),
    [
        (True, False),
        (False, True),
        (NotPublishedError("none"), False),
        (ZeroDivisionError(), True),
        (SleepingError("z"), None),
    ],
)
def test_what_may_change_weights_is_paused_until_they_are_known(
    settled: bool | Exception, held: bool | None, before: str
) -> None:
    """A worker that says it sleeps keeps generation paused unless vLLM has paused it itself."""
    held = before == "running" if held is None else held

    async def body() -> None:
        engine, looks = Engine(), []
        pauses = pauses_of(engine)
        pauses.on_use = lambda: looks.append(1)
        await pauses.guard()
        engine.settled, engine.is_off = settled, before == "paused"
        await engine.collective_rpc("reload_weights")
        assert "reload_weights paused" in engine.events
        assert (pauses.held, pauses.used, len(looks)) == (held, True, int(held))
        assert engine.is_off is (held or before == "paused")
        if held:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.resume_generation(), 0.01)
            await engine.collective_rpc("reload_weights")  # which may be what helps
            await pauses.resume_held()
        assert engine.is_off is (before == "paused")

    asyncio.run(body())


@pytest.mark.parametrize("known", [True, False])
def test_vllm_wakes_up_paused_until_its_weights_are_known(known: bool) -> None:
    async def body() -> None:
        engine = Engine()
        pauses = pauses_of(engine)
        await pauses.guard()
        await engine.sleep()
        engine.settled = SleepingError("asleep")
        await engine.collective_rpc("list_loras")
        assert not pauses.held and engine.is_off, "as vLLM left it"
        engine.settled = known
        await engine.wake_up()
        assert (engine.is_off, pauses.held) == (not known, not known)
        await pauses.resume_held()
        assert not engine.is_off

    asyncio.run(body())


def test_a_commit_waits_for_replies_of_one_version_and_they_for_it() -> None:
    async def body() -> list[str]:
        engine = Engine()
        pauses, done = pauses_of(engine), engine.events

        async def reply(name: str, *, takes_s: float = 0.02) -> None:
            async with pauses.single_version():
                await asyncio.sleep(takes_s)
                done.append(name)

        async def commit() -> None:
            async with pauses.exclusive():
                await pauses.exchange_all(["commit"], "7")

        first = asyncio.create_task(reply("first"))
        await asyncio.sleep(0.001)
        committing = asyncio.create_task(commit())
        await asyncio.sleep(0.001)
        await asyncio.gather(first, committing, reply("second"))
        engine.is_off = True  # another client's pause, in which no reply ends
        frozen = asyncio.create_task(reply("frozen", takes_s=0.05))
        await asyncio.sleep(0.001)
        await commit()
        await frozen
        return done

    assert asyncio.run(body()) == [
        "first",
        "pause",
        "commit",
        "7",
        "resume",
        "second",
        "commit",
        "7",
        "frozen",
    ]


def test_a_commit_waits_for_replies_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        engine = Engine()
        pauses = pauses_of(engine)
        async with pauses.single_version():
            with pytest.raises(StageError, match="have not ended"):
                async with pauses.exclusive():
                    raise AssertionError
            assert not pauses.held and engine.events == []
        async with pauses.single_version(), asyncio.timeout(1):
            pass
        async with pauses.exclusive():
            await pauses.exchange_all(["commit"], "7")

    monkeypatch.setattr("vllm_plugin.pauses._DRAIN_S", 0.01)
    asyncio.run(body())


def test_generation_stays_paused_while_nobody_knows_what_the_weights_are() -> None:
    async def commit(pauses: Pauses, error: Exception | None = None) -> None:
        try:
            async with pauses.exclusive():
                await pauses.exchange_all(["commit"], "7" if error is None else None)
                if error is not None:
                    raise error
        except (ZeroDivisionError, StageError):
            pass

    async def body() -> None:
        engine = Engine()
        pauses = pauses_of(engine)
        await commit(pauses, StageError())
        assert (engine.is_off, pauses.held) == (False, False)
        for error in (ZeroDivisionError(), StageError()):  # a safe failure does not say what the weights are
            await commit(pauses, error)
            assert (engine.is_off, pauses.held) == (True, True)
        await pauses.guard()
        another = asyncio.create_task(engine.resume_generation())
        await asyncio.sleep(0.01)
        assert engine.is_off and not another.done()
        await pauses.resume_held()
        assert (engine.is_off, pauses.held) == (False, False)
        await another
        await commit(pauses, ZeroDivisionError())
        await commit(pauses)
        assert (engine.is_off, pauses.held) == (False, False)
        engine.is_off = True  # another client's pause
        await commit(pauses, ZeroDivisionError())
        await pauses.resume_held()
        assert engine.is_off

    asyncio.run(body())


def test_a_resume_that_fails_is_tried_again_by_release(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise RuntimeError("no answer")

    async def body() -> None:
        engine = Engine()
        pauses = pauses_of(engine)
        with monkeypatch.context() as patch:
            patch.setattr(pauses, "_resume_all", fail)
            with pytest.raises(RuntimeError):
                async with pauses.exclusive():
                    await pauses.exchange_all(["commit"], None)
            assert (engine.is_off, pauses.held) == (True, True)
            with pytest.raises(RuntimeError):
                await pauses.resume_held()
        assert (engine.is_off, pauses.held) == (True, True)
        await pauses.resume_held()
        assert (engine.is_off, pauses.held) == (False, False)

    asyncio.run(body())
