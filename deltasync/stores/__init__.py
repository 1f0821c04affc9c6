"""Stores hold channels: `open_store(url)`. A store's client is imported and created on first use."""

from __future__ import annotations

import os
import pkgutil
import shlex
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from deltasync.errors import ConfigError
from deltasync.stores.base import ObjectInfo, Store, WrappedStore

__all__ = [
    "ObjectInfo",
    "Store",
    "WrappedStore",
    "base",
    "cache",
    "leased",
    "local",
    "object",
    "open_store",
    "replies",
    "retries",
]

_FORMS = "a path, file:///path, s3://bucket/prefix, hf://buckets/namespace/name/prefix, gs://, az:// or memory://name"
_SERVICES = "deltasync.clouds:OPEN"  # a wing: what opens a URL by scheme, as `module:name`
_PATHS = ("/", "./", "../", "~")


def open_store(url: str | os.PathLike[str] | Store) -> Store:
    """Return the store at `url`. No request is made. Keys are relative to the URL.

    Args:
        url: A store, which is returned unchanged, or one of

            - `file:///absolute/path`, created on first write; also a `Path`, or a path that begins with `/`,
              `./`, `../` or `~`;
            - `s3://bucket/prefix?endpoint=https://host&region=...`, any S3-compatible server. All options are
              optional: `endpoint` (plain HTTP needs an explicit http://), `region`, `virtual_hosted=1`
              (otherwise the bucket is part of the path), `profile=NAME` of the AWS configuration (needs
              boto3), `anonymous=1`. Credentials and everything else come from the usual AWS_* variables or
              from the machine's role;
            - `hf://buckets/namespace/name/prefix`, a Hugging Face Bucket;
            - `gs://bucket/prefix`, `az://container/prefix`, configured with the usual variables of these
              clouds;
            - `memory://name`, visible in this process only.

    Raises:
        ConfigError: the URL has another form, or contains credentials.
    """
    if isinstance(url, os.PathLike) or (isinstance(url, str) and url.startswith(_PATHS)):
        url = Path(os.path.abspath(os.path.expanduser(url))).as_uri()
    if not isinstance(url, str):
        if not callable(getattr(url, "read_range", None)):
            raise ConfigError(f"A channel is a URL, a path or a store, not {url!r}.")
        return url
    if url.startswith("weight_v+"):
        raise ConfigError(
            f"{url} is a place of version directories, which other programs write. "
            f"`deltasync relay {shlex.quote(url)} CHANNEL` makes a channel of them, which replicas follow."
        )
    parts = urlsplit(url)
    if (opens := pkgutil.resolve_name(_SERVICES).get(parts.scheme)) is not None:
        return cast("Store", pkgutil.resolve_name(opens)(url))
    if parts.query or parts.fragment:
        raise ConfigError(
            f"A {parts.scheme}:// URL has no '?' and no '#': {url!r}. In a path, write %3F and %23."
        )
    if parts.scheme == "file":
        if (
            parts.netloc not in ("", "localhost")
            or not parts.path.startswith("/")
            or not parts.path.strip("/")
        ):
            raise ConfigError(f"A directory is written file:///absolute/path, not {url!r}.")
        path = url2pathname(parts.path)  # on Windows, C:\path for /C:/path
        if os.open not in os.supports_dir_fd:
            from deltasync.stores.object import PortableStore

            return PortableStore(path)
        from deltasync.stores.local import LocalStore

        return LocalStore(path)
    if parts.scheme == "memory":
        name = (parts.netloc + parts.path).strip("/")
        if not name:
            raise ConfigError(f"An in-memory store is written memory://name, not {url!r}.")
        from deltasync.stores.object import memory_store

        return memory_store(name)
    hint = "" if not url or "://" in url else f" A path in this directory is written {f'./{url}'!r}."
    if parts.scheme in ("http", "https"):
        hint = f" A bucket of an S3 server is written s3://bucket/prefix?endpoint={parts.scheme}://host."
    raise ConfigError(f"Not a channel URL: {url!r}. Use {_FORMS}.{hint}")
