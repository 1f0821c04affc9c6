"""Garbage collection: drop versions by retention rules, and delete files that no document names."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from deltasync.channel import heartbeat, keys
from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import MissingVersionError
from deltasync.maintenance import retention
from deltasync.maintenance.retention import Contents, KeepPolicy, References, RetentionPlan
from deltasync.maintenance.scan import Scan, in_parallel, progressed, result_or_error, scan_channel
from deltasync.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
_STALE_HEARTBEAT_S = 7 * 86400.0
_BATCH = 500  # objects in one request to delete


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The result of `gc`: what it deleted, or would delete, and what it kept."""

    plan: RetentionPlan | None  # the versions; None if no rule was given, so that all stay
    objects: list[ObjectInfo]  # deleted files, which no document named, or only those of deleted records
    heartbeats: list[str]  # keys of deleted heartbeats, which were older than a week
    waiting: list[ObjectInfo]  # kept files that no document names yet, but that their author may still name
    young: list[ObjectInfo]  # kept files that are newer than the grace period, named or not


def gc(
    reader: ChannelReader, keep: KeepPolicy | None = None, *, grace_s: float = GRACE_S, dry_run: bool = False
) -> Collected:
    """Delete the records of all versions except those to keep and their bases, then files that no document names any more.

    With `keep` None all versions stay. Versions that were needed less than `grace_s` ago are kept, and files that were
    stored less than `grace_s` ago, because readers may use them: it must exceed the time from a reader's plan to its last
    read, and from a writer's upload of an anchor's file to the announcement. Versions that heartbeats name are kept too,
    unless the replica has stopped, or was not heard of for `grace_s` and at least a minute. Records are deleted one by one,
    newest first, so that the remaining versions are readable at any moment. After an interruption, a call with the same
    `keep` finishes the work. If a version to keep cannot be read, nothing is deleted (MissingVersionError). A `dry_run`
    writes nothing, so it measures ages with this machine's clock instead of the store's.

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
    now_s = _store_time(store, dry_run)
    since_s = math.inf if grace_s <= 0 else now_s - grace_s
    files = [info for prefix in (keys.PARTS, keys.ANCHORS) for info in store.list(prefix) if keys.file_of(info.key)]
    heartbeats = [info.key for info in store.list(keys.REPLICAS) if 0 < info.modified_s < now_s - _STALE_HEARTBEAT_S]
    old = [info for info in files if retention.was_stored(info.modified_s, since_s)]
    held = scan_channel(reader) if old or keep is not None else None
    plan: RetentionPlan | None = None
    if keep is not None and held is not None:
        served = _served(reader, held, now_s - max(grace_s, heartbeat.LIVE_S))
        plan = retention.plan_retention(_contents(store, held), keep, since_s, served)
    references = References({}, {}) if held is None else _references(reader, held, old, plan)
    unnamed = [info for info in old if info.key not in references]
    waiting = [info for info in unnamed if references.in_progress(info.key)]
    found = sorted(set(unnamed).difference(waiting), key=lambda info: info.key)
    if not dry_run:
        records = [] if plan is None else plan.keys
        for done, key in enumerate(records, start=1):  # one by one, because a store deletes a batch in any order
            store.delete(key)
            progressed("records deleted", done, len(records))
        doomed = [*(info.key for info in found), *heartbeats]
        for start in range(0, len(doomed), _BATCH):
            store.delete(*doomed[start : start + _BATCH])
            progressed("files deleted", min(start + _BATCH, len(doomed)), len(doomed))
        freed_bytes = sum(info.bytes for info in found)
        logger.info("collected garbage records=%d objects=%d bytes=%d", len(records), len(found), freed_bytes)
    young = sorted(set(files).difference(old), key=lambda info: info.key)
    return Collected(plan=plan, objects=found, heartbeats=heartbeats, waiting=waiting, young=young)


def _served(reader: ChannelReader, held: Scan, since_s: float) -> set[Slot]:
    """Return the versions that replicas serve, or are pinned to, by heartbeats that were stored after a time."""
    numbered = {slot.version: slot for slot in retention.lineage(held.records)}
    found: set[Slot] = set()
    for beat in heartbeat.read_all(reader.store, reader.channel().run_id):
        if beat.state != heartbeat.STOPPED and beat.time_s > since_s:
            number = int(beat.pin) if beat.pin is not None and beat.pin.isdecimal() else beat.version
            found.update({numbered[number]} if number in numbered else ())
            found.update(() if beat.serving is None else {beat.serving.slot})
    return found


def _contents(store: Store, held: Scan) -> Contents:
    """Return the channel's contents, without shortcuts that lack a file."""
    stored_s = {info.key: info.modified_s for info in (*held.slots.values(), *held.shortcut_infos.values())}
    shortcuts = {key: record for key, record in held.shortcuts.items() if record is not None}
    prefixes = {file.key.split("/")[0] for record in shortcuts.values() for file in record.files}
    sizes = {info.key: info.bytes for prefix in sorted(prefixes) for info in store.list(f"{prefix}/")}
    found: dict[Slot, dict[Slot | None, float]] = {}
    for key, record in shortcuts.items():
        if all(sizes.get(file.key) == file.bytes for file in record.files):
            bases, base = found.setdefault(record.slot, {}), None if record.base is None else record.base.slot
            bases[base] = min(stored_s[key], bases.get(base, stored_s[key]))
    return Contents(records=held.records, stored_s=stored_s, shortcuts=found)


def _references(reader: ChannelReader, held: Scan, files: Sequence[ObjectInfo], plan: RetentionPlan | None) -> References:
    """Return what names these files once the plan is done, including records that a listing may not show yet."""
    gone = set() if plan is None else set(plan.keys)
    records = {slot: record for slot, record in held.records.items() if slot.key not in gone}
    shortcuts = {key: record for key, record in held.shortcuts.items() if key not in gone}
    references = References(records, shortcuts)
    places: set[str] = set()
    for key in (info.key for info in files if info.key not in references):
        of = keys.file_of(key)
        assert of is not None
        places |= {of.key, keys.announcement(of.version, of.epoch)} if key.startswith(keys.ANCHORS) else {of.key}
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
    return References(records, shortcuts)


def _store_time(store: Store, dry_run: bool) -> float:
    """Write an object and return its modification time, so that no machine's wrong clock makes a file seem old.

    If a listing does not show that object yet, return the time of the newest listed object.
    """
    if dry_run:
        return time.time()
    key = keys.probe(f"{keys.TOOL}00000000")  # one key for all, so that killed processes leave only one object
    store.put(key, b"deltasync wrote this to read the store's clock; it may be deleted.\n")
    try:
        times = [info.modified_s for info in store.list(key)]
    finally:
        store.delete(key)
    return times[0] if times else max((info.modified_s for info in store.list("")), default=0.0)
