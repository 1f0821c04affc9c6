"""The version that a replica goes to (`Pin`), and callers that wait for one (`Waits`)."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable
from typing import Self

from deltasync.channel.documents import VersionId
from deltasync.config import PIN
from deltasync.errors import ConfigError, PinnedError


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """Which versions a replica takes.

    Attributes:
        version: The version to stay at; None to follow the channel.
        every: Take only versions whose number is a multiple of this.
        behind: Stay this many versions behind the newest.
    """

    version: int | None = None
    every: int = 1
    behind: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `newest`, a version's number, `every K` or `K behind`. Raises ConfigError for anything else."""
        found = re.fullmatch(PIN, text.strip())
        if found is None:
            raise ConfigError(f"A pin is newest, a version, `every K` or `K behind`, not {text!r}.")
        return cls(**{name: int(number) for name, number in found.groupdict().items() if number is not None})

    def of(self, newest: int) -> int:
        """Return the number of the version to go to; 0 if there is none yet."""
        if self.version is not None:
            return self.version
        return max(0, newest - self.behind) // self.every * self.every

    def is_near(self, served: int, newest: int, within: int) -> bool:
        """Whether `served` is the version that the pin points to, or with a moving pin at most `within` versions before it.

        With `every` K, up to K versions are always near.
        """
        if self.version is not None:
            return served == self.version
        return 0 <= self.of(newest) - served <= max(within, self.every)

    def __str__(self) -> str:
        if self.version is not None:
            return str(self.version)
        return f"every {self.every}" if self.every > 1 else f"{self.behind} behind" if self.behind else "newest"


NEWEST = Pin()
"""Take every version of the channel."""


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
            if pin.version is not None and version not in (None, pin.version):
                raise PinnedError(f"This replica is pinned to version {pin.version} and will not serve version {version}.")
            if self.pins != pins and version is None and step is None:
                raise PinnedError(f"The pin of this replica was changed meanwhile to: {pin}.")
            if served is None:
                return None
            if version is not None:
                is_there = served.version == version if pin.version is not None else served.version >= version
                return served.version if is_there else None
            if self._caught_up <= begun:
                return None
            if step is None:
                return served.version
            of, at = self.served or (served, None)
            is_newest = of == served and served.epoch == epoch
            return served.version if is_newest and at is not None and at >= step else None

        return reached
