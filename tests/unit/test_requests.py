"""Routes of a replica whose loop is in their process or in another one, over a loop of host memory."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from deltasync import Publisher, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import AckTimeoutError
from deltasync.following import Follow, MemoryTarget
from deltasync.serve import calls, heartbeat
from deltasync.serve.constraint import MAX_LAG_HEADER, VersionConstraint, constraint, max_lag
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.routes import Routes
from tests.faults import FaultyStore
from tests.waiting import wait_until

TOKEN = "secret"


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


@pytest.fixture
def loop(store: FaultyStore, memory_url: str) -> Iterator[tuple[Publisher, Follow]]:
    reader = ChannelReader(store)
    follow = Follow(reader, Target(reader), ReplicaSettings(poll_interval_s=0.02))
    with Publisher(memory_url) as publisher:
        follow.start()
        yield publisher, follow
        store.heal()
        follow.stop()


class Target(MemoryTarget):
    def digest(self) -> dict[str, str]:
        return {"w": "digest"}


@pytest.fixture(params=["local", "remote"])
def client(
    loop: tuple[Publisher, Follow], monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[TestClient]:
    """Routes in the loop's own process, or as in another one."""
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", TOKEN)
    app, routes = FastAPI(), Routes(loop[1])
    with tempfile.TemporaryDirectory() as folder:
        if request.param == "remote":
            path = Path(folder, "follow")
            calls.listen_in_thread(str(path), routes.answer)
            while not path.exists():
                time.sleep(0.01)
            routes = Routes(ask=partial(calls.call, str(path)))
        routes.attach(app)
        app.post("/generate")(lambda: {"wanted": str(constraint.get())})
        with TestClient(app, headers={"authorization": f"Bearer {TOKEN}"}) as client:
            yield client


def served(client: Any, path: str, body: object = None) -> int:
    """The version with which a route replies once it is served."""
    reply = client.post(path, json={} if body is None else body).json()
    assert reply.pop("waited_s") >= 0 and [*reply] == ["version"]
    return int(reply["version"])


def publish(publisher: Publisher, value: float, step: int) -> int:
    return publisher.publish([("w", torch.full((8,), value))], step=step).wait(60).version


def test_what_routes_ask_of_a_loop_in_another_process(loop: tuple[Publisher, Follow], client: Any) -> None:
    assert client.get("/deltasync/ready").status_code == 503
    assert client.post("/deltasync/sync", json={"timeout_s": 0.1}).status_code == 504
    for step in (10, 20):
        publish(loop[0], step, step)
    assert served(client, "/deltasync/sync", {"version": 2}) == 2
    assert served(client, "/receive_weight_update", {"version": 20, "other": 1}) == 2
    late = client.post("/receive_weight_update", json={"version": 30, "timeout_s": 0.1})
    assert late.status_code == 504 and late.json()["error"].startswith(
        "Step 30 is not served after 0.1 s: this "
    )
    late = client.post("/deltasync/sync", json={"version": 9, "timeout_s": 0.1})
    assert late.status_code == 504
    told = {
        "error": "Version 9 is not served after 0.1 s: this replica serves version 2, the newest is version 2, and it is "
        "serving.",
        "cause": None,
        **{"state": "serving", "version": 2, "newest_version": 2, "run_id": loop[0].run_id},
    }
    now = client.get("/deltasync/status").json()
    assert late.json() == told | {"epoch": now["epoch"], "sha256": loop[0].published[2]}
    asked = client.post("/deltasync/sync?version=9")
    assert asked.status_code == 422 and "not in the address: 'version=9'." in asked.json()["error"]
    assert client.get("/deltasync/ready").json() == {"ready": True, "reason": None}
    assert client.get("/deltasync/status").json()["version"] == 2
    assert client.get("/deltasync/digest").json() == {"version": 2, "sha256": {"w": "digest"}}


