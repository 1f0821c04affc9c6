"""`file://`: a directory, shared by processes of one machine or over a network file system with atomic link and rename.

Written here and not taken from obstore, whose local store does not fsync (docs/decisions/0003-stores.md).

Whoever may write to the directory is not trusted with the rest of the machine: below the root, symbolic links are not
followed, and only ordinary files are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import ObjectInfo, check_key, read_file

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO would block
_LASTING = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT, errno.EFBIG),
    *(errno.ELOOP, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
)
"""What no other try makes better. A full disk may pass."""
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class LocalStore:
    """Objects as files below a directory. See `Store`."""

    can_create = True

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self.url = f"file://{self._root}"
        self._durable: set[str] = set()  # folders whose own entry was synced by this store

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: a synced temporary file, linked to its name."""
        with self._temporary(key, data) as (folder, temporary, name), self._writing(key):
            try:
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                raise ObjectExistsError(f"{self.url}/{key} already exists.") from None
            os.fsync(folder)

    def put(self, key: str, data: bytes | memoryview, *, guard: Callable[[], None] | None = None) -> None:
        """See `Store.put`: a synced temporary file, renamed over its name. A rename that hangs is not given up."""
        with self._temporary(key, data) as (folder, temporary, name):
            if guard is not None:
                guard()
            with self._writing(key):
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)

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
                for folder, _, names, at in os.fwalk(".", dir_fd=start):
                    inside = "/".join([*folders, *folder.split("/")[1:], ""])
                    for name in names:
                        key = inside + name
                        if key.startswith(prefix) and not name.startswith("."):
                            with contextlib.suppress(FileNotFoundError):
                                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                                if stat.S_ISREG(status.st_mode):
                                    found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        except OSError as error:
            if error.errno not in _ABSENT or self._leads_elsewhere(folders):
                raise self._failed("/".join(folders), "read", error) from error
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, *keys: str) -> None:
        for key in keys:
            *folders, name = check_key(key).split("/")
            try:
                with self._folder(folders) as folder:
                    os.unlink(name, dir_fd=folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._failed(key, "deleted", error) from error
            if folders:
                with contextlib.suppress(OSError), self._folder(folders[:-1]) as above:
                    os.rmdir(folders[-1], dir_fd=above)  # if that was all it held; who is about to write there tries again

    def watch(self, prefix: str, on_change: Callable[[ObjectInfo | None], None]) -> None:
        """See `Store.watch`; looking at a file costs nothing worth saving."""

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str], create: bool = False) -> Iterator[int]:
        """A descriptor of a folder below the root, reached without following links.

        Args:
            parts: The folders that lead there.
            create: Make those that are missing, durably.
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
        """Make sure that a folder is there, and that its entry in the one above it is on the disk."""
        try:
            os.mkdir(name, dir_fd=above)
        except FileExistsError:
            if path in self._durable:
                return
        os.fsync(above)
        self._durable.add(path)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """A descriptor of an object, to read from."""
        *folders, name = check_key(key).split("/")
        try:
            with self._folder(folders) as folder:
                file = os.open(name, _FILE, dir_fd=folder)
            try:
                status = os.fstat(file)
                if stat.S_ISDIR(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                if not stat.S_ISREG(status.st_mode):
                    raise StoreError(f"{self.url}/{key} is not an ordinary file, and is not read.")
                yield file
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in _ABSENT and not self._leads_elsewhere([*folders, name]):
                raise ObjectMissingError(f"{self.url}/{key} does not exist.") from None
            raise self._failed(key, "read", error) from error

    def _failed(self, key: str, what: str, error: OSError) -> StoreError:
        if error.errno == errno.ELOOP or (error.errno in _ABSENT and self._leads_elsewhere(key.split("/"))):
            return StoreError(f"{self.url}/{key} leads elsewhere by a symbolic link, which is not followed.")
        kind = StoreError if error.errno in _LASTING else TransientStoreError
        return kind(f"{self.url}/{key} cannot be {what}: {error.strerror}.")

    def _leads_elsewhere(self, parts: Sequence[str]) -> bool:
        """Whether a part of the way below the root is a symbolic link."""
        return any(self._root.joinpath(*parts[:number]).is_symlink() for number in range(1, len(parts) + 1))

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes | memoryview) -> Iterator[tuple[int, str, str]]:
        """A synced file beside its final place: a descriptor of its folder, its name, and the final one.

        After the block the temporary name is gone. Errors of the block pass through.
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


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _make_durable(root: Path) -> None:
    """Make the root and the folders above it that are missing, and sync the entries of all of them.

    Also of those that are there: another process may have made them and died before it synced. Folders that this user may
    not read are not ours, and those beyond the root's file system were there before it.
    """
    root.mkdir(parents=True, exist_ok=True)
    for above in root.resolve().parents:
        try:
            descriptor = os.open(above, _FOLDER)
        except PermissionError:
            break
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if os.path.ismount(above):
            break
