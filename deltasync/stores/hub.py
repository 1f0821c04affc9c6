"""`hf://buckets/namespace/name/prefix`: a Hugging Face Bucket, by the Hub's own interface and Xet.

A bucket maps paths to hashes (the Hub); the bytes of a hash are somewhere else (Xet's content-addressed store, by hf_xet).
What one call costs in requests:

    call                          Hub                                        content-addressed store
    read, small and unchanged     HEAD resolve
    read                          HEAD resolve                               reconstruction, data
    create                        HEAD resolve, POST batch                   grant, xorb, shard
    put                           POST batch                                 grant, xorb, shard
    read, told by list or watch                                              reconstruction, data
    list                          GET tree, per 1,000 objects
    delete                        POST batch, per 1,000 keys

and about once an hour, by each process, a token to read and one to write. Small is up to 64 KiB, unchanged is since two
reads ago. HEAD resolve counts in the larger one of the Hub's quotas. It is not GET resolve, which would save requests for
small objects that did change: HEAD is what huggingface_hub itself does, and where a GET redirects to is not documented.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

import msgspec
from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from deltasync.errors import (
    UNREADABLE_JSON,
    ConfigError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from deltasync.stores.base import Capabilities, ObjectInfo, check_key, check_size
from deltasync.stores.events import EventWatch
from deltasync.stores.xet import Content, Token, Xet, one_line, request_headers

if TYPE_CHECKING:
    import httpx2 as httpx

logger = logging.getLogger(__name__)

# Of httpx, or of httpx2, whichever this huggingface_hub uses.
_TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]

_TIMEOUT_S = (10.0, 60.0, 60.0, 10.0)  # connect, read, write, wait for a connection
_ONCE_TIMEOUT_S = (3.0, 9.0, 2.0, 1.0)  # with TLS and a body there are two connects and two writes: together REQUEST_S
_ATTEMPTS = 3
_RETRY_DELAY_S = 0.2
_LONGEST_WAIT_S = 30.0
_MOST_OPERATIONS = 1000
_MOST_REDIRECTS = 5
_SMALL_BYTES = 64 << 10
_MOST_SMALL = 64

_URL = re.compile(r"hf://buckets/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+?))?/?", re.ASCII)
_LOGIN = "Set HF_TOKEN or log in with `hf auth login`"

_Result = TypeVar("_Result")


class _Failure(msgspec.Struct):
    path: str
    error: str = "no reason given"


class _BatchReply(msgspec.Struct):
    failed: list[_Failure] = []


class _Entry(msgspec.Struct, rename="camel"):
    type: str
    path: str
    size: int = 0
    xet_hash: str | None = None
    uploaded_at: datetime.datetime | None = None
    mtime: datetime.datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Small:
    """A small object as it was last read, and whether the time before it was the same."""

    xet_hash: str
    data: bytes
    agreed: bool


def bucket_of(url: str) -> tuple[str, str]:
    """The bucket, `namespace/name`, and the prefix, which may be empty, of `hf://buckets/namespace/name/prefix`.

    Raises:
        ConfigError: the URL is not of that form.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"A bucket of the Hub is written hf://buckets/namespace/name/prefix, not {url!r}.")
    return match[1], "" if match[2] is None else check_key(match[2])


def hub_store(url: str) -> HubStore:
    """The store at `hf://buckets/namespace/name` or below a prefix of that bucket.

    Raises:
        ConfigError: as `bucket_of`.
    """
    return HubStore(*bucket_of(url))


