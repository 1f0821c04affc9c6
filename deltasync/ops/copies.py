"""Copy a channel to another store, or export one version as a checkpoint directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deltasync import limits
from deltasync.channel import anchors, keys
from deltasync.channel.documents import File, Record, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    ObjectMissingError,
    RunMismatchError,
)
from deltasync.following import Replica
from deltasync.opening import checkpoint
from deltasync.ops.scan import (
    WHOLE,
    Scan,
    check_listing,
    digests,
    exists,
    in_parallel,
    progressed,
    result_or_error,
    scan_channel,
)
from deltasync.stores.base import ObjectInfo, Store

Outcome = int | DeltaSyncError | None
"""The result of copying one object: the bytes stored, the source object's problem, or None if the target had
it.
"""


@dataclasses.dataclass(kw_only=True, slots=True)
class Copied:
    """The result of copying: the newest version that every target has, the objects that were stored, without
    head, their bytes over all targets, and the number of those that were there. `problems` are those of
    objects that are damaged or missing in the source.
    """

    version: VersionId | None = None
    objects: int = 0
    bytes: int = 0
    skipped: int = 0
    problems: list[DeltaSyncError] = dataclasses.field(default_factory=list)

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of some objects."""
        for outcome in outcomes:
            if outcome is None:
                self.skipped += 1
            elif isinstance(outcome, int):
                self.objects, self.bytes = self.objects + 1, self.bytes + outcome
            elif str(outcome) not in map(str, self.problems):
                self.problems.append(outcome)


def copy(source: ChannelReader, *targets: Store) -> Copied:
    """Copy the current objects of a channel to each target. Damaged objects are left out and reported.

    Raises: as `Copier.copy_all`.
    """
    copier = Copier(source, targets)
    copier.copy_all()
    return copier.copied


class Copier:
    """Copies objects of a channel to other stores. An object that is there is not replaced, but for head.

    Attributes:
        copied: Counts of this copy until now.

    Raises:
        ConfigError: two of the stores are one.
    """

    def __init__(self, source: ChannelReader, targets: Sequence[Store]) -> None:
        urls = [source.store.url, *(target.url for target in targets)]
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise ConfigError(
                f"{twice[0]} is both source and target, or is named twice: SOURCE and every TARGET must be "
                "different URLs."
            )
        self.copied = Copied()
        self._source = source
        self._targets = [(target, dict[str, int]()) for target in targets]  # with the sizes that it lists

    def copy_all(self) -> None:
        """Copy the current objects.

        The order is files, shortcuts, records by number, epochs, channel.json, head; shortcuts precede
        records because a record may need an announced anchor. So a target is readable after an interruption
        at any point, and another call resumes. Publishing to the source may continue; no garbage may be
        collected in a target. A few objects are in memory at a time.

        Raises:
            RunMismatchError: a target holds another run.
            ChannelInUseError: a target has versions that the source lacks.
            ObjectExistsError: a target has other bytes in an object's place. They were not replaced.
        """
        source, copied = self._source, self.copied
        source.channel()
        head = None if source.head() is None else source.store.read(keys.HEAD, limits.SMALL_BYTES)
        held = scan_channel(source)
        for target, there in self._targets:
            there.clear()
            there.update({info.key: info.bytes for info in target.list("")})
            _check_target(source, target, held, there)
        named = digests(held.whole())
        files = {file.key: file for found in held.whole() for file in found.files}
        shortcuts = [_file(held.infos[key]) for key, found in held.shortcuts.items() if found]
        records = [
            _file(held.infos[slot.key], named.get(slot, "")) for slot, found in held.records.items() if found
        ]
        parts_first = sorted(files.values(), key=lambda file: (file.key.startswith(keys.ANCHORS), file.key))
        copied.note(held.problems.values())
        copied.note(self.copy(parts_first, "files"))
        copied.note(self.copy(shortcuts, "compactions"))
        # in order, so that the base of the newest is always there
        copied.note(self.copy(records, "records", 1))
        small = [_file(info) for info in source.store.list(keys.EPOCHS) if keys.epoch_of(info.key)]
        openings = {keys.epoch_document(slot.epoch) for slot in held.records}
        check_listing(source, sorted(openings.difference(file.key for file in small)))
        copied.note(self.copy(small))
        problems = self.copy([File(key=keys.CHANNEL, bytes=0, sha256="")])
        copied.note(problems)
        if head is not None and not problems:
            self.put_head(head)
        for _, there in self._targets:
            there.clear()
        slots = (slot for slot, found in held.records.items() if found is not None and found.is_version)
        last = max(slots, key=lambda slot: slot.newness, default=None)
        newest = None
        if last is not None:  # it is read from a target, to cross a slow line once
            newest = ChannelReader(self._targets[0][0], source.trusted).slot(last) or source.slot(last)
        copied.version = None if newest is None else newest.version

    def copy(
        self, items: Sequence[File], what: str | None = None, threads: int = WHOLE
    ) -> list[DeltaSyncError]:
        """Copy objects, whose `sha256` is empty if no document names it, and whose bytes are 0 if they are
        not known. Return the problems of those that are damaged or missing in the source.
        """
        outcomes = in_parallel(self._copy_one, items, what, threads)
        self.copied.note(found for found in outcomes if not isinstance(found, DeltaSyncError))
        return [found for found in outcomes if isinstance(found, DeltaSyncError)]

    def put(self, key: str, data: bytes) -> None:
        """Store an object of the source in every target."""
        self.copied.note([_put(key, data, [target for target, _ in self._targets])])

    def put_head(self, data: bytes) -> None:
        """Let head of every target be this."""
        for target, _ in self._targets:
            target.put(keys.HEAD, data)

    def _copy_one(self, item: File) -> Outcome:
        lacking = []
        for target, there in self._targets:
            if item.key not in there:
                lacking.append(target)
            elif item.bytes and there[item.key] != item.bytes:
                raise _other_bytes(target, item.key)
        data = result_or_error(functools.partial(read_object, self._source), item) if lacking else b""
        return data if isinstance(data, DeltaSyncError) else _put(item.key, data, lacking)


