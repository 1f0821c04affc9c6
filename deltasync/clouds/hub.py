"""`hf://buckets/namespace/name/prefix`: a Hugging Face Bucket, accessed through the Hub's API and Xet.

The Hub maps the paths of a bucket to hashes. Xet's content-addressed store (hf_xet) maps hashes to bytes.
Requests of one call:

    call                          Hub                                        content-addressed store
    read, small and unchanged     HEAD resolve
    read                          HEAD resolve                               reconstruction, data
    put                           POST batch                                 xorb, shard
    read, known from list or watch  -                                        reconstruction, data
    list, folders                 GET tree, per 1,000 objects or folders
    delete                        POST batch, per 1,000 keys

In addition, each process fetches a read token and a write token about once an hour. "Small" means up to 64
KiB, "unchanged" means equal in the last two reads. HEAD resolve counts against the larger one of the Hub's
quotas. GET resolve would save requests for small objects that changed, but huggingface_hub itself uses HEAD,
and the redirects of a GET are undocumented.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from deltasync import limits
from deltasync.clouds.events import EventWatch
from deltasync.clouds.hub_api import BucketApi, Entry
from deltasync.clouds.xet import Token, Xet
from deltasync.errors import ConfigError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, check_size, is_key
from deltasync.stores.retries import retried

logger = logging.getLogger(__name__)

_RETRIES = 2
_RETRY_DELAY_S = 0.2
_MOST_OPERATIONS = 1000

_URL = re.compile(r"hf://buckets/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+?))?/?", re.ASCII)

_Result = TypeVar("_Result")


def bucket_of(url: str) -> tuple[str, str]:
    """Split `hf://buckets/namespace/name/prefix` into the bucket `namespace/name` and the prefix, which may
    be empty.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"A bucket of the Hub is written hf://buckets/namespace/name/prefix, not {url!r}.")
    return match[1], "" if match[2] is None else check_key(match[2])


