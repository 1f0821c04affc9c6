"""The status of a replica: its state and error, the versions that it committed, and its heartbeats in the channel."""

from __future__ import annotations

import logging
import math
import threading
import time

import msgspec

from deltasync.channel import heartbeat, keys
from deltasync.channel.heartbeat import Heartbeat
from deltasync.errors import (
    DeltaSyncError,
    MissingVersionError,
    NotPublishedError,
    ObjectMissingError,
    SleepingError,
    describe,
    get_logger,
    printable,
)
from deltasync.stores.base import Store
from deltasync.threads import daemon

logger = get_logger(__name__)

SHOWN = 5
"""How many names of ignored tensors a status has."""

_SCARCE_S = 45.0  # less than `heartbeat.LIVE_S`
_LOOK_S = 60.0  # how often a replica looks for others of its name
_LAST_S = 5.0  # how long the last heartbeat may delay the end of a process


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One version that became live.

    Attributes:
        sha256: The digest of its record.
        changed: The number of elements that changed.
        stage_s: Time to fetch, check, decode and translate it, while the weights are in use.
        pause_s: How long the engine made no tokens.
        scatter_s: The share of the pause for writing live weights, or the mirror of the tensors that take the fallback.
        reload_s: The share of the pause for loading the layers of those tensors again.
        lag_s: From encoding, by the publisher's clock, until the version was served; None where `ChannelCursor.lag_s` is.
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
        boot: Identifies this start of the replica, whatever its name is.
        state: `waiting`, `staging`, `committing`, `serving`, `stale`, `sleeping`, `failed` or `stopped`.
        followed_s_ago: Seconds since the channel could last be followed; None before the first time.
        error: The reason why the replica is not at a newer version, in one sentence; None if there is none.
        ignored_tensors: How many of the channel's tensors the engine does not compute with: they are in no proof.
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
    followed_s_ago: float | None = None
    error: str | None = None
    trusted_keys: list[str] | None = None
    ignored_tensors: int = 0
    ignored: list[str] = []
    commits: list[Commit] = []


describe(Commit, Status)


def log_commit(log: logging.Logger, commit: Commit, steps: int) -> None:
    """Log a commit of a chain of `steps` records, as fields."""
    lag = "-" if commit.lag_s is None else f"{commit.lag_s:.3f}"
    log.info(
        "deltasync serves version=%(version)d digest=%(sha256).12s steps=%(steps)d changed=%(changed)d "
        "stage_s=%(stage_s).3f pause_s=%(pause_s).4f scatter_s=%(scatter_s).4f reload_s=%(reload_s).3f lag_s=%(lag_s)s",
        msgspec.structs.asdict(commit) | {"lag_s": lag, "steps": steps},
    )


_WARNED = "warned"


class HeartbeatWriter:
    """Writes a replica's heartbeats in a daemon thread, at least every `interval_s`; a hung store stops nothing else.

    A channel that is gone gets none, because writing one would make its folder again. While little is left of a quota that
    the trainer shares (`Store.is_scarce`), there is one every `_SCARCE_S`, whatever changes.
    """

    def __init__(self, store: Store, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._next: Heartbeat | None = None
        self._last: tuple[object, ...] = ()
        self._last_s = -math.inf
        self._thread: threading.Thread | None = None
        self._looked_s = -math.inf
        self._others: dict[str, object] = {}  # the heartbeats of other boots of this name, as they were at the first look

    @property
    def is_used(self) -> bool:
        """Whether a heartbeat was ever to be written."""
        return self._thread is not None

    def update(self, status: Status) -> None:
        """Have a heartbeat written if the status changed or the last one is old. An unwritten earlier one is dropped."""
        error = None if status.state == "stale" else status.error  # which says for how long
        content, now_s = (status.epoch, status.sha256, status.state, error), time.monotonic()
        since_s = now_s - self._last_s
        if since_s < _SCARCE_S and self._store.is_scarce:
            return
        if (content != self._last or since_s >= self._interval_s) and self._submit(status) is not None:
            self._last, self._last_s = content, now_s

    def stop(self, status: Status) -> None:
        """Write the last heartbeat, for a bounded time."""
        if (thread := self._submit(status)) is not None:
            thread.join(_LAST_S)

    def _submit(self, status: Status) -> threading.Thread | None:
        """Have the thread write a heartbeat, and return the thread; None if the system has none for it now."""
        names = Heartbeat.__dataclass_fields__.keys() - {"time_s"}
        with self._changed:
            self._next = Heartbeat(**{name: getattr(status, name) for name in names})
            self._changed.notify()
        if self._thread is None:
            thread = daemon("heartbeat", self._run)
            try:
                thread.start()
            except RuntimeError:
                logger.exception("deltasync could not begin a heartbeat")
                return None
            self._thread = thread
        return self._thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None)
                beat, self._next = self._next, None
            assert beat is not None
            try:
                self._store.read_range(keys.CHANNEL, 0, 1)
                heartbeat.write(self._store, beat)
                self._look_for_others(beat)
            except ObjectMissingError:
                pass
            except DeltaSyncError as error:  # nothing depends on heartbeats
                logger.warning("deltasync: heartbeat not written: %s", error)
            except Exception:
                logger.exception("deltasync could not write a heartbeat")
            if beat.state == heartbeat.STOPPED and self._next is None:
                return

    def _look_for_others(self, beat: Heartbeat) -> None:
        """Warn of each replica of this name that writes heartbeats while this one runs; one that has ended writes none."""
        now_s = time.monotonic()
        if beat.boot is None or now_s - self._looked_s < _LOOK_S:
            return
        is_first, self._looked_s = self._looked_s == -math.inf, now_s
        for boot, info in heartbeat.others(self._store, beat.replica_id, beat.boot).items():
            state = info.bytes, info.modified_s, info.content
            before = self._others.setdefault(boot, state if is_first else None)
            if before not in (state, _WARNED):
                self._others[boot] = _WARNED
                logger.warning(
                    "deltasync: another replica is named %s too: its heartbeat %s is not this one's (boot %s). They count "
                    "as two; give each its own DELTASYNC_REPLICA_ID.",
                    *(beat.replica_id, info.key, beat.boot),
                )


