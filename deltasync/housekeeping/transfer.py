"""Take a channel elsewhere: copy it to another store, or export one version as a checkpoint directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from deltasync import anchor, checkpoint, companions, layout, manifest
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    ObjectMissingError,
    RunMismatchError,
)
from deltasync.housekeeping.survey import Progress, in_parallel, quiet, read_folds, read_manifests
from deltasync.manifest import Fold, Head, Manifest
from deltasync.reader import ChannelReader
from deltasync.replica import Replica
from deltasync.stores.base import Store


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """What `copy` did.

    Attributes:
        version: Head's, in both channels now.
        objects, bytes: Stored in the target; head not counted.
        skipped: Objects that the target had already, with the same bytes.
    """

    version: int
    objects: int
    bytes: int
    skipped: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Object:
    """An object to copy: its key, and its sha256 where a document names it."""

    key: str
    sha256: str | None = None


def copy(source: ChannelReader, target: Store, *, progress: Progress = quiet) -> Copied:
    """Copy a channel as it is now: every version up to head, and the folds between them. Objects are only created.

    The order is that of a publisher: data, manifests ascending, the folds' documents, head. Whenever it is cut short, the
    target is the channel that it was before, or none yet, and running it again goes on. Publishing to the source may go on
    meanwhile; later versions are not copied. Do not prune the target meanwhile. Holds a few objects in memory at a time.

    Raises:
        RunMismatchError: the target holds another run.
        ChannelInUseError: the target's head is ahead of the source's.
        ObjectExistsError: the target has an object with other bytes. Nothing of it was replaced.
        CorruptDataError: bytes of the source are not what its documents name.
        MissingVersionError: the source lacks an object that it refers to, or a version that another one needs.
    """
    head, head_data = source.read_head()
    finished = _check_target(source, target, head)
    manifests = {v: found for v, found in read_manifests(source, progress).items() if v <= head.version}
    _check_complete(source.store, manifests, head)
    folds = {key: fold for key, fold in read_folds(source, progress).items() if _spans(fold, manifests)}
    there = {info.key for info in target.list("")}
    one = functools.partial(_copy_object, source.store, target, there)
    sizes = [one(_Object(layout.CHANNEL))]
    sizes += in_parallel(one, list(dict.fromkeys(_data(source.store, manifests, folds))), "data", progress)
    # One by one: whichever is the newest, those that it builds on are there.
    for done, item in enumerate(_manifest_objects(manifests, head), start=1):
        sizes.append(one(item))
        progress("manifests", done, len(manifests))
    sizes += in_parallel(one, [_Object(key) for key in folds], "folds", progress)
    if not finished:
        target.replace(layout.HEAD, head_data)
    stored = [size for size in sizes if size is not None]
    return Copied(version=head.version, objects=len(stored), bytes=sum(stored), skipped=len(sizes) - len(stored))


def _check_target(source: ChannelReader, target: Store, head: Head) -> bool:
    """Whether the target's head is at this version already; refuses a target that is something else."""
    if target.url == source.store.url:
        raise ConfigError(f"{target.url} is both source and target.")
    reader = ChannelReader(target, source.trusted)
    try:
        run_id = reader.channel().run_id
        if run_id != head.run_id:
            raise RunMismatchError(
                f"{target.url} holds run {run_id}, not run {head.run_id}. Nothing was copied; choose another target."
            )
        found = reader.head()
    except NotPublishedError:
        return False
    if found.version > head.version:
        raise ChannelInUseError(
            f"{target.url} is at version {found.version}, ahead of {source.store.url} at version {head.version}. "
            "Nothing was copied; is it the other way round?"
        )
    if found.version == head.version and found.manifest_sha256 != head.manifest_sha256:
        raise ChannelInUseError(
            f"{target.url} has another version {head.version} than {source.store.url}: somebody published to both. "
            "Nothing was copied; choose another target."
        )
    return found.version == head.version


def _check_complete(store: Store, manifests: dict[int, Manifest], head: Head) -> None:
    """Every version, head's among them, can be read with those that are there."""
    needed = {head.version}
    needed.update(found.delta.base_version for found in manifests.values() if found.anchor is None and found.delta)
    if missing := needed - manifests.keys():
        raise MissingVersionError(
            f"{store.url} has no manifest of version {min(missing)}, which others need. Nothing was copied. If versions are "
            "being forgotten just now, run it again; otherwise see `deltasync check`."
        )


