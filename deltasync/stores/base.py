"""The interface of a store: the methods that a channel needs, and their guarantees.

Every store passes the contract in `tests/contract/store_contract.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from deltasync.errors import ConfigError, CorruptDataError

# The rules of the strictest store (the Hub's S3 gateway) hold for all stores. No part may start with a dot:
# this excludes `.` and `..`, and LocalStore gives such names to unfinished files.
_PART = r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*"
_KEY = re.compile(rf"{_PART}(/{_PART})*")

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object in a listing or an event.

    `modified_s` is the time of the write on the store's clock, in seconds since the epoch, 0 if unknown.
    `content` is the store's own hash of the bytes, or None: with it `Store.read` returns these bytes even
    after the key was overwritten.
    """

    key: str
    bytes: int
    modified_s: float = dataclasses.field(default=0.0, compare=False)
    content: str | None = dataclasses.field(default=None, compare=False)


class Watch(Protocol):
    """A running `Store.watch`."""

    @property
    def live(self) -> bool:
        """Whether changes are reported now. If not, the caller must poll."""
        ...

    def close(self) -> None:
        """End the watch. After this returns, its callback is not called again."""
        ...


class Store(Protocol):
    """Objects under one prefix. Methods may be called from any thread."""

    @property
    def url(self) -> str:
        """The URL that the store was opened with, without credentials."""
        ...

    @property
    def can_create(self) -> bool:
        """Whether the store claims that only one of two writers can `create` a key. `retries.decides` tests
        the claim.
        """
        ...

    @property
    def is_scarce(self) -> bool:
        """Whether a shared request quota is nearly used up. Requests that can wait should wait."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Store a new object atomically. Requires `can_create`; `leased.LeasedStore` adds it to a store without.

        After return, the whole object is durable and visible. If this raises a lasting error, it is not
        visible.

        Raises:
            ObjectExistsError: the key exists; its object is unchanged.
            FencedError: another writer has claimed a `LeasedStore`.
            StoreError: anything else. After a transient error the object may exist: read it back to find out.
        """
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store an object and replace any object with this key. Readers see the old or the new one, never a
        mixture.

        Raises:
            TransientStoreError: the old or the new object is visible, or the new one will become visible.
            StoreError: the store refused; the old object is visible.
        """
        ...

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        """Return the whole object.

        At most `most_bytes` are held in memory, even if the store announces another size. `known` is the
        object's entry in a listing or an event. If it has a `content`, those bytes are read without a request
        for the key.

        Raises:
            CorruptDataError: the object is larger than `most_bytes`.
            ObjectMissingError: no such key.
            StoreError: anything else.
        """
        ...

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` (excluded) of an object; `0 <= start < end`.

        Raises:
            ObjectMissingError: no such key.
            StoreError: anything else, for example if the object is shorter than `end`.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the finished objects whose key starts with `prefix` and is valid, in ascending key order.

        A store may also have `folders(prefix)`: see the function of this name.
        """
        ...

    def delete(self, *keys: str) -> None:
        """Delete objects. A missing object is no error. If this raises, some of them may have been
        deleted.
        """
        ...

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Watch | None:
        """Call `on_change`, from a thread of the store, for each object that is stored under `prefix`.

        Args:
            prefix: Only keys that start with it are reported.
            on_change: Receives the object, or None if some changes may have been missed. Deletions are not
                reported.

        Returns:
            None if the store cannot watch; the caller must poll.
        """
        ...


class WrappedStore:
    """A store that forwards every call to another store through `ask`. See `Store`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Run the call `action`. `verb` is the method's name, `key` its first key or the prefix of a
        listing.
        """
        return action()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def can_create(self) -> bool:
        return self.inner.can_create

    @property
    def is_scarce(self) -> bool:
        return self.inner.is_scarce

    def create(self, key: str, data: bytes) -> None:
        self.ask("create", key, lambda: self.inner.create(key, data))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.ask("put", key, lambda: self.inner.put(key, data))

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        return self.ask("read", key, lambda: self.inner.read(key, most_bytes, known))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self.ask("read_range", key, lambda: self.inner.read_range(key, start, end))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.ask("list", prefix, lambda: [*self.inner.list(prefix)]))

    def folders(self, prefix: str) -> Sequence[str] | None:
        return self.ask("list", prefix, lambda: folders(self.inner, prefix))

    def delete(self, *keys: str) -> None:
        if keys:
            self.ask("delete", keys[0], lambda: self.inner.delete(*keys))

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Watch | None:
        return self.inner.watch(prefix, on_change)


def folders(store: Store, prefix: str) -> Sequence[str] | None:
    """Return the folders under a prefix that ends with `/`, in any order, each with the prefix and a final `/`.

    None if the store cannot list folders without the objects in them. Raises like `Store.list`.
    """
    listed: Callable[[str], Sequence[str] | None] | None = getattr(store, "folders", None)
    return None if listed is None else listed(prefix)


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise ConfigError: of letters, digits and `._=+@-/`, no part starts with a
    dot, 900 at most.
    """
    if not is_key(key):
        raise ConfigError(f"Not a valid object key: {key!r}.")
    return key


def is_key(key: str) -> bool:
    """Whether `check_key` accepts a key. Listings leave other ones out: another program has stored these
    objects.
    """
    return len(key) <= 900 and _KEY.fullmatch(key) is not None


def check_size(place: str, size: int, most_bytes: int) -> None:
    """Raise CorruptDataError if `size` is more than `most_bytes`. `place` names the object."""
    if size > most_bytes:
        raise CorruptDataError(f"{place} has {size} bytes, but may have {most_bytes} at most.")


def read_file(file: int, place: str, most_bytes: int) -> bytes:
    """Return all bytes of an open file. Raise CorruptDataError, which names `place`, for more than
    `most_bytes`.
    """
    size = os.fstat(file).st_size
    check_size(place, size, most_bytes)
    with open(file, "rb", closefd=False) as stream:
        data = stream.read(size + 1)
    check_size(place, len(data), most_bytes)  # the file may have grown
    return data
