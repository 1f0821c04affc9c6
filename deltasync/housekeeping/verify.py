"""Check a channel: what its records promise against what is there. Reports, never repairs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deltasync.channel import documents, keys
from deltasync.channel.documents import File, Head, Opening, Record, Version
from deltasync.channel.keys import Slot
from deltasync.channel.plan import find_way
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.errors import (
    ApplyError,
    ChainError,
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    ObjectMissingError,
)
from deltasync.housekeeping.retention import References
from deltasync.housekeeping.walk import WHOLE, Progress, attempt, digests, in_parallel, quiet, survey

if TYPE_CHECKING:
    from deltasync.replicas import StagedVersion


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """One object that is missing, damaged, or does not give what it promises.

    Attributes:
        sha256: What it must have, None if nothing names it.
        of: Key of the record or fold that cannot be used because of it.
    """

    key: str
    sha256: str | None
    of: str
    problem: DeltaSyncError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `check` found.

    Attributes:
        versions, anchors, folds: How many there are, damaged ones included; anchors in the log and announced ones.
        data_bytes: Bytes of all records, folds, parts and anchors.
        publishing: Files that nothing names, and that their author may still name.
        garbage_objects, garbage_bytes: Files that nothing names and `prune` deletes when they are old.
        unreachable: Versions that no way leads to.
        proven: Versions whose bits were replayed and compared with their fingerprints; None if data was not read.
        unproven: The others, if data was read: a problem lies there or at a version that they build on.
    """

    problems: list[DeltaSyncError]
    newest: Version | None
    versions: int
    anchors: int
    folds: int
    data_bytes: int
    publishing: int
    garbage_objects: int
    garbage_bytes: int
    unreachable: list[int]
    proven: list[int] | None
    unproven: list[int]

    @property
    def exit_code(self) -> int:
        """The highest of its problems' exit codes, 0 if there is none."""
        return max((problem.exit_code for problem in self.problems), default=0)


def check(reader: ChannelReader, *, read_data: bool = False, progress: Progress = quiet) -> Report:
    """Compare a channel with what its records promise.

    Always: records, seals and folds are whole and of one run, have the digests that others name, every version can be
    reached, every file that they name is listed with its size. With `read_data` every file is also read and held to its
    sha256, and every version, anchor and fold is applied to weights in host memory and compared with their fingerprints.

    Raises:
        NotPublishedError, FormatError: channel.json is missing or damaged; nothing else can be told then.
        StoreError: the store failed.
    """
    examined = Examined(reader, progress)
    if read_data:
        examined.replay(progress)
    return examined.conclude()


