"""Test whether only one of two writers can create a key. Some servers accept `If-None-Match` and ignore it."""

from __future__ import annotations

import contextlib
import os

from deltasync.errors import CorruptDataError, ObjectExistsError, StoreError, TransientStoreError
from deltasync.stores.base import Store

_READS = 3


def decides(store: Store, key: str) -> bool:
    """Whether the store refuses to `create` an object that exists.

    This creates an object at `key`, which nobody else may use, and deletes it again.

    Raises:
        StoreError: the test failed, so the answer is unknown.
    """
    if not store.can_create:
        return False
    first, second = os.urandom(16), os.urandom(16)
    try:
        # If the first one is refused too, an earlier request succeeded and its reply got lost: reading back tells.
        refused = [_is_refused(store, key, data) for data in (first, second)]
    except TransientStoreError:
        raise
    except StoreError:  # the store refuses every create
        store.put(key, second)  # if it refuses this as well, the reason is another one, and is raised
        return False
    else:
        # Read several times: an answer may be damaged on the way, and the channel keeps what is found here.
        return refused[1] and any(_holds(store, key, first) for _ in range(_READS))
    finally:
        with contextlib.suppress(StoreError):  # a trainer may have no right to delete
            store.delete(key)


def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.read(key, len(data)) == data
    except CorruptDataError:
        return False  # larger


def _is_refused(store: Store, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except ObjectExistsError:
        return True
    return False
