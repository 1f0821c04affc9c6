"""The activity and health of a replica (`State`, `Health`), and who waits for which version (`Waits`)."""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

from deltasync.channel.documents import VersionId
from deltasync.channel.record import StoredRecord
from deltasync.config import Pin, ReplicaSettings, parse_pin, pin_text
from deltasync.errors import (
    ApplyError,
    DeltaSyncError,
    MissingVersionError,
    NotPublishedError,
    SleepingError,
    StoreError,
    TransientStoreError,
    printable,
)
from deltasync.following.cursor import Cursor
from deltasync.following.target import Target

STALE_S, STALE_POLLS = 60.0, 20
"""A replica is stale when it could last follow more than this many seconds, and this many poll intervals,
ago.
"""


class State(enum.StrEnum):
    """The activity of a replica."""

    WAITING = "waiting"
    STAGING = "staging"
    COMMITTING = "committing"
    SERVING = "serving"
    STALE = "stale"
    SLEEPING = "sleeping"
    FAILED = "failed"
    STOPPED = "stopped"


class Health:
    """How a replica follows: what became of its last step, whether it is stale, and whether it is ready.

    Attributes:
        state: The state; never `STALE`, which `shown` may be.
        error: Why the last step failed or waits, in one sentence; None if it did not.
        good_s: When the channel could last be followed, by `time.monotonic`.
        has_followed: Whether it ever could.
        is_asking: Whether the step that is under way waits for the store, which says where to go.
        goes_around: Whether the last step failed by a chain that the next one avoids.
        follows_s: Since when this replica takes each new version, seconds since the epoch; infinite while it
            is pinned.
        lives: How often this process was suspended or restored from a snapshot.
        audited_life: How often it had been when all live bits were last audited.
    """

    def __init__(self, target: Target, cursor: Cursor, settings: ReplicaSettings) -> None:
        self.state = State.WAITING
        self.error: str | None = "The channel was not read yet."
        self.good_s, self.has_followed = time.monotonic(), False
        self.is_asking = self.goes_around = False
        self.follows_s = time.time()
        self.lives = self.audited_life = 0
        self.settings = settings
        self._target, self._cursor = target, cursor
        self._since_s = time.monotonic()  # when `state` was entered
        self._reported: BaseException | None = None  # of the last step
        self._pin: Pin = None  # of the last step
        self._served: tuple[str, int] = "", 0  # `Slot.newness` of the newest version that was served

    def enter(self, state: State) -> None:
        """Change the state."""
        if state != self.state:
            self.state, self._since_s = state, time.monotonic()

    def begin(self, pin: Pin) -> None:
        """A step begins, to where a pin points."""
        self.goes_around = False
        if pin != self._pin:
            self._pin, self.follows_s = pin, time.time() if pin is None else math.inf

    def lag_s(self, chain: Sequence[StoredRecord]) -> float | None:
        """Return the seconds since the version that `chain` led to, or its compaction, was encoded, by two
        machines' clocks.

        Call it when that version is served. None where that is no lag: the version was encoded before this
        replica followed, is older than one that was served, or a pin says when to take it.
        """
        record = chain[-1].record
        # Documents have milliseconds.
        is_news = record.created_s > self.follows_s - 0.001 and record.slot.newness > self._served
        self._served = max(self._served, record.slot.newness)
        return time.time() - record.created_s if is_news else None

    def note(self, error: BaseException | None) -> bool:
        """Set the state and the error after a step; return whether this is a failure that is not reported
        yet.
        """
        may_wait = not (self._cursor.failure or self.goes_around)
        state, text = State.FAILED, None if error is None else f"{type(error).__name__}: {error}"
        if error is None:
            state = State.SERVING
        elif isinstance(error, SleepingError):
            state, text, self.follows_s = State.SLEEPING, str(error), time.time()
        elif isinstance(error, NotPublishedError | MissingVersionError) and may_wait:
            # it is only not published yet
            first = " for the first version" if isinstance(error, NotPublishedError) else ""
            state, text = State.WAITING, f"Waiting{first}: {error}"
        elif not isinstance(error, DeltaSyncError):
            text = printable(f"Unexpected {text}")
        self.enter(state)
        self.error = text
        if state != State.FAILED:
            self.good_s = time.monotonic()
            self.has_followed = self.has_followed or state != State.SLEEPING
        is_new, self._reported = state == State.FAILED and error is not self._reported, error
        return is_new

    def stop(self) -> None:
        """The replica has stopped: it is never stale."""
        self.enter(State.STOPPED)
        self.error, self.good_s = None, math.inf

    @property
    def stuck_s(self) -> float:
        """Seconds since the channel could last be followed; before the first time, since this replica was
        made.
        """
        is_staging = self.state == State.STAGING and self.error is None
        return max(0.0, time.monotonic() - max(self.good_s, self._target.progressed_s if is_staging else 0.0))

    @property
    def stale(self) -> str | None:
        """Why the version served may be old; None if the channel could be followed lately, or does not have
        to be.
        """
        stuck_s, longest_s = self.stuck_s, max(STALE_S, STALE_POLLS * self.settings.poll_interval_s)
        is_off = self._target.version is None or self.state in (State.SLEEPING, State.STOPPED)
        if is_off or stuck_s <= longest_s:
            return None
        return f"The channel could last be followed {stuck_s:.0f} s ago. {self.error or ''}".rstrip()

    @property
    def shown(self) -> State:
        """The state that others are told."""
        return self.state if self.stale is None or self._is_refused else State.STALE

    @property
    def state_s(self) -> float:
        """Seconds for which `shown` has been that."""
        return self.stuck_s if self.stale is not None else max(0.0, time.monotonic() - self._since_s)

    def not_ready(self, pin: Pin) -> str | None:
        """Why this replica, which has a pin, should get no requests, in one sentence; None if it serves a
        version that is new enough.
        """
        identity, newest, why = self._target.version, self._cursor.newest, self.error or ""
        if self._target.held or (self.state == State.SLEEPING and identity is not None):
            return f"This server does not generate now. {why}".rstrip()
        if identity is None or newest is None:
            return f"This server serves no version of {self._cursor.reader.store.url} yet. {why}".rstrip()
        if self.lives != self.audited_life:
            return "This server was suspended, or restored from a snapshot, and its weights were not audited since."
        served, behind = identity.version, newest.version - identity.version
        is_there = served == pin if pin else 0 <= behind <= max(1, self.settings.ready_behind)
        if not is_there:
            where = f"and is pinned ({pin}); the newest is" if pin else f"{behind} behind"
            return f"This server serves version {served}, {where} version {newest.version}."
        return None if self.settings.ready_in_outage and self._is_cut_off else self.stale

    @property
    def _is_refused(self) -> bool:
        """Whether the store answered the last step, and the version that it has was refused."""
        return self._reported is not None and not isinstance(self._reported, StoreError)

    @property
    def _is_cut_off(self) -> bool:
        """Whether it is the store that keeps the replica from following: it fails, or does not answer."""
        if self._reported is None:
            return self.is_asking or self.state == State.STAGING
        return isinstance(self._reported, TransientStoreError)


