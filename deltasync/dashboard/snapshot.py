"""The snapshot of a channel as plain data: the fields of `data.json` and of `deltasync watch --json`."""

from __future__ import annotations

import dataclasses

import msgspec

from deltasync.channel.documents import Record, TokenLag
from deltasync.channel.keys import Slot


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
    token_lag: TokenLag | None  # mean, 95th percentile and maximum age in versions of tokens trained for its last publish


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
    lag_s: float | None  # seconds since the first missing version was encoded, 0 at the newest; None if not live, or pinned
    age_s: float  # age of the heartbeat
    pin: str | None  # the pin, None for the newest version
    error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LagRow:
    """A replica began to serve a version `lag_s` after it was encoded, measured with two machines' clocks."""

    time_s: float
    replica_id: str
    version: int
    lag_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a channel. Times are seconds since the epoch. Before the first version most fields are empty."""

    url: str
    time_s: float
    run_id: str | None = None
    created_s: float | None = None
    newest_version: int | None = None
    head_sha256: str | None = None
    element_count: int = 0
    tensor_count: int = 0
    full_bytes: int = 0  # size of the served weights
    versions: list[VersionRow] = dataclasses.field(default_factory=list)
    forgotten: int = 0  # number of versions up to the newest that were deleted
    unread: int = 0  # number of existing versions that were not read
    compactions: list[CompactionRow] = dataclasses.field(default_factory=list)
    replicas: list[ReplicaRow] = dataclasses.field(default_factory=list)
    lags: list[LagRow] = dataclasses.field(default_factory=list)
    layers: list[str] = dataclasses.field(default_factory=list)
    heat: dict[int, list[float]] = dataclasses.field(default_factory=dict)  # version -> changed fraction of each layer
    heat_unread: int = 0  # number of versions whose payload headers are unread
    stored_bytes: int = 0  # size of all records, compactions, parts and anchors in the last listing
    problems: list[str] = dataclasses.field(default_factory=list)  # damages, in sentences
    error: str | None = None  # error of the last refresh, None if it succeeded


def version_row(slot: Slot, found: Record, sha256: str | None, announced: Record | None) -> VersionRow:
    """Return the row of a version from its record, the record's digest, and the announcement of its anchor, if any."""
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
