"""Check a channel: compare its objects with its records. Problems are reported, never repaired."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from deltasync import limits
from deltasync.channel import documents, keys
from deltasync.channel.documents import EpochDocument, File, Head, Record, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    ApplyError,
    ChainError,
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    ObjectMissingError,
)
from deltasync.ops.retention import References, lineage
from deltasync.ops.scan import (
    WHOLE,
    check_listing,
    digests,
    in_parallel,
    local_store,
    progressed,
    result_or_error,
    scan_channel,
)

if TYPE_CHECKING:
    from deltasync.following import LiveWeights, StagedVersion


_CLOCK_S = 1.0  # stores give whole seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """One object that is missing or damaged, or does not give the bits that it names.

    `sha256` is the digest that other documents give for it, if any; `of` is the record or compaction that is
    unusable because of it.
    """

    key: str
    sha256: str | None
    of: str
    problem: DeltaSyncError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `check`. Counts include damaged objects, and anchors those that were announced."""

    problems: list[DeltaSyncError]
    newest: VersionId | None
    versions: int
    anchors: int
    compactions: int
    data_bytes: int  # size of all records, compactions, parts and anchors
    publishing: int  # number of files that no document names yet, but that their author may still name
    # files that no document names, and unfinished ones; `gc` deletes them when they are old
    garbage_objects: int
    garbage_bytes: int
    unreachable: list[int]
    # keys of versions that the newest one does not descend from: their publishers had been succeeded
    orphans: list[str]
    # versions whose replayed bits have the published fingerprints; None if data was not read
    proven: list[int] | None
    # all other versions, if data was read. They, or versions that they build on, are damaged.
    unproven: list[int]

    @property
    def exit_code(self) -> int:
        """The highest exit code of the problems, 0 if there are none."""
        return max((problem.exit_code for problem in self.problems), default=0)


def check(reader: ChannelReader, *, read_data: bool = False) -> Report:
    """Compare a channel's objects with its records.

    Records, seals and compactions must be whole, of one run, and have the digests that others name. Every
    version must be reachable. Every named file must be listed with its size. With `read_data` every file is
    also read, and every version, anchor and compaction is applied to weights in host memory, to compare each
    sha256 and each fingerprint. Without a readable channel.json nothing can be checked, and its error is
    raised.
    """
    inspection = Inspection(reader)
    if read_data:
        inspection.replay()
    return inspection.report()


