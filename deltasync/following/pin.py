"""The version that a replica goes to (`Pin`), and callers that wait for one (`Waits`)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from deltasync.channel.documents import VersionId
from deltasync.config import PIN
from deltasync.errors import ConfigError, PinnedError

Pin = int | None
"""The version that a replica stays at; None to take every new one."""


def parse_pin(text: str) -> Pin:
    """Parse `newest` or a version's number. Raises ConfigError for anything else."""
    if re.fullmatch(PIN, text.strip()) is None:
        raise ConfigError(f"A pin is newest or a version's number, not {text!r}.")
    return None if text.strip() == "newest" else int(text)


def pin_text(pin: Pin) -> str:
    """Return the text that `parse_pin` parses."""
    return "newest" if pin is None else str(pin)


Reached = Callable[[], int | None]
"""Returns the number of the version served once that ends a wait, else None. Raises PinnedError."""


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

    def wait(self, reached: Reached, timeout_s: float) -> int | None:
        """Return the number of the version served once that ends a wait; None if it has not after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while (served := reached()) is None and (left_s := deadline - time.monotonic()) > 0:
                self.changed.wait(left_s)
        return served

    def begin(
        self, version: int | None, step: int | None, now: Callable[[], tuple[Pin, VersionId | None, str | None]]
    ) -> Reached:
        """Return the check of a wait that begins now.

        Args:
            version: The version to wait for.
            step: The trainer's step to wait for. With neither, the newest version when the wait began.
            now: Returns the pin, the version that is live, and the newest epoch of the channel.
        """
        begun, pins = self.begun, self.pins

        def reached() -> int | None:
            pin, served, epoch = now()
            if pin is not None and version not in (None, pin):
                raise PinnedError(f"This replica is pinned to version {pin} and will not serve version {version}.")
            if self.pins != pins and version is None and step is None:
                raise PinnedError(f"The pin of this replica was changed meanwhile to: {pin_text(pin)}.")
            if served is None:
                return None
            if version is not None:
                is_there = served.version == version if pin is not None else served.version >= version
                return served.version if is_there else None
            if self._caught_up <= begun:
                return None
            if step is None:
                return served.version
            of, at = self.served or (served, None)
            is_newest = of == served and served.epoch == epoch
            return served.version if is_newest and at is not None and at >= step else None

        return reached
