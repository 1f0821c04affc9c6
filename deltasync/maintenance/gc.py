"""Forget versions, and prune the files that nothing names any more. Both can be run again after a crash at any point."""

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
from deltasync.maintenance.retention import Forgetting, Holding, Keep, References
from deltasync.maintenance.scan import Progress, Survey, attempt, in_parallel, quiet, survey
from deltasync.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
_STALE_HEARTBEAT_S = 7 * 86400.0
_BATCH = 500  # objects in one request to delete


def forget(
    reader: ChannelReader, keep: Keep, *, grace_s: float = GRACE_S, dry_run: bool = False, progress: Progress = quiet
) -> Forgetting:
    """Delete the records of all versions but those to keep and what these build on. Their files are left to `prune`.

    The newest go first and one by one, so that the versions that are left can be read at any moment; running it again with
    the same `keep` finishes what was interrupted. What was still needed less than `grace_s` ago is kept, for readers that
    use it. With `dry_run` nothing is written, so ages are measured by this machine's clock instead of the store's.

    Raises:
        MissingVersionError: a version to keep cannot be read. Nothing was forgotten.
        StoreError: the store failed; some may have been forgotten.
    """
    since_s = math.inf if grace_s <= 0 else _store_time(reader.store, dry_run) - grace_s
    held = survey(reader, progress)
    stored_s = {info.key: info.modified_s for info in (*held.slots.values(), *held.shortcut_infos.values())}
    holding = _holding(reader.store, held, stored_s)
    found = retention.forgetting(holding, keep, since_s)
    if dry_run:
        return found
    for done, key in enumerate(found.keys, start=1):  # one by one: a store may delete many in any order
        reader.store.delete(key)
        progress("forgetting", done, len(found.keys))
    if found.keys:
        logger.info(
            "forgot versions=%d compactions=%d kept=%d", len(found.versions), len(found.compactions), len(found.kept)
        )
    return found


def _holding(store: Store, held: Survey, stored_s: Mapping[str, float]) -> Holding:
    """What the channel holds; of shortcuts, only what has all of its files."""
    shortcuts = {key: record for key, record in held.shortcuts.items() if record is not None}
    prefixes = {file.key.split("/")[0] for record in shortcuts.values() for file in record.files}
    sizes = {info.key: info.bytes for prefix in sorted(prefixes) for info in store.list(f"{prefix}/")}
    announced: dict[Slot, float] = {}
    compacted: dict[Slot, dict[Slot, float]] = {}
    for key, record in shortcuts.items():
        if not all(sizes.get(file.key) == file.bytes for file in record.files):
            continue
        if record.base is None:
            announced[record.slot] = min(stored_s[key], announced.get(record.slot, stored_s[key]))
        else:
            bases, base = compacted.setdefault(record.slot, {}), record.base.slot
            bases[base] = min(stored_s[key], bases.get(base, stored_s[key]))
    return Holding(records=held.records, stored_s=stored_s, announced=announced, compacted=compacted)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What `prune` deleted, or would delete.

    Attributes:
        objects: Files that nothing names.
        heartbeats: Keys of heartbeats that are older than a week.
        waiting: Files that nothing names yet, but that their author may still name.
        young: Files that are newer than the grace period, named or not.
    """

    objects: list[ObjectInfo]
    heartbeats: list[str]
    waiting: list[ObjectInfo]
    young: list[ObjectInfo]


def prune(reader: ChannelReader, *, grace_s: float = GRACE_S, dry_run: bool = False, progress: Progress = quiet) -> Pruned:
    """Delete the files under `parts/` and `anchors/` that nothing in the channel names, if they are older than `grace_s`.

    The order of its steps makes it safe while a publisher runs, a `forget` or another tool:

        clock           first, so that ages come out too small rather than too large
        files           before what names them: what is uploaded later is not in the list, so it cannot be deleted
        records, compactions  what an author has not named yet is kept until a later writer publishes
        (`References.under_way`)
        slots           of the files that nothing names: a listing may lag behind, but a request for a record does not

    Files of a damaged record are kept, because `repair` may put its bytes back. Choose a `grace_s` longer than readers take
    from planning to the last read, and than a writer takes from storing an anchor's file to announcing it. `dry_run` is as
    in `forget`.

    Raises:
        StoreError: the store failed; nothing that is named was deleted.
    """
    store = reader.store
    reader.channel()
    now_s = _store_time(store, dry_run)
    files = [info for prefix in (keys.PARTS, keys.ANCHORS) for info in store.list(prefix) if keys.file_of(info.key)]
    heartbeats = [info.key for info in store.list(keys.REPLICAS) if 0 < info.modified_s < now_s - _STALE_HEARTBEAT_S]
    since_s = math.inf if grace_s <= 0 else now_s - grace_s
    old = [info for info in files if retention.was_stored(info.modified_s, since_s)]
    references = _references(reader, old, progress) if old else References({}, {})
    unnamed = [info for info in old if info.key not in references]
    waiting = [info for info in unnamed if references.under_way(info.key)]
    found = sorted(set(unnamed).difference(waiting), key=lambda info: info.key)
    if not dry_run:
        doomed = [*(info.key for info in found), *heartbeats]
        for start in range(0, len(doomed), _BATCH):
            store.delete(*doomed[start : start + _BATCH])
            progress("pruning", min(start + _BATCH, len(doomed)), len(doomed))
        logger.info("pruned objects=%d bytes=%d", len(found), sum(info.bytes for info in found))
    young = sorted(set(files).difference(old), key=lambda info: info.key)
    return Pruned(objects=found, heartbeats=heartbeats, waiting=waiting, young=young)


def _references(reader: ChannelReader, files: Sequence[ObjectInfo], progress: Progress) -> References:
    """What names these files. For those that nothing listed names, also the records that a listing may not show yet."""
    held = survey(reader, progress)
    references = References(held.records, held.shortcuts)
    places: set[str] = set()
    for key in (info.key for info in files if info.key not in references):
        of = keys.file_of(key)
        assert of is not None
        places |= {of.key, keys.announcement(of.version, of.epoch)} if key.startswith(keys.ANCHORS) else {of.key}
    unlisted = sorted(places.difference((slot.key for slot in held.records), held.shortcuts))

    def read(key: str) -> Record:
        return reader.stored(key).record

    results = in_parallel(lambda key: attempt(read, key), unlisted, "unlisted records", progress)
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
    """The store's time, from an object that is written now: no clock of a machine can then make a file look old.

    If a listing does not show that object yet, it is the time of the newest object that it shows.
    """
    if dry_run:
        return time.time()
    key = keys.probe(f"{keys.TOOL}00000000")  # one for all: whoever dies before it is deleted leaves no more than one
    store.put(key, b"Written by deltasync to see the store's time; may be deleted.\n")
    try:
        times = [info.modified_s for info in store.list(key)]
    finally:
        store.delete(key)
    return times[0] if times else max((info.modified_s for info in store.list("")), default=0.0)
