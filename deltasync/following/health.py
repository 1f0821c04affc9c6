"""The state of a replica, the error that keeps it from newer versions, and for how long it could not follow."""

from __future__ import annotations

import logging
import math
import time

from deltasync.channel import heartbeat
from deltasync.errors import DeltaSyncError, MissingVersionError, NotPublishedError, SleepingError, printable

STALE_S, STALE_POLLS = 60.0, 20
"""A replica is stale when it could last follow more than this many seconds, and this many poll intervals, ago."""


class Health:
    """State and error of a follow loop; it sets them after each step (`report`), and `state` also within a step.

    Attributes:
        state: One of the states of `Status.state`, but never `stale`.
        error: Why the last step failed, in one sentence; None if it did not.
    """

    def __init__(self, poll_interval_s: float, log: logging.Logger) -> None:
        self.state = "waiting"
        self.error: str | None = "The channel was not read yet."
        self._poll_interval_s = poll_interval_s
        self._log = log
        self._reported: BaseException | None = None  # of the last step
        self._good_s = time.monotonic()

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
