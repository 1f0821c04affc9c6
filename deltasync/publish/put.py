"""Objects on their way to a store: each key gets one content, which is put again after errors that may pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.channel.documents import File, sha256_hex
from deltasync.config import PublisherSettings
from deltasync.errors import CorruptDataError, ObjectExistsError, ObjectMissingError, TransientStoreError
from deltasync.stores.base import Store

logger = logging.getLogger(__name__)

_LONGEST_DELAY_S = 30.0
_LOOKS = 3

_Result = TypeVar("_Result")


def retried(settings: PublisherSettings, action: Callable[[], _Result]) -> _Result:
    """The result of `action`, which is run again after transient store errors."""
    delay_s = settings.retry_delay_s
    for left in range(settings.retries, -1, -1):
        try:
            return action()
        except TransientStoreError as error:
            if left == 0:
                raise
            logger.warning("%s Trying again in %.2f s (%d left).", error, delay_s, left)
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
    raise AssertionError("unreachable")


def put_file(store: Store, settings: PublisherSettings, key: str, data: bytes) -> File:
    """Store a file that a record will name. No other content was ever put there.

    Raises:
        StoreError: the file may be stored, or may be later; whoever gives it up takes another key.
    """
    retried(settings, lambda: store.put(key, data))
    return File(key=key, bytes=len(data), sha256=sha256_hex(data))


def create(store: Store, key: str, data: bytes) -> bool:
    """Create an object, or find it created by an earlier request whose reply got lost.

    Returns:
        Whether the key holds these bytes. If not, it holds other ones, for good.

    Raises:
        StoreError: neither is known.
    """
    try:
        store.create(key, data)
    except ObjectExistsError as error:
        found = holds(store, key, data)
        if found is None:
            raise TransientStoreError(f"{error} But it cannot be read back.") from error
        return found
    return True


def holds(store: Store, key: str, data: bytes) -> bool | None:
    """Whether a key holds these bytes and not other ones; None if it holds nothing.

    Other bytes are read again before they are taken for another publisher's: an answer may be damaged on the way.
    """
    try:
        return any(_read(store, key, len(data)) == data for _ in range(_LOOKS))
    except ObjectMissingError:
        return None


def _read(store: Store, key: str, most_bytes: int) -> bytes | None:
    try:
        return store.read(key, most_bytes)
    except CorruptDataError:
        return None  # larger
