"""Who may ask a replica: its routes in an application of their own, without vLLM."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from vllm_plugin.endpoints import DeltaSyncEndpoints

TOKEN = "correct-horse-battery"
READY = "/deltasync/ready"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", TOKEN)
    app = FastAPI(openapi_url=None)
    DeltaSyncEndpoints().attach_router(app)
    with TestClient(app) as client:
        yield client


def routes(client: TestClient) -> list[tuple[str, str]]:
    assert isinstance(client.app, FastAPI)
    found = [route for route in client.app.routes if isinstance(route, APIRoute)]
    pairs = [(method, route.path) for route in found for method in route.methods]
    assert ("GET", READY) in pairs
    return [pair for pair in pairs if pair[1] != READY]  # routers and Kubernetes ask it without a token


def test_every_route_wants_the_token_and_none_logs_it(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert len(routes(client)) == 8
    wrong = [
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer",
        f"Digest {TOKEN}",
        TOKEN,
        "Basic !",
        "Bearer \u00e9",
    ]
    for method, path in routes(client):
        for value in wrong:
            reply = client.request(method, path, headers={"authorization": value.encode()})
            assert reply.status_code == 401 and TOKEN not in reply.text, (path, value)
        bare = client.request(method, path)
        assert bare.status_code == (503 if path == "/deltasync/status" else 401)  # nothing is followed here
        assert TOKEN not in bare.text
        password = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
        for value in (f"Bearer {TOKEN}", f"bearer  {TOKEN} ", f"Basic {password}"):
            assert client.request(method, path, headers={"authorization": value}).status_code in (
                200,
                422,
                503,
            )
    assert "DELTASYNC_HTTP_TOKEN" not in caplog.text and TOKEN not in caplog.text


def test_a_body_without_end_is_refused(client: TestClient) -> None:

    for path in ("/deltasync/sync", "/request_weight_update"):
        assert client.post(path, content=b" " * (5 << 20)).status_code == 401
        reply = client.post(path, content=b" " * (5 << 20), headers={"authorization": f"Bearer {TOKEN}"})
        assert reply.status_code == 413 and "4,194,304" in reply.json()["error"]
        assert client.post(path, content=b"", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 503
