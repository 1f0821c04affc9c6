"""One download per node: objects whose digest is known, in a directory that the processes of a machine share.

    <sha256>          an object. Its name is its digest: it is never out of date, whatever its key was and in which channel
    .<sha256>.tmp     one being written, by the holder of .lock-store
    .lock-3f          held while an object whose digest begins so is downloaded; the others wait and then read the file
    .lock-store       held while a file is added and old ones make room

Nothing in it is trusted: what is read has to pass the check that the object has to pass anyway, and a file that fails is
dropped and fetched anew. At each use the directory must be this user's, and nobody else may write to it; no link in it is
followed. Locks end with the process that holds them. The directory may be deleted at any time. It is for Linux and macOS.
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

from deltasync.errors import ConfigError, FormatError
from deltasync.stores.base import ObjectInfo, Store, read_file
from deltasync.stores.wrapper import WrappedStore

try:
    import fcntl
except ImportError:  # Windows; `CachedStore` says so
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

logger = logging.getLogger(__name__)

Check = Callable[[bytes], None]
"""Raises FormatError if these are not the bytes that were asked for."""

_MOST_FILES = 4096  # each object that is added costs a look at all of them
_POLL_S = 0.005
# A process may hang while it holds a lock. Longer than a download takes, and than writing a file does.
_DOWNLOAD_S, _STORE_S = 300.0, 30.0
_PAUSE_S = 60.0
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC if _HAS_LOCKS else 0
_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.tmp")


class CachedStore(WrappedStore):
    """A store with a cache for reads by digest; other reads never come from it.

    Where the directory cannot be used (full, not writable, a lock that stays held), objects come from the store as if there
    were no cache, with one warning, and the directory is tried again after a minute.

    Args:
        store: Where objects come from.
        directory: Created on first use, for this user only.
        limit_bytes: Most bytes of files in it; those read longest ago make room. Larger objects are never kept.
        shared: Keep what is downloaded, for others. Otherwise only what `keep` is given is there to be found.

    Raises:
        ConfigError: this system has no `fcntl`.
    """

    def __init__(self, store: Store, directory: str | Path, limit_bytes: int, shared: bool = True) -> None:
        if not _HAS_LOCKS:
            raise ConfigError("The cache of a node needs Linux or macOS; set its size to 0 here.")
        super().__init__(store)
        self._directory = Path(directory)
        self._limit_bytes = limit_bytes
        self._shared = shared
        self._off_until = 0.0
        self._warned = False

    def read_known(
        self,
        key: str,
        sha256: str,
        size: int,
        check: Check,
        most_bytes: int,
        known: ObjectInfo | None = None,
    ) -> bytes:
        """The object with this digest. Of all processes that ask for it at a time, one downloads it.

        Args:
            key: Where the store has it.
            sha256: Its digest, 64 hexadecimal digits.
            size: Its bytes, 0 if that is not known.
            check: Applied to the bytes, from wherever they come.
            most_bytes: As of `Store.read`.
            known: As of `Store.read`.

        Raises:
            FormatError: too large, or of `check`, about what the store returned. Nothing is kept.
            ObjectMissingError, StoreError: as `Store.read`.
        """
        if size > self._limit_bytes or time.monotonic() < self._off_until:
            return self._download(key, check, most_bytes, known)
        found = self._load(sha256, check, most_bytes)
        if found is not None:
            return found
        if not self._shared:
            return self._download(key, check, most_bytes, known)
        with self._lock(sha256[:2], _DOWNLOAD_S):
            found = self._load(sha256, check, most_bytes)  # whoever held the lock before may have brought it
            if found is not None:
                return found
            data = self._download(key, check, most_bytes, known)
            self._keep(sha256, data)
        return data

    def keep(self, sha256: str, data: bytes) -> None:
        """Add an object that was read otherwise; its digest is not checked here, but whenever it is used."""
        if time.monotonic() >= self._off_until:
            self._keep(sha256, data)

    def _download(self, key: str, check: Check, most_bytes: int, known: ObjectInfo | None) -> bytes:
        data = self.inner.read(key, most_bytes, known)
        check(data)
        return data

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        """A descriptor of the directory, looked at anew: what is in it is opened by this alone.

        Raises:
            OSError: it is not there, it is a link, or others than this user may write to it.
        """
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
        try:
            _check_ours(os.fstat(folder), stat.S_ISDIR)
            yield folder
        finally:
            os.close(folder)

    def _load(self, name: str, check: Check, most_bytes: int) -> bytes | None:
        try:
            with self._folder() as folder, _opened(folder, name, os.O_RDONLY) as file:
                data = read_file(file, name, min(most_bytes, self._limit_bytes))
                check(data)
                with contextlib.suppress(OSError):
                    os.utime(file)  # when it was last read
                return data
        except FileNotFoundError:
            return None
        except FormatError:
            logger.warning("%s was damaged; fetching it anew.", self._directory / name)
            with contextlib.suppress(OSError), self._folder() as folder:
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            self._give_up(error)
        return None

    def _keep(self, name: str, data: bytes) -> None:
        """Add a file. Not synced: after a power failure its check finds out."""
        temporary = f".{name}.tmp"
        with self._lock("store", _STORE_S) as folder:
            if folder is None or len(data) > self._limit_bytes:
                return
            try:
                self._make_room(folder, len(data))
                _write(folder, temporary, data)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                self._give_up(error)
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)

    def _make_room(self, folder: int, size: int) -> None:
        """Drop the files read longest ago until one of `size` bytes has room. Holds .lock-store."""
        files = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _NAME.fullmatch(entry.name):
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime_ns, status.st_size, entry.name))
                    elif _TEMPORARY.fullmatch(entry.name):
                        os.unlink(entry.name, dir_fd=folder)  # of a process that died: only the lock's holder writes
        total, count = size + sum(file_size for _, file_size, _ in files), 1 + len(files)
        for _, file_size, name in sorted(files):
            if total <= self._limit_bytes and count <= _MOST_FILES:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total, count = total - file_size, count - 1

    @contextlib.contextmanager
    def _lock(self, name: str, wait_s: float) -> Iterator[int | None]:
        """Hold a lock file among processes and threads: yields a descriptor of the directory, or None if it does not."""
        held = None
        with contextlib.ExitStack() as stack:
            try:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder = stack.enter_context(self._folder())
                file = stack.enter_context(_opened(folder, f".lock-{name}", os.O_RDWR | os.O_CREAT))
                deadline = time.monotonic() + wait_s
                while not _try_lock(file):
                    if time.monotonic() >= deadline:
                        raise TimeoutError(errno.ETIMEDOUT, f"a lock was held for {wait_s:g} s")
                    time.sleep(_POLL_S)
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a forked process may have a copy that stays open
                held = folder
            except OSError as error:
                self._give_up(error)
            yield held

    def _give_up(self, error: OSError) -> None:
        self._off_until = time.monotonic() + _PAUSE_S
        if not self._warned:
            self._warned = True
            logger.warning("The cache in %s cannot be used (%s); going on without it.", self._directory, error.strerror)


def _check_ours(status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise OSError for what is of another kind, or of others, who could read the weights or lead us elsewhere."""
    if not is_kind(status.st_mode):
        raise OSError(errno.EINVAL, "it is of another kind")
    if status.st_uid != os.getuid():
        raise OSError(errno.EPERM, "it belongs to another user")
    if status.st_mode & 0o022:
        raise OSError(errno.EPERM, "others may write to it; chmod 700 it")


