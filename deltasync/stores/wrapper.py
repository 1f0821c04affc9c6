"""The base class of stores that wrap another store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from deltasync.stores.base import ObjectInfo, Store, Watch

_Result = TypeVar("_Result")


class WrappedStore:
    """A store that forwards every call to another store through `ask`. See `Store`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Run the call `action`. `verb` is the method's name, `key` its first key or the prefix of a listing."""
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

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        self.ask("put", key, lambda: self.inner.put(key, data, guard=guard))

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        return self.ask("read", key, lambda: self.inner.read(key, most_bytes, known))

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self.ask("read_range", key, lambda: self.inner.read_range(key, start, end))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.ask("list", prefix, lambda: [*self.inner.list(prefix)]))

    def delete(self, *keys: str) -> None:
        if keys:
            self.ask("delete", keys[0], lambda: self.inner.delete(*keys))

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Watch | None:
        return self.inner.watch(prefix, on_change)
