from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from deltasync import layout, manifest, retention
from deltasync.errors import ConfigError, MissingVersionError
from deltasync.manifest import Anchor, Delta, FileRef, Fold, Manifest
from deltasync.retention import Keep

_SHA256 = "0" * 64


def _version(version: int, *, anchor: bool = False, base: int | None = None) -> Manifest:
    delta = None
    if base is not None:
        key = f"{layout.delta_dir(version)}/part"
        files = [FileRef(key=key, bytes=1, sha256=_SHA256)]
        delta = Delta(base_version=base, base_manifest_sha256=_SHA256, codec="packed", changed=1, files=files)
    directory = layout.anchor_dir(version)
    files = [FileRef(key=f"{directory}/model.safetensors", bytes=1, sha256=_SHA256)]
    return Manifest(
        format=manifest.FORMAT,
        run_id="run",
        version=version,
        kind="anchor" if anchor else "delta",
        step=10 * version,
        created_at="",
        total=1,
        fingerprint="0" * 16,
        anchor_version=1,
        delta=delta,
        anchor=Anchor(directory=directory, files=files) if anchor else None,
    )


def _channel(newest: int, anchors: Iterable[int], missing: Iterable[int] = ()) -> dict[int, Manifest]:
    return {
        version: _version(version, anchor=version in anchors, base=version - 1 if version > 1 else None)
        for version in range(1, newest + 1)
        if version not in missing
    }


def _fold_key(base: int, version: int) -> str:
    return layout.fold_document(layout.fold_dir(base, version))


TEN = _channel(10, anchors=(1, 4, 8))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(last=1), [8, 9, 10]),
        (Keep(last=3), [8, 9, 10]),
        (Keep(last=4), [4, 5, 6, 7, 8, 9, 10]),  # 7 needs the way from the anchor at 4
        (Keep(last=99), list(range(1, 11))),
        (Keep(anchors=1), [8, 9, 10]),  # head stays, and what leads to it
        (Keep(anchors=2), [4, 8, 9, 10]),  # an anchor needs nothing
        (Keep(anchors=3, last=1), [1, 4, 8, 9, 10]),
        (Keep(step_every=50), [4, 5, 8, 9, 10]),
        (Keep(step_every=1000), [8, 9, 10]),
        (Keep(step_every=30, anchors=3), [1, 2, 3, 4, 5, 6, 8, 9, 10]),
    ],
)
def test_what_is_asked_for_stays_and_what_leads_to_it(keep: Keep, kept: list[int]) -> None:
    found = retention.forgetting(TEN, [], 10, keep)
    assert found.kept == kept
    assert found.versions == [version for version in range(10, 0, -1) if version not in kept]  # newest first
    assert found.named == sorted(found.versions)


def test_at_any_moment_those_that_are_left_can_be_read() -> None:
    left = dict(TEN)
    for version in retention.forgetting(TEN, [], 10, Keep(last=1)).versions:
        del left[version]
        assert retention.forgetting(left, [], 10, Keep(last=99)).kept == sorted(left)


def test_a_version_without_a_step_is_of_no_step() -> None:
    channel = _channel(3, anchors=(1, 2, 3))
    channel[1] = dataclasses.replace(channel[1], step=None)
    channel[2] = dataclasses.replace(channel[2], step=0)
    assert retention.forgetting(channel, [], 3, Keep(step_every=7)).kept == [2, 3]


def test_versions_after_head_are_left_alone() -> None:
    found = retention.forgetting(TEN, [_fold_key(8, 9), _fold_key(3, 9)], 8, Keep(last=1))
    assert found.kept == [8]
    assert found.versions == [7, 6, 5, 4, 3, 2, 1]
    assert not found.folds


def test_folds_go_with_either_end() -> None:
    keys = [_fold_key(4, 8), _fold_key(8, 10), _fold_key(1, 4), _fold_key(2, 9), "folds/0000000004-0000000008/part"]
    found = retention.forgetting(TEN, keys, 10, Keep(anchors=2))
    assert found.folds == [_fold_key(1, 4), _fold_key(2, 9)]


def test_a_fold_whose_end_went_before_names_it_again() -> None:
    channel = {version: TEN[version] for version in (8, 9, 10)}
    found = retention.forgetting(channel, [_fold_key(2, 9), _fold_key(8, 10)], 10, Keep(last=1))
    assert found.versions == []
    assert found.folds == [_fold_key(2, 9)]
    assert found.named == [2]


@pytest.mark.parametrize("missing", [10, 9, 8])
def test_nothing_is_forgotten_if_what_stays_cannot_be_read(missing: int) -> None:
    with pytest.raises(MissingVersionError, match=rf"Version 10 is to be kept.* version {missing} is not.*Nothing was"):
        retention.forgetting(_channel(10, anchors=(1, 4), missing=[missing]), [], 10, Keep(last=1))


