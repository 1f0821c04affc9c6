"""API servers of one engine that ask the one that leads, over one real worker; test_vllm_api_servers.py has
real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltasync.errors import StageError
from tests import driving
from tests.driving import Engine, Trainer, serving
from vllm_plugin.engine import lead
from vllm_plugin.servers import Servers
from vllm_plugin.versions import LiveVersions

engine, trainer = driving.engine, driving.trainer  # fixtures


class Member:
    """A server, what it holds for others, and its view of the versions."""

    def __init__(self, number: int, engine: Any) -> None:
        async def utility(method: str, *args: Any, engine: Any) -> Any:
            assert method == "deltasync_lead"
            return lead(engine, *args)

        core = SimpleNamespace(client_index=number, core_engines=[engine], _call_utility_async=utility)
        self.number, self.led, self.held, self.live = number, 0, 0, LiveVersions()
        self.asked: list[str] = []
        self.servers = Servers(core, self.answer, self.begin)

    async def begin(self) -> None:
        self.led += 1

    async def join(self) -> None:
        self.live.share(await self.servers.listen())
        await self.servers.elect(None)

    @contextlib.asynccontextmanager
    async def answer(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        self.asked.append(method)
        if method in ("fail", "sleep"):
            raise ZeroDivisionError
        self.held += 1
        try:
            yield [self.number, method, args, kwargs]
        finally:
            self.held -= 1


@contextlib.asynccontextmanager
async def members(count: int) -> AsyncIterator[list[Member]]:
    engine, before = SimpleNamespace(), len(asyncio.all_tasks())
    found = [Member(number, engine) for number in range(count)]
    await asyncio.gather(*(each.join() for each in found))
    try:
        yield found
    finally:
        for each in found:
            each.servers.close()
        await until(lambda: len(asyncio.all_tasks()) == before)
        engine.deltasync_folder.cleanup()


def run(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_one_leads_and_answers_all() -> None:
    async def scene() -> None:
        async with members(4) as found:
            (first,) = [each for each in found if each.led]
            assert [each.servers.leads for each in found] == [each is first for each in found]
            for each in found:
                async with each.servers.call("reach", 7, exact=True) as answer:
                    assert answer == [first.number, "reach", [7], {"exact": True}]

    run(scene)


def test_what_a_call_holds_is_let_go_with_it_and_with_the_server_that_made_it() -> None:
    async def scene() -> None:
        async with members(2) as found:
            (first,), (other,) = (
                [each for each in found if bool(each.led) is leads] for leads in (True, False)
            )
            async with other.servers.call("single_version"), other.servers.call("undivided"):
                assert first.held == 2
            await until(lambda: first.held == 0)

            async def hold() -> None:
                async with other.servers.call("single_version"):
                    await asyncio.Event().wait()

            task = asyncio.create_task(hold())
            await until(lambda: first.held == 1)
            task.cancel()
            await until(lambda: first.held == 0)

    run(scene)


def test_another_leads_once_the_first_has_ended() -> None:
    async def scene() -> None:
        async with members(3) as found:
            (first,) = [each for each in found if each.led]
            others = [each for each in found if each is not first]

            async def asked(each: Member) -> int:
                async with each.servers.call("status") as answer:
                    return int(answer[0])

            first.servers.close()
            leaders = {*await asyncio.gather(*(asked(each) for each in others for _ in range(3)))}
            assert len(leaders) == 1 and first.number not in leaders
            assert [each.led for each in others] == [int(each.number in leaders) for each in others]

    run(scene)


@pytest.mark.parametrize(("method", "asked"), [("fail", 2), ("sleep", 1)])
def test_a_call_that_is_not_answered_is_made_again_unless_it_may_have_begun(method: str, asked: int) -> None:
    async def scene() -> None:
        async with members(2) as found:
            (first,), (other,) = (
                [each for each in found if bool(each.led) is leads] for leads in (True, False)
            )
            with pytest.raises(StageError, match=f"did not answer {method}"):
                async with other.servers.call(method):
                    pass
            assert (first.asked, first.held) == ([method] * asked, 0)

    run(scene)


def test_all_see_at_once_which_versions_are_live() -> None:
    async def scene() -> None:
        async with members(2) as found:
            one, other = (each.live for each in found)
            assert (one.now, other.now, other.since(other.mark)) == (None, None, None)
            one.note(5)
            mark = other.mark
            assert (other.now, other.since(mark)) == (5, (5, 5))
            one.expect(6)
            assert (other.now, other.since(mark), other.since(other.mark)) == (5, (5, 6), (5, 5))
            one.note(6)
            assert (other.now, other.since(mark), other.since(other.mark)) == (6, (5, 6), (6, 6))
            other.note(None)  # this one leads now
            assert (one.now, one.since(one.mark)) == (None, None)

    run(scene)


def client(engine: Engine, number: int, shared: SimpleNamespace) -> Engine:
    """The engine client of one of two API servers; all have the same worker."""
    found = Engine()
    found.model, found.worker, call = engine.model, engine.worker, found.call_utility_async

    async def utility(method: str, *args: Any, engine: object) -> Any:
        return lead(shared, *args) if method == "deltasync_lead" else await call(method, *args, engine=engine)

    found.engine_core = SimpleNamespace(
        **{
            **vars(found.engine_core),
            "_call_utility_async": utility,
            "client_count": 2,
            "client_index": number,
        }
    )
    return found


def test_every_server_replies_alike_and_follows_when_the_first_has_ended(
    engine: Engine, trainer: Trainer, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish()
    shared = SimpleNamespace()
    clients = [client(engine, number, shared) for number in range(2)]
    with contextlib.ExitStack() as later, contextlib.ExitStack() as first:
        one = first.enter_context(serving(clients[0], monkeypatch, CHANNEL=memory_url))
        other = later.enter_context(serving(clients[1], monkeypatch, CHANNEL=memory_url))
        for number in (1, 2):
            assert [each.post("/deltasync/sync").json()["version"] for each in (one, other)] == [
                number,
                number,
            ]
            assert one.get("/deltasync/digest").json() == other.get("/deltasync/digest").json()
            status, same = (each.get("/deltasync/status").json() for each in (one, other))
            ages = {"followed_s_ago": 0, "state_s": 0}
            assert status | ages == same | ages and status["state"] == "serving"
            for each in (one, other):
                assert each.get("/deltasync/ready").json() == {"ready": True, "reason": None}
                assert each.post("/v1/completions").headers["x-deltasync-versions"] == f"{number}..{number}"
                for wanted, code in (
                    (str(number), 200),
                    (">=latest", 200),
                    (f">={number + 1}", 409),
                    ("new", 400),
                ):
                    headers = {
                        "x-deltasync-version": wanted,
                        "x-deltasync-timeout": "0.1" if code == 409 else "20",
                    }
                    assert each.post("/v1/completions", headers=headers).status_code == code
            trainer.publish()
        for body in ({"pin": "99"}, {"pin": "no"}, {"pin": "2"}, {"pin": "latest"}):
            replies = [each.post("/deltasync/pin", json=body | {"timeout_s": 20}) for each in (one, other)]
            assert len({(reply.status_code, reply.json().get("error")) for reply in replies}) == 1
        boot = other.get("/deltasync/status").json()["boot"]
        weights = engine.worker._deltasync_shard.weights
        first.close()
        version = trainer.publish()
        assert other.post("/deltasync/sync", json={"version": version}).json()["version"] == version
        assert other.get("/deltasync/status").json()["boot"] != boot
        assert other.post("/v1/completions").headers["x-deltasync-versions"] == f"{version}..{version}"
        assert engine.worker._deltasync_shard.weights is weights, "what the first one made is kept"
        shared.deltasync_folder.cleanup()


_ENDING = SimpleNamespace()


def _end_as_an_engine(folder: Connection) -> None:
    folder.send(lead(_ENDING, 0)[0])
    raise SystemExit


def test_an_engines_process_leaves_no_folder() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_end_as_an_engine, args=(there,))
    process.start()
    folder = Path(here.recv())
    process.join(60)
    assert not folder.exists()
