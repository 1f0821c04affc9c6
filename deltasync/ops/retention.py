"""Garbage collection: drop versions by retention rules, and delete files that no document names.

A version is identified by its slot (number and epoch), because a damaged record has no other identity.
Decisions are pure: documents and listings are arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from deltasync.channel import keys
from deltasync.channel.clock import StoreClock
from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, MissingVersionError, StoreError
from deltasync.ops.scan import (
    Known,
    Scan,
    in_parallel,
    local_store,
    progressed,
    result_or_error,
    scan_channel,
)
from deltasync.serve import heartbeat
from deltasync.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
_STALE_HEARTBEAT_S = 7 * 86400.0
_BATCH = 500  # objects in one request to delete

Records = Mapping[Slot, Record | None]  # the record in each slot, None where it is damaged


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeepPolicy:
    """The versions to keep: the newest `last`, the newest `anchors` with full weights, each `step_every`
    steps; the newest.
    """

    last: int | None = None
    anchors: int | None = None
    step_every: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.last, self.anchors, self.step_every) if number is not None]
        if not given:
            raise ConfigError("No versions to keep are named. Set last, anchors or step_every.")
        if min(given) < 1:
            raise ConfigError("last, anchors and step_every must be at least 1.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPlan:
    """The versions that `gc` keeps and deletes, ascending."""

    asked: list[Slot]  # versions that the `KeepPolicy` selects
    leading: list[Slot]  # their bases, back to an anchor
    # versions that were needed within the grace period, or that replicas serve, and their bases
    recent: list[Slot]
    forgotten: list[Slot]
    # keys of compactions and announcements to delete, because one of their ends is not kept
    compactions: list[str]
    keys: list[str]  # all objects to delete, in an order that leaves the kept versions readable at any moment

    @property
    def kept(self) -> list[Slot]:
        """All versions that are kept."""
        return sorted({*self.asked, *self.leading, *self.recent})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The result of `gc`: what it deleted, or would delete, and what it kept."""

    plan: RetentionPlan | None  # the versions; None if no rule was given, so that all stay
    # deleted files that no document named, or only deleted records; unfinished ones last
    objects: list[ObjectInfo]
    # keys of deleted heartbeats, which were older than a week, and than the grace period
    heartbeats: list[str]
    waiting: list[ObjectInfo]  # kept files that no document names yet, but that their author may still name
    young: list[ObjectInfo]  # kept files that are newer than the grace period, named or not


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of a channel. Times are those of storing, 0 if unknown."""

    records: Records  # the record in each slot, None for damaged ones
    stored_s: Mapping[str, float]  # time of each record, compaction and announcement, by key
    # For each version its shortcuts whose files all exist: their bases, None for an announced anchor, and
    # their times.
    shortcuts: Mapping[Slot, Mapping[Slot | None, float]] = dataclasses.field(default_factory=dict)

    def before(self, time_s: float) -> Contents:
        """Return the part that was stored before a time."""
        records = {
            slot: record
            for slot, record in self.records.items()
            if was_stored(self.stored_s[slot.key], time_s)
        }
        shortcuts = {
            slot: {base: stored_s for base, stored_s in bases.items() if was_stored(stored_s, time_s)}
            for slot, bases in self.shortcuts.items()
        }
        return dataclasses.replace(self, records=records, shortcuts=shortcuts)

    def _is_announced(self, slot: Slot) -> bool:
        return None in self.shortcuts.get(slot, ())

    def has_anchor(self, slot: Slot) -> bool:
        """Whether a reader can start at this version."""
        record = self.records.get(slot)
        return self._is_announced(slot) or (record is not None and record.anchor is not None)

    def chain_to(self, slot: Slot, passed: Collection[Slot] = ()) -> Iterator[Slot]:
        """Yield a version and its bases, back to an anchor or to a version in `passed`, over compactions from
        an anchor.
        """
        at: Slot | None = slot
        while at not in passed:
            if at is None or (at not in self.records and not self._is_announced(at)):
                raise MissingVersionError(
                    f"Version {slot.version} is to be kept, but is not readable, because an earlier version "
                    "is missing. "
                    "Nothing was deleted. Run `deltasync check`, or keep fewer versions."
                )
            yield at
            if self.has_anchor(at):
                return
            compacted = [
                base for base in self.shortcuts.get(at, ()) if base is not None and self.has_anchor(base)
            ]
            if compacted:
                yield max(compacted)
                return
            at = _base(self.records, at)


def lineage(records: Records) -> list[Slot]:
    """Return the newest version of the latest epoch that has one, and all its ancestors, newest first.

    Gaps of forgotten versions are skipped. Empty if no version's record is readable.
    """
    readable = (slot for slot, record in records.items() if record is not None and record.is_version)
    newest = max(readable, key=lambda slot: slot.newness, default=None)
    slots = sorted(slot for slot, record in records.items() if record is None or record.is_version)
    found: list[Slot] = []
    while newest is not None:
        found.append(newest)
        base = _base(records, newest)
        if base not in records:
            while slots and (slots[-1].version >= newest.version or slots[-1].epoch > newest.epoch):
                slots.pop()
            base = slots[-1] if slots else None
        newest = base
    return found


def _base(records: Records, slot: Slot) -> Slot | None:
    """Return a version's base; for a damaged record, the likely one."""
    record = records[slot]
    if record is not None:
        return None if record.base is None else record.base.slot
    return max(
        (each for each in records if each.version == slot.version - 1 and each.epoch <= slot.epoch),
        default=None,
    )


