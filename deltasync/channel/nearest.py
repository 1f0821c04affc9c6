"""A channel and copies of it, as `deltasync relay` keeps them: read where it answers soonest, written to at the channel."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

from deltasync.channel import documents, keys
from deltasync.channel.documents import Head
from deltasync.errors import ConfigError, FormatError, ObjectMissingError, StoreError, get_logger
from deltasync.stores import open_store
from deltasync.stores.base import ObjectInfo, Store, Watch
from deltasync.stores.wrapper import WrappedStore

logger = get_logger(__name__)

REVIEW_S = 30.0
"""How often the copies are compared. One that lags behind by more is left."""
_PATIENCE_S = 5.0  # for all answers to one comparison
_MUCH = 2.0  # so many times sooner another one has to answer

_Result = TypeVar("_Result")
_Newness = tuple[str, int]
_NOTHING: _Newness = ("", 0)


def open_nearest(channel: str | os.PathLike[str] | Store | Sequence[str]) -> Store:
    """The store of a channel.

    Args:
        channel: As in `open_store`; or several URLs, in a list or with spaces between them: the channel, then copies of it.

    Raises:
        ConfigError: as `open_store`.
    """
    if isinstance(channel, str) and all("://" in part for part in channel.split()):
        channel = channel.split() or channel
    if isinstance(channel, list | tuple):
        stores = [open_store(url) for url in channel]
        if not stores:
            raise ConfigError("A channel is a URL, or several; none was given.")
        return stores[0] if len(stores) == 1 else NearestStore(stores)
    return open_store(channel)  # type: ignore[arg-type]


class _Look(NamedTuple):
    """How long a store took to answer, and what its head says."""

    seconds: float
    run_id: str | None
    newness: _Newness


class NearestStore(WrappedStore):
    """Reads from one of several stores, writes to the first.

    A store is left when it fails, or when it lacks what was read before or what any head named a review ago (at first: now),
    so that nobody goes back by changing over. What is written are heartbeats: the trainer looks for them in the first one.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        super().__init__(stores[0])
        self._stores = stores
        self._lock = threading.Lock()
        self._due_s: float | None = None
        self._read = self._named = _NOTHING
        self._problem: ConfigError | None = None

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Read from the nearest store; if it fails, from the next one.

        Raises:
            ConfigError: the stores hold different runs.
        """
        if self._due_s is None:
            self._review()
        elif time.monotonic() > self._due_s:
            self._due_s = time.monotonic() + REVIEW_S
            threading.Thread(target=self._review, name="deltasync-nearest", daemon=True).start()
        if self._problem is not None:
            raise self._problem
        asked = self.inner
        try:
            found = action()
        except ObjectMissingError:
            raise
        except StoreError as error:
            self._review(leave=asked)
            if self.inner is asked:
                raise
            logger.warning("%s. Reading from %s.", str(error).rstrip("."), self.inner.url)
            found = action()
        slot = keys.slot_of(key) if verb == "read" else None
        if slot is not None:
            self._read = max(self._read, slot.newness)
        return found

    def _review(self, leave: Store | None = None) -> None:
        """Choose the store to read from; what does not answer in time, or is `leave`, is not chosen."""
        with self._lock:
            if leave is not None and self.inner is not leave:
                return  # another thread did
            pool = ThreadPoolExecutor(len(self._stores), thread_name_prefix="deltasync-nearest")
            futures = [pool.submit(_look, store) for store in self._stores]
            pool.shutdown(wait=False)
            wait(futures, _PATIENCE_S)
            looks = [future.result() if future.done() else None for future in futures]
            if len({look.run_id for look in looks if look is not None} - {None}) > 1:
                said = " and ".join(store.url for store in self._stores)
                self._problem = ConfigError(f"{said} hold different runs; name one channel and copies of it.")
            newest = max((look.newness for look in looks if look is not None), default=_NOTHING)
            least = max(self._read, newest if self._named == _NOTHING else self._named)
            self._named = max(self._named, newest)
            if self._named == _NOTHING:  # nothing is published yet; ask again
                return
            fit = {
                at: look.seconds
                for at, look in enumerate(looks)
                if look is not None and look.newness >= least and self._stores[at] is not leave
            }
            now = next(at for at, store in enumerate(self._stores) if store is self.inner)
            if fit and fit.get(now, float("inf")) > _MUCH * min(fit.values()):
                self.inner = self._stores[min(fit, key=fit.__getitem__)]
            self._due_s = time.monotonic() + REVIEW_S

    @property
    def url(self) -> str:
        return self._stores[0].url

    @property
    def can_create(self) -> bool:
        return self._stores[0].can_create

    def create(self, key: str, data: bytes) -> None:
        self._stores[0].create(key, data)

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        self._stores[0].put(key, data, guard=guard)

    def delete(self, *keys: str) -> None:
        self._stores[0].delete(*keys)

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> Watch | None:
        return None  # it would tell of one store, and another one is read


def _look(store: Store) -> _Look | None:
    """None if it fails."""
    before = time.perf_counter()
    head: Head | None = None
    try:
        head = documents.decode(store.read(keys.HEAD, documents.SMALL_BYTES), Head, keys.HEAD)
    except (ObjectMissingError, FormatError):
        pass  # nothing is published, or it is damaged: there is nothing to compare
    except StoreError:
        return None
    seconds = time.perf_counter() - before
    return _Look(seconds, None, _NOTHING) if head is None else _Look(seconds, head.run_id, (head.epoch, head.version))
