"""Read a channel. Each object is bounded before it is read, and checked with the digest or signature that
covers it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from deltasync import limits
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import Channel, EpochDocument, File, Head, Record, VersionId, sha256_hex
from deltasync.channel.keys import Slot
from deltasync.channel.record import StoredRecord
from deltasync.channel.signing import Trusted, signed_by
from deltasync.config import ReaderSettings
from deltasync.errors import (
    CorruptDataError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    ObjectMissingError,
    RunMismatchError,
    StoreError,
)
from deltasync.stores.base import ObjectInfo, Store, folders
from deltasync.stores.cache import CachedStore
from deltasync.tensors import Layout, TensorSpec

_Document = TypeVar("_Document", Channel, Head, EpochDocument)

_FOLDERS = 16  # of the newest records that are listed one by one; beyond them all records are listed

_END_BYTES = 1 << 14  # of a record; nearly all documents fit


class ChannelReader:
    """Reads one channel, from several threads. It refuses another run than the one that it saw first.

    Args:
        store: The channel's store.
        trusted_keys: Public keys, or their file; one of them must have signed each record. None for the file
            that the environment names; without it signatures are not checked.
    """

    def __init__(self, store: Store, trusted_keys: str | Path | Trusted | None = None) -> None:
        self.store = store
        settings = ReaderSettings.from_env(
            trusted_keys=None if isinstance(trusted_keys, Trusted) else trusted_keys
        )
        if not isinstance(trusted_keys, Trusted):
            trusted_keys = (
                None if settings.trusted_keys is None else Trusted(path=Path(settings.trusted_keys))
            )
        self.trusted = trusted_keys  # None if signatures are not checked
        self._token_repos = (settings.reference_repos or "").split(",")
        self.signed = False  # whether channel.json was read and has a signature, checked or not
        # fetched before their digest was known, by key; dropped when used
        self.prefetched: dict[str, Future[bytes]] = {}
        self._described: tuple[Channel, bytes] | None = None
        self._confirmed = False  # whether a record of the same run was read

    def may_use_token(self, repo: str | None) -> bool:
        """Whether this machine's token of the Hub may be used for a model that a record refers to."""
        return self.trusted is not None or repo in self._token_repos

    def channel(self) -> Channel:
        """channel.json, read once. Raises NotPublishedError if there is none yet."""
        return self._description[0]

    @property
    def _description(self) -> tuple[Channel, bytes]:
        if self._described is None:
            self._described = self._read_channel()
        return self._described

    def _read_channel(self) -> tuple[Channel, bytes]:
        try:
            data = self.store.read(keys.CHANNEL, limits.CHANNEL_BYTES)
        except ObjectMissingError:
            if self._confirmed:
                raise NotPublishedError(
                    f"The channel is gone: {self.store.url} lacks its {keys.CHANNEL}, though run "
                    f"{self.run_id} was read "
                    "there. A replica goes on with the version that it has. A running publisher puts it "
                    "back; otherwise "
                    "restore it from a copy of the channel."
                ) from None
            with contextlib.suppress(StoreError):
                self.store.read_range(keys.HEAD, 0, 1)
                raise NotPublishedError(
                    f"{self.store.url} lacks its {keys.CHANNEL}, though something was published there. A "
                    "running publisher "
                    "puts it back; otherwise restore it from a copy of the channel."
                ) from None
            raise NotPublishedError(
                f"{self.store.url} holds no channel yet. Check the URL, unless nothing was published."
            ) from None
        if self.trusted is not None:
            self.trusted.check(keys.CHANNEL, data)
        found = documents.decode(data, Channel, keys.CHANNEL)
        self.signed = signed_by(data) is not None
        return found, data

    def read_channel_again(self) -> Channel:
        """Read channel.json anew, and twice where no signature covers it.

        Raises NotPublishedError if there is none, CorruptDataError if the two differ: a byte was damaged on
        the way.
        """
        channel, data = self._read_channel()
        if self.trusted is None and self._read_channel()[1] != data:
            raise CorruptDataError(f"{keys.CHANNEL} was read twice, with different bytes.")
        self._described = channel, data
        return channel

    @property
    def channel_data(self) -> bytes:
        """The bytes of channel.json."""
        return self._description[1]

    def check_run(self) -> None:
        """Read channel.json again, and check that it is of the run that was read first. A damaged one is
        ignored.

        If no record of the first run was read yet, the new one is taken: the first answer may have been
        damaged on the way. Raises RunMismatchError if it is of another run, NotPublishedError if it is gone.
        """
        expected = self.channel().run_id
        try:
            described = self._read_channel()
        except FormatError:
            return
        run_id = described[0].run_id
        if run_id != expected and self._confirmed:
            raise RunMismatchError(
                f"{self.store.url} now holds run {run_id}, and not {expected}, which was followed. Restart "
                "to follow it."
            )
        if run_id != expected:
            self._described = described

    @property
    def run_id(self) -> str | None:
        """The run, None before channel.json was read."""
        return None if self._described is None else self._described[0].run_id

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensor table by name."""
        return self.channel().specs

    @property
    def layout(self) -> Layout:
        """The tensors as vectors."""
        return self.channel().layout

    def head(self) -> Head | None:
        """head.json, None if it is missing, damaged or of another run: it is only a hint."""
        found = self._read_small(keys.HEAD, Head)
        return found if found is not None and found.run_id == self.channel().run_id else None

    def opening(self, epoch: str) -> EpochDocument | None:
        """The document of an epoch, None if it is missing or damaged, or no trusted key has signed it."""
        return self._read_small(keys.epoch_document(epoch), EpochDocument, self.trusted)

    def _read_small(
        self, key: str, kind: type[_Document], trusted: Trusted | None = None
    ) -> _Document | None:
        try:
            return self._small(key, kind, trusted)
        except (ObjectMissingError, FormatError):
            return None

    def _small(self, key: str, kind: type[_Document], trusted: Trusted | None) -> _Document:
        data = self.store.read(key, limits.SMALL_BYTES)
        if trusted is not None:
            trusted.check(key, data)
        return documents.decode(data, kind, key)

    def slot(self, slot: Slot, known: ObjectInfo | None = None) -> StoredRecord | None:
        """The record in a slot, a version or a seal; None if the slot is empty. See `stored`."""
        try:
            return self.stored(slot.key, known=known)
        except MissingVersionError:
            return None

    def record(self, version: VersionId) -> StoredRecord:
        """The record of a version; a seal is refused. See `stored`."""
        found = self.stored(version.key, version.sha256)
        if not found.record.is_version:
            raise CorruptDataError(f"{version.key} is a seal, and not a version.")
        return found

    def stored(self, key: str, sha256: str | None = None, known: ObjectInfo | None = None) -> StoredRecord:
        """Read and check a record, a compaction or an announcement.

        With the digest `sha256` that it must have, the node's cache is used. `known` is its entry in a
        listing or an event. Raises MissingVersionError if it is not in the store, CorruptDataError if it is
        damaged, has another digest, or is of another run.
        """
        most = self.channel().most_bytes(key)
        try:
            if self.trusted is not None and sha256 is None and keys.compaction_of(key) is not None:
                # Anybody can store a large compaction, so the signed size is checked before the rest is read.
                most = self.channel().most_bytes(keys.VERSIONS)
                known = known or next((info for info in self.store.list(key) if info.key == key), None)
                if known is not None and known.bytes > most:
                    self.document(known)
                    most = known.bytes
            data = (
                self.store.read(key, most, known)
                if sha256 is None
                else self._read_known(key, sha256, 0, most)
            )
        except ObjectMissingError:
            raise MissingVersionError(f"{self.store.url} has no {key}.") from None
        return self._decoded(data, key)

    def document(self, info: ObjectInfo) -> Record:
        """Read only the document of a record, compaction or announcement, by its entry in a listing. Raises
        like `stored`.

        The signature is checked; the digest and the payload are not. Show the result, but never apply it.
        """
        if info.bytes > self.channel().most_bytes(info.key):
            raise CorruptDataError(f"{info.key} has {info.bytes:,} bytes, which is more than it may have.")
        try:
            if info.bytes <= _END_BYTES:
                return self._decoded(self.store.read(info.key, info.bytes, info), info.key).record
            end = self.store.read_range(info.key, info.bytes - _END_BYTES, info.bytes)
            length = record.document_bytes(end, info.key)
            if length > self.channel().most_bytes(keys.VERSIONS):
                raise CorruptDataError(
                    f"{info.key} has a document of {length:,} bytes, which is more than it may have."
                )
            if len(end) < length <= info.bytes:
                end = self.store.read_range(info.key, info.bytes - length, info.bytes)
        except ObjectMissingError:
            raise MissingVersionError(f"{self.store.url} has no {info.key}.") from None
        found = record.decode_document(end, info.bytes, info.key, self.trusted)
        self._check(found, info.key)
        return found

    def handed(self, key: str, sha256: str, data: bytes | None) -> StoredRecord:
        """Decode and check a record, as `stored`, from bytes that another process read; with None, read them
        here.
        """
        if data is None:
            return self.stored(key, sha256)
        found = self._decoded(data, key)
        if found.sha256 != sha256:
            raise _wrong_digest(key)
        return found

    def _check(self, found: Record, key: str) -> None:
        """Check the run of a record, and the bytes that it names."""
        channel = self.channel()
        if found.run_id != channel.run_id and not self._confirmed:
            self.check_run()
            channel = self.channel()
        if found.run_id != channel.run_id:
            raise CorruptDataError(
                f"{key} belongs to run {found.run_id}, this channel to run {channel.run_id}."
            )
        self._confirmed = True
        if found.payload_bytes - found.body_bytes > channel.most_payload_bytes:
            raise CorruptDataError(
                f"{key} names {found.payload_bytes:,} bytes, which is more than the channel's tensors take."
            )

    def _decoded(self, data: bytes, key: str) -> StoredRecord:
        found = record.decode(data, key, self.trusted)
        self._check(found.record, key)
        return found

    def fetch(self, file: File) -> bytes:
        """Read and check a file that a document names. Raises MissingVersionError or CorruptDataError."""
        found = self.prefetched.pop(file.key, None)
        if found is not None and sha256_hex(data := found.result()) == file.sha256:
            return data
        with self._is_named(file):
            data = self._read_known(file.key, file.sha256, file.bytes, file.bytes)
        if len(data) != file.bytes:
            raise CorruptDataError(f"{file.key} has {len(data)} bytes, its record says {file.bytes}.")
        return data

    def read_range(self, file: File, first: int, last: int) -> bytes:
        """Read bytes from `first` up to `last` of a file that a document names. They are not checked."""
        with self._is_named(file):
            return self.store.read_range(file.key, first, last)

    @contextlib.contextmanager
    def _is_named(self, file: File) -> Iterator[None]:
        """Raise MissingVersionError if a file that a document names is missing."""
        try:
            yield
        except ObjectMissingError:
            raise MissingVersionError(
                f"{file.key} is named by a record but is not in {self.store.url}."
            ) from None

    def fetch_ahead(self, key: str, most_bytes: int) -> int:
        """Read an object before its digest is known, for the node's cache, or else for `fetch`. Return its
        size, 0 on failure.
        """
        future = self.prefetched[key] = Future[bytes]()
        data = b""
        try:
            data = self.store.read(key, most_bytes)
            if isinstance(self.store, CachedStore):
                self.store.add(sha256_hex(data), data)
                self.prefetched.pop(key, None)
        except (StoreError, CorruptDataError):
            self.prefetched.pop(key, None)
        finally:
            future.set_result(data)
        return len(data)

    def _read_known(self, key: str, sha256: str, size: int, most_bytes: int) -> bytes:
        """Read and check an object whose digest is known, from the node's cache if the store has one."""
        if isinstance(self.store, CachedStore):
            return self.store.read_known(
                key, sha256, size, lambda data: _check_digest(data, key, sha256), most_bytes
            )
        data = self.store.read(key, most_bytes)
        _check_digest(data, key, sha256)
        return data

    def slots(self, prefix: str = keys.VERSIONS) -> list[tuple[Slot, ObjectInfo]]:
        """List the records, by number, then epoch; all, or those of one folder (`keys.folder`)."""
        found = [
            (slot, info) for info in self.store.list(prefix) if (slot := keys.slot_of(info.key)) is not None
        ]
        return sorted(found, key=lambda pair: pair[0])

    def folders(self) -> list[str] | None:
        """List the folders of records, the newest first; None if the store cannot list folders alone."""
        found = folders(self.store, keys.VERSIONS)
        return None if found is None else sorted(filter(keys.is_folder, found), reverse=True)

    def newest_slots(self) -> list[tuple[Slot, ObjectInfo]]:
        """List the newest records, as `slots`: those of the epoch that goes on, or of all, and at least one more
        than `limits.DAMAGED_RECORDS` if there are as many.

        The folders are listed from the newest one back. Records of an epoch that forked off long before are found
        too: its document says after which version they begin.
        """
        found: list[tuple[Slot, ObjectInfo]] = []
        names = self.folders()
        for name in (names or [])[:_FOLDERS]:
            found = self.slots(name) + found
            if len(found) > limits.DAMAGED_RECORDS and self._go_on_in(found, name):
                return found
        return self.slots() if names is None or len(names) > _FOLDERS else found

    def _go_on_in(self, listed: Sequence[tuple[Slot, ObjectInfo]], oldest: str) -> bool:
        """Whether these records, all from a folder on, include the greatest epoch that has any."""
        greatest = max(slot.epoch for slot, _ in listed)
        for epoch in reversed(self.epochs()):
            if epoch <= greatest:
                return True
            opening = self.opening(epoch)
            if opening is None or opening.continues is None:
                return False
            if keys.folder(opening.continues.version + 1) < oldest:
                return False
        return True

    def slots_from(self, version: int) -> list[tuple[Slot, ObjectInfo]]:
        """List the records, as `slots`, from the folder of this version on."""
        first, names = keys.folder(version), self.folders()
        if names is None:
            return [pair for pair in self.slots() if keys.folder(pair[0].version) >= first]
        return [pair for name in reversed(names) if name >= first for pair in self.slots(name)]

    def compactions(self) -> list[tuple[Slot, ObjectInfo]]:
        """List the compactions."""
        return self.shortcuts(keys.COMPACTIONS)

    def announcements(self) -> list[tuple[Slot, ObjectInfo]]:
        """List the announcements of anchors."""
        return self.shortcuts(keys.ANNOUNCEMENTS)

    def shortcuts(self, *prefixes: str) -> list[tuple[Slot, ObjectInfo]]:
        """List shortcuts under these prefixes; without any, compactions and announcements."""
        infos = (
            info
            for prefix in prefixes or (keys.COMPACTIONS, keys.ANNOUNCEMENTS)
            for info in self.store.list(prefix)
        )
        return [(span, info) for info in infos if (span := keys.shortcut_of(info.key)) is not None]

    def epochs(self) -> list[str]:
        """List the epochs that have a document, ascending."""
        return sorted(
            epoch for info in self.store.list(keys.EPOCHS) if (epoch := keys.epoch_of(info.key)) is not None
        )

    def newest(self) -> StoredRecord | None:
        """The last record of the greatest epoch, None if there is none. If it is a seal, its base is the
        newest version.

        Raises FormatError if there are records, and none of the newest `limits.DAMAGED_RECORDS` can be read.
        """
        found, damaged = self.newest_readable(self.newest_slots())
        if found is None and damaged is not None:
            raise damaged
        return found

    def newest_readable(
        self, listed: Sequence[tuple[Slot, ObjectInfo]]
    ) -> tuple[StoredRecord | None, FormatError | None]:
        """`newest` of listed records, and the error of the newest damaged record that was passed over, if
        any.

        Up to `limits.DAMAGED_RECORDS` are passed over; the limit bounds the cost of a flood of them.
        """
        newest_first = sorted(listed, key=lambda pair: pair[0].newness, reverse=True)
        problem: FormatError | None = None
        for slot, info in newest_first[: limits.DAMAGED_RECORDS + 1]:
            try:
                if (stored := self.slot(slot, info)) is not None:
                    return stored, problem
            except FormatError as error:
                problem = problem or error
        return None, problem

    def newest_version(self) -> VersionId | None:
        """The newest version, None before the first. Raises like `newest`."""
        stored = self.newest()
        return None if stored is None else stored.version if stored.record.is_version else stored.record.base

    def numbered(self, version: int) -> StoredRecord:
        """The record of a version by its number, in the greatest epoch. Raises MissingVersionError if there
        is none.
        """
        for slot, info in reversed(self.slots(keys.folder(version))):
            if slot.version == version:
                stored = self.slot(slot, info)
                if stored is not None and stored.record.is_version:
                    return stored
        raise MissingVersionError(
            f"Version {version} is not in {self.store.url}: not published yet, or forgotten."
        )

    def versions(self) -> Iterator[VersionId]:
        """Read the versions from the newest one back. Ends where one is missing or damaged."""
        yield from (found.version for found in self.back_from(self.newest_version()))

    def back_from(self, version: VersionId | None) -> Iterator[StoredRecord]:
        """Read the records from a version back. Ends where one is missing or damaged."""
        with contextlib.suppress(MissingVersionError, FormatError):
            while version is not None:
                stored = self.record(version)
                yield stored
                version = stored.record.base


def _check_digest(data: bytes, key: str, sha256: str) -> None:
    if sha256_hex(data) != sha256:
        raise _wrong_digest(key)


def _wrong_digest(key: str) -> CorruptDataError:
    return CorruptDataError(f"{key} does not have the sha256 that it is named by.")