def plan_retention(
    contents: Contents, keep: KeepPolicy, since_s: float, served: Collection[Slot] = ()
) -> RetentionPlan:
    """Choose the records to delete. Seals are kept, and damaged records at the end of an epoch, which may be
    seals.

    Versions that were needed at `since_s` are kept too, unless it is infinity, and those that are `served`.
    """
    records = contents.records
    asked = _asked(contents, keep)
    needed: set[Slot] = set()
    for slot in asked:
        needed.update(contents.chain_to(slot, needed))
    before = contents.before(since_s)
    past = dataclasses.replace(contents, shortcuts=before.shortcuts)
    was_needed: set[Slot] = set()
    for slot in {*_asked(before, keep), *(records.keys() - before.records.keys()), *served}:
        with contextlib.suppress(MissingVersionError):
            was_needed.update(past.chain_to(slot, was_needed))
    kept = needed | was_needed
    last = {slot.epoch: slot for slot in sorted(records)}
    gone = {
        slot
        for slot, record in records.items()
        if slot not in kept and (record.is_version if record is not None else last[slot.epoch] != slot)
    }
    versions = {slot for slot, record in records.items() if record is not None and record.is_version} & kept
    numbers = {slot.version for slot in kept}
    # by version numbers, because one may be damaged; if epochs fork, more are kept than necessary
    compactions = {
        key: span
        for key, stored_s in contents.stored_s.items()
        if (span := keys.shortcut_of(key)) is not None
        and span.version <= max(numbers, default=0)
        and not {span.base or span.version, span.version} <= numbers
        and was_stored(stored_s, since_s)
    }
    order = [(slot.version, slot.epoch, 1, slot.key) for slot in gone]
    order += [(span.version, "", 0, key) for key, span in compactions.items()]
    return RetentionPlan(
        asked=sorted(asked),
        leading=sorted((needed & versions) - asked),
        recent=sorted(versions - needed),
        forgotten=sorted(gone),
        compactions=sorted(compactions),
        keys=[key for *_, key in sorted(order, reverse=True)],
    )


def was_stored(stored_s: float, time_s: float) -> bool:
    """Whether an object existed at a time. An object of unknown age (0) did not, unless the time is
    infinity.
    """
    return time_s == math.inf or 0 < stored_s <= time_s


def _asked(contents: Contents, keep: KeepPolicy) -> set[Slot]:
    versions = lineage(contents.records)
    asked = set(versions[: keep.last or 1])
    if keep.anchors is not None:
        asked.update([slot for slot in versions if contents.has_anchor(slot)][: keep.anchors])
    if keep.step_every is not None:
        steps = {slot: record.step for slot in versions if (record := contents.records[slot]) is not None}
        asked.update(slot for slot, step in steps.items() if step is not None and step % keep.step_every == 0)
    return asked


