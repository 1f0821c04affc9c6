"""Take a channel elsewhere: copy it to another store, or export one version as a checkpoint directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from deltasync.channel import anchors, checkpoint, documents, keys
from deltasync.channel.documents import File, Record, Version
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    ObjectExistsError,
    ObjectMissingError,
    RunMismatchError,
)
from deltasync.follow import Replica
from deltasync.housekeeping.survey import Progress, Survey, in_parallel, persistently, quiet, survey
from deltasync.stores.base import Store

_THREADS = 4  # objects in memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What `copy` did.

    Attributes:
        version: The newest version that was listed.
        objects, bytes: Stored in the target; head not counted.
        skipped: Objects that the target had already.
        problems: Objects that are damaged or missing in the source and were left out.
    """

    version: Version | None
    objects: int
    bytes: int
    skipped: int
    problems: list[DeltaSyncError]


def copy(source: ChannelReader, target: Store, *, progress: Progress = quiet) -> Copied:
    """Copy a channel as it is now, object by object; damaged objects are left out and told.

    The order is files, folds, records by number, epochs, channel.json, head: a record may need an anchor that only a fold
    announces. Whenever it is cut short, the target is the channel that it was before, with more versions, or none yet, and
    running it again goes on; what the target has with the same size is not read again. Publishing to the source may go on
    meanwhile; later versions are not copied. Do not prune the target meanwhile. Holds a few objects in memory at a time.

    Raises:
        RunMismatchError: the target holds another run.
        ChannelInUseError: the target has versions that the source does not have.
        ObjectExistsError: the target has an object of another size. Nothing of it was replaced.
        StoreError: a store failed.
    """
    source.channel()
    if target.url == source.store.url:
        raise ConfigError(f"{target.url} is both source and target.")
    head = None if source.head() is None else source.store.read(keys.HEAD, documents.SMALL_BYTES)
    held = survey(source, progress)
    there = {info.key: info.bytes for info in target.list("")}
    _check_target(source, target, held, there)
    one = functools.partial(_copy_object, source, target, there)
    digests = held.digests()
    whole = [record for record in (*held.records.values(), *held.folds.values()) if record is not None]
    files = {file.key: file for found in whole for file in found.files}
    folds = [File(key=key, bytes=held.fold_infos[key].bytes, sha256="") for key, found in held.folds.items() if found]
    records = [
        File(key=slot.key, bytes=held.slots[slot].bytes, sha256=digests.get(slot, ""))
        for slot, found in held.records.items()
        if found
    ]
    parts_first = sorted(files.values(), key=lambda file: (file.key.startswith(keys.ANCHORS), file.key))
    done = in_parallel(one, parts_first, "files", progress, _THREADS)
    done += in_parallel(one, folds, "folds", progress, _THREADS)
    for count, item in enumerate(records, start=1):  # one by one: whichever is the newest, what it builds on is there
        done.append(one(item))
        progress("records", count, len(records))
    small = [File(key=info.key, bytes=info.bytes, sha256="") for info in source.store.list(keys.EPOCHS)]
    done += [one(item) for item in (*small, File(key=keys.CHANNEL, bytes=there.get(keys.CHANNEL, 0), sha256=""))]
    if head is not None:
        target.put(keys.HEAD, head)
    stored = [each for each in done if isinstance(each, int)]
    return Copied(
        version=_newest(source, held),
        objects=len(stored),
        bytes=sum(stored),
        skipped=sum(1 for each in done if each is None),
        problems=[*held.problems.values(), *(each for each in done if isinstance(each, DeltaSyncError))],
    )


def _newest(source: ChannelReader, held: Survey) -> Version | None:
    slots = [slot for slot, found in held.records.items() if found is not None and found.is_version]
    stored = source.slot(max(slots, key=lambda slot: (slot.epoch, slot.version))) if slots else None
    return None if stored is None else stored.version


def _check_target(source: ChannelReader, target: Store, held: Survey, there: Mapping[str, int]) -> None:
    """Refuse a target that is something else than an earlier copy."""
    run_id = source.channel().run_id
    if keys.CHANNEL in there:
        found = ChannelReader(target, source.trusted).channel().run_id
        if found != run_id:
            raise RunMismatchError(
                f"{target.url} holds run {found}, not run {run_id}. Nothing was copied; choose another target."
            )
    slots = [slot for key in there if (slot := keys.slot_of(key)) is not None]
    named = [record.next_epoch for record in held.records.values() if record is not None and record.next_epoch is not None]
    known = {source.channel().epoch, *source.epochs(), *named, *(slot.epoch for slot in held.slots)}
    last = max(((slot.epoch, slot.version) for slot in held.slots), default=("", 0))
    if strange := [slot for slot in slots if slot.epoch not in known]:
        raise ChannelInUseError(
            f"{target.url} has {strange[0].key}, of an epoch that {source.store.url} does not know: somebody published "
            "there. Nothing was copied; choose another target, or is it the other way round?"
        )
    if ahead := [slot for slot in slots if (slot.epoch, slot.version) > last]:
        raise ChannelInUseError(
            f"{target.url} has version {ahead[-1].version}, ahead of {source.store.url} at version {last[1]}. "
            "Nothing was copied; is it the other way round?"
        )


