"""Heartbeats: small objects by which people and the publisher see the fleet without a connection to it.

Never needed for correctness: a lost or stale heartbeat only makes a replica look late.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec

from deltasync import layout
from deltasync.errors import ObjectMissingError
from deltasync.stores.base import Store


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
