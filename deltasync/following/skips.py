"""Objects of a channel that plans avoid for a while, because they were missing, damaged or gave wrong bits."""

from __future__ import annotations

import math
import time

SKIP_S = 60.0
"""Seconds for which a missing or damaged object is avoided."""


class SkipList:
    """Keys to avoid, each until a time and for a reason. Expired keys go at `expire`. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, str]] = {}  # until when (time.monotonic), and why

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of each key."""
        return {key: why for key, (_, why) in self._entries.items()}

    def add(self, key: str, why: str, *, for_ever: bool = False) -> None:
        """Avoid an object for `SKIP_S`, or `for_ever`: its bits are not those that it promises."""
        self._entries[key] = math.inf if for_ever else time.monotonic() + SKIP_S, why

    def remove(self, key: str) -> None:
        """Allow an object again."""
        self._entries.pop(key, None)

    def expire(self) -> None:
        """Allow objects whose time is over."""
        now_s = time.monotonic()
        self._entries = {key: entry for key, entry in self._entries.items() if now_s < entry[0]}

    def retry(self) -> None:
        """Allow missing and damaged objects again at once, but not those with wrong bits."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0] == math.inf}