def test_pins(loop: tuple[Publisher, Follow], client: Any) -> None:
    for step in (1, 2):
        publish(loop[0], step, step)
    assert served(client, "/deltasync/pin", {"pin": "1"}) == 1
    for body, code in (({"pin": "9"}, 409), ({"pin": "some"}, 422), ({"nip": "1"}, 422), ({}, 422)):
        assert client.post("/deltasync/pin", json=body).status_code == code, body
    assert client.post("/deltasync/sync", json={"version": 2}).status_code == 409
    assert client.get("/deltasync/status").json()["pin"] == "1"
    absent = client.post("/deltasync/pin", json={"pin": "99", "timeout_s": 60}).json()["error"]
    assert "Version 99 is not in" in absent and "The pin stays: 1." in absent
    assert served(client, "/deltasync/pin", {"pin": "newest"}) == 2
    assert client.get("/deltasync/status").json()["pin"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"\xff"',
        *(b'{"version": %s}' % value for value in (b"0", b'"7"', b"1.5", b"true")),
        *(b'{"timeout_s": %s}' % value for value in (b"0", b"1e9", b"NaN")),
        b'{"timeout": 5}',
    ],
)
def test_a_bad_body_is_refused(client: Any, body: bytes) -> None:
    reply = client.post("/deltasync/sync", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 422 and "The body is not valid for this route" in reply.json()["error"]


def test_only_so_many_requests_wait_at_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.post("/deltasync/sync", json={"timeout_s": 0.05}).status_code == 504
    monkeypatch.setattr(asyncio.Semaphore, "locked", lambda _: True)
    for path, body in (("sync", {}), ("pin", {"pin": "1"})):
        reply = client.post(f"/deltasync/{path}", json=body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert client.get("/deltasync/status").json()["pin"] is None, "nothing was changed"


def test_a_pin_that_was_refused_because_the_store_hangs_is_not_set_later(
    loop: tuple[Publisher, Follow], client: Any, store: FaultyStore
) -> None:
    for step in (1, 2):
        publish(loop[0], step, step)
    assert served(client, "/deltasync/sync") == 2
    store.hold_at("read")
    store.hold_at("list")
    late = client.post("/deltasync/pin", json={"pin": "1", "timeout_s": 0.3})
    assert late.status_code == 504 and "The pin stays: newest." in late.json()["error"]
    store.heal()
    publish(loop[0], 3, 3)
    assert served(client, "/deltasync/sync", {"version": 3}) == 3
    assert client.get("/deltasync/status").json()["pin"] is None


def test_a_wait_that_a_pin_makes_vain_names_the_pin(loop: tuple[Publisher, Follow], client: Any) -> None:
    for step in (1, 2, 3):
        publish(loop[0], step, step)
    assert served(client, "/deltasync/pin", {"pin": "2"}) == 2
    late = client.post("/receive_weight_update", json={"version": 3, "timeout_s": 0.1})
    assert late.status_code == 504 and late.json()["error"].endswith("and it is serving, pinned: 2.")


def test_a_long_wait_is_answered_though_many_others_ask_meanwhile(
    loop: tuple[Publisher, Follow], client: Any
) -> None:
    publish(loop[0], 1, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/deltasync/sync", json={"version": 2, "timeout_s": 30})
        for _ in range(70):
            assert client.get("/deltasync/status?commits=0").status_code == 200
        publish(loop[0], 2, 2)
        assert waiting.result(30).json()["version"] == 2


def test_clients_that_left_free_their_slots_and_their_requests(
    loop: tuple[Publisher, Follow], client: Any
) -> None:
    publish(loop[0], 1, 1)
    assert served(client, "/deltasync/sync") == 1
    body = b'{"version": 999, "timeout_s": 90}'
    codes: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            codes.append(message["status"])

    for _ in range(70):  # more than may wait
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})  # noqa: B023

        headers = {
            "authorization": f"Bearer {TOKEN}",
            "content-type": "application/json",
            "host": "testserver",
        }
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/deltasync/sync",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        client.portal.call(client.app, scope, receive, send)
    assert codes == [499] * 70
    wait_until(lambda: not loop[1].waits.on_step)  # nobody waits for a step any more
    assert served(client, "/deltasync/sync") == 1


def test_a_request_that_demands_a_version_waits_for_it_or_gets_409(
    loop: tuple[Publisher, Follow], client: Any
) -> None:
    def ask(version: str, timeout: str = "20") -> tuple[int, str]:
        headers = {"x-deltasync-version": version, "x-deltasync-timeout": timeout}
        reply = client.post("/generate", headers=headers)
        return reply.status_code, reply.text

    assert ask(">=1", timeout="0.1")[0] == 409
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, "1")
        publish(loop[0], 1.0, step=1)
        assert waiting.result() == (200, '{"wanted":"1"}')
    publish(loop[0], 2.0, step=2)
    assert ask(">=latest") == (200, '{"wanted":">=2"}')
    code, text = ask("1")
    assert code == 409 and "Version 1 was asked for, and this server serves version 2." in text
    code, text = ask("5", timeout="0.1")
    assert (code == 409 and "serves version 2. It waited" in text) or "is not served after 0.1 s" in text
    assert client.post("/generate", json={"x-deltasync-version": 2}).json() == {"wanted": "2"}
    assert client.post("/generate").json() == {"wanted": "None"}


