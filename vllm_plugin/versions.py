"""Which weights made a reply: the headers `x-deltasync-versions` and `x-deltasync-spans`.

Also headers of requests: `x-deltasync-session`, by which a conversation keeps using the cached prefixes of
the version that it began with (`vllm_plugin.salt`), and `x-deltasync-version`, which demands a version
(`constraint.require_version`), and `x-deltasync-max-lag`, by which a commit ends it (`engine.end_old`).

Nothing here goes by routes: a reply is one that has called the engine client, `generate` or `encode`. So
whatever route vLLM gets, it has the headers, waits for the first version, and takes a session. A pooled reply
(embeddings, scores) is made by one version in each reply: a commit waits for it, and it for a commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync import limits
from deltasync.errors import AckTimeoutError
from deltasync.serve.constraint import MAX_LAG_HEADER, VersionConstraint, constraint, max_lag, reply_error
from deltasync.serve.engine import number_of
from deltasync.serve.replies import SPANS_HEADER, VERSIONS_HEADER, spans_text
from vllm_plugin import logger
from vllm_plugin.engine import MAX_LAG
from vllm_plugin.salt import SESSION

SESSION_HEADER = "x-deltasync-session"

SingleVersion = Callable[[], contextlib.AbstractAsyncContextManager[None]]

Choices = dict[tuple[int, str, int], list[tuple[int, int]] | None]
"""The finished choices of a reply. The keys sort them: the length of the request's id, the id, and the
choice's index.

Each has the versions that made its tokens, in order, with the number of tokens; None if vLLM does not
know."""


class LiveVersions:
    """The numbers of the versions that were live, in order: which of them were while a request ran.

    Several API servers share them in a file. One of them writes.
    """

    def __init__(self) -> None:
        # how many were noted, `was_ready`, a ring; 0: no version
        self._numbers = np.zeros(2 + 2 * limits.HISTORY, np.int64)

    def share(self, path: str) -> None:
        """Keep the numbers in this file from now on, which may have some."""
        with open(path, "a+b") as file:
            file.truncate(self._numbers.nbytes)
        self._numbers = np.memmap(path, np.int64)

    def expect(self, number: int) -> None:
        """Note that a version may be live before `note` says so: replies that begin or end until then may
        have it.
        """
        self._add(number, int(self._numbers[self._place(self.mark)]))

    def note(self, number: int | None) -> None:
        """Note that another version is live; None for no version of the channel."""
        self._add(number or 0)

    def _add(self, *numbers: int) -> None:
        for at, number in enumerate(numbers, self.mark + 1):
            self._numbers[self._place(at)] = number
        self._numbers[0] = self.mark + len(numbers)

    def _place(self, mark: int) -> int:
        return 2 + mark % (len(self._numbers) - 2)

    @property
    def was_ready(self) -> bool:
        """Whether requests may be answered, because the server was ready once; `ready` sets it."""
        return bool(self._numbers[1])

    def ready(self) -> None:
        """Set `was_ready`, for ever."""
        self._numbers[1] = 1

    @property
    def now(self) -> int | None:
        """The number of the version that is live."""
        return int(self._numbers[self._place(self.mark)]) or None

    @property
    def mark(self) -> int:
        """What `since` takes, to tell which versions were live from now on."""
        return int(self._numbers[0])

    def since(self, mark: int) -> tuple[int, int] | None:
        """Return the least and the greatest version that were live since a mark; None if none was."""
        last = self.mark
        marks = np.arange(max(mark, last + 3 - len(self._numbers)), last + 1)
        numbers = self._numbers[2 + marks % (len(self._numbers) - 2)]
        live = numbers[numbers > 0]
        return (int(live.min()), int(live.max())) if len(live) else None


class _Reply:
    """A reply while it is made.

    Attributes:
        session: The version that its request names, if any.
        wanted: The version that its request demands, if any.
        mark: When it first called the engine, if a version was live then (`LiveVersions.mark`).
        refused: The status code and the reason, in one sentence, for which it may not call the engine.
        called: Whether it has called the engine.
        adapter: The version of the adapter that makes it, if one does.
        choices: The generated tokens in the reply.
    """

    def __init__(self, session: str | None = None, wanted: VersionConstraint | None = None) -> None:
        self.session, self.wanted = session, wanted
        self.mark: int | None = None
        self.refused: tuple[int, str] | None = None
        self.called = False
        self.adapter: int | None = None
        self.choices: Choices = {}
        self._turn = asyncio.Lock()
        self._entered: contextlib.AsyncExitStack | None = None

    def begin(self, live: LiveVersions) -> None:
        """Note that it calls the engine."""
        if self.mark is None and live.now is not None:
            self.mark = live.mark

    async def hold(self, live: LiveVersions, single_version: SingleVersion) -> None:
        """As `begin`, for a demanded version. If no other will do, no commit begins before `leave`. Raises as
        `check`.
        """
        if self.wanted is not None and self.wanted.exact:
            await self.enter(single_version)
        self.begin(live)
        self.check(live)

    def check(self, live: LiveVersions) -> None:
        """Raise AckTimeoutError if another version than the demanded one was live since it began."""
        if self.wanted is None:
            return
        least, greatest = self.versions(live, self.mark) or (None, None)
        if not self.wanted.allows(least, greatest):
            why = "No version makes this reply." if least is None else "The version changed meanwhile."
            self.refused = 409, self.wanted.refusal(greatest, why)
            raise AckTimeoutError(self.refused[1])

    def versions(self, live: LiveVersions, mark: int | None) -> tuple[int, int] | None:
        """Return the least and the greatest version that may make it since a mark, or the adapter's."""
        if self.adapter is not None:
            return self.adapter, self.adapter
        return None if mark is None else live.since(mark)

    async def enter(self, single_version: SingleVersion) -> None:
        """Wait for a commit that is under way, and let no other begin before `leave`."""
        async with self._turn:
            if self._entered is None:
                entered = contextlib.AsyncExitStack()
                await entered.enter_async_context(single_version())
                self._entered = entered

    async def leave(self) -> None:
        """Let commits begin again."""
        if self._entered is not None:
            await self._entered.aclose()
            self._entered = None


