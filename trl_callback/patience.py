"""Keep training through an outage of the store: its last error, and a bounded backlog of uploads."""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from deltasync import Receipt
from deltasync.errors import StoreError, TransientStoreError
from deltasync.stores import Store, WrappedStore

logger = logging.getLogger(__name__)

# enough for days: while training goes on, retrying is the best that can be done with a version
RETRIES = 10_000
OPEN_S = 60.0  # longest time for retries of the store before training

_WARN_AFTER_S = 10.0
_SHARE = 0.05  # largest fraction of the time for encoding a queued version again

_Result = TypeVar("_Result")


class PatientStore(WrappedStore):
    """A store wrapper that can be given up, and knows which versions it has not stored yet.

    One version uploads and one is queued. A further version is merged into the queued one, which is encoded
    again. The time for that is limited to a fraction of the total, so that training is as fast with a dead
    store as with a fast one.

    Attributes:
        trouble: The last request's transient error; None if it succeeded.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._given_up = False
        self._deadline: float | None = None
        # at most two versions, with the times of their publication
        self._receipts: list[tuple[Receipt, float]] = []
        self._warned = False
        self.trouble: TransientStoreError | None = None

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit retries inside this context to this time. This also undoes `give_up`."""
        self._given_up, self._deadline = False, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def give_up(self) -> None:
        """Fail every further request at once, which ends all retries."""
        self._given_up = True

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Run a call, and record its transient error. See `WrappedStore.ask`."""
        if self._given_up:
            raise StoreError(f"{self.url} was given up at the end of training. {self.trouble or ''}".rstrip())
        try:
            result = action()
        except TransientStoreError as error:
            self.trouble = error
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise StoreError(
                    f"The store cannot be reached: {error} See: deltasync doctor {shlex.quote(self.url)}"
                ) from error
            raise
        self.trouble = None
        return result

    def expect(self, receipt: Receipt) -> None:
        """Add a version that was just published."""
        self._drop_stored()
        kept = [entry for entry in self._receipts if entry[0].version != receipt.version]
        self._receipts = [*kept[-1:], (receipt, time.monotonic())]

    def is_behind(self) -> bool:
        """Whether to skip a version now, which a later one will cover. Warns once when the store stays
        behind.
        """
        self._drop_stored()
        if not self._receipts:
            return False
        now = time.monotonic()
        (oldest, since), (newest, published) = self._receipts[0], self._receipts[-1]
        if not self._warned and now - since > _WARN_AFTER_S:
            self._warned = True
            logger.warning(
                "%s has not stored version %d for %.0f s (%s). Training goes on; its further versions are "
                "merged into one.",
                self.url,
                oldest.version,
                now - since,
                self.trouble or "no error so far",
            )
        return (len(self._receipts) == 2 or newest.done) and now - published < newest.held_s / _SHARE

    def _drop_stored(self) -> None:
        """Drop the newest stored version and those before it."""
        while any(receipt.done and receipt.problem is None for receipt, _ in self._receipts):
            del self._receipts[0]
        if self._warned and not self._receipts:
            self._warned = False
            logger.warning("%s has stored all versions.", self.url)
