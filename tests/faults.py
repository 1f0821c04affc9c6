"""Faults by name: a store that fails, hangs or lies at the step a test says, and is honest otherwise."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from deltasync.errors import CorruptDataError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, Store, WrappedStore, check_size

FOREVER = 1 << 30

_Result = TypeVar("_Result")


@dataclasses.dataclass
class Fault:
    """One planned failure; `hits` counts how often it struck."""

    operation: str
    key_prefix: str
    times: int
    after: bool
    error: type[Exception]
    hits: int = 0


@dataclasses.dataclass
class Gate:
    """Where calls are held: `entered` is set when the first one arrives, and they go on once `opened` is
    set.
    """

    operation: str
    key_prefix: str
    entered: threading.Event = dataclasses.field(default_factory=threading.Event)
    opened: threading.Event = dataclasses.field(default_factory=threading.Event)


class FaultyStore(WrappedStore):
    """Any store, with faults at named steps.

    Attributes:
        calls: (operation, key) of every call, in order.
        bytes_read: (operation, key, bytes) of every `read` and `read_range` that was answered, in order.
        bounds: How large each object that is `endless` was said to be at most, for each read.
        slow_s: Seconds that each call takes, by operation, before it does anything.
        ahead_s: Seconds by which the store's clock is ahead.
        behind: How many of the objects that were put last the listings do not show yet.
    """

    def __init__(self, inner: Store, *, ahead_s: float = 0.0) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self.bytes_read: list[tuple[str, str, int]] = []
        self.bounds: list[int] = []
        self.slow_s: dict[str, float] = {}
        self.ahead_s, self.behind = ahead_s, 0
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._gates: list[Gate] = []
        self._tampering: list[tuple[str, Callable[[bytes], bytes]]] = []
        self._hidden: Callable[[str], bool] = lambda _: False
        self._put: list[str] = []
        self._age_s: dict[str, float] = {}
        self._flood: list[ObjectInfo] = []
        self._endless: str | None = None

    def hide(self, hidden: Callable[[str], bool]) -> None:
        """Leave keys out of every listing, as one that lies, lags or is cut; they can be read."""
        self._hidden = hidden

    def age(self, age_s: float, *keys: str) -> None:
        """Let listings say that objects, by default all that are there, were stored that much earlier."""
        for key in keys or [info.key for info in self.inner.list("")]:
            self._age_s[key] = self._age_s.get(key, 0.0) + age_s

    def flood(self, infos: Iterable[ObjectInfo]) -> None:
        """Show more objects in listings than are there."""
        self._flood += infos

    def endless(self, key: str) -> None:
        """An object is larger than any reader allows."""
        self._endless = key

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._lock:
            self._age_s.pop(key, None)
            self._put = [each for each in self._put if each != key] + [key]
        super().put(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        late = set(self._put[len(self._put) - self.behind :])
        shown = (info for info in super().list(prefix) if not self._hidden(info.key) and info.key not in late)
        flood = (info for info in self._flood if info.key.startswith(prefix))
        return itertools.chain(map(self._aged, shown), flood)

    def folders(self, prefix: str) -> Sequence[str]:
        found = (info.key.removeprefix(prefix).partition("/") for info in self.list(prefix))
        return [*{f"{prefix}{name}/" for name, slash, _ in found if slash}]

    def _aged(self, info: ObjectInfo) -> ObjectInfo:
        return dataclasses.replace(
            info, modified_s=info.modified_s + self.ahead_s - self._age_s.get(info.key, 0.0)
        )

    def fail_at(
        self,
        operation: str,
        key_prefix: str = "",
        *,
        times: int = 1,
        after: bool = False,
        error: type[Exception] = TransientStoreError,
    ) -> Fault:
        """Raise at the next `times` matching calls: before the operation, or `after` performing it (the reply
        is lost).
        """
        fault = Fault(operation, key_prefix, times, after, error)
        self._faults.append(fault)
        return fault

    def hold_at(self, operation: str, key_prefix: str = "") -> Gate:
        """Hold matching calls, before they do anything, until the gate is opened."""
        gate = Gate(operation, key_prefix)
        self._gates.append(gate)
        return gate

    def tamper(self, key_prefix: str, change: Callable[[bytes], bytes]) -> None:
        """Pass what matching reads return through `change`."""
        self._tampering.append((key_prefix, change))

    def drop(self, key_prefix: str) -> None:
        """Reads of matching keys find nothing."""

        def missing(data: bytes) -> bytes:
            raise ObjectMissingError("dropped by the test")

        self.tamper(key_prefix, missing)

    def heal(self) -> None:
        """Forget all faults, gates and tampering."""
        with self._lock:
            self._faults, self._tampering, self._hidden = [], [], lambda _: False
            for gate in self._gates:
                gate.opened.set()
            self._gates = []

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        if key == self._endless:
            self.bounds.append(most_bytes)
            raise CorruptDataError(f"{key} is larger than the {most_bytes} bytes that it may have.")
        data = self._answered(
            "read", key, self.ask("read", key, lambda: self.inner.read(key, 1 << 40, known))
        )
        check_size(key, len(data), most_bytes)
        return data

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self._answered("read_range", key, super().read_range(key, start, end))

    def _answered(self, operation: str, key: str, data: bytes) -> bytes:
        self.bytes_read.append((operation, key, len(data)))
        for prefix, change in self._tampering:
            if key.startswith(prefix):
                data = change(data)
        return data

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.ask("delete", key, lambda key=key: self.inner.delete(key))  # type: ignore[misc]

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        operation = "read" if verb == "read_range" else verb
        time.sleep(self.slow_s.get(operation, 0.0))
        for gate in list(self._gates):
            if gate.operation == operation and key.startswith(gate.key_prefix):
                gate.entered.set()
                if not gate.opened.wait(60):
                    raise StoreError("a test never opened its gate")
        with self._lock:
            self.calls.append((operation, key))
            fault = next((f for f in self._faults if self._strikes(f, operation, key)), None)
            if fault is not None:
                fault.hits += 1
        if fault is None:
            return action()
        if fault.after:
            action()
        raise fault.error(
            f"{operation} {key} failed by the test, {'after' if fault.after else 'before'} it was done"
        )

    @staticmethod
    def _strikes(fault: Fault, operation: str, key: str) -> bool:
        return fault.hits < fault.times and fault.operation == operation and key.startswith(fault.key_prefix)


def truncated(data: bytes) -> bytes:
    """All but the last byte."""
    return data[:-1]


def flipped(data: bytes) -> bytes:
    """The lowest bit of the middle byte inverted."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
