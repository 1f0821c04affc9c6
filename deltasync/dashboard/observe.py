"""Look at a channel again and again, and keep what was seen."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from deltasync import heartbeat, layout
from deltasync.dashboard.costs import Costs, Stored, estimate
from deltasync.dashboard.heat import Layers, read_changed
from deltasync.errors import FormatError, MissingVersionError, NotPublishedError, ObjectMissingError, RunMismatchError
from deltasync.heartbeat import Heartbeat
from deltasync.housekeeping.survey import Progress, fold_keys, in_parallel, quiet, read_fold
from deltasync.manifest import FileRef, Fold, Manifest
from deltasync.reader import ChannelReader
from deltasync.stores.base import Store

_LIST_EVERY_S = 10.0  # what is stored after head (folds), and what is forgotten, is seen so late
_LAGS = 2000  # kept

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VersionRow:
    """One version.

    Attributes:
        kind: `delta`, `anchor` or `reference`.
        created_s: When it was encoded, by the epoch.
        changed: Elements, None without a delta.
        delta_bytes, anchor_bytes: Payload, None where it has none.
        objects: How many files of payload.
    """

    version: int
    kind: str
    base_version: int | None
    step: int | None
    created_s: float
    codec: str | None
    changed: int | None
    delta_bytes: int | None
    anchor_bytes: int | None
    delta_objects: int
    anchor_objects: int
    coalesced: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoldRow:
    """One fold."""

    base_version: int
    version: int
    created_s: float
    changed: int
    payload_bytes: int
    objects: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRow:
    """One replica, by its last heartbeat.

    Attributes:
        state: As it says.
        live: Whether the heartbeat is recent, and not the one of a replica that stopped.
        behind: Versions between the one it serves and head, None if it serves none.
        lag_s: Since the first version that it does not serve was encoded, 0 at head; None if it is not live.
        age_s: Of the heartbeat.
    """

    replica_id: str
    state: str
    live: bool
    version: int | None
    behind: int | None
    lag_s: float | None
    age_s: float
    error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LagRow:
    """A replica was seen to begin to serve a version, `lag_s` after it was encoded (by two machines' clocks)."""

    time_s: float
    replica_id: str
    version: int
    lag_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All that is shown. Times are seconds since the epoch.

    Attributes:
        head_version: None as long as nothing is published; then most of the rest is empty.
        full_bytes: Of the weights, as served.
        versions: Ascending.
        forgotten, unread: How many versions up to head are not there any more, and are there but were not read.
        layers: Names.
        heat: Version -> changed fraction of each layer.
        heat_unread: How many versions' headers are still to be read.
        problems: Damage that was seen, in sentences.
        error: Why the last look failed, None if it did not.
    """

    url: str
    time_s: float
    run_id: str | None = None
    created_s: float | None = None
    head_version: int | None = None
    element_count: int = 0
    tensor_count: int = 0
    full_bytes: int = 0
    versions: list[VersionRow] = dataclasses.field(default_factory=list)
    forgotten: int = 0
    unread: int = 0
    folds: list[FoldRow] = dataclasses.field(default_factory=list)
    replicas: list[ReplicaRow] = dataclasses.field(default_factory=list)
    lags: list[LagRow] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    heat: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    heat_unread: int = 0
    costs: Costs | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None


class Observer:
    """One channel, seen from outside. A document is read once, a damaged one again: it may pass. A look costs a read of head
    and of each heartbeat, and a listing.

    Args:
        store: The channel's.
        last: Read the newest so many versions.
        heat: Of so many of them also the headers of their deltas, which `read_headers` does.
        trusted_keys: See `ChannelReader`.
    """

    def __init__(self, store: Store, *, last: int = 500, heat: int = 0, trusted_keys: str | None = None) -> None:
        self._reader = ChannelReader(store, trusted_keys)
        self._last, self._heat_last = last, heat
        self._listed: list[int] = []
        self._listed_s = float("-inf")
        self._head: int | None = None
        self._versions: dict[int, VersionRow] = {}
        self._folds: dict[str, FoldRow] = {}
        self._held_folds: set[str] = set()
        self._problems: dict[int | str, str] = {}
        self._beats: list[Heartbeat] = []
        self._served: dict[str, int | None] = {}
        self._lags: deque[LagRow] = deque(maxlen=_LAGS)
        self._delta_files: dict[int, list[FileRef]] = {}
        self._heat: dict[int, list[float]] = {}
        self._layers: Layers | None = None

    def look(self, progress: Progress = quiet) -> Snapshot:
        """Read what is new.

        Raises:
            DeltaSyncError: what is there cannot be read. `snapshot` still has what was seen before.
        """
        try:
            head = self._reader.head()
        except NotPublishedError:
            return self.snapshot()
        if head.version != self._head or time.monotonic() - self._listed_s > _LIST_EVERY_S:
            self._list(head.version, progress)
        self._beats = heartbeat.read_all(self._reader.store, head.run_id)
        for beat in self._beats:
            self._observe(beat)
        return self.snapshot()

    def _list(self, head_version: int, progress: Progress) -> None:
        if self._layers is None:
            self._layers = Layers(self._reader.specs.values())
        listed = [version for version in self._reader.versions() if version <= head_version]
        new = [v for v in listed[-self._last :] if v not in self._versions]
        for version, found in zip(
            new, in_parallel(_attempt(self._reader.manifest), new, "manifests", progress), strict=True
        ):
            if isinstance(found, str):
                self._problems[version] = found
            elif found is not None:
                self._problems.pop(version, None)
                self._versions[version] = _version_row(found)
                self._delta_files[version] = found.delta.files if found.delta is not None else []
        self._listed, self._head = listed, head_version
        shown = {version for version in listed if version in self._versions}
        keys = [key for key in fold_keys(self._reader) if (span := layout.fold_span(key)) and span[1] in shown]
        unknown = [key for key in keys if key not in self._folds]
        read_one = _attempt(functools.partial(read_fold, self._reader))
        for key, fold in zip(unknown, in_parallel(read_one, unknown, "folds", progress), strict=True):
            if isinstance(fold, str):
                self._problems[key] = fold
            elif fold is not None:
                self._problems.pop(key, None)
                self._folds[key] = _fold_row(fold)
        self._held_folds = set(keys)
        self._listed_s = time.monotonic()

    def _observe(self, beat: Heartbeat) -> None:
        """Only a change that happened while we looked tells when the replica began to serve the version."""
        known = beat.replica_id in self._served
        if known and beat.version != self._served[beat.replica_id] and beat.version in self._versions:
            lag_s = max(0.0, beat.time_s - self._versions[beat.version].created_s)
            self._lags.append(
                LagRow(time_s=beat.time_s, replica_id=beat.replica_id, version=beat.version, lag_s=round(lag_s, 3))
            )
        self._served[beat.replica_id] = beat.version

    def read_headers(self, limit: int, progress: Progress = quiet) -> int:
        """Read the headers of the newest `limit` versions whose headers are still to be read. Returns how many are left.

        Raises:
            StoreError: they cannot be read now.
        """
        waiting = self._waiting_for_headers()
        now = waiting[-limit:]
        store, layers = self._reader.store, self._layers
        if not now or layers is None:
            return 0

        def read(version: int) -> dict[str, int]:
            changed: dict[str, int] = {}
            for file in self._delta_files[version]:
                for name, count in read_changed(store, file).items():
                    changed[name] = changed.get(name, 0) + count
            return changed

        for version, found in zip(now, in_parallel(_attempt(read), now, "payload headers", progress), strict=True):
            if isinstance(found, dict):
                self._heat[version] = layers.fractions(found)
            elif found is not None:
                self._problems[version] = found
            del self._delta_files[version]
        return len(waiting) - len(now)

    def _waiting_for_headers(self) -> list[int]:
        newest = self._listed[-self._heat_last :] if self._heat_last else []
        return [v for v in newest if v in self._delta_files and self._versions[v].base_version is not None]

    def snapshot(self, error: str | None = None) -> Snapshot:
        """What was seen so far.

        Args:
            error: Why nothing newer was.
        """
        now_s = time.time()
        if self._head is None:
            return Snapshot(url=self._reader.store.url, time_s=now_s, error=error)
        channel = self._reader.channel()
        specs = self._reader.specs.values()
        created_s = _epoch_s(channel.created_at)
        rows = [self._versions[version] for version in self._listed[-self._last :] if version in self._versions]
        stored = self._stored(set(self._listed), now_s)
        return Snapshot(
            url=self._reader.store.url,
            time_s=now_s,
            run_id=channel.run_id,
            created_s=created_s,
            head_version=self._head,
            element_count=sum(spec.element_count for spec in specs),
            tensor_count=len(specs),
            full_bytes=sum(spec.element_count * spec.item_bytes for spec in specs),
            versions=rows,
            forgotten=self._head - len(self._listed),
            unread=len(self._listed) - len(rows),
            folds=sorted(
                (self._folds[key] for key in self._held_folds if key in self._folds), key=lambda fold: fold.version
            ),
            replicas=[self._replica_row(beat, now_s) for beat in self._beats],
            lags=list(self._lags),
            layers=self._layers.names if self._layers is not None and self._heat_last else [],
            heat={row.version: self._heat[row.version] for row in rows if row.version in self._heat},
            heat_unread=len(self._waiting_for_headers()),
            costs=estimate(
                self._reader.store.url,
                stored,
                len(self._versions),
                self._beats,
                created_s,
                unseen=self._head - len(self._versions),
            ),
            problems=list(self._problems.values()),
            error=error,
        )

    def _stored(self, held: set[int], now_s: float) -> list[Stored]:
        stored = []
        for row in self._versions.values():
            for kind, size, objects in (
                ("delta", row.delta_bytes, row.delta_objects),
                ("anchor", row.anchor_bytes, row.anchor_objects),
            ):
                if size is not None:
                    stored.append(
                        Stored(
                            kind=kind,
                            version=row.version,
                            payload_bytes=size,
                            objects=objects,
                            age_s=max(0.0, now_s - row.created_s),
                            held=row.version in held,
                        )
                    )
        for key, fold in self._folds.items():
            stored.append(
                Stored(
                    kind="fold",
                    version=fold.version,
                    payload_bytes=fold.payload_bytes,
                    objects=fold.objects,
                    age_s=max(0.0, now_s - fold.created_s),
                    held=key in self._held_folds,
                )
            )
        return stored

    def _replica_row(self, beat: Heartbeat, now_s: float) -> ReplicaRow:
        assert self._head is not None
        live, served = heartbeat.is_live(beat), beat.version
        behind = None if served is None else max(0, self._head - served)
        lag_s = None
        if live and served is not None:
            missed = min((version for version in self._versions if version > served), default=None)
            lag_s = 0.0 if missed is None else max(0.0, now_s - self._versions[missed].created_s)
        return ReplicaRow(
            replica_id=beat.replica_id,
            state=beat.state,
            live=live,
            version=served,
            behind=behind,
            lag_s=lag_s,
            age_s=max(0.0, now_s - beat.time_s),
            error=beat.error,
        )


def _attempt(read: Callable[[_Item], _Result]) -> Callable[[_Item], _Result | str | None]:
    """`read`, which returns None for what is gone and a sentence for what is damaged."""

    def attempt(item: _Item) -> _Result | str | None:
        try:
            return read(item)
        except (MissingVersionError, ObjectMissingError):
            return None
        except (FormatError, RunMismatchError) as error:
            return str(error)

    return attempt


def _version_row(found: Manifest) -> VersionRow:
    delta, anchor, reference = found.delta, found.anchor, found.reference
    weights = None if reference is not None else anchor
    return VersionRow(
        version=found.version,
        kind=found.kind if reference is None else "reference",
        base_version=None if delta is None else delta.base_version,
        step=found.step,
        created_s=_epoch_s(found.created_at),
        codec=None if delta is None else delta.codec,
        changed=None if delta is None else delta.changed,
        delta_bytes=None if delta is None else delta.payload_bytes,
        anchor_bytes=None if weights is None else weights.payload_bytes,
        delta_objects=0 if delta is None else len(delta.files),
        anchor_objects=0 if weights is None else len(weights.files),
        coalesced=found.coalesced,
    )


def _fold_row(found: Fold) -> FoldRow:
    return FoldRow(
        base_version=found.base_version,
        version=found.version,
        created_s=_epoch_s(found.created_at),
        changed=found.changed,
        payload_bytes=found.payload_bytes,
        objects=len(found.files),
    )


def _epoch_s(created_at: str) -> float:
    """Seconds since the epoch of a document's time, 0 if it is not one: nothing checks it."""
    try:
        return datetime.datetime.fromisoformat(created_at).timestamp()
    except ValueError:
        return 0.0
