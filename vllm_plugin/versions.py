"""Which weights made a reply: the headers `x-deltasync-versions` and `x-deltasync-spans` of completions.

Also the header `x-deltasync-session` of requests, by which a conversation keeps using the cached prefixes of the version
that it began with (`vllm_plugin.salt`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_plugin import logger
from vllm_plugin.salt import SESSION, number_of

if TYPE_CHECKING:
    from vllm_plugin.target import LiveVersions

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
"""Routes that generate tokens."""
_LONGEST = 4000  # characters of spans: clients refuse long headers

Choices = dict[tuple[int, str, int], list[tuple[int, int]] | None]
"""The finished choices of a reply. The keys sort them: the length of the request's id, the id, and the choice's index.

Each has the versions that made its tokens, in order, with the number of tokens; None if vLLM does not know."""

_choices: ContextVar[Choices | None] = ContextVar("deltasync_choices", default=None)  # of the reply made in this context


def note_spans(engine: Any) -> None:
    """Make an engine client note which version made which token, for `versions_header`.

    Wraps its `generate`, which every route calls. vLLM knows the versions from 0.32 on.
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
    """Note the choices that end with this `RequestOutput` of vLLM's."""
    for choice in output.outputs:
        if choice.finish_reason is None:
            continue
        spans = getattr(choice, "weight_versions", None)
        numbers = [number_of(span.version) for span in spans or ()]
        known = None
        if spans is not None and all(number.isdecimal() for number in numbers):
            known = [(int(number), span.end - span.start) for number, span in zip(numbers, spans, strict=True)]
        choices[len(output.request_id), output.request_id, choice.index] = known


def _spans_text(choices: Choices) -> str | None:
    """Return the spans of all choices in order, or None if unknown, too long, or of a beam search's several requests."""
    # The ids of one reply's prompts end with their numbers.
    spans = [choices[key] for key in sorted(choices)]
    if not spans or None in spans or any("-beam-" in request for _, request, _ in choices):
        return None
    text = json.dumps(spans, separators=(",", ":"))
    return text if len(text) <= _LONGEST else None


def versions_header(app: ASGIApp, live: Callable[[], LiveVersions | None]) -> ASGIApp:
    """ASGI middleware that adds the headers.

    `x-deltasync-versions: first..last` names the least and the greatest version that were live while the request ran, also
    where the server was moved away and back: no token was made by one before `first` or after `last`. A streamed reply's
    headers leave before its tokens, so there it is `first..`.
    There is no header if no version was served when the request came.

    `x-deltasync-spans` lists `[version, tokens]` for each choice and each version that made some of its tokens. A streamed
    reply has it in a comment before its end. It needs vLLM 0.32.

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
        versions = live()
        if versions is None or versions.now is None:
            await app(scope, receive, send)
            return
        mark = versions.mark
        choices: Choices = {}

        async def send_with_versions(message: Message) -> None:
            try:
                _add(message, versions.since(mark), choices)
            except Exception:  # the reply goes on without them
                logger.exception("deltasync could not name the versions of a reply")
            await send(message)

        _choices.set(choices)
        await app(scope, receive, send_with_versions)

    return call


def _add(message: Message, live: tuple[int, int] | None, choices: Choices) -> None:
    """Add to a message of the reply what is known: the least and the greatest version that were `live`, and the choices."""
    if message["type"] == "http.response.start":
        headers = MutableHeaders(scope=message)
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        if live is not None:
            headers.append(HEADER, f"{live[0]}.." if streamed else f"{live[0]}..{live[1]}")
        if not streamed and (spans := _spans_text(choices)) is not None:
            headers.append(SPANS_HEADER, spans)
    elif message.get("body", b"")[:12] == b"data: [DONE]" and (spans := _spans_text(choices)) is not None:
        message["body"] = f": {SPANS_HEADER} {spans}\n\n".encode() + message["body"]


async def _naming_session(scope: Scope, receive: Receive, version: str) -> Receive:
    """Name the session in the body's `cache_salt`, a field of vLLM's. Returns a `receive` that gives the changed body."""
    try:
        data = await Request(scope, receive).body()
    except ClientDisconnect:
        return receive
    with contextlib.suppress(ValueError, RecursionError):  # vLLM refuses such a body
        fields = json.loads(data)
        if isinstance(fields, dict) and isinstance(fields.get("cache_salt"), str | None):
            data = json.dumps(fields | {"cache_salt": f"{SESSION}{version}:{fields.get('cache_salt') or ''}"}).encode()
            MutableHeaders(scope=scope)["content-length"] = str(len(data))
    messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again
