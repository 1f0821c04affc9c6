"""Whether a store decides which one of two writers wins. Some servers take `If-None-Match` and ignore it."""

from __future__ import annotations

import contextlib
import os

from deltasync.errors import ObjectExistsError, StoreError, TransientStoreError
from deltasync.stores.base import Store


def decides(store: Store, key: str) -> bool:
    """Whether `create` is refused where an object is, tried out at `key`, which is deleted again.

    Args:
        store: The channel's.
        key: Which nobody else uses.

    Raises:
        StoreError: it could not be tried out.
    """
    if not store.capabilities.conditional_put:
        return False
    first, second = os.urandom(16), os.urandom(16)
    try:
        _create(store, key, first)  # if it is taken, the reply of an earlier request got lost: reading back tells
        return _create(store, key, second) == "taken" and store.read(key, len(first)) == first
    except _CannotError:
        return False
    finally:
        with contextlib.suppress(StoreError):  # a trainer need not be allowed to delete
            store.delete(key)


class _CannotError(Exception):
    """The store puts objects, but refuses to create them."""


def _create(store: Store, key: str, data: bytes) -> str:
    try:
        store.create(key, data)
    except ObjectExistsError:
        return "taken"
    except TransientStoreError:
        raise
    except StoreError:
        store.put(key, data)  # what it refuses as well has another reason, and is told
        raise _CannotError from None
    return "created"
