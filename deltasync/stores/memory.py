"""`memory://name`: the same name is the same store within one process. For tests and for trying things out."""

from __future__ import annotations

import threading

from obstore.store import MemoryStore

from deltasync.stores.object import ObstoreStore

_stores: dict[str, ObstoreStore] = {}
_lock = threading.Lock()


def memory_store(name: str) -> ObstoreStore:
    """The process-wide store of this name, created empty on first use."""
    with _lock:
        if name not in _stores:
            _stores[name] = ObstoreStore(f"memory://{name}", MemoryStore())
        return _stores[name]