class Waits:
    """The pin, and those that wait for a version. May be used from any thread.

    Attributes:
        pin: The version to stay at; None to take every new one.
        asked: Whether somebody waits, so that the next step refreshes, and retries skipped objects.
        on_step: Called after each step, from its thread.
        served: The last version that became live, and the trainer's step of its record.
        caught_up: Number of the last step that found nothing to take.
    """

    def __init__(self, target: Target, cursor: Cursor, pin: str) -> None:
        self.pin = parse_pin(pin)
        self.asked = False
        self.on_step: list[Callable[[], object]] = []
        self.served: tuple[VersionId, int | None] | None = None
        self.caught_up = -1
        self._target, self._cursor = target, cursor
        self._steps = self._pins = 0  # how many steps have begun; how often the pin was set

    def begin(self) -> int:
        """Return the number of the step that begins."""
        self._steps += 1
        return self._steps

    def set_pin(self, pin: Pin) -> None:
        """Take other versions from now on."""
        self.pin, self._pins = pin, self._pins + 1

    def future(self, version: int | None, step: int | None) -> Future[int]:
        """Return a future of the version served once that version is reached; as `Follow.request`."""
        begun, pins, future = self._steps, self._pins, Future[int]()

        def reached() -> int | None:
            pin, served = self.pin, self._target.version
            if pin is not None and version not in (None, pin):
                raise ApplyError(
                    f"This replica is pinned to version {pin} and will not serve version {version}."
                )
            if self._pins != pins and version is None and step is None:
                raise ApplyError(f"The pin of this replica was changed meanwhile to: {pin_text(pin)}.")
            if served is None:
                return None
            if version is not None:
                is_there = served.version == version if pin is not None else served.version >= version
                return served.version if is_there else None
            if self.caught_up <= begun:
                return None
            if step is None:
                return served.version
            of, at = self.served or (served, None)
            is_newest = of == served and served.epoch == self._cursor.tip.epoch
            return served.version if is_newest and at is not None and at >= step else None

        def look() -> None:
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                try:
                    if (served := reached()) is not None:
                        future.set_result(served)
                except ApplyError as error:
                    future.set_exception(error)

        self.on_step.append(look)
        future.add_done_callback(lambda _: self.on_step.remove(look))
        look()
        return future
