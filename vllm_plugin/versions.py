"""Which weights made a reply: the headers `x-deltasync-versions` and `x-deltasync-spans` on completions."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-deltasync-versions"
SPANS_HEADER = "x-deltasync-spans"

_PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
_LONGEST = 4000  # characters of spans: clients refuse long headers

# What vLLM knows of each choice of the reply that is being made in this context.
_choices: ContextVar[list[Any] | None] = ContextVar("deltasync_choices", default=None)


class Spans:
    """Notes which version made which tokens of every request, at a cost per commit and none per token.

    Outputs of the engine reach `process_outputs` in the order in which they were made, stamped with the machine's clock, and
    none is made while generation is paused for a commit. So when the first one comes that was made after a commit, each
    running request has exactly the tokens that the version before made.

    Args:
        processor: vLLM's output processor, in this process; two of its methods are wrapped.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._version: int | None = None  # that made the tokens which are being processed
        self._changes: deque[tuple[float, int | None]] = deque()  # since then: when, to which version
        self._add_request, self._process_outputs = processor.add_request, processor.process_outputs
        processor.add_request, processor.process_outputs = self.add_request, self.process_outputs

    def change(self, version: int | None) -> None:
        """Tokens that are made from now on are of this version. Call while none is being made."""
        self._changes.append((time.monotonic(), version))
        if not self._processor.request_states:
            self._pass(math.inf)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """A request begins, in the context of the reply that it is for."""
        self._add_request(request, *args, **kwargs)
        state, choices = self._processor.request_states[request.request_id], _choices.get()
        if choices is not None and not hasattr(state, "deltasync_starts"):
            state.deltasync_starts = [(self._version, 0)]
            choices.append(state)

    def process_outputs(self, outputs: Any, made_at: float | None = None, *args: Any) -> Any:
        """Outputs of one step, or some of them."""
        if self._changes and made_at is not None:
            self._pass(made_at)
        return self._process_outputs(outputs, made_at, *args)

    def _pass(self, now: float) -> None:
        while self._changes and self._changes[0][0] < now:
            _, self._version = self._changes.popleft()
            for state in self._processor.request_states.values():
                if hasattr(state, "deltasync_starts"):
                    state.deltasync_starts.append((self._version, state.detokenizer.num_output_tokens()))


def noted(engine: Any) -> Callable[[int | None], None]:
    """Begin to note spans for an engine client; what it returns is to be told of every change, as `Spans.change`."""
    processor = getattr(engine, "output_processor", None)
    if processor is None:
        return lambda _: None
    parallel = engine.vllm_config.parallel_config
    if parallel.data_parallel_size_local < parallel.data_parallel_size:
        return lambda _: None  # clocks of several machines
    return Spans(processor).change


def _spans_of(state: Any) -> list[tuple[int | None, int]]:
    """Of one choice: versions, and how many tokens each made."""
    starts = state.deltasync_starts
    ends = [start for _, start in starts[1:]] + [state.detokenizer.num_output_tokens()]
    return [(version, end - start) for (version, start), end in zip(starts, ends, strict=True) if end > start]


def _told(choices: list[Any]) -> str | None:
    """Spans of all choices, in their order; None where vLLM makes a choice of several requests, or they are too long."""
    if not choices or any("-beam-" in state.external_req_id for state in choices):
        return None
    # Prompts of one reply are numbered at the end of their ids.
    choices.sort(key=lambda state: (len(state.external_req_id), state.external_req_id, state.request_index))
    text = json.dumps([_spans_of(state) for state in choices], separators=(",", ":"))
    return text if len(text) <= _LONGEST else None


class VersionsHeader:
    """ASGI middleware that adds `first..last`: the versions that were live while the request ran.

    No token of the reply was made by a version before `first` or after `last`; `5..5` means that version 5 made all of
    them. A streamed reply's headers leave before its tokens, so there it is `first..`, without an upper bound. Without the
    header nothing is known, because no version was served when the request came.

    `x-deltasync-spans` has, for each choice, `[version, tokens]` of each version that made some of it; a streamed reply has
    it in a comment before its end.

    Args:
        app: What is wrapped.
        live_version: The version that a token made now is of, never a later one.
    """

    def __init__(self, app: ASGIApp, live_version: Callable[[], int | None]) -> None:
        self._app = app
        self._live_version = live_version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or whatever else a server has to say."""
        first = self._live_version() if scope["type"] == "http" and scope["path"].endswith(_PATHS) else None
        if first is None:
            await self._app(scope, receive, send)
            return
        choices: list[Any] = []

        async def send_with_versions(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                streamed = headers.get("content-type", "").startswith("text/event-stream")
                headers.append(HEADER, f"{first}.." if streamed else f"{first}..{self._live_version() or ''}")
                if not streamed and (spans := _told(choices)) is not None:
                    headers.append(SPANS_HEADER, spans)
            elif message.get("body", b"")[:12] == b"data: [DONE]" and (spans := _told(choices)) is not None:
                message["body"] = f": {SPANS_HEADER} {spans}\n\n".encode() + message["body"]
            await send(message)

        _choices.set(choices)
        await self._app(scope, receive, send_with_versions)