class Examined:
    """A channel whose records and folds were read, and whose files were listed.

    Attributes:
        records, folds: Those that are whole, without their bytes.
        damages: What is wrong, by key.
        proven: Versions that were replayed, None before.
    """

    def __init__(self, reader: ChannelReader, progress: Progress = quiet) -> None:
        self.reader = reader
        self.damages: dict[str, Damage] = {}
        # Head first, then records, then files: what one names was stored before it.
        head = reader.head()
        held = self._held = survey(reader, progress, whole=True)
        self.records = {slot: held.stored[slot.key] for slot in held.slots if slot.key in held.stored}
        self.folds = {key: held.stored[key] for key in held.folds if key in held.stored}
        self._sizes = {info.key: info.bytes for info in reader.store.list("")}
        self._epochs = [epoch for key in self._sizes if (epoch := keys.epoch_of(key)) is not None]
        self._digests = digests(held.whole())
        self._check_head(head)
        for key, problem in held.problems.items():
            slot = keys.slot_of(key)
            self.note(key, None if slot is None else self._digests.get(slot), key, problem)
        self._check_digests()
        self._check_hints()
        for stored in self.edges():
            for file in stored.record.files:
                self._check_listed(stored, file)
        self.proven: set[Slot] | None = None

    @property
    def versions(self) -> dict[Slot, Stored]:
        """The records that are no seals."""
        return {slot: stored for slot, stored in self.records.items() if stored.record.is_version}

    def edges(self) -> list[Stored]:
        """All that leads to a version."""
        return [*self.versions.values(), *self.folds.values()]

    def note(self, key: str, sha256: str | None, of: str, problem: DeltaSyncError) -> None:
        """Take a problem, one for each object."""
        self.damages.setdefault(key, Damage(key, sha256, of, problem))

    def _check_digests(self) -> None:
        for slot, sha256 in self._digests.items():
            stored = self.records.get(slot)
            if stored is not None and stored.sha256 != sha256:
                self._damaged(slot.key, f"{slot.key} does not have the sha256 that others name it by.", sha256)
                del self.records[slot]
        for key, fold in self.folds.items():
            for end in (fold.version, fold.base):
                if end is not None and self._digests[end.slot] != end.sha256:
                    self._damaged(key, f"{key} is a fold of another version {end.version}.")
        known = {*(slot.epoch for slot in self._held.slots), *self._epochs}
        for slot, stored in self.records.items():
            base, following = stored.record.base, stored.record.next_epoch
            if following is None:
                continue
            if base is not None and self._digests[base.slot] != base.sha256:
                self._damaged(slot.key, f"{slot.key} seals another version {base.version}.")
            elif following not in known and max(known) > slot.epoch:  # else its epoch is still to be opened
                self._damaged(slot.key, f"{slot.key} names an epoch that there is not.")

    def _damaged(self, key: str, problem: str, sha256: str | None = None) -> None:
        self.note(key, sha256, key, CorruptDataError(problem))

    def _check_head(self, head: Head | None) -> None:
        """It may be behind, but it must not name what there is not. Where a record is gone it tells its digest."""
        if head is None or head.newest.slot in self._digests:
            return
        newest, stored = head.newest, self.records.get(head.newest.slot)
        if stored is None:
            self._digests[newest.slot] = newest.sha256
            last = max((slot.newness for slot in self._held.slots), default=("", 0))
            if newest.key not in self._sizes and newest.slot.newness > last:
                problem = MissingVersionError(f"{newest.key}, which {keys.HEAD} names, is not in the store.")
                self.note(newest.key, newest.sha256, newest.key, problem)
        elif stored.sha256 != newest.sha256:
            self._damaged(keys.HEAD, f"{keys.HEAD} names another record of version {newest.version} than there is.")

    def _check_hints(self) -> None:
        """Documents that readers can do without."""
        places: dict[str, type[Head] | type[Opening]] = {keys.HEAD: Head}
        places |= {keys.epoch_document(epoch): Opening for epoch in self._epochs}
        for key, kind in places.items():
            try:
                found = documents.decode(self.reader.store.read(key, documents.SMALL_BYTES), kind, key)
                claimed = isinstance(found, Opening) and found.epoch < self.reader.channel().epoch  # by who died before that
                if found.run_id != self.reader.channel().run_id and not claimed:
                    raise CorruptDataError(f"{key} belongs to run {found.run_id}.")
            except ObjectMissingError:
                continue
            except FormatError as error:
                self.note(key, None, key, error)

    def _check_listed(self, stored: Stored, file: File) -> None:
        size = self._sizes.get(file.key)
        if size is None:
            problem: DeltaSyncError = MissingVersionError(f"{file.key}, which {stored.key} names, is not in the store.")
        elif size != file.bytes:
            problem = CorruptDataError(f"{file.key} has {size} bytes, {stored.key} says {file.bytes}.")
        else:
            return
        self.note(file.key, file.sha256, stored.key, problem)

    def read_files(self, progress: Progress = quiet) -> None:
        """Hold every file to its sha256; nothing is replayed."""
        files = [(stored, file) for stored in self.edges() for file in stored.record.files]
        in_parallel(lambda pair: self.read_file(*pair), files, "files", progress, WHOLE)

    def read_file(self, stored: Stored, file: File) -> None:
        """Hold one file to its sha256."""
        if file.key not in self.damages:
            found = attempt(lambda: self.reader.fetch(file))
            if isinstance(found, DeltaSyncError):
                self.note(file.key, file.sha256, stored.key, found)

    def replay(self, progress: Progress = quiet) -> None:
        """Apply every version, anchor and fold, and compare the bits; read every file."""
        self.proven = _Replay(self).run(progress)

    def usable(self, stored: Stored) -> bool:
        """Whether a record or fold leads from its base to its version, as far as it was checked."""
        own = [stored.key, *(file.key for file in stored.record.payload_files)]
        return not any(key in self.damages for key in own)

    def reached(self, start: Iterable[Slot] = (), nothing: bool = True) -> set[Slot]:
        """The versions that ways lead to from these versions and, unless it is not wanted, from nothing."""
        found = set(start)
        for stored in sorted(self.edges(), key=lambda stored: stored.record.version):  # a base has a lesser number
            base = stored.base
            if self.usable(stored) and (nothing if base is None else base.slot in found):
                found.add(stored.version.slot)
        return found

    def conclude(self) -> Report:
        """Note what builds on a record that is gone, and count."""
        versions, reached = self.versions, self.reached()
        for slot, stored in sorted(versions.items()):
            base = stored.base
            if slot in reached or base is None or base.key in self.damages or not self.usable(stored):
                continue
            if base.slot not in self.records:
                problem = MissingVersionError(
                    f"Version {slot.version} builds on version {base.version}, whose record is missing, and no other way "
                    "leads there."
                )
                self.note(base.key, base.sha256, base.key, problem)
        newest = max(versions, key=lambda slot: slot.newness, default=None)
        folders = (keys.VERSIONS, keys.FOLDS, keys.PARTS, keys.ANCHORS)
        references = References(self.documents(), self._held.folds)
        files = [key for key in self._sizes if key.startswith((keys.PARTS, keys.ANCHORS)) and keys.file_of(key)]
        unnamed = [key for key in files if key not in references]
        garbage = [key for key in unnamed if not references.under_way(key)]
        return Report(
            problems=[damage.problem for damage in self.damages.values()],
            newest=None if newest is None else versions[newest].version,
            versions=len(self._held.slots) - (len(self.records) - len(versions)),
            anchors=sum(stored.use_anchor for stored in self.edges()),
            folds=sum(fold is None or fold.anchor is None for fold in self._held.folds.values()),
            data_bytes=sum(size for key, size in self._sizes.items() if key.startswith(folders)),
            publishing=len(unnamed) - len(garbage),
            garbage_objects=len(garbage),
            garbage_bytes=sum(self._sizes[key] for key in garbage),
            unreachable=_numbers(versions.keys() - reached),
            proven=None if self.proven is None else _numbers(self.proven),
            unproven=[] if self.proven is None else _numbers(versions.keys() - self.proven),
        )

    def documents(self) -> dict[Slot, Record | None]:
        """The documents of records, None where one is damaged."""
        return {slot: self.records[slot].record if slot in self.records else None for slot in self._held.slots}


