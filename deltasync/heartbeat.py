"""Heartbeats: small objects by which people and the publisher see the fleet without a connection to it.

Never needed for correctness: a lost or stale heartbeat only makes a replica look late.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec

from deltasync import layout
from deltasync.errors import AckTimeoutError, ConfigError, ObjectMissingError, TransientStoreError
from deltasync.stores.base import Store

LIVE_S = 60.0
"""A replica whose heartbeat is older than this no longer counts as live."""

_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a replica says of itself.

    Attributes:
        replica_id: Its name.
        run_id: The run it follows, None before it knows.
        version: Version it serves, None before the first.
        state: `waiting`, `staging`, `committing`, `serving` or `failed`.
        head_version: Newest version it has seen.
        error: What is wrong, None if nothing is.
        time_s: Seconds since the epoch, by the replica's clock.
    """

    replica_id: str
    run_id: str | None
    version: int | None
    state: str
    head_version: int | None = None
    error: str | None = None
    time_s: float = dataclasses.field(default_factory=time.time)


def write(store: Store, heartbeat: Heartbeat) -> None:
    """Overwrite the replica's heartbeat."""
    store.replace(layout.replica(heartbeat.replica_id), msgspec.json.encode(heartbeat))


def read_all(store: Store, run_id: str) -> list[Heartbeat]:
    """Heartbeats of the replicas of one run, by replica id; unreadable ones are skipped."""
    found = []
    for info in store.list(layout.REPLICAS):
        try:
            heartbeat = msgspec.json.decode(store.read(info.key), type=Heartbeat)
        except (msgspec.DecodeError, ObjectMissingError):
            continue
        if heartbeat.run_id == run_id:
            found.append(heartbeat)
    return found


def wait_for(store: Store, run_id: str, version: int, ack: str, timeout_s: float) -> list[Heartbeat]:
    """Block until the fleet serves a version. Wait for its upload first (`Receipt.wait`): a failed one never arrives.

    Args:
        store: The channel's store.
        run_id: The run whose replicas count.
        version: Which; a replica that serves a later one counts too.
        ack: `any`: at least one replica serves it. `all`: at least one replica is live and every live one serves it.
        timeout_s: How long to wait. The store is looked at least once.

    Returns:
        The heartbeats of the replicas that serve it.

    Raises:
        AckTimeoutError: time is up; names the live replicas that lag, with their errors.
        StoreError: the heartbeats cannot be read; a transient error is tried again until time is up.
    """
    if ack not in ("any", "all"):
        raise ConfigError(f"ack must be any or all, not {ack!r}.")
    deadline = time.monotonic() + timeout_s
    poll_s = _FIRST_POLL_S
    while True:
        try:
            heartbeats = read_all(store, run_id)
        except TransientStoreError:
            if time.monotonic() >= deadline:
                raise
        else:
            serving = [beat for beat in heartbeats if _serves(beat, version)]
            lagging = [beat for beat in heartbeats if not _serves(beat, version) and _age_s(beat) < LIVE_S]
            if serving and (ack == "any" or (not lagging and any(_age_s(beat) < LIVE_S for beat in serving))):
                return serving
            if time.monotonic() >= deadline:
                raise AckTimeoutError(_explain(store, version, timeout_s, heartbeats, lagging))
        time.sleep(max(0.0, min(poll_s, deadline - time.monotonic())))
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)


def _serves(heartbeat: Heartbeat, version: int) -> bool:
    return heartbeat.state != "failed" and heartbeat.version is not None and heartbeat.version >= version


def _age_s(heartbeat: Heartbeat) -> float:
    """Age by our clock; a replica whose clock is ahead is taken as live."""
    return time.time() - heartbeat.time_s


def _explain(store: Store, version: int, timeout_s: float, heartbeats: list[Heartbeat], lagging: list[Heartbeat]) -> str:
    published = f"Version {version} is published to {store.url}, but after {timeout_s:g} s"
    if not heartbeats:
        return (
            f"{published} no replica has ever reported to this run. Start one that follows the channel, check that its "
            "channel URL is this one, or do not ask for an acknowledgement."
        )
    if not lagging:
        ages = ", ".join(f"{beat.replica_id} ({_age_s(beat):.0f} s ago)" for beat in heartbeats)
        return f"{published} no replica is live. Last heard of: {ages}. Restart them, or set their clocks right."
    return f"{published} these replicas lag: {'; '.join(_describe(beat) for beat in lagging)}."


def _describe(heartbeat: Heartbeat) -> str:
    serves = "no version" if heartbeat.version is None else f"version {heartbeat.version}"
    error = "" if heartbeat.error is None else f", error: {heartbeat.error}"
    return f"{heartbeat.replica_id} (serves {serves}, {heartbeat.state}, {_age_s(heartbeat):.0f} s ago{error})"
