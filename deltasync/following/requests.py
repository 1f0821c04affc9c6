"""Requests to a replica's routes: their bodies, who may send them, from which sites, and from when on.

A follow loop may run in another process than the routes. `Requests` begins to answer there, and its state has the answers
later.

The token is taken as a bearer token or, for browsers, as the password of any user. A browser sends what any page tells it
to, with the passwords it keeps for us, from machines that reach us where the page's author does not. So requests that
another site's page made are refused, with or without the token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from deltasync import limits
from deltasync.channel.documents import Number
from deltasync.config import parse_pin, pin_text
from deltasync.errors import UNREADABLE_JSON, ConfigError, MissingVersionError, PinnedError, describe, get_logger
from deltasync.following.loop import Follow
from deltasync.following.wanted import wait
from deltasync.threads import Workers, daemon

_T = TypeVar("_T")

logger = get_logger(__name__)


HeldSeconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
"""How long a request may wait for a version."""


class WeightUpdate(msgspec.Struct, kw_only=True):
    """Body of PipelineRL's `POST /receive_weight_update`. Other fields are ignored.

    Attributes:
        version: The trainer's number: the `step` that it published with.
    """

    version: Number | None = None
    timeout_s: HeldSeconds = 60.0


class Sync(WeightUpdate, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /deltasync/sync`. `version` is a version of the channel, and an unknown field is an error."""


