"""Take a channel elsewhere: copy it to another store, or export one version as a checkpoint directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from deltasync.channel import anchors, checkpoint, documents, keys
from deltasync.channel.documents import File, Record, Version
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    ObjectExistsError,
    RunMismatchError,
)
from deltasync.housekeeping.walk import WHOLE, Progress, Survey, attempt, digests, in_parallel, quiet, survey
from deltasync.replicas import Replica
from deltasync.stores.base import ObjectInfo, Store

Outcome = int | DeltaSyncError | None
"""Of copying an object: its bytes, what is wrong with it in the source, or None where the target had it."""


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

    @classmethod
    def of(cls, version: Version | None, done: Sequence[Outcome], problems: Iterable[DeltaSyncError] = ()) -> Self:
        """From what became of each object; `problems` are of others."""
        stored = [each for each in done if isinstance(each, int)]
        wrong = [*problems, *(each for each in done if isinstance(each, DeltaSyncError))]
        return cls(version=version, objects=len(stored), bytes=sum(stored), skipped=done.count(None), problems=wrong)


def copy(source: ChannelReader, target: Store, *, progress: Progress = quiet) -> Copied:
    """Copy a channel as it is now, object by object; damaged objects are left out and told.

    The order is files, folds, records by number, epochs, channel.json, head: a record may need an anchor that only a fold
    announces. So whenever it is cut short, the target can be read, and running it again goes on. Meanwhile the source may be
    published to. Do not prune the target meanwhile. Holds a few objects in memory at a time.

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
    named = digests(held.whole())
    files = {file.key: file for found in held.whole() for file in found.files}
    folds = [_file(held.fold_infos[key]) for key, found in held.folds.items() if found]
    records = [_file(held.slots[slot], named.get(slot, "")) for slot, found in held.records.items() if found]
    parts_first = sorted(files.values(), key=lambda file: (file.key.startswith(keys.ANCHORS), file.key))
    done = in_parallel(one, parts_first, "files", progress, WHOLE)
    done += in_parallel(one, folds, "folds", progress, WHOLE)
    for count, item in enumerate(records, start=1):  # one by one: whichever is the newest, what it builds on is there
        done.append(one(item))
        progress("records", count, len(records))
    small = [_file(info) for info in source.store.list(keys.EPOCHS)]
    done += [one(item) for item in (*small, File(key=keys.CHANNEL, bytes=there.get(keys.CHANNEL, 0), sha256=""))]
    if head is not None:
        target.put(keys.HEAD, head)
    slots = [slot for slot, found in held.records.items() if found is not None and found.is_version]
    newest = source.slot(max(slots, key=lambda slot: slot.newness)) if slots else None
    return Copied.of(None if newest is None else newest.version, done, held.problems.values())


def _file(info: ObjectInfo, sha256: str = "") -> File:
    return File(key=info.key, bytes=info.bytes, sha256=sha256)


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
    named = [record.next_epoch for record in held.whole() if record.next_epoch is not None]
    known = {source.channel().epoch, *source.epochs(), *named, *(slot.epoch for slot in held.slots)}
    last = max((slot.newness for slot in held.slots), default=("", 0))
    if strange := [slot for slot in slots if slot.epoch not in known]:
        raise ChannelInUseError(
            f"{target.url} has {strange[0].key}, of an epoch that {source.store.url} does not know: somebody published "
            "there. Nothing was copied; choose another target. Are SOURCE and TARGET swapped?"
        )
    if ahead := [slot for slot in slots if slot.newness > last]:
        raise ChannelInUseError(
            f"{target.url} has version {ahead[-1].version}, ahead of {source.store.url} at version {last[1]}. "
            "Nothing was copied. Are SOURCE and TARGET swapped?"
        )


def _copy_object(source: ChannelReader, target: Store, there: Mapping[str, int], item: File) -> Outcome:
    """Store one object, whose `sha256` is empty where nothing names it, in the target, which held `there`: key -> bytes."""
    if there.get(item.key) == item.bytes:
        return None
    if item.key in there:
        raise ObjectExistsError(
            f"{target.url} has other bytes at {item.key}. They were left as they are; choose another target, or delete them."
        )
    data = attempt(lambda: read_object(source, item))
    if isinstance(data, DeltaSyncError):
        return data
    target.put(item.key, data)
    return len(data)


def read_object(source: ChannelReader, item: File) -> bytes:
    """An object of the source, checked as far as anything tells what it must be."""
    if keys.slot_of(item.key) or keys.fold_of(item.key):
        data = source.stored(item.key, item.sha256 or None).data
        assert data is not None
        return data
    if keys.file_of(item.key):
        return source.fetch(item)
    return source.store.read(item.key, documents.CHANNEL_BYTES if item.key == keys.CHANNEL else documents.SMALL_BYTES)


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
    refers to. The directory appears as a whole, or not at all. Holds the weights once, and one weight file of at most
    `shard_bytes`, unless a single tensor is larger. Without a `version` it is the newest one.

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
        for name, small in files.items():
            _write(temporary / name, small)
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


def _write(path: Path, data: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def companions(reader: ChannelReader, version: Version) -> dict[str, bytes]:
    """What lies beside the weights of an anchor, by name in its folder; empty if no anchor that can be read has anything.

    Announced anchors come first, then those in the log, most of which begin an epoch; of these the nearest to the version.
    """

    def first_of_epochs(slots: Iterable[Slot]) -> list[Slot]:
        return list({slot.epoch: slot for slot in sorted(slots, reverse=True)}.values())

    def distance(record: Record) -> tuple[bool, bool, int]:
        return record.kind != "fold", record.version > version.version, abs(record.version - version.version)

    for wanted in (first_of_epochs, list):
        held = survey(reader, wanted=wanted, wanted_fold=lambda span: span.base == 0)
        for record in sorted(held.whole(), key=distance):
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
