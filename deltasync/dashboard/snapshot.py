"""What is shown of a channel, as plain data: these are the fields of `data.json` and of `deltasync watch --json`."""

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
        sha256: Digest of its record, None until something names it.
        kind: `delta`, `anchor` or `reference`.
        created_s: When it was encoded, seconds since the epoch.
        changed: How many elements changed, None without a delta.
        delta_bytes, anchor_bytes: Size of the payload, None if it has none; the anchor may be announced beside it.
        delta_objects, anchor_objects: How many payload files there are beside the record.
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
class CompactionRow:
    """One compaction that starts from a version."""

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
        state: What the replica reports; `stale` if it has not heard of the channel for a while.
        live: Whether the heartbeat is recent and the replica has not stopped.
        sha256: Digest of the version it serves.
        strange: Whether it serves another version under this number than the channel has.
        behind: How many versions it lies behind the newest, None if it serves none.
        lag_s: Seconds since the first version that it lacks was encoded, 0 at the newest; None if not live, or pinned.
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
    """Everything that is shown. Times are seconds since the epoch.

    Attributes:
        newest_version: The newest version, None before the first; then most other fields are empty.
        head_sha256: Its digest, None if it is not known yet.
        full_bytes: Bytes of the weights, as served.
        forgotten: How many versions up to the newest are not there any more.
        unread: How many versions are there, but were not read.
        heat: Version -> changed fraction of each layer.
        heat_unread: How many versions' payload headers are still to be read.
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
    compactions: list[CompactionRow] = dataclasses.field(default_factory=list)
    replicas: list[ReplicaRow] = dataclasses.field(default_factory=list)
    lags: list[LagRow] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    heat: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    heat_unread: int = 0
    costs: Costs | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None


def version_row(slot: Slot, found: Record, sha256: str | None, announced: Record | None) -> VersionRow:
    """The row of a version: its record, the record's digest, and the compaction that announces an anchor of it, if any."""
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
    """The row of a compaction."""
    assert found.base is not None and found.delta is not None
    return CompactionRow(
        base_version=found.base.version,
        version=found.version,
        created_s=found.created_s,
        changed=found.delta.changed,
        payload_bytes=found.payload_bytes,
        objects=len(found.delta.parts),
    )
