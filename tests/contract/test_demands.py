"""Every server treats the version that a request demands alike: here vLLM's, SGLang's and transformers'
applications.

MLX's server runs the same table in tests/integration/test_mlx.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import deltasync
from deltasync import Publisher, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.following import Follow, MemoryTarget
from deltasync.serve.routes import Routes
from tests.demands import HEADER, MAX_LAG, READ, SERVED, Demand, field, header
from tests.waiting import wait_until


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)

    def forward(self) -> float:
        return float(self.w[0])


def publish(publisher: Publisher, number: int) -> None:
    assert publisher.publish([("w", torch.full((8,), float(number)))]).wait(60).version == number


Asked = Callable[[], None]
"""Called while a reply is made."""


async def reply(body: dict[str, Any], computed: Callable[[], float], asked: Asked) -> Response:
    """As an engine replies: it computes, somebody does something, and it goes on."""
    if not body.get("stream"):
        values = [computed(), asked(), computed()]
        return JSONResponse({"values": [values[0], values[2]]})

    async def parts() -> Any:
        yield f"data: {computed()}\n\n"
        asked()
        yield f"data: {computed()}\n\n"

    return StreamingResponse(parts(), media_type="text/event-stream")


@contextlib.contextmanager
def following_routes(url: str, attach: Callable[[FastAPI, Follow], None]) -> Iterator[FastAPI]:
    """The application of an engine, with a loop in this process."""
    reader = ChannelReader(open_store(url))
    follow = Follow(reader, MemoryTarget(reader), ReplicaSettings(poll_interval_s=0.02))
    app = FastAPI()
    attach(app, follow)
    app.post("/v1/completions")(lambda: {})
    follow.start()
    try:
        wait_until(lambda: follow.version == SERVED)
        yield app
    finally:
        follow.stop()


@contextlib.contextmanager
def sglang(url: str, _: Asked) -> Iterator[FastAPI]:
    with following_routes(url, lambda app, follow: Routes(follow).attach(app)) as app:
        yield app


@contextlib.contextmanager
def vllm(url: str, _: Asked) -> Iterator[FastAPI]:
    plugin = pytest.importorskip("vllm_plugin.endpoints")

    def attach(app: FastAPI, follow: Follow) -> None:
        endpoints = plugin.DeltaSyncEndpoints()
        endpoints._follow = endpoints._pauses = follow
        endpoints.attach_router(app)

    with following_routes(url, attach) as app:
        yield app


@contextlib.contextmanager
def transformers(url: str, asked: Asked) -> Iterator[FastAPI]:
    pytest.importorskip("transformers.cli.serving.server")
    from examples import serve_transformers

    module = Module()

    async def handle(body: dict[str, Any], _: str) -> Response:
        return await reply(body, module, asked)

    with deltasync.follow(module, url, poll_interval_s=0.02) as following:
        following.wait(SERVED, 60)
        manager: Any = SimpleNamespace(
            following=following, settings=ReplicaSettings(), model=module, shutdown=lambda: None
        )
        # each release of transformers has more of them
        names = inspect.signature(serve_transformers._build_server).parameters
        others = {name: SimpleNamespace(handle_request=None) for name in names if name.endswith("_handler")}
        handlers = others | {"completion_handler": SimpleNamespace(handle_request=handle)}
        app = serve_transformers.build_server(
            manager,
            **handlers,
            generation_state=SimpleNamespace(is_cb_alive=lambda: True),
        )
        app.state.following = following
        yield app


SERVERS = {"sglang": sglang, "vllm": vllm, "transformers": transformers}


@pytest.fixture
def publisher(memory_url: str) -> Iterator[Publisher]:
    with Publisher(memory_url) as publisher:
        for number in range(1, SERVED + 1):
            publish(publisher, number)
        yield publisher


@pytest.mark.parametrize("server", SERVERS)
def test_a_demand_is_read_or_refused(server: str, memory_url: str, publisher: Publisher) -> None:
    found, expected = {}, {}
    with SERVERS[server](memory_url, lambda: None) as app, TestClient(app) as client:
        for name, demand in READ.items():
            headers = [(key.encode(), value.encode("latin-1")) for key, value in demand.all_headers()]
            url = f"/v1/completions?{demand.query}"
            got = client.post(url, content=demand.data({"prompt": "a"}), headers=headers)  # type: ignore[arg-type]
            found[name], expected[name] = got.status_code, demand.code
            if got.status_code in (400, 409):
                sentence = got.json()["error"]["message"]
                assert "deltasync-" in sentence or f"serves version {SERVED}" in sentence
    assert found == expected


LAGS = {
    "a header": header(200, "1", name=MAX_LAG),
    "none at all": header(200, "0", name=MAX_LAG),
    "twice the same": header(200, "1", " 1 ", name=MAX_LAG),
    "a field": field(200, "1", f'"{MAX_LAG}"'),
    "a field of text": field(200, '"1"', f'"{MAX_LAG}"'),
    "header and field agree": Demand(200, ((MAX_LAG, "1"),), f'"{MAX_LAG}": 1'),
    "beside a version": Demand(200, ((MAX_LAG, "1"), (HEADER, "2"))),
}


@pytest.mark.parametrize("server", SERVERS)
def test_a_maximum_lag_is_honoured_or_refused(server: str, memory_url: str, publisher: Publisher) -> None:
    with SERVERS[server](memory_url, lambda: None) as app, TestClient(app) as client:
        for name, demand in LAGS.items():
            headers = [(key.encode(), value.encode("latin-1")) for key, value in demand.all_headers()]
            got = client.post("/v1/completions", content=demand.data({"prompt": "a"}), headers=headers)  # type: ignore[arg-type]
            assert got.status_code == (200 if server == "vllm" else 400), name
            if server != "vllm":
                assert got.json()["error"]["message"].startswith("This server ends no request at a commit")


def test_vllm_refuses_a_maximum_lag_unless_it_follows(memory_url: str, publisher: Publisher) -> None:
    with vllm(memory_url, lambda: None) as app, TestClient(app) as client:
        (middleware,) = (each for each in app.user_middleware if "ends_requests" in each.kwargs)
        endpoints = middleware.kwargs["wait_until_met"].__self__
        endpoints._follow = None
        got = client.post("/v1/completions", json={"prompt": "a"}, headers={MAX_LAG: "1"})
    assert got.status_code == 400


@pytest.mark.parametrize("server", SERVERS)
def test_a_web_socket_that_demands_a_version_is_refused(
    server: str, memory_url: str, publisher: Publisher
) -> None:
    with SERVERS[server](memory_url, lambda: None) as app:

        @app.websocket("/v1/realtime")
        async def accept(socket: WebSocket) -> None:
            await socket.accept()
            await socket.close()

        with TestClient(app) as client:
            with client.websocket_connect("/v1/realtime"):
                pass
            for headers, query in (({HEADER: "2"}, ""), ({}, f"?{HEADER}=2"), ({MAX_LAG: "1"}, "")):
                with pytest.raises(WebSocketDisconnect) as refused:
                    client.websocket_connect(f"/v1/realtime{query}", headers=headers).__enter__()
                assert refused.value.reason == f"{HEADER} and {MAX_LAG} are not read of a WebSocket."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wanted", "is_refused"), [("2", True), (">=2", False), (">=latest", False), (None, False)]
)
def test_a_reply_of_transformers_is_held_to_its_demand(
    wanted: str | None, is_refused: bool, stream: bool, memory_url: str, publisher: Publisher
) -> None:
    def asked() -> None:
        publish(publisher, SERVED + 1)
        following.wait(SERVED + 1, 60)

    with transformers(memory_url, asked) as app, TestClient(app) as client:
        following = app.state.following
        headers = {} if wanted is None else {HEADER: wanted}
        reply = client.post("/v1/completions", json={"stream": stream}, headers=headers)
    why = "Version 2 was asked for, and this server serves version 3. The version changed meanwhile."
    if stream:
        assert reply.status_code == 200 and reply.text.startswith("data: 2.0\n\n")
        assert (why in reply.text, "data: 3.0" in reply.text) == (is_refused, not is_refused)
    elif is_refused:
        assert (reply.status_code, reply.json()["error"]["message"]) == (409, why)
    else:
        assert reply.json() == {"values": [2.0, 3.0]} and reply.headers["x-deltasync-versions"] == "2..3"
