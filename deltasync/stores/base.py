"""The store port: the few verbs a channel needs, and what they promise.

Every store passes the contract in `tests/contract/store_contract.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

from deltasync.errors import CorruptDataError


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object.

    Attributes:
        modified_s: When it was stored, seconds since the epoch by the store's clock.
    """

    key: str
    bytes: int
    modified_s: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a store can do beyond the minimum.

    Attributes:
        conditional_put: `create` is decided by the store itself, so that exactly one of two racing writers wins. Without
            it `create` only looks first, and racing writers must be found out afterwards.
        watch: `watch` tells of changes at once; without it there is only polling.
    """

    conditional_put: bool
    watch: bool = False


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
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Store a new object. After return: durable and visible as a whole. If it raised: not visible.

        Raises:
            ObjectExistsError: the key is taken; the existing object is unchanged.
            StoreError: anything else. A transient error may hide a success: read back before concluding.
        """
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Store an object over whatever is there. Readers see the old or the new one, never a mixture.

        Raises:
            StoreError: the old or the new object is visible.
        """
        ...

    def read(self, key: str, most_bytes: int | None = None) -> bytes:
        """The whole object.

        Args:
            key: Which.
            most_bytes: A larger object is refused, and not read into memory.

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

    def watch(self, key: str, on_change: Callable[[], None]) -> Watch | None:
        """Call `on_change` whenever the object at `key` may have changed, from a thread of the store's own.

        Returns:
            None where the store cannot (`Capabilities.watch`).
        """
        ...


def check_size(place: str, size: int, most_bytes: int | None) -> None:
    """For `Store.read`.

    Raises:
        CorruptDataError: the object is larger than it may be.
    """
    if most_bytes is not None and size > most_bytes:
        raise CorruptDataError(f"{place} has {size} bytes, but may have {most_bytes} at most.")
