"""Read a channel repeatedly, and keep snapshots: the fields of `data.json` and of `deltasync watch
--json`.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import msgspec

from deltasync.channel import keys
from deltasync.channel.clock import StoreClock
from deltasync.channel.documents import SHORTCUTS, Record, TokenLag, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Trusted
from deltasync.errors import FormatError, MissingVersionError, NotPublishedError, ObjectMissingError
from deltasync.ops import digests, in_parallel, result_or_error
from deltasync.ops.heat import Heat, by_layer, changed_of
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from deltasync.stores.base import ObjectInfo, Store
from deltasync.tensors import weight_bytes, weight_elements

# delay of news about compactions, anchors and forgotten versions, which head does not announce
_LIST_EVERY_S = 10.0
_LAGS = 2000  # most lags kept

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VersionRow:
    """One version."""

    version: int
    epoch: str
    sha256: str | None  # digest of its record, None until another document names it
    kind: str  # `delta`, `anchor` or `reference`
    base_version: int | None
    step: int | None
    created_s: float  # time of encoding, in seconds since the epoch
    codec: str | None
    changed: int | None  # number of changed elements, None without a delta
    delta_bytes: int | None  # size of the payload, None without one. The anchor may be announced separately.
    anchor_bytes: int | None  # size of the payload, None without one. The anchor may be announced separately.
    delta_objects: int  # number of payload files outside the record
    anchor_objects: int  # number of payload files outside the record
    coalesced: int
    # mean, 95th percentile and maximum age in versions of tokens trained for its last publish
    token_lag: TokenLag | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompactionRow:
    """One compaction, from a base version to a later one."""

    base_version: int
    version: int
    created_s: float
    changed: int
    payload_bytes: int
    objects: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRow:
    """One replica, as of its last heartbeat. Without a pin it follows the newest version."""

    replica_id: str
    state: str  # the replica's reported state; `stale` if it could not read the channel for a while
    live: bool  # whether the heartbeat is recent and the replica has not stopped
    version: int | None
    sha256: str | None  # digest of the served version
    strange: bool  # whether the served version is not the channel's version with this number
    behind: int | None  # number of versions behind the newest, None if it serves none
    # seconds since the first missing version was stored, 0 at the newest; None if not live, or pinned
    lag_s: float | None
    age_s: float  # age of the heartbeat
    pin: str | None  # the pin, None for the newest version
    error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LagRow:
    """A replica said that it serves a version `lag_s` after that was stored, by the store's clock."""

    time_s: float
    replica_id: str
    version: int
    lag_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSize:
    """Numbers of what a channel holds."""

    element_count: int = 0
    tensor_count: int = 0
    full_bytes: int = 0  # size of the served weights
    stored_bytes: int = 0  # size of all records, compactions, parts and anchors in the last listing
    forgotten: int = 0  # number of versions up to the newest that were deleted
    unread: int = 0  # number of existing versions that were not read


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSnapshot(ChannelSize):
    """The state of a channel. Times are seconds since the epoch. Before the first version most fields are
    empty.
    """

    url: str
    time_s: float
    run_id: str | None = None
    created_s: float | None = None
    newest_version: int | None = None
    head_sha256: str | None = None
    versions: list[VersionRow] = dataclasses.field(default_factory=list)
    compactions: list[CompactionRow] = dataclasses.field(default_factory=list)
    replicas: list[ReplicaRow] = dataclasses.field(default_factory=list)
    lags: list[LagRow] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    # version -> changed fraction of each layer
    heat: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    heat_unread: int = 0  # number of versions whose payload headers are unread
    problems: list[str] = dataclasses.field(default_factory=list)  # damages, in sentences
    error: str | None = None  # error of the last refresh, None if it succeeded


def version_row(slot: Slot, found: Record, sha256: str | None, announced: Record | None) -> VersionRow:
    """Return the row of a version from its record, the record's digest, and the announcement of its anchor,
    if any.
    """
    delta = found.delta
    weights = found if found.anchor is not None else announced
    anchor = None if weights is None or weights.reference is not None else weights.anchor
    return VersionRow(
        version=slot.version,
        epoch=slot.epoch,
        sha256=sha256,
        kind=found.kind if found.reference is None else "reference",
        base_version=None if delta is None or found.base is None else found.base.version,
        step=found.step,
        created_s=found.created_s,
        codec=None if delta is None else delta.codec,
        changed=None if delta is None else delta.changed,
        delta_bytes=None if delta is None else found.payload_bytes,
        anchor_bytes=None if anchor is None or weights is None else weights.payload_bytes,
        delta_objects=0 if delta is None else len(delta.parts),
        anchor_objects=0 if anchor is None else len(anchor.files),
        coalesced=found.coalesced,
        token_lag=None if found.token_lag is msgspec.UNSET else found.token_lag,
    )


