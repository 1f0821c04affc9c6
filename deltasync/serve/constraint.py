"""The version that a request demands of a server: its headers, or fields of its JSON body, of these names.

    x-deltasync-version: 7           made by version 7 alone
    x-deltasync-version: >=7         made by version 7 and later ones
    x-deltasync-version: >=latest    made by no version older than the channel's newest one when the request came
    x-deltasync-timeout: 5           seconds to wait for it, 30 by default
    x-deltasync-max-lag: 1           ended at the commit that makes its oldest token more than 1 version old

Header, body and repeated headers may name it together if they agree. Any other value, or one where no server
looks (the address, a form, a WebSocket), is refused with 400. A server that cannot serve the version in time
replies 409, and names the version that is live. A server that ends no requests replies 400 to a maximum lag.

`read` parses a request's constraint for every server. The middleware `require_version` waits until it is met.
Then an engine's adapter, or `ReplyGuard` for a followed module, checks that the reply is made by allowed versions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from deltasync.errors import AckTimeoutError, ApplyError, ConfigError, DeltaSyncError
from deltasync.following import Follow
from deltasync.serve.requests import Refused

VERSION_HEADER = "x-deltasync-version"
TIMEOUT_HEADER = "x-deltasync-timeout"
MAX_LAG_HEADER = "x-deltasync-max-lag"

_NAMES = (VERSION_HEADER, TIMEOUT_HEADER, MAX_LAG_HEADER)
_TIMEOUT_S, _LONGEST_S = 30.0, 3600.0
_ANSWER_S = 10.0  # that another process may take to say that a wait was in vain
_LATEST = "latest"
_IN_FORM = re.compile(rb"""(?:^|&|name=["']?)x-deltasync-(?:version|timeout|max-lag)\b""", re.IGNORECASE)


class VersionConstraint(msgspec.Struct, frozen=True):
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
    def parse(cls, fields: Mapping[str, str]) -> VersionConstraint | None:
        """Parse the values of the two names. Returns None if no version is demanded.

        Raises:
            ConfigError: one of them has no such value.
        """
        text, timeout = fields.get(VERSION_HEADER), fields.get(TIMEOUT_HEADER)
        if timeout is not None and re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,20})?", timeout.strip()) is None:
            raise ConfigError(f"{TIMEOUT_HEADER} is a number of seconds, such as 5, not {timeout[:40]!r}.")
        if text is None:
            return None
        found = re.fullmatch(rf"(>=)?\s*([1-9][0-9]{{0,17}}|{_LATEST})", text.strip())
        if found is None or (found[2] == _LATEST and found[1] is None):
            raise ConfigError(
                f"{VERSION_HEADER} is a version, such as 7, >=7 or >=latest, not {text[:40]!r}."
            )
        timeout_s = _TIMEOUT_S if timeout is None else min(float(timeout), _LONGEST_S)
        return cls(None if found[2] == _LATEST else int(found[2]), found[1] is None, timeout_s)

    def __str__(self) -> str:
        return f"{'' if self.exact else '>='}{_LATEST if self.version is None else self.version}"

    def allows(self, least: int | None, greatest: int | None) -> bool:
        """Whether a reply may be made by versions in this range; None for weights of no version."""
        if least is None or greatest is None:
            return False
        return self.version is None or (
            least >= self.version and (not self.exact or greatest == self.version)
        )

    def refusal(self, live: int | None, why: str = "") -> str:
        """Say that it is not served, while `live` is."""
        served = "no version of the channel" if live is None else f"version {live}"
        return f"Version {self} was asked for, and this server serves {served}. {why}".rstrip()


constraint: ContextVar[VersionConstraint | None] = ContextVar("deltasync_wanted", default=None)
"""The version that the reply that is made in this context has to be made by."""

