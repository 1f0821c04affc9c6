"""Forget versions, and prune files that no document names. Both can be run again after a crash at any point."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence

from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import MissingVersionError
from deltasync.maintenance import retention
from deltasync.maintenance.retention import Contents, ForgetPlan, KeepPolicy, References
from deltasync.maintenance.scan import Scan, in_parallel, progressed, result_or_error, scan_channel
from deltasync.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
_STALE_HEARTBEAT_S = 7 * 86400.0
_BATCH = 500  # objects in one request to delete


def forget(reader: ChannelReader, keep: KeepPolicy, *, grace_s: float = GRACE_S, dry_run: bool = False) -> ForgetPlan:
    """Delete the records of all versions except those to keep and their bases. `prune` deletes their files later.

    Records are deleted one by one, newest first, so that the remaining versions are readable at any moment. After an
    interruption, a call with the same `keep` finishes the work. Versions that were needed less than `grace_s` ago are kept,
    because readers may use them. A `dry_run` writes nothing, so it measures ages with this machine's clock instead of the
    store's. If a version to keep cannot be read, nothing is forgotten (MissingVersionError).
    """
    since_s = math.inf if grace_s <= 0 else _store_time(reader.store, dry_run) - grace_s
    held = scan_channel(reader)
    stored_s = {info.key: info.modified_s for info in (*held.slots.values(), *held.shortcut_infos.values())}
    contents = _contents(reader.store, held, stored_s)
    found = retention.plan_forget(contents, keep, since_s)
    if dry_run:
        return found
    for done, key in enumerate(found.keys, start=1):  # one by one, because a store deletes a batch in any order
        reader.store.delete(key)
        progressed("forgetting", done, len(found.keys))
    if found.keys:
        logger.info(
            "forgot versions=%d compactions=%d kept=%d", len(found.versions), len(found.compactions), len(found.kept)
        )
    return found


def _contents(store: Store, held: Scan, stored_s: Mapping[str, float]) -> Contents:
    """Return the channel's contents, without shortcuts that lack a file."""
    shortcuts = {key: record for key, record in held.shortcuts.items() if record is not None}
    prefixes = {file.key.split("/")[0] for record in shortcuts.values() for file in record.files}
    sizes = {info.key: info.bytes for prefix in sorted(prefixes) for info in store.list(f"{prefix}/")}
    found: dict[Slot, dict[Slot | None, float]] = {}
    for key, record in shortcuts.items():
        if all(sizes.get(file.key) == file.bytes for file in record.files):
            bases, base = found.setdefault(record.slot, {}), None if record.base is None else record.base.slot
            bases[base] = min(stored_s[key], bases.get(base, stored_s[key]))
    return Contents(records=held.records, stored_s=stored_s, shortcuts=found)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result of `prune`: what it deleted, or would delete, and what it kept."""

    objects: list[ObjectInfo]  # deleted files, which no document named
    heartbeats: list[str]  # keys of deleted heartbeats, which were older than a week
    waiting: list[ObjectInfo]  # kept files that no document names yet, but that their author may still name
    young: list[ObjectInfo]  # kept files that are newer than the grace period, named or not


def prune(reader: ChannelReader, *, grace_s: float = GRACE_S, dry_run: bool = False) -> Pruned:
    """Delete the files under `parts/` and `anchors/` that no document names, if they are older than `grace_s`.

    The order of its reads makes it safe while a publisher, a `forget` or another tool runs:

        clock                 first, so that ages are too small rather than too large
        files                 before the documents that name them: files uploaded later are not in the list
        records, shortcuts    files that their author may still name are kept (`References.in_progress`)
        unlisted records      of unnamed files, requested one by one, because a listing may lag

    Files of a damaged record are kept, because `repair` may restore its bytes. `grace_s` must exceed the time from a
    reader's plan to its last read, and from a writer's upload of an anchor's file to the announcement. `dry_run` works as in
    `forget`.
    """
    store = reader.store
    reader.channel()
    now_s = _store_time(store, dry_run)
    files = [info for prefix in (keys.PARTS, keys.ANCHORS) for info in store.list(prefix) if keys.file_of(info.key)]
    heartbeats = [info.key for info in store.list(keys.REPLICAS) if 0 < info.modified_s < now_s - _STALE_HEARTBEAT_S]
    since_s = math.inf if grace_s <= 0 else now_s - grace_s
    old = [info for info in files if retention.was_stored(info.modified_s, since_s)]
    references = _references(reader, old) if old else References({}, {})
    unnamed = [info for info in old if info.key not in references]
    waiting = [info for info in unnamed if references.in_progress(info.key)]
    found = sorted(set(unnamed).difference(waiting), key=lambda info: info.key)
    if not dry_run:
        doomed = [*(info.key for info in found), *heartbeats]
        for start in range(0, len(doomed), _BATCH):
            store.delete(*doomed[start : start + _BATCH])
            progressed("pruning", min(start + _BATCH, len(doomed)), len(doomed))
        logger.info("pruned objects=%d bytes=%d", len(found), sum(info.bytes for info in found))
    young = sorted(set(files).difference(old), key=lambda info: info.key)
    return Pruned(objects=found, heartbeats=heartbeats, waiting=waiting, young=young)


def _references(reader: ChannelReader, files: Sequence[ObjectInfo]) -> References:
    """Read the documents that may name these files, including records that a listing may not show yet."""
    held = scan_channel(reader)
    references = References(held.records, held.shortcuts)
    places: set[str] = set()
    for key in (info.key for info in files if info.key not in references):
        of = keys.file_of(key)
        assert of is not None
        places |= {of.key, keys.announcement(of.version, of.epoch)} if key.startswith(keys.ANCHORS) else {of.key}
    unlisted = sorted(places.difference((slot.key for slot in held.records), held.shortcuts))

    def read(key: str) -> Record:
        return reader.stored(key).record

    results = in_parallel(lambda key: result_or_error(read, key), unlisted, "unlisted records")
    records, shortcuts = dict(held.records), dict(held.shortcuts)
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