def _spans(fold: Fold, manifests: dict[int, Manifest]) -> bool:
    return fold.base_version in manifests and fold.version in manifests


def _data(store: Store, manifests: dict[int, Manifest], folds: dict[str, Fold]) -> Iterator[_Object]:
    """Everything that these documents refer to; files beside an anchor's weights may have no sha256."""
    folders: set[str] = set()
    named: set[str] = set()
    for document in manifests.values():
        yield from (_Object(file.key, file.sha256) for file in document.files)
        named.update(file.key for file in document.files)
        if document.anchor is not None and document.reference is None:
            folders.add(document.anchor.directory)
    for fold in folds.values():
        yield from (_Object(file.key, file.sha256) for file in fold.files)
    for folder in sorted(folders):
        yield from (_Object(info.key) for info in store.list(f"{folder}/") if info.key not in named)


def _manifest_objects(manifests: dict[int, Manifest], head: Head) -> Iterator[_Object]:
    sha256 = {head.version: head.manifest_sha256}
    for document in manifests.values():
        if document.delta is not None:
            sha256[document.delta.base_version] = document.delta.base_manifest_sha256
    yield from (_Object(layout.manifest(version), sha256.get(version)) for version in manifests)


def _copy_object(source: Store, target: Store, there: Collection[str], item: _Object) -> int | None:
    """Create one object in the target, whose objects at the start were `there`; its bytes, or None if the target had it."""
    found = target.read(item.key) if item.key in there else None
    if found is not None and manifest.sha256_hex(found) == item.sha256:
        return None
    try:
        data = source.read(item.key)
    except ObjectMissingError:
        raise MissingVersionError(f"{item.key} is referred to, but is not in {source.url}. See `deltasync check`.") from None
    if item.sha256 is not None and manifest.sha256_hex(data) != item.sha256:
        raise CorruptDataError(
            f"{item.key} in {source.url} does not have the sha256 that is named for it. See `deltasync check`."
        )
    if found is None:
        try:
            target.create(item.key, data)
        except ObjectExistsError:
            found = target.read(item.key)
        else:
            return len(data)
    if found == data:
        return None
    raise ObjectExistsError(
        f"{target.url} has other bytes at {item.key}. They were left as they are; choose another target, or delete them."
    )


def export(
    reader: ChannelReader,
    version: int | None,
    directory: Path,
    *,
    shard_bytes: int = 1 << 30,
    progress: Progress = quiet,
) -> int:
    """Write one version as a checkpoint directory that transformers and vLLM load; every bit is checked.

    The files beside the weights (config, tokenizer) come from an anchor, or the checkpoint that it refers to: the newest up
    to the version that has any, else the first after it. The directory appears as a whole, or not at all. Holds the weights
    once, and one weight file.

    Args:
        reader: The channel.
        version: Which; the newest complete one if None.
        directory: Where; must be missing or empty.
        shard_bytes: Largest weight file, unless a single tensor is larger.
        progress: Told how far it is.

    Returns:
        The version.

    Raises:
        ConfigError: the directory holds something, or cannot be written.
        ChainError, FormatError: the version cannot be read.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already and not empty. It was left as it is; choose another directory.")
    directory = directory.absolute()
    replica = Replica(reader)
    progress("weights", 0, 1)
    version = replica.sync(version)
    progress("weights", 1, 1)
    files = _companions(reader, version)
    temporary = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir(parents=True)
        for name, data in files.items():
            _write(temporary / name, data)
        weights = anchor.weight_files(replica.state_dict(), replica.fingerprints, shard_bytes)
        for done, (name, data) in enumerate(weights, start=1):
            _write(temporary / name, data)
            progress("files written", done, done)
        os.replace(temporary, directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)
    return version


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _companions(reader: ChannelReader, version: int) -> dict[str, bytes]:
    """What lies beside the weights of an anchor, by name in its folder; empty if no anchor has anything."""
    nearest = reader.manifest(version).anchor_version  # nearly always has them, and is all that is read then
    for candidate in sorted(reader.versions(), key=lambda v: (v != nearest, v > version, abs(version - v))):
        document = reader.manifest(candidate)
        part, found = document.anchor, {}
        if document.reference is not None:
            with contextlib.suppress(ConfigError):
                found = anchor.companion_files(checkpoint.small_files(document.reference))
        elif part is not None:
            found = {name: companions.read(reader, part, name) for name in companions.names(reader, part)}
        if found:
            return found
    return {}
