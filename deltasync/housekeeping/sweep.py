"""Forget versions, and prune the bytes that nothing refers to any more. Both can be run again after a crash at any point."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence

from deltasync import layout, manifest, retention
from deltasync.errors import MissingVersionError, ObjectMissingError
from deltasync.housekeeping.survey import Progress, now, quiet, read_folds, read_manifests
from deltasync.manifest import DOCUMENT_BYTES, Forgotten
from deltasync.reader import ChannelReader
from deltasync.retention import Forgetting, Keep
from deltasync.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

GRACE_S = 3600.0
_STALE_HEARTBEAT_S = 7 * 86400.0
_BATCH = 500


def forget(reader: ChannelReader, keep: Keep, *, dry_run: bool = False, progress: Progress = quiet) -> Forgetting:
    """Take versions out of the channel. What they referred to is left to `prune`.

    Crash points:

        after the list of what is forgotten   nothing has changed for readers
        after some folds or manifests         every version that is left can be read, because the newest go first
        each time                             running it again with the same `keep` finishes it

    Args:
        reader: The channel.
        keep: What stays, together with what leads to it.
        dry_run: Only tell what would go.
        progress: Told how far it is.

    Raises:
        MissingVersionError: a version that stays cannot be read. Nothing was forgotten.
        FormatError: a manifest is damaged. Nothing was forgotten.
    """
    store = reader.store
    head = reader.head()
    fold_keys = [info.key for info in store.list(layout.FOLDS)]
    found = retention.forgetting(read_manifests(reader, progress, head=head), fold_keys, head.version, keep)
    if dry_run or not found.named:
        return found
    document = Forgotten(format=manifest.FORMAT, run_id=head.run_id, versions=found.named, created_at=now())
    store.create(layout.forgotten(uuid.uuid4().hex), manifest.encode(document))
    store.delete(*found.folds)
    for done, version in enumerate(found.versions, start=1):  # one by one: a store may delete many in any order
        store.delete(layout.manifest(version))
        progress("forgetting", done, len(found.versions))
    logger.info("forgot versions=%d folds=%d kept=%d", len(found.versions), len(found.folds), len(found.kept))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What `prune` deleted, or would delete.

    Attributes:
        objects: Data objects.
        lists: Keys of lists of forgotten versions of which nothing is left.
        heartbeats: Keys of heartbeats of replicas that have not been heard of for a week.
        waiting: Data objects that nothing refers to, which stay because they are too young or being published.
    """

    objects: list[ObjectInfo]
    lists: list[str]
    heartbeats: list[str]
    waiting: list[ObjectInfo]


def prune(reader: ChannelReader, *, grace_s: float = GRACE_S, dry_run: bool = False, progress: Progress = quiet) -> Pruned:
    """Delete the data objects that no manifest and no fold refers to. See `retention.prunable` for which.

    It looks in this order, so that whatever a publisher, a `forget` or a fold's writer does meanwhile is seen or spared:

        clock       before everything, so that ages come out too small rather than too large
        objects     before the documents: what is uploaded later is not in the list, so it cannot be deleted
        head        before the manifests: if a manifest is not there yet, head named an earlier version, and objects
                    of versions after head are spared
        manifests, folds
        forgotten   after the manifests: a manifest that was not there any more had been named in such a list before

    Times are the store's own, of an object written now, so that it does not matter what the clocks of machines say.

    Args:
        reader: The channel.
        grace_s: How long after a version was forgotten readers may still be reading it; also the least age of what a dead
            publisher left. Give it more than reading a version and running `forget` take.
        dry_run: Only tell what would go; by this machine's clock, because nothing is written.
        progress: Told how far it is.

    Raises:
        FormatError: a document is damaged, so that nobody knows what it refers to. Nothing was deleted.
        MissingVersionError: head's manifest is missing. Nothing was deleted.
    """
    store = reader.store
    if not dry_run:
        store.replace(layout.CLOCK, b"Written by deltasync prune to see the store's time.\n")
    objects = {info.key: info for prefix in layout.DATA for info in store.list(prefix)}
    heartbeats = list(store.list(layout.REPLICAS))
    head = reader.head()
    manifests = read_manifests(reader, progress, head=head)
    if head.version not in manifests:
        raise MissingVersionError(
            f"Head names version {head.version}, which has no manifest now. Nothing was pruned. See `deltasync check`."
        )
    references = retention.References(manifests.values(), read_folds(reader, progress).values())
    listed = {info.key: info.modified_s for info in store.list(layout.FORGOTTEN)}
    now_s = time.time() if dry_run else listed[layout.CLOCK]
    forgotten = _read_forgotten(reader, [key for key in listed if key != layout.CLOCK])
    forgotten_s: dict[int, float] = {}
    for key, versions in forgotten.items():
        forgotten_s |= {version: max(listed[key], forgotten_s.get(version, 0.0)) for version in versions}

    stored_s = {key: info.modified_s for key, info in objects.items()}
    keys = retention.prunable(stored_s, references, head.version, forgotten_s, now_s, grace_s)
    left = objects.keys() - set(keys)
    pruned = Pruned(
        objects=[objects[key] for key in keys],
        lists=retention.spent(forgotten, manifests.keys(), left),
        heartbeats=[info.key for info in heartbeats if now_s - info.modified_s > _STALE_HEARTBEAT_S],
        waiting=[objects[key] for key in sorted(left) if key not in references and layout.data_versions(key)],
    )
    if not dry_run:
        _delete(store, [*keys, *pruned.heartbeats, *pruned.lists], progress)
        logger.info("pruned objects=%d bytes=%d", len(keys), sum(info.bytes for info in pruned.objects))
    return pruned


def _read_forgotten(reader: ChannelReader, keys: Sequence[str]) -> dict[str, list[int]]:
    """The versions that each list names; without lists that another prune deleted meanwhile."""
    found = {}
    for key in keys:
        try:
            document = manifest.decode(reader.store.read(key, DOCUMENT_BYTES), Forgotten, key)
        except ObjectMissingError:
            continue
        found[key] = document.versions
    return found


def _delete(store: Store, keys: Sequence[str], progress: Progress) -> None:
    for start in range(0, len(keys), _BATCH):
        store.delete(*keys[start : start + _BATCH])
        progress("pruning", min(start + _BATCH, len(keys)), len(keys))
