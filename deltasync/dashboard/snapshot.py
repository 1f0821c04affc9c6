"""What is shown of a channel, as plain data: each field is one of the page's `data.json` and of `deltasync watch --json`."""

from __future__ import annotations

import dataclasses

import msgspec

from deltasync.channel.documents import Record, TokenLag
from deltasync.channel.keys import Slot
from deltasync.dashboard.costs import Costs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VersionRow:
    """One version.

    Attributes:
        sha256: Digest of its record, None as long as nothing names it.
        kind: `delta`, `anchor` or `reference`.
        created_s: When it was encoded, by the epoch.
        changed: Elements, None without a delta.
        delta_bytes, anchor_bytes: Payload, None where it has none; the anchor may be announced beside it.
        objects: How many files of payload there are beside the record.
        token_lag: Mean, 95th percentile and maximum age in versions of tokens trained for its last publish; None if unknown.
    """

    version: int
    epoch: str
    sha256: str | None
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
    token_lag: TokenLag | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoldRow:
    """One fold, from a version."""

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
        state: As it says; `stale` if it has not heard of the channel for a while.
        live: Whether the heartbeat is recent, and not the one of a replica that stopped.
        sha256: Digest of what it serves.
        strange: It serves another version under this number than the channel has.
        behind: Versions between the one it serves and the newest, None if it serves none.
        lag_s: Since the first version that it does not serve was encoded, 0 at the newest; None if not live, or pinned.
        pin: Which versions it takes, None for the newest.
        age_s: Age of the heartbeat.
    """

    replica_id: str
    state: str
    live: bool
    version: int | None
    sha256: str | None
    strange: bool
    behind: int | None
    lag_s: float | None
    age_s: float
    pin: str | None
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
        newest_version: The newest; None as long as nothing is published; then most of the rest is empty.
        head_sha256: Its digest, None if it is not known yet.
        full_bytes: Bytes of the weights, as served.
        forgotten, unread: How many versions up to the newest are not there any more, and are there but were not read.
        heat: Version -> changed fraction of each layer.
        heat_unread: How many versions' headers are still to be read.
        problems: Damage that was seen, in sentences.
        error: Why the last look failed, None if it did not.
    """

    url: str
    time_s: float
    run_id: str | None = None
    created_s: float | None = None
    newest_version: int | None = None
    head_sha256: str | None = None
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


def version_row(slot: Slot, found: Record, sha256: str | None, announced: Record | None) -> VersionRow:
    """The row of a version, by its slot and record, the record's digest and the fold that announces an anchor of it."""
    delta = found.delta
    weights = found if found.anchor is not None else announced
    beside = None if weights is None or weights.anchor is None or weights.reference is not None else weights.anchor
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
        anchor_bytes=None if beside is None or weights is None else weights.payload_bytes,
        delta_objects=0 if delta is None else len(delta.parts),
        anchor_objects=0 if beside is None else len(beside.files),
        coalesced=found.coalesced,
        token_lag=None if found.token_lag is msgspec.UNSET else found.token_lag,
    )


def fold_row(found: Record) -> FoldRow:
    """The row of a fold's document."""
    assert found.base is not None and found.delta is not None
    return FoldRow(
        base_version=found.base.version,
        version=found.version,
        created_s=found.created_s,
        changed=found.delta.changed,
        payload_bytes=found.payload_bytes,
        objects=len(found.delta.parts),
    )
