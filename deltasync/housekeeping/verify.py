"""Check a channel: what its records promise against what is there. Reports, never repairs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

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
from deltasync.follow import CommittedVersion, Follower
from deltasync.housekeeping.retention import Holding, References
from deltasync.housekeeping.survey import Progress, in_parallel, persistently, quiet, slot_of
from deltasync.live import LiveMemory

_THREADS = 4  # records, or files, in memory


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """One object that is missing, damaged, or does not give what it promises.

    Attributes:
        key: Which.
        sha256: What it must have, None if nothing names it.
        of: Key of the record or fold that cannot be used because of it.
        problem: What is wrong.
    """

    key: str
    sha256: str | None
    of: str
    problem: DeltaSyncError


@dataclasses.dataclass(kw_only=True)
class Report:
    """What `check` found.

    Attributes:
        problems: One for each thing that is wrong.
        newest: The newest version, None if there is none.
        versions, anchors, folds: How many there are, damaged ones included; anchors in the log and announced ones.
        data_bytes: Bytes of all records, folds, parts and anchors.
        publishing: Files that nothing names, and that their author may still name.
        garbage_objects, garbage_bytes: Files that nothing names and `prune` deletes when they are old.
        unreachable: Versions that no way leads to.
        proven: Versions whose bits were replayed and compared with their fingerprints; None if data was not read.
        unproven: The others, if data was read: a problem lies there or at a version that they build on.
    """

    problems: list[DeltaSyncError] = dataclasses.field(default_factory=list)
    newest: Version | None = None
    versions: int = 0
    anchors: int = 0
    folds: int = 0
    data_bytes: int = 0
    publishing: int = 0
    garbage_objects: int = 0
    garbage_bytes: int = 0
    unreachable: list[int] = dataclasses.field(default_factory=list)
    proven: list[int] | None = None
    unproven: list[int] = dataclasses.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The highest of its problems' exit codes, 0 if there is none."""
        return max((problem.exit_code for problem in self.problems), default=0)


def check(reader: ChannelReader, *, read_data: bool = False, progress: Progress = quiet) -> Report:
    """Compare a channel with what its records promise.

    Always: records, seals and folds are whole and of one run, have the digests that others name, every version can be
    reached, every file that they name is listed with its size.

    With `read_data` every file is also read and held to its sha256, and every version, anchor and fold is applied to weights
    in host memory and compared with the published fingerprints.

    Args:
        reader: The channel.
        read_data: Read everything.
        progress: Told how far it is.

    Raises:
        NotPublishedError, FormatError: channel.json is missing or damaged; nothing else can be told then.
        StoreError: the store failed.
    """
    examined = Examined(reader, progress)
    if read_data:
        examined.replay(progress)
    examined.conclude()
    return examined.report


