"""Whether a store decides which one of two writers wins. Some servers take `If-None-Match` and ignore it."""

from __future__ import annotations

import contextlib
import os

from deltasync.errors import CorruptDataError, ObjectExistsError, StoreError, TransientStoreError
from deltasync.stores.base import Store

_LOOKS = 3


def decides(store: Store, key: str) -> bool:
    """Whether `create` is refused where an object is, tried out at `key`, which nobody else uses; it is deleted again.

    Raises:
        StoreError: it could not be tried out.
    """
    if not store.can_create:
        return False
    first, second = os.urandom(16), os.urandom(16)
    try:
        _taken(store, key, first)  # if it is, the reply of an earlier request got lost: reading back tells
        taken = _taken(store, key, second)
    except TransientStoreError:
        raise
    except StoreError:  # it refuses to create objects
        store.put(key, second)  # what it refuses as well has another reason, and is told
        return False
    else:
        # Read again, since an answer may be damaged on the way, and a channel keeps what is found out here.
        return taken and any(_holds(store, key, first) for _ in range(_LOOKS))
    finally:
        with contextlib.suppress(StoreError):  # a trainer need not be allowed to delete
            store.delete(key)


def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.read(key, len(data)) == data
    except CorruptDataError:
        return False  # larger


def _taken(store: Store, key: str, data: bytes) -> bool:
    try:
        store.create(key, data)
    except ObjectExistsError:
        return True
    return False
