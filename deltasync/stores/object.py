"""Stores on top of obstore, with its errors translated to ours; `memory://`, and `file://` on Windows."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import InvalidPathError
from obstore.store import LocalStore, MemoryStore

from deltasync import limits
from deltasync.config import client_threads
from deltasync.errors import ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, check_size, is_key
from deltasync.stores.client_errors import (
    CLIENT_ERRORS,
    has_expired,
    has_timed_out,
    may_be_renewed,
    translate,
)
from deltasync.stores.replies import Operation, is_panic
from deltasync.threads import NO_FILES, NO_THREADS, daemon

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)

LARGEST_BYTES = 5 << 30
"""S3's limit for one put. Multipart uploads may be larger, but not every server honours their
precondition.
"""

PROMPT_S = 5.0
"""How long an answer takes at most that a connection still carries. Without one in this time a request is sent
once more over a new connection, with all the time that it may take.
"""

_SPARE_THREADS = 4
_SPARE_FILES = 16  # of the client's runtime, which never works again where it could not start

_Result = TypeVar("_Result")

_process: int | None = None
"""The process that used obstore first. A forked child has no copy of its threads, so calls there would
hang.
"""


class _NoAnswerError(TransientStoreError):
    """A request had no answer in time."""


class ObstoreStore:
    """A store that uses one of obstore's clients. See `Store`."""

    can_create = True
    is_scarce = False
    _answered = False
    _is_prompt = True  # the last answer, or the one that was waited for in vain, came within `PROMPT_S`
    # how often credentials were read again; the last of these counts that was accepted
    _login, _accepted = 0, -1

    def __init__(self, url: str, client: ObjectStore) -> None:
        self.url = url
        self._opened = client

    @functools.cached_property
    def _warned(self) -> set[str]:
        return set()

    def client(self, upload_bytes: int = 0, is_long: bool = False) -> ObjectStore:
        """Return the client for a body of this size. `is_long`: the answer may take the store some time."""
        mark_process()
        return self._opened

    def create(self, key: str, data: bytes) -> None:
        """Send one put with If-None-Match. See `Store.create`."""
        self._check_size(key, len(data))
        with self._mapped(key, "create"):
            obstore.put(self.client(len(data)), key, data, mode="create")

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._check_size(key, len(data))

        def send() -> None:
            obstore.put(self.client(len(data)), key, data, mode="overwrite", use_multipart=False)

        self._repeated(key, "put", send)

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        """Read the object, and check its announced size and the bytes that arrive. See `Store.read`."""
        check_key(key)
        place = self._place(key)

        def receive() -> bytes:
            pieces, size = [], 0
            reply = obstore.get(self.client(), key)
            check_size(place, reply.meta["size"], most_bytes)
            for piece in reply.stream(min(most_bytes + 1, limits.STREAM_BYTES)):
                pieces.append(piece)
                size += len(piece)
                check_size(place, size, most_bytes)
            return b"".join(pieces)

        return self._repeated(key, "read", receive)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        check_key(key)
        data = self._repeated(
            key, "read", lambda: bytes(obstore.get_range(self.client(), key, start=start, end=end))
        )
        if len(data) < end - start:
            raise StoreError(f"{self._place(key)} ends before byte {end}.")
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List a folder with obstore, and match the last part of `prefix` here. See `Store.list`."""
        folder = prefix.rpartition("/")[0]
        found = self._repeated(prefix, "list", lambda: self._listed_around(folder))
        yield from (found[key] for key in sorted(found) if key.startswith(prefix) and is_key(key))

    def _listed_around(self, folder: str) -> dict[str, ObjectInfo]:
        """List a folder without the keys of other programs that obstore refuses, such as `a//b` and
        `a/../b`.
        """
        try:
            return self._listed(folder)
        except InvalidPathError:
            pass  # a page with such a key is lost: list its folder's neighbours one by one
        try:
            level = obstore.list_with_delimiter(self.client(is_long=True), folder or None)
        except InvalidPathError as error:
            # it is in this folder itself; such keys sort before ours, by their next character
            message = str(translate(error, self._place(folder), "list"))
            if message not in self._warned:
                self._warned.add(message)
                logger.warning("%s It is passed over.", message)
            return self._listed(folder, after=f"{folder}/0" if folder else "0")
        found = _infos(level["objects"])
        for inner in level["common_prefixes"]:
            found |= self._listed_around(inner)
        return found

    def _listed(self, folder: str, after: str | None = None) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        client = self.client(is_long=True)
        for page in obstore.list(client, prefix=folder or None, offset=after, chunk_size=1000):
            before = len(found)
            found |= _infos(page)
            if page and len(found) == before:
                raise StoreError(
                    f"{self._place(folder)}: the store's listing repeats itself and does not end."
                )
        return found

    def folders(self, prefix: str) -> Sequence[str] | None:
        """List with a delimiter. None where a key of another program hides the others. See `base.folders`."""

        def listed() -> Sequence[str] | None:
            try:
                level = obstore.list_with_delimiter(self.client(is_long=True), prefix.rstrip("/"))
            except InvalidPathError:
                return None
            return [f"{folder}/" for folder in level["common_prefixes"]]

        return self._repeated(prefix, "list", listed)

    def delete(self, *keys: str) -> None:
        """Delete many keys in one request if the store supports it. See `Store.delete`."""
        for key in keys:
            check_key(key)
        if not keys:
            return
        try:
            self._delete(keys)
        except ObjectMissingError:
            # If the client deletes one by one, a missing object has stopped it.
            for key in keys:
                with contextlib.suppress(ObjectMissingError):
                    self._delete([key])

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> None:
        """Return None: these stores cannot watch."""

    def _delete(self, keys: Sequence[str]) -> None:
        self._repeated(keys[0], "delete", lambda: obstore.delete(self.client(is_long=True), list(keys)))

    def _check_size(self, key: str, size: int) -> None:
        check_key(key)
        if size > LARGEST_BYTES:
            raise StoreError(f"{self._place(key)} has {size} bytes; one put is limited to 5 GiB.")

    def _place(self, key: str) -> str:
        """Return the key's URL without options, for messages."""
        return f"{self.url.partition('?')[0].rstrip('/')}/{key}"

    def _watched(self, key: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def connect_again(self) -> None:
        """Read the credentials again, and open new connections, for the next request."""

    def _repeated(self, key: str, operation: Operation, action: Callable[[], _Result]) -> _Result:
        """Send a request, and once more over a new connection if it had no answer in time."""
        try:
            with self._mapped(key, operation):
                return action()
        except _NoAnswerError as error:
            logger.warning("%s Trying once more over a new connection.", error)
        with self._mapped(key, operation):
            return action()

    @contextlib.contextmanager
    def _mapped(self, key: str, operation: Operation) -> Iterator[None]:
        login, before = self._login, time.monotonic()
        try:
            with self._watched(key):
                yield
            self._answered, self._accepted = True, login
            self._is_prompt = self._is_prompt or time.monotonic() - before < PROMPT_S
        except CLIENT_ERRORS as error:
            found = translate(error, self._place(key), operation, self._answered)
            if has_expired(error) and (login < self._login or self._accepted == login):
                # they were accepted before, and may have been renewed
                found = TransientStoreError(str(found))
            timed_out = isinstance(found, TransientStoreError) and has_timed_out(error)
            self._is_prompt = self._is_prompt and not timed_out
            if (may_be_renewed(error) or timed_out) and login == self._login:
                self._login += 1
                self.connect_again()
            raise _NoAnswerError(str(found)) if timed_out else found from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise translate(error, self._place(key), operation, self._answered) from None


class PortableStore(ObstoreStore):
    """`file://` on Windows, where files cannot be opened relative to a folder. The directory is created on
    first use.

    Unlike `local.LocalStore`, this store does not sync: a power failure may lose a version after `wait`
    returned. It follows links, so no other user may have write access to the directory.
    """

    def __init__(self, root: str) -> None:
        self.url = Path(root).as_uri()
        self._root = root
        self._local: ObjectStore | None = None

    def client(self, upload_bytes: int = 0, is_long: bool = False) -> ObjectStore:
        """Return the client for the directory."""
        if self._local is None:
            self._local = LocalStore(self._root, mkdir=True, automatic_cleanup=True)
        return self._local


def _infos(found: Sequence[ObjectMeta]) -> dict[str, ObjectInfo]:
    return {
        meta["path"]: ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
        for meta in found
    }


_in_memory: dict[str, ObstoreStore] = {}


def memory_store(name: str) -> ObstoreStore:
    """Return this process's store with that name, created empty on first use."""
    return _in_memory.setdefault(name, ObstoreStore(f"memory://{name}", MemoryStore()))


def _try_threads() -> None:
    """Start as many threads as the client's runtime does. Where it cannot, it panics, and never works in this
    process again.

    Raises:
        TransientStoreError: a limit is reached.
    """
    ends, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(client_threads() + _SPARE_THREADS):
            thread = daemon("fetch", ends.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:
        raise TransientStoreError(f"The client of object stores cannot start: {NO_THREADS}.") from None
    finally:
        ends.set()
        for thread in started:
            thread.join()


def check_files(spare: int = 1) -> None:
    """Open this many files for a moment, because the client says of an error only that it could not be built.

    Raises:
        TransientStoreError: a limit is reached.
    """
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(spare):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError:
            raise TransientStoreError(f"The client of object stores cannot start: {NO_FILES}.") from None


def mark_process(needs_threads: bool = False) -> None:
    """Record that this process uses obstore. Raise StoreError if the client has threads, which a forked
    process lacks.
    """
    global _process
    if _process is None:
        check_files(_SPARE_FILES)
        _try_threads()
        _process = os.getpid()
    elif needs_threads and _process != os.getpid():
        raise StoreError(
            "This process was forked from one that had used an object store, whose client would hang here. "
            "Start processes with 'spawn' or 'forkserver', or use the store only after forking."
        )
