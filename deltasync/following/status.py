"""The status of a replica: its state and error, and the versions that it committed."""

from __future__ import annotations

import msgspec

from deltasync.errors import describe

SHOWN = 5
"""How many names of ignored tensors a status has."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One version that became live.

    Attributes:
        sha256: The digest of its record.
        changed: The number of elements that changed.
        stage_s: Time to fetch, check, decode and translate it, while the weights are in use.
        pause_s: How long the engine made no tokens.
        scatter_s: The share of the pause for writing live weights, or the mirror of the tensors that take the
            fallback.
        reload_s: The share of the pause for loading the layers of those tensors again.
        lag_s: From encoding, by the publisher's clock, until the version was served; None where
            `Health.lag_s` is.
        tokens_during_sync: Tokens that the server generated between the start of staging and the resume.
        running_requests: Requests in flight when generation was paused.
        served_at: Seconds since the epoch.
    """

    version: int
    sha256: str
    anchor: bool
    changed: int = 0
    payload_bytes: int = 0
    stage_s: float = 0.0
    pause_s: float = 0.0
    scatter_s: float = 0.0
    reload_s: float = 0.0
    lag_s: float | None = None
    tokens_during_sync: int = 0
    running_requests: int = 0
    served_at: float = 0.0


class Status(msgspec.Struct, kw_only=True):
    """A replica's status: the reply of `GET /deltasync/status`, see docs/operations/replica.md.

    Attributes:
        boot: Identifies this life of the replica, whatever its name is; None if it
            writes no heartbeats.
        state: `waiting`, `staging`, `committing`, `serving`, `stale`, `sleeping`, `failed` or `stopped`.
        state_s: Seconds for which it has been in this state.
        followed_s_ago: Seconds since the channel could last be followed; None before the first time.
        error: The reason why the replica is not at a newer version, in one sentence; None if there is none.
        ignored_tensors: How many of the channel's tensors the engine does not compute with: they are in no
            proof.
        ignored: The names of the first of them.
    """

    replica_id: str
    channel: str
    run_id: str | None = None
    state: str
    version: int | None = None
    epoch: str | None = None
    sha256: str | None = None
    boot: str | None = None
    newest_version: int | None = None
    pin: str | None = None
    state_s: float | None = None
    followed_s_ago: float | None = None
    error: str | None = None
    trusted_keys: list[str] | None = None
    ignored_tensors: int = 0
    ignored: list[str] = []
    commits: list[Commit] = []


describe(Commit, Status)