def _copy_object(source: ChannelReader, target: Store, there: Mapping[str, int], item: File) -> int | DeltaSyncError | None:
    """Store one object in the target; its bytes, None if the target had it, or what is wrong with it in the source.

    Args:
        source: The channel.
        target: Where it is copied to.
        there: Sizes of the target's objects at the start.
        item: The object; its `sha256` is empty where nothing names it.
    """
    if there.get(item.key) == item.bytes:
        return None
    if item.key in there:
        raise ObjectExistsError(
            f"{target.url} has other bytes at {item.key}. They were left as they are; choose another target, or delete them."
        )
    try:
        data = persistently(lambda: _read(source, item))
    except (FormatError, MissingVersionError, ObjectMissingError) as error:
        return error
    target.put(item.key, data)
    return len(data)


def _read(source: ChannelReader, item: File) -> bytes:
    """An object of the source, checked as far as anything tells what it must be."""
    if keys.file_of(item.key) is None and keys.slot_of(item.key) is None and keys.fold_of(item.key) is None:
        return source.store.read(item.key, documents.CHANNEL_BYTES)
    if keys.slot_of(item.key) is None and keys.fold_of(item.key) is None:
        return source.fetch(item)
    data = source.stored(item.key, item.sha256 or None).data
    assert data is not None
    return data


def export(
    reader: ChannelReader,
    version: int | None,
    directory: Path,
    *,
    shard_bytes: int = 1 << 30,
    progress: Progress = quiet,
) -> Version:
    """Write one version as a checkpoint directory that transformers and vLLM load; every bit is checked.

    The files beside the weights (config, tokenizer) come from the nearest anchor that has any, or the checkpoint that it
    refers to. The directory appears as a whole, or not at all. Holds the weights once, and one weight file.

    Args:
        reader: The channel.
        version: Which; the newest one if None.
        directory: Where; must be missing or empty.
        shard_bytes: Largest weight file, unless a single tensor is larger.
        progress: Told how far it is.

    Raises:
        ConfigError: the directory holds something, or cannot be written.
        ChainError, FormatError: the version cannot be read.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already and not empty. It was left as it is; choose another directory.")
    directory = directory.absolute()
    replica = Replica(reader)
    progress("weights", 0, 1)
    replica.sync(version)
    progress("weights", 1, 1)
    assert replica.identity is not None
    files = companions(reader, replica.identity)
    temporary = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            _write(temporary / name, data)
        weights = anchors.weight_files(replica.state_dict(), replica.fingerprints, shard_bytes)
        for done, (name, data) in enumerate(weights, start=1):
            _write(temporary / name, data)
            progress("files written", done, done)
        os.replace(temporary, directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
    return replica.identity


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def companions(reader: ChannelReader, version: Version) -> dict[str, bytes]:
    """What lies beside the weights of an anchor, by name in its folder; empty if no anchor that can be read has anything.

    Announced anchors first, the nearest to the version before others; then those in the log, most of which begin an epoch.
    """
    spans = sorted(
        ((span, info) for span, info in reader.folds() if span.base == 0),
        key=lambda pair: (pair[0].version > version.version, abs(pair[0].version - version.version)),
    )
    first = {slot.epoch: info for slot, info in reversed(reader.slots().slots)}
    for info in (*(info for _, info in spans), *(info for _, info in sorted(first.items(), reverse=True))):
        with contextlib.suppress(FormatError, MissingVersionError, ConfigError):
            if found := _companions_of(reader, reader.document(info)):
                return found
    held = survey(reader)
    for record in [record for _, record in sorted(held.records.items(), reverse=True) if record is not None]:
        with contextlib.suppress(FormatError, MissingVersionError, ConfigError):
            if found := _companions_of(reader, record):
                return found
    return {}


def _companions_of(reader: ChannelReader, record: Record) -> dict[str, bytes]:
    if record.reference is not None:
        return anchors.companion_files(checkpoint.small_files(record.reference))
    if record.anchor is None:
        return {}
    start = f"{record.anchor.directory}/"
    beside = [file for file in record.anchor.companions if not file.key.endswith((*anchors.WEIGHTS, anchors.INDEX))]
    return {file.key.removeprefix(start): reader.fetch(file) for file in beside}
