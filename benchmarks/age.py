"""What it costs by the age of a run to join it, to resume it and to look at it: from 1,000 to 1,000,000 versions.

    python -m benchmarks.age [--versions 1000 1000000] [--json]

Fills a store in memory with what a publisher stores: versions that change nothing, and a compaction for each
500 of them. Counts requests as S3 does, which lists 1,000 objects at a time. Uses no GPU and no network.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks import common
from benchmarks.common import say, table, timed
from deltasync import Publisher, Replica, Retention, open_store
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import DeltaFiles, Head, VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.shortcuts import shortcut
from deltasync.ops import scan_channel
from deltasync.stores.base import Store, WrappedStore

_PAGE = 1000  # objects, or folders, in one reply of S3
_COMPACTED = 500  # versions from one compaction to the next
_SHOWN = 10  # versions of `deltasync log --last`
_WEIGHTS = {"layer.weight": torch.zeros(16, 16, dtype=torch.bfloat16)}
_OFF = Retention(compact_every=0)

_Result = TypeVar("_Result")


class Counted(WrappedStore):
    """Counts requests by their verb, a listing as one for each of its pages."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests: Counter[str] = Counter()

    def ask(self, verb: str, key: str, action: Callable[[], _Result]) -> _Result:
        """Make the request, and count it."""
        found = action()
        self.requests[verb] += max(1, -(-len(found) // _PAGE)) if isinstance(found, list) else 1
        return found


def fill(store: Store, versions: int) -> None:
    """Make a channel of this many versions: the first two by a publisher, the others as copies of the second."""
    with Publisher(store, retention=_OFF) as publisher:
        for step in range(2):
            publisher.publish(_WEIGHTS, step=step).wait(60)
    reader = ChannelReader(store)
    first, last = reader.numbered(1), reader.numbered(2)
    newest = last.version
    for key, data in _records(last, versions):
        store.put(key, data)
        slot = keys.slot_of(key)
        assert slot is not None
        newest = VersionId(slot.version, slot.epoch, sha256_hex(data))
        if slot.version % _COMPACTED == 0:
            _compact(store, first, last, newest)
    head = Head(run_id=last.record.run_id, version=versions, epoch=newest.epoch, sha256=newest.sha256)
    store.put(keys.HEAD, documents.encode(head))


def _records(last: StoredRecord, versions: int) -> Iterator[tuple[str, bytes]]:
    """Yield the records after the last one. Each is as `record.encode` makes it; those whose numbers have as many
    digits differ in the numbers and in the digest alone.
    """
    sample, base = last, last.version
    for number in range(last.record.version + 1, versions + 1):
        step, key = number - 1, keys.slot(number, base.epoch)
        if len(str(number)) > len(str(sample.record.version)) or len(str(step)) > len(
            str(sample.record.step)
        ):
            document = dataclasses.replace(last.record, version=number, step=step, base=base)
            sample = record.encode(document, key, None, None)
        was = sample.record
        assert sample.data is not None and was.base is not None
        data = sample.data
        for old, new in (
            (f'"version":{was.version},', f'"version":{number},'),
            (f'"version":{was.base.version},', f'"version":{base.version},'),
            (was.base.sha256, base.sha256),
            (f'"step":{was.step},', f'"step":{step},'),
        ):
            data = data.replace(old.encode(), new.encode(), 1)
        base = VersionId(number, base.epoch, sha256_hex(data))
        yield key, data


def _compact(store: Store, first: StoredRecord, last: StoredRecord, version: VersionId) -> None:
    document, key = shortcut(
        *(last.record.run_id, version, version.epoch, str(last.record.fingerprint)),
        base=first.version,
        delta=DeltaFiles(codec="packed", changed=0),
    )
    data = record.encode(document, key, None, None).data
    assert data is not None
    store.put(key, data)


def _join(store: Store) -> None:
    Replica(store).sync()


def _resume(store: Store) -> None:
    Publisher(store, resume=True, retention=_OFF).close()


def _resume_and_publish(store: Store) -> None:
    with Publisher(store, resume=True, retention=_OFF) as publisher:
        newest = publisher.version
        publisher.publish(_WEIGHTS, step=newest - 20).wait(60)


def _log(store: Store) -> None:
    reader = ChannelReader(store)
    oldest = reader.newest_slots()[-1][0].version - _SHOWN
    scan_channel(reader, oldest=oldest, shortcuts_wanted=lambda span: span.version >= oldest)


def _without_head(store: Store) -> None:
    store.delete(keys.HEAD)
    _join(store)


MEASURED: dict[str, Callable[[Store], None]] = {
    "join": _join,
    "log --last 10": _log,
    "resume": _resume,
    "resume and publish": _resume_and_publish,
    "join without head.json": _without_head,
}


def run(versions: Sequence[int]) -> dict[str, Any]:
    """Fill a store for each number of versions, and measure on it."""
    found: dict[str, Any] = {}
    for number in versions:
        inner = open_store(f"memory://age-{number}")
        seconds, _ = timed(partial(fill, inner, number))
        say(f"{number:,} versions in {seconds:.0f} s")
        for name, action in MEASURED.items():
            store = Counted(inner)
            seconds, _ = timed(partial(action, store))
            found.setdefault(name, []).append(
                {"versions": number, "requests": store.requests.total(), "seconds": seconds, **store.requests}
            )
    return found


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    ages = [row["versions"] for row in next(iter(result.values()))]
    columns = ["", *(f"{age:,} versions: requests, seconds" for age in ages)]
    rows = [
        (name, *(f"{row['requests']:,}, {row['seconds']:.2f}" for row in found))
        for name, found in result.items()
    ]
    yield from table(columns, rows)


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option(
            "--versions", type=int, nargs="+", default=[1000, 1_000_000], help="lengths of the log to measure"
        ),
    )
