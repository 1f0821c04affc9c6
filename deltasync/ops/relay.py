"""A copy of a channel that goes on: all of it first, then each new record as it appears."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deltasync import limits
from deltasync.channel import documents, keys
from deltasync.channel.documents import Head, VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings
from deltasync.errors import FormatError, ObjectMissingError
from deltasync.following import Commit, Follow, Identify, Observer
from deltasync.ops.copies import Copied, Copier
from deltasync.stores.base import ObjectInfo, Store

_REFRESH_S = 60.0  # between two listings of compactions and announced anchors


class Relay:
    """Copies a channel to other stores, version by version, with the loop that replicas use. Not thread-safe.

    The relay writes nothing to the source. At the targets it deletes nothing and replaces only head. Each
    target must be empty or hold an earlier copy. Several relays may write to one target. `follow` is the
    loop; its `run` ends when it is stopped. It uses the relay as a `Target`: `stage` copies files, `commit`
    records.

    Attributes:
        version: The newest version that every target has.
    """

    progressed_s = 0.0
    held = False
    ignored: Sequence[str] = ()

    def __init__(
        self, source: ChannelReader, targets: Sequence[Store], observer: Observer | None = None
    ) -> None:
        self.version: VersionId | None = None
        self._source, self._copier = source, Copier(source, targets)
        self._behind = True  # False after a successful step
        self._shortcuts: set[str] = set()  # keys of the shortcuts that the stores have
        self._refresh_due_s = 0.0
        settings = ReplicaSettings.from_env(pin="newest")
        self.follow = Follow(source, self, settings, observer=observer, prefetch=False)

    def step(self, known: ObjectInfo | None = None) -> Copied | None:
        """Copy new objects, and return their sum over all targets; None if nothing was new.

        After return every copied version is readable at every target. If this raises, the next step copies
        the rest. `known` is the new record's entry in an event. Raises RunMismatchError, ChannelInUseError or
        ObjectExistsError if a target holds something else.
        """
        before: VersionId | None = None
        while not self.follow.step(known=known) and self.version != before:
            before = self.version  # without progress, the next call tries again
        return self.pop_copied()

    def pop_copied(self) -> Copied | None:
        """Return the sum of the objects stored since the last call; None if there were none."""
        copied, self._copier.copied = self._copier.copied, Copied()
        copied.version = self.version
        return copied if copied.objects or copied.skipped or copied.problems else None

    def open(self, identify: Identify) -> None:
        """Copy all missing objects."""
        self._catch_up()

    def is_settled(self, asked: bool) -> bool:
        """Whether the last step succeeded, and no listing of shortcuts is due."""
        return not self._behind and time.monotonic() < self._refresh_due_s

    def settle(self) -> None:
        """Copy all missing objects, or only new shortcuts if the last step succeeded."""
        if self._behind:
            self._catch_up()
            return
        self._behind = True
        for stored in self._new_shortcuts():
            if not self._copier.copy(stored.record.files):
                self._copy_record(stored)
            self._shortcuts.add(stored.key)
        self._behind, self._refresh_due_s = False, time.monotonic() + _REFRESH_S

    def stage(self, chain: Sequence[StoredRecord]) -> Sequence[StoredRecord] | None:
        """Copy the files of the next records. None if these do not continue this epoch, or if a file is
        damaged.
        """
        have, self._behind = self.version, True  # until the commit succeeds
        for stored in chain:
            # A new epoch also has a seal and a document to copy, which `settle` does.
            if (
                have is None
                or stored.is_shortcut
                or stored.record.base != have
                or stored.record.epoch != have.epoch
            ):
                return None
            have = stored.version
        return None if any([self._copier.copy(stored.record.files) for stored in chain]) else chain

    def commit(self, staged: Sequence[StoredRecord]) -> Commit:
        """Copy the records, then head."""
        for stored in staged:
            self._copy_record(stored)
            self.version = stored.version
        self._copy_head()
        self._behind = False
        last = staged[-1].version
        return Commit(version=last.version, sha256=last.sha256, anchor=False)

    def close(self) -> None:
        """Do nothing."""

    def _catch_up(self) -> None:
        shortcuts = {info.key for _, info in self._source.shortcuts()}
        self._copier.copy_all()
        self.version, self._shortcuts, self._behind = self._copier.copied.version, shortcuts, False
        self._refresh_due_s = time.monotonic() + _REFRESH_S

    def _copy_record(self, stored: StoredRecord) -> None:
        data = self._source.stored(stored.key, stored.sha256).data if stored.data is None else stored.data
        assert data is not None
        self._copier.put(stored.key, data)

    def _new_shortcuts(self) -> list[StoredRecord]:
        """Return the compactions and announced anchors that the targets lack, for versions that the targets
        have.
        """
        assert self.version is not None
        new = [(span, info) for span, info in self._source.shortcuts() if info.key not in self._shortcuts]
        found = [
            self._source.stored(info.key, known=info)
            for span, info in new
            if span.version <= self.version.version
        ]
        return [stored for stored in found if stored.version.slot.newness <= self.version.slot.newness]

    def _copy_head(self) -> None:
        """Copy head, unless it is ahead of the targets."""
        assert self.version is not None
        try:
            data = self._source.store.read(keys.HEAD, limits.SMALL_BYTES)
            newest = documents.decode(data, Head, keys.HEAD).newest
        except (ObjectMissingError, FormatError):
            return
        if newest is not None and newest.slot.newness <= self.version.slot.newness:
            self._copier.put_head(data)
