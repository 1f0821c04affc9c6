"""The headers about versions over an engine client like vLLM's; tests/integration/test_vllm_versions.py has a real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from vllm_plugin import versions
from vllm_plugin.target import LiveVersions
from vllm_plugin.versions import note_spans, versions_header

Span = tuple[str, int]


class Engine:
    """vLLM's engine client as far as spans go: `generate` tells them with a request's last output."""

    def __init__(self, *, knows: bool = True) -> None:
        self._knows = knows
        self.closed: list[str] = []
        note_spans(self)

    async def generate(self, request_id: str, *choices: Sequence[Span]) -> AsyncGenerator[Any]:
        try:
            for last in (False, True):
                yield SimpleNamespace(
                    request_id=request_id, outputs=[self._output(i, c, last) for i, c in enumerate(choices)]
                )
        finally:
            self.closed.append(request_id)

    def _output(self, index: int, spans: Sequence[Span], last: bool) -> Any:
        output = SimpleNamespace(index=index, finish_reason="stop" if last else None)
        if self._knows:
            starts = [sum(count for _, count in spans[:at]) for at in range(len(spans))]
            told = [SimpleNamespace(version=v, start=s, end=s + n) for s, (v, n) in zip(starts, spans, strict=True)]
            output.weight_versions = told if last else None
        return output


def request(
    body: Callable[[], Any],
    live: Sequence[int | None] = (9,),
    sent: bytes = b"{}",
    path: str = "/v1/completions",
    **headers: str,
) -> tuple[dict[str, str], bytes, dict[str, Any]]:
    """A reply that `body` makes in its context: its headers and body; and the request as vLLM gets it."""
    messages: list[Message] = []
    got: dict[str, Any] = {}
    parts = [sent[:5], sent[5:]]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        data = b""
        while True:
            message = await receive()
            data += message["body"]
            if not message["more_body"]:
                break
        got.update(body=data, length=dict(scope["headers"]).get(b"content-length"), then=(await receive())["type"])
        await body_and_moves()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"reply"})

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    raw = [(b"content-length", str(len(sent)).encode())]
    raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    versions = LiveVersions()
    versions.note(live[0])

    async def body_and_moves() -> None:
        await body()
        for number in live[1:]:
            versions.note(number)

    asyncio.run(versions_header(app, lambda: versions)({"type": "http", "path": path, "headers": raw}, receive, send))
    reply = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return reply | {"status": str(messages[0]["status"])}, messages[1]["body"], got


async def drain(outputs: AsyncGenerator[Any]) -> None:
    async for _ in outputs:
        pass


def spans_of(body: Callable[[], Any]) -> Any:
    return json.loads(request(body)[0]["x-deltasync-spans"])


@pytest.mark.parametrize(
    ("live", "told"), [((5,), "5..5"), ((5, 2, 5), "2..5"), ((2, 5, 3), "2..5"), ((4, None, 7), "4..7"), ((5, None), "5..5")]
)
def test_the_range_is_of_all_versions_that_were_live(live: tuple[int | None, ...], told: str) -> None:
    async def nothing() -> None:
        pass

    assert request(nothing, live=live)[0]["x-deltasync-versions"] == told


def test_the_history_of_live_versions_is_bounded() -> None:
    versions = LiveVersions()
    for number in range(100_000):
        versions.note(number)
        if number == 99_000:
            mark = versions.mark
    assert versions.since(mark) == (99_000, 99_999) and versions.now == 99_999
    assert len(versions._numbers) <= 8192


def test_spans_are_those_that_vllm_tells_in_the_order_of_the_choices() -> None:
    engine = Engine()

    async def body() -> None:
        for number in (10, 2, 0):
            await drain(engine.generate(f"cmpl-{number}", [("1", number + 1), ("2", 3)], [("2", 5)]))

    first = [[[1, 1], [2, 3]], [[2, 5]]]
    assert spans_of(body) == [*first, [[1, 3], [2, 3]], [[2, 5]], [[1, 11], [2, 3]], [[2, 5]]]


def test_spans_that_are_unknown_of_several_requests_or_too_long_are_not_told() -> None:
    async def generate(engine: Engine, request_id: str, *spans: Span) -> None:
        await drain(engine.generate(request_id, spans))

    plain = {"content-type": "application/json", "x-deltasync-versions": "9..9", "status": "200"}
    unknown = Engine(knows=False)
    assert request(lambda: generate(unknown, "cmpl-0"))[0] == plain
    engine = Engine()
    assert request(lambda: generate(engine, "cmpl-0-beam-1", ("1", 2)))[0] == plain
    assert request(lambda: generate(engine, "cmpl-0", ("default", 2), ("1", 2)))[0] == plain
    assert request(lambda: generate(engine, "cmpl-0", *((str(v), 1) for v in range(1000))))[0] == plain
    assert request(lambda: asyncio.sleep(0))[0] == plain


def test_other_weights_of_the_same_number_are_told_by_their_number() -> None:
    engine = Engine()
    spans = [("6", 2), ("7", 1), ("7-0123456789ab", 3)]
    assert spans_of(lambda: drain(engine.generate("cmpl-0", spans))) == [[[6, 2], [7, 1], [7, 3]]]


def test_a_request_that_ends_early_is_ended_in_vllm_too() -> None:
    engine = Engine()

    async def body() -> None:
        outputs = engine.generate("cmpl-0", [("1", 2)])
        await anext(outputs)
        await outputs.aclose()
        assert engine.closed == ["cmpl-0"]

    request(body)
    asyncio.run(drain(engine.generate("outside of a reply")))
    assert engine.closed == ["cmpl-0", "outside of a reply"]


def test_a_fault_in_what_is_noted_reaches_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    engine = Engine()
    monkeypatch.setattr(versions, "_note", fail)
    headers, data, _ = request(lambda: drain(engine.generate("cmpl-0", [("1", 2)])))
    assert (headers["status"], data) == ("200", b"reply")
    monkeypatch.setattr(versions, "_add", fail)
    headers, data, _ = request(lambda: drain(engine.generate("cmpl-0", [("1", 2)])))
    assert (headers["status"], data) == ("200", b"reply")


def nothing() -> Any:
    return asyncio.sleep(0)


@pytest.mark.parametrize(
    ("named", "sent", "salt"),
    [
        ("5", b'{"prompt": "x"}', "deltasync-session:5:"),
        ("5..7", b'{"prompt": "x", "cache_salt": null}', "deltasync-session:5:"),
        ("12..", b'{"prompt": "x", "cache_salt": "tenant"}', "deltasync-session:12:tenant"),
    ],
)
def test_a_session_is_named_in_the_salt_of_the_request(named: str, sent: bytes, salt: str) -> None:
    _, _, got = request(nothing, sent=sent, x_deltasync_session=named)
    assert json.loads(got["body"]) == {"prompt": "x", "cache_salt": salt}
    assert int(got["length"]) == len(got["body"])
    assert got["then"] == "http.disconnect"
    assert request(nothing, live=(None,), sent=sent, x_deltasync_session=named)[2] == got


@pytest.mark.parametrize("sent", [b"{", b"[1, 2]", b"", b'"text"', b"\xff\xfe", b'{"cache_salt": 5}', b"[" * 100_000])
def test_a_body_that_cannot_name_a_session_reaches_vllm_as_it_is(sent: bytes) -> None:
    assert request(nothing, sent=sent, x_deltasync_session="5")[2]["body"] == sent


def test_without_the_header_the_body_is_not_touched() -> None:
    sent = b'{ "prompt":  "x" }'
    assert request(nothing, sent=sent)[2]["body"] == sent
    assert request(nothing, sent=sent, path="/v1/messages", x_deltasync_session="5")[2]["body"] == sent


@pytest.mark.parametrize("named", ["", "0", "-1", "newest", "5.5", "5..x7y", "1" * 30, "\u0665"])
def test_a_session_that_is_no_version_is_refused(named: str) -> None:
    headers, data, got = request(nothing, x_deltasync_session=named)
    if named == "5..x7y":  # what follows the first version does not matter
        assert headers["status"] == "200"
        return
    assert headers["status"] == "400"
    assert "is a version of the channel" in json.loads(data)["error"]
    assert got == {}
