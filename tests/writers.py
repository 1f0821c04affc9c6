"""Writers of a channel for tests of the protocol: small records, stores that misbehave, and a journal of
every key.

A plugin of pytest: tests/conftest.py names it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltasync import open_store
from deltasync.channel import documents, keys
from deltasync.channel.documents import (
    Anchor,
    Channel,
    DeltaFiles,
    Head,
    Record,
    VersionId,
    sha256_hex,
    table_sha256,
)
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.signing import Signer
from deltasync.config import PublisherSettings
from deltasync.errors import FormatError, MissingVersionError
from deltasync.opening.acquire import open_channel
from deltasync.publish.log import Log
from deltasync.stores import Store
from deltasync.stores.leased import LeasedStore
from deltasync.stores.retries import RetryStore
from tests.builders import wait_for_head
from tests.faults import FaultyStore
from tests.hub import fixtures

QUICK = functools.partial(LeasedStore, settle_s=0.03, recheck_s=0.02)
Lease = Callable[[Store], LeasedStore]
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {"w": ("bfloat16", (64,))}


class Journal:
    """What every key ever held, and what every writer ever sent to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, set[str]] = {}
        self._sent: dict[tuple[str, str], set[str]] = {}

    def send(self, writer: str, key: str, data: bytes) -> None:
        with self._lock:
            self._sent.setdefault((writer, key), set()).add(sha256_hex(data))

    def hold(self, key: str, data: bytes) -> None:
        with self._lock:
            self._held.setdefault(key, set()).add(sha256_hex(data))

    def forget(self, key: str) -> None:
        """Whatever the key held does not count: it was deleted, or damaged, or a restored store does not know
        it.
        """
        with self._lock:
            self._held.pop(key, None)

    def check(self, store: Store) -> None:
        """No key but head ever had two contents, or was sent two by one writer; what is there is what was put
        there.
        """
        fixed = {
            key: found
            for key, found in self._held.items()
            if key != keys.HEAD and not key.startswith("probe/")
        }
        assert {key: found for key, found in fixed.items() if len(found) > 1} == {}
        sent = {pair: found for pair, found in self._sent.items() if pair[1] in fixed}
        assert {pair: found for pair, found in sent.items() if len(found) > 1} == {}
        for info in store.list(""):
            if info.key != keys.HEAD:
                assert {sha256_hex(store.read(info.key, 1 << 30))} == self._held[info.key], info.key


class WriterStore(FaultyStore):
    """One writer's way to a store, with faults.

    Args:
        inner: The store.
        journal: Notes what happens to every key.
        name: The writer's.
        decides: Whether it says that it can create; if not, it is of the kind that needs a lease.
        ignores: Whether it nevertheless overwrites.
    """

    def __init__(
        self, inner: Store, journal: Journal, name: str = "a", *, decides: bool = True, ignores: bool = False
    ) -> None:
        super().__init__(inner)
        self._journal, self._name, self._decides, self._ignores = journal, name, decides, ignores

    @property
    def can_create(self) -> bool:
        return self._decides

    def create(self, key: str, data: bytes) -> None:
        assert self._decides
        self._journal.send(self._name, key, data)
        verb = self.inner.put if self._ignores else self.inner.create
        self.ask("create", key, lambda: self._stored(verb, key, data))

    def put(self, key: str, data: bytes) -> None:
        self._journal.send(self._name, key, data)
        self.ask("put", key, lambda: self._stored(self.inner.put, key, data))

    def _stored(self, verb: Callable[[str, bytes], None], key: str, data: bytes) -> None:
        verb(key, data)
        self._journal.hold(key, data)