def test_a_version_that_cannot_be_read_may_go() -> None:
    channel = _channel(10, anchors=(1, 4, 8), missing=[5])
    with pytest.raises(MissingVersionError):
        retention.forgetting(channel, [], 10, Keep(last=5))
    assert retention.forgetting(channel, [], 10, Keep(last=3)).kept == [8, 9, 10]


@pytest.mark.parametrize("wrong", [{}, {"last": 0}, {"anchors": -1}, {"last": 3, "step_every": 0}])
def test_keeping_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Keep(**wrong)


@pytest.mark.parametrize(
    ("key", "versions"),
    [
        ("deltas/0000000042/part-00001-of-00001.safetensors", (42,)),
        ("deltas/0000000042.3/part-00001-of-00001.safetensors", (42,)),
        ("anchors/12345678901/tokenizer/vocab.json", (12345678901,)),
        ("folds/0000000040-0000000048/part-00001-of-00001.safetensors", (40, 48)),
        ("folds/0000000040-0000000048.1/fold.json", (40, 48)),
        ("deltas/42/part", ()),
        ("deltas/0000000042", ()),
        ("deltas/notes.txt", ()),
        ("manifests/0000000042.json", ()),
    ],
)
def test_which_version_an_object_was_written_for(key: str, versions: tuple[int, ...]) -> None:
    assert layout.data_versions(key) == versions


HOUR_S = 3600.0


def _prunable(key: str, *, stored_s: float = 0.0, forgotten_s: dict[int, float] | None = None, now_s: float) -> bool:
    channel = {4: TEN[4], 8: TEN[8], 9: TEN[9]}
    fold = Fold(
        format=manifest.FORMAT,
        run_id="run",
        base_version=8,
        base_manifest_sha256=_SHA256,
        version=9,
        manifest_sha256=_SHA256,
        codec="packed",
        changed=1,
        files=[FileRef(key="folds/0000000008-0000000009.1/part", bytes=1, sha256=_SHA256)],
        created_at="",
    )
    references = retention.References(channel.values(), [fold])
    found = retention.prunable({key: stored_s}, references, 9, forgotten_s or {}, now_s, HOUR_S)
    assert found in ([], [key])
    return bool(found)


@pytest.mark.parametrize(
    ("key", "gone"),
    [
        ("deltas/0000000009/part", False),  # referred to
        ("deltas/0000000009.1/part", True),  # a dead publisher's
        ("deltas/0000000004/part", False),  # an anchor's delta
        ("deltas/0000000003/part", True),
        ("deltas/0000000010/part", False),  # after head: being published
        ("anchors/0000000010/config.json", False),
        ("anchors/0000000004/model.safetensors", False),
        ("anchors/0000000004/config.json", False),  # in an anchor's folder
        ("anchors/0000000004.1/config.json", True),
        ("anchors/0000000001/config.json", True),
        ("folds/0000000008-0000000009.1/part", False),
        ("folds/0000000008-0000000009/part", True),  # a dead writer's
        ("folds/0000000008-0000000009/fold.json", False),  # documents are forgotten, not pruned
        ("folds/0000000008-0000000010/part", False),
        ("deltas/notes.txt", False),  # not ours
        ("anchors/4/model.safetensors", False),
    ],
)
def test_what_nothing_refers_to_goes_when_it_is_old(key: str, gone: bool) -> None:
    assert _prunable(key, now_s=HOUR_S) == gone
    assert not _prunable(key, now_s=HOUR_S - 1)
    assert not _prunable(key, stored_s=10.0, now_s=HOUR_S + 9)


def test_what_was_forgotten_goes_an_hour_after_that() -> None:
    key = "deltas/0000000003/part"
    assert not _prunable(key, forgotten_s={3: 1000.0}, now_s=HOUR_S + 999)
    assert _prunable(key, forgotten_s={3: 1000.0}, now_s=HOUR_S + 1000)
    assert _prunable(key, forgotten_s={2: 1e9}, now_s=HOUR_S)


def test_a_fold_goes_an_hour_after_the_later_of_its_ends() -> None:
    key = "folds/0000000002-0000000003/part"
    assert not _prunable(key, forgotten_s={2: 0.0, 3: 1000.0}, now_s=HOUR_S + 999)
    assert not _prunable(key, forgotten_s={2: 1000.0}, now_s=HOUR_S + 999)
    assert _prunable(key, forgotten_s={2: 1000.0, 3: 0.0}, now_s=HOUR_S + 1000)


def test_a_list_of_forgotten_versions_is_spent_when_nothing_of_them_is_left() -> None:
    lists = {"a": [1, 2], "b": [3], "c": [4, 5], "d": [6]}
    left = ["deltas/0000000002/part", "folds/0000000003-0000000009/part", "anchors/0000000044/config.json"]
    assert retention.spent(lists, {5}, left) == ["d"]
