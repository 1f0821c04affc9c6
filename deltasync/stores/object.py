"""Stores on top of obstore: its errors become ours. Also `memory://`, and `file://` on Windows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import LocalStore, MemoryStore

from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, check_size
from deltasync.stores.retries import may_pass

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LARGEST_BYTES = 5 << 30
"""The limit of S3 for one put. Multipart uploads may be larger, but not every server honours their precondition."""
_PIECE_BYTES = 8 << 20

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_RACE = ("ConditionalRequestConflict", "OperationAborted")
_BUSY = ("RequestTimeout", "SlowDown", "ServerBusy")
_HINTS = {
    "ExpiredToken": "The session token has expired: renew the credentials.",
    "ExpiredTokenException": "The session token has expired: renew the credentials.",
    "InvalidToken": "The session token is not valid: renew the credentials.",
    "TokenRefreshRequired": "The session token has expired: renew the credentials.",
    "InvalidAccessKeyId": "The access key id is unknown there: check AWS_ACCESS_KEY_ID and the endpoint.",
    "SignatureDoesNotMatch": "The secret does not belong to the access key: check AWS_SECRET_ACCESS_KEY.",
    "RequestTimeTooSkewed": "This machine's clock is off by too much: set it.",
    "AuthorizationHeaderMalformed": "The region is not the bucket's: check region= and AWS_REGION.",
    "QuotaExceeded": "Delete something, or have the quota raised.",
}
_DENIED = "Check the credentials, and that they may list the bucket and get, put and delete objects in it."

_process: int | None = None
"""The process that used obstore first. A forked child does not have its threads, so calls there would hang."""


class ObstoreStore:
    """A store whose client is one of obstore's. See `Store`."""

    can_create = True

    def __init__(self, url: str, client: ObjectStore) -> None:
        self.url = url
        self._opened = client

    def client(self, upload_bytes: int = 0, once: bool = False) -> ObjectStore:
        """Return the client for a body of this size. With `once`, it does not retry and gives up after `REQUEST_S`."""
        mark_process()
        return self._opened

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: one put with If-None-Match, whatever the size."""
        with self._sending(key, len(data)):
            obstore.put(self.client(len(data)), key, data, mode="create")

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        with self._sending(key, len(data)):
            client = self.client(len(data), once=guard is not None)
        if guard is not None:
            with contextlib.suppress(obstore_errors.BaseError, FileNotFoundError):
                obstore.list(client, prefix="probe").collect()  # connects, and fetches credentials
            guard()
        with self._mapped(key):
            obstore.put(client, key, data, mode="overwrite", use_multipart=False)

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        """See `Store.read`. Both the announced size and the bytes that arrive are checked."""
        check_key(key)
        place, pieces, size = self._place(key), [], 0
        with self._mapped(key):
            reply = obstore.get(self.client(), key)
            check_size(place, reply.meta["size"], most_bytes)
            for piece in reply.stream(min(most_bytes + 1, _PIECE_BYTES)):
                pieces.append(piece)
                size += len(piece)
                check_size(place, size, most_bytes)
        return b"".join(pieces)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        check_key(key)
        with self._mapped(key):
            data = bytes(obstore.get_range(self.client(), key, start=start, end=end))
        if len(data) < end - start:
            raise StoreError(f"{self._place(key)} ends before byte {end}.")
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. obstore lists folders, so the last part of `prefix` is matched here."""
        folder = prefix.rpartition("/")[0]
        with self._mapped(prefix):
            found = [
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self.client(), prefix=folder or None, chunk_size=1000)
                for meta in page
                if meta["path"].startswith(prefix) and meta["path"]  # consoles leave an empty object for a "folder"
            ]
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, *keys: str) -> None:
        """See `Store.delete`: many keys in one request, where the store can."""
        for key in keys:
            check_key(key)
        if not keys:
            return
        try:
            self._delete(keys)
        except ObjectMissingError:
            # Where the client deletes one by one, a missing object may have stopped it.
            for key in keys:
                with contextlib.suppress(ObjectMissingError):
                    self._delete([key])

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> None:
        """See `Store.watch`; these stores cannot."""

    def _delete(self, keys: Sequence[str]) -> None:
        with self._mapped(keys[0]):
            obstore.delete(self.client(), list(keys))

    @contextlib.contextmanager
    def _sending(self, key: str, size: int) -> Iterator[None]:
        check_key(key)
        if size > LARGEST_BYTES:
            raise StoreError(f"{self._place(key)} has {size} bytes, but one put takes 5 GiB; lower shard_bytes.")
        with self._mapped(key):
            yield

    def _place(self, key: str) -> str:
        """Return the key's URL without options, for messages."""
        return f"{self.url.partition('?')[0]}/{key}"

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """Raise ours for obstore's errors, which are not kept as causes: they hold whole requests, also for credentials."""
        try:
            yield
        except (obstore_errors.BaseError, FileNotFoundError) as error:
            raise translate(error, self._place(key)) from None