class References:
    """The files that records and shortcuts (None for damaged ones) name, or that their author may still
    name. `first` is the channel's first epoch.
    """

    def __init__(self, records: Records, shortcuts: Mapping[str, Record | None], first: str = "") -> None:
        self._first = first
        found = [record for record in (*records.values(), *shortcuts.values()) if record is not None]
        self._keys = {file.key for record in found for file in record.files}
        self._folders = {record.anchor.directory for record in found if record.anchor is not None}
        self._damaged = {slot for slot, record in records.items() if record is None}
        versions = {
            slot: record for slot, record in records.items() if record is not None and record.is_version
        }
        anchored = [slot for slot, record in versions.items() if record.anchor is not None]
        for key, found_there in shortcuts.items():
            span = keys.shortcut_of(key)
            assert span is not None
            if found_there is None:
                self._damaged.add(Slot(span.version, span.epoch))
            elif found_there.anchor is not None:
                anchored.append(Slot(span.version, span.epoch))
        self._last = {slot.epoch: slot.version for slot in sorted(versions)}  # newest version of each epoch
        # newest anchor of each author
        self._anchors = {slot.epoch: slot.version for slot in sorted(anchored)}
        self._newest_epoch = max(self._last, default="")

    def __contains__(self, key: str) -> bool:
        """Whether a document names a file, its anchor's folder, or is damaged and may name it."""
        folder = "/".join(key.split("/")[:2])
        return key in self._keys or folder in self._folders or keys.file_of(key) in self._damaged

    def in_progress(self, key: str) -> bool:
        """Whether a file's author may still name it, because no later writer has published. Its age does not
        matter.
        """
        of = keys.file_of(key)
        assert of is not None
        if self._first and of.epoch[:6] == self._first[:6] and of.epoch != self._first:
            return False  # another writer began the channel
        last = self._anchors if key.startswith(keys.ANCHORS) else self._last
        return of.epoch >= self._newest_epoch and of.version > last.get(of.epoch, 0)


def gc(
    reader: ChannelReader,
    keep: KeepPolicy | None = None,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    known: Known | None = None,
) -> Collected:
    """Delete the records of all versions except those to keep and their bases, then files that no document
    names any more.

    With `keep` None all versions stay. Versions that were needed less than `grace_s` ago are kept, and files
    that were stored less than `grace_s` ago, because readers may use them: it must exceed the time from a
    reader's plan to its last read, and from a writer's upload of an anchor's file to the announcement.
    Versions that heartbeats name are kept too, unless that boot has stopped, or was not heard of for
    `grace_s` and at least a minute. All ages are by the store's clock. Records are deleted one by one, newest
    first, so that the remaining versions are readable at any moment. After an interruption, a call with the
    same `keep` finishes the work. If a version to keep cannot be read, nothing is deleted
    (MissingVersionError). A `dry_run` deletes nothing, and stores only the small object that tells the
    time; where it may not, the newest object's time is taken for the store's. A caller that collects again keeps
    what is `known`, so that only new records are read.

    The order of its reads makes it safe while a publisher or another tool runs:

        clock                 first, so that ages are too small rather than too large
        files                 before the documents that name them: files uploaded later are not in the list
        records, shortcuts    files that their author may still name are kept (`References.in_progress`)
        heartbeats            last, because a replica may have moved to an older version
        unlisted records      of unnamed files, requested one by one, because a listing may lag

    Files of a damaged record that stays are kept, because `repair` may restore its bytes.
    """
    store = reader.store
    reader.channel()
    clock = StoreClock(store)
    with contextlib.suppress(StoreError):  # on a full disk nothing can be stored before something was deleted
        clock.measure()
    # a listing that lags, or no right to write: it is not earlier than the newest object says
    if not clock.is_measured:
        clock.note(store.list(""))
    since_s = math.inf if grace_s <= 0 else clock.now_s - grace_s
    files = [
        info for prefix in (keys.PARTS, keys.ANCHORS) for info in store.list(prefix) if keys.file_of(info.key)
    ]
    stale_s = clock.now_s - max(grace_s, _STALE_HEARTBEAT_S)
    heartbeats = [info.key for info in store.list(keys.REPLICAS) if 0 < info.modified_s < stale_s]
    old = [info for info in files if was_stored(info.modified_s, since_s)]
    local = local_store(store)
    halves = [] if local is None else [*local.unfinished()]
    dead = [info for info in halves if was_stored(info.modified_s, since_s)]
    held = scan_channel(reader, known=known) if old or keep is not None else None
    plan: RetentionPlan | None = None
    if keep is not None and held is not None:
        served = _served(reader, held, clock, max(grace_s, heartbeat.LIVE_S))
        plan = plan_retention(_contents(store, held), keep, since_s, served)
    references = References({}, {}) if held is None else _references(reader, held, old, plan)
    unnamed = [info for info in old if info.key not in references]
    waiting = [info for info in unnamed if references.in_progress(info.key)]
    found = sorted(set(unnamed).difference(waiting), key=lambda info: info.key)
    if not dry_run:
        records = [] if plan is None else plan.keys
        # one by one, because a store deletes a batch in any order
        for done, key in enumerate(records, start=1):
            store.delete(key)
            progressed("records deleted", done, len(records))
        for info in dead:
            assert local is not None
            local.delete_unfinished(info)
        doomed = [*(info.key for info in found), *heartbeats]
        for start in range(0, len(doomed), _BATCH):
            store.delete(*doomed[start : start + _BATCH])
            progressed("files deleted", min(start + _BATCH, len(doomed)), len(doomed))
        freed_bytes = sum(info.bytes for info in [*found, *dead])
        logger.info(
            "collected garbage records=%d objects=%d bytes=%d",
            len(records),
            len(found) + len(dead),
            freed_bytes,
        )
    young = sorted({*files, *halves}.difference(old, dead), key=lambda info: info.key)
    return Collected(plan=plan, objects=[*found, *dead], heartbeats=heartbeats, waiting=waiting, young=young)