def compaction_row(found: Record) -> CompactionRow:
    """Return the row of a compaction."""
    assert found.base is not None and found.delta is not None
    return CompactionRow(
        base_version=found.base.version,
        version=found.version,
        created_s=found.created_s,
        changed=found.delta.changed,
        payload_bytes=found.payload_bytes,
        objects=len(found.delta.parts),
    )


class ChannelObserver:
    """Observes one channel from outside. `refresh` reads head, heartbeats and new documents, and lists now
    and then.

    `last` is the number of newest versions to read, `heat` the number of those whose payload headers
    `read_headers` reads.
    """

    def __init__(
        self, store: Store, *, last: int = 500, heat: int = 0, trusted_keys: str | Trusted | None = None
    ) -> None:
        self._reader = ChannelReader(store, trusted_keys)
        self._clock = StoreClock(store)
        self._last, self._heat = last, Heat(heat)
        self._head: VersionId | None = None
        self._listed_s = float("-inf")
        self._documents: dict[str, Record] = {}  # documents of all records and compactions ever seen, by key
        self._lineage: dict[int, Slot] = {}  # versions that were read, by number, ascending
        self._numbers: set[int] = set()  # all listed version numbers
        self._held: dict[str, ObjectInfo] = {}  # records, compactions and files of the last listing
        self._problems: dict[str, str] = {}
        self._heartbeats: heartbeat.FleetHeartbeats | None = None
        self._beats: list[Heartbeat] = []
        self._served: dict[str, int | None] = {}
        self._since_s: dict[str, float] = {}  # when each replica's first heartbeat with a version was stored
        self._lags: deque[LagRow] = deque(maxlen=_LAGS)

    def refresh(self) -> ChannelSnapshot:
        """Read new objects, and return a snapshot. After an error, `snapshot` still returns the earlier
        results.
        """
        try:
            run_id = self._reader.channel().run_id
        except NotPublishedError:
            return self.snapshot()
        head = self._reader.head()
        newest = None if head is None else head.newest
        if newest != self._head or time.monotonic() - self._listed_s > _LIST_EVERY_S:
            self._list()
            self._head = newest
        if self._heartbeats is None or self._heartbeats.run_id != run_id:
            self._heartbeats = heartbeat.FleetHeartbeats(self._reader.store, run_id, self._clock)
        self._beats = self._heartbeats.refresh()
        for beat in self._beats:
            self._observe(beat)
        return self.snapshot()

    def _list(self) -> None:
        self._heat.layers = self._heat.layers or by_layer(
            (spec.name, spec.element_count) for spec in self._reader.specs.values()
        )
        slots = dict(self._reader.slots())
        last = max((slot.version for slot in slots), default=0)
        documents: list[tuple[Slot, ObjectInfo]] = [*slots.items(), *self._reader.shortcuts()]
        files = [info for prefix in (keys.PARTS, keys.ANCHORS) for info in self._reader.store.list(prefix)]
        self._held = {info.key: info for info in (*(info for _, info in documents), *files)}
        self._clock.note(self._held.values())
        recent = [info for of, info in documents if of.version > last - self._last - 1]
        unknown = {info.key: info for info in recent if info.key not in self._documents}
        self._documents.update(self._gather(unknown, self._reader.document, "records"))
        versions = [
            slot for slot in slots if (read := self._documents.get(slot.key)) is not None and read.is_version
        ]
        tip = max(versions, key=lambda slot: slot.newness, default=None)
        newest = 0 if tip is None else tip.version
        # If two versions share a number, the later epoch's counts. Versions after the newest belong to an
        # abandoned epoch.
        self._lineage = {slot.version: slot for slot in versions if slot.version <= newest}
        self._numbers = {slot.version for slot in slots if slot.version <= newest}
        self._heat.tried.clear()
        self._listed_s = time.monotonic()

    def _gather(
        self, items: Mapping[str, _Item], read: Callable[[_Item], _Result], what: str
    ) -> Iterator[tuple[str, _Result]]:
        """Yield (name, result) for each existing, undamaged item, and record the problems of damaged ones."""
        results = in_parallel(lambda item: result_or_error(read, item), list(items.values()), what)
        for name, found in zip(items, results, strict=True):
            if isinstance(found, FormatError):
                self._problems[name] = str(found)
            elif not isinstance(found, MissingVersionError | ObjectMissingError):
                self._problems.pop(name, None)
                yield name, found

    def _now_s(self) -> float:
        """Return the time by the store's clock; by this machine's where the store tells none."""
        return time.time() if self._clock.now_s == -math.inf else self._clock.now_s

    def _stored_s(self, number: int) -> float:
        """Return when a version was stored, by the store's clock; where it tells none, when it was
        encoded.
        """
        info = self._held.get(self._lineage[number].key)
        return (
            self._document(number).created_s
            if info is None
            else info.modified_s or self._document(number).created_s
        )

    def _document(self, number: int) -> Record:
        return self._documents[self._lineage[number].key]

    def _observe(self, beat: Heartbeat) -> None:
        """Record a replica's lag when it moves to a newer version, but not to a pin, or to one before its
        first heartbeat.
        """
        before, at_s = self._served.get(beat.replica_id), self._now_s() - (time.time() - beat.time_s)
        moved = beat.version is not None and before is not None and beat.version > before
        if moved and beat.pin is None and beat.version in self._lineage:
            stored_s = self._stored_s(beat.version)
            if stored_s > self._since_s[beat.replica_id]:
                lag_s = round(max(0.0, at_s - stored_s), 3)
                self._lags.append(
                    LagRow(time_s=beat.time_s, replica_id=beat.replica_id, version=beat.version, lag_s=lag_s)
                )
        if before is None:
            self._since_s[beat.replica_id] = at_s
        self._served[beat.replica_id] = None if beat.state == heartbeat.STOPPED else beat.version

    def read_headers(self, limit: int) -> int:
        """Read the payload headers of the newest `limit` unread versions, and return the number of unread
        ones left.
        """
        waiting = self._waiting_for_headers()
        now = {f"{self._lineage[number].key} header": number for number in waiting[-limit:]}
        for name, changed in self._gather(now, self._read_header, "payload headers"):
            self._heat.note(now[name], changed)
        self._heat.tried.update(now.values())
        return len(waiting) - len(now)

    def _read_header(self, number: int) -> dict[str, int]:
        delta = self._document(number).delta
        assert delta is not None
        return changed_of(
            self._reader.store, self._held[self._lineage[number].key], delta, self._reader.layout
        )

    def _waiting_for_headers(self) -> list[int]:
        newest = list(self._lineage)[-self._heat.last :] if self._heat.last else []
        unread = [
            number
            for number in newest
            if number not in self._heat.fractions and number not in self._heat.tried
        ]
        return [number for number in unread if self._document(number).delta is not None]

    def snapshot(self, error: str | None = None) -> ChannelSnapshot:
        """Return everything seen so far. `error` is the problem of the last refresh."""
        now_s = time.time()
        if not self._lineage:
            return ChannelSnapshot(
                url=self._reader.store.url, time_s=now_s, error=error, problems=list(self._problems.values())
            )
        channel = self._reader.channel()
        specs = self._reader.specs.values()
        # a hint, good enough to show
        head = {} if self._head is None else {self._head.slot: self._head.sha256}
        named = head | digests(self._documents.values())
        documents = [found for key in self._held if (found := self._documents.get(key)) is not None]
        shortcuts = [each for each in documents if each.kind in SHORTCUTS]
        announced = {each.slot: each for each in shortcuts if each.anchor is not None}
        compactions = [compaction_row(each) for each in shortcuts if each.delta is not None]
        shown = list(self._lineage.values())[-self._last :]
        rows = [
            version_row(slot, self._documents[slot.key], named.get(slot), announced.get(slot))
            for slot in shown
        ]
        newest = rows[-1]
        return ChannelSnapshot(
            url=self._reader.store.url,
            time_s=now_s,
            run_id=channel.run_id,
            created_s=_epoch_s(channel.created_at),
            newest_version=newest.version,
            head_sha256=newest.sha256,
            element_count=weight_elements(specs),
            tensor_count=len(specs),
            full_bytes=weight_bytes(specs),
            versions=rows,
            forgotten=newest.version - len(self._numbers),
            unread=len(self._numbers) - len(rows),
            compactions=sorted(compactions, key=lambda compaction: compaction.version),
            replicas=[self._replica_row(beat, newest.version, now_s) for beat in self._beats],
            lags=list(self._lags),
            layers=list(self._heat.layers) if self._heat.last else [],
            heat={
                row.version: self._heat.fractions[row.version]
                for row in rows
                if row.version in self._heat.fractions
            },
            heat_unread=len(self._waiting_for_headers()),
            stored_bytes=sum(info.bytes for info in self._held.values()),
            problems=list(self._problems.values()),
            error=error,
        )

    def _replica_row(self, beat: Heartbeat, newest: int, now_s: float) -> ReplicaRow:
        live, served = heartbeat.is_live(beat), beat.version
        behind = None if served is None else max(0, newest - served)
        lag_s = None
        if live and served is not None and beat.pin is None:
            missed = min((number for number in self._lineage if number > served), default=None)
            lag_s = 0.0 if missed is None else max(0.0, self._now_s() - self._stored_s(missed))
        here = None if served is None else self._lineage.get(served)
        return ReplicaRow(
            replica_id=beat.replica_id,
            state=beat.state,
            live=live,
            version=served,
            sha256=beat.sha256,
            strange=here is not None and beat.epoch not in (None, here.epoch),
            behind=behind,
            lag_s=lag_s,
            age_s=max(0.0, now_s - beat.time_s),
            pin=beat.pin,
            error=beat.error,
        )


def _epoch_s(created_at: str) -> float:
    """Return seconds since the epoch; 0 if the text is not a time, because readers do not check
    channel.json's.
    """
    try:
        return datetime.datetime.fromisoformat(created_at).timestamp()
    except ValueError:
        return 0.0
