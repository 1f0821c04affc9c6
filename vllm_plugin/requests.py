"""Which requests are answered: whose, from where, and since when.

Whoever has the token may ask, as a bearer token or, in browsers, as the password of any user; no other site's page may. A
browser sends what any page tells it to, with the passwords it keeps for us, from machines that reach us where the page's
author does not. So requests that another site's page made are refused, token or not.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_plugin import logger
from vllm_plugin.versions import PATHS


def token_matches(authorization: str | None, token: str) -> bool:
    """Whether an Authorization header presents the token; takes the same time wherever the two differ."""
    scheme, _, credentials = (authorization or "").partition(" ")
    found = credentials.strip().encode("utf-8", "replace")
    if scheme.lower() == "basic":
        try:
            found = base64.b64decode(found, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(found, token.encode())


def is_loopback(host: str | None) -> bool:
    """Whether an address to listen on is this machine's own; None is all addresses."""
    address = _address(host or "")
    return _is_localhost(host or "") if address is None else address.is_loopback


def stranger(method: str, headers: Mapping[str, str], only_loopback: bool) -> str | None:
    """Why a request is not to be answered, whoever sends it; None if it may be. Headers have lower-case names.

    Where the server listens on loopback only and wants no token, it answers to addresses and `localhost` alone: a name that
    was made to point here is another site's.
    """
    host = headers.get("host", "")
    if only_loopback and not _is_nobodys(host):
        return "This server is only for its own machine; set DELTASYNC_HTTP_TOKEN to reach it by other names."
    if method == "GET" and headers.get("sec-fetch-mode") == "navigate":
        return None  # a link: whoever follows it sees the answer, the page that has it does not
    origin = headers.get("origin")
    crossed = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if crossed or (origin is not None and urlsplit(origin).netloc.lower() != host.lower()):
        return "Pages of other sites may not send requests here."
    return None


def _is_nobodys(host: str) -> bool:
    """Whether a Host header has no name in it that somebody can own."""
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


def wait_ready(app: ASGIApp, not_ready: Callable[[], str | None]) -> ASGIApp:
    """ASGI middleware for `DELTASYNC_WAIT_READY`: answers 503 to requests for tokens until the server was ready once."""
    opened = False

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal opened
        if not opened and scope["type"] == "http" and scope["path"].endswith(PATHS):
            try:
                reason = not_ready()
            except Exception:  # nobody knows whether it is
                logger.exception("deltasync could not tell whether this server is ready")
                reason = "It cannot be told whether this server is ready."
            if reason is not None:
                error = {"message": reason, "type": "ServiceUnavailableError", "code": 503}
                await JSONResponse({"error": error}, 503, {"retry-after": "1"})(scope, receive, send)
                return
            opened = True
        await app(scope, receive, send)

    return call