def _put(key: str, data: bytes, targets: Sequence[Store]) -> int | None:
    """Store an object in targets. Return the bytes that were stored; None if all had it."""
    lacked = sum([_create(target, key, data) for target in targets])
    return lacked * len(data) if lacked else None


def _create(target: Store, key: str, data: bytes) -> bool:
    """Store an immutable object. Return False if it was there; raise ObjectExistsError if it was there with
    other bytes.
    """
    if target.can_create:
        with contextlib.suppress(ObjectExistsError):
            target.create(key, data)
            return True
    try:
        same = target.read(key, len(data)) == data
    except ObjectMissingError:
        target.put(key, data)
        return True
    except FormatError:  # it is larger
        same = False
    if not same:
        raise _other_bytes(target, key)
    return False


def _other_bytes(target: Store, key: str) -> ObjectExistsError:
    return ObjectExistsError(
        f"{target.url} has other bytes at {key}, which were not replaced. Choose another target, or delete "
        "them."
    )


def _file(info: ObjectInfo, sha256: str = "") -> File:
    return File(key=info.key, bytes=info.bytes, sha256=sha256)


def _check_target(source: ChannelReader, target: Store, held: Scan, there: Mapping[str, int]) -> None:
    """Raise unless the target is empty or holds an earlier copy."""
    run_id = source.channel().run_id
    earlier, newest = ChannelReader(target, source.trusted), None
    with contextlib.suppress(NotPublishedError):  # read without the listing, which may be wrong
        found = earlier.channel().run_id
        if found != run_id:
            raise RunMismatchError(
                f"{target.url} holds run {found}, not run {run_id}. Nothing was copied; choose another "
                "target."
            )
        head = earlier.head()
        newest = None if head is None else head.newest.slot
    slots = [slot for key in there if (slot := keys.slot_of(key)) is not None]
    slots += [] if newest is None or newest in slots or not exists(target, newest.key) else [newest]
    named = [record.next_epoch for record in held.whole() if record.next_epoch is not None]
    known = {source.channel().epoch, *source.epochs(), *named, *(slot.epoch for slot in held.records)}
    last = max((slot.newness for slot in held.records), default=("", 0))
    if strange := [slot for slot in slots if slot.epoch not in known]:
        raise ChannelInUseError(
            f"{target.url} has {strange[0].key}, whose epoch {source.store.url} lacks: another publisher "
            "wrote it. "
            "Nothing was copied; choose another target. Are SOURCE and TARGET swapped?"
        )
    if ahead := [slot for slot in slots if slot.newness > last]:
        raise ChannelInUseError(
            f"{target.url} has version {ahead[-1].version}, ahead of {source.store.url} at version "
            f"{last[1]}. "
            "Nothing was copied. Are SOURCE and TARGET swapped?"
        )


