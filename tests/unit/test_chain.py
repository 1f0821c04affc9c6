from __future__ import annotations

import dataclasses

import pytest

from deltasync import chain, manifest
from deltasync.errors import MissingVersionError
from deltasync.manifest import Anchor, Delta, FileRef, Manifest

_ANCHOR_BYTES = 1000


def _files(size: int) -> list[FileRef]:
    return [FileRef(key="k", bytes=size, sha256="0" * 64)]


def _version(version: int, *, delta_bytes: int | None = None, base: int | None = None, anchor: bool = False) -> Manifest:
    delta = None
    if delta_bytes is not None:
        base_version = version - 1 if base is None else base
        delta = Delta(
            base_version=base_version, base_manifest_sha256="0" * 64, codec="packed", changed=1, files=_files(delta_bytes)
        )
    return Manifest(
        format=manifest.FORMAT,
        run_id="run",
        version=version,
        kind="anchor" if anchor else "delta",
        step=None,
        created_at="",
        total=1,
        fingerprint="0" * 16,
        anchor_version=1,
        delta=delta,
        anchor=Anchor(directory="a", files=_files(_ANCHOR_BYTES)) if anchor else None,
    )


def _by_version(*manifests: Manifest) -> dict[int, Manifest]:
    return {document.version: document for document in manifests}


def _shown(steps: list[chain.Step]) -> list[str]:
    return [f"{'anchor' if step.use_anchor else 'delta'} {step.manifest.version}" for step in steps]


SMALL = _by_version(
    _version(1, anchor=True),
    _version(2, delta_bytes=10),
    _version(3, delta_bytes=10, anchor=True),
    _version(4, delta_bytes=10),
)


def test_from_nothing_through_the_newest_anchor() -> None:
    assert _shown(chain.plan(None, 4, SMALL)) == ["anchor 3", "delta 4"]


def test_deltas_are_taken_past_an_anchor_that_costs_more() -> None:
    assert _shown(chain.plan(2, 4, SMALL)) == ["delta 3", "delta 4"]


def test_an_anchor_is_taken_when_the_deltas_cost_more() -> None:
    manifests = SMALL | _by_version(_version(2, delta_bytes=600), _version(3, delta_bytes=600, anchor=True))
    assert _shown(chain.plan(1, 4, manifests)) == ["anchor 3", "delta 4"]


def test_an_older_anchor_is_taken_when_the_chain_from_it_costs_less() -> None:
    dear = dataclasses.replace(SMALL[3], anchor=Anchor(directory="a", files=_files(5000)))
    assert _shown(chain.plan(None, 4, SMALL | {3: dear})) == ["anchor 1", "delta 2", "delta 3", "delta 4"]


def test_a_fold_is_taken_when_it_costs_less_than_what_it_covers() -> None:
    manifests = SMALL | _by_version(_version(4, delta_bytes=15, base=2))
    assert _shown(chain.plan(2, 4, manifests)) == ["delta 4"]


def test_nothing_to_do_at_the_target() -> None:
    assert chain.plan(4, 4, SMALL) == []
    assert chain.plan(4, 4, {}) == []


def test_back_to_an_older_version_by_its_anchor() -> None:
    assert _shown(chain.plan(4, 2, SMALL)) == ["anchor 1", "delta 2"]
    assert _shown(chain.plan(4, 3, SMALL)) == ["anchor 3"]


def test_versions_past_the_target_are_not_used() -> None:
    assert _shown(chain.plan(None, 2, SMALL)) == ["anchor 1", "delta 2"]


def test_a_zero_change_version_costs_nothing_but_is_a_step() -> None:
    assert _shown(chain.plan(1, 2, _by_version(_version(1, anchor=True), _version(2, delta_bytes=0)))) == ["delta 2"]


@pytest.mark.parametrize("current", [None, 1])
def test_a_gap_that_no_anchor_bridges_is_named(current: int | None) -> None:
    manifests = {version: SMALL[version] for version in (1, 4)}
    with pytest.raises(MissingVersionError, match="version 4"):
        chain.plan(current, 4, manifests)


def test_a_gap_before_an_anchor_does_no_harm() -> None:
    manifests = {version: SMALL[version] for version in (1, 3, 4)}
    assert _shown(chain.plan(1, 4, manifests)) == ["anchor 3", "delta 4"]


def test_an_unknown_target_is_missing() -> None:
    with pytest.raises(MissingVersionError):
        chain.plan(1, 9, SMALL)