@contextlib.contextmanager
def _opened(folder: int, name: str, flags: int) -> Iterator[int]:
    """A descriptor of an ordinary file of this user."""
    file = os.open(name, flags | os.O_NONBLOCK | _NO_LINK, 0o600, dir_fd=folder)
    try:
        _check_ours(os.fstat(file), stat.S_ISREG)
        yield file
    finally:
        os.close(file)


def _write(folder: int, name: str, data: bytes) -> None:
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def behind_cache(store: Store, directory: str | None, limit_bytes: int, workers: int = 1) -> Store:
    """The store as the processes of a replica should read it.

    Args:
        store: The channel's. `file://` is not cached: the kernel keeps the files of a machine once already; nor is `memory://`.
        directory: The cache's; by default one of this user's in the system's temporary directory. There one worker alone
            finds what was fetched ahead for it, and keeps nothing itself, since nobody would share it.
        limit_bytes: Most bytes in the cache; 0 for none.
        workers: How many there are.
    """
    if limit_bytes == 0 or store.url.startswith(("file:", "memory:")):
        return store
    if directory is None:
        directory = str(Path(tempfile.gettempdir(), f"deltasync-{os.getuid()}"))
        return CachedStore(store, directory, limit_bytes, shared=workers > 1)
    return CachedStore(store, os.path.realpath(directory), limit_bytes)  # who sets it may have it lead elsewhere
