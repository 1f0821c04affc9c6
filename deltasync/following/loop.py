"""The one loop that follows: settle, refresh and plan, stage, commit, report. Every engine is a `Target` of it.

`Loop.catch_up` runs it in the caller's thread; `Follow.start` in a daemon thread, so that a hung store stops
nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from deltasync import limits
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import Pin, ReplicaSettings
from deltasync.errors import (
    ApplyError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FingerprintMismatchError,
    MissingVersionError,
    TransientStoreError,
    get_logger,
)
from deltasync.following.cursor import Cursor
from deltasync.following.identify import identify
from deltasync.following.poll import Poll
from deltasync.following.state import Health, State, Waits
from deltasync.following.status import Commit
from deltasync.following.target import Observer, Target
from deltasync.stores.base import ObjectInfo
from deltasync.threads import Home

logger = get_logger(__name__)

AUDIT_S = 3600.0
"""Time between two comparisons of all bits in memory with the version's fingerprints. A waiting version comes
first.
"""

_DETOURS = 8  # chains that `catch_up` gives up before it raises
_STEP_S = 60.0  # how long a caller waits for a step of another thread


class Loop:
    """Keeps a target at the version of a channel that its pin points to.

    Steps run one at a time, in the caller's thread.

    Attributes:
        reader: The channel.
        cursor: The position in it.
        commits: The last `limits.HISTORY` commits.
        health: The outcome of the last step.
        waits: The pin, and who waits for a version.
    """

    def __init__(
        self,
        reader: ChannelReader,
        target: Target,
        settings: ReplicaSettings,
        *,
        observer: Observer | None = None,
        prefetch: bool = True,
        log: logging.Logger = logger,
    ) -> None:
        self.reader, self.target = reader, target
        self.cursor = Cursor(reader, settings.max_age_s, prefetch)
        self.commits: deque[Commit] = deque(maxlen=limits.HISTORY)
        self.health = Health(target, self.cursor, settings)
        self.waits = Waits(target, self.cursor, settings.pin)
        self._observer, self._log = observer, log
        self._poll = Poll(settings.poll_interval_s)
        self._home = Home("replica")
        self._audited_s: float | None = None  # None before the target was opened
        self._stepping: Any = threading.RLock()
        self._wake, self._ended = threading.Event(), threading.Event()

    @property
    def identity(self) -> VersionId | None:
        """The version that is live, with its digest; None before the first."""
        return self.target.version

    @property
    def version(self) -> int | None:
        """The number of this version."""
        identity = self.target.version
        return None if identity is None else identity.version

    def _delay_s(self, before: VersionId | None, failure: BaseException | None) -> float:
        took = self.cursor.took_announced
        return self._poll.delay_s(self.identity != before, failure, took_announced=took)

    def _on_change(self, info: ObjectInfo | None) -> None:
        """Poll now: the store announced a record, or may have missed one (None)."""
        if info is not None:
            if (newest := self.cursor.newest) is not None and info.key == newest.key:
                return  # a poll was faster
            self.cursor.announce(info)
        self._wake.set()

    def catch_up(self, pin: Pin | None = None, *, wait_s: float = 0.0) -> int:
        """Take every step to the version of a pin, around objects that fail. Returns the number of the live
        version.

        Args:
            pin: By default the own.
            wait_s: How long to wait for the version to be published.

        Raises:
            NotPublishedError: the channel has no version yet.
            DeltaSyncError: the version cannot be reached; the version before stays live.
        """
        deadline, first, detours = time.monotonic() + wait_s, True, 0
        self.waits.asked = True
        with contextlib.ExitStack() as stack:
            while True:
                before = self.identity
                try:
                    if self.step(pin, ahead=first) and self.version is not None:
                        return self.version
                    self._delay_s(before, None)
                except DeltaSyncError as error:
                    if self.health.goes_around and detours < _DETOURS:
                        detours += 1
                        self._log.warning("Planning around it.")  # `_report` has logged the error
                        continue
                    is_passing = self.cursor.failure is None or isinstance(error, TransientStoreError)
                    if not is_passing or time.monotonic() >= deadline:
                        raise
                    if first:
                        stack.enter_context(self._poll.watching(self.reader.store, self._on_change))
                    first = False  # from here on one request at a time
                    delay_s = self._delay_s(self.identity, self.cursor.failure)
                    self._wake.clear()
                    self._wake.wait(min(delay_s, max(0.0, deadline - time.monotonic())))

    def step(
        self,
        pin: Pin | None = None,
        *,
        known: ObjectInfo | None = None,
        ahead: bool = False,
        audits: bool = False,
    ) -> bool:
        """Take one step to where a pin points (by default the own). Returns whether nothing is left to take.

        Args:
            pin: The version to go to.
            known: The listing entry of a new record, from an event.
            ahead: As in `Cursor.next`.
            audits: Audit the weights when that is due.

        Raises:
            TransientStoreError: another thread's step has not ended for a minute.
            ConfigError: this thread is inside of a step, which a signal handler interrupted. Nothing was
                done.
            DeltaSyncError: the step failed. The version before stays live, and `error` says why.
        """
        self._check_caller()
        if not self._stepping.acquire(timeout=_STEP_S):
            raise TransientStoreError(f"{self.reader.store.url} has not answered for {_STEP_S:g} s.")
        try:
            begun = self.waits.begin()
            try:
                if known is not None:
                    self.cursor.announce(known)
                if is_done := self._step(self.waits.pin if pin is None else pin, ahead, audits):
                    self.waits.caught_up = begun
                self._report(None)
                return is_done
            except (KeyboardInterrupt, SystemExit):
                self.health.enter(State.WAITING if self.identity is None else State.SERVING)
                raise
            except BaseException as error:
                self._report(error)
                raise
        finally:
            self._stepping.release()
            for notify in [*self.waits.on_step]:
                notify()

    def _step(self, pin: Pin, ahead: bool, audits: bool) -> bool:
        """One step of the protocol; as `step`, which reports how it went."""
        target, cursor, health = self.target, self.cursor, self.health
        if audits:
            self._wake.clear()  # this step serves everything that woke the loop until now
        asked, self.waits.asked = self.waits.asked, False
        health.begin(pin)

        # settle: which bits are live?
        if asked:
            cursor.skips.retry()
        if self._audited_s is None:
            cursor.locate()
            target.open(self._identify)
            self._audited_s, asked = time.monotonic(), False
        elif not target.is_settled(asked):
            self._settle()
        elif health.lives != health.audited_life:
            self._audit()

        # refresh and plan: where to go?
        health.is_asking = True
        try:
            pushed = self._poll.is_pushed
            chain = cursor.next(self.identity, pin=pin, refresh=asked, ahead=ahead or asked, pushed=pushed)
        finally:
            health.is_asking = False
        if not chain:
            if audits:
                self._audit_if_due()
            return True

        # stage and commit, unless it was stopped meanwhile; a commit confirms its bits, or rolls back
        try:
            if audits and self._ended.is_set():
                return False
            health.enter(State.STAGING)
            staged = target.stage(chain)
            if staged is None or (audits and self._ended.is_set()):
                return False
            health.enter(State.COMMITTING)
            commit = target.commit(staged)
        except (FingerprintMismatchError, CorruptDataError, MissingVersionError) as error:
            key = None if isinstance(error, FingerprintMismatchError) else error.key
            if key is not None or isinstance(error, FingerprintMismatchError):
                cursor.mark_bad(chain, key, error)
                health.goes_around = True
            raise
        self._committed(commit, chain)
        return False

    def _identify(self, total: int) -> StoredRecord | None:
        """Find the version whose model has this fingerprint; its step counts as served."""
        found = identify(self.reader, self.cursor.locate(), total)
        self.waits.served = None if found is None else (found.version, found.record.step)
        return found

    def _settle(self) -> None:
        before, lives = self.identity, self.health.lives
        self.target.settle()
        self._audited_s, self.health.audited_life = time.monotonic(), lives
        if self.identity != before:
            self.cursor.clear_bad()

    def _audit_if_due(self) -> None:
        if self._audited_s is not None and time.monotonic() - self._audited_s >= AUDIT_S:
            self._audit()

    def _audit(self) -> None:
        """Raise ApplyError if bits in memory changed by themselves. The next step then loads full weights."""
        before = self.version
        self._settle()
        if before is not None and self.identity is None:
            raise ApplyError(
                f"The weights in memory were not those of version {before} any more; loading full weights."
            )

    def audit(self) -> bool:
        """Check every live bit, against faults that no commit notices; return whether all are those of
        `version`.
        """
        with self.between_steps():
            self._settle()
        return self.identity is not None

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[Target]:
        """Return a context in which the target is not used by the loop. Raises ConfigError as `step`."""
        self._check_caller()
        with self._stepping:
            yield self.target

    def _check_caller(self) -> None:
        self._home.check()
        if self._stepping._is_owned():
            raise ConfigError(
                "A replica was called inside of one of its own calls, as from a signal handler. Nothing was "
                "done. Set a "
                "flag there, and call it once the other call has returned."
            )

    def _committed(self, commit: Commit, chain: Sequence[StoredRecord]) -> None:
        """Record a commit in the status, the metrics and the log."""
        self.waits.served = chain[-1].version, chain[-1].record.step
        commit = msgspec.structs.replace(
            commit,
            lag_s=self.health.lag_s(chain),
            payload_bytes=sum(stored.record.payload_bytes for stored in chain),
            served_at=time.time(),
        )
        self.commits.append(commit)
        if self._observer is not None:
            self._observer.committed(commit, chain)
        self._log.info(
            "deltasync serves version=%(version)d digest=%(sha256).12s steps=%(steps)d changed=%(changed)d "
            "stage_s=%(stage_s).3f pause_s=%(pause_s).4f scatter_s=%(scatter_s).4f reload_s=%(reload_s).3f "
            "lag_s=%(lag)s",
            msgspec.structs.asdict(commit)
            | {"lag": "-" if commit.lag_s is None else f"{commit.lag_s:.3f}", "steps": len(chain)},
        )

    def _report(self, error: BaseException | None) -> None:
        """Set the state and the error after a step, and tell them."""
        health, before = self.health, self.health.error
        is_new_failure = health.note(error)
        if health.error is not None and health.error != before:
            if isinstance(error, DeltaSyncError):
                log = self._log.error if health.state == State.FAILED else self._log.info
                log("deltasync: %s", health.error)
            else:
                self._log.error("deltasync failed unexpectedly", exc_info=error)
        if self._observer is not None:
            if error is not None and is_new_failure:
                self._observer.failed(error)
            self._observer.stepped(self)
