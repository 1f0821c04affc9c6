"""Callers that wait for a version, and whether it is served."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from deltasync.channel.documents import VersionId
from deltasync.errors import PinnedError
from deltasync.following.pin import Pin

Reached = Callable[[], int | None]
"""Returns the number of the version served once that ends a wait, else None. Raises PinnedError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """A version or a trainer's step that a caller waits for; with neither, the newest version when the wait began.

    Attributes:
        begun: Steps of the loop that had begun.
        pins: How often the pin had been set.
    """

    version: int | None
    step: int | None
    begun: int
    pins: int


class Waits:
    """Counts the steps of a follow loop, and says which waits they have ended. May be used from any thread.

    Attributes:
        begun: Number of steps that have begun.
        pins: How often the pin was set.
        served: The version served and the trainer's step of its record, None if the record was not read.
        changed: Notified after each step.
    """

    def __init__(self) -> None:
        self.begun = self.pins = 0
        self.served: tuple[VersionId, int | None] | None = None
        self.changed = threading.Condition()
        self._caught_up = -1  # number of the last step that found nothing to take

    def caught_up(self, step: int) -> None:
        """Note that this step found nothing to take."""
        self._caught_up = step

    def notify(self) -> None:
        """Wake everybody who waits for `changed`."""
        with self.changed:
            self.changed.notify_all()

    def begin(self, version: int | None, step: int | None) -> Wait:
        """Return a wait that begins now."""
        return Wait(version, step, self.begun, self.pins)

    def reached(self, wait: Wait, pin: Pin, served: VersionId | None, epoch: str | None) -> int | None:
        """Return the number of the version served if it ends a wait, else None.

        Args:
            wait: The wait.
            pin: The pin as it is now.
            served: The version that is live.
            epoch: The newest epoch of the channel.

        Raises:
            PinnedError: the pin keeps the replica from there.
        """
        if pin.version is not None and wait.version not in (None, pin.version):
            raise PinnedError(f"This replica is pinned to version {pin.version} and will not serve version {wait.version}.")
        if self.pins != wait.pins and wait.version is None and wait.step is None:
            raise PinnedError(f"The pin of this replica was changed meanwhile to: {pin}.")
        if served is None:
            return None
        if wait.version is not None:
            is_there = served.version == wait.version if pin.version is not None else served.version >= wait.version
            return served.version if is_there else None
        if self._caught_up <= wait.begun:
            return None
        if wait.step is None:
            return served.version
        of, step = self.served or (served, None)
        is_newest = of == served and served.epoch == epoch
        return served.version if is_newest and step is not None and step >= wait.step else None

    def until(self, reached: Reached, timeout_s: float) -> int | None:
        """Wait until a check gives the number of the version served, and return it; None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while (served := reached()) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self.changed.wait(left_s)
        return served