class HubStore:
    """Objects in a bucket of the Hub. See `Store`.

    The bucket need not exist: reading from a missing one finds nothing, and the first write creates it, private. The token
    is huggingface_hub's (`HF_TOKEN`, or `hf auth login`), and so is the endpoint (`HF_ENDPOINT`). Every request is tried up
    to three times. `create` only looks first: of two racing writers both may think that they won.

    Args:
        bucket: `namespace/name`.
        prefix: In front of every key, without slashes around it; may be empty.
    """

    capabilities = Capabilities(conditional_put=False, watch=True)

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.url = f"hf://buckets/{bucket}" + (f"/{prefix}" if prefix else "")
        self._bucket = bucket
        self._start = f"{prefix}/" if prefix else ""
        self._endpoint = constants.ENDPOINT.rstrip("/")
        self._api = f"{self._endpoint}/api/buckets/{bucket}"
        # By process, because a forked child cannot use its parent's; lock-free, because it could inherit a held lock.
        self._xet_of: dict[int, Xet] = {}
        # Head and heartbeats are looked at far more often than they change.
        self._small: dict[str, _Small] = {}

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        path = self._path(key)
        if self._exists(path):
            raise ObjectExistsError(f"{self.url}/{key} already exists.")
        self.put(key, data)

    def put(self, key: str, data: bytes, *, guard: Callable[[], None] | None = None) -> None:
        """See `Store.put`. Bytes first, then their name: until that is answered, readers see what was there before."""
        path = self._path(key)
        try:
            xet_hash = _retried(lambda: self._xet.upload(data))
        except ObjectMissingError:
            self._create_bucket()
            xet_hash = _retried(lambda: self._xet.upload(data))
        if guard is None:
            _retried(lambda: self._name(path, xet_hash))
        else:
            guard()
            self._name(path, xet_hash, timeout=_ONCE_TIMEOUT_S, follow_redirects=False)

    def read(self, key: str, most_bytes: int | None = None, known: ObjectInfo | None = None) -> bytes:
        """See `Store.read`."""
        path = self._path(key)
        if known is not None and known.content is not None:
            check_size(f"{self.url}/{key}", known.bytes, most_bytes)
            try:
                return self._xet.download(Content(known.content, known.bytes), 0, known.bytes)
            except TransientStoreError as error:
                logger.debug("%s Looking at what %s names now.", error, key)
        return _retried(lambda: self._read(path, most_bytes))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.read_range`."""
        path = self._path(key)

        def read() -> bytes:
            content = self._content(path)
            if end > content.bytes:
                raise StoreError(f"{self.url}/{key} ends before byte {end}.")
            return self._xet.download(content, start, end)

        return _retried(read)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. The Hub is asked for the folder, and the last part of `prefix` is matched here."""
        start = self._start + prefix
        folder = quote(start.rpartition("/")[0], safe="")
        url = f"{self._api}/tree" + (f"/{folder}" if folder else "")
        found: list[_Entry] = []
        page = "recursive=true"
        try:
            while page:
                entries, page = _retried(lambda page=page: self._page(url, page))  # type: ignore[misc]
                found += entries
        except ObjectMissingError:
            found = []
        for entry in sorted(found, key=lambda entry: entry.path):
            if entry.type == "file" and entry.path.startswith(start):
                stored = entry.uploaded_at or entry.mtime
                modified_s = 0.0 if stored is None else stored.timestamp()
                yield ObjectInfo(entry.path.removeprefix(self._start), entry.size, modified_s, entry.xet_hash)

    def delete(self, *keys: str) -> None:
        """See `Store.delete`."""
        paths = [self._path(key) for key in keys]
        for first in range(0, len(paths), _MOST_OPERATIONS):
            some = paths[first : first + _MOST_OPERATIONS]
            try:
                _retried(lambda some=some: self._delete(some))  # type: ignore[misc]
            except ObjectMissingError:
                return  # no bucket

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> EventWatch:
        """See `Store.watch`: the bucket's feed of events, on a connection and in a thread of its own."""

        def tell(info: ObjectInfo | None) -> None:
            on_change(info and dataclasses.replace(info, key=info.key.removeprefix(self._start)))

        return EventWatch(f"{self._api}/events", self._start + prefix, request_headers, tell)

    def _page(self, url: str, query: str) -> tuple[Sequence[_Entry], str]:
        """One page of a listing, and the query for the next one, empty after the last."""
        response = self._send("GET", f"{url}?{query}")
        # Of the next one's URL only the query counts: the token goes nowhere but to the endpoint.
        following = response.links.get("next", {}).get("url", "")
        return self._decoded(response, Sequence[_Entry]), urlsplit(following).query  # type: ignore[type-abstract]

    def _path(self, key: str) -> str:
        return self._start + check_key(key)

    @property
    def _xet(self) -> Xet:
        return self._xet_of.get(os.getpid()) or self._xet_of.setdefault(os.getpid(), Xet(self.url, self._api, self._token))

    def _token(self, scope: str) -> Token:
        return self._decoded(self._send("GET", f"{self._api}/xet-{scope}-token"), Token)

    def _content(self, path: str) -> Content:
        """What `path` names now."""
        url = f"{self._endpoint}/buckets/{self._bucket}/resolve/{quote(path, safe='')}"
        headers = {"Accept-Encoding": "identity"}
        for _ in range(_MOST_REDIRECTS):
            response = self._send("HEAD", url, path, headers=headers, follow_redirects=False)
            found = response.headers
            size = found.get("X-Linked-Size") or (None if response.is_redirect else found.get("Content-Length"))
            if "X-Xet-Hash" in found and size is not None and size.isdecimal():
                return Content(found["X-Xet-Hash"], int(size))
            target = urljoin(url, found.get("Location", url))
            if target == url or urlsplit(target).netloc != urlsplit(url).netloc:
                break
            url = target  # the bucket was moved
        raise StoreError(f"{self.url}: the Hub does not tell the content hash of {path}.")

    def _exists(self, path: str) -> bool:
        try:
            _retried(lambda: self._content(path))
        except ObjectMissingError:
            return False
        return True

    def _read(self, path: str, most_bytes: int | None = None) -> bytes:
        """Download, unless the path still names what two downloads have agreed upon: one alone may have been damaged."""
        content = self._content(path)
        known = self._small.get(path)
        if known is not None and known.agreed and known.xet_hash == content.xet_hash:
            return known.data
        check_size(f"{self.url}/{path.removeprefix(self._start)}", content.bytes, most_bytes)
        data = self._xet.download(content, 0, content.bytes)
        if content.bytes <= _SMALL_BYTES:
            agreed = known is not None and (known.xet_hash, known.data) == (content.xet_hash, data)
            self._small.pop(path, None)
            self._small[path] = _Small(content.xet_hash, data, agreed)
            for oldest in list(self._small)[:-_MOST_SMALL]:
                self._small.pop(oldest, None)
        return data

    def _name(self, path: str, xet_hash: str, **options: Any) -> None:
        """Give uploaded bytes a name, with one request. `options` as for `_send`."""
        operation = {"type": "addFile", "path": path, "xetHash": xet_hash, "mtime": int(time.time() * 1000)}
        try:
            for failure in self._batch([operation], **options):
                raise TransientStoreError(f"{self.url}: the Hub did not store {failure.path}: {failure.error}.")
        except ObjectMissingError:
            raise self._xet.failed("write", "the bucket was deleted meanwhile") from None

    def _delete(self, paths: Sequence[str]) -> None:
        failures = self._batch([{"type": "deleteFile", "path": path} for path in paths])
        if failures:
            # Were they there at all?
            asked = {"paths": [failure.path for failure in failures]}
            left = self._decoded(self._send("POST", f"{self._api}/paths-info", json=asked), list[_Entry])
            if left:
                raise TransientStoreError(f"{self.url}: the Hub did not delete {left[0].path}: {failures[0].error}.")

    def _batch(self, operations: Sequence[dict[str, object]], **options: Any) -> Sequence[_Failure]:
        """Apply operations, each by itself, and return those that failed."""
        lines = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
        headers = {"Content-Type": "application/x-ndjson"}
        response = self._send("POST", f"{self._api}/batch", accepted=(200, 422), headers=headers, content=lines, **options)
        if response.is_redirect:
            raise StoreError(f"{self.url}: the bucket was moved; use its new name.")
        failed = self._decoded(response, _BatchReply).failed
        if response.status_code == 422 and not failed:
            raise StoreError(f"{self.url}: the Hub refused to change the bucket: {_told(response)}.")
        return failed

    def _create_bucket(self) -> None:
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

    def _send(
        self, method: str, url: str, path: str = "", *, accepted: Sequence[int] = (), **options: Any
    ) -> httpx.Response:
        """One request to the Hub.

        Args:
            method: HTTP verb.
            url: Where.
            path: What it is about, empty for the bucket as a whole.
            accepted: Statuses to return besides success and redirects.
            **options: For `httpx.Client.request`.

        Raises:
            ObjectMissingError: 404.
            TransientStoreError: no answer or one that may pass; waits as long as the Hub asks for, within reason.
            StoreError: anything else; not a matter of trying again.
        """
        headers = request_headers() | options.pop("headers", {})
        try:
            response = get_session().request(method, url, headers=headers, **({"timeout": _TIMEOUT_S} | options))
        except OfflineModeIsEnabled:
            raise StoreError(f"{self.url} cannot be reached while HF_HUB_OFFLINE is set. Unset it.") from None
        except (_TRANSPORT_ERROR, OSError, RuntimeError) as error:
            raise TransientStoreError(f"{self.url}: no answer from the Hub: {one_line(error)}.") from error
        status = response.status_code
        if status < 400 or status in accepted:
            return response
        told = _told(response)
        if status == 404:
            raise ObjectMissingError(f"hf://buckets/{self._bucket}{'/' if path else ''}{path} does not exist.")
        if status == 401 and "authorization" not in headers:
            raise StoreError(f"{self.url} needs a token. {_LOGIN}.")
        if status == 401 and "expired" in told:
            raise StoreError(f"The Hub's token for {self.url} has expired. {_LOGIN} anew.")
        if status == 401:
            raise StoreError(f"The Hub does not accept the token for {self.url}: {told}. {_LOGIN} anew.")
        if status == 403:
            raise StoreError(f"The token may not do this in {self.url}: {told}. {_LOGIN}, with a token that may.")
        if not _may_pass(status):
            raise StoreError(f"{self.url}: the Hub answered {status}: {told}.")
        if status == 429:
            time.sleep(min(_asked_wait_s(response), _LONGEST_WAIT_S))
        raise TransientStoreError(f"{self.url}: the Hub answered {status}: {told}.")

    def _decoded(self, response: httpx.Response, kind: type[_Result]) -> _Result:
        try:
            return msgspec.json.decode(response.content, type=kind)
        except UNREADABLE_JSON as error:
            raise TransientStoreError(f"{self.url}: the Hub answered something else than expected: {error}.") from error


def _retried(action: Callable[[], _Result]) -> _Result:
    """Run `action`, a few times more if it fails by what may pass."""
    for attempt in range(1, _ATTEMPTS):
        try:
            return action()
        except TransientStoreError as error:
            logger.debug("%s Trying again.", error)
            time.sleep(_RETRY_DELAY_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
    return action()


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
