"""Spans of versions over an output processor like vLLM's; tests/integration/test_vllm_versions.py has a real one."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from vllm_plugin.versions import Spans, VersionsHeader


class Processor:
    """vLLM's output processor as far as spans go."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add_request(self, request: Any, index: int = 0) -> None:
        state = SimpleNamespace(external_req_id=request.external_req_id, request_index=index, tokens=0)
        state.detokenizer = SimpleNamespace(num_output_tokens=lambda: state.tokens)
        self.request_states[request.request_id] = state

    def process_outputs(self, outputs: dict[str, int], made_at: float, stats: None) -> None:
        for request_id, tokens in outputs.items():
            self.request_states[request_id].tokens += tokens

    def begin(self, request_id: str, external_req_id: str, index: int = 0) -> None:
        self.add_request(SimpleNamespace(request_id=request_id, external_req_id=external_req_id), index)

    def make(self, made_at: float | None = None, **outputs: int) -> None:
        self.process_outputs(outputs, time.monotonic() if made_at is None else made_at, None)


def reply(body: Any, live: int = 9) -> dict[str, str]:
    """Headers of a completion that `body` makes in its context."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body()
        await send({"type": "http.response.start", "headers": [(b"content-type", b"application/json")]})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    middleware = VersionsHeader(app, lambda: live)
    asyncio.run(middleware({"type": "http", "path": "/v1/completions"}, receive, send))
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def spans_of(body: Any) -> Any:
    return json.loads(reply(body)["x-deltasync-spans"])


def test_outputs_that_are_processed_after_a_commit_belong_to_the_version_that_made_them() -> None:
    processor = Processor()
    spans = Spans(processor)
    spans.change(1)

    def body() -> None:
        processor.begin("a", "cmpl-0")
        processor.make(a=3)
        before = time.monotonic()
        spans.change(2)
        between = time.monotonic()
        spans.change(3)
        processor.begin("b", "cmpl-1")
        processor.make(before, a=4)
        processor.make(between, a=5)
        processor.make(a=6, b=1)
        processor.begin("c", "cmpl-2")
        processor.make(c=2)

    assert spans_of(body) == [[[1, 7], [2, 5], [3, 6]], [[3, 1]], [[3, 2]]]


def test_choices_are_told_in_their_order() -> None:
    processor = Processor()
    Spans(processor).change(4)

    def body() -> None:
        for number in (10, 2, 0):
            for index in (1, 0):
                processor.begin(f"{number}-{index}", f"cmpl-{number}", index)
                processor.make(**{f"{number}-{index}": 10 * number + index + 1})

    assert [tokens for ((_, tokens),) in spans_of(body)] == [1, 2, 21, 22, 101, 102]


def test_spans_that_are_not_of_one_request_or_too_long_are_not_told() -> None:
    processor = Processor()
    spans = Spans(processor)
    spans.change(1)

    def commits() -> None:
        processor.begin("a", "cmpl-0")
        for version in range(2, 1000):
            processor.make(a=1)
            spans.change(version)

    assert "x-deltasync-spans" not in reply(lambda: processor.begin("b", "cmpl-0-beam-1"))
    assert reply(commits) == {"content-type": "application/json", "x-deltasync-versions": "9..9"}
    assert "x-deltasync-spans" not in reply(lambda: None)
