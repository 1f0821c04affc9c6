"""Requests that demand a version, of a real vLLM: streamed, several samples and prompts, met by a commit."""

from __future__ import annotations

import json
import threading
import urllib.error
from typing import Any

import pytest

from tests.integration.vllm_server import PATIENCE_S, Server

pytestmark = pytest.mark.vllm


def ask(
    server: Server, version: str, timeout: float = PATIENCE_S, count: int = 8, **fields: Any
) -> tuple[int, Any, str]:
    """The status, the reply or its text, and its versions."""
    body = {
        "model": server.json("/v1/models")["data"][0]["id"],
        "prompt": [5, 6, 7],
        "max_tokens": count,
        "ignore_eos": True,
    }
    headers = {"x-deltasync-version": version, "x-deltasync-timeout": f"{timeout:g}"}
    try:
        with server.open("/v1/completions", body | fields, **headers) as reply:
            text = reply.read().decode()
            return (
                reply.status,
                text if fields.get("stream") else json.loads(text),
                reply.headers["x-deltasync-versions"],
            )
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), ""


def test_a_version_is_waited_for_and_makes_the_whole_reply(server: Server) -> None:
    live = server.status()["version"]
    found: list[tuple[int, Any, str]] = []
    asking = threading.Thread(
        target=lambda: found.append(ask(server, str(live + 1), n=2, prompt=[[5, 6], [7, 8]]))
    )
    asking.start()
    server.step()
    assert server.publish() == live + 1
    asking.join()
    ((status, reply, versions),) = found
    assert (status, versions, len(reply["choices"])) == (200, f"{live + 1}..{live + 1}", 4)
    server.step()
    newest = server.publish()
    assert ask(server, ">=latest")[2] == f"{newest}..{newest}"


def test_what_is_not_served_is_409_also_of_a_stream(server: Server) -> None:
    live = server.status()["version"]
    for version in (str(live - 1), str(live + 5), f">={live + 5}"):
        for stream in (False, True):
            status, reply, _ = ask(server, version, timeout=0.2, stream=stream)
            assert status == 409
            assert f"this server serves version {live}" in reply["error"]["message"]
    assert ask(server, "newest")[0] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_commit_waits_for_a_reply_of_one_version(server: Server, stream: bool) -> None:
    live = server.status()["version"]
    found: list[tuple[int, Any, str]] = []
    asking = threading.Thread(target=lambda: found.append(ask(server, str(live), count=400, stream=stream)))
    asking.start()
    server.wait_for_requests(1)
    server.step()
    assert server.publish() == live + 1
    asking.join()
    ((status, reply, versions),) = found
    assert status == 200
    assert versions == (f"{live}.." if stream else f"{live}..{live}")
    if stream:
        assert f": x-deltasync-spans [[[{live},400]]]" in reply
    server.assert_serves(live + 1)
