"""The budget of a publisher for compactions and anchors.

They are paid from a budget, `SHARE` of the bytes of deltas, so that they stay a small part of what is stored at any rate of
change: the next compaction is written once it fits. Full weights take a compaction's place where it is no longer small.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.33  # bytes of compactions and anchors that may be stored for each byte of delta

LARGE = 0.5
"""A compaction of more than this part of the weights is not written; full weights are, once they fit into the budget."""

LEAST_COMPACTED = 16  # versions that the next compaction covers at least: fewer are read about as soon without it


class Budget:
    """Decides when the next compaction or anchor is affordable."""

    def __init__(self, compacted: int = 0) -> None:
        self.compacted = compacted  # the version where the newest compaction ends, or that has the full weights
        self._earned = self._spent = self._needed = 0.0

    def earn(self, delta_bytes: float) -> None:
        """Note the bytes of a delta."""
        self._earned += SHARE * delta_bytes

    def choose(
        self, version: int, full_bytes: float, compaction_bytes: Callable[[], float], *, compactions: bool
    ) -> str | None:
        """Return `compaction` or `anchor` if the budget pays for that now.

        `compaction_bytes` estimates the next compaction; it is called only where that may decide. Without `compactions`
        there is none.
        """
        left = self._earned - self._spent
        if version - self.compacted < LEAST_COMPACTED or left < self._needed:
            return None
        size = compaction_bytes() if compactions else float(full_bytes)
        is_compaction = compactions and size <= LARGE * full_bytes
        self._needed = size if is_compaction else float(full_bytes)
        return None if left < self._needed else "compaction" if is_compaction else "anchor"

    def end(self, version: int, paid_bytes: float = 0.0) -> None:
        """Note that a version has the newest compaction or full weights, for which the budget paid so many bytes."""
        self.compacted, self._needed = version, 0.0
        self._spent += paid_bytes