def _numbers(slots: Iterable[Slot]) -> list[int]:
    return sorted(slot.version for slot in slots)


class _Replay:
    """Weights in host memory that every record, anchor and fold of a channel is applied to, version by version."""

    def __init__(self, examined: Examined) -> None:
        from deltasync.live import LiveMemory
        from deltasync.replicas import Follower  # which needs torch, as nothing else here does

        memory, _ = LiveMemory.on_host(examined.reader.specs)
        memory.audit()
        self._examined = examined
        self._follower = Follower(examined.reader, memory)
        self._proven: set[Slot] = set()

    def run(self, progress: Progress) -> set[Slot]:
        """Go through all versions in ascending order; gives those whose bits were proven."""
        examined, follower = self._examined, self._follower
        ways = {slot: [stored] for slot, stored in examined.versions.items()}
        folds: dict[Slot, list[Stored]] = {}
        for fold in examined.folds.values():
            if fold.base is None:
                ways.setdefault(fold.version.slot, []).append(fold)
            else:
                folds.setdefault(fold.base.slot, []).append(fold)
        for done, (slot, found) in enumerate(sorted(ways.items()), start=1):
            for stored in found:
                if self._go(stored.base) and self._apply(stored) is not None:
                    self._proven.add(slot)
                else:
                    self._read(stored)
            for fold in folds.pop(slot, []):
                committed = self._apply(fold) if self._go(fold.base) else None
                if committed is None:
                    self._read(fold)
                else:
                    follower.rollback(committed)
                    follower.identified(found[0])
            progress("replaying", done, len(ways))
        for fold in [fold for left in folds.values() for fold in left]:  # nothing to apply them to
            self._read(fold)
        return self._proven

    def _go(self, base: Version | None) -> bool:
        """Be at the version that something builds on; False if its bits cannot be had."""
        examined, follower = self._examined, self._follower
        if base is None or follower.version == base:
            return True
        if base.slot in self._proven:
            damaged = {stored.key: "It is damaged." for stored in examined.edges() if not examined.usable(stored)}
            with contextlib.suppress(FormatError, ChainError, ApplyError):
                for stored in find_way(examined.reader, follower.version, base, damaged):
                    follower.confirm(follower.commit(follower.stage([stored])))
        return follower.version == base

    def _apply(self, stored: Stored) -> StagedVersion | None:
        """None if it did not give the bits; then they are those from before, and what is wrong is noted."""
        examined = self._examined
        if not examined.usable(stored):
            return None
        try:
            committed = self._follower.commit(self._follower.stage([stored]))
            self._follower.confirm(committed)
        except (FormatError, ChainError, ApplyError) as error:
            self._read(stored)
            if examined.usable(stored):  # every file is as it should be, and yet
                examined.note(stored.key, None, stored.key, error)
            return None
        for file in stored.record.anchor.companions if stored.record.anchor is not None else []:
            examined.read_file(stored, file)
        return committed

    def _read(self, stored: Stored) -> None:
        for file in stored.record.files:
            self._examined.read_file(stored, file)
