"""Requests of a publisher, repeated after errors that may pass.

Each key gets one content, however often it is put.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from deltasync.channel.documents import File, sha256_hex
from deltasync.config import PublisherSettings
from deltasync.errors import CorruptDataError, ObjectExistsError, ObjectMissingError, TransientStoreError
from deltasync.stores import retries
from deltasync.stores.base import Store
from deltasync.threads import Workers

READS = 3
"""How often bytes that look damaged are read: they may be so on the way only."""

_LARGE_BYTES = 4 << 20
"""Files from this size on are hashed while they are stored."""

_Result = TypeVar("_Result")


def retried(settings: PublisherSettings, action: Callable[[], _Result], stop: threading.Event | None = None) -> _Result:
    """Return the result of `action`, which is run again after transient store errors; `stop` ends a wait between."""
    return retries.retried(action, settings.retries, settings.retry_delay_s, stop=stop)


def reread(settings: PublisherSettings, action: Callable[[], _Result], level: int = logging.WARNING) -> _Result:
    """As `retried`; `action` is also run again if what it reads is damaged, which is logged at `level`."""
    return retries.retried(lambda: retried(settings, action), READS - 1, passing=(CorruptDataError,), level=level)


def put_file(
    store: Store, settings: PublisherSettings, key: str, data: bytes | memoryview, stop: threading.Event | None = None
) -> File:
    """Store a file that a record will name. No other content was ever put there.

    Raises:
        StoreError: the file may be stored, or may be later; whoever gives it up takes another key.
    """
    if len(data) < _LARGE_BYTES:
        retried(settings, lambda: store.put(key, data), stop)
        return File(key=key, bytes=len(data), sha256=sha256_hex(data))
    digest = Workers(1, "upload").submit(sha256_hex, data)
    retried(settings, lambda: store.put(key, data), stop)
    return File(key=key, bytes=len(data), sha256=digest.result())


def create(store: Store, key: str, data: bytes) -> bool:
    """Create an object. It may also have been created by an earlier request whose reply got lost.

    Returns:
        Whether the key holds these bytes. If not, it holds other ones, for good.

    Raises:
        StoreError: neither is known.
    """
    try:
        store.create(key, data)
    except ObjectExistsError as error:
        is_ours = holds(store, key, data)
        if is_ours is None:
            raise TransientStoreError(f"{error} But it cannot be read back.") from error
        return is_ours
    return True


def holds(store: Store, key: str, data: bytes) -> bool | None:
    """Whether a key holds these bytes and not other ones; None if it holds nothing.

    Other bytes are read again before they are taken for another publisher's.
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
