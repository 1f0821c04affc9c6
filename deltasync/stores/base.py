"""The store port: the few verbs a channel needs, and what they promise.

Every store passes the contract in `tests/contract/store_contract.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object."""

    key: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a store can do beyond the minimum.

    Attributes:
        conditional_put: `create` is decided by the store itself, so that exactly one of two racing writers wins.
    """

    conditional_put: bool


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

    def read(self, key: str) -> bytes:
        """The whole object.

        Raises:
            ObjectMissingError: no such key.
            StoreError: anything else.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in ascending key order; unfinished ones are never listed."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; removing a missing one is no error."""
        ...
