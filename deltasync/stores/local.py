"""`file://`: a directory, shared by processes of one machine or over a network file system with atomic link and rename.

Written here and not taken from obstore, whose local store does not fsync (docs/decisions/0003-stores.md).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from deltasync import layout
from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import Capabilities, ObjectInfo, check_size


class LocalStore:
    """Objects as files below a directory. See `Store`."""

    capabilities = Capabilities(conditional_put=True)

    def __init__(self, root: str) -> None:
        self._root = Path(root)
        self.url = f"file://{self._root}"

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: a synced temporary file, linked to its name."""
        with self._temporary(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise ObjectExistsError(f"{self.url}/{key} already exists.") from None

    def replace(self, key: str, data: bytes) -> None:
        """See `Store.replace`: a synced temporary file, renamed over its name."""
        with self._temporary(key, data) as (temporary, path):
            os.replace(temporary, path)

    def read(self, key: str, most_bytes: int | None = None) -> bytes:
        """See `Store.read`."""
        try:
            with self._path(key).open("rb") as file:
                check_size(f"{self.url}/{key}", os.fstat(file.fileno()).st_size, most_bytes)
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissingError(f"{self.url}/{key} does not exist.") from None
        except OSError as error:
            raise StoreError(f"{self.url}/{key} cannot be read: {error.strerror}.") from error

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.read_range`."""
        try:
            with self._path(key).open("rb") as file:
                file.seek(start)
                data = file.read(end - start)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissingError(f"{self.url}/{key} does not exist.") from None
        except OSError as error:
            raise StoreError(f"{self.url}/{key} cannot be read: {error.strerror}.") from error
        if len(data) < end - start:
            raise StoreError(f"{self.url}/{key} ends before byte {end}.")
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        found = []
        for folder, _, names in os.walk(self._root / prefix.rpartition("/")[0]):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix) and not name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, *keys: str) -> None:
        """See `Store.delete`."""
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
                if path.parent != self._root:
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()  # if that was all it held; whoever is about to write there tries again
            except OSError as error:
                raise StoreError(f"{self.url}/{key} cannot be deleted: {error.strerror}.") from error

    def watch(self, key: str, on_change: Callable[[], None]) -> None:
        """See `Store.watch`; looking at a file costs nothing worth saving."""

    def _path(self, key: str) -> Path:
        return self._root / layout.check_key(key)

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        """A durable file beside its final place; after the block the folder is synced and the temporary name gone."""
        path = self._path(key)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary, path
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise TransientStoreError(f"{self.url}/{key} cannot be written: {error.strerror}.") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
