"""`file://`: a directory of one machine, or of a network file system with atomic link and rename.

obstore's local store is not used because it does not fsync (docs/decisions/0003-stores.md).

Write access to the directory must give no access to other files of this machine. So symbolic links below the
root are not followed, and only ordinary files are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, is_key, read_file
from deltasync.threads import NO_FILES

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO would block
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_LASTING = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EFBIG),
    *(errno.ELOOP, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
    *_UNSUPPORTED,
)
"""Errors that no retry cures. A full disk is not among them."""
_IN_USE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.ETXTBSY)
_NO_RENAME = (
    "this file system cannot rename files. Use a directory on another one; for a bucket that is mounted "
    "here, its own URL, "
    "such as s3://"
)
_OPEN = (
    "the file is protected, or a reader has it open and this file system, such as SMB, does not allow it then"
)
_NO_LINKS = "this file system has no hard links"
_LOST_AND_FOUND = "lost+found"  # in the root of a file system; only root may read it
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class LocalStore:
    """A directory whose files are the objects. See `Store`."""

    can_create = True
    is_scarce = False

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self.url = f"file://{self._root}"
        self._durable: set[str] = set()  # folders whose entry in the parent was synced

    def create(self, key: str, data: bytes) -> None:
        """Sync a temporary file, then link it to its name. See `Store.create`."""
        with self._temporary(key, data) as (folder, temporary, name), self._writing(key):
            try:
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                raise ObjectExistsError(f"{self.url}/{key} already exists.") from None
            except OSError as error:
                if error.errno not in (*_UNSUPPORTED, errno.EPERM):
                    raise
                raise StoreError(
                    f"{self.url}/{key} cannot be created: {_NO_LINKS} ({error.strerror})."
                ) from None
            _sync(folder)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Sync a temporary file, then rename it. The rename has no time limit. See `Store.put`."""
        with self._temporary(key, data) as (folder, temporary, name), self._writing(key):
            try:
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    raise StoreError(
                        f"{self.url}/{key} cannot be replaced: {_NO_RENAME} ({error.strerror})."
                    ) from None
                if error.errno in _IN_USE:  # this user may write here: the temporary file is there
                    raise TransientStoreError(
                        f"{self.url}/{key} cannot be replaced: {_OPEN} ({error.strerror})."
                    ) from None
                raise
            _sync(folder)

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        with self._opened(key) as file:
            return read_file(file, f"{self.url}/{key}", most_bytes)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        with self._opened(key) as file, open(file, "rb", closefd=False) as stream:
            stream.seek(start)
            data = stream.read(end - start)
        if len(data) < end - start:
            raise StoreError(f"{self.url}/{key} ends before byte {end}.")
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        *folders, _ = prefix.split("/")
        try:
            with self._folder(folders) as start:
                found = [
                    info
                    for info in self._walk(start, "".join(f"{part}/" for part in folders), prefix)
                    if is_key(info.key)
                ]
        except OSError as error:
            if error.errno not in _ABSENT or self._has_link(folders):
                raise self._failed("/".join(folders), "read", error) from error
        yield from sorted(found, key=lambda info: info.key)

    def folders(self, prefix: str) -> Sequence[str]:
        """List one folder. See `base.folders`."""
        parts = prefix.split("/")[:-1]
        try:
            with self._folder(parts) as start, os.scandir(start) as entries:
                return [f"{prefix}{entry.name}/" for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            if error.errno not in _ABSENT or self._has_link(parts):
                raise self._failed("/".join(parts), "read", error) from error
            return []

    def _walk(self, folder: int, inside: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the files below a folder whose path starts with `prefix`. Those that disappear meanwhile are
        left out.

        Raises:
            OSError, StoreError: a folder or a file's status cannot be read.
        """
        for name in os.listdir(folder):
            path = inside + name
            if not path.startswith(prefix) and not prefix.startswith(f"{path}/"):
                continue
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(path, status.st_size, status.st_mtime)
                elif stat.S_ISDIR(status.st_mode) and path != _LOST_AND_FOUND and not name.startswith("."):
                    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                    try:
                        yield from self._walk(inner, f"{path}/", prefix)
                    finally:
                        os.close(inner)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise self._failed(path, "read", error) from error

    def unfinished(self) -> Iterator[ObjectInfo]:
        """Yield the temporary files, with names that are no keys: of puts under way, and of writers that were
        killed.
        """
        try:
            with self._folder(()) as start:
                for info in self._walk(start, "", ""):
                    *folders, name = info.key.split("/")
                    if _TEMPORARY.fullmatch(name) and is_key("/".join([*folders, "name"])):
                        yield info
        except OSError as error:
            if error.errno not in _ABSENT:
                raise self._failed("", "read", error) from error

    def delete_unfinished(self, info: ObjectInfo) -> None:
        """Delete a temporary file. If its writer lives, its put fails with a transient error."""
        *folders, name = info.key.split("/")
        assert _TEMPORARY.fullmatch(name)
        with contextlib.suppress(OSError), self._folder(folders) as folder:
            os.unlink(name, dir_fd=folder)

    def delete(self, *keys: str) -> None:
        for key in keys:
            *folders, name = check_key(key).split("/")
            try:
                with self._folder(folders) as folder:
                    os.unlink(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if error.errno in _IN_USE and self._is_writable(folders):
                    raise TransientStoreError(
                        f"{self.url}/{key} cannot be deleted: {_OPEN} ({error.strerror})."
                    ) from error
                raise self._failed(key, "deleted", error) from error
            if folders:
                with contextlib.suppress(OSError), self._folder(folders[:-1]) as above:
                    # succeeds only if it is empty; a writer that needs it retries
                    os.rmdir(folders[-1], dir_fd=above)

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> None:
        """Return None: polling a file is cheap."""

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str], create: bool = False) -> Iterator[int]:
        """Yield a descriptor of a folder below the root, without following links. `create` makes the folder
        durably.
        """
        if create and not ("" in self._durable and self._root.is_dir()):
            _make_durable(self._root)
            self._durable.add("")
        at = os.open(self._root, _FOLDER)
        try:
            for number, part in enumerate(parts, start=1):
                path = "/".join(parts[:number])
                if create:
                    self._make(at, part, path)
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)

    def _make(self, above: int, name: str, path: str) -> None:
        """Make a folder unless it exists, and sync its entry in the parent folder."""
        try:
            os.mkdir(name, dir_fd=above)
        except FileExistsError:
            if path in self._durable:
                return
        _sync(above)
        self._durable.add(path)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """Yield a descriptor to read an object from."""
        *folders, name = check_key(key).split("/")
        try:
            with self._folder(folders) as folder:
                file = os.open(name, _FILE, dir_fd=folder)
            try:
                status = os.fstat(file)
                if stat.S_ISDIR(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                if not stat.S_ISREG(status.st_mode):
                    raise StoreError(f"{self.url}/{key} is not an ordinary file and was not read.")
                yield file
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in _ABSENT and not self._has_link([*folders, name]):
                raise ObjectMissingError(f"{self.url}/{key} does not exist.") from None
            raise self._failed(key, "read", error) from error

    def _failed(self, key: str, verb: str, error: OSError) -> StoreError:
        if error.errno == errno.ELOOP or (error.errno in _ABSENT and self._has_link(key.split("/"))):
            return StoreError(f"{self.url}/{key} is behind a symbolic link, which is not followed.")
        kind = StoreError if error.errno in _LASTING else TransientStoreError
        why = NO_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else error.strerror
        return kind(f"{self.url}/{key} cannot be {verb}: {why}.")

    def _is_writable(self, parts: Sequence[str]) -> bool:
        """Whether this user may delete files of a folder."""
        return os.access(self._root.joinpath(*parts), os.W_OK | os.X_OK)

    def _has_link(self, parts: Sequence[str]) -> bool:
        """Whether a part of this path below the root is a symbolic link."""
        return any(self._root.joinpath(*parts[:number]).is_symlink() for number in range(1, len(parts) + 1))

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes | memoryview) -> Iterator[tuple[int, str, str]]:
        """Write and sync a temporary file. Yield its folder's descriptor, its name and the final name.

        The temporary name is removed after the block. Errors of the block pass through.
        """
        *folders, name = check_key(key).split("/")
        temporary = f".{name}.{uuid.uuid4().hex}.tmp"
        with contextlib.ExitStack() as stack:
            with self._writing(key):
                folder = stack.enter_context(self._folder(folders, create=True))
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
                stack.callback(_unlink, temporary, folder)
                with open(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            yield folder, temporary, name

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(key, "written", error) from error


def _sync(folder: int) -> None:
    """Sync the entries of a folder. Some network file systems cannot, and keep each change on their
    server.
    """
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *_UNSUPPORTED):
            raise


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _make_durable(root: Path) -> None:
    """Make the root and its missing parent folders, and sync the entries of all of them.

    Existing parents are synced too, because another process may have made them and died before its sync. The
    loop stops at a folder that this user may not read, which we did not make, and at the mount point of the
    root's file system.
    """
    root.mkdir(parents=True, exist_ok=True)
    for above in root.resolve().parents:
        try:
            descriptor = os.open(above, _FOLDER)
        except PermissionError:
            break
        try:
            _sync(descriptor)
        finally:
            os.close(descriptor)
        if os.path.ismount(above):
            break
