"""Which version made which token: spans of real replies, replayed with the weights that they name."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integration.vllm_server import Server, Weights, save_model, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Span = tuple[int, int]

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Keys and values are computed again after a commit, so that a reply can be replayed."""
    checkpoint = save_model(tmp_path_factory.mktemp("vllm"))
    with serving(checkpoint, "--no-enable-prefix-caching", "--enable-scale-out", DELTASYNC_KV_CACHE="recompute") as server:
        server.assert_serves(server.publish())
        yield server


def ask(server: Server, **fields: Any) -> http.client.HTTPResponse:
    body = {"model": server.json("/v1/models")["data"][0]["id"], "prompt": PROMPT, "temperature": 0}
    return server.open("/v1/completions", {**body, "return_token_ids": True, **fields})


def change_much(server: Server) -> Weights:
    """So much that other tokens follow."""
    for tensor in server.weights.values():
        tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=server.rng)
    return {name: tensor.clone() for name, tensor in server.weights.items()}


def during_commits(server: Server, **fields: Any) -> tuple[dict[str, str], str, dict[int, Weights]]:
    """A reply's headers and body, and the weights of the versions that were published while it was made."""
    replies: list[tuple[dict[str, str], str]] = []

    def run() -> None:
        with ask(server, **fields) as reply:
            replies.append((dict(reply.headers), reply.read().decode()))

    published = {server.publish(): {name: tensor.clone() for name, tensor in server.weights.items()}}
    server.assert_serves(max(published))
    asking = threading.Thread(target=run)
    asking.start()
    while asking.is_alive() and len(published) < 8:
        weights = change_much(server)
        published[server.publish()] = weights
    asking.join()
    return *replies[0], published


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
        headers, body, _ = during_commits(server, max_tokens=700, ignore_eos=True, stream=True)
        assert "x-deltasync-spans" not in headers
        events = [event for event in body.split("\n\n") if event]
        assert events[-1] == "data: [DONE]"
        name, _, text = events[-2].removeprefix(": ").partition(" ")
        assert name == "x-deltasync-spans"
        (spans,) = json.loads(text)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert sum(count for _, count in spans) == sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 700


def test_a_reply_that_no_commit_met_is_one_span_and_beam_search_has_none(server: Server) -> None:
    version = server.publish()
    server.assert_serves(version)
    with ask(server, max_tokens=20, ignore_eos=True) as reply:
        assert json.loads(reply.headers["x-deltasync-spans"]) == [[[version, 20]]]
    wanted = {"max_tokens": 20, "ignore_eos": True}
    model = server.json("/v1/models")["data"][0]["id"]
    for path, body in (
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "1 + 1"}], **wanted}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": wanted}),
    ):
        with server.open(path, body) as reply:
            assert json.loads(reply.headers["x-deltasync-spans"]) == [[[version, 20]]]
    with ask(server, max_tokens=1, use_beam_search=True, n=2) as reply:
        assert "x-deltasync-spans" not in reply.headers
