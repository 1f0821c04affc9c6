"""CHOOSE: pick the codec by which a delta is served sooner, where the settings leave that to the publisher (`auto`).

All numbers are by-products of publishing: the link is timed while objects are stored, codecs while groups are encoded and
proved. A codec that is not in use encodes one group now and then, whose payload is thrown away.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from deltasync.config import AUTO
from deltasync.stores.base import Store
from deltasync.stores.wrapper import WrappedStore

_DEFAULT, _SMALLER = "packed", "context"
_PROBES, _PROBE_EVERY = 3, 50  # other codecs are tried in the first 3 versions, and in every 50th
_SMALL_BYTES = 4096  # a put of up to this size takes only the time that any put takes


class MeteredStore(WrappedStore):
    """A store that measures how long puts take.

    Attributes:
        stored_s: When the last put ended well, by `time.monotonic`.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._under_way = self._bytes = 0
        self._began_s, self._whole = 0.0, True
        self._small_s: deque[float] = deque(maxlen=16)
        self._large: deque[tuple[int, float]] = deque(maxlen=5)
        self.stored_s = time.monotonic()

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        with self._timed(len(data)):
            super().create(key, data)

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        """See `Store.put`."""
        with self._timed(len(data)):
            super().put(key, data, guard=guard)

    @property
    def byte_s(self) -> float | None:
        """Seconds per byte, beside the time that any put takes; None until a large object was put."""
        with self._lock:
            any_s = min(self._small_s, default=0.0)
            rates = [max(seconds - any_s, 0.0) / size for size, seconds in self._large]
        return statistics.median(rates) if rates else None

    @contextlib.contextmanager
    def _timed(self, size: int) -> Iterator[None]:
        """Time a put. Puts at the same time share the link, so they are timed together; if one fails, none counts."""
        with self._lock:
            if not self._under_way:
                self._began_s, self._bytes, self._whole = time.perf_counter(), 0, True
            self._under_way += 1
            self._bytes += size
        stored = False
        try:
            yield
            stored, self.stored_s = True, time.monotonic()
        finally:
            with self._lock:
                self._under_way -= 1
                self._whole &= stored
                seconds = time.perf_counter() - self._began_s
                if self._whole and not self._under_way and self._bytes > _SMALL_BYTES:
                    self._large.append((self._bytes, seconds))
                elif self._whole and not self._under_way:
                    self._small_s.append(seconds)


class Cost(NamedTuple):
    """What encoding one group cost."""

    changed: int
    bytes: int
    encode_s: float
    prove_s: float
    decode_s: float  # what a replica takes: proving without restoring the old bits


class Choice:
    """Chooses the codec of each delta.

    Args:
        codec: The setting.
        store: Where deltas go. None makes `auto` mean `packed`, for ranks that would have to agree.

    Attributes:
        codecs: The codecs to choose from.
        groups: Number of groups of the last delta.
    """

    def __init__(self, codec: str, store: MeteredStore | None) -> None:
        fixed = _DEFAULT if codec == AUTO else codec
        self.codecs = (_DEFAULT, _SMALLER) if codec == AUTO and store is not None else (fixed,)
        self.groups = 1
        self._store = store
        self._costs: dict[str, deque[Cost]] = {name: deque(maxlen=_PROBES) for name in self.codecs}

    def best(self) -> str:
        """Return the codec by which the next delta is served soonest, as far as is known."""
        byte_s = None if self._store is None else self._store.byte_s
        if byte_s is None or not all(self._costs.values()):
            return self.codecs[0]
        return min(self.codecs, key=lambda name: self._served_s(name, byte_s))

    def probes(self, version: int) -> list[str]:
        """Return the other codecs, if it is time to try them."""
        best, is_due = self.best(), version % _PROBE_EVERY == 0
        return [name for name, costs in self._costs.items() if name != best and (is_due or len(costs) < _PROBES)]

    def took(self, codec: str, cost: Cost) -> None:
        """Note what a group cost, unless nothing changed in it."""
        if cost.changed:
            self._costs[codec].append(cost)

    def _served_s(self, codec: str, byte_s: float) -> float:
        """Estimate the seconds per changed element until a replica has decoded it.

        Groups are stored while they are proved and while others are encoded, and fetched while others are stored. Their
        record is stored once all are stored and proved. A replica is assumed to have the publisher's link and speed.
        """
        costs = self._costs[codec]
        # The least: others were measured while a kernel was being compiled, or the machine was busy.
        encode_s = min(cost.encode_s / cost.changed for cost in costs)
        prove_s = min(cost.prove_s / cost.changed for cost in costs)
        decode_s = min(cost.decode_s / cost.changed for cost in costs)
        link_s = byte_s * sum(cost.bytes for cost in costs) / sum(cost.changed for cost in costs)
        last = 1 / self.groups  # the share of the last group, and of the first
        stored_s = max(encode_s * last + link_s, encode_s + prove_s * (1 - last) + link_s * last, encode_s + prove_s)
        return stored_s + link_s * last + decode_s