def test_a_reply_of_sglang_is_held_to_the_version_that_is_demanded() -> None:
    from sglang_plugin.routes import _check

    def output(*names: str) -> dict[str, Any]:
        return {"meta_info": {"weight_versions": [{"version": name} for name in names]}}

    exact, later = VersionConstraint(7, exact=True), VersionConstraint(7, exact=False)
    for fitting in ({"text": ""}, {"meta_info": {}}, output("7"), [output("7"), output("7-0123")]):
        _check(exact, fitting, streams=False)
    _check(later, output("7", "8"), streams=True)
    for wanted, wrong in (
        (exact, output("7", "8")),
        (later, output("6", "7")),
        (exact, [output("7"), output("unknown")]),
    ):
        with pytest.raises(HTTPException) as refused:
            _check(wanted, wrong, streams=False)
        assert refused.value.status_code == 409
        with pytest.raises(ValueError, match="The version changed meanwhile") as error:
            _check(wanted, wrong, streams=True)
        assert error.value.status_code == 409  # type: ignore[attr-defined]


def test_without_the_token_only_readiness_is_told(loop: tuple[Publisher, Follow], client: Any) -> None:
    del client.headers["authorization"]
    assert [client.get(f"/deltasync/{route}").status_code for route in ("status", "digest", "ready")] == [
        200,
        401,
        503,
    ]
    client.headers["origin"] = "http://other.site"
    assert client.post("/deltasync/sync", json={}).status_code == 403


def test_a_process_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    app = FastAPI()
    Routes(ask=partial(calls.call, str(tmp_path / "nobody"))).attach(app)
    with TestClient(app) as client:
        reply = client.get("/deltasync/ready")
    assert (reply.status_code, reply.json()["error"]) == (
        503,
        "The process that follows the channel does not answer.",
    )


class Ending(Routes):
    ends_requests = True


def test_a_request_that_names_no_maximum_lag_has_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for default in (None, "2"):
        if default is not None:
            monkeypatch.setenv("DELTASYNC_MAX_LAG", default)
        app = FastAPI()
        Ending().attach(app)
        app.post("/generate")(lambda: max_lag.get())
        with TestClient(app) as client:
            for own in ({}, {MAX_LAG_HEADER: "0"}):
                found[default, *own.values()] = client.post("/generate", headers=own).json()
    assert found == {(None,): None, (None, "0"): 0, ("2",): 2, ("2", "0"): 0}


def test_weights_that_are_held_are_not_ready(
    loop: tuple[Publisher, Follow], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(loop[0], 1, 1)
    assert loop[1].wait(1) == 1 and loop[1].not_ready is None
    monkeypatch.setattr(Target, "held", True)
    assert loop[1].not_ready == "This server does not generate now."


class Slow(Target):
    """Stages until it is let go."""

    def __init__(self, reader: ChannelReader) -> None:
        super().__init__(reader)
        self.goes_on = threading.Event()

    def stage(self, chain: Any) -> Any:
        if self.version is not None:
            self.goes_on.wait(60)
        return super().stage(chain)


def test_heartbeats_go_on_while_a_version_is_staged(
    store: FaultyStore, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.serve.heartbeats._TICK_S", 0.01)
    reader = ChannelReader(store)
    target = Slow(reader)
    beats = HeartbeatWriter(store, 0.02)
    settings = ReplicaSettings(poll_interval_s=0.02, replica_id="slow")
    follow = Follow(reader, target, settings, heartbeats=beats)
    with Publisher(memory_url) as publisher:
        publisher.publish({"w": torch.zeros(9)}.items()).wait(60)
        follow.start()
        follow.wait(1)
        receipt = publisher.publish({"w": torch.ones(9)}.items())
        receipt.wait(60)

        def beats() -> list[heartbeat.Heartbeat]:
            return heartbeat.read_all(store.inner, str(publisher.run_id))

        wait_until(lambda: [(beat.state, beat.version) for beat in beats()] == [("staging", 1)])
        first = beats()[0]
        assert first.state_s is not None
        # another one, of the same step
        wait_until(lambda: (beats()[0].state_s or 0.0) > first.state_s + 0.05)
        with pytest.raises(AckTimeoutError, match=r"lag: slow \(serves version 1 [^;]*staging for [0-9]+ s,"):
            heartbeat.wait_for(store.inner, str(publisher.run_id), 2, publisher.published, 0.0)
        target.goes_on.set()
        assert follow.wait(2) == 2
        wait_until(lambda: [(beat.state, beat.version) for beat in beats()] == [("serving", 2)])
        follow.stop()
        assert [beat.state for beat in beats()] == [heartbeat.STOPPED]