class PortableStore(ObstoreStore):
    """`file://` on Windows, where files cannot be opened relative to a folder. The directory is created on first use.

    Unlike `local.LocalStore`, this does not sync: a power failure may lose a version after `wait` returned. It follows
    links, so nobody else may have write access to the directory.
    """

    def __init__(self, root: str) -> None:
        self.url = Path(root).as_uri()
        self._root = root
        self._local: ObjectStore | None = None

    def client(self, upload_bytes: int = 0, once: bool = False) -> ObjectStore:
        """See `ObstoreStore.client`."""
        if self._local is None:
            self._local = LocalStore(self._root, mkdir=True, automatic_cleanup=True)
        return self._local


_in_memory: dict[str, ObstoreStore] = {}


def memory_store(name: str) -> ObstoreStore:
    """Return this process's store of that name, created empty on first use."""
    return _in_memory.setdefault(name, ObstoreStore(f"memory://{name}", MemoryStore()))


def mark_process(needs_threads: bool = False) -> None:
    """Record that this process uses obstore.

    Args:
        needs_threads: Whether the client has threads.

    Raises:
        StoreError: the client has threads, and this process was forked from one that used obstore.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    elif needs_threads and _process != os.getpid():
        raise StoreError(
            "This process was forked from one that had used an object store, and its client would hang here. "
            "Start processes by 'spawn' or 'forkserver', or use the store only after forking."
        )


def translate(error: Exception, place: str) -> StoreError:
    """Return our error for one of obstore's about the object at `place`."""
    message, _, internals = str(error).partition("\n\nDebug source")
    status = re.search(r"status code: ((\d+)[^:]*)", message)
    code = re.search(r"<Code>(\w+)</Code>", message)
    number, name = int(status[2]) if status else 0, code[1] if code else ""
    if status:
        answer = f"the store answered {status[1]}{f' ({name})' if name else ''}"
    else:
        reason = re.search(r'(?:message|error): "([^"]*)"|\b(TimedOut)\b', internals)
        tail = re.sub(r"\?\S*", "", message.rpartition(" - ")[2]).strip()  # a query may hold credentials
        server = re.search(r"https?://[^/\s]+", message) if "kind: Connect," in internals else None
        where = f" at {server[0]}" if server else ""
        answer = tail + (f" ({reason[1] or 'timed out'}{where})" if reason else "")

    if name in _NO_BUCKET:
        return StoreError(f"{place}: there is no such bucket; create it, or check its name, the region and the endpoint.")
    if isinstance(error, obstore_errors.AlreadyExistsError):
        if name in _RACE:
            return TransientStoreError(f"{place}: another request was writing it ({name}).")
        return ObjectExistsError(f"{place} already exists.")
    if isinstance(error, FileNotFoundError | obstore_errors.NotFoundError):
        return ObjectMissingError(f"{place} does not exist.")
    if name in _HINTS:
        return StoreError(f"{place}: {answer}. {_HINTS[name]}")
    if "/latest/api/token" in message or "/latest/meta-data" in message:
        return TransientStoreError(
            f"{place}: no credentials are set (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), and this machine's role could not "
            f"be asked: {answer}."
        )
    if number in (401, 403):
        return StoreError(f"{place}: {answer}. {_DENIED}")
    certificate = re.search(r"InvalidCertificate\(\s*(\w+)", internals)
    if certificate:
        return StoreError(
            f"{place}: the server's certificate is not trusted ({certificate[1]}). If an authority of your own signed it, "
            "name its file in SSL_CERT_FILE."
        )
    if "redirect without LOCATION" in message:
        return StoreError(f"{place}: the bucket is in another region; check region= and AWS_REGION.")
    refused = number >= 400 and not may_pass(number) and name not in _BUSY
    lasting = refused or not isinstance(error, obstore_errors.GenericError)
    return (StoreError if lasting else TransientStoreError)(f"{place}: {answer}.")
