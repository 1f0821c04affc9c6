"""Requests to a replica's routes: their bodies, who may send them, from which sites, and from when on.

The token is taken as a bearer token or, for browsers, as the password of any user. A browser sends what any
page tells it to, with the passwords it keeps for us, from machines that reach us where the page's author does
not. So requests that another site's page made are refused, with or without the token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from deltasync.channel.documents import Number
from deltasync.errors import UNREADABLE_JSON, ConfigError, describe, get_logger

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
    """Body of `POST /deltasync/sync`. `version` is a version of the channel, and an unknown field is an
    error.
    """


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
    """Return why a request must be refused, whether it has the token or not; None if it need not. Names of
    `headers` are in lower case.

    A server that listens on loopback only and needs no token answers to IP addresses and `localhost` alone:
    any other name that points to it is another site's.
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
    """Return why requests are not answered, for `DELTASYNC_WAIT_READY`: None for ever once the server was
    ready.
    """
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

    def __init__(
        self, status_code: int, sentence: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> None:
        super().__init__(sentence)
        self.status_code, self.headers, self.body = status_code, headers, {"error": sentence, **fields}
