"""Where a channel lives: `open_store(url)`. Clients are imported and created on first use, in the process using them."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from deltasync.errors import ConfigError
from deltasync.stores.base import ObjectInfo, Store

__all__ = ["ObjectInfo", "Store", "open_store"]


def open_store(url: str) -> Store:
    """The store at `url`, whose keys start below it.

    Args:
        url: `file:///absolute/path` (created on first write) or `memory://name` (this process only).

    Raises:
        ConfigError: the URL is not of that form.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ConfigError(f"A channel URL has no '?' and no '#': {url!r}. In a path they are written %3F and %23.")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or not parts.path.strip("/"):
            raise ConfigError(f"A directory is written file:///absolute/path, not {url!r}.")
        from deltasync.stores.local import LocalStore

        return LocalStore(unquote(parts.path))
    if parts.scheme == "memory":
        name = (parts.netloc + parts.path).strip("/")
        if not name:
            raise ConfigError(f"An in-memory store is written memory://name, not {url!r}.")
        from deltasync.stores.memory import memory_store

        return memory_store(name)
    if parts.scheme in ("s3", "hf"):
        raise ConfigError(f"{parts.scheme}:// stores are not part of this release; use file:///path or memory://name.")
    raise ConfigError(f"Not a channel URL: {url!r}. Use file:///path or memory://name.")
