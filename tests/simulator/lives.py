"""The truth about the replicas that write heartbeats: none is overlooked, and the version that it serves
stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from deltasync.channel import keys
from deltasync.serve.heartbeat import LIVE_S, STOPPED, Heartbeat
from tests.simulator.scheduler import Process

if TYPE_CHECKING:
    from tests.simulator.store import Disk

SURE_S = 15.0  # before a heartbeat is too old
LOOK_S = 600.0  # no tool keeps a look at the heartbeats for longer


@dataclasses.dataclass
class Life:
    """What the store took of a replica's heartbeats, whoever wrote to the same key afterwards.

    Attributes:
        stored_s: When it took the last one.
        named_s: Since when they name one version, whose record was there then; None if it was not.
        held_s: For how long the process had been suspended when the last one was taken.
    """

    key: str
    beat: Heartbeat
    data: bytes
    stored_s: float
    named_s: float | None
    held_s: float


class Lives:
    """The lives of all processes with heartbeats in a store.

    Attributes:
        early: A version that was deleted though somebody without heartbeats may serve it; None if there was
            none.
    """

    def __init__(self, disk: Disk, grace_s: float) -> None:
        self._disk, self._grace_s = disk, grace_s
        self._held: dict[tuple[Process, str], Life] = {}
        self._looked: dict[Process, float] = {}
        self._began: dict[Process, tuple[float, float]] = {}
        self._doubted: list[Life] = []
        self.early: str | None = None

    @property
    def _now_s(self) -> float:
        return self._disk.scheduler.now_s

    def hear(self, process: Process, key: str, data: bytes) -> None:
        """The store took a heartbeat."""
        beat, before = msgspec.json.decode(data, type=Heartbeat), self._held.get((process, key))
        if before is not None and before.beat.serving == beat.serving:
            named_s = before.named_s
        else:
            is_there = beat.serving is not None and beat.serving.slot.key in self._disk.objects
            named_s = self._now_s if is_there else None
        self._held[process, key] = Life(key, beat, data, self._now_s, named_s, process.held_s)

    def look(self, process: Process) -> None:
        """Somebody lists the heartbeats."""
        self._looked[process] = self._now_s

    def begin(self, process: Process) -> None:
        """A process follows from now on. The last heartbeat of what it followed before may not have been
        taken.
        """
        self._began[process] = self._now_s, process.held_s

    def age_s(self, process: Process) -> float:
        """Seconds since a process followed, or the store took a heartbeat of it, while it ran; 0 while it is
        refused.
        """
        lives = [(life.stored_s, life.held_s) for (owner, _), life in self._held.items() if owner is process]
        stored_s, held_s = max([self._began[process], *lives])
        if self._now_s < process.refused_until_s + SURE_S:
            return 0.0
        return self._now_s - stored_s - (process.held_s - held_s)

    def drop(self, process: Process, key: str) -> None:
        """Somebody deletes an object: replicas that it may not have seen yet do not count, and newest
        versions stay.
        """
        if not key.startswith(
            (keys.VERSIONS, keys.PARTS, keys.ANCHORS, keys.COMPACTIONS, keys.ANNOUNCEMENTS)
        ):
            return
        slot, sure_s = keys.slot_of(key), self._now_s - self._grace_s + SURE_S
        if slot is not None and process.name != "end":  # which waits for no grace
            stored = ((keys.slot_of(other), held.stored_s) for other, held in self._disk.objects.items())
            newness = [other.newness for other, stored_s in stored if other is not None and stored_s < sure_s]
            if slot.newness >= max(newness, default=slot.newness):
                self.early = self.early or f"{key} is deleted, and was the newest within the grace"
        looked_s = self._looked.get(process, -LOOK_S)
        looked_s = looked_s if self._now_s - looked_s < LOOK_S else self._now_s
        for life in self._recent(max(self._grace_s, LIVE_S) - SURE_S):
            if life.named_s is not None and life.named_s < looked_s and life not in self._doubted:
                self._doubted.append(life)

    def doubted(self) -> Sequence[Heartbeat]:
        """Return the replicas that live, and whose versions may not be readable any more since the last
        call.
        """
        found, self._doubted = self._doubted, []
        held = [
            life
            for life in self._held.values()
            if any(life.beat.serving == each.beat.serving for each in found)
        ]
        return [life.beat for life in held if life.beat.serving is not None]

    def overlooked(
        self, found: Sequence[Heartbeat], version: int, listed_s: float, run_id: str
    ) -> str | None:
        """Return whom an acknowledgement leaves out, of those in a listing of `listed_s`, or takes for
        another; or None.
        """
        due: dict[str, list[Life]] = {}
        for life in self._recent(LIVE_S - SURE_S):
            if (
                life.stored_s < listed_s
                and life.beat.run_id == run_id
                and life.beat.pin is None
                and self._is_there(life)
            ):
                due.setdefault(life.beat.replica_id, []).append(life)
        for name, lives in due.items():
            for life in lives:
                if life.beat.version is None or life.beat.version < version:
                    return f"{name}, which serves {life.beat.version}, acknowledges version {version}"
            said = [
                beat for beat in found if beat.replica_id == name or beat.replica_id.startswith(f"{name} (")
            ]
            if len(said) < len(lives):
                return f"{len(lives)} live replicas are named {name}, and {len(said)} acknowledge version {version}"
        return None

    def _recent(self, within_s: float) -> Iterator[Life]:
        for life in self._held.values():
            if self._now_s - life.stored_s < within_s and life.beat.state != STOPPED:
                yield life

    def _is_there(self, life: Life) -> bool:
        """Whether its heartbeat is there, or what a copy of its process wrote over it."""
        held = self._disk.objects.get(life.key)
        same = [other.data for other in self._held.values() if other.key == life.key]
        return held is not None and held.data in same
