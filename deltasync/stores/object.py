"""Object stores through obstore: `memory://` today, `s3://` by the same adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import obstore
from obstore import exceptions as obstore_errors
from obstore.store import MemoryStore

from deltasync import layout
from deltasync.errors import ObjectExistsError, ObjectMissingError, StoreError, TransientStoreError
from deltasync.stores.base import Capabilities, ObjectInfo


class ObstoreStore:
    """An obstore store. See `Store`."""

    capabilities = Capabilities(conditional_put=True)

    def __init__(self, url: str, client: MemoryStore) -> None:
        self.url = url
        self._client = client

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        with self._mapped(key):
            obstore.put(self._client, layout.check_key(key), data, mode="create")

    def replace(self, key: str, data: bytes) -> None:
        """See `Store.replace`."""
        with self._mapped(key):
            obstore.put(self._client, layout.check_key(key), data, mode="overwrite")

    def read(self, key: str) -> bytes:
        """See `Store.read`."""
        with self._mapped(key):
            return bytes(obstore.get(self._client, layout.check_key(key)).bytes())

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """See `Store.read_range`."""
        with self._mapped(key):
            data = bytes(obstore.get_range(self._client, layout.check_key(key), start=start, end=end))
        if len(data) < end - start:
            raise StoreError(f"{self.url}/{key} ends before byte {end}.")
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store.list`. obstore lists whole path parts only, so the last part of `prefix` is matched here."""
        folder = prefix.rpartition("/")[0]
        with self._mapped(prefix):
            found = [
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._client, prefix=folder or None)
                for meta in page
                if meta["path"].startswith(prefix)
            ]
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, *keys: str) -> None:
        """See `Store.delete`."""
        for key in keys:
            with contextlib.suppress(ObjectMissingError), self._mapped(key):
                obstore.delete(self._client, layout.check_key(key))

    def watch(self, key: str, on_change: Callable[[], None]) -> None:
        """See `Store.watch`; object stores have nothing to wait for."""

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """obstore's errors as ours."""
        try:
            yield
        except obstore_errors.AlreadyExistsError:
            raise ObjectExistsError(f"{self.url}/{key} already exists.") from None
        except (FileNotFoundError, obstore_errors.NotFoundError):
            raise ObjectMissingError(f"{self.url}/{key} does not exist.") from None
        except obstore_errors.GenericError as error:
            raise TransientStoreError(f"{self.url}/{key}: {error}.") from error
        except obstore_errors.BaseError as error:
            raise StoreError(f"{self.url}/{key}: {error}.") from error
