"""Requests to a replica's routes: their bodies, who may send them, from which sites, and from when on.

A follow loop may run in another process than the routes. Requests to it begin there, and its state has the answers later.

The token is taken as a bearer token or, for browsers, as the password of any user. A browser sends what any page tells it
to, with the passwords it keeps for us, from machines that reach us where the page's author does not. So requests that
another site's page made are refused, with or without the token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from deltasync import limits
from deltasync.channel.documents import Number
from deltasync.config import parse_pin, pin_text
from deltasync.errors import UNREADABLE_JSON, ConfigError, describe, get_logger
from deltasync.following.loop import Follow
from deltasync.threads import Workers

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


_Answering = Generator[None, None, dict[str, Any]]

STATUS_CODES = {"ConfigError": 422, "MissingVersionError": 409, "PinnedError": 409}
"""HTTP status of a reply whose `error` begins with the name of a class; 504 for others."""


class Requests:
    """Requests to one loop. Not thread-safe. `digest` returns the sha256 of every tensor, while the loop does not step.

    Whoever can put requests past the routes has to know `token`, if there is one.
    """

    def __init__(self, follow: Follow, digest: Callable[[], dict[str, str]], token: str | None = None) -> None:
        self._follow, self._digest, self._token = follow, digest, token
        self._open: dict[str, _Answering] = {}  # requests without an answer
        self._answers: dict[str, dict[str, Any]] = {}
        self._threads, self._status_thread = Workers(limits.REPLY_THREADS, "reply"), Workers(1, "reply")

    def takes(self, request: Any) -> bool:
        """Whether this is a request, and by one who may ask."""
        if not isinstance(request, dict) or not isinstance(request.get("id"), str):
            return False
        return isinstance(request.get("timeout_s"), float) and request.get("token") == self._token

    def ask(self, request: dict[str, Any]) -> None:
        """Begin to answer; `state` goes on. A request has an `id` and `timeout_s`.

        It also has `digest`; or `commits`, how many of them the status is to have; or a `version`, a trainer's `step` or
        neither to wait for, as `Follow.request`, and maybe a `pin` to set first. `withdrawn` forgets the request.
        """
        number = request["id"]
        self._open.pop(number, None)
        self._answers.pop(number, None)
        if not request.get("withdrawn"):
            self._open[number], self._answers[number] = self._answering(request), {}

    def _answering(self, request: dict[str, Any]) -> _Answering:
        """Yield until the answer is known, and return it."""
        follow, timeout_s = self._follow, request["timeout_s"]
        deadline = time.monotonic() + timeout_s
        if "commits" in request:
            status = self._status_thread.submit(follow.status, request["commits"])
            return msgspec.to_builtins((yield from _result(status)))
        if request.get("digest"):
            return (yield from _result(self._threads.submit(self._read)))
        if request.get("pin") is not None:
            pin = parse_pin(request["pin"])
            check = self._threads.submit(follow.check_pin, pin)
            while not check.done():
                if time.monotonic() >= deadline:
                    return {"error": f"The store does not say whether it is there. The pin stays: {pin_text(follow.pin)}."}
                yield
            check.result()
            follow.set_pin(pin, checked=True)
        reached = follow.request(request.get("version"), request.get("step"))
        while (served := reached()) is None:
            if time.monotonic() >= deadline:
                return {"error": f"After {timeout_s:g} s version {follow.version} is served. {follow.why}".rstrip()}
            yield
        return {"version": served}

    def _read(self) -> dict[str, Any]:
        with self._follow.between_steps():
            return {"version": self._follow.version, "sha256": self._digest()}

    def state(self, is_held: bool) -> dict[str, Any]:
        """Return the version served, why it is not ready, and the last answers, empty while there is none.

        `is_held` says that the engine does not compute, because its weights are not known.
        """
        for number, answering in [*self._open.items()]:
            try:
                next(answering)
                continue
            except StopIteration as done:
                answer = done.value
            except Exception as error:  # noqa: BLE001 - the route replies with it
                answer = {"error": f"{type(error).__name__}: {error}"}
            del self._open[number], self._answers[number]
            self._answers[number] = answer  # as the last one
        for number in [number for number, answer in self._answers.items() if answer][: -limits.KEPT_ANSWERS]:
            del self._answers[number]
        held = f"This server does not generate now. {self._follow.error or ''}".rstrip()
        return {
            "version": self._follow.version,
            "not_ready": held if is_held else self._follow.not_ready,
            "answers": self._answers,
        }


def _result(future: Future[_T]) -> Generator[None, None, _T]:
    """Yield until a future is done, and return its result."""
    while not future.done():
        yield
    return future.result()