class Script:
    """A publisher reduced to its protocol: each version has one file, whose bytes tell who wrote it.

    Attributes:
        log: Its log.
        channel: The channel that it found, None if there was none.
        tip: The newest version that it found.
        end: The record of that one, if it can be read.
    """

    def __init__(
        self,
        store: Store,
        *,
        resume: bool = True,
        lease: Lease = QUICK,
        retries: int = 3,
        signer: Signer | None = None,
        tensors: dict[str, tuple[str, tuple[int, ...]]] = TENSORS,
    ) -> None:
        self.reader = ChannelReader(
            RetryStore(store, retries, 0.0), None if signer is None else signer.trusted
        )
        settings = PublisherSettings()
        self.log: Log = open_channel(self.reader, settings, resume, signer, leased=lease)
        self.channel, self.tip = self.log.channel, self.log.tip
        self.end: StoredRecord | None = None
        if self.tip is not None:
            with contextlib.suppress(MissingVersionError, FormatError):
                self.end = self.reader.record(self.tip)
        self._tensors = tensors
        self._full = self.end is None

    def create(self) -> Channel:
        """Create the channel."""
        return self.log.describe(
            Channel(
                run_id="any",
                created_at=documents.now(),
                fencing="seal",
                epoch="000000-00000000",
                dtype="bfloat16",
                tensors=self._tensors,
                tensors_sha256=table_sha256(self._tensors),
            )
        )

    def publish(self, said: str = "", *, wait: bool = True) -> StoredRecord:
        """One version: full weights where there is no base that can be read, else a delta.

        Args:
            said: Goes into its file.
            wait: Also for head, so that what is stored is the same each time.
        """
        log = self.log
        if log.channel is None:
            self.create()
        version, full = log.next_version, self._full
        folder = (keys.anchor_folder if full else keys.parts_folder)(version, log.epoch, log.attempt(version))
        file = log.put_file(
            folder, "model.safetensors" if full else keys.part(0, 1), f"{log.epoch} {said}".encode()
        )
        found = log.append(
            Record(
                run_id=log.run_id,
                kind="anchor" if full else "delta",
                version=version,
                epoch=log.epoch,
                created_at=documents.now(),
                fingerprint="0" * 16,
                delta=None if full else DeltaFiles(codec="packed", changed=1, parts=[file]),
                anchor=Anchor(directory=folder, files=[file]) if full else None,
            ),
            None,
        )
        self._full = False
        if wait:
            wait_for_head(log)
        return found


def history(store: Store) -> list[VersionId]:
    """All versions that lead to the newest one, oldest first, as a new reader finds them; their files have
    their digests.
    """
    reader = ChannelReader(store)
    found = list(reader.versions())[::-1]
    for version in found:
        for file in reader.record(version).record.files:
            reader.fetch(file)
    assert [version.version for version in found] == list(range(1, len(found) + 1))
    return found


def head(store: Store) -> Head | None:
    """Head, as a new reader finds it."""
    return ChannelReader(store).head()


def snapshot(store: Store) -> dict[str, bytes]:
    """All that a store holds."""
    return {info.key: store.read(info.key, 1 << 30) for info in store.list("")}


class Place:
    """A store that several writers use.

    Attributes:
        store: Without faults.
        lease: How its writers succeed each other, if it does not decide.
        decides: Whether it does.
    """

    def __init__(self, store: Store, decides: bool, lease: Lease = QUICK) -> None:
        self.store, self.decides, self.lease, self.journal = store, decides, lease, Journal()

    def writer(self, name: str = "a", **options: bool) -> WriterStore:
        """A writer's way to it."""
        return WriterStore(self.store, self.journal, name, decides=self.decides, **options)

    def script(self, name: str = "a", **options: object) -> Script:
        """A writer that has opened the channel."""
        return Script(self.writer(name), lease=self.lease, **options)  # type: ignore[arg-type]

    def damage(self, key: str, data: bytes) -> None:
        """Put other bytes where something is."""
        self.store.put(key, data)
        self.journal.forget(key)
        self.journal.hold(key, data)

    def forget(self, key: str) -> None:
        """Delete an object."""
        self.store.delete(key)
        self.journal.forget(key)


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if kind == "s3":
        return Place(
            open_store(request.getfixturevalue("s3_server").url(request.getfixturevalue("s3_bucket"))), True
        )
    if kind == "hub":
        return Place(request.getfixturevalue("hub_channel"), False, fixtures.LEASE)
    url = f"file://{tmp_path}/channel" if kind == "file" else request.getfixturevalue("memory_url")
    return Place(open_store(url), kind != "lease")


def _places(*kinds: str) -> Any:
    @pytest.fixture(params=kinds)
    def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
        found = place_of(request.param, request, tmp_path)
        yield found
        found.journal.check(found.store)

    return place


# `lease` is memory that does not decide.
anywhere = _places("memory", "file", "s3", "lease", "hub")
quick = _places("memory", "lease")
memory = _places("memory")
leased = _places("lease")
