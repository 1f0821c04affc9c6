"""What to forget and what to prune: decisions over documents and listings that were read before. Pure: no I/O, no weights.

`forget` takes versions out of a channel by deleting their manifests; `prune` later deletes the bytes that no manifest and no
fold refers to any more. In between, readers that planned on a forgotten version can still finish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from deltasync import layout
from deltasync.errors import ConfigError, MissingVersionError
from deltasync.manifest import Fold, Manifest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which versions stay: those that any of these names. Head's version always stays.

    Attributes:
        last: The newest so many versions.
        anchors: The newest so many versions that have an anchor.
        step_every: The versions whose trainer's step is a multiple of this.

    Raises:
        ConfigError: nothing was given, or a number below 1.
    """

    last: int | None = None
    anchors: int | None = None
    step_every: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.last, self.anchors, self.step_every) if number is not None]
        if not given:
            raise ConfigError("Say which versions to keep: the last ones, those with an anchor, or every so many steps.")
        if min(given) < 1:
            raise ConfigError("What to keep is counted from 1.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forgetting:
    """What `forget` does.

    Attributes:
        kept: Versions that stay, ascending: those asked for and what leads to them.
        versions: Versions to forget, newest first, so that at any moment those that are left can be read.
        folds: Keys of the documents of folds that start or end at a version that does not stay.
        named: Versions that the list of forgotten versions names: `versions`, and the ends of `folds` that went before.
    """

    kept: list[int]
    versions: list[int]
    folds: list[str]
    named: list[int]


def forgetting(manifests: Mapping[int, Manifest], fold_keys: Iterable[str], head_version: int, keep: Keep) -> Forgetting:
    """Decide what to forget.

    Args:
        manifests: All that the channel holds, by version. Versions after head are left alone: they are being published.
        fold_keys: Keys of the folds' documents.
        head_version: The newest complete version.
        keep: What stays.

    Raises:
        MissingVersionError: a version that stays cannot be read as it is, so that forgetting could only make it worse.
    """
    kept: set[int] = set()
    for version in _named(manifests, head_version, keep):
        kept.update(_leading_to(version, manifests))
    versions = sorted((v for v in manifests if v <= head_version and v not in kept), reverse=True)
    folds, ends = [], set()
    for key in fold_keys:
        span = layout.fold_span(key)
        if span is not None and span[1] <= head_version and not kept.issuperset(span):
            folds.append(key)
            ends |= set(span) - kept
    return Forgetting(kept=sorted(kept), versions=versions, folds=folds, named=sorted(ends.union(versions)))


def _named(manifests: Mapping[int, Manifest], head_version: int, keep: Keep) -> set[int]:
    versions = sorted(version for version in manifests if version <= head_version)
    named = {head_version}
    if keep.last is not None:
        named.update(versions[-keep.last :])
    if keep.anchors is not None:
        named.update([version for version in versions if manifests[version].anchor is not None][-keep.anchors :])
    if keep.step_every is not None:
        steps = {version: manifests[version].step for version in versions}
        named.update(version for version, step in steps.items() if step is not None and step % keep.step_every == 0)
    return named


def _leading_to(version: int, manifests: Mapping[int, Manifest]) -> Iterator[int]:
    """The version and those that a reader without any needs to get there: back to the nearest anchor."""
    at = version
    while at in manifests:
        yield at
        document = manifests[at]
        if document.anchor is not None:
            return
        assert document.delta is not None
        at = document.delta.base_version
    raise MissingVersionError(
        f"Version {version} is to be kept, but cannot be read, because version {at} is not in the channel. "
        "Nothing was forgotten. See `deltasync check`, or choose what to keep so that it goes."
    )


class References:
    """The objects that documents refer to. Everything in an anchor's folder belongs to the anchor."""

    def __init__(self, manifests: Iterable[Manifest], folds: Iterable[Fold]) -> None:
        self._keys = {file.key for fold in folds for file in fold.files}
        self._folders = set()
        for document in manifests:
            self._keys.update(file.key for part in (document.delta, document.anchor) if part for file in part.files)
            if document.anchor is not None and document.reference is None:
                self._folders.add(document.anchor.directory)

    def __contains__(self, key: str) -> bool:
        folder = "/".join(key.split("/")[:2])
        return key in self._keys or folder in self._folders or layout.fold_span(key) is not None


def prunable(
    objects: Mapping[str, float],
    references: References,
    head_version: int,
    forgotten_s: Mapping[int, float],
    now_s: float,
    grace_s: float,
) -> list[str]:
    """Keys of the data objects that can be deleted.

    An object goes if nothing refers to it, if its version is not after head (then it is being published), and if nothing
    happened to it for `grace_s`: it was neither stored nor its version forgotten since. Keys that no publisher writes stay.

    Args:
        objects: Data objects: key -> when it was stored.
        references: What documents refer to.
        head_version: The newest complete version.
        forgotten_s: Version -> when it was last forgotten.
        now_s: Now, by the clock that all of these times are of.
        grace_s: How long readers may take from planning on a version to having read it.
    """
    found = []
    for key, stored_s in objects.items():
        versions = layout.data_versions(key)
        if not versions or max(versions) > head_version or key in references:
            continue
        touched_s = max([stored_s, *(forgotten_s[version] for version in versions if version in forgotten_s)])
        if now_s - touched_s >= grace_s:
            found.append(key)
    return found


def spent(forgotten: Mapping[str, Collection[int]], manifests: Collection[int], keys_left: Iterable[str]) -> list[str]:
    """Keys of the lists of forgotten versions of which nothing is left.

    Args:
        forgotten: Key of each list -> the versions it names.
        manifests: Versions that have a manifest.
        keys_left: Data objects that stay.
    """
    left = set(manifests).union(*map(layout.data_versions, keys_left))
    return [key for key, versions in forgotten.items() if left.isdisjoint(versions)]
