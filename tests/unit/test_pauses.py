"""The one switch that pauses generation, between commits and other clients."""

from __future__ import annotations

import asyncio

import pytest

from deltasync.errors import StageError
from vllm_plugin.engine import IdleEngine
from vllm_plugin.pauses import Pauses, other_pauses


class Engine(IdleEngine):
    """The switch as vLLM's engine client has it."""

    def __init__(self) -> None:
        self.is_off = False
        self.events: list[str] = []

    async def is_paused(self) -> bool:
        return self.is_off

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        self.events.append("pause")
        self.is_off = True

    async def resume_generation(self) -> None:
        self.events.append("resume")
        self.is_off = False


@pytest.mark.parametrize("already", [False, True])
def test_it_is_afterwards_as_before(already: bool) -> None:
    async def body() -> None:
        engine = Engine()
        engine.is_off = already
        pauses = Pauses(engine)
        for fails in (False, True):
            try:
                async with pauses.paused(clear_cache=False):
                    assert engine.is_off
                    if fails:
                        raise StageError
            except StageError:
                assert fails
            assert engine.is_off is already
            assert pauses.last_s > 0

    asyncio.run(body())


def test_a_commit_waits_for_a_pause_that_is_under_way_and_keeps_the_next_one_waiting() -> None:
    async def body() -> list[str]:
        engine = Engine()
        pauses, done = Pauses(engine), engine.events

        async def pause_route(scope: object, receive: object, send: object) -> None:
            done.append("another begins")
            await asyncio.sleep(0.02)  # vLLM waits for running requests
            engine.is_off = True
            done.append("another has paused")

        app = other_pauses(pause_route, lambda: pauses)  # type: ignore[arg-type]

        async def another() -> None:
            await app({"type": "http", "path": "/pause"}, None, None)  # type: ignore[arg-type]

        async def commit() -> None:
            async with pauses.paused(clear_cache=False):
                await asyncio.sleep(0.02)
                done.append("commit")

        first = asyncio.create_task(another())
        await asyncio.sleep(0.001)
        committing = asyncio.create_task(commit())
        await first
        await asyncio.sleep(0.005)
        await another()
        await committing
        assert engine.is_off
        return done

    waited = ["another begins", "another has paused", "pause", "commit"]
    assert asyncio.run(body()) == [*waited, "another begins", "another has paused"]


def test_requests_of_other_routes_do_not_wait() -> None:
    async def body() -> None:
        pauses, seen = Pauses(Engine()), []

        async def app(scope: dict[str, str], receive: object, send: object) -> None:
            seen.append(scope["path"])

        wrapped = other_pauses(app, lambda: pauses)  # type: ignore[arg-type]
        async with pauses.paused(clear_cache=False):
            await wrapped({"type": "http", "path": "/v1/completions"}, None, None)  # type: ignore[arg-type]
        assert seen == ["/v1/completions"]

    asyncio.run(body())


def test_generation_stays_paused_while_nobody_knows_what_the_weights_are() -> None:
    async def commit(pauses: Pauses, error: Exception | None = None) -> None:
        try:
            async with pauses.paused(False):
                if error is not None:
                    raise error
        except (ZeroDivisionError, StageError):
            pass

    async def body() -> None:
        engine = Engine()
        pauses = Pauses(engine)
        await commit(pauses, StageError())
        assert (engine.is_off, pauses.held) == (False, False)
        for error in (ZeroDivisionError(), StageError()):  # a safe failure does not say what the weights are
            await commit(pauses, error)
            assert (engine.is_off, pauses.held) == (True, True)
        app = other_pauses(lambda *_: engine.resume_generation(), lambda: pauses)  # type: ignore[arg-type, return-value]
        another = asyncio.create_task(app({"type": "http", "path": "/resume"}, None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert engine.is_off and not another.done()
        await pauses.release()
        assert (engine.is_off, pauses.held) == (False, False)
        await another
        await commit(pauses, ZeroDivisionError())
        await commit(pauses)
        assert (engine.is_off, pauses.held) == (False, False)
        engine.is_off = True  # another client's pause
        await commit(pauses, ZeroDivisionError())
        await pauses.release()
        assert engine.is_off

    asyncio.run(body())


def test_a_resume_that_fails_is_tried_again_by_release(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise RuntimeError("no answer")

    async def body() -> None:
        engine = Engine()
        pauses = Pauses(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "resume_generation", fail)
            with pytest.raises(RuntimeError):
                async with pauses.paused(clear_cache=False):
                    pass
            assert (engine.is_off, pauses.held) == (True, True)
            with pytest.raises(RuntimeError):
                await pauses.release()
        assert (engine.is_off, pauses.held) == (True, True)
        await pauses.release()
        assert (engine.is_off, pauses.held) == (False, False)

    asyncio.run(body())
