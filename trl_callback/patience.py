"""Training outlasts its store: a store that remembers its last error, and what to do while uploads are behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltasync import Receipt
from deltasync.errors import DeltaSyncError, StoreError, TransientStoreError
from deltasync.stores import Store
from deltasync.stores.wrapper import WrappedStore

logger = logging.getLogger(__name__)

RETRIES = 10_000
"""Enough for days: as long as training goes on, there is nothing better to do with a version than to try again."""

OPEN_S = 60.0
"""Before training, the store is tried for so long."""

_WARN_AFTER_S = 10.0
_SHARE = 0.05  # of the time that may go into encoding a waiting version again

_Result = TypeVar("_Result")


class PatientStore(WrappedStore):
    """Any store, which can be given up.

    Attributes:
        trouble: The last request's transient error, None if it went well.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._given_up = False
        self._deadline: float | None = None
        self.trouble: TransientStoreError | None = None

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Inside this context, a request that fails after so many seconds is not tried again. It is no longer given up."""
        self._given_up, self._deadline = False, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def give_up(self) -> None:
        """Fail every further request at once, so that nothing is tried again."""
        self._given_up = True

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """See `WrappedStore.ask`."""
        if self._given_up:
            raise StoreError(f"{self.url} was given up at the end of training. {self.trouble or ''}".rstrip())
        try:
            result = action()
        except TransientStoreError as error:
            self.trouble = error
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise StoreError(f"The store cannot be reached: {error} See: deltasync doctor {self.url}") from error
            raise
        self.trouble = None
        return result


class Backlog:
    """The versions that are not stored yet, and whether to publish another one.

    One version uploads and one waits; a further one is merged into that which waits, at the cost of encoding again. That
    cost is kept to a share of the time, so that training is as fast with a dead store as with a quick one.
    """

    def __init__(self, store: PatientStore) -> None:
        self._store = store
        self._receipts: list[tuple[Receipt, float]] = []  # at most two versions, with the time of their publishing
        self._warned = False

    def add(self, receipt: Receipt) -> None:
        """Add a version that was just published."""
        self._drop_stored()
        kept = [entry for entry in self._receipts if entry[0].version != receipt.version]
        self._receipts = [*kept[-1:], (receipt, time.monotonic())]

    def is_full(self) -> bool:
        """Whether to leave out a version now; a later one will cover it. Warns once when the store stays behind."""
        self._drop_stored()
        if not self._receipts:
            return False
        now = time.monotonic()
        (oldest, since), (newest, published) = self._receipts[0], self._receipts[-1]
        if not self._warned and now - since > _WARN_AFTER_S:
            self._warned = True
            logger.warning(
                "%s has not taken version %d for %.0f s (%s). Training goes on; what it publishes meanwhile is one version.",
                self._store.url,
                oldest.version,
                now - since,
                self._store.trouble or "no error so far",
            )
        return (len(self._receipts) == 2 or newest.done) and now - published < newest.held_s / _SHARE

    def _drop_stored(self) -> None:
        """Drop the newest stored version and those before it."""
        while any(_is_stored(receipt) for receipt, _ in self._receipts):
            del self._receipts[0]
        if self._warned and not self._receipts:
            self._warned = False
            logger.warning("%s has taken everything again.", self._store.url)


def _is_stored(receipt: Receipt) -> bool:
    try:
        receipt.wait(0)
    except DeltaSyncError:
        return False
    return True
