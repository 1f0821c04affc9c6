"""Which objects lead from what a replica has to what it wants. Pure: no I/O, no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from deltasync.errors import MissingVersionError

STEP_BYTES = 1 << 15
"""What a step costs beside its payload, in bytes that could be fetched meanwhile: two requests and a commit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One move of a replica, to `version`: by an anchor, by the version's delta, or by a fold.

    Attributes:
        manifest_sha256: Of the manifest of `version`, None if it is not known.
        base_version: The version it starts from, None for an anchor, which starts from nothing.
        payload_bytes: Bytes to download.
        fold: Key of the fold's document; None for anchors and the versions' own deltas.
    """

    version: int
    manifest_sha256: str | None
    base_version: int | None
    payload_bytes: int
    fold: str | None = None

    @property
    def use_anchor(self) -> bool:
        """Whether the full weights are loaded; otherwise a delta or fold is applied."""
        return self.base_version is None


def plan(current: int | None, target: int, steps: Iterable[Step]) -> list[Step]:
    """The cheapest sequence of these steps from `current` to `target`.

    Args:
        current: Version the replica's bits have, None if they are of no version.
        target: Version to reach.
        steps: What there is to choose from.

    Raises:
        MissingVersionError: nothing leads there.
    """
    # Cheapest way to each version; a delta only leads forward, so ascending order settles every base first.
    cost: dict[int, int] = {}
    last: dict[int, Step] = {}
    if current is not None:
        cost[current] = 0
    for step in sorted((step for step in steps if step.version <= target), key=lambda step: step.version):
        before = 0 if step.base_version is None else cost.get(step.base_version)
        if before is None:
            continue
        total = before + step.payload_bytes + STEP_BYTES
        if step.version not in cost or total < cost[step.version]:
            cost[step.version], last[step.version] = total, step
    if target not in cost:
        start = "nothing" if current is None else f"version {current}"
        raise MissingVersionError(f"No chain of deltas leads from {start} to version {target}, and no anchor does.")
    way: list[Step] = []
    version: int | None = target
    while version is not None and version in last:
        way.append(last[version])
        version = last[version].base_version
    return way[::-1]
