"""A cache directory that the processes of a machine share. Each object is downloaded once.

    <sha256>          an object, named by its digest; valid for every key and channel, never stale
    .<sha256>.tmp     an object that the holder of .lock-store is writing
    .lock-3f          held during the download of an object whose digest starts with 3f; others wait, then read the file
    .lock-store       held while a file is added and old ones are evicted

A cached object must pass the same check as a downloaded one; a file that fails is deleted and downloaded
again. The directory has mode 0700 and belongs to this user, which is checked at each use. A lock ends with
its process. The directory may be deleted at any time. Linux and macOS only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deltasync import limits
from deltasync.errors import ConfigError, FormatError
from deltasync.stores.base import Store, WrappedStore, read_file

try:
    import fcntl
except ImportError:  # Windows; `CachedStore` says so
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

logger = logging.getLogger(__name__)

Check = Callable[[bytes], None]  # raises FormatError if the bytes are not those of the object
_POLL_S = 0.005
# Longest waits for a lock, whose holder may hang. They exceed the time of a download, and of writing a file.
_DOWNLOAD_S, _STORE_S = 300.0, 30.0
_PAUSE_S = 60.0
_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.tmp")


class CachedStore(WrappedStore):
    """A store with a cache for reads by digest. Other reads do not use the cache. ConfigError on systems
    without `fcntl`.

    If the directory cannot be used (disk full, not writable, a lock that stays held), the store warns once,
    reads without the cache, and tries the directory again after a minute.

    Args:
        store: The store to read from.
        directory: The cache directory, created on first use for this user only.
        limit_bytes: Limit for the files in the cache. The least recently read are evicted; larger objects are
            not cached.
        shared: Whether downloads are added to the cache. Otherwise only `add` adds to it.
    """

    def __init__(self, store: Store, directory: str | Path, limit_bytes: int, shared: bool = True) -> None:
        if not _HAS_LOCKS:
            raise ConfigError("The node-local cache needs Linux or macOS. Set its size to 0 here.")
        super().__init__(store)
        self._directory = Path(directory)
        self._limit_bytes = limit_bytes
        self._shared = shared
        self._off_until = 0.0
        self._warned = False

    def read_known(self, key: str, sha256: str, size: int, check: Check, most_bytes: int) -> bytes:
        """Return the object with this digest. If several processes ask for it at once, one of them downloads
        it.

        `size` is 0 if it is unknown. `check` gets the bytes from the cache or the store, and raises
        FormatError for wrong ones, which are not cached. `most_bytes` is as in `Store.read`.
        """
        if size > self._limit_bytes or time.monotonic() < self._off_until:
            return self._download(key, check, most_bytes)
        cached = self._load(sha256, check, most_bytes)
        if cached is not None:
            return cached
        if not self._shared:
            return self._download(key, check, most_bytes)
        with self._lock(sha256[:2], _DOWNLOAD_S):
            # the previous holder of the lock may have added it
            cached = self._load(sha256, check, most_bytes)
            if cached is not None:
                return cached
            data = self._download(key, check, most_bytes)
            self.add(sha256, data)
        return data

    def add(self, sha256: str, data: bytes) -> None:
        """Add an object. It is not synced, and its digest is checked at each use, not here."""
        if time.monotonic() < self._off_until or len(data) > self._limit_bytes:
            return
        temporary = self._directory / f".{sha256}.tmp"
        with self._lock("store", _STORE_S) as is_held:
            if not is_held:
                return
            try:
                self._make_room(len(data))
                temporary.write_bytes(data)
                temporary.replace(self._directory / sha256)
            except OSError as error:
                self._give_up(error)
                with contextlib.suppress(OSError):
                    temporary.unlink()

    def _download(self, key: str, check: Check, most_bytes: int) -> bytes:
        data = self.inner.read(key, most_bytes)
        check(data)
        return data

    def _check_folder(self) -> None:
        """Raise OSError if the directory is missing, or is open to other users, who could replace the
        weights.
        """
        status = os.lstat(self._directory)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if status.st_uid != os.getuid():
            raise OSError(errno.EPERM, "it belongs to another user")
        if status.st_mode & 0o077:
            raise OSError(errno.EPERM, "others may use it; chmod 700 it")

    def _load(self, name: str, check: Check, most_bytes: int) -> bytes | None:
        path = self._directory / name
        try:
            self._check_folder()
            with path.open("rb") as file:
                data = read_file(file.fileno(), name, min(most_bytes, self._limit_bytes))
            check(data)
            with contextlib.suppress(OSError):
                os.utime(path)  # the time of the last read
            return data
        except FileNotFoundError:
            return None
        except FormatError:
            logger.warning("%s was damaged; downloading it again.", path)
            with contextlib.suppress(OSError):
                path.unlink()
        except OSError as error:
            self._give_up(error)
        return None

    def _make_room(self, size: int) -> None:
        """Evict the least recently read files until `size` bytes fit. The caller holds .lock-store."""
        files = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _NAME.fullmatch(path.name):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
                elif _TEMPORARY.fullmatch(path.name):
                    path.unlink()  # left over from a dead process: only the lock's holder writes
        total, count = size + sum(file_size for _, file_size, _ in files), 1 + len(files)
        for _, file_size, path in sorted(files):
            if total <= self._limit_bytes and count <= limits.CACHE_FILES:
                return
            path.unlink(missing_ok=True)
            total, count = total - file_size, count - 1

    @contextlib.contextmanager
    def _lock(self, name: str, wait_s: float) -> Iterator[bool]:
        """Lock a file against other processes and threads. Yield whether the lock is held."""
        is_held = False
        with contextlib.ExitStack() as stack:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check_folder()
                file = stack.enter_context((self._directory / f".lock-{name}").open("ab"))
                deadline = time.monotonic() + wait_s
                while not _try_lock(file.fileno()):
                    if time.monotonic() >= deadline:
                        raise TimeoutError(errno.ETIMEDOUT, f"a lock was held for {wait_s:g} s")
                    time.sleep(_POLL_S)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked process may keep a copy open
                is_held = True
            except OSError as error:
                self._give_up(error)
            yield is_held

    def _give_up(self, error: OSError) -> None:
        self._off_until = time.monotonic() + _PAUSE_S
        if not self._warned:
            self._warned = True
            logger.warning(
                "The cache in %s cannot be used (%s); reading without it.", self._directory, error.strerror
            )


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def behind_cache(store: Store, directory: str | None, limit_bytes: int, workers: int = 1) -> Store:
    """Return the store with which the processes of a replica read a channel.

    Args:
        store: The channel's store. `file://` and `memory://` are not cached: the kernel caches files already.
        directory: The cache directory; None for one in the system's temporary directory. A single worker adds
            nothing to that one, because no process shares it, but reads prefetched objects.
        limit_bytes: Limit for the cache; 0 for no cache.
        workers: Number of worker processes.
    """
    if limit_bytes == 0 or store.url.startswith(("file:", "memory:")):
        return store
    if directory is None:
        directory = str(Path(tempfile.gettempdir(), f"deltasync-{os.getuid()}"))
        return CachedStore(store, directory, limit_bytes, shared=workers > 1)
    # a configured directory may be a link
    return CachedStore(store, os.path.realpath(directory), limit_bytes)
