"""The headers about versions over an engine client like vLLM's; one_server/test_vllm_spans.py has a real
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from deltasync.errors import AckTimeoutError, DeltaSyncError
from deltasync.serve.constraint import VersionConstraint, require_version
from tests.unit.test_pauses import Engine as Switch
from tests.unit.test_pauses import pauses_of
from vllm_plugin import versions
from vllm_plugin.pauses import Pauses
from vllm_plugin.versions import LiveVersions, instrument, replies

Span = tuple[str, int]


class Engine:
    """vLLM's engine client as far as spans go: `generate` tells them with a request's last output.

    Attributes:
        live: The versions that were served.
        refusal: Why nothing may be answered.
        pauses: What a commit pauses it with.
        prompts: What it was asked.
    """

    def __init__(self, *, knows: bool = True) -> None:
        self._knows = knows
        self.live = LiveVersions()
        self.live.note(9)
        self.refusal: str | None = None
        self.pauses: Pauses | None = None
        self.closed: list[str] = []
        self.prompts: list[Any] = []
        instrument(self, self.live, lambda: self.refusal, self.single_version)

    def single_version(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self.pauses is None else self.pauses.single_version()

    async def encode(self, prompt: Any) -> AsyncGenerator[Any]:
        self.prompts.append(prompt)
        yield prompt

    async def generate(
        self, prompt: Any, request_id: str = "cmpl-0", *choices: Sequence[Span]
    ) -> AsyncGenerator[Any]:
        self.prompts.append(prompt)
        try:
            for last in (False, True):
                yield SimpleNamespace(
                    request_id=request_id, outputs=[self._output(i, c, last) for i, c in enumerate(choices)]
                )
        finally:
            self.closed.append(request_id)

    def _output(self, index: int, spans: Sequence[Span], last: bool) -> Any:
        output = SimpleNamespace(index=index, finish_reason="stop" if last else None, weight_versions=None)
        if self._knows:
            starts = [sum(count for _, count in spans[:at]) for at in range(len(spans))]
            told = [
                SimpleNamespace(version=v, start=s, end=s + n)
                for s, (v, n) in zip(starts, spans, strict=True)
            ]
            output.weight_versions = told if last else None
        return output


async def reached(wanted: VersionConstraint) -> VersionConstraint:
    return wanted


def request(
    reply: Callable[..., Any],
    live: LiveVersions | None = None,
    kind: bytes = b"application/json",
    engine: Engine | None = None,
    reach: Callable[[VersionConstraint], Any] = reached,
    body: bytes | None = None,
    **headers: str,
) -> tuple[dict[str, str], bytes]:
    """A reply that `reply` makes in its context: its headers and body. By default version 9 is live."""
    if live is None:
        live = LiveVersions()
        live.note(9)
    messages: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status = 200
        try:
            await (reply() if body is None else reply(receive))
        except DeltaSyncError:  # as vLLM's routes reply to what they do not know
            status = 500
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"reply"})

    async def send(message: Message) -> None:
        messages.append(message)

    parts = [] if body is None else [body[:9], body[9:]]

    async def receive() -> Message:
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    if body is not None:
        headers["content_type"] = "application/json"
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: Scope = {"type": "http", "path": "/any", "method": "POST", "headers": raw}
    single_version = contextlib.nullcontext if engine is None else engine.single_version
    asyncio.run(require_version(replies(app, live, single_version), reach)(scope, receive, send))
    told = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    assert len(messages) == 2
    return told | {"status": str(messages[0]["status"])}, messages[1]["body"]


async def drain(outputs: AsyncGenerator[Any]) -> None:
    async for _ in outputs:
        pass


def spans_of(body: Callable[[], Any]) -> Any:
    return json.loads(request(body)[0]["x-deltasync-spans"])


def test_spans_are_those_that_vllm_tells_in_the_order_of_the_choices() -> None:
    engine = Engine()

    async def body() -> None:
        for number in (10, 2, 0):
            await drain(engine.generate("", f"cmpl-{number}", [("1", number + 1), ("2", 3)], [("2", 5)]))

    first = [[[1, 1], [2, 3]], [[2, 5]]]
    assert spans_of(body) == [*first, [[1, 3], [2, 3]], [[2, 5]], [[1, 11], [2, 3]], [[2, 5]]]


def test_spans_that_are_unknown_of_several_requests_or_too_long_are_not_told() -> None:
    async def generate(engine: Engine, request_id: str, *spans: Span) -> None:
        await drain(engine.generate("", request_id, spans))

    plain = {"content-type": "application/json", "x-deltasync-versions": "9..9", "status": "200"}
    unknown = Engine(knows=False)
    assert request(lambda: generate(unknown, "cmpl-0"))[0] == plain
    engine = Engine()
    assert request(lambda: generate(engine, "cmpl-0-beam-1", ("1", 2)))[0] == plain
    assert request(lambda: generate(engine, "cmpl-0", ("default", 2), ("1", 2)))[0] == plain
    assert request(lambda: generate(engine, "cmpl-0", *((str(v), 1) for v in range(1000))))[0] == plain
    assert request(nothing)[0] == {"content-type": "application/json", "status": "200"}
    assert request(lambda: drain(engine.encode("text")))[0] == plain


def test_other_weights_of_the_same_number_are_told_by_their_number() -> None:
    engine = Engine()
    spans = [("6", 2), ("7", 1), ("7-0123456789ab", 3)]
    assert spans_of(lambda: drain(engine.generate("", "cmpl-0", spans))) == [[[6, 2], [7, 1], [7, 3]]]


def test_a_request_that_ends_early_is_ended_in_vllm_too() -> None:
    engine = Engine()

    async def body() -> None:
        outputs = engine.generate("", "cmpl-0", [("1", 2)])
        await anext(outputs)
        await outputs.aclose()
        assert engine.closed == ["cmpl-0"]

    request(body)
    asyncio.run(drain(engine.generate("", "outside of a reply")))
    assert engine.closed == ["cmpl-0", "outside of a reply"]


def test_a_fault_in_what_is_noted_reaches_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    engine = Engine()
    monkeypatch.setattr(versions, "_note", fail)
    headers, data = request(lambda: drain(engine.generate("", "cmpl-0", [("1", 2)])))
    assert (headers["status"], data) == ("200", b"reply")
    monkeypatch.setattr(versions, "_add", fail)
    headers, data = request(lambda: drain(engine.generate("", "cmpl-0", [("1", 2)])))
    assert (headers["status"], data) == ("200", b"reply")


def nothing() -> Any:
    return asyncio.sleep(0)


def test_a_stream_may_call_the_engine_after_its_headers() -> None:
    headers, _ = request(nothing, kind=b"text/event-stream")
    assert headers["x-deltasync-versions"] == "9.."
    assert "x-deltasync-versions" not in request(nothing, live=LiveVersions(), kind=b"text/event-stream")[0]


@pytest.mark.parametrize("method", ["generate", "encode"])
def test_what_may_not_call_the_engine_is_answered_with_503(method: str) -> None:
    engine = Engine()
    engine.refusal = "No version yet."
    headers, data = request(lambda: drain(getattr(engine, method)({})))
    assert (headers["status"], headers["retry-after"]) == ("503", "1")
    assert json.loads(data)["error"]["message"] == "No version yet."
    assert not engine.prompts
    with pytest.raises(DeltaSyncError, match="No version yet"):  # a websocket
        asyncio.run(drain(getattr(engine, method)({})))
    assert request(nothing)[0]["status"] == "200", "what needs no engine is answered"


def test_one_version_makes_a_reply_of_several_pooled_requests() -> None:
    engine = Engine()
    commits: list[asyncio.Task[None]] = []

    async def body() -> None:
        engine.pauses = pauses = pauses_of(Switch())

        async def commit() -> None:
            async with pauses.exclusive():
                engine.live.note(10)

        for _ in range(2):  # a score is one of a question, and then of documents
            await asyncio.gather(*(drain(engine.encode(text)) for text in ("a", "b")))
            commits.append(asyncio.create_task(commit()))
            await asyncio.sleep(0.01)
            assert engine.live.now == 9

    async def outside() -> None:  # of a reply, so each is one of its own
        engine.pauses = pauses = pauses_of(Switch())
        await drain(engine.encode("a"))
        async with pauses.exclusive():
            pass

    assert request(body, live=engine.live)[0]["x-deltasync-versions"] == "9..9"
    asyncio.run(outside())


@pytest.mark.parametrize(
    ("named", "prompt", "salt"),
    [
        ("5", {"prompt_token_ids": [1]}, "deltasync-session:5:"),
        ("5..7", {"prompt_token_ids": [1], "cache_salt": None}, "deltasync-session:5:"),
        ("12..", {"prompt_token_ids": [1], "cache_salt": "tenant"}, "deltasync-session:12:tenant"),
    ],
)
def test_a_session_is_named_in_the_salt_of_the_prompt(named: str, prompt: dict[str, Any], salt: str) -> None:
    engine = Engine()
    before = dict(prompt)
    request(lambda: drain(engine.generate(prompt)), x_deltasync_session=named)
    request(lambda: drain(engine.generate(prompt=prompt)), live=LiveVersions(), x_deltasync_session=named)
    assert engine.prompts == [{"prompt_token_ids": [1], "cache_salt": salt}] * 2
    assert prompt == before
    request(lambda: drain(engine.generate(prompt)))
    request(lambda: drain(engine.generate("text")), x_deltasync_session=named)
    assert engine.prompts[2:] == [before, "text"]


@pytest.mark.parametrize("named", ["", "0", "-1", "newest", "5.5", "5..x7y", "1" * 30, "\u0665"])
def test_a_session_that_is_no_version_is_refused(named: str) -> None:
    engine = Engine()
    headers, data = request(lambda: drain(engine.generate({})), x_deltasync_session=named)
    if named == "5..x7y":  # what follows the first version does not matter
        assert headers["status"] == "200"
        return
    assert headers["status"] == "400"
    assert "is a version of the channel" in json.loads(data)["error"]
    assert not engine.prompts


def test_versions_are_the_range_of_all_that_were_live_meanwhile() -> None:
    engine = Engine()

    async def body() -> None:
        engine.live.note(12)
        await drain(engine.generate(""))
        for number in (4, None, 7):
            engine.live.note(number)

    assert request(body, live=engine.live)[0]["x-deltasync-versions"] == "4..12"


# --- demanded versions
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "0", "latest", "7..", ">7", "<=7", ">= ", "-1", "1e3"])
def test_what_names_no_version_is_refused(text: str) -> None:
    headers, data = request(nothing, x_deltasync_version=text)
    assert headers["status"] == "400"
    assert "such as 7, >=7 or >=latest" in json.loads(data)["error"]["message"]


def test_a_version_that_is_not_served_in_time_is_answered_with_409() -> None:
    async def refuse(wanted: VersionConstraint) -> VersionConstraint:
        raise AckTimeoutError(wanted.refusal(9))

    engine = Engine()
    headers, data = request(lambda: drain(engine.generate("")), reach=refuse, x_deltasync_version="12")
    assert headers["status"] == "409" and not engine.prompts
    assert (
        json.loads(data)["error"]["message"] == "Version 12 was asked for, and this server serves version 9."
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"x-deltasync-version": "9"}, "200"),
        ({"x-deltasync-version": 9}, "200"),
        ({"x-deltasync-version": 8, "prompt": "a"}, "409"),
        ({"x-deltasync-version": None}, "200"),
        ({"prompt": "x-deltasync-version"}, "200"),
        ({"x-deltasync-version": 9, "x-deltasync-timeout": "soon"}, "400"),
        (["x-deltasync-version"], "200"),
    ],
    ids=str,
)
def test_a_field_of_the_body_demands_a_version_too(body: Any, code: str) -> None:
    engine, data = Engine(), json.dumps(body).encode()

    async def ask(receive: Receive) -> None:
        await drain(engine.generate(""))
        parts = [await receive() for _ in range(2)]
        assert b"".join(part["body"] for part in parts) == data, "the application reads it as it came"

    assert request(ask, live=engine.live, body=data)[0]["status"] == code


@pytest.mark.parametrize("method", ["generate", "encode"])
@pytest.mark.parametrize(
    ("text", "status"), [("9", "200"), (">=9", "200"), (">=8", "200"), ("8", "409"), (">=10", "409")]
)
def test_a_reply_is_made_by_the_version_that_is_demanded(method: str, text: str, status: str) -> None:
    """Also where another one came after the wait."""
    engine = Engine()
    headers, _ = request(
        lambda: drain(getattr(engine, method)("")), live=engine.live, x_deltasync_version=text
    )
    assert headers["status"] == status


@pytest.mark.parametrize(("text", "seen"), [("9", 9), (">=9", 10)])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_a_commit_waits_for_a_reply_of_one_version(text: str, seen: int, kind: bytes) -> None:
    engine = Engine()
    commits: list[asyncio.Task[None]] = []

    async def body() -> None:
        engine.pauses = pauses = pauses_of(Switch())

        async def commit() -> None:
            async with pauses.exclusive():
                engine.live.note(10)

        outputs = engine.generate("", "cmpl-0", [("9", 2)])
        await anext(outputs)
        commits.append(asyncio.create_task(commit()))
        await asyncio.sleep(0.01)
        assert engine.live.now == seen
        await drain(outputs)

    headers, _ = request(body, live=engine.live, kind=kind, engine=engine, x_deltasync_version=text)
    assert headers["status"] == "200"


def test_a_reply_that_a_commit_met_all_the_same_is_refused() -> None:
    """Another client has paused generation, and commits then wait for no reply."""
    engine = Engine()

    async def body() -> None:
        outputs = engine.generate("", "cmpl-0", [("9", 2)])
        await anext(outputs)
        engine.live.note(10)
        await drain(outputs)

    headers, data = request(body, live=engine.live, x_deltasync_version="9")
    assert headers["status"] == "409"
    assert (
        "this server serves version 10. The version changed meanwhile."
        in json.loads(data)["error"]["message"]
    )
