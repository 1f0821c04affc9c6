"""Which weights made a reply: the headers `x-deltasync-versions` and `x-deltasync-spans` on completions.

And the header `x-deltasync-session` of requests, which keeps a conversation on the cached prefixes of the version that it
began with (`vllm_plugin.salt`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_plugin import logger
from vllm_plugin.salt import SESSION, number_of

HEADER = "x-deltasync-versions"
SPANS_HEADER = "x-deltasync-spans"
SESSION_HEADER = "x-deltasync-session"

_SALTED_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/inference/v1/generate",
)
PATHS = (*_SALTED_PATHS, "/v1/messages")
"""Routes whose replies are generated."""
_LONGEST = 4000  # characters of spans: clients refuse long headers

Choices = dict[tuple[int, str, int], list[tuple[int, int]] | None]
"""The finished choices of a reply, by what sorts them: the length of the request's id, the id, and the choice's index.

Of each: the versions, in the order in which they made tokens, and how many each made; None if vLLM does not know."""

_choices: ContextVar[Choices | None] = ContextVar("deltasync_choices", default=None)  # of the reply made in this context


def note_spans(engine: Any) -> None:
    """Have an engine client note, for the replies of `versions_header`, which version made which token.

    Wraps its `generate`, which every route goes through. vLLM knows from 0.32 on; before that nothing is noted.
    """
    generate = engine.generate

    def noting_generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        outputs: AsyncGenerator[Any] = generate(*args, **kwargs)
        choices = _choices.get()
        return outputs if choices is None else _noting(outputs, choices)

    engine.generate = noting_generate


async def _noting(outputs: AsyncGenerator[Any], choices: Choices) -> AsyncGenerator[Any]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            try:
                _note(output, choices)
            except Exception:  # the reply goes on without its header
                logger.exception("deltasync could not note the versions of a reply")
            yield output


def _note(output: Any, choices: Choices) -> None:
    """Note the choices that one of vLLM's `RequestOutput`s ends."""
    for choice in output.outputs:
        if choice.finish_reason is None:
            continue
        spans = getattr(choice, "weight_versions", None)
        numbers = [number_of(span.version) for span in spans or ()]
        if spans is None or not all(number.isdecimal() for number in numbers):
            found = None
        else:
            found = [(int(number), span.end - span.start) for number, span in zip(numbers, spans, strict=True)]
        choices[len(output.request_id), output.request_id, choice.index] = found


def _spans_text(choices: Choices) -> str | None:
    """Spans of all choices, in their order; None where vLLM makes a choice of several requests, or they are too long."""
    # Prompts of one reply are numbered at the end of their ids.
    spans = [choices[key] for key in sorted(choices)]
    if not spans or None in spans or any("-beam-" in request for _, request, _ in choices):
        return None
    text = json.dumps(spans, separators=(",", ":"))
    return text if len(text) <= _LONGEST else None


def versions_header(app: ASGIApp, live_version: Callable[[], int | None]) -> ASGIApp:
    """ASGI middleware that adds `first..last`: the versions that were live while the request ran.

    No token of the reply was made by a version before `first` or after `last`; `5..5` means that version 5 made all of
    them. A streamed reply's headers leave before its tokens, so there it is `first..`, without an upper bound. Without the
    header nothing is known, because no version was served when the request came.

    `x-deltasync-spans` has, for each choice, `[version, tokens]` of each version that made some of it; a streamed reply has
    it in a comment before its end. It needs vLLM 0.32.

    A request's `x-deltasync-session: 5` (or `5..7`, as in the header of an earlier reply) names the session's version.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(PATHS):
            await app(scope, receive, send)
            return
        session = Headers(scope=scope).get(SESSION_HEADER)
        if session is not None and scope["path"].endswith(_SALTED_PATHS):
            version = re.match(r"[1-9][0-9]{0,17}(?:\.\.|$)", session)
            if version is None:
                sentence = f"{SESSION_HEADER} is a version of the channel, such as 5, not {session[:40]!r}."
                await JSONResponse({"error": sentence}, 400)(scope, receive, send)
                return
            receive = await _naming_session(scope, receive, version[0].rstrip("."))
        first = live_version()
        if first is None:
            await app(scope, receive, send)
            return
        choices: Choices = {}

        async def send_with_versions(message: Message) -> None:
            try:
                _add(message, first, live_version, choices)
            except Exception:  # the reply goes on without it
                logger.exception("deltasync could not name the versions of a reply")
            await send(message)

        _choices.set(choices)
        await app(scope, receive, send_with_versions)

    return call


def _add(message: Message, first: int, live_version: Callable[[], int | None], choices: Choices) -> None:
    """Add what is known to a part of the reply."""
    if message["type"] == "http.response.start":
        headers = MutableHeaders(scope=message)
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        headers.append(HEADER, f"{first}.." if streamed else f"{first}..{live_version() or ''}")
        if not streamed and (spans := _spans_text(choices)) is not None:
            headers.append(SPANS_HEADER, spans)
    elif message.get("body", b"")[:12] == b"data: [DONE]" and (spans := _spans_text(choices)) is not None:
        message["body"] = f": {SPANS_HEADER} {spans}\n\n".encode() + message["body"]


async def _naming_session(scope: Scope, receive: Receive, version: str) -> Receive:
    """Name the session in a body's `cache_salt`, vLLM's own field; returns what gives the body in place of `receive`."""
    try:
        data = await Request(scope, receive).body()
    except ClientDisconnect:
        return receive
    try:
        fields = json.loads(data)
        if isinstance(fields, dict) and isinstance(fields.get("cache_salt"), str | None):
            data = json.dumps(fields | {"cache_salt": f"{SESSION}{version}:{fields.get('cache_salt') or ''}"}).encode()
            MutableHeaders(scope=scope)["content-length"] = str(len(data))
    except (ValueError, RecursionError):
        pass  # for vLLM to refuse
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return receive_again