class Examined:
    """A channel whose records and folds were read, and whose files were listed.

    Attributes:
        report: What `check` returns, complete after `conclude`.
        records, folds: Those that are whole, without their bytes.
        damages: What is wrong, by key.
        digests: Digests of records, as whoever follows them names them.
        proven: Versions that were replayed.
    """

    def __init__(self, reader: ChannelReader, progress: Progress = quiet) -> None:
        self.reader = reader
        self.report = Report()
        self.damages: dict[str, Damage] = {}
        reader.channel()
        # Head first, then records, then files: what one names was stored before it.
        head = reader.head()
        listing = dict(reader.slots().slots)
        spans = {info.key: span for span, info in reader.folds()}
        read = in_parallel(self._read_stored, [*(slot.key for slot in listing), *spans], "records", progress, _THREADS)
        whole = {stored.key: stored for stored in read if isinstance(stored, Stored)}
        gone = {problem.args[0] for problem in read if isinstance(problem, MissingVersionError)}
        self._slots = {slot: info for slot, info in listing.items() if slot.key not in gone}
        self.records = {slot: whole[slot.key] for slot in listing if slot.key in whole}
        self.folds = {key: whole[key] for key in spans if key in whole}
        self._unreadable_folds = [key for key in spans if key not in whole and key not in gone]
        self._sizes = {info.key: info.bytes for info in reader.store.list("")}
        self._epochs = [epoch for key in self._sizes if (epoch := keys.epoch_of(key)) is not None]
        self.digests = self._named()
        self._check_head(head)
        for key, problem in zip([*(slot.key for slot in listing), *spans], read, strict=True):
            if isinstance(problem, DeltaSyncError) and key not in gone:
                slot = keys.slot_of(key)
                self.note(key, None if slot is None else self.digests.get(slot), key, problem)
        self._check_digests()
        self._check_hints()
        for stored in self.edges():
            for file in stored.record.files:
                self._check_listed(stored, file)
        self.proven: set[Slot] = set()
        self._replayed = False

    def _read_stored(self, key: str) -> Stored | DeltaSyncError:
        try:
            return dataclasses.replace(persistently(lambda: self.reader.stored(key)), data=None)
        except MissingVersionError:
            return MissingVersionError(key)
        except FormatError as error:
            return error

    def edges(self) -> Iterator[Stored]:
        """All that leads to a version."""
        yield from (stored for stored in self.records.values() if stored.record.is_version)
        yield from self.folds.values()

    def note(self, key: str, sha256: str | None, of: str, problem: DeltaSyncError) -> None:
        """Take a problem, one for each object."""
        if key not in self.damages:
            self.damages[key] = Damage(key, sha256, of, problem)
            self.report.problems.append(problem)

    def _named(self) -> dict[Slot, str]:
        """What the log names, and only where it is silent what folds do."""
        found = {slot_of(fold.version): fold.version.sha256 for fold in self.folds.values()}
        bases = [stored.record.base for stored in (*self.folds.values(), *self.records.values())]
        return found | {slot_of(base): base.sha256 for base in bases if base is not None}

    def _check_digests(self) -> None:
        for slot, sha256 in self.digests.items():
            stored = self.records.get(slot)
            if stored is not None and stored.sha256 != sha256:
                problem = CorruptDataError(f"{slot.key} does not have the sha256 that others name it by.")
                self.note(slot.key, sha256, slot.key, problem)
                del self.records[slot]
        for key, fold in self.folds.items():
            for end in (fold.version, fold.base):
                if end is not None and self.digests[slot_of(end)] != end.sha256:
                    self.note(key, None, key, CorruptDataError(f"{key} is a fold of another version {end.version}."))
        known = {*(slot.epoch for slot in self._slots), *self._epochs}
        for slot, stored in self.records.items():
            base, following = stored.record.base, stored.record.next_epoch
            if following is None:
                continue
            if base is not None and self.digests[slot_of(base)] != base.sha256:
                self.note(slot.key, None, slot.key, CorruptDataError(f"{slot.key} seals another version {base.version}."))
            elif following not in known and max(known) > slot.epoch:  # else its epoch is still to be opened
                self.note(slot.key, None, slot.key, CorruptDataError(f"{slot.key} names an epoch that there is not."))

    def _check_head(self, head: Head | None) -> None:
        """It may be behind, but it must not name what there is not. Where a record is gone it tells its digest."""
        if head is None or slot_of(head.newest) in self.digests:
            return
        newest, stored = head.newest, self.records.get(slot_of(head.newest))
        last = max((slot.epoch, slot.version) for slot in self._slots) if self._slots else ("", 0)
        if stored is not None and stored.sha256 != newest.sha256:
            self.note(
                keys.HEAD,
                None,
                keys.HEAD,
                CorruptDataError(f"{keys.HEAD} names another record of version {newest.version} than there is."),
            )
        elif stored is None:
            self.digests[slot_of(newest)] = newest.sha256
            if newest.key not in self._sizes and (newest.epoch, newest.version) > last:
                problem = MissingVersionError(f"{newest.key}, which {keys.HEAD} names, is not in the store.")
                self.note(newest.key, newest.sha256, newest.key, problem)

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
        in_parallel(lambda pair: self.read_file(*pair), files, "files", progress, _THREADS)

    def read_file(self, stored: Stored, file: File) -> None:
        """Hold one file to its sha256."""
        if file.key not in self.damages:
            try:
                persistently(lambda: self.reader.fetch(file))
            except (FormatError, MissingVersionError) as error:
                self.note(file.key, file.sha256, stored.key, error)

    def replay(self, progress: Progress = quiet) -> None:
        """Apply every version, anchor and fold, and compare the bits; read every file."""
        self._replayed = True
        _Replay(self).run(progress)

    def usable(self, stored: Stored) -> bool:
        """Whether a record or fold leads from its base to its version, as far as it was checked."""
        own = [stored.key, *(file.key for file in stored.payload_files)]
        return not any(key in self.damages for key in own)

    def unusable(self) -> dict[str, str]:
        """Keys of records and folds that lead nowhere, and why."""
        return {stored.key: "It is damaged." for stored in self.edges() if not self.usable(stored)}

    def reached(self, start: Iterable[Slot] = (), nothing: bool = True) -> set[Slot]:
        """The versions that ways lead to from these versions and, unless it is not wanted, from nothing."""
        found = set(start)
        edges = sorted((stored for stored in self.edges() if self.usable(stored)), key=lambda stored: stored.record.version)
        more = True
        while more:
            before = len(found)
            for stored in edges:
                base = stored.base
                if (base is None and nothing) or (base is not None and slot_of(base) in found):
                    found.add(slot_of(stored.version))
            more = len(found) > before
        return found

    def conclude(self) -> None:
        """Complete the report."""
        report, versions = self.report, {slot: s for slot, s in self.records.items() if s.record.is_version}
        reached = self.reached()
        for slot, stored in sorted(versions.items()):
            base = stored.base
            if slot in reached or base is None or base.key in self.damages or not self.usable(stored):
                continue
            if slot_of(base) not in self.records:
                problem = MissingVersionError(
                    f"Version {slot.version} builds on version {base.version}, whose record is missing, and no other way "
                    "leads there."
                )
                self.note(base.key, base.sha256, base.key, problem)
        report.newest = (
            max(versions.items(), key=lambda item: (item[0].epoch, item[0].version))[1].version if versions else None
        )
        seals = sum(1 for stored in self.records.values() if not stored.record.is_version)
        report.versions = len(self._slots) - seals
        report.anchors = sum(1 for stored in self.edges() if stored.use_anchor)
        report.folds = len(self._unreadable_folds) + sum(1 for stored in self.folds.values() if not stored.use_anchor)
        report.unreachable = sorted(slot.version for slot in versions.keys() - reached)
        folders = (keys.VERSIONS, keys.FOLDS, keys.PARTS, keys.ANCHORS)
        report.data_bytes = sum(size for key, size in self._sizes.items() if key.startswith(folders))
        self._count_unnamed()
        if self._replayed:
            report.proven = sorted(slot.version for slot in self.proven)
            report.unproven = sorted(slot.version for slot in versions.keys() - self.proven)

    def holding(self) -> Holding:
        """The records, for what decides by them."""
        records = {slot: self.records[slot].record if slot in self.records else None for slot in self._slots}
        return Holding(records=records, stored_s={}, announced={})

    def _count_unnamed(self) -> None:
        folds: dict[str, Record | None] = {key: fold.record for key, fold in self.folds.items()}
        references = References(self.holding().records, folds | dict.fromkeys(self._unreadable_folds))
        for key, size in self._sizes.items():
            if key.startswith((keys.PARTS, keys.ANCHORS)) and keys.file_of(key) and key not in references:
                if references.under_way(key):
                    self.report.publishing += 1
                else:
                    self.report.garbage_objects += 1
                    self.report.garbage_bytes += size