STALE_S, STALE_POLLS = 60.0, 20
"""A replica is stale when it could last follow more than this many seconds, and this many poll intervals, ago."""


class Health:
    """State and error of a follow loop; it sets them after each step (`report`), and `state` also within a step.

    Attributes:
        state: One of the states of `Status.state`, but never `stale`.
        error: Why the last step failed, in one sentence; None if it did not.
        has_followed: Whether the channel could ever be followed.
    """

    def __init__(self, poll_interval_s: float, log: logging.Logger) -> None:
        self.state = "waiting"
        self.error: str | None = "The channel was not read yet."
        self._poll_interval_s = poll_interval_s
        self._log = log
        self._reported: BaseException | None = None  # of the last step
        self._good_s = time.monotonic()
        self.has_followed = False

    def stuck_s(self, progressed_s: float) -> float:
        """Seconds since the channel could last be followed; `progressed_s` is `Target.progressed_s`."""
        is_staging = self.state == "staging" and self.error is None
        return max(0.0, time.monotonic() - max(self._good_s, progressed_s if is_staging else 0.0))

    def stale(self, progressed_s: float) -> str | None:
        """Say that the version served may be old; None if the channel could be followed lately, or does not have to be."""
        stuck_s = self.stuck_s(progressed_s)
        if self.state in ("sleeping", heartbeat.STOPPED) or stuck_s <= max(STALE_S, STALE_POLLS * self._poll_interval_s):
            return None
        return f"The channel could last be followed {stuck_s:.0f} s ago. {self.error or ''}".rstrip()

    def report(self, error: BaseException | None, *, may_wait: bool) -> bool:
        """Set state and error after a step.

        Args:
            error: The exception of the step, None if there was none.
            may_wait: Whether a version that is missing only is not published yet.

        Returns:
            Whether this is another failure than that of the last step.
        """
        before = self.error
        if error is None:
            self.state, self.error = "serving", None
        elif isinstance(error, SleepingError):
            self.state, self.error = "sleeping", str(error)
        elif isinstance(error, NotPublishedError | MissingVersionError) and may_wait:
            first = " for the first version" if isinstance(error, NotPublishedError) else ""
            self.state, self.error = "waiting", f"Waiting{first}: {error}"
        elif isinstance(error, DeltaSyncError):
            self.state, self.error = "failed", f"{type(error).__name__}: {error}"
        else:
            self.state, self.error = "failed", printable(f"Unexpected {type(error).__name__}: {error}")
        if self.state != "failed":
            self._good_s = time.monotonic()
            self.has_followed = self.has_followed or self.state != "sleeping"
        is_new = self.state == "failed" and error is not self._reported
        self._reported = error
        if self.error is not None and self.error != before:
            if isinstance(error, DeltaSyncError):
                (self._log.error if self.state == "failed" else self._log.info)("deltasync: %s", self.error)
            else:
                self._log.error("deltasync failed unexpectedly", exc_info=error)
        return is_new

    def stop(self) -> None:
        """Set the state of a replica that follows no more; it is never stale."""
        self.state, self.error, self._good_s = heartbeat.STOPPED, None, math.inf