def _served(reader: ChannelReader, held: Scan, clock: StoreClock, within_s: float) -> set[Slot]:
    """Return the versions that boots of replicas serve, or are pinned to, of which each was heard of within a
    time.
    """
    numbered = {slot.version: slot for slot in lineage(held.records)}
    found: set[Slot] = set()
    for beat in heartbeat.FleetHeartbeats(reader.store, reader.channel().run_id, clock, decides=True).boots(
        within_s
    ):
        if beat.state != heartbeat.STOPPED:
            pinned = int(beat.pin) if beat.pin is not None and beat.pin.isdecimal() else None
            found.update(numbered[number] for number in (pinned, beat.version) if number in numbered)
            found.update(() if beat.serving is None else {beat.serving.slot})
    return found


def _contents(store: Store, held: Scan) -> Contents:
    """Return the channel's contents, without shortcuts that lack a file."""
    stored_s = {key: info.modified_s for key, info in held.infos.items()}
    shortcuts = {key: record for key, record in held.shortcuts.items() if record is not None}
    prefixes = {file.key.split("/")[0] for record in shortcuts.values() for file in record.files}
    sizes = {info.key: info.bytes for prefix in sorted(prefixes) for info in store.list(f"{prefix}/")}
    found: dict[Slot, dict[Slot | None, float]] = {}
    for key, record in shortcuts.items():
        if all(sizes.get(file.key) == file.bytes for file in record.files):
            bases, base = found.setdefault(record.slot, {}), None if record.base is None else record.base.slot
            bases[base] = min(stored_s[key], bases.get(base, stored_s[key]))
    return Contents(records=held.records, stored_s=stored_s, shortcuts=found)


def _references(
    reader: ChannelReader, held: Scan, files: Sequence[ObjectInfo], plan: RetentionPlan | None
) -> References:
    """Return what names these files once the plan is done, including records that a listing may not show
    yet.
    """
    gone = set() if plan is None else set(plan.keys)
    records = {slot: record for slot, record in held.records.items() if slot.key not in gone}
    shortcuts = {key: record for key, record in held.shortcuts.items() if key not in gone}
    references = References(records, shortcuts, reader.channel().epoch)
    places: set[str] = set()
    for key in (info.key for info in files if info.key not in references):
        of = keys.file_of(key)
        assert of is not None
        places |= (
            {of.key, keys.announcement(of.version, of.epoch)} if key.startswith(keys.ANCHORS) else {of.key}
        )
    unlisted = sorted(places.difference((slot.key for slot in held.records), held.shortcuts))

    def read(key: str) -> Record:
        return reader.stored(key).record

    results = in_parallel(lambda key: result_or_error(read, key), unlisted, "unlisted records")
    for key, found in zip(unlisted, results, strict=True):
        if isinstance(found, MissingVersionError):
            continue
        slot, document = keys.slot_of(key), found if isinstance(found, Record) else None
        if slot is None:
            shortcuts[key] = document
        else:
            records[slot] = document
    return References(records, shortcuts, reader.channel().epoch)
