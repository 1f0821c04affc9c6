"""Test whether only one of two writers can create a key. Some servers accept `If-None-Match` and ignore it."""

from __future__ import annotations

import contextlib
import functools
import hashlib

from deltasync.errors import CorruptDataError, ObjectExistsError, StoreError, TransientStoreError
from deltasync.stores.base import Store
from deltasync.stores.retries import retried

_READS = 3
_CHANGE_S = 2.0  # Google allows one change of an object per second; at least half of this is waited


def decides(store: Store, key: str) -> bool:
    """Whether the store refuses to `create` an object that exists. StoreError if the test failed.

    The test creates an object at `key`, which nobody else may use, and deletes it again. A failed test is repeated with the
    same key after a wait, because stores limit how often an object may change.
    """
    if not store.can_create:
        return False
    first, second = (hashlib.sha256(f"{key} {which}".encode()).digest()[:16] for which in ("first", "second"))
    try:
        # If the first one is refused too, an earlier request may have succeeded and its reply got lost: read it back.
        refused = [retried(functools.partial(_is_refused, store, key, data), 1, _CHANGE_S) for data in (first, second)]
    except TransientStoreError:
        raise
    except StoreError:  # the store refuses every create
        store.put(key, second)  # raises if the store refuses this as well, for another reason
        return False
    else:
        # Read several times: a reply may be damaged in transit, and the channel stores the result of this test.
        return refused[1] and any(_holds(store, key, first) for _ in range(_READS))
    finally:
        with contextlib.suppress(StoreError):  # a trainer may lack the right to delete
            retried(lambda: store.delete(key), 1, _CHANGE_S)


def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.read(key, len(data)) == data
    except CorruptDataError:
        return False  # the object is larger


def _is_refused(store: Store, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except ObjectExistsError:
        return True
    return False
