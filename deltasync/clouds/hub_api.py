"""The Hub's HTTP API for one bucket. Requests are not retried; their errors are translated to ours.

huggingface_hub provides the session, its headers and the parser of rate limits. Its bucket calls are not
used: they sleep through a rate limit, uninterruptibly, up to six times five minutes, and have no time limit
(docs/decisions/0003-stores.md). After a 429 no request is sent until the time that the Hub asks for has
passed.
"""

from __future__ import annotations

import datetime
import email.utils
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

import msgspec
from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

from deltasync.clouds.environment import check_hub, is_endpoint
from deltasync.clouds.xet import Token, one_line, request_headers
from deltasync.errors import (
    UNREADABLE_JSON,
    ConfigError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
    describe,
)
from deltasync.stores.base import ObjectInfo
from deltasync.stores.replies import Meaning, meaning
from deltasync.stores.retries import Pause

if TYPE_CHECKING:
    import httpx2 as httpx

logger = logging.getLogger(__name__)

# The base error of httpx or httpx2, whichever this huggingface_hub uses.
_TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_TIMEOUT_S = (10.0, 60.0, 60.0, 10.0)  # connect, read, write, wait for a connection
_LIMITED_S = 10.0  # the wait after a 429 that does not say how long
_MOST_REDIRECTS = 5
_LASTING = r"permission|forbidden|denied|not allowed|invalid|quota|storage limit|too large"
_LOGIN = "Set HF_TOKEN or log in with `hf auth login`"

_Result = TypeVar("_Result")


class _Failure(msgspec.Struct):
    path: str
    error: str = "no reason given"


class _BatchReply(msgspec.Struct):
    failed: list[_Failure] = []


class Entry(msgspec.Struct, rename="camel"):
    """A file or a folder of a bucket."""

    type: str
    path: str
    size: int = 0
    xet_hash: str | None = None
    uploaded_at: datetime.datetime | None = None
    mtime: datetime.datetime | None = None


describe(_BatchReply, Entry, Token)


