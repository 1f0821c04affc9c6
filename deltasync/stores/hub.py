"""`hf://buckets/namespace/name/prefix`: a Hugging Face Bucket, by the Hub's own interface and Xet.

A bucket maps paths to hashes (the Hub); the bytes of a hash are somewhere else (Xet's content-addressed store, by hf_xet).
What one call costs in requests:

    call                          Hub                                        content-addressed store
    read, small and unchanged     HEAD resolve
    read                          HEAD resolve                               reconstruction, data
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
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltasync.errors import ConfigError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, check_size
from deltasync.stores.events import EventWatch
from deltasync.stores.hub_api import BucketApi, Entry
from deltasync.stores.retries import retried
from deltasync.stores.xet import Xet

logger = logging.getLogger(__name__)

_RETRIES = 2
_RETRY_DELAY_S = 0.2
_MOST_OPERATIONS = 1000
_SMALL_BYTES = 64 << 10
_MOST_SMALL = 64

_URL = re.compile(r"hf://buckets/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+?))?/?", re.ASCII)

_Result = TypeVar("_Result")


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
    to three times.

    Args:
        bucket: `namespace/name`.
        prefix: In front of every key, without slashes around it; may be empty.
    """

    can_create = False

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.url = f"hf://buckets/{bucket}" + (f"/{prefix}" if prefix else "")
        self._start = f"{prefix}/" if prefix else ""
        self._api = BucketApi(self.url, bucket)
        # By process, because a forked child cannot use its parent's; lock-free, because it could inherit a held lock.
        self._xet_of: dict[int, Xet] = {}
        # Head and heartbeats are looked at far more often than they change: by path (hash, bytes, whether read twice).
        self._small: dict[str, tuple[str | None, bytes, bool]] = {}

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`, which is not for a bucket: the Hub does not decide which one of two writers wins.

        Raises:
            StoreError: always.
        """
        raise StoreError(f"{self.url}/{check_key(key)} cannot be created only if it is absent: the Hub has no such request.")

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        """See `Store.put`. Bytes first, then their name: until that is answered, readers see what was there before."""
        path = self._path(key)
        try:
            xet_hash = _retried(lambda: self._xet.upload(data))
        except ObjectMissingError:
            self._api.create()
            xet_hash = _retried(lambda: self._xet.upload(data))
        if guard is not None:
            guard()
        try:
            if guard is None:
                _retried(lambda: self._api.name(path, xet_hash))
            else:
                self._api.name(path, xet_hash, once=True)
        except ObjectMissingError:
            raise self._xet.failed("write", "the bucket was deleted meanwhile") from None

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        path = self._path(key)
        if known is not None and known.content is not None:
            check_size(f"{self.url}/{key}", known.bytes, most_bytes)
            try:
                return self._xet.download(known, 0, known.bytes)
            except TransientStoreError as error:
                logger.debug("%s Looking at what %s names now.", error, key)
        return _retried(lambda: self._read(path, most_bytes))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            named = self._api.content(path)
            if end > named.bytes:
                raise StoreError(f"{self.url}/{key} ends before byte {end}.")
            return self._xet.download(named, start, end)

        return _retried(read)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. The Hub is asked for the folder, and the last part of `prefix` is matched here."""
        start = self._start + prefix
        folder = start.rpartition("/")[0]
        found: list[Entry] = []
        page = "recursive=true"
        try:
            while page:
                entries, page = _retried(lambda page=page: self._api.page(folder, page))  # type: ignore[misc]
                found += entries
        except ObjectMissingError:
            found = []
        for entry in sorted(found, key=lambda entry: entry.path):
            if entry.type == "file" and entry.path.startswith(start):
                stored = entry.uploaded_at or entry.mtime
                modified_s = 0.0 if stored is None else stored.timestamp()
                yield ObjectInfo(entry.path.removeprefix(self._start), entry.size, modified_s, entry.xet_hash)

    def delete(self, *keys: str) -> None:
        paths = [self._path(key) for key in keys]
        for first in range(0, len(paths), _MOST_OPERATIONS):
            some = paths[first : first + _MOST_OPERATIONS]
            try:
                _retried(lambda some=some: self._api.delete(some))  # type: ignore[misc]
            except ObjectMissingError:
                return  # no bucket

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> EventWatch:
        """See `Store.watch`: the bucket's feed of events, on a connection and in a thread of its own."""

        def tell(info: ObjectInfo | None) -> None:
            on_change(info and dataclasses.replace(info, key=info.key.removeprefix(self._start)))

        return EventWatch(f"{self._api.address}/events", self._start + prefix, tell)

    def _path(self, key: str) -> str:
        return self._start + check_key(key)

    @property
    def _xet(self) -> Xet:
        made = self._xet_of.get(os.getpid())
        return made or self._xet_of.setdefault(os.getpid(), Xet(self.url, self._api.address, self._api.token))

    def _read(self, path: str, most_bytes: int) -> bytes:
        """Download, unless the path still names what two downloads have agreed upon: one alone may have been damaged."""
        named = self._api.content(path)
        known_hash, known_data, agreed = self._small.get(path, (None, b"", False))
        if agreed and known_hash == named.content:
            return known_data
        check_size(f"{self.url}/{path.removeprefix(self._start)}", named.bytes, most_bytes)
        data = self._xet.download(named, 0, named.bytes)
        if named.bytes <= _SMALL_BYTES:
            self._small.pop(path, None)
            self._small[path] = (named.content, data, (known_hash, known_data) == (named.content, data))
            for oldest in list(self._small)[:-_MOST_SMALL]:
                self._small.pop(oldest, None)
        return data


def _retried(action: Callable[[], _Result]) -> _Result:
    return retried(action, _RETRIES, _RETRY_DELAY_S, level=logging.DEBUG)
