"""The store port: the few verbs a channel needs, and what they promise.

Every store passes the contract in `tests/contract/store_contract.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from typing import Protocol

from deltasync.errors import ConfigError, CorruptDataError

REQUEST_S = 20.0
"""When the one request of a guarded `Store.put` is given up."""

# The rules of the strictest store (the Hub's S3 gateway), applied to all of them.
# No part starts with a dot, which also rules out `.` and `..`: directories keep unfinished files under such names.
_PART = r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*"
_KEY = re.compile(rf"{_PART}(/{_PART})*")


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, as a listing or an event tells of it.

    Attributes:
        modified_s: When it was stored, seconds since the epoch by the store's clock.
        content: A hash by which `Store.read` finds its bytes, whatever the key names by then; None where there is none.
            Only the store that gave it can use it.
    """

    key: str
    bytes: int
    modified_s: float = dataclasses.field(default=0.0, compare=False)
    content: str | None = dataclasses.field(default=None, compare=False)


class Watch(Protocol):
    """A running `Store.watch`."""

    @property
    def live(self) -> bool:
        """Whether changes are being told right now. While not, poll."""
        ...

    def close(self) -> None:
        """End it; its callback is not called any more once this returns."""
        ...


class Store(Protocol):
    """Objects under one prefix. Methods may be called from any thread."""

    @property
    def url(self) -> str:
        """The URL it was opened with, without credentials."""
        ...

    @property
    def can_create(self) -> bool:
        """Whether it says that it decides which one of two writers wins a `create`; `probe.decides` finds out if it does."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Store a new object, atomically. Only where `can_create`.

        After return: durable and visible as a whole. If it raised: not visible.

        Raises:
            ObjectExistsError: the key is taken; the existing object is unchanged.
            StoreError: anything else. A transient error may hide a success: read back before concluding.
        """
        ...

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        """Store an object over whatever is there. Readers see the old or the new one, never a mixture.

        `guard` is called once, when all that may take long is done. The one request that makes the object visible follows
        at once. No layer below repeats it, and it is given up after `REQUEST_S`. What `guard` raises passes through;
        nothing is visible then.

        Raises:
            TransientStoreError: the old or the new object is visible, or will be.
            StoreError: the store refused; the old object is visible.
        """
        ...

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        """The whole object.

        One larger than `most_bytes` is refused: no more is held in memory, whatever the store says of it. `known` is what a
        listing or an event told of it. If that has a `content`, it is read, without a look at the key.

        Raises:
            CorruptDataError: it is larger.
            ObjectMissingError: no such key.
            StoreError: anything else.
        """
        ...

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, the latter excluded, of an object that has at least so many; `0 <= start < end`.

        Raises:
            ObjectMissingError: no such key.
            StoreError: anything else, also an object that is shorter.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in ascending key order; unfinished ones are never listed."""
        ...

    def delete(self, *keys: str) -> None:
        """Remove objects; removing a missing one is no error. If it raised: any of them may be gone."""
        ...

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Watch | None:
        """Call `on_change` for each object that is stored under `prefix`, from a thread of the store's own.

        Args:
            prefix: What the keys begin with.
            on_change: Gets the object, or None when some may have been missed. Deletions are not told.

        Returns:
            None where the store cannot; then there is only polling.
        """
        ...


def check_key(key: str) -> str:
    """Return `key` unchanged.

    Raises:
        ConfigError: the key is empty, longer than 900, not plain ASCII, or has a part that is empty or starts with a dot.
    """
    if not _KEY.fullmatch(key) or len(key) > 900:
        raise ConfigError(f"Not a valid object key: {key!r}.")
    return key


def check_size(place: str, size: int, most_bytes: int) -> None:
    """For `Store.read`.

    Raises:
        CorruptDataError: the object is larger than it may be.
    """
    if size > most_bytes:
        raise CorruptDataError(f"{place} has {size} bytes, but may have {most_bytes} at most.")


def read_file(file: int, place: str, most_bytes: int) -> bytes:
    """All of an open file. Raises CorruptDataError, which names `place`, if that is more than `most_bytes`."""
    size = os.fstat(file).st_size
    check_size(place, size, most_bytes)
    with open(file, "rb", closefd=False) as stream:
        data = stream.read(size + 1)
    check_size(place, len(data), most_bytes)  # it may grow
    return data
