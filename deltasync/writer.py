"""Objects on their way to a store: created, never overwritten, tried again after errors that may pass."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from deltasync import signing
from deltasync.config import PublisherSettings
from deltasync.errors import ObjectExistsError, ObjectMissingError, TransientStoreError
from deltasync.manifest import Document, FileRef, sha256_hex
from deltasync.signing import Signer
from deltasync.stores.base import Store

logger = logging.getLogger(__name__)

_LONGEST_DELAY_S = 30.0
_LOOKS = 3

_Result = TypeVar("_Result")

Contents = bytes | Path
"""What a file is to hold: the bytes, or a local file that is read when it is its turn."""


class Writer:
    """Writes to one store as `PublisherSettings` says. Documents are signed if there is a `signer`."""

    def __init__(self, store: Store, settings: PublisherSettings, signer: Signer | None = None) -> None:
        self.store = store
        self._settings = settings
        self._signer = signer

    def encode(self, document: Document, key: str) -> bytes:
        """A document as it is to be stored; the same bytes each time."""
        return signing.encode(document, key, self._signer)

    def put_files(
        self, folder: Callable[[int, int], str], version: int, files: Sequence[tuple[str, Contents]]
    ) -> tuple[str, list[FileRef]]:
        """Create the files of one version in a folder that no other attempt has used.

        A dead or racing publisher may have left other files under the same names; objects are never overwritten, so the
        next attempt takes the next folder, and the manifest decides which one counts.
        """
        for attempt in itertools.count():
            directory = folder(version, attempt)
            refs = []
            try:
                for name, contents in files:
                    key, data = f"{directory}/{name}", contents.read_bytes() if isinstance(contents, Path) else contents
                    self.create(key, data)
                    refs.append(FileRef(key=key, bytes=len(data), sha256=sha256_hex(data)))
            except ObjectExistsError:
                continue
            return directory, refs
        raise AssertionError("unreachable")

    def create(self, key: str, data: bytes) -> None:
        """Create-only put, tried again after transient errors; it recognises its own earlier success, whose reply was lost.

        Raises:
            ObjectExistsError: the key holds other bytes.
        """
        self.retry(lambda: self._create(key, data))

    def _create(self, key: str, data: bytes) -> None:
        try:
            self.store.create(key, data)
        except ObjectExistsError:
            # Asked more than once before it is taken for another publisher's: an answer may be damaged on the way.
            for _ in range(_LOOKS):
                try:
                    if self.store.read(key) == data:
                        return
                except ObjectMissingError as error:
                    raise TransientStoreError(f"{key} is there, and is not: {error}") from error
            raise

    def retry(self, action: Callable[[], _Result]) -> _Result:
        """Run `action`, again after transient store errors."""
        delay_s = self._settings.retry_delay_s
        for left in range(self._settings.retries, -1, -1):
            try:
                return action()
            except TransientStoreError as error:
                if left == 0:
                    raise
                logger.warning("%s Trying again in %.2f s (%d left).", error, delay_s, left)
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        raise AssertionError("unreachable")