# the one that is made in this context
_reply: ContextVar[_Reply | None] = ContextVar("deltasync_reply", default=None)


def resolved(adapter: int | None, refused: tuple[int, str] | None) -> None:
    """Note which version of an adapter makes the reply of this context, or the status code and the
    reason for which none does.
    """
    if (reply := _reply.get()) is not None:
        reply.adapter = adapter
        reply.refused = refused


def instrument(
    engine: Any,
    live: LiveVersions,
    refusal: Callable[[], str | None],
    single_version: SingleVersion,
    on_ended: Callable[[], object] = lambda: None,
) -> None:
    """Wrap `generate` and `encode` of an engine client, which every route calls.

    Args:
        engine: vLLM's engine client.
        live: The versions that were live; none if nothing is followed.
        refusal: Returns why no request may be answered, in one sentence, or None.
        single_version: As `Pauses.single_version`.
        on_ended: Called for each choice that a commit has ended.
    """
    generate, encode = engine.generate, engine.encode

    def begin() -> _Reply | None:
        reply, reason = _reply.get(), refusal()
        if reply is not None:
            reply.called = True
        if reason is not None:
            if reply is not None:
                reply.refused = 503, reason
            raise AckTimeoutError(reason)
        return reply

    def instrumented_generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        reply = begin()
        if reply is None:
            return generate(*args, **kwargs)
        if reply.session is not None:
            args, kwargs = _in_session(reply.session, args, kwargs)
        if (lag := max_lag.get()) is not None:
            bound = inspect.signature(generate).bind(*args, **kwargs)
            if "-beam-" in bound.arguments["request_id"]:
                reply.refused = 400, f"{MAX_LAG_HEADER} and beam search exclude each other."
                raise AckTimeoutError(reply.refused[1])
            bound.arguments["sampling_params"] = _with_max_lag(bound.arguments["sampling_params"], lag)
            outputs = generate(*bound.args, **bound.kwargs)
        else:
            outputs = generate(*args, **kwargs)
        if reply.wanted is not None:
            return _noting(held(reply, outputs), reply, on_ended)
        reply.begin(live)
        return _noting(outputs, reply, on_ended)

    async def held(reply: _Reply, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async with contextlib.aclosing(outputs):
            await reply.hold(live, single_version)
            async for output in outputs:
                reply.check(live)
                yield output

    async def instrumented_encode(*args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        made = begin()
        reply = made or _Reply()
        try:
            await reply.enter(single_version)
            reply.begin(live)
            reply.check(live)
            async with contextlib.aclosing(encode(*args, **kwargs)) as outputs:
                async for output in outputs:
                    reply.check(live)
                    yield output
        finally:
            if made is None:
                await reply.leave()

    engine.generate, engine.encode = instrumented_generate, instrumented_encode


def _in_session(
    version: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of `generate` whose prompt names a session in its `cache_salt`, a field of vLLM's."""
    prompt = args[0] if args else kwargs.get("prompt")
    if not isinstance(prompt, dict):
        return args, kwargs
    prompt = prompt | {"cache_salt": f"{SESSION}{version}:{prompt.get('cache_salt') or ''}"}
    return ((prompt, *args[1:]), kwargs) if args else (args, kwargs | {"prompt": prompt})


def _with_max_lag(params: Any, lag: int) -> Any:
    """Return a copy of vLLM's sampling parameters that names the maximum lag to the engine."""
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), MAX_LAG: lag}
    return params


async def _noting(
    outputs: AsyncGenerator[Any], reply: _Reply, on_ended: Callable[[], object]
) -> AsyncGenerator[Any]:
    ends = max_lag.get() is not None
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            try:
                _note(output, reply.choices, reply.adapter)
                for choice in output.outputs if ends else ():
                    if choice.finish_reason == "abort":
                        on_ended()
            except Exception:  # the reply goes on without its header
                logger.exception("deltasync could not note the versions of a reply")
            yield output


def _note(output: Any, choices: Choices, adapter: int | None) -> None:
    """Note the choices that end with this `RequestOutput` of vLLM's, all made by the adapter's version if
    there is one: vLLM names the version of the base.
    """
    for choice in output.outputs:
        if choice.finish_reason is None:
            continue
        spans = choice.weight_versions or ()
        made = [
            (number, span.end - span.start)
            for span in spans
            if (number := number_of(span.version) if adapter is None else adapter) is not None
        ]
        is_known = choice.weight_versions is not None and len(made) == len(spans)
        choices[len(output.request_id), output.request_id, choice.index] = made if is_known else None


def _spans_text(choices: Choices) -> str | None:
    """Return the spans of all choices in order, or None if unknown, too long, or of a beam search's several
    requests.
    """
    if any("-beam-" in request for _, request, _ in choices):
        return None
    # the ids of one reply's prompts end with their numbers
    return spans_text([choices[key] for key in sorted(choices)])


def replies(app: ASGIApp, live: LiveVersions, single_version: SingleVersion) -> ASGIApp:
    """ASGI middleware that adds the headers, and replies 503 or 409 where the engine refused a request.

    `x-deltasync-versions: first..last` names the least and the greatest version that were live while the
    request ran, also where the server was moved away and back: no token was made by one before `first` or
    after `last`. A streamed reply's headers leave before its tokens, so there it is `first..`. There is no
    header if no version was served when the request came.

    `x-deltasync-spans` lists `[version, tokens]` for each choice and each version that made some of its
    tokens. A streamed reply has it in a comment before its end.

    A request's `x-deltasync-session: 5` (or `5..7`, as in the header of an earlier reply) names the session's
    version.

    A request that demands a version (`constraint.constraint`) gets 409 if another one was live before its reply
    ended. A stream that has begun by then ends with an error. Where one version alone is demanded, commits
    wait for the reply.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        session = Headers(scope=scope).get(SESSION_HEADER)
        if session is not None:
            version = re.match(r"[1-9][0-9]{0,17}(?:\.\.|$)", session)
            if version is None:
                sentence = f"{SESSION_HEADER} is a version of the channel, such as 5, not {session[:40]!r}."
                await JSONResponse({"error": sentence}, 400)(scope, receive, send)
                return
            session = version[0].rstrip(".")
        reply, at_arrival, refused = _Reply(session, constraint.get()), _Reply(), False
        at_arrival.begin(live)

        async def send_with_versions(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                # a stream calls the engine, and computes after its headers
                if reply.wanted is not None and reply.called:
                    with contextlib.suppress(AckTimeoutError):
                        await reply.hold(live, single_version)
                if reply.refused is not None:
                    refused = True
                    await reply_error(send, *reply.refused)
            if refused:
                return
            try:
                _add(message, reply, at_arrival.mark, live)
            except Exception:  # the reply goes on without them
                logger.exception("deltasync could not name the versions of a reply")
            await send(message)

        _reply.set(reply)
        try:
            await app(scope, receive, send_with_versions)
        finally:
            await reply.leave()

    return call


def _add(message: Message, reply: _Reply, at_arrival: int | None, versions: LiveVersions) -> None:
    """Add what is known to a message of the reply."""
    if message["type"] == "http.response.start":
        headers = MutableHeaders(scope=message)
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        # a stream may call the engine later
        mark = at_arrival if streamed and reply.mark is None else reply.mark
        live = reply.versions(versions, mark)
        if live is None:
            return
        is_open = streamed and reply.adapter is None
        headers.append(VERSIONS_HEADER, f"{live[0]}.." if is_open else f"{live[0]}..{live[1]}")
        if not streamed and (spans := _spans_text(reply.choices)) is not None:
            headers.append(SPANS_HEADER, spans)
    elif (
        message.get("body", b"")[:12] == b"data: [DONE]" and (spans := _spans_text(reply.choices)) is not None
    ):
        message["body"] = f": {SPANS_HEADER} {spans}\n\n".encode() + message["body"]
