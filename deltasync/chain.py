"""Which objects lead from what a replica has to what it wants. Pure: no I/O, no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deltasync.errors import MissingVersionError
from deltasync.manifest import Manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One move of a replica.

    Attributes:
        manifest: The version it leads to.
        use_anchor: Load the full weights; otherwise apply the delta.
    """

    manifest: Manifest
    use_anchor: bool

    @property
    def payload_bytes(self) -> int:
        """Bytes to download for it."""
        part = self.manifest.anchor if self.use_anchor else self.manifest.delta
        assert part is not None
        return part.payload_bytes


def plan(current: int | None, target: int, manifests: Mapping[int, Manifest]) -> list[Step]:
    """The cheapest sequence of steps, in bytes, from `current` to `target`.

    Args:
        current: Version the replica's bits have, None if they are of no version.
        target: Version to reach.
        manifests: Those that were read: at least the target's chain back to `current` or to an anchor.

    Raises:
        MissingVersionError: nothing leads there.
    """
    # Cheapest way to each version; a delta only leads forward, so ascending order settles every base first.
    best: dict[int, tuple[int, list[Step]]] = {}
    if current is not None:
        best[current] = (0, [])
    for version in sorted(v for v in manifests if v <= target):
        manifest = manifests[version]
        ways = [best[version]] if version in best else []
        if manifest.anchor is not None:
            step = Step(manifest, use_anchor=True)
            ways.append((step.payload_bytes, [step]))
        if manifest.delta is not None and manifest.delta.base_version in best:
            step = Step(manifest, use_anchor=False)
            cost, steps = best[manifest.delta.base_version]
            ways.append((cost + step.payload_bytes, [*steps, step]))
        if ways:
            best[version] = min(ways, key=lambda way: way[0])
    if target not in best:
        start = "nothing" if current is None else f"version {current}"
        raise MissingVersionError(f"No chain of deltas leads from {start} to version {target}, and no anchor does.")
    return best[target][1]
