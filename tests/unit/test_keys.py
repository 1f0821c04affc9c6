from __future__ import annotations

import pytest

from deltasync.channel import keys
from deltasync.channel.keys import Slot
from deltasync.errors import ConfigError

EPOCH = "000003-9f8e7d6c"


def test_keys_are_as_the_page_has_them() -> None:
    assert keys.slot(42_137, EPOCH) == "versions/0000042/0000042137.000003-9f8e7d6c.safetensors"
    assert (
        f"{keys.parts_folder(42_137, EPOCH)}/{keys.part(0, 1)}"
        == "parts/0000042137.000003-9f8e7d6c.0/000-00001.safetensors"
    )
    assert keys.anchor_folder(42_100, EPOCH) == "anchors/0000042100.000003-9f8e7d6c.0"
    assert keys.anchor_folder(42_100, EPOCH, 2) == "anchors/0000042100.000003-9f8e7d6c.2"
    assert (
        keys.compaction(42_096, 42_104, EPOCH)
        == "compactions/0000042096-0000042104.000003-9f8e7d6c.safetensors"
    )
    assert keys.epoch_document(EPOCH) == "epochs/000003-9f8e7d6c.json"
    assert keys.probe(EPOCH) == "probe/000003-9f8e7d6c"
    assert keys.replica("host-1") == "replicas/host-1.json"
    assert keys.replica("host-1", "0000000a") == "replicas/host-1/0000000a.json"
    assert keys.boot_of("replicas/host-1/0000000a.json") == "0000000a"
    assert keys.boot_of("replicas/host-1.0000000a.json") is None  # of before
    with pytest.raises(ConfigError):
        keys.replica("a#b")


@pytest.mark.parametrize("version", [1, 42, 999, 1000, 123_456, keys.LARGEST_VERSION])
def test_what_a_key_tells_is_what_it_was_made_of(version: int) -> None:
    assert keys.slot_of(keys.slot(version, EPOCH)) == Slot(version, EPOCH)
    assert Slot(version, EPOCH).key == keys.slot(version, EPOCH)
    assert keys.slot(version, EPOCH).startswith(keys.folder(version))
    announced = keys.announcement(version, EPOCH)
    assert (keys.shortcut_of(announced), keys.compaction_of(announced)) == (Slot(version, EPOCH, 0), None)
    if version > 1:
        compaction = keys.compaction(version - 1, version, EPOCH)
        assert (
            keys.compaction_of(compaction)
            == keys.shortcut_of(compaction)
            == Slot(version, EPOCH, version - 1)
        )
    assert keys.file_of(f"{keys.parts_folder(version, EPOCH, 7)}/{keys.part(12, 3)}") == Slot(version, EPOCH)
    assert keys.file_of(f"{keys.anchor_folder(version, EPOCH)}/config.json") == Slot(version, EPOCH)
    assert keys.epoch_of(keys.epoch_document(EPOCH)) == EPOCH


def test_keys_of_an_epoch_sort_like_versions() -> None:
    found = [keys.slot(version, EPOCH) for version in (1, 9, 10, 999, 1000, 1_000_000, keys.LARGEST_VERSION)]
    assert found == sorted(found)
    assert sorted([Slot(2, "000001-ffffffff"), Slot(1, "000009-00000000")])[0].version == 1


DIGITS = "1" * 5000, "\N{ARABIC-INDIC DIGIT ONE}" * 10, "9" * 20


@pytest.mark.parametrize(
    "key",
    [
        "",
        "head.json",
        "versions/0000000/12.000001-00000001.safetensors",
        "versions/0000001/0000000001.000001-00000001.safetensors",
        "versions/0000000/0000000001.000001-0000000A.safetensors",
        "versions/0000000/0000000001.00001-00000001.safetensors",
        "versions/0000000/0000000001.000001-00000001.safetensors.tmp",
        "versions/0000000/0000000001.000001-00000001.safetensors\n",
        "versions/0000000/a/0000000001.000001-00000001.safetensors",
        "compactions/0000000001.000001-00000001.safetensors",
        "compactions/0000000000-0000000001.000001-00000001.safetensors",
        "announcements/0000000000-0000000001.000001-00000001.safetensors",
        *(f"announcements/{digits}.000001-00000001.safetensors" for digits in DIGITS),
        "epochs/000001.json",
        "parts/0000000001.000001-00000001/x",
        "parts/0000000001.000001-00000001.0/",
        *(f"versions/0000000/{digits}.000001-00000001.safetensors" for digits in DIGITS),
        *(f"compactions/{digits}-{digits}.000001-00000001.safetensors" for digits in DIGITS),
        *(f"epochs/{digits}-00000001.json" for digits in DIGITS),
        *(f"parts/0000000001.000001-00000001.{digits}/x" for digits in DIGITS),
    ],
)
def test_other_keys_tell_nothing(key: str) -> None:
    assert [keys.slot_of(key), keys.shortcut_of(key), keys.epoch_of(key), keys.file_of(key)] == [None] * 4


def test_no_two_epochs_have_one_name() -> None:
    names = {keys.new_epoch(7) for _ in range(100)}
    assert len(names) == 100
    assert all(
        keys.epoch_of(keys.epoch_document(name)) == name and keys.epoch_number(name) == 7 for name in names
    )
    author = keys.new_author()
    assert keys.slot_of(keys.slot(1, author)) and author.startswith(keys.TOOL) and author < min(names)


def test_anchor_files_are_named_as_transformers_names_them() -> None:
    assert keys.anchor_shard(1, 1) == "model.safetensors"
    assert keys.anchor_shard(2, 3) == "model-00002-of-00003.safetensors"
