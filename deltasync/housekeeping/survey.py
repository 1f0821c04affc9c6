"""Reading all of a channel's documents, a few at a time."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deltasync import layout
from deltasync.errors import (
    CorruptDataError,
    FormatError,
    MissingVersionError,
    ObjectMissingError,
    RunMismatchError,
    TransientStoreError,
)
from deltasync.manifest import DOCUMENT_BYTES, Fold, Head, Manifest
from deltasync.reader import ChannelReader

THREADS = 4
"""Requests at the same time; also how many objects `copy` holds in memory."""

_TRIES = 3

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def quiet(what: str, done: int, total: int) -> None:
    """A `Progress` that tells nobody."""


def in_parallel(action: Callable[[_Item], _Result], items: Sequence[_Item], what: str, progress: Progress) -> list[_Result]:
    """`action` of each item, in their order, by a few threads. The first error ends it; nothing is begun after that."""
    results = []
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="deltasync-housekeeping")
    try:
        for result in pool.map(action, items):
            results.append(result)
            progress(what, len(results), len(items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


def read_manifests(
    reader: ChannelReader,
    progress: Progress = quiet,
    versions: Sequence[int] | None = None,
    head: Head | None = None,
) -> dict[int, Manifest]:
    """Manifests by version, ascending. One that is forgotten meanwhile is left out.

    Those that another one builds on are held to the digest that this one names.

    Args:
        reader: The channel.
        progress: Told how far it is.
        versions: Which; all that the channel holds if None.
        head: Whose manifest is held to the digest that head names.

    Raises:
        FormatError: one is damaged.
    """
    wanted = reader.versions() if versions is None else sorted(versions)
    if head is not None:
        _or_none(functools.partial(reader.read_manifest, sha256=head.manifest_sha256), head.version)
    read = in_parallel(lambda version: _or_none(reader.read_manifest, version), wanted, "manifests", progress)
    found = {each[0].version: each for each in read if each is not None}
    for version in sorted(found, reverse=True):
        delta = found[version][0].delta if version in found else None
        if delta is None or delta.base_version not in found:
            continue
        named = delta.base_manifest_sha256
        if found[delta.base_version][1] != named:  # damaged on the way, where the store does not notice
            again = _or_none(functools.partial(reader.read_manifest, sha256=named), delta.base_version)
            if again is None:
                del found[delta.base_version]
            else:
                found[delta.base_version] = again
    return {version: document for version, (document, _) in found.items()}


def read_folds(
    reader: ChannelReader, progress: Progress = quiet, versions: Collection[int] | None = None
) -> dict[str, Fold]:
    """Documents of folds, by their keys. One that is forgotten meanwhile is left out.

    Args:
        reader: The channel.
        progress: Told how far it is.
        versions: Only folds that lead to one of these; all that the channel holds if None.

    Raises:
        FormatError: one is damaged.
    """
    keys = fold_keys(reader)
    if versions is not None:
        keys = [key for key in keys if (span := layout.fold_span(key)) is not None and span[1] in versions]
    read = functools.partial(read_fold, reader)
    found = in_parallel(lambda key: _or_none(read, key), keys, "folds", progress)
    return {key: document for key, document in zip(keys, found, strict=True) if document is not None}


def fold_keys(reader: ChannelReader, prefix: str = layout.FOLDS) -> list[str]:
    """Keys of the documents of folds that start so. Costs a listing."""
    return [info.key for info in reader.store.list(prefix) if layout.fold_span(info.key) is not None]


def read_fold(reader: ChannelReader, key: str) -> Fold:
    """The document of a fold.

    Raises:
        MissingVersionError: it is gone.
        FormatError, RunMismatchError: it is damaged, or not what its key says.
    """
    try:
        document = reader.decode(reader.store.read(key, DOCUMENT_BYTES), Fold, key)
    except ObjectMissingError:
        raise MissingVersionError(f"{reader.store.url} has no fold {key} any more.") from None
    if (document.base_version, document.version) != layout.fold_span(key):
        raise CorruptDataError(f"{key} describes a fold of versions {document.base_version} to {document.version}.")
    if document.run_id != (run_id := reader.channel().run_id):
        raise RunMismatchError(f"{key} belongs to run {document.run_id}, the channel to run {run_id}.")
    return document


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _or_none(read: Callable[[_Item], _Result], item: _Item) -> _Result | None:
    """Asked for again after errors that may pass: of many documents one would often fail, and all would be read in vain."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(TransientStoreError, FormatError):
            return _once(read, item)
    return _once(read, item)


def _once(read: Callable[[_Item], _Result], item: _Item) -> _Result | None:
    try:
        return read(item)
    except MissingVersionError:
        return None