class Inspection:
    """Reads a channel's records, compactions and announcements, lists its files, and collects damages.

    Intact `records` and `shortcuts` are kept without their bytes.
    """

    def __init__(self, reader: ChannelReader) -> None:
        self.reader = reader
        self.damages: dict[str, Damage] = {}  # the first problem of each damaged object, by key
        self.proven: set[Slot] | None = None  # versions that were replayed; None if `replay` did not run
        # Head first, then records, then files: an object is stored after those that it names.
        head = reader.head()
        held = self._held = scan_channel(reader, whole=True)
        self.records = {slot: held.stored[slot.key] for slot in held.records if slot.key in held.stored}
        self.shortcuts = {key: held.stored[key] for key in held.shortcuts if key in held.stored}
        self._sizes = {info.key: info.bytes for info in reader.store.list("")}
        self._digests = digests(held.whole())
        if head is not None and head.newest.slot not in self._digests:
            self._check_head(head.newest)
        for key, problem in held.problems.items():
            slot = keys.slot_of(key)
            self.add_damage(key, problem, None if slot is None else self._digests.get(slot))
        epochs = [epoch for key in self._sizes if (epoch := keys.epoch_of(key)) is not None]
        self._check_digests({*(slot.epoch for slot in held.records), *epochs})
        self._check_hint(keys.HEAD, Head)
        for epoch in epochs:
            self._check_hint(keys.epoch_document(epoch), EpochDocument)
        for stored in self.edges():
            for file in stored.record.files:
                size = self._sizes.get(file.key)
                if size is None:
                    check_listing(reader, [file.key] if file.bytes else [])
                    missing = MissingVersionError(
                        f"{file.key}, which {stored.key} names, is not in the store."
                    )
                    self.add_damage(file.key, missing, file.sha256, stored.key)
                elif size != file.bytes:
                    wrong = f"{file.key} has {size} bytes, not {file.bytes} as {stored.key} says."
                    self.add_damage(file.key, wrong, file.sha256, stored.key)

    @property
    def versions(self) -> dict[Slot, StoredRecord]:
        """All records except seals."""
        return {slot: stored for slot, stored in self.records.items() if stored.record.is_version}

    def edges(self) -> list[StoredRecord]:
        """All records, compactions and announcements that produce a version."""
        return [*self.versions.values(), *self.shortcuts.values()]

    def documents(self) -> dict[Slot, Record | None]:
        """The documents of records, None for damaged ones."""
        return {
            slot: self.records[slot].record if slot in self.records else None for slot in self._held.records
        }

    @functools.cached_property
    def lineage(self) -> list[Slot]:
        """The newest version and its ancestors, newest first, damaged ones included."""
        return lineage(self.documents())

    def add_damage(
        self, key: str, problem: DeltaSyncError | str, sha256: str | None = None, of: str | None = None
    ) -> None:
        """Record the first problem of an object. A text becomes a CorruptDataError; `of` defaults to the
        object itself.
        """
        error = CorruptDataError(problem) if isinstance(problem, str) else problem
        self.damages.setdefault(key, Damage(key, sha256, of or key, error))

    def _check_hint(self, key: str, kind: type[Head] | type[EpochDocument]) -> None:
        """Check a document that readers do not need."""
        channel = self.reader.channel()
        try:
            found = documents.decode(self.reader.store.read(key, limits.SMALL_BYTES), kind, key)
            # An epoch before the channel's first: its writer died before it created the channel, and another
            # writer did.
            claimed = isinstance(found, EpochDocument) and found.epoch < channel.epoch
            if found.run_id != channel.run_id and not claimed:
                raise CorruptDataError(f"{key} belongs to run {found.run_id}.")
        except FormatError as error:
            self.add_damage(key, error)
        except ObjectMissingError:
            pass

    def _check_head(self, newest: VersionId) -> None:
        """Check that head names no missing newest record. Head may lag, and gives the digest of a missing
        record.
        """
        stored = self.records.get(newest.slot)
        if stored is None:
            self._digests[newest.slot] = newest.sha256
            last = max((slot.newness for slot in self._held.records), default=("", 0))
            if newest.key not in self._sizes and newest.slot.newness > last:
                problem = MissingVersionError(f"{newest.key}, which {keys.HEAD} names, is not in the store.")
                self.add_damage(newest.key, problem, newest.sha256)
        elif stored.sha256 != newest.sha256:
            self.add_damage(
                keys.HEAD, f"{keys.HEAD} has another digest for version {newest.version} than its record."
            )

    def _check_digests(self, epochs: set[str]) -> None:
        for slot, sha256 in self._digests.items():
            stored = self.records.get(slot)
            if stored is not None and stored.sha256 != sha256:
                self.add_damage(
                    slot.key, f"{slot.key}: SHA-256 mismatch with the records that name it.", sha256
                )
                del self.records[slot]
        for key, stored in self.shortcuts.items():
            for end in (stored.version, stored.base):
                if end is not None and self._digests[end.slot] != end.sha256:
                    self.add_damage(
                        key, f"{key} has another digest for version {end.version} than its record."
                    )
        for slot, stored in self.records.items():
            base, following = stored.record.base, stored.record.next_epoch
            if following is None:
                continue
            if base is not None and self._digests[base.slot] != base.sha256:
                self.add_damage(
                    slot.key, f"{slot.key} has another digest for version {base.version} than its record."
                )
            elif following not in epochs and max(epochs) > slot.epoch:  # else the epoch is about to be opened
                self.add_damage(slot.key, f"{slot.key} names an epoch that does not exist.")

    def read_files(self) -> None:
        """Read every file and compare its sha256, without a replay."""
        files = [(stored, file) for stored in self.edges() for file in stored.record.files]
        in_parallel(lambda pair: self._read_file(*pair), files, "files", WHOLE)

    def _read_file(self, stored: StoredRecord, file: File) -> None:
        if file.key not in self.damages:
            found = result_or_error(self.reader.fetch, file)
            if isinstance(found, DeltaSyncError):
                self.add_damage(file.key, found, file.sha256, stored.key)

    def usable(self, stored: StoredRecord) -> bool:
        """Whether the record or compaction and its payload files are undamaged, as far as they were
        checked.
        """
        return not any(
            key in self.damages for key in (stored.key, *(file.key for file in stored.record.payload_files))
        )

    def reachable(self, start: Iterable[Slot] = (), anchors: bool = True) -> set[Slot]:
        """Return all versions that are reachable from `start` and, with `anchors`, from anchors."""
        found = set(start)
        # a base has a smaller number
        for stored in sorted(self.edges(), key=lambda stored: stored.record.version):
            base = stored.base
            if self.usable(stored) and (anchors if base is None else base.slot in found):
                found.add(stored.version.slot)
        return found

    def replay(self) -> None:
        """Read every file, apply every version, anchor and compaction to weights in host memory, and compare
        the bits.
        """
        from deltasync.following import LiveWeights  # needs torch, unlike the rest of this module
        from deltasync.live import HostMemory

        memory, _ = HostMemory.on_host(self.reader.specs)
        memory.audit()
        weights = LiveWeights(self.reader, memory)
        proven = self.proven = set[Slot]()
        edges = {slot: [stored] for slot, stored in self.versions.items()}
        compactions: dict[Slot, list[StoredRecord]] = {}
        for shortcut in self.shortcuts.values():
            if shortcut.base is None:
                edges.setdefault(shortcut.version.slot, []).append(shortcut)
            else:
                compactions.setdefault(shortcut.base.slot, []).append(shortcut)
        for done, (slot, found) in enumerate(sorted(edges.items()), start=1):
            for stored in found:
                if self._apply(weights, stored) is not None:
                    proven.add(slot)
            for compaction in compactions.pop(slot, []):
                committed = self._apply(weights, compaction)
                if committed is not None:
                    end = self.versions.get(compaction.version.slot)
                    if end is not None and end.record.fingerprint == compaction.record.fingerprint:
                        proven.add(compaction.version.slot)
                    weights.rollback(committed)
                    weights.identified(found[0])
            progressed("replaying", done, len(edges))
        # their bases are missing
        for compaction in [compaction for left in compactions.values() for compaction in left]:
            self._read_files_of(compaction)

    def _move_to(self, weights: LiveWeights, base: VersionId | None) -> bool:
        """Bring the weights to the version `base`. Return False if its bits cannot be read."""
        if base is None or weights.version == base:
            return True
        if base.slot in (self.proven or ()):
            damaged = {stored.key: "It is damaged." for stored in self.edges() if not self.usable(stored)}
            with contextlib.suppress(FormatError, ChainError, ApplyError):
                for stored in find_chain(self.reader, weights.version, base, damaged):
                    weights.confirm(weights.commit(weights.stage([stored])))
        return weights.version == base

    def _apply(self, weights: LiveWeights, stored: StoredRecord) -> StagedVersion | None:
        """Apply a record or compaction, and read its files. On failure record the damage, keep the weights,
        return None.
        """
        if not self._move_to(weights, stored.base) or not self.usable(stored):
            self._read_files_of(stored)
            return None
        try:
            committed = weights.commit(weights.stage([stored]))
            weights.confirm(committed)
        except (FormatError, ChainError, ApplyError) as error:
            self._read_files_of(stored)
            if self.usable(stored):  # no file is damaged: the object itself is wrong
                self.add_damage(stored.key, error)
            return None
        for file in stored.record.anchor.model_files if stored.record.anchor is not None else []:
            self._read_file(stored, file)
        return committed

    def _read_files_of(self, stored: StoredRecord) -> None:
        for file in stored.record.files:
            self._read_file(stored, file)

    def _orphans(self, reached: Collection[Slot]) -> set[Slot]:
        """Return the versions that the newest one does not descend from: their publishers had been
        succeeded.
        """
        versions = self.versions
        found = versions.keys() - set(self.lineage)
        bases = {stored.record.base.slot for stored in versions.values() if stored.record.base is not None}
        stored_s = {slot: self._held.infos[slot.key].modified_s for slot in versions}
        # the versions around it were forgotten, so only times tell
        for slot in versions.keys() - reached - bases:
            if any(
                0 < stored_s[other] < stored_s[slot] - _CLOCK_S
                for other in versions
                if other.epoch > slot.epoch
            ):
                found.add(slot)
        return found

    def report(self) -> Report:
        """Record missing records that make versions unreachable as damages, and return the report."""
        versions, reached = self.versions, self.reachable()
        orphans = self._orphans(reached)
        for slot, stored in sorted(versions.items()):
            if slot in orphans:
                continue
            base = stored.base
            if slot in reached or base is None or base.key in self.damages or not self.usable(stored):
                continue
            if base.slot not in self.records:
                problem = MissingVersionError(
                    f"Version {slot.version} is not reachable: the record of its base, version "
                    f"{base.version}, is missing."
                )
                self.add_damage(base.key, problem, base.sha256)
        newest = max(versions, key=lambda slot: slot.newness, default=None)
        folders = (keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS, keys.PARTS, keys.ANCHORS)
        references = References(self.documents(), self._held.shortcuts, self.reader.channel().epoch)
        files = [
            key for key in self._sizes if key.startswith((keys.PARTS, keys.ANCHORS)) and keys.file_of(key)
        ]
        unnamed = [key for key in files if key not in references]
        garbage = [self._sizes[key] for key in unnamed if not references.in_progress(key)]
        local = local_store(self.reader.store)
        halves = [] if local is None else [info.bytes for info in local.unfinished()]
        return Report(
            problems=[damage.problem for damage in self.damages.values()],
            newest=None if newest is None else versions[newest].version,
            versions=len(self._held.records) - (len(self.records) - len(versions)),
            anchors=sum(stored.use_anchor for stored in self.edges()),
            compactions=sum(keys.compaction_of(key) is not None for key in self._held.shortcuts),
            data_bytes=sum(size for key, size in self._sizes.items() if key.startswith(folders)),
            publishing=len(unnamed) - len(garbage),
            garbage_objects=len(garbage) + len(halves),
            garbage_bytes=sum(garbage) + sum(halves),
            unreachable=_numbers(versions.keys() - reached - orphans),
            orphans=sorted(slot.key for slot in orphans),
            proven=None if self.proven is None else _numbers(self.proven),
            unproven=[] if self.proven is None else _numbers(versions.keys() - self.proven - orphans),
        )


def _numbers(slots: Iterable[Slot]) -> list[int]:
    return sorted(slot.version for slot in slots)
