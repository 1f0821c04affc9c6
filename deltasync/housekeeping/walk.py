"""What a channel holds: two listings, and the records and folds in them, read a few at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot, Span
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.channel.threads import ahead
from deltasync.errors import DeltaSyncError, FormatError, MissingVersionError, ObjectMissingError, TransientStoreError
from deltasync.stores.base import ObjectInfo
from deltasync.stores.retries import retried

THREADS, WHOLE = 8, 4
"""Documents, and whole objects, that are read at the same time."""

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
    with contextlib.closing(ahead(action, items, threads)) as found:
        for result in found:
            results.append(result)
            progress(what, len(results), len(items))
    return results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a channel holds, by documents: it tells what to keep, what to copy and what to show.

    Attributes:
        slots: What the store says of each record, ascending; those that were forgotten meanwhile are left out.
        records: Their documents, None where one is damaged.
        fold_infos, folds: The same of folds, by key; documents of the wanted ones only.
        problems: What is wrong with damaged ones, by key.
        stored: Those that were read as a whole, by key, without their bytes.
    """

    slots: dict[Slot, ObjectInfo]
    records: dict[Slot, Record | None]
    fold_infos: dict[str, ObjectInfo]
    folds: dict[str, Record | None]
    problems: dict[str, DeltaSyncError]
    stored: dict[str, Stored]

    def whole(self) -> list[Record]:
        """All documents that can be read."""
        return [record for record in (*self.folds.values(), *self.records.values()) if record is not None]


def digests(records: Collection[Record]) -> dict[Slot, str]:
    """Digests of records, as those that follow them name them, and only where these are silent folds."""
    ends = {record.slot: record.sha256 for record in records if record.sha256 is not None}
    return ends | {record.base.slot: record.base.sha256 for record in records if record.base is not None}


def identities(reader: ChannelReader, held: Survey, slots: Iterable[Slot]) -> dict[Slot, str]:
    """Digests of these records. What nothing names, above all the newest, is read as a whole."""
    found = digests(held.whole())
    for slot in [slot for slot in slots if slot not in found]:
        with contextlib.suppress(FormatError):
            stored = reader.slot(slot)
            if stored is not None:
                found[slot] = stored.sha256
    return found


def survey(
    reader: ChannelReader,
    progress: Progress = quiet,
    *,
    wanted: Callable[[Iterable[Slot]], Iterable[Slot]] = list,
    wanted_fold: Callable[[Span], bool] = lambda _: True,
    whole: bool = False,
) -> Survey:
    """List records and folds, and read their documents.

    `wanted`, given all slots, ascending, and `wanted_fold` pick those whose documents are needed. With `whole` all of each
    object is read; otherwise only the document at its end, which is held to no digest.

    Raises:
        NotPublishedError: there is no channel.
    """

    def read(info: ObjectInfo) -> Stored | Record:
        return dataclasses.replace(reader.stored(info.key), data=None) if whole else reader.document(info)

    reader.channel()
    listed = dict(reader.slots())
    slots = {slot: listed[slot] for slot in wanted(listed)}
    spans = {info.key: (span, info) for span, info in reader.folds()}
    folds = {key: info for key, (span, info) in spans.items() if wanted_fold(span)}
    infos = [*slots.values(), *folds.values()]
    threads = WHOLE if whole else THREADS
    results = in_parallel(lambda info: attempt(lambda: read(info)), infos, "records", progress, threads)
    read_of = dict(zip([info.key for info in infos], results, strict=True))
    gone = {key for key, found in read_of.items() if isinstance(found, MissingVersionError)}
    stored = {key: found for key, found in read_of.items() if isinstance(found, Stored)}
    documents = {key: found for key, found in read_of.items() if isinstance(found, Record)}
    documents |= {key: found.record for key, found in stored.items()}
    return Survey(
        slots={slot: info for slot, info in slots.items() if info.key not in gone},
        records={slot: documents.get(slot.key) for slot in slots if slot.key not in gone},
        fold_infos={key: info for key, (_, info) in spans.items() if key not in gone},
        folds={key: documents.get(key) for key in folds if key not in gone},
        problems={key: found for key, found in read_of.items() if isinstance(found, FormatError)},
        stored=stored,
    )


def attempt(read: Callable[[], _Result]) -> _Result | FormatError | MissingVersionError | ObjectMissingError:
    """What `read` returns, or what is wrong with the object.

    Asked for again after errors that may pass: of many objects one would often fail, and all would be read in vain.
    """
    try:
        return retried(read, _TRIES - 1, passing=(TransientStoreError, FormatError), level=logging.DEBUG)
    except (FormatError, MissingVersionError, ObjectMissingError) as error:
        return error
