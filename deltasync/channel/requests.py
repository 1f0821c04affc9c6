"""Ask a running publisher for an anchor: an object in the channel, which the publisher checks for as it publishes.

    requests/anchor.json    {"format": "deltasync/2", "version": N}

The request is answered once the channel has full weights of a version after N, the newest one when it was made. Nobody
deletes it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from deltasync.channel import documents, keys
from deltasync.codec.base import FORMAT
from deltasync.errors import UNREADABLE_JSON, CorruptDataError, ObjectMissingError
from deltasync.stores.base import Store


class _Request(msgspec.Struct):
    format: str
    version: Annotated[int, msgspec.Meta(ge=1, le=keys.LARGEST_VERSION)]


def ask(store: Store, version: int) -> None:
    """Ask for an anchor of a version after this one."""
    store.put(keys.ANCHOR_REQUEST, msgspec.json.encode(_Request(FORMAT, version)) + b"\n")


def asked(store: Store) -> int:
    """Return the version after which an anchor is asked for, 0 if none is. A request that cannot be read counts as none."""
    try:
        found = msgspec.json.decode(store.read(keys.ANCHOR_REQUEST, documents.SMALL_BYTES), type=_Request)
    except (ObjectMissingError, CorruptDataError, *UNREADABLE_JSON):
        return 0
    return found.version if found.format == FORMAT else 0