class BucketApi:
    """The bucket `namespace/name`. Each method makes one request, unless its docstring says otherwise.

    All methods raise StoreError if the Hub refuses, TransientStoreError if a retry may succeed, and
    ObjectMissingError if the path or the bucket does not exist.
    """

    def __init__(self, url: str, bucket: str) -> None:
        self._url = url
        self._bucket = bucket
        self._endpoint = constants.ENDPOINT.rstrip("/")
        if not is_endpoint(self._endpoint):
            raise ConfigError(f"HF_ENDPOINT must be https://host or http://host, not {constants.ENDPOINT!r}.")
        self._pauses = {"api": Pause(), "resolvers": Pause()}  # two separate quotas
        self.address = f"{self._endpoint}/api/buckets/{bucket}"

    @property
    def is_scarce(self) -> bool:
        """Whether less than a quarter of a quota is left in this window."""
        return any(pause.is_scarce for pause in self._pauses.values())

    def token(self, scope: str) -> Token:
        """Return a token that may `read` or `write` in the content-addressed store."""
        return self._decoded(self._send("GET", f"{self.address}/xet-{scope}-token"), Token)

    def content(self, path: str) -> ObjectInfo:
        """Return the current size and hash of a path. Follows the redirects of a moved bucket."""
        url = f"{self._endpoint}/buckets/{self._bucket}/resolve/{quote(path, safe='')}"
        headers = {"Accept-Encoding": "identity"}
        for _ in range(_MOST_REDIRECTS):
            response = self._send("HEAD", url, path, headers=headers, follow_redirects=False)
            reply = response.headers
            size = reply.get("X-Linked-Size") or (
                None if response.is_redirect else reply.get("Content-Length")
            )
            if "X-Xet-Hash" in reply and size is not None and size.isdecimal():
                return ObjectInfo(path, int(size), content=reply["X-Xet-Hash"])
            target = urljoin(url, reply.get("Location", url))
            if target == url or urlsplit(target).netloc != urlsplit(url).netloc:
                break
            url = target
        raise StoreError(f"{self._url}: the Hub does not give the content hash of {path}.")

    def page(self, folder: str, query: str) -> tuple[list[Entry], str]:
        """Return one page of a listing, and the query of the next page, empty after the last page."""
        url = f"{self.address}/tree" + (f"/{quote(folder, safe='')}" if folder else "")
        response = self._send("GET", f"{url}?{query}")
        # Only the query of the next page's URL is used, so that the token is sent to no other server.
        next_url = response.links.get("next", {}).get("url", "")
        return self._decoded(response, list[Entry]), urlsplit(next_url).query

    def name(self, path: str, xet_hash: str) -> None:
        """Give uploaded bytes a path."""
        operation = {"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": int(time.time() * 1000)}
        for failure in self._batch([operation]):
            raise self._failure("store", failure.path, failure.error)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete at most a thousand paths. If some fail, a second request asks which of them exist."""
        failures = self._batch([{"type": "deleteFile", "path": path} for path in paths])
        if failures:
            asked = {"paths": [failure.path for failure in failures]}
            left = self._decoded(self._send("POST", f"{self.address}/paths-info", json=asked), list[Entry])
            if left:
                raise self._failure("delete", left[0].path, failures[0].error)

    def exists(self) -> bool:
        """Whether the Hub returns the bucket's metadata. A 404 to another request does not prove that it is
        missing.
        """
        try:
            self._send("GET", self.address)
        except ObjectMissingError:
            return False
        return True

    def create(self) -> None:
        """Create the bucket, private. It is no error if it exists, even if this token has no access to it."""
        try:
            response = self._send("POST", self.address, accepted=409, json={"visibility": "private"})
        except TransientStoreError:
            raise
        except StoreError as error:
            raise StoreError(
                f"The bucket {self._bucket} is missing or hidden from this token, and could not be created: "
                f"{error} "
                f"Create it by hand, use a token with that right, or check HF_ENDPOINT ({self._endpoint})."
            ) from None
        if response.status_code != 409:
            logger.info("created the private bucket %s", self._bucket)

    def _failure(self, verb: str, path: str, reason: str) -> StoreError:
        """Return the error for one operation of a batch. The Hub gives only a sentence as the reason."""
        kind = StoreError if re.search(_LASTING, reason, re.IGNORECASE) else TransientStoreError
        return kind(f"{self._url}: the Hub did not {verb} {path}: {reason.rstrip('.')}.")

    def _batch(self, operations: Sequence[dict[str, object]]) -> Sequence[_Failure]:
        """Apply independent operations and return the failures."""
        lines = b"".join(msgspec.json.encode(operation) + b"\n" for operation in operations)
        headers, url = {"Content-Type": "application/x-ndjson"}, f"{self.address}/batch"
        response = self._send(
            "POST", url, accepted=422, headers=headers, content=lines, follow_redirects=False
        )
        if response.is_redirect:
            raise StoreError(f"{self._url}: the bucket was moved; use its new name.")
        failed = self._decoded(response, _BatchReply).failed
        if response.status_code == 422 and not failed:
            raise StoreError(f"{self._url}: the Hub refused to change the bucket: {_reason(response)}.")
        return failed

    def _send(
        self, method: str, url: str, path: str = "", *, accepted: int = 0, **options: Any
    ) -> httpx.Response:
        """Send a request about `path`, or about the bucket if it is empty. A status from 400 on, but
        `accepted`, raises.
        """
        check_hub()
        pause = self._pauses["resolvers" if path else "api"]
        pause.check()
        headers = request_headers() | options.pop("headers", {})
        try:
            response = get_session().request(
                method, url, headers=headers, **({"timeout": _TIMEOUT_S} | options)
            )
        except OfflineModeIsEnabled:
            raise StoreError(
                f"{self._url} cannot be reached while HF_HUB_OFFLINE is set. Unset it."
            ) from None
        except (_TRANSPORT_ERROR, OSError, RuntimeError) as error:
            raise pause.failed(f"{self._url}: no answer from the Hub: {one_line(error)}.") from error
        except (ImportError, ValueError) as error:
            # a wrong proxy or certificate file, found before anything is sent
            raise ConfigError(f"{self._url}: no request to the Hub can be made: {one_line(error)}.") from None
        limit = parse_ratelimit_headers(response.headers)
        if limit is not None and limit.limit is not None:
            pause.left(limit.remaining / max(1, limit.limit), limit.reset_in_seconds)
        if response.status_code >= 400 and response.status_code != accepted:
            raise self._refused(response, path, "authorization" in headers, pause)
        pause.answered()
        return response

    def _refused(self, response: httpx.Response, path: str, with_token: bool, pause: Pause) -> StoreError:
        """Return our error for a reply with a status from 400 on."""
        status, reason = response.status_code, _reason(response)
        found = meaning(status, response.headers.get("X-Error-Code", ""))
        if status == 404:
            return ObjectMissingError(
                f"hf://buckets/{self._bucket}{'/' if path else ''}{path} does not exist."
            )
        if found is Meaning.THROTTLED:
            wait_s, quota = _limit(response)
            return pause.asked(
                wait_s,
                f"{self._url}: the Hub's rate limit is reached{quota}; no requests for {wait_s:.0f} s: "
                f"{reason}.",
            )
        if found is Meaning.LATER:
            return pause.failed(f"{self._url}: the Hub answered {status}: {reason}.")
        if status == 403:
            return StoreError(
                f"The token lacks a right in {self._url}: {reason}. {_LOGIN}, with a token that has this "
                "right."
            )
        if status != 401:
            return StoreError(f"{self._url}: the Hub answered {status}: {reason}.")
        if not with_token:
            disabled = bool(constants.HF_HUB_DISABLE_IMPLICIT_TOKEN)
            hidden = " HF_HUB_DISABLE_IMPLICIT_TOKEN keeps it from being sent." if disabled else ""
            return StoreError(f"{self._url} needs a token. {_LOGIN}.{hidden}")
        if "expired" in reason:
            return StoreError(f"The Hub's token for {self._url} has expired. {_LOGIN} again.")
        return StoreError(f"The Hub does not accept the token for {self._url}: {reason}. {_LOGIN} again.")

    def _decoded(self, response: httpx.Response, kind: type[_Result]) -> _Result:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except UNREADABLE_JSON as error:
            raise TransientStoreError(
                f"{self._url}: the Hub returned an unexpected response: {error}."
            ) from error


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait in seconds that the header `RateLimit` or `Retry-After` asks for; None without these
    headers.
    """
    limit = parse_ratelimit_headers(headers)
    if limit is not None:
        return float(limit.reset_in_seconds)
    asked = headers.get("Retry-After", "")
    if asked.strip().isdecimal():
        return float(asked)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    except ValueError:
        return None


def _limit(response: httpx.Response) -> tuple[float, str]:
    """Return the wait that a 429 asks for, and the quota in words."""
    limit, wait_s = parse_ratelimit_headers(response.headers), asked_wait_s(response.headers)
    known = limit is not None and limit.limit is not None
    quota = (
        f" ({limit.limit} {limit.resource_type} requests in {limit.window_seconds} s)"
        if limit and known
        else ""
    )
    return _LIMITED_S if wait_s is None else wait_s, quota


def _reason(response: httpx.Response) -> str:
    """Return the reason that the Hub gives, without a full stop."""
    message = response.headers.get("X-Error-Message")
    if message is None:
        try:
            message = msgspec.json.decode(response.content, type=dict[str, Any]).get("error")
        except UNREADABLE_JSON:
            message = None
    return str(message or response.reason_phrase)[:200].rstrip(".")
