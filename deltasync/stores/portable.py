"""`file://` where files cannot be opened relative to a folder, which is Windows: obstore's local store.

Unlike `local.LocalStore` it does not sync: a version may be lost with the machine's power after `wait` returned. It follows
links, so nobody else may write to the directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from obstore.store import LocalStore

from deltasync.stores.object import ObstoreStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class PortableStore(ObstoreStore):
    """Objects as files below a directory, which is made on first use. See `Store`."""

    def __init__(self, root: str) -> None:
        self.url = Path(root).as_uri()
        self._root = root
        self._client: ObjectStore | None = None

    def client(self, upload_bytes: int = 0) -> ObjectStore:
        """See `ObstoreStore.client`."""
        if self._client is None:
            self._client = LocalStore(self._root, mkdir=True, automatic_cleanup=True)
        return self._client
