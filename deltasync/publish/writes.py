"""Files of a publisher. Each key gets one content, however often it is put."""

from __future__ import annotations

from deltasync.channel.documents import File, sha256_hex
from deltasync.stores.base import Store
from deltasync.threads import Workers

_LARGE_BYTES = 4 << 20
"""Files from this size on are hashed while they are stored."""


def put_file(store: Store, key: str, data: bytes | memoryview) -> File:
    """Store a file that a record will name. No other content was ever put there.

    Raises:
        StoreError: the file may be stored, or may be later; whoever gives it up takes another key.
    """
    if len(data) < _LARGE_BYTES:
        store.put(key, data)
        return File(key=key, bytes=len(data), sha256=sha256_hex(data))
    digest = Workers(1, "upload").submit(sha256_hex, data)
    store.put(key, data)
    return File(key=key, bytes=len(data), sha256=digest.result())
