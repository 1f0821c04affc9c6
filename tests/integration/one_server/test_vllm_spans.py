"""Which version made which token: the spans of replies of each kind. `test_vllm_under_load.py` has the
tokens.
"""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

import pytest

from tests.integration.one_server.test_vllm_prefix_cache import change_much, model
from tests.integration.vllm_server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Span = tuple[int, int]

PROMPT = [5, 6, 7]


def ask(server: Server, **fields: Any) -> http.client.HTTPResponse:
    body = {"model": model(server), "prompt": PROMPT, "temperature": 0}
    return server.open("/v1/completions", {**body, "return_token_ids": True, **fields})


def during_commits(server: Server, **fields: Any) -> tuple[dict[str, str], str]:
    """The headers and the body of a reply that commits meet."""
    replies: list[tuple[dict[str, str], str]] = []

    def run() -> None:
        with ask(server, **fields) as reply:
            replies.append((dict(reply.headers), reply.read().decode()))

    server.assert_serves(server.publish())
    asking = threading.Thread(target=run)
    asking.start()
    for _ in range(7):
        if asking.is_alive():
            change_much(server, waits=False)
    asking.join()
    return replies[0]


def test_each_choice_of_each_prompt_has_its_spans(server: Server) -> None:
    server.assert_serves(server.publish())
    prompts = [[number, 9, 11] for number in range(12, 24)]
    with ask(server, prompt=prompts, n=2, temperature=1.5, max_tokens=200, seed=1) as reply:
        spans: list[list[Span]] = json.loads(reply.headers["x-deltasync-spans"])
        choices = json.load(reply)["choices"]
    lengths = [len(choice["token_ids"]) for choice in choices]
    assert len(set(lengths)) > 5  # they end where they like
    version = server.status()["version"]
    assert spans == [[[version, length]] for length in lengths]


def test_a_streamed_reply_has_its_spans_before_its_end(server: Server) -> None:
    spans: list[Span] = []
    while len(spans) < 2:
        headers, body = during_commits(server, max_tokens=700, ignore_eos=True, stream=True)
        assert "x-deltasync-spans" not in headers
        events = [event for event in body.split("\n\n") if event]
        assert events[-1] == "data: [DONE]"
        name, _, text = events[-2].removeprefix(": ").partition(" ")
        assert name == "x-deltasync-spans"
        (spans,) = json.loads(text)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert (
        sum(count for _, count in spans)
        == sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks)
        == 700
    )


def test_a_reply_that_no_commit_met_is_one_span_and_beam_search_has_none(server: Server) -> None:
    version = server.publish()
    server.assert_serves(version)
    with ask(server, max_tokens=20, ignore_eos=True) as reply:
        assert json.loads(reply.headers["x-deltasync-spans"]) == [[[version, 20]]]
    wanted = {"max_tokens": 20, "ignore_eos": True}
    for path, body in (
        (
            "/v1/chat/completions",
            {"model": model(server), "messages": [{"role": "user", "content": "1 + 1"}], **wanted},
        ),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": wanted}),
    ):
        with server.open(path, body) as reply:
            assert json.loads(reply.headers["x-deltasync-spans"]) == [[[version, 20]]]
    with ask(server, max_tokens=1, use_beam_search=True, n=2) as reply:
        assert "x-deltasync-spans" not in reply.headers