max_lag: ContextVar[int | None] = ContextVar("deltasync_max_lag", default=None)
"""The number of versions by which its oldest token may be older than the live one; None for any."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def read(headers: Iterable[tuple[str, str]], query: str = "", body: bytes = b"") -> VersionConstraint | None:
    """Read which version a request demands, as every server does. Returns None if it demands none.

    Takes what `read_fields` takes.

    Raises:
        ConfigError: as `read_fields`; or it names a maximum lag, by which this server ends no request.
    """
    fields = read_fields(headers, query, body)
    if MAX_LAG_HEADER in fields:
        raise ConfigError(
            f"This server ends no request at a commit: send it without {MAX_LAG_HEADER}, or send it to a "
            "vLLM that follows the channel."
        )
    return VersionConstraint.parse(fields)


def parse_max_lag(fields: Mapping[str, str], default: int | None = None) -> int | None:
    """Parse the maximum lag of a request, in versions. Returns `default` without one.

    Raises:
        ConfigError: it is no such number.
    """
    text = fields.get(MAX_LAG_HEADER)
    if text is None:
        return default
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise ConfigError(f"{MAX_LAG_HEADER} is a number of versions, such as 1, not {text[:40]!r}.")
    return int(text)


def read_fields(headers: Iterable[tuple[str, str]], query: str = "", body: bytes = b"") -> dict[str, str]:
    """Read the values of our names in a request.

    Args:
        headers: All its headers in order, repeated ones too; their names in any case.
        query: Its address after the `?`.
        body: The whole body. It is read as JSON whatever its declared type is, because servers do so too.

    Raises:
        ConfigError: two values differ, or they stand where no server looks.
    """
    listed = [(name.lower(), value) for name, value in headers]
    found: dict[str, list[str]] = {name: [] for name in _NAMES}
    for name, value in listed:
        if name in found:  # a proxy may have joined repeated ones
            found[name] += value.split(",")
    of_body = _fields(body)
    is_form = of_body is None and any(
        "form" in value.lower() for name, value in listed if name == "content-type"
    )
    for name, value in () if of_body is None else of_body.items():
        if isinstance(name, str) and name.strip().lower() in found and value is not None:
            found[name.strip().lower()].append(str(value))
    asked = [name.strip().lower() for name, _ in parse_qsl(query, keep_blank_values=True)]
    if any(name in found for name in asked) or (is_form and _IN_FORM.search(unquote_to_bytes(body))):
        raise ConfigError(
            f"{VERSION_HEADER} and {MAX_LAG_HEADER} are headers or fields of a JSON body; they are not read "
            "elsewhere."
        )
    values = {
        name: list(dict.fromkeys(re.sub(r"\s+", "", each) for each in given)) for name, given in found.items()
    }
    for name, given in values.items():
        if len(given) > 1:
            raise ConfigError(
                f"{name} is given as {given[0][:40]!r} and as {given[1][:40]!r}: give one of them."
            )
    return {name: given[0] for name, given in values.items() if given}


def _fields(body: bytes) -> dict[Any, Any] | None:
    """Return the fields of a JSON body as servers parse it, or none if none can demand a version; None if it
    is not JSON.
    """
    may_be_escaped = b"\\u" in body or b"\0" in body  # \u0064, or UTF-16
    if not may_be_escaped and b"-deltasync-" not in body.lower():
        return {} if body[:1] in (b"{", b"[") else None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):  # the application says so
        return None
    return found if isinstance(found, dict) else {}


def require_version(
    app: App,
    wait_until_met: Callable[[VersionConstraint], Awaitable[VersionConstraint]],
    ends_requests: Callable[[], bool] = lambda: False,
    default_lag: int | None = None,
) -> App:
    """ASGI middleware that has a request wait at its arrival for the version that it demands, and sets
    `constraint` and `max_lag`.

    Args:
        app: The application.
        wait_until_met: As the function `wait_until_met`. Raises AckTimeoutError: the reply is 409.
        ends_requests: Whether a commit ends requests by `max_lag` now; otherwise one that names it gets 400.
        default_lag: The maximum lag of a request that names none.
    """

    async def call(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await app(scope, receive, send)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        query = scope.get("query_string", b"").decode("latin-1")
        if scope["type"] == "websocket":
            if {name.lower() for name, _ in headers} & {*_NAMES} or any(
                name in query.lower() for name in _NAMES
            ):
                return await _close(receive, send)
            return await app(scope, receive, send)
        messages = [message async for message in body_messages(receive)]
        try:
            given = headers, query, b"".join(message.get("body", b"") for message in messages)
            if ends_requests():
                fields = read_fields(*given)
                wanted = VersionConstraint.parse(fields)
                max_lag.set(parse_max_lag(fields, default_lag))
            else:
                wanted = read(*given)
        except ConfigError as error:
            return await reply_error(send, 400, str(error))
        if wanted is not None:
            try:
                async with asyncio.timeout(wanted.timeout_s + _ANSWER_S):
                    wanted = await wait_until_met(wanted)
            except Refused as error:
                return await reply_error(send, 503 if error.status_code >= 500 else 409, str(error))
            except DeltaSyncError as error:
                return await reply_error(send, 409, str(error))
            except TimeoutError:
                return await reply_error(
                    send, 409, f"Version {wanted} was asked for, and this server does not answer."
                )
        constraint.set(wanted)
        await app(scope, replay(messages, receive), send)

    return call


async def body_messages(receive: Receive) -> AsyncIterator[Message]:
    """Yield the messages of a request's body."""
    while True:
        message = await receive()
        yield message
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def replay(messages: Sequence[Message], receive: Receive) -> Receive:
    """Return what receives these messages first."""
    left = [*messages]

    async def receive_again() -> Message:
        return left.pop(0) if left else await receive()

    return receive_again