class _Replay:
    """Weights in host memory that every record, anchor and fold of a channel is applied to, version by version."""

    def __init__(self, examined: Examined) -> None:
        memory, _ = LiveMemory.on_host(examined.reader.specs)
        memory.audit()
        self._examined = examined
        self._follower = Follower(examined.reader, memory)

    def run(self, progress: Progress) -> None:
        """Go through all versions in ascending order."""
        examined, follower = self._examined, self._follower
        ways: dict[Slot, list[Stored]] = {
            slot: [stored] for slot, stored in examined.records.items() if not _is_seal(stored)
        }
        folds: dict[Slot, list[Stored]] = {}
        for fold in examined.folds.values():
            if fold.base is None:
                ways.setdefault(slot_of(fold.version), []).append(fold)
            else:
                folds.setdefault(slot_of(fold.base), []).append(fold)
        for done, (slot, found) in enumerate(sorted(ways.items()), start=1):
            for stored in found:
                if self._go(stored.base) and self._apply(stored) is not None:
                    examined.proven.add(slot)
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

    def _go(self, base: Version | None) -> bool:
        """Be at the version that something builds on; False if its bits cannot be had."""
        follower = self._follower
        if base is None or follower.version == base:
            return True
        if slot_of(base) in self._examined.proven:
            with contextlib.suppress(FormatError, ChainError, ApplyError):
                for stored in find_way(self._examined.reader, follower.version, base, self._examined.unusable()):
                    follower.confirm(follower.commit(follower.stage([stored])))
        return follower.version == base

    def _apply(self, stored: Stored) -> CommittedVersion | None:
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


def _is_seal(stored: Stored) -> bool:
    return stored.record.kind == "seal"
