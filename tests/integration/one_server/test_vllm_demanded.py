"""Requests that demand a version, of a real vLLM: streamed, several samples and prompts, met by a commit."""

from __future__ import annotations

import json
import re
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


def ended_choices(server: Server) -> int:
    with server.open("/metrics") as reply:
        found = re.search(r"^deltasync_ended_choices_total (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def test_requests_end_at_the_commit_that_makes_their_oldest_token_too_old(server: Server) -> None:
    before, done = ended_choices(server), threading.Event()
    found: list[tuple[int | None, str, list[tuple[int, int]]]] = []

    def keep_asking(lag: int | None) -> None:
        headers = {} if lag is None else {"x-deltasync-max-lag": str(lag)}
        body = {
            "model": server.json("/v1/models")["data"][0]["id"],
            "prompt": [[5, 6, 7], [8, 9]],
            "max_tokens": 800,
            "ignore_eos": True,
        }
        while not done.is_set():
            with server.open("/v1/completions", body, **headers) as reply:
                reasons = [each["finish_reason"] for each in json.load(reply)["choices"]]
                spans = json.loads(reply.headers["x-deltasync-spans"])
            found.extend((lag, *choice) for choice in zip(reasons, spans, strict=True))

    clients = [threading.Thread(target=keep_asking, args=(lag,)) for lag in (None, 0, 1)]
    for client in clients:
        client.start()
    commits = 0
    while commits < 20 or not any(lag is None and spans[-1][0] - spans[0][0] > 1 for lag, _, spans in found):
        server.wait_for_requests(1)
        server.step()
        server.assert_serves(server.publish())
        commits += 1
    done.set()
    for client in clients:
        client.join()
    ages = {
        lag: [spans[-1][0] - spans[0][0] for each, _, spans in found if each == lag] for lag in (0, 1, None)
    }
    assert max(ages[0]) == 0 and max(ages[1]) <= 1
    assert {reason for lag, reason, _ in found if lag is None} == {"length"}
    aborted = [spans for _, reason, spans in found if reason == "abort"]
    assert aborted and ended_choices(server) - before == len(aborted)
    assert all(sum(count for _, count in spans) < 800 for spans in aborted)


def test_a_beam_search_takes_no_maximum_lag(server: Server) -> None:
    body = {
        "model": server.json("/v1/models")["data"][0]["id"],
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "n": 2,
        "use_beam_search": True,
    }
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.open("/v1/completions", body, **{"x-deltasync-max-lag": "1"})
    assert refused.value.code == 400
    assert "beam search" in json.load(refused.value)["error"]["message"]
    refused.value.close()
