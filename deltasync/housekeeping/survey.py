"""What a channel holds: two listings and the documents of records and folds, read a few at a time, without payloads."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deltasync.channel.documents import Record, Version
from deltasync.channel.keys import Slot, Span
from deltasync.channel.reading import ChannelReader
from deltasync.errors import DeltaSyncError, FormatError, MissingVersionError, TransientStoreError
from deltasync.housekeeping.retention import Holding
from deltasync.stores.base import ObjectInfo

THREADS = 8
"""Documents that are read at the same time."""

_TRIES = 3

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def quiet(what: str, done: int, total: int) -> None:
    """A `Progress` that tells nobody."""


def in_parallel(
    action: Callable[[_Item], _Result], items: Sequence[_Item], what: str, progress: Progress, threads: int = THREADS
) -> list[_Result]:
    """`action` of each item, in their order, by a few threads. The first error ends it; nothing is begun after that."""
    results = []
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deltasync-housekeeping")
    try:
        for result in pool.map(action, items):
            results.append(result)
            progress(what, len(results), len(items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a channel holds. Nothing of it is held to a digest: it tells what to keep, what to copy and what to show.

    Attributes:
        slots: What the store says of each record, ascending; those that were forgotten meanwhile are left out.
        records: Their documents, None where one is damaged.
        fold_infos, folds: The same of folds, by key.
        problems: What is wrong with damaged ones, by key.
    """

    slots: dict[Slot, ObjectInfo]
    records: dict[Slot, Record | None]
    fold_infos: dict[str, ObjectInfo]
    folds: dict[str, Record | None]
    problems: dict[str, DeltaSyncError]

    def digests(self) -> dict[Slot, str]:
        """Digests of records, as those that follow them and folds name them."""
        found = {}
        for record in (*self.folds.values(), *self.records.values()):
            if record is not None and record.base is not None:
                found[slot_of(record.base)] = record.base.sha256
            if record is not None and record.sha256 is not None:
                found[Slot(record.version, record.epoch)] = record.sha256
        return found


def line(held: Survey) -> list[Slot]:
    """The newest version and all that it follows, newest first; see `Holding.versions`."""
    return Holding(records=held.records, stored_s={}, announced={}).versions()


def identities(reader: ChannelReader, held: Survey, slots: Iterable[Slot]) -> dict[Slot, str]:
    """Digests of these records. What nothing names, above all the newest, is read as a whole."""
    found = held.digests()
    for slot in [slot for slot in slots if slot not in found]:
        with contextlib.suppress(FormatError):
            stored = reader.slot(slot)
            if stored is not None:
                found[slot] = stored.sha256
    return found


def slot_of(version: Version) -> Slot:
    """The slot of a version."""
    return Slot(version.version, version.epoch)


def survey(
    reader: ChannelReader,
    progress: Progress = quiet,
    *,
    wanted: Callable[[Iterable[Slot]], Iterable[Slot]] = list,
    wanted_fold: Callable[[Span], bool] = lambda _: True,
) -> Survey:
    """List records and folds, and read their documents.

    Args:
        reader: The channel.
        progress: Told how far it is.
        wanted: Picks the slots whose documents are needed out of all that there are, ascending.
        wanted_fold: Picks the folds.

    Raises:
        NotPublishedError: there is no channel.
        StoreError: the store failed.
    """
    reader.channel()
    listed = dict(reader.slots().slots)
    slots = {slot: listed[slot] for slot in wanted(listed)}
    folds = {info.key: info for span, info in reader.folds() if wanted_fold(span)}
    infos = [*slots.values(), *folds.values()]
    read = dict(zip(infos, in_parallel(lambda info: _document(reader, info), infos, "records", progress), strict=True))
    problems = {info.key: found for info, found in read.items() if isinstance(found, DeltaSyncError)}
    found = {info.key: None if isinstance(each, DeltaSyncError) else each for info, each in read.items()}
    gone = {key for key, problem in problems.items() if isinstance(problem, MissingVersionError)}
    return Survey(
        slots={slot: info for slot, info in slots.items() if info.key not in gone},
        records={slot: found[slot.key] for slot in slots if slot.key not in gone},
        fold_infos={key: info for key, info in folds.items() if key not in gone},
        folds={key: found[key] for key in folds if key not in gone},
        problems={key: problem for key, problem in problems.items() if key not in gone},
    )


def _document(reader: ChannelReader, info: ObjectInfo) -> Record | DeltaSyncError:
    """A document, or what is wrong with it."""
    try:
        return persistently(lambda: reader.document(info))
    except (MissingVersionError, FormatError) as error:
        return error


def persistently(read: Callable[[], _Result]) -> _Result:
    """Asked for again after errors that may pass: of many objects one would often fail, and all would be read in vain."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(TransientStoreError, FormatError):
            return read()
    return read()
