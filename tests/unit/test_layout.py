from __future__ import annotations

import pytest

from deltasync import layout
from deltasync.errors import ConfigError


def test_keys_sort_like_versions() -> None:
    keys = [layout.manifest(version) for version in (1, 9, 10, 99, 1_000_000, 9_999_999_999)]
    assert keys == sorted(keys)
    assert keys[0] == "manifests/0000000001.json"


@pytest.mark.parametrize("version", [0, 1, 42, 9_999_999_999, 10_000_000_000])
def test_manifest_version_inverts_manifest(version: int) -> None:
    assert layout.manifest_version(layout.manifest(version)) == version


@pytest.mark.parametrize("key", ["head.json", "manifests/12.json", "manifests/0000000001.json.tmp", "manifests/x.json", ""])
def test_other_keys_have_no_manifest_version(key: str) -> None:
    assert layout.manifest_version(key) is None


def test_every_attempt_has_its_own_folder() -> None:
    assert layout.anchor_dir(7) == "anchors/0000000007"
    assert layout.anchor_dir(7, 2) == "anchors/0000000007.2"
    assert layout.delta_dir(7) == "deltas/0000000007"
    assert layout.delta_dir(7, 1) == "deltas/0000000007.1"


def test_anchor_files_are_named_as_transformers_names_them() -> None:
    assert layout.anchor_shard(1, 1) == "model.safetensors"
    assert layout.anchor_shard(2, 3) == "model-00002-of-00003.safetensors"


def test_delta_parts_count_from_one() -> None:
    assert layout.delta_part(1, 1) == "part-00001-of-00001.safetensors"


def test_replica_key() -> None:
    assert layout.replica("host-1") == "replicas/host-1.json"
    with pytest.raises(ConfigError):
        layout.replica("a#b")