class PinTo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /deltasync/pin`. `pin` is a text for `deltasync.config.parse_pin`."""

    pin: str
    timeout_s: HeldSeconds = 60.0


describe(WeightUpdate, Sync, PinTo)


def body_of(data: bytes, kind: type[_T]) -> _T:
    """Decode a request's body. An empty body has no fields.

    Raises:
        ConfigError: the body is not valid for the route.
    """
    try:
        return msgspec.json.decode(data if data.strip() else b"{}", type=kind)
    except UNREADABLE_JSON as error:
        raise ConfigError(f"The body is not valid for this route: {error}.") from None


def token_matches(authorization: str | None, token: str) -> bool:
    """Whether an Authorization header has the token. Takes the same time wherever the two differ."""
    scheme, _, credentials = (authorization or "").partition(" ")
    presented = credentials.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        try:
            presented = base64.b64decode(presented, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(presented, token.encode())


def is_loopback(host: str | None) -> bool:
    """Whether an address to listen on is reached from this machine only. None is all addresses."""
    address = _address(host or "")
    return _is_localhost(host or "") if address is None else address.is_loopback


def stranger(method: str, headers: Mapping[str, str], only_loopback: bool) -> str | None:
    """Return why a request must be refused, whether it has the token or not; None if it need not. Names of `headers` are in
    lower case.

    A server that listens on loopback only and needs no token answers to IP addresses and `localhost` alone: any other name
    that points to it is another site's.
    """
    host = headers.get("host", "")
    if only_loopback and not _has_no_owner(host):
        return "This server is only for its own machine; set DELTASYNC_HTTP_TOKEN to reach it by other names."
    if method == "GET" and headers.get("sec-fetch-mode") == "navigate":
        return None  # a link: who follows it sees the reply, the page with the link does not
    origin = headers.get("origin")
    crossed = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if crossed or (origin is not None and urlsplit(origin).netloc.lower() != host.lower()):
        return "Pages of other sites may not send requests here."
    return None


def _has_no_owner(host: str) -> bool:
    """Whether a Host header names an IP address or `localhost`, which nobody can own as a name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return _is_localhost(name) or _address(name) is not None


def _is_localhost(name: str) -> bool:
    return f".{name.rstrip('.').lower()}".endswith(".localhost")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return None


def until_ready(not_ready: Callable[[], str | None]) -> Callable[[], str | None]:
    """Return why requests are not answered, for `DELTASYNC_WAIT_READY`: None for ever once the server was ready."""
    opened = False

    def refusal() -> str | None:
        nonlocal opened
        if opened:
            return None
        try:
            reason = not_ready()
        except Exception:  # unknown counts as not ready
            logger.exception("deltasync could not find out whether this server is ready")
            return "deltasync could not find out whether this server is ready; see its log."
        opened = reason is None
        return reason

    return refusal


class Refused(Exception):
    """A request is answered with this error: `status_code`, `headers`, and a document, `body`."""

    def __init__(self, status_code: int, sentence: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(sentence)
        self.status_code, self.headers, self.body = status_code, headers, {"error": sentence, **fields}


def in_short(status: Any) -> dict[str, Any]:
    """Return what may be read of a status without the token."""
    found = msgspec.to_builtins(status)
    return {name: found[name] for name in ("state", "version", "newest_version")}


_threads = Workers(limits.REPLY_THREADS, "reply")


async def _in_thread(call: Callable[..., _T], *args: Any) -> _T:
    """Run a call in a thread that keeps neither the event loop nor the end of the process, should the store hang."""
    return await asyncio.shield(asyncio.wrap_future(_threads.submit(call, *args)))


async def sync(follow: Follow, timeout_s: float, version: int | None = None, step: int | None = None) -> dict[str, Any]:
    """Return the version served once it is what `Follow.request` takes. Raises Refused, with 504 after `timeout_s`."""
    before = time.monotonic()
    try:
        served = await wait(follow, timeout_s, version, step)
    except PinnedError as error:
        raise Refused(409, str(error)) from None
    if served is None:
        status = follow.status(0)
        wanted = "The newest version" if version is None else f"Version {version}"
        raise Refused(
            504,
            f"{wanted if step is None else f'Step {step}'} is not served after {timeout_s:g} s: this replica serves "
            f"version {status.version}, the newest is version {status.newest_version}, and it is {status.state}"
            f"{'' if status.pin is None else f', pinned: {status.pin}'}.",
            cause=status.error,
            **in_short(status),
        )
    return {"version": served, "waited_s": time.monotonic() - before}


async def pin(follow: Follow, text: str, timeout_s: float) -> dict[str, Any]:
    """Pin, and return what is served once the pin points to it. Raises Refused: the pin stays as it was, but for 504."""
    try:
        wanted = parse_pin(text)
        async with asyncio.timeout(timeout_s):
            await _in_thread(follow.check_pin, wanted)
    except ConfigError as error:
        raise Refused(422, str(error)) from None
    except MissingVersionError as error:
        raise Refused(409, f"{error} The pin stays: {pin_text(follow.pin)}.") from None
    except TimeoutError:
        raise Refused(504, f"The store does not say whether it is there. The pin stays: {pin_text(follow.pin)}.") from None
    follow.set_pin(wanted, checked=True)
    return await sync(follow, timeout_s)


async def digest(follow: Follow) -> dict[str, Any]:
    """Return the version served, and the sha256 of every live tensor, read between two steps of the loop."""

    def read() -> dict[str, Any]:
        with follow.between_steps() as target:
            number = None if target.version is None else target.version.version
            return {"version": number, "sha256": target.digest()}  # type: ignore[attr-defined]

    return await _in_thread(read)


class Requests:
    """Requests to one loop by routes in another process. Not thread-safe.

    Whoever can put requests past the routes has to know `token`, if there is one.
    """

    def __init__(self, follow: Follow, token: str | None = None) -> None:
        self._follow, self._token, self._loop = follow, token, asyncio.new_event_loop()
        self._asked: dict[str, Future[dict[str, Any]]] = {}  # requests without an answer
        self._answers: dict[str, dict[str, Any]] = {}
        daemon("reply", self._loop.run_forever).start()

    def takes(self, request: Any) -> bool:
        """Whether this is a request, and by one who may ask."""
        if not isinstance(request, dict) or not isinstance(request.get("id"), str):
            return False
        return isinstance(request.get("timeout_s"), float) and request.get("token") == self._token

    def ask(self, request: dict[str, Any]) -> None:
        """Begin to answer. A request has an `id` and `timeout_s`.

        It also has `digest`; or `commits`, how many of them the status is to have; or a `version`, a trainer's `step` or
        neither to wait for, as `Follow.request`; or a `pin`. `withdrawn` forgets the request.
        """
        number = request["id"]
        self._answers.pop(number, None)
        if (asked := self._asked.pop(number, None)) is not None:
            asked.cancel()
        if not request.get("withdrawn"):
            self._asked[number] = asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer, with the HTTP status as `refused` if it is an error."""
        follow, timeout_s = self._follow, request["timeout_s"]
        try:
            if "commits" in request:
                found: dict[str, Any] = msgspec.to_builtins(follow.status(request["commits"]))
                return found
            if request.get("digest"):
                return await digest(follow)
            if request.get("pin") is not None:
                return await pin(follow, request["pin"], timeout_s)
            return await sync(follow, timeout_s, request.get("version"), request.get("step"))
        except Refused as error:
            return {"refused": error.status_code, **error.body}
        except Exception as error:  # noqa: BLE001 - the route replies with it
            return {"refused": 503, "error": f"{type(error).__name__}: {error}"}

    def state(self, is_held: bool) -> dict[str, Any]:
        """Return the version served, why it is not ready, and the last answers, empty while there is none.

        `is_held` says that the engine does not compute, because its weights are not known.
        """
        for number in [number for number, asked in self._asked.items() if asked.done()]:
            self._answers[number] = self._asked.pop(number).result()
        for number in [*self._answers][: -limits.KEPT_ANSWERS]:
            del self._answers[number]
        held = f"This server does not generate now. {self._follow.error or ''}".rstrip()
        return {
            "version": self._follow.version,
            "not_ready": held if is_held else self._follow.not_ready,
            "answers": self._answers | {number: {} for number in self._asked},
        }