async def _close(receive: Receive, send: Send) -> None:
    """Refuse a WebSocket that demands a version."""
    await receive()
    reason = f"{VERSION_HEADER} and {MAX_LAG_HEADER} are not read of a WebSocket."
    await send({"type": "websocket.close", "code": 1008, "reason": reason})


async def reply_error(send: Send, code: int, sentence: str) -> None:
    """Send a reply in the form of OpenAI's errors."""
    kind = {400: "BadRequestError", 409: "ConflictError", 503: "ServiceUnavailableError"}[code]
    body = msgspec.json.encode({"error": {"message": sentence, "type": kind, "code": code}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", b"1")] if code == 503 else []
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def wait_until_met(follow: Follow, wanted: VersionConstraint) -> VersionConstraint:
    """Wait until a replica serves a demanded version. Returns what to hold the reply to: `>=latest` with its
    number.

    Raises:
        AckTimeoutError: it does not in time, or never will.
    """
    live, pin, version = follow.version, follow.pin, wanted.version
    if version is not None and wanted.allows(live, live):
        return wanted
    if wanted.exact and live is not None and version is not None and live > version and pin is None:
        raise AckTimeoutError(
            wanted.refusal(live, "It takes newer versions only: ask a server that is pinned to that one.")
        )
    is_later = pin is not None and version is not None and not wanted.exact and pin >= version
    try:
        served = await wait(follow, wanted.timeout_s, pin if is_later else version)
    except ApplyError as error:
        raise AckTimeoutError(wanted.refusal(follow.version, str(error))) from None
    if served is None or not wanted.allows(served, served):
        why = f"It waited {wanted.timeout_s:g} s. {follow.why}" if served is None else ""
        raise AckTimeoutError(wanted.refusal(follow.version, why))
    return wanted if version is not None else msgspec.structs.replace(wanted, version=served)


class ReplyGuard:
    """Holds the reply that a followed module makes to the version that its request demands. Made when the
    reply begins.
    """

    def __init__(self, follow: Follow, wanted: VersionConstraint | None) -> None:
        self._follow, self._wanted = follow, wanted
        self._commits, self._first = [*follow.commits], follow.version

    @property
    def refusal(self) -> str | None:
        """Why the reply may not be sent, in one sentence: another version was live since it began. None if it
        may.
        """
        if self._wanted is None:
            return None
        last = self._follow.version  # before the commits: one that is not listed yet is live
        known = {id(each) for each in self._commits}
        since = [each.version for each in [*self._follow.commits] if id(each) not in known]
        # None is inside a commit, in which nothing is computed.
        found = [version for version in (self._first, *since, last) if version is not None]
        if found and self._wanted.allows(min(found), max(found)):
            return None
        return self._wanted.refusal(last, "The version changed meanwhile.")


async def wait(
    follow: Follow, timeout_s: float, version: int | None = None, step: int | None = None
) -> int | None:
    """Return the number of the version served once it is what a client asks for; None after `timeout_s`.

    Raises:
        ApplyError: as `Follow.request`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(follow.request(version, step))
    except TimeoutError:
        return None
