"""The version that a request demands of a server: its headers, or fields of its JSON body, of these names.

    x-deltasync-version: 7           made by version 7 alone
    x-deltasync-version: >=7         made by version 7 and later ones
    x-deltasync-version: >=latest    made by no version older than the channel's newest one when the request came
    x-deltasync-timeout: 5           seconds to wait for it, 30 by default

A server that cannot serve it in this time replies 409, and names the version that is live. `demanding` is the middleware
that waits; an engine's adapter holds the reply to `demanded` until it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import msgspec

from deltasync.errors import UNREADABLE_JSON, AckTimeoutError, ConfigError, DeltaSyncError, PinnedError
from deltasync.following.loop import Follow

VERSION_HEADER = "x-deltasync-version"
TIMEOUT_HEADER = "x-deltasync-timeout"

_TIMEOUT_S, _LONGEST_S = 30.0, 3600.0
_LATEST = "latest"


class Wanted(msgspec.Struct, frozen=True):
    """A demanded version.

    Attributes:
        version: Its number; None for the channel's newest one.
        exact: Whether no other version will do, instead of later ones too.
        timeout_s: How long to wait for it.
    """

    version: int | None
    exact: bool
    timeout_s: float = _TIMEOUT_S

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Wanted | None:
        """Parse a request's headers, whose names are in lower case, or fields. Returns None if it demands no version.

        Raises:
            ConfigError: one of them has no such value.
        """
        text, timeout = fields.get(VERSION_HEADER), fields.get(TIMEOUT_HEADER)
        if text is None:
            return None
        found = re.fullmatch(rf"(>=)?\s*([1-9][0-9]{{0,17}}|{_LATEST})", text.strip())
        if found is None or (found[2] == _LATEST and found[1] is None):
            raise ConfigError(f"{VERSION_HEADER} is a version, such as 7, >=7 or >=latest, not {text[:40]!r}.")
        if timeout is not None and re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", timeout.strip()) is None:
            raise ConfigError(f"{TIMEOUT_HEADER} is a number of seconds, such as 5, not {timeout[:40]!r}.")
        timeout_s = _TIMEOUT_S if timeout is None else min(float(timeout), _LONGEST_S)
        return cls(None if found[2] == _LATEST else int(found[2]), found[1] is None, timeout_s)

    def __str__(self) -> str:
        return f"{'' if self.exact else '>='}{_LATEST if self.version is None else self.version}"

    def allows(self, least: int | None, greatest: int | None) -> bool:
        """Whether a reply may be made by versions in this range; None for weights of no version."""
        if least is None or greatest is None:
            return False
        return self.version is None or (least >= self.version and (not self.exact or greatest == self.version))

    def refusal(self, live: int | None, why: str = "") -> str:
        """Say that it is not served, while `live` is."""
        served = "no version of the channel" if live is None else f"version {live}"
        return f"Version {self} was asked for, and this server serves {served}. {why}".rstrip()


demanded: ContextVar[Wanted | None] = ContextVar("deltasync_wanted", default=None)
"""The version that the reply that is made in this context has to be made by."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def demanding(app: App, reach: Callable[[Wanted], Awaitable[Wanted]]) -> App:
    """ASGI middleware that has a request wait at its arrival for the version that it demands, and sets `demanded`.

    Args:
        app: The application.
        reach: Waits, as `reach`. Raises AckTimeoutError: the reply is 409.
    """

    async def call(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if VERSION_HEADER not in fields and fields.get("content-type", "").startswith("application/json"):
            messages = [message async for message in _body(receive)]
            fields = _fields(b"".join(message.get("body", b"") for message in messages))

            async def receive_again(rest: Receive = receive) -> Message:
                return messages.pop(0) if messages else await rest()

            receive = receive_again
        try:
            wanted = Wanted.parse(fields)
            demanded.set(None if wanted is None else await reach(wanted))
        except DeltaSyncError as error:
            return await reply_error(send, 400 if isinstance(error, ConfigError) else 409, str(error))
        await app(scope, receive, send)

    return call


async def _body(receive: Receive) -> AsyncIterator[Message]:
    """Yield the messages of a request's body."""
    while True:
        message = await receive()
        yield message
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def _fields(body: bytes) -> dict[str, str]:
    """Return the fields of a JSON body that demand a version."""
    if VERSION_HEADER.encode() not in body:
        return {}
    with contextlib.suppress(*UNREADABLE_JSON):  # the application says so
        found = msgspec.json.decode(body, type=dict[str, Any])
        return {name: str(found[name]) for name in (VERSION_HEADER, TIMEOUT_HEADER) if found.get(name) is not None}
    return {}


async def reply_error(send: Send, code: int, sentence: str) -> None:
    """Send a reply in the form of OpenAI's errors."""
    kind = {400: "BadRequestError", 409: "ConflictError", 503: "ServiceUnavailableError"}[code]
    body = msgspec.json.encode({"error": {"message": sentence, "type": kind, "code": code}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", b"1")] if code == 503 else []
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reach(follow: Follow, wanted: Wanted) -> Wanted:
    """Wait until a replica serves a demanded version. Returns what to hold the reply to: `>=latest` with its number.

    Raises:
        AckTimeoutError: it does not in time, or never will.
    """
    live, pin, version = follow.version, follow.pin, wanted.version
    if version is not None and wanted.allows(live, live):
        return wanted
    if wanted.exact and live is not None and version is not None and live > version and pin is None:
        raise AckTimeoutError(wanted.refusal(live, "It takes newer versions only: ask a server that is pinned to that one."))
    is_later = pin is not None and version is not None and not wanted.exact and pin >= version
    try:
        served = await wait(follow, wanted.timeout_s, pin if is_later else version)
    except PinnedError as error:
        raise AckTimeoutError(wanted.refusal(follow.version, str(error))) from None
    if served is None or not wanted.allows(served, served):
        why = f"It waited {wanted.timeout_s:g} s. {follow.why}" if served is None else ""
        raise AckTimeoutError(wanted.refusal(follow.version, why))
    return wanted if version is not None else msgspec.structs.replace(wanted, version=served)


async def wait(follow: Follow, timeout_s: float, version: int | None = None, step: int | None = None) -> int | None:
    """Return the number of the version served once it is what a client asks for; None after `timeout_s`.

    Raises:
        PinnedError: as `Follow.request`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(follow.request(version, step))
    except TimeoutError:
        return None
