"""All waits for a store: retries (`RetryStore`), rate limits, and services that are down."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from deltasync.stores.base import Store, WrappedStore

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0  # until a request without an answer is logged
READS = 3
"""How often bytes that look damaged are read: they may be so on the way only."""

_LONGEST_DELAY_S = 30.0
_CHANGE_S = 2.0  # Google allows one change of an object per second; at least half of this is waited
_TRUSTED_FAILURES = 3
_RESERVE = 0.25  # fraction of a quota
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0

_Result = TypeVar("_Result")


def retried(
    action: Callable[[], _Result],
    retries: int,
    delay_s: float = 0.0,
    *,
    passing: tuple[type[DeltaSyncError], ...] = (TransientStoreError,),
    level: int = logging.WARNING,
    longest_s: float | None = None,
    stop: threading.Event | None = None,
) -> _Result:
    """Return the result of `action`, which is safe to repeat.

    Args:
        action: The function.
        retries: Attempts after the first one.
        delay_s: Longest wait before the first retry, doubled each time up to 30 s. A random part, up to half,
            is subtracted from each wait, so that clients that failed together do not retry together. The wait
            is never shorter than the error asks for (`TransientStoreError.wait_s`).
        passing: Classes of errors that are retried.
        level: Level at which these errors are logged.
        longest_s: An error that asks for a longer wait is raised at once, for a caller that can wait.
        stop: An event that ends a wait; the error is then raised.
    """
    stop = threading.Event() if stop is None else stop
    for left in range(retries, 0, -1):
        try:
            return action()
        except passing as error:
            asked_s = getattr(error, "wait_s", 0.0)
            if longest_s is not None and asked_s > longest_s:
                raise
            wait_s = max(asked_s, delay_s * random.SystemRandom().uniform(0.5, 1.0))
            logger.log(level, "%s Trying again in %.2f s (%d left).", error, wait_s, left)
            if stop.wait(wait_s):
                raise
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
    return action()


class RetryStore(WrappedStore):
    """A store whose requests are repeated after errors that may pass, as `retried` does.

    An object that exists with the same bytes counts as created: an
    earlier request may have stored it, whose reply got lost.

    Attributes:
        stop: Set it to end every wait between two attempts; what is under way fails then.
    """

    def __init__(self, inner: Store, retries: int, delay_s: float) -> None:
        super().__init__(inner)
        self._retries, self._delay_s = retries, delay_s
        self.stop = threading.Event()

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Run the call, again after a transient error."""
        return retried(action, self._retries, self._delay_s, stop=self.stop)

    def create(self, key: str, data: bytes) -> None:
        def create() -> None:
            try:
                self.inner.create(key, data)
            except ObjectExistsError as error:
                is_ours = holds(self.inner, key, data)
                if is_ours is None:
                    raise TransientStoreError(f"{error} But it cannot be read back.") from error
                if not is_ours:
                    raise

        self.ask("create", key, create)


def holds(store: Store, key: str, data: bytes) -> bool | None:
    """Whether a key holds these bytes and not other ones; None if it holds nothing. Other bytes are read
    `READS` times.
    """
    for _ in range(READS):
        try:
            if store.read(key, len(data)) == data:
                return True
        except ObjectMissingError:
            return None
        except CorruptDataError:
            continue  # larger
    return False


def decides(store: Store, key: str) -> bool:
    """Whether the store refuses to `create` an object that exists; some accept `If-None-Match` and ignore it.

    The test creates an object at `key`, which nobody else may use, and deletes it again. A failed test is
    repeated with the same key after a wait, because stores limit how often an object may change.

    Raises:
        StoreError: the test failed.
    """
    if not store.can_create:
        return False
    first, second = (hashlib.sha256(f"{key} {which}".encode()).digest()[:16] for which in ("first", "second"))
    try:
        # If the first one is refused too, an earlier request may have succeeded and its reply got lost: read
        # it back.
        refused = [
            retried(functools.partial(_is_refused, store, key, data), 1, _CHANGE_S)
            for data in (first, second)
        ]
    except TransientStoreError:
        raise
    except StoreError:  # the store refuses every create
        store.put(key, second)  # raises if the store refuses this as well, for another reason
        return False
    else:
        return refused[1] and holds(store, key, first) is True
    finally:
        with contextlib.suppress(StoreError):  # a trainer may lack the right to delete
            retried(lambda: store.delete(key), 1, _CHANGE_S)


def _is_refused(store: Store, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except ObjectExistsError:
        return True
    return False


class Pause:
    """Blocks requests to a service for as long as it asks, or with growing pauses while it is down.
    Thread-safe.

    Nothing waits here: `check` raises at once, and its error says how long to wait.
    """

    def __init__(self) -> None:
        self._until_s = self._pause_s = self._scarce_until_s = 0.0
        self._failures = 0
        self._why = ""

    def check(self) -> None:
        """Raise TransientStoreError during a pause."""
        left_s = self._until_s - time.monotonic()
        if left_s > 0:
            raise TransientStoreError(self._why, left_s)

    @property
    def is_scarce(self) -> bool:
        """Whether the rest of the quota should be left to requests that cannot wait."""
        return time.monotonic() < self._scarce_until_s

    def left(self, fraction: float, resets_s: float) -> None:
        """Record the fraction of the quota that is left, and the seconds until it is reset."""
        self._scarce_until_s = time.monotonic() + resets_s if fraction < _RESERVE else 0.0

    def answered(self) -> None:
        """Record a success, which ends the growth of pauses."""
        self._failures, self._pause_s = 0, 0.0

    def asked(self, wait_s: float, why: str) -> TransientStoreError:
        """Begin a pause that the service asks for, and return its error. The first one is logged as a
        warning.
        """
        if self._until_s < time.monotonic():
            logger.warning("%s", why)
        self._until_s, self._why = time.monotonic() + wait_s, why
        return TransientStoreError(why, wait_s)

    def failed(self, why: str) -> TransientStoreError:
        """Record a failure, and return its error. The third in a row begins a pause."""
        self._failures += 1
        if self._failures < _TRUSTED_FAILURES:
            return TransientStoreError(why)
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._until_s, self._why = time.monotonic() + self._pause_s, why
        return TransientStoreError(why, self._pause_s)
