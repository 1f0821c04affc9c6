"""Keep copies of a channel in other stores up to date: `copy` first, then each new record as it appears."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from deltasync.channel import documents, keys
from deltasync.channel.documents import File, Head, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.errors import ConfigError, DeltaSyncError, FormatError, ObjectExistsError, ObjectMissingError
from deltasync.follow import Course
from deltasync.housekeeping.transfer import Copied, Outcome, copy, read_object
from deltasync.housekeeping.walk import WHOLE, Progress, attempt, in_parallel, quiet
from deltasync.stores.base import ObjectInfo, Store

_LOOK_S = 60.0  # between two listings of folds and announced anchors


class Relay:
    """Copies a channel to other stores, version by version. Not thread-safe.

    At the targets nothing is deleted and nothing but head is replaced; nothing is written to the source. Each target is
    empty or holds an earlier copy. Several relays may serve one target.

    Raises:
        ConfigError: a URL occurs twice.
    """

    def __init__(self, source: ChannelReader, targets: Sequence[Store]) -> None:
        urls = [source.store.url, *(target.url for target in targets)]
        if len(set(urls)) < len(urls):
            raise ConfigError("SOURCE and every TARGET must be different URLs.")
        self.version: Version | None = None
        self._source, self._targets = source, targets
        self._course = Course(source, prefetch=False)
        self._behind, self._started = True, False
        self._head_due = False
        self._folds: set[str] = set()  # keys of those that the targets have
        self._look_due_s = 0.0

    def step(self, known: ObjectInfo | None = None, *, progress: Progress = quiet) -> Copied | None:
        """Copy what is new, and return what was stored in all targets together; None if nothing was new.

        After return everything that was copied can be read at every target. If it raised, the next step copies what is
        missing there. `known` is what an event told of a new record.

        Raises:
            NotPublishedError: the source holds no channel yet.
            RunMismatchError, ChannelInUseError, ObjectExistsError: a target holds something else.
            StoreError, FormatError, MissingVersionError: a store failed or the source is damaged; try again.
        """
        if self._behind:
            return self._catch_up(progress)
        way = self._course.next(self.version, known=known)
        self._behind = True  # unless this step ends well
        if not self._is_next(way):
            return self._catch_up(progress)
        now_s = time.monotonic()
        if now_s >= self._look_due_s:
            way += self._new_folds()
            self._look_due_s = now_s + _LOOK_S
        done: list[Outcome] = []
        for stored in way:
            done += self._copy_stored(stored)
            if any(isinstance(each, DeltaSyncError) for each in done):
                return self._catch_up(progress)  # which leaves out what is damaged, and reports it
            if stored.is_fold:
                self._folds.add(stored.key)
            else:
                self.version, self._head_due = stored.version, True
        if self._head_due:
            self._copy_head()
        self._behind = False
        return Copied.of(self.version, done) if way else None

    def _catch_up(self, progress: Progress) -> Copied | None:
        before, started, folds = self.version, self._started, {info.key for _, info in self._source.folds()}
        each = [copy(self._source, target, progress=progress) for target in self._targets]
        oldest = min(each, key=lambda copied: ("", 0) if copied.version is None else copied.version.slot.newness)
        problems = {str(problem): problem for copied in each for problem in copied.problems}
        self.version, self._folds, self._head_due, self._behind = oldest.version, folds, True, False
        self._look_due_s, self._started = time.monotonic() + _LOOK_S, True
        total = Copied(
            version=self.version,
            objects=sum(copied.objects for copied in each),
            bytes=sum(copied.bytes for copied in each),
            skipped=sum(copied.skipped for copied in each),
            problems=[*problems.values()],
        )
        return total if total.objects or problems or before != self.version or not started else None

    def _is_next(self, way: Sequence[Stored]) -> bool:
        """Whether these are the next records of this epoch. A new epoch also has a seal and a document to copy."""
        have = self.version
        for stored in way:
            if have is None or stored.is_fold or stored.record.base != have or stored.record.epoch != have.epoch:
                return False
            have = stored.version
        return True

    def _new_folds(self) -> list[Stored]:
        """Folds and announced anchors that the targets lack, of versions that they have."""
        assert self.version is not None
        new = [(span, info) for span, info in self._source.folds() if info.key not in self._folds]
        found = [self._source.stored(info.key, known=info) for span, info in new if span.version <= self.version.version]
        return [stored for stored in found if stored.version.slot.newness <= self.version.slot.newness]

    def _copy_stored(self, stored: Stored) -> list[Outcome]:
        """Copy the files of a record or fold, then the object itself, unless one of its files is damaged."""
        done = in_parallel(self._copy_file, stored.record.files, "files", quiet, WHOLE)
        if not any(isinstance(each, DeltaSyncError) for each in done):
            item = File(key=stored.key, bytes=stored.size, sha256=stored.sha256)
            done.append(self._copy_file(item) if stored.data is None else self._store(stored.key, stored.data))
        return done

    def _copy_file(self, item: File) -> Outcome:
        data = attempt(functools.partial(read_object, self._source), item)
        return data if isinstance(data, DeltaSyncError) else self._store(item.key, data)

    def _store(self, key: str, data: bytes) -> int | None:
        """Store an object in every target, and return how many bytes were stored; None if all targets had it."""
        lacked = sum(_create(target, key, data) for target in self._targets)
        return lacked * len(data) if lacked else None

    def _copy_head(self) -> None:
        """Copy head, unless it is ahead of the targets."""
        assert self.version is not None
        try:
            data = self._source.store.read(keys.HEAD, documents.SMALL_BYTES)
            newest = documents.decode(data, Head, keys.HEAD).newest
        except (ObjectMissingError, FormatError):
            return
        if newest is not None and newest.slot.newness <= self.version.slot.newness:
            for target in self._targets:
                target.put(keys.HEAD, data)
            self._head_due = newest != self.version


def _create(target: Store, key: str, data: bytes) -> bool:
    """Whether an immutable object was stored; False if it was there. Raises ObjectExistsError if it has other bytes."""
    if target.can_create:
        try:
            target.create(key, data)
        except ObjectExistsError:
            pass
        else:
            return True
    try:
        same = target.read(key, len(data)) == data
    except ObjectMissingError:
        target.put(key, data)
        return True
    except FormatError:  # it is larger
        same = False
    if not same:
        raise ObjectExistsError(f"{target.url} has other bytes at {key}. They were left as they are.")
    return False
