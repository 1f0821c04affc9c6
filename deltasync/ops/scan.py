"""Scan a channel: list its records, compactions and announcements, and read their documents with several
threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    ObjectMissingError,
    TransientStoreError,
)
from deltasync.stores.base import ObjectInfo, Store, WrappedStore
from deltasync.stores.retries import retried
from deltasync.threads import ahead

if TYPE_CHECKING:
    from deltasync.stores.local import LocalStore

THREADS, WHOLE = 8, 4  # concurrent reads of documents, and of whole objects

_LISTED_DELAY_S = 2.0  # wait before an incomplete listing is requested again
Progress = Callable[[str, int, int], None]  # called with the name of the work, the amount done and the total
_progress: ContextVar[Progress] = ContextVar("deltasync_progress", default=lambda what, done, total: None)

_State = tuple[str, int, float, str | None]
Known = dict[_State, Record]
"""Documents of records and shortcuts by the state of their objects in a listing."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@contextlib.contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Call `progress` as work in this context and thread advances."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def progressed(what: str, done: int, total: int) -> None:
    """Report that work has advanced."""
    _progress.get()(what, done, total)


def in_parallel(
    action: Callable[[_Item], _Result], items: Sequence[_Item], what: str | None, threads: int = THREADS
) -> list[_Result]:
    """Apply `action` to each item with several threads, and return the results in order. The first error ends
    the loop.

    `what` names the work in reports of progress; None for no reports.
    """
    results = list[_Result]()
    with contextlib.closing(ahead(action, items, threads)) as found:
        for result in found:
            results.append(result)
            if what is not None:
                progressed(what, len(results), len(items))
    return results


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Records, compactions and announcements of a channel, without those that were forgotten during the
    scan.
    """

    infos: dict[str, ObjectInfo]  # the listing's entry of each record, compaction and announcement, by key
    records: dict[Slot, Record | None]  # ascending; None for damaged ones
    shortcuts: dict[str, Record | None]  # of those that were read, by key; None for damaged ones
    problems: dict[str, DeltaSyncError]  # the error of each damaged object, by key
    stored: dict[str, StoredRecord]  # objects that were read as a whole, by key, without their bytes

    def whole(self) -> list[Record]:
        """All undamaged documents."""
        return [record for record in (*self.shortcuts.values(), *self.records.values()) if record is not None]


def digests(records: Collection[Record]) -> dict[Slot, str]:
    """Return the digests of records, as their successors name them, or else as a shortcut names them."""
    ends = {record.slot: record.sha256 for record in records if record.sha256 is not None}
    return ends | {record.base.slot: record.base.sha256 for record in records if record.base is not None}


def identities(reader: ChannelReader, held: Scan, slots: Iterable[Slot]) -> dict[Slot, str]:
    """Return the digests of these records. A record that no other one names, such as the newest, is read as a
    whole.
    """
    found = digests(held.whole())
    for slot in [slot for slot in slots if slot not in found]:
        with contextlib.suppress(FormatError):
            stored = reader.slot(slot)
            if stored is not None:
                found[slot] = stored.sha256
    return found


def scan_channel(
    reader: ChannelReader,
    *,
    wanted: Callable[[Iterable[Slot]], Iterable[Slot]] = list,
    shortcuts_wanted: Callable[[Slot], bool] = lambda span: True,
    whole: bool = False,
    oldest: int = 1,
    known: Known | None = None,
) -> Scan:
    """List records, compactions and announcements, and read their documents.

    `wanted` selects the slots whose documents are read, from all slots in ascending order; then
    `shortcuts_wanted` selects the compactions and announcements. The others are listed only. With `whole`,
    whole objects are read; otherwise only the document at the end, without checking its digest. Versions before
    the `oldest` are not even listed. Documents that are `known` are not read again; afterwards those that were read
    are known, and no others. Raises like `check_listing`.
    """

    def read(info: ObjectInfo) -> StoredRecord | Record:
        if known is not None and info.modified_s > 0 and (found := known.get(_state(info))) is not None:
            return found
        return dataclasses.replace(reader.stored(info.key), data=None) if whole else reader.document(info)

    reader.channel()
    listed = retried(lambda: _listed(reader, oldest), 2, _LISTED_DELAY_S)
    slots = {slot: listed[slot] for slot in wanted(listed)}
    listed_shortcuts = reader.shortcuts()
    shortcuts = [info for span, info in listed_shortcuts if shortcuts_wanted(span)]
    infos = [*slots.values(), *shortcuts]
    results = in_parallel(
        lambda info: result_or_error(read, info), infos, "records", WHOLE if whole else THREADS
    )
    read_of = {info.key: found for info, found in zip(infos, results, strict=True)}
    gone = {key for key, found in read_of.items() if isinstance(found, MissingVersionError)}
    stored = {key: found for key, found in read_of.items() if isinstance(found, StoredRecord)}
    documents = {key: found for key, found in read_of.items() if isinstance(found, Record)}
    documents |= {key: found.record for key, found in stored.items()}
    if known is not None:
        known.clear()
        known.update({_state(info): documents[info.key] for info in infos if info.key in documents})
    if wanted is list and oldest == 1:
        last = max((slot.newness for slot in listed), default=("", 0))
        named = digests([*documents.values()])
        check_listing(reader, [slot.key for slot in named if slot not in listed and slot.newness < last])
    return Scan(
        infos={
            info.key: info
            for info in (*slots.values(), *dict(listed_shortcuts).values())
            if info.key not in gone
        },
        records={slot: documents.get(slot.key) for slot in slots if slot.key not in gone},
        shortcuts={info.key: documents.get(info.key) for info in shortcuts if info.key not in gone},
        problems={key: found for key, found in read_of.items() if isinstance(found, FormatError)},
        stored=stored,
    )


def _state(info: ObjectInfo) -> _State:
    return info.key, info.bytes, info.modified_s, info.content


def _listed(reader: ChannelReader, oldest: int) -> dict[Slot, ObjectInfo]:
    """List the records from a number on, and check that the newest one that is found by its key is among them."""
    head = reader.head()
    known = Slot(1, reader.channel().epoch) if head is None else head.newest.slot
    before = known if exists(reader.store, known.key) else None
    while before is not None and exists(reader.store, _after(before).key):
        before = _after(before)
    found = reader.slots() if oldest == 1 else reader.slots_from(oldest)
    listed = {slot: info for slot, info in found if slot.version >= oldest}
    is_lacking = before is not None and before not in listed and before.version >= oldest
    check_listing(reader, [before.key] if before is not None and is_lacking else [])
    return listed


def _after(slot: Slot) -> Slot:
    return Slot(slot.version + 1, slot.epoch)


def local_store(store: Store) -> LocalStore | None:
    """Return the directory behind a store; None if it is no directory, or on Windows."""
    while isinstance(store, WrappedStore):
        store = store.inner
    if os.open not in os.supports_dir_fd:
        return None
    from deltasync.stores.local import LocalStore

    return store if isinstance(store, LocalStore) else None


def exists(store: Store, key: str) -> bool:
    """Whether a non-empty object with this key exists, without a listing."""
    try:
        store.read_range(key, 0, 1)
    except ObjectMissingError:
        return False
    return True


def check_listing(reader: ChannelReader, unlisted: Sequence[str]) -> None:
    """Check that objects missing from a listing do not exist; else the listing is wrong, late or truncated,
    and it raises.
    """
    for key, found in zip(
        unlisted, in_parallel(functools.partial(exists, reader.store), unlisted, None), strict=True
    ):
        if found:
            raise TransientStoreError(
                f"The listing of {reader.store.url} is incomplete: it omits {key}, which exists. Nothing was "
                "changed; "
                "try again."
            )


def result_or_error(
    read: Callable[[_Item], _Result], item: _Item
) -> _Result | FormatError | MissingVersionError | ObjectMissingError:
    """Return the result of `read` for an item, or the error of a missing or damaged object.

    Transient errors are retried, because one failure among many objects would waste all the other reads.
    """
    try:
        return retried(lambda: read(item), 2, passing=(TransientStoreError, FormatError), level=logging.DEBUG)
    except (FormatError, MissingVersionError, ObjectMissingError) as error:
        return error
