"""A channel and its copies, as `deltasync relay` makes them: reads go to the fastest store, writes to the
channel.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from deltasync import limits
from deltasync.channel import documents, keys
from deltasync.channel.documents import Head
from deltasync.channel.keys import Slot
from deltasync.errors import ConfigError, FormatError, ObjectMissingError, StoreError, get_logger
from deltasync.stores import open_store
from deltasync.stores.base import ObjectInfo, Store, Watch, WrappedStore, folders
from deltasync.threads import daemon, each

logger = get_logger(__name__)

REVIEW_S = 30.0  # how often the stores are compared. A copy that lags behind by more is left.
_PATIENCE_S = 5.0  # for all answers to one comparison
_TIMES_FASTER = 2.0  # a store is changed only for one that answers this many times faster

_Result = TypeVar("_Result")


def open_failover(channel: str | os.PathLike[str] | Store | Sequence[str]) -> Store:
    """Open a channel's store: one of `open_store`'s URLs, or several, in a list or text: the channel, then
    copies of it.
    """
    if isinstance(channel, str) and all("://" in part for part in channel.split()):
        channel = channel.split() or channel
    if isinstance(channel, list | tuple):
        stores = [open_store(url) for url in channel]
        if not stores:
            raise ConfigError("A channel is a URL, or several; none was given.")
        return stores[0] if len(stores) == 1 else FailoverStore(stores)
    return open_store(channel)  # type: ignore[arg-type]


class FailoverStore(WrappedStore):
    """Reads from one of several stores; writes to the first, which is the channel. The others are copies of
    it.

    A store is left when it fails. It is also left when it lacks the newest record that was read, or the
    record that the channel's head named at the last review (at first: now): a change of stores never leads to
    an older version. Whether a copy has a record is looked up, because its head is only a hint. Only
    heartbeats are written.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        super().__init__(stores[0])
        self.nearest = stores[0]
        self._stores = stores
        self._lock = threading.Lock()
        self._due_s: float | None = None  # the next review, None before the first
        self._read: Slot | None = None  # the newest record that was read
        self._named: Slot | None = None  # the record that the channel's head named at the last review
        self._problem: ConfigError | None = None

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        data = self._ask_failover(lambda store: store.read(key, most_bytes, known))
        slot = keys.slot_of(key)
        if slot is not None and (self._read is None or slot.newness > self._read.newness):
            self._read = slot
        return data

    def read_range(self, key: str, start: int, end: int) -> bytes:
        return self._ask_failover(lambda store: store.read_range(key, start, end))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._ask_failover(lambda store: [*store.list(prefix)]))

    def folders(self, prefix: str) -> Sequence[str] | None:
        return self._ask_failover(lambda store: folders(store, prefix))

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Watch | None:
        return None  # it would watch one store while another one is read

    def _ask_failover(self, action: Callable[[Store], _Result]) -> _Result:
        """Read from the fastest store; if it fails, from the next one. Raises ConfigError if they hold
        different runs.
        """
        if self._due_s is None or (self._problem is not None and time.monotonic() > self._due_s):
            self._review()
        elif time.monotonic() > self._due_s and not self._lock.locked():
            self._due_s = time.monotonic() + REVIEW_S
            with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no more threads
                daemon("fetch", self._review).start()
        if self._problem is not None:
            raise self._problem
        asked = self.nearest
        try:
            return action(asked)
        except ObjectMissingError:
            raise
        except StoreError as error:
            self._review(leave=asked)
            if self.nearest is asked:
                raise
            logger.warning("%s. Reading from %s.", str(error).rstrip("."), self.nearest.url)
            return action(self.nearest)

    def _review(self, leave: Store | None = None) -> None:
        """Choose the store to read from. `leave`, and a store that does not answer in time, are not
        chosen.
        """
        with self._lock:
            if leave is not None and self.nearest is not leave:
                return  # another thread has left it
            looks = each(self._stores, _look, time.monotonic() + _PATIENCE_S)
            heads = [None if look is None else look[1] for look in looks]
            run_ids = {head.run_id for head in heads if head is not None}
            if len(run_ids) > 1:
                urls = " and ".join(store.url for store in self._stores)
                self._problem = ConfigError(f"{urls} hold different runs; name one channel and copies of it.")
                self._due_s = time.monotonic() + REVIEW_S
                return
            self._problem = None
            if not run_ids:  # nothing is published yet; ask again
                return
            if looks[0] is None and self._due_s is None:
                logger.warning("%s does not answer; a copy of it is read.", self.url)
            named = None if heads[0] is None else heads[0].newest.slot
            needed = [slot for slot in (self._read, self._named or named) if slot is not None]
            self._named = named or self._named
            have = each(
                self._stores,
                lambda store: all(_has(store, slot) for slot in needed),
                time.monotonic() + _PATIENCE_S,
            )
            fit = {
                number: look[0]
                for number, (store, look, has) in enumerate(zip(self._stores, looks, have, strict=True))
                if look is not None and look[1] is not None and has and store is not leave
            }
            if fit:
                fastest = min(fit, key=fit.__getitem__)
                now_s = fit.get(self._stores.index(self.nearest))
                if now_s is None or now_s > _TIMES_FASTER * fit[fastest]:
                    self.nearest = self._stores[fastest]
            self._due_s = time.monotonic() + REVIEW_S


def _look(store: Store) -> tuple[float, Head | None] | None:
    """Seconds until a store answered, and its head, None if that is missing or damaged. None if the store
    failed.
    """
    before = time.perf_counter()
    head: Head | None = None
    try:
        head = documents.decode(store.read(keys.HEAD, limits.SMALL_BYTES), Head, keys.HEAD)
    except (ObjectMissingError, FormatError):
        pass
    except StoreError:
        return None
    return time.perf_counter() - before, head


def _has(store: Store, slot: Slot) -> bool:
    """Whether a store has the record of a slot."""
    try:
        store.read_range(slot.key, 0, 1)
    except StoreError:
        return False
    return True
