"""Which of a channel's versions a replica goes to: the newest, or another one for evaluation or as a canary."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from deltasync.config import PIN
from deltasync.errors import ConfigError


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
