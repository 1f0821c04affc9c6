"""Forget versions, and prune the files that nothing names any more. Both can be run again after a crash at any point."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence

from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import MissingVersionError
from deltasync.housekeeping import retention
from deltasync.housekeeping.retention import Forgetting, Holding, Keep, References
from deltasync.housekeeping.walk import Progress, Survey, attempt, in_parallel, quiet, survey
from deltasync.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
_STALE_HEARTBEAT_S = 7 * 86400.0
_BATCH = 500


def forget(
    reader: ChannelReader, keep: Keep, *, grace_s: float = GRACE_S, dry_run: bool = False, progress: Progress = quiet
) -> Forgetting:
    """Take versions out of the channel. The files that they named are left to `prune`.

    The newest go first and one by one, so that at any moment all versions that are left can be read; running it again with
    the same `keep` finishes what was cut short. What became dispensable less than `grace_s` ago stays too, for readers that
    go by it. With `dry_run` it only tells what would go; by this machine's clock, because nothing is written.

    Raises:
        MissingVersionError: a version that stays cannot be read. Nothing was forgotten.
        StoreError: the store failed; some may have been forgotten.
    """
    since_s = math.inf if grace_s <= 0 else _store_time(reader.store, dry_run) - grace_s
    held = survey(reader, progress, wanted_fold=lambda span: span.base == 0)
    holding = Holding(
        records=held.records,
        stored_s={info.key: info.modified_s for info in (*held.slots.values(), *held.fold_infos.values())},
        announced=_announced(reader.store, held),
        folds=list(held.fold_infos),
    )
    found = retention.forgetting(holding, keep, since_s)
    if dry_run:
        return found
    for done, key in enumerate(found.keys, start=1):  # one by one: a store may delete many in any order
        reader.store.delete(key)
        progress("forgetting", done, len(found.keys))
    if found.keys:
        logger.info("forgot versions=%d folds=%d kept=%d", len(found.versions), len(found.folds), len(found.kept))
    return found


def _announced(store: Store, held: Survey) -> dict[Slot, float]:
    """Versions with an announced anchor all of whose files are there -> when it was announced."""
    anchors = {key: record for key, record in held.folds.items() if record is not None and record.anchor is not None}
    if not anchors:
        return {}
    sizes = {info.key: info.bytes for info in store.list(keys.ANCHORS)}
    found: dict[Slot, float] = {}
    for key, record in anchors.items():
        if all(sizes.get(file.key) == file.bytes for file in record.files):
            slot, stored_s = record.slot, held.fold_infos[key].modified_s
            found[slot] = min(stored_s, found.get(slot, stored_s))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What `prune` deleted, or would delete.

    Attributes:
        objects: Files that nothing names.
        heartbeats: Keys of heartbeats of replicas that have not been heard of for a week.
        waiting: Files that nothing names yet, and that their author may still name.
        young: Files that were stored less than the time of grace ago, named or not.
    """

    objects: list[ObjectInfo]
    heartbeats: list[str]
    waiting: list[ObjectInfo]
    young: list[ObjectInfo]


def prune(reader: ChannelReader, *, grace_s: float = GRACE_S, dry_run: bool = False, progress: Progress = quiet) -> Pruned:
    """Delete the files under `parts/` and `anchors/` that no record and no fold names.

    It looks in this order, so that whatever a publisher, a `forget` or another tool does meanwhile is seen or spared:

        clock           before everything, so that ages come out too small rather than too large
        files           before what names them: what is uploaded later is not in the list, so it cannot be deleted
        records, folds  what an author has not named yet is spared until somebody succeeds it (`References.under_way`)
        slots           of the files that nothing names: a listing may be behind, a request for a record is not

    Where a record is damaged, the files of its slot stay: `repair` may put its bytes back. What goes is older than
    `grace_s`: give it more than readers take from planning to having read, and than a writer takes from storing an anchor's
    file to announcing it. `dry_run` is as of `forget`.

    Raises:
        StoreError: the store failed; nothing that is named was deleted.
    """
    store = reader.store
    reader.channel()
    now_s = _store_time(store, dry_run)
    files = [info for prefix in (keys.PARTS, keys.ANCHORS) for info in store.list(prefix) if keys.file_of(info.key)]
    heartbeats = [info.key for info in store.list(keys.REPLICAS) if 0 < info.modified_s < now_s - _STALE_HEARTBEAT_S]
    old = [info for info in files if retention.was(info.modified_s, math.inf if grace_s <= 0 else now_s - grace_s)]
    references = _references(reader, old, progress) if old else References({}, {})
    unnamed = [info for info in old if info.key not in references]
    waiting = [info for info in unnamed if references.under_way(info.key)]
    found = sorted(set(unnamed) - set(waiting), key=lambda info: info.key)
    if not dry_run:
        doomed = [*(info.key for info in found), *heartbeats]
        for start in range(0, len(doomed), _BATCH):
            store.delete(*doomed[start : start + _BATCH])
            progress("pruning", min(start + _BATCH, len(doomed)), len(doomed))
        logger.info("pruned objects=%d bytes=%d", len(found), sum(info.bytes for info in found))
    young = sorted(set(files) - set(old), key=lambda info: info.key)
    return Pruned(objects=found, heartbeats=heartbeats, waiting=waiting, young=young)


def _references(reader: ChannelReader, files: Sequence[ObjectInfo], progress: Progress) -> References:
    """What names these files: all that is listed, and where that is nothing, what is there though no listing shows it."""
    held = survey(reader, progress)
    references = References(held.records, held.folds)
    unnamed = [info.key for info in files if info.key not in references]
    slots = {of for key in unnamed if (of := keys.file_of(key)) is not None}
    anchored = {of for key in unnamed if key.startswith(keys.ANCHORS) and (of := keys.file_of(key)) is not None}
    places = {slot.key for slot in slots - held.records.keys()}
    places |= {keys.fold(0, slot.version, slot.epoch) for slot in anchored} - held.folds.keys()
    if not places:
        return references
    unlisted = sorted(places)
    read = in_parallel(lambda key: attempt(lambda: reader.stored(key).record), unlisted, "unlisted records", progress)
    there = {key: each for key, each in zip(unlisted, read, strict=True) if not isinstance(each, MissingVersionError)}
    found = {key: each if isinstance(each, Record) else None for key, each in there.items()}
    records = {slot: found[slot.key] for slot in slots if slot.key in found}
    folds = {key: record for key, record in found.items() if keys.fold_of(key) is not None}
    return References({**held.records, **records}, {**held.folds, **folds})


def _store_time(store: Store, dry_run: bool) -> float:
    """The time by the store's clock: that of an object written now, so that no machine's clock can make a file old.

    Where the listing does not show that object yet, it is the time of the newest object that it shows.
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
