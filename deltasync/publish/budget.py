"""What folds and anchors may cost.

They are paid from a budget, `SHARE` of the bytes of deltas, so that they stay a small part of what is stored at any rate of
change: the next fold is written once it fits. Full weights take a fold's place where it is no longer small.
"""

from __future__ import annotations

from collections.abc import Callable

SHARE = 0.33
"""Bytes of folds and anchors that may be stored for each byte of delta."""

LARGE = 0.5
"""A fold of more than this part of the weights is not written; full weights are, once they fit into the budget."""

LEAST_FOLDED = 16
"""Versions that the next fold covers at least: fewer are read about as soon without it."""


class Budget:
    """What folds and anchors may cost, and which of them is next. `deltasync cost` computes with it, too."""

    def __init__(self, folded: int = 0) -> None:
        self.folded = folded  # the version where the newest fold ends, or that has the full weights
        self._earned = self._spent = self._needed = 0.0

    def earn(self, delta_bytes: float) -> None:
        """Note the bytes of a delta."""
        self._earned += SHARE * delta_bytes

    def choose(self, version: int, full_bytes: float, fold_bytes: Callable[[], float], *, folds: bool) -> str | None:
        """Return `fold` or `anchor` if the budget pays for that now.

        `fold_bytes` estimates the next fold; it is called only where that may decide. Without `folds` there is none.
        """
        left = self._earned - self._spent
        if version - self.folded < LEAST_FOLDED or left < self._needed:
            return None
        size = fold_bytes() if folds else float(full_bytes)
        is_fold = folds and size <= LARGE * full_bytes
        self._needed = size if is_fold else float(full_bytes)
        return None if left < self._needed else "fold" if is_fold else "anchor"

    def end(self, version: int, paid_bytes: float = 0.0) -> None:
        """Note that a version has the newest fold or full weights, for which the budget paid so many bytes."""
        self.folded, self._needed = version, 0.0
        self._spent += paid_bytes
