"""Which weights made a reply: the header `x-deltasync-versions` on completions."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-deltasync-versions"

_PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class VersionsHeader:
    """ASGI middleware that adds `first..last`: the versions that were live while the request ran.

    No token of the reply was made by a version before `first` or after `last`; `5..5` means that version 5 made all of
    them. A streamed reply's headers leave before its tokens, so there it is `first..`, without an upper bound. Without the
    header nothing is known, because no version was served when the request came.

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

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                streamed = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
                last = None if streamed else self._live_version()
                MutableHeaders(scope=message).append(HEADER, f"{first}..{'' if last is None else last}")
            await send(message)

        await self._app(scope, receive, send_with_header)
