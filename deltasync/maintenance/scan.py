"""Survey a channel: list its records, compactions and announcements, and read their documents with a few threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.threads import ahead
from deltasync.errors import DeltaSyncError, FormatError, MissingVersionError, ObjectMissingError, TransientStoreError
from deltasync.stores.base import ObjectInfo, Store
from deltasync.stores.retries import retried

THREADS, WHOLE = 8, 4
"""How many documents, and how many whole objects, are read at the same time."""

_LISTED_DELAY_S = 2.0  # before a listing that is not complete is asked for again

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

_thread = threading.local()  # `stop`: ends the waits of `attempt` in a thread of `in_parallel`

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def quiet(what: str, done: int, total: int) -> None:
    """A `Progress` that does nothing."""


def in_parallel(
    action: Callable[[_Item], _Result], items: Sequence[_Item], what: str, progress: Progress, threads: int = THREADS
) -> list[_Result]:
    """Return `action` of each item, in order, by a few threads. The first error ends it; no further item is started."""
    results, stop = list[_Result](), threading.Event()

    def run(item: _Item) -> _Result:
        _thread.stop = stop
        return action(item)

    try:
        with contextlib.closing(ahead(run, items, threads)) as found:
            for result in found:
                results.append(result)
                progress(what, len(results), len(items))
    finally:
        stop.set()
    return results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Records, compactions and announcements of a channel. Those that were forgotten during the survey are left out.

    Attributes:
        slots: What the listing says of each record, ascending.
        records: Document of each record, None where it is damaged.
        shortcut_infos: What the listing says of each compaction and announcement, by key.
        shortcuts: Document of each of them that was read, None where it is damaged, by key.
        problems: What is wrong with each damaged object, by key.
        stored: Objects that were read as a whole, by key, without their bytes.
    """

    slots: dict[Slot, ObjectInfo]
    records: dict[Slot, Record | None]
    shortcut_infos: dict[str, ObjectInfo]
    shortcuts: dict[str, Record | None]
    problems: dict[str, DeltaSyncError]
    stored: dict[str, StoredRecord]

    def whole(self) -> list[Record]:
        """All documents that can be read."""
        return [record for record in (*self.shortcuts.values(), *self.records.values()) if record is not None]


def digests(records: Collection[Record]) -> dict[Slot, str]:
    """Digests of records, as those that build on them name them; where none does, as a shortcut names them."""
    ends = {record.slot: record.sha256 for record in records if record.sha256 is not None}
    return ends | {record.base.slot: record.base.sha256 for record in records if record.base is not None}


def identities(reader: ChannelReader, held: Survey, slots: Iterable[Slot]) -> dict[Slot, str]:
    """Digests of these records. A record that no other one names, such as the newest, is read as a whole."""
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
    anchors_only: bool = False,
    whole: bool = False,
) -> Survey:
    """List records, compactions and announcements, and read their documents.

    `wanted` picks from all slots, ascending, those whose documents to read. With `anchors_only` compactions are only
    listed. With `whole` each object is read as a whole; otherwise only the document at its end, without checking its
    digest.

    Raises:
        NotPublishedError: there is no channel.
        TransientStoreError: the listing leaves out records that are there (`check_listing`).
    """

    def read(info: ObjectInfo) -> StoredRecord | Record:
        return dataclasses.replace(reader.stored(info.key), data=None) if whole else reader.document(info)

    reader.channel()
    listed = retried(lambda: _listed(reader), 2, _LISTED_DELAY_S)
    slots = {slot: listed[slot] for slot in wanted(listed)}
    listed_shortcuts = reader.shortcuts()
    shortcuts = [info for span, info in listed_shortcuts if not anchors_only or span.base == 0]
    infos = [*slots.values(), *shortcuts]
    results = in_parallel(lambda info: attempt(read, info), infos, "records", progress, WHOLE if whole else THREADS)
    read_of = {info.key: found for info, found in zip(infos, results, strict=True)}
    gone = {key for key, found in read_of.items() if isinstance(found, MissingVersionError)}
    stored = {key: found for key, found in read_of.items() if isinstance(found, StoredRecord)}
    documents = {key: found for key, found in read_of.items() if isinstance(found, Record)}
    documents |= {key: found.record for key, found in stored.items()}
    if wanted is list:
        last = max((slot.newness for slot in listed), default=("", 0))
        named = digests([*documents.values()])
        check_listing(reader, [slot.key for slot in named if slot not in listed and slot.newness < last])
    return Survey(
        slots={slot: info for slot, info in slots.items() if info.key not in gone},
        records={slot: documents.get(slot.key) for slot in slots if slot.key not in gone},
        shortcut_infos={info.key: info for _, info in listed_shortcuts if info.key not in gone},
        shortcuts={info.key: documents.get(info.key) for info in shortcuts if info.key not in gone},
        problems={key: found for key, found in read_of.items() if isinstance(found, FormatError)},
        stored=stored,
    )


def _listed(reader: ChannelReader) -> dict[Slot, ObjectInfo]:
    """List all records. The newest one that could be read before, by its key alone, must be among them."""
    head = reader.head()
    known = Slot(1, reader.channel().epoch) if head is None else head.newest.slot
    before = known if exists(reader.store, known.key) else None
    while before is not None and exists(reader.store, _after(before).key):
        before = _after(before)
    listed = dict(reader.slots())
    check_listing(reader, [before.key] if before is not None and before not in listed else [])
    return listed


def _after(slot: Slot) -> Slot:
    return Slot(slot.version + 1, slot.epoch)


def exists(store: Store, key: str) -> bool:
    """Whether an object is there that is not empty, without a listing."""
    try:
        store.read_range(key, 0, 1)
    except ObjectMissingError:
        return False
    return True


def check_listing(reader: ChannelReader, unlisted: Sequence[str]) -> None:
    """Check that objects which a listing leaves out are not there: a listing may lie, lag or be cut.

    Raises:
        TransientStoreError: one is there.
    """
    for key, found in zip(
        unlisted, in_parallel(functools.partial(exists, reader.store), unlisted, "unlisted objects", quiet), strict=True
    ):
        if found:
            raise TransientStoreError(
                f"A listing of {reader.store.url} leaves out {key}, which is there: it is not complete. Nothing was "
                "changed; try again."
            )


def attempt(
    read: Callable[[_Item], _Result], item: _Item
) -> _Result | FormatError | MissingVersionError | ObjectMissingError:
    """Return what `read` returns for an item, or the error that says what is wrong with the object.

    Errors that may pass are retried: of many objects one would often fail, and all would have been read in vain.
    """
    try:
        passing, stop = (TransientStoreError, FormatError), getattr(_thread, "stop", None)
        return retried(lambda: read(item), 2, passing=passing, level=logging.DEBUG, stop=stop)
    except (FormatError, MissingVersionError, ObjectMissingError) as error:
        return error