def read_object(source: ChannelReader, item: File) -> bytes:
    """Read an object of the source, and check its digest or signature if it has one; without either it is
    read twice.
    """
    if keys.slot_of(item.key) or keys.shortcut_of(item.key):
        data = source.stored(item.key, item.sha256 or None).data
        assert data is not None
        return data
    if keys.file_of(item.key):
        return source.fetch(item)
    if item.key == keys.CHANNEL:
        source.read_channel_again()
        return source.channel_data
    data = source.store.read(item.key, limits.SMALL_BYTES)
    if source.store.read(item.key, limits.SMALL_BYTES) != data:
        raise CorruptDataError(f"{item.key} was read twice, with different bytes.")
    return data


def export(
    reader: ChannelReader, version: int | None, directory: Path, *, shard_bytes: int = limits.SHARD_BYTES
) -> VersionId:
    """Write one version, the newest if None, as a checkpoint directory that transformers and vLLM load. Check
    every bit.

    Config and tokenizer come from the nearest anchor that has them, or from the checkpoint that it refers to.
    The directory, which must be missing or empty, appears as a whole or not at all. Needs memory for the
    weights and for one weight file of at most `shard_bytes`, unless a single tensor is larger.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"{directory} exists and is not empty. Nothing was written; choose another directory."
        )
    directory = directory.absolute()
    replica, identity = replica_at(reader, version)
    files = model_files(reader, identity)
    temporary = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.tmp"
    try:
        weights = anchors.weight_files(replica.state_dict(), replica.fingerprints, shard_bytes)
        for done, (name, data) in enumerate(itertools.chain(files.items(), weights), start=1):
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            progressed("files written", done, done)
        os.replace(temporary, directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return identity


def replica_at(reader: ChannelReader, version: int | None) -> tuple[Replica, VersionId]:
    """Return a replica in host memory at a version, the newest if None."""
    replica = Replica(reader)
    progressed("weights", 0, 1)
    replica.sync(version)
    progressed("weights", 1, 1)
    assert replica.identity is not None
    return replica, replica.identity


def model_files(reader: ChannelReader, version: VersionId) -> dict[str, bytes]:
    """Return the config and tokenizer files of the nearest anchor that has any, by name; empty if none has.

    Announced anchors are tried first, then those in records, nearest first. Most anchors in records begin an
    epoch.
    """

    def first_of_epochs(slots: Iterable[Slot]) -> list[Slot]:
        return list({slot.epoch: slot for slot in sorted(slots, reverse=True)}.values())

    def distance(record: Record) -> tuple[bool, bool, int]:
        return (
            record.kind != "announcement",
            record.version > version.version,
            abs(record.version - version.version),
        )

    for wanted in (first_of_epochs, list):
        held = scan_channel(reader, wanted=wanted, shortcuts_wanted=lambda span: span.base == 0)
        for record in sorted(held.whole(), key=distance):
            with contextlib.suppress(FormatError, MissingVersionError, ConfigError):
                if found := _model_files_of(reader, record):
                    return found
    return {}


def _model_files_of(reader: ChannelReader, record: Record) -> dict[str, bytes]:
    if record.reference is not None:
        reference = record.reference
        may = reader.may_use_token(reference.repo)
        return anchors.read_model_files(
            checkpoint.small_files(reference, limits.COMPANION_BYTES, with_token=may)
        )
    if record.anchor is None:
        return {}
    start = f"{record.anchor.directory}/"
    extra = [
        file for file in record.anchor.model_files if not file.key.endswith((*anchors.WEIGHTS, anchors.INDEX))
    ]
    return {file.key.removeprefix(start): reader.fetch(file) for file in extra}
