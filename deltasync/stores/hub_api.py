"""Requests about one bucket to the Hub, each made once; its refusals and what it does not answer as our errors.

huggingface_hub gives the session and its headers and makes the bucket. Its batch call is not used: it uploads as well, tries
five times more and waits without an end, while what names a version is one request that is over after a time (`Store.put`).
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

import msgspec
from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from deltasync.errors import UNREADABLE_JSON, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo
from deltasync.stores.xet import Token, one_line, request_headers

if TYPE_CHECKING:
    import httpx2 as httpx

logger = logging.getLogger(__name__)

# Of httpx, or of httpx2, whichever this huggingface_hub uses.
_TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_TIMEOUT_S = (10.0, 60.0, 60.0, 10.0)  # connect, read, write, wait for a connection
_ONCE_TIMEOUT_S = (3.0, 9.0, 2.0, 1.0)  # with TLS and a body there are two connects and two writes: together REQUEST_S
_LONGEST_WAIT_S = 30.0
_MOST_REDIRECTS = 5
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


class BucketApi:
    """A bucket by its paths. Each method makes one request, unless it says otherwise.

    All raise StoreError for what the Hub refuses, TransientStoreError for what may pass, and ObjectMissingError for what is
    not there, the bucket included.

    Args:
        url: The store's, for messages.
        bucket: `namespace/name`.
    """

    def __init__(self, url: str, bucket: str) -> None:
        self._url = url
        self._bucket = bucket
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self.address = f"{self._endpoint}/api/buckets/{bucket}"

    def token(self, scope: str) -> Token:
        """What opens the content-addressed store to `read` or to `write`."""
        return self._decoded(self._send("GET", f"{self.address}/xet-{scope}-token"), Token)

    def content(self, path: str) -> ObjectInfo:
        """What a path names now, by its hash. Follows the bucket, if it was moved."""
        url = f"{self._endpoint}/buckets/{self._bucket}/resolve/{quote(path, safe='')}"
        headers = {"Accept-Encoding": "identity"}
        for _ in range(_MOST_REDIRECTS):
            response = self._send("HEAD", url, path, headers=headers, follow_redirects=False)
            found = response.headers
            size = found.get("X-Linked-Size") or (None if response.is_redirect else found.get("Content-Length"))
            if "X-Xet-Hash" in found and size is not None and size.isdecimal():
                return ObjectInfo(path, int(size), content=found["X-Xet-Hash"])
            target = urljoin(url, found.get("Location", url))
            if target == url or urlsplit(target).netloc != urlsplit(url).netloc:
                break
            url = target
        raise StoreError(f"{self._url}: the Hub does not tell the content hash of {path}.")

    def page(self, folder: str, query: str) -> tuple[Sequence[Entry], str]:
        """One page of a listing, and the query for the next one, empty after the last."""
        url = f"{self.address}/tree" + (f"/{quote(folder, safe='')}" if folder else "")
        response = self._send("GET", f"{url}?{query}")
        # Of the next one's URL only the query counts: the token goes nowhere but to the endpoint.
        following = response.links.get("next", {}).get("url", "")
        return self._decoded(response, Sequence[Entry]), urlsplit(following).query  # type: ignore[type-abstract]

    def name(self, path: str, xet_hash: str, once: bool = False) -> None:
        """Give uploaded bytes a name; `once` for a request that is over after `REQUEST_S`."""
        operation = {"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": int(time.time() * 1000)}
        options = {"timeout": _ONCE_TIMEOUT_S, "follow_redirects": False} if once else {}
        for failure in self._batch([operation], **options):
            raise TransientStoreError(f"{self._url}: the Hub did not store {failure.path}: {failure.error}.")

    def delete(self, paths: Sequence[str]) -> None:
        """Take paths away, at most a thousand; if some could not be, one more request asks whether they are there."""
        failures = self._batch([{"type": "deleteFile", "path": path} for path in paths])
        if failures:
            asked = {"paths": [failure.path for failure in failures]}
            left = self._decoded(self._send("POST", f"{self.address}/paths-info", json=asked), list[Entry])
            if left:
                raise TransientStoreError(f"{self._url}: the Hub did not delete {left[0].path}: {failures[0].error}.")

    def create(self) -> None:
        """Make the bucket, private."""
        try:
            HfApi(endpoint=self._endpoint).create_bucket(self._bucket, private=True, exist_ok=True)
        except HfHubHTTPError as error:
            status = error.response.status_code
            kind = TransientStoreError if _may_pass(status) else StoreError
            raise kind(
                f"The bucket {self._bucket} does not exist and could not be created: {status} {_told(error.response)}. "
                "Create it by hand, or use a token that may."
            ) from None
        except (_TRANSPORT_ERROR, OSError, RuntimeError) as error:
            raise TransientStoreError(f"The bucket {self._bucket} could not be created: {one_line(error)}.") from error
        logger.info("created the private bucket %s", self._bucket)

    def _batch(self, operations: Sequence[dict[str, object]], **options: Any) -> Sequence[_Failure]:
        """Apply operations, each by itself, and return those that failed."""
        lines = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
        options |= {"headers": {"Content-Type": "application/x-ndjson"}, "content": lines}
        response = self._send("POST", f"{self.address}/batch", accepted=422, **options)
        if response.is_redirect:
            raise StoreError(f"{self._url}: the bucket was moved; use its new name.")
        failed = self._decoded(response, _BatchReply).failed
        if response.status_code == 422 and not failed:
            raise StoreError(f"{self._url}: the Hub refused to change the bucket: {_told(response)}.")
        return failed

    def _send(self, method: str, url: str, path: str = "", *, accepted: int = 0, **options: Any) -> httpx.Response:
        """One request about `path`, empty for the bucket; a status of 400 or more is refused, but for `accepted`."""
        headers = request_headers() | options.pop("headers", {})
        try:
            response = get_session().request(method, url, headers=headers, **({"timeout": _TIMEOUT_S} | options))
        except OfflineModeIsEnabled:
            raise StoreError(f"{self._url} cannot be reached while HF_HUB_OFFLINE is set. Unset it.") from None
        except (_TRANSPORT_ERROR, OSError, RuntimeError) as error:
            raise TransientStoreError(f"{self._url}: no answer from the Hub: {one_line(error)}.") from error
        if response.status_code >= 400 and response.status_code != accepted:
            raise self._refused(response, path, "authorization" in headers)
        return response

    def _refused(self, response: httpx.Response, path: str, with_token: bool) -> StoreError:
        """Our error for a refusal. Before one that asks for patience it waits as long as it asks for, within reason."""
        status, told = response.status_code, _told(response)
        if status == 404:
            return ObjectMissingError(f"hf://buckets/{self._bucket}{'/' if path else ''}{path} does not exist.")
        if _may_pass(status):
            if status == 429:
                time.sleep(min(_asked_wait_s(response), _LONGEST_WAIT_S))
            return TransientStoreError(f"{self._url}: the Hub answered {status}: {told}.")
        if status == 403:
            return StoreError(f"The token may not do this in {self._url}: {told}. {_LOGIN}, with a token that may.")
        if status != 401:
            return StoreError(f"{self._url}: the Hub answered {status}: {told}.")
        if not with_token:
            return StoreError(f"{self._url} needs a token. {_LOGIN}.")
        if "expired" in told:
            return StoreError(f"The Hub's token for {self._url} has expired. {_LOGIN} anew.")
        return StoreError(f"The Hub does not accept the token for {self._url}: {told}. {_LOGIN} anew.")

    def _decoded(self, response: httpx.Response, kind: type[_Result]) -> _Result:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except UNREADABLE_JSON as error:
            raise TransientStoreError(f"{self._url}: the Hub returned an unexpected response: {error}.") from error


def _may_pass(status: int) -> bool:
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505, 507))


def _asked_wait_s(response: httpx.Response) -> float:
    """How long the Hub asks to wait: `Retry-After: 5`, or `RateLimit: "api";r=0;t=5`."""
    told = response.headers.get("Retry-After", "") + response.headers.get("RateLimit", "")
    match = re.search(r"^(\d+)|;\s*t=(\d+)", told)
    return float(match[1] or match[2]) if match else 0.0


def _told(response: httpx.Response) -> str:
    """What the Hub says is wrong, without a full stop."""
    message = response.headers.get("X-Error-Message")
    if message is None:
        try:
            message = msgspec.json.decode(response.content, type=dict[str, Any]).get("error")
        except UNREADABLE_JSON:
            message = None
    return str(message or response.reason_phrase)[:200].rstrip(".")