class HubStore:
    """A bucket of the Hub, or a prefix in it: `hf://buckets/namespace/name/prefix`. See `Store`.

    The bucket need not exist: reads from a missing bucket find nothing, and the first write creates it,
    private. Token and endpoint are huggingface_hub's (`HF_TOKEN` or `hf auth login`, `HF_ENDPOINT`). Each
    request to the Hub is tried up to three times. No request waits for a rate limit; the error says how long
    to wait (`TransientStoreError.wait_s`).
    """

    can_create = False

    def __init__(self, url: str) -> None:
        bucket, prefix = bucket_of(url)
        self.url = url.rstrip("/")
        self._start = f"{prefix}/" if prefix else ""
        self._api = BucketApi(self.url, bucket)
        self._uploaded: tuple[bytes | memoryview, str] | None = None
        # One per process: a forked child cannot use its parent's. There is no lock, because a child could
        # inherit it held.
        self._xet_of: dict[int, Xet] = {}
        # Small objects by path: (hash, bytes, whether two reads agreed). Head and heartbeats are read far
        # more often than they change.
        self._small: dict[str, tuple[str | None, bytes, bool]] = {}

    @property
    def is_scarce(self) -> bool:
        """Whether little of the account's quota is left, as the Hub's last replies say."""
        return self._api.is_scarce

    def create(self, key: str, data: bytes) -> None:
        """Raise StoreError: the Hub cannot create an object only if it is absent."""
        raise StoreError(
            f"{self.url}/{check_key(key)}: the Hub has no request that creates an object only if it is "
            "absent."
        )

    def upload(self, data: bytes | memoryview) -> None:
        """Upload the bytes of the object that `put` stores next. It then only names them."""
        if self._uploaded is None or self._uploaded[0] is not data:
            self._uploaded = data, self._hash_of(data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Upload the bytes, then give them the object's path, which replaces the object. See `Store.put`."""
        path, uploaded = self._path(key), self._uploaded
        xet_hash = uploaded[1] if uploaded is not None and uploaded[0] is data else self._hash_of(data)
        try:
            _retried(lambda: self._api.name(path, xet_hash))
        except ObjectMissingError:
            self._xet.forget_token("write")
            self._uploaded = None
            raise TransientStoreError(f"{self.url}: the bucket was deleted during the upload.") from None

    def _hash_of(self, data: bytes | memoryview) -> str:
        """Upload bytes and return their hash. A bucket that does not exist is created."""
        try:
            return self._xet.upload(data)
        except ObjectMissingError:
            self._api.create()
        try:
            return self._xet.upload(data)
        except ObjectMissingError:
            raise StoreError(f"{self.url}: the bucket exists, but this token has no access to it.") from None

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        path = self._path(key)
        if known is not None and known.content is not None:
            check_size(f"{self.url}/{key}", known.bytes, most_bytes)
            try:
                return self._xet.download(known, 0, known.bytes)
            except TransientStoreError as error:
                logger.debug("%s Reading the current content of %s.", error, key)
        return self._read(path, most_bytes)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        path = self._path(key)

        def download(info: ObjectInfo) -> bytes:
            if end > info.bytes:
                raise StoreError(f"{self.url}/{key} ends before byte {end}.")
            return self._xet.download(info, start, end)

        return self._current(path, download)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List a folder of the bucket, and match the last part of `prefix` here. See `Store.list`."""
        start = self._start + prefix
        found = self._entries(start.rpartition("/")[0], "recursive=true")
        for entry in sorted(found, key=lambda entry: entry.path):
            if (
                entry.type == "file"
                and entry.path.startswith(start)
                and is_key(entry.path.removeprefix(self._start))
            ):
                stored = entry.uploaded_at or entry.mtime
                modified_s = 0.0 if stored is None else stored.timestamp()
                yield ObjectInfo(entry.path.removeprefix(self._start), entry.size, modified_s, entry.xet_hash)

    def folders(self, prefix: str) -> Sequence[str] | None:
        """List one folder of the bucket. None if the Hub shows no folder in it. See `base.folders`.

        Only the Hub's client says what a listing of one folder has in it; so none is no proof that there is
        none. Folders are also found in a listing of everything in them.
        """
        start = self._start + prefix
        below = [
            f"{entry.path}/" if entry.type == "directory" else entry.path
            for entry in self._entries(start.rpartition("/")[0], "recursive=false")
        ]
        inside = [path.removeprefix(start) for path in below if path.startswith(start)]
        return [*{f"{prefix}{path.split('/')[0]}/" for path in inside if "/" in path}] or None

    def _entries(self, folder: str, query: str) -> Sequence[Entry]:
        """Return all pages of a listing, in the order of the Hub. Paths that only begin like the folder are
        among them.
        """
        found, asked = list[Entry](), set[str]()
        while query:
            asked.add(query)
            entries, query = _retried(functools.partial(self._page, folder, query))
            found += entries
            if query in asked:
                raise StoreError(f"{self.url}: the Hub's listing repeats itself and does not end.")
        return found

    def _page(self, folder: str, query: str) -> tuple[Sequence[Entry], str]:
        """Return a page of a listing. A 404 is an empty listing only if a second request finds no bucket
        either.
        """
        try:
            return self._api.page(folder, query)
        except ObjectMissingError:
            if "cursor" in query or self._api.exists():
                raise TransientStoreError(
                    f"{self.url}: the Hub answered 404 for a bucket that exists."
                ) from None
            return [], ""

    def delete(self, *keys: str) -> None:
        paths = [self._path(key) for key in keys]
        for first in range(0, len(paths), _MOST_OPERATIONS):
            try:
                _retried(functools.partial(self._api.delete, paths[first : first + _MOST_OPERATIONS]))
            except ObjectMissingError:
                if _retried(self._api.exists):
                    raise TransientStoreError(
                        f"{self.url}: the Hub answered 404 for a bucket that exists."
                    ) from None
                return

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> EventWatch:
        """Read the bucket's feed of events in a thread with its own connection. See `Store.watch`."""

        def report(info: ObjectInfo | None) -> None:
            on_change(info and dataclasses.replace(info, key=info.key.removeprefix(self._start)))

        return EventWatch(f"{self._api.address}/events", self._start + prefix, report)

    def _path(self, key: str) -> str:
        return self._start + check_key(key)

    @property
    def _xet(self) -> Xet:
        pid = os.getpid()
        return self._xet_of.get(pid) or self._xet_of.setdefault(
            pid, Xet(self.url, self._api.address, self._token)
        )

    def _token(self, scope: str) -> Token:
        return _retried(lambda: self._api.token(scope))

    def _read(self, path: str, most_bytes: int) -> bytes:
        """Download an object unless its hash equals that of two equal downloads. A single one may have been
        damaged.
        """

        def download(info: ObjectInfo) -> bytes:
            known_hash, known_data, agreed = self._small.get(path, (None, b"", False))
            if agreed and known_hash == info.content:
                return known_data
            check_size(f"{self.url}/{path.removeprefix(self._start)}", info.bytes, most_bytes)
            data = self._xet.download(info, 0, info.bytes)
            if info.bytes <= limits.HUB_SMALL_BYTES:
                self._small.pop(path, None)
                self._small[path] = (info.content, data, (known_hash, known_data) == (info.content, data))
                for oldest in list(self._small)[: -limits.HUB_SMALL_OBJECTS]:
                    self._small.pop(oldest, None)
            return data

        return self._current(path, download)

    def _current(self, path: str, download: Callable[[ObjectInfo], bytes]) -> bytes:
        """Download the current content of a path. On failure try once more if the content has changed
        meanwhile.
        """
        self._xet.check("read")
        info = _retried(lambda: self._api.content(path))
        try:
            return download(info)
        except TransientStoreError as error:
            if error.wait_s:
                raise
            current = _retried(lambda: self._api.content(path))
            if (current.content, current.bytes) == (info.content, info.bytes):
                raise
            return download(current)


def _retried(action: Callable[[], _Result]) -> _Result:
    return retried(action, _RETRIES, _RETRY_DELAY_S, level=logging.DEBUG, longest_s=0.0)
