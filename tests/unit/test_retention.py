from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable

import pytest

from deltasync.channel import documents, keys
from deltasync.channel.documents import Anchor, DeltaFiles, File, Record, VersionId
from deltasync.channel.keys import Slot
from deltasync.errors import ConfigError, MissingVersionError
from deltasync.ops import KeepPolicy, retention
from deltasync.ops.retention import Contents, References, RetentionPlan

ONE, TWO, THREE = "000001-00000001", "000002-00000002", "000003-00000003"
TOOL = "000000-0000000a"
_SHA256 = "0" * 64


def _file(key: str) -> File:
    return File(key=key, bytes=1, sha256=_SHA256)


def _record(
    version: int, *, anchor: bool = False, epoch: str = ONE, base: Slot | None = None, seal: bool = False
) -> Record:
    directory, part = keys.anchor_folder(version, epoch), f"{keys.parts_folder(version, epoch)}/part"
    weights = Anchor(directory=directory, files=[_file(f"{directory}/model.safetensors")])
    return Record(
        run_id="run",
        kind="seal" if seal else "anchor" if anchor else "delta",
        version=version,
        epoch=epoch,
        created_at=documents.now(),
        base=None if base is None else VersionId(base.version, base.epoch, _SHA256),
        fingerprint="0" * 16,
        delta=None if anchor or seal else DeltaFiles(codec="packed", changed=1, parts=[_file(part)]),
        anchor=weights if anchor else None,
        step=10 * version,
        next_epoch=TWO if seal else None,
    )


def _slots(*numbers: int, epoch: str = ONE) -> list[Slot]:
    return [Slot(number, epoch) for number in numbers]


def _log(first: int, newest: int, epoch: str = ONE, base: Slot | None = None) -> dict[Slot, Record | None]:
    """Versions of one epoch; the very first is an anchor."""
    found: dict[Slot, Record | None] = {}
    for number in range(first, newest + 1):
        slot = Slot(number, epoch)
        found[slot] = _record(number, anchor=number == 1, epoch=epoch, base=base)
        base = slot
    return found


def _holding(
    records: dict[Slot, Record | None],
    announced: Iterable[Slot] = (),
    compactions: Collection[str] = (),
    stored_s: dict[str, float] | None = None,
) -> Contents:
    times = {key: 1.0 for key in (*(slot.key for slot in records), *compactions)} | (stored_s or {})
    return Contents(
        records=records,
        stored_s=times,
        shortcuts={
            slot: {None: times.get(keys.announcement(slot.version, slot.epoch), 1.0)} for slot in announced
        },
    )


def _plan(contents: Contents, keep: KeepPolicy, since_s: float = math.inf) -> RetentionPlan:
    return retention.plan_retention(contents, keep, since_s)


def _numbers(slots: Iterable[Slot]) -> list[int]:
    return [slot.version for slot in slots]


def test_an_announced_anchor_that_is_not_complete_is_not_relied_on() -> None:
    compactions = [keys.announcement(4, ONE), keys.announcement(8, ONE)]
    found = _plan(_holding(_log(1, 10), _slots(4), compactions), KeepPolicy(last=1))
    assert _numbers(found.kept) == [4, 5, 6, 7, 8, 9, 10] and not found.compactions


def _two_epochs() -> dict[Slot, Record | None]:
    """Epoch 1 wrote up to 6 and was sealed; epoch 2 goes on. A suspended writer left nothing."""
    records = _log(1, 6) | {Slot(7, ONE): _record(7, seal=True, base=Slot(6, ONE))}
    return records | _log(7, 10, TWO, Slot(6, ONE))


def test_every_seal_stays() -> None:
    found = _plan(_holding(_two_epochs(), _slots(9, epoch=TWO)), KeepPolicy(last=1))
    assert _numbers(found.kept) == [9, 10]
    assert Slot(7, ONE).key not in found.keys and Slot(7, TWO).key in found.keys


def test_versions_of_an_epoch_that_was_left_are_forgotten() -> None:
    """After a restored backup an old writer wrote 7 to 9 in epoch 1; the channel goes on from 6 in epoch
    2.
    """
    records = _log(1, 9) | _log(7, 8, TWO, Slot(6, ONE))
    found = _plan(_holding(records, _slots(5)), KeepPolicy(last=2))
    assert found.kept == [*_slots(5, 6), *_slots(7, 8, epoch=TWO)]
    assert set(_slots(7, 8, 9)) <= set(found.forgotten)


def test_a_later_epoch_that_has_no_version_is_not_the_newest() -> None:
    records = _log(1, 3) | {Slot(4, ONE): _record(4, seal=True, base=Slot(3, ONE))}
    records[Slot(4, TWO)] = _record(4, seal=True, epoch=TWO, base=Slot(3, ONE))
    found = _plan(_holding(records), KeepPolicy(last=1))
    assert (found.asked, found.keys) == (_slots(3), [])


@pytest.mark.parametrize("missing", [9, 8])
def test_nothing_is_forgotten_if_what_stays_cannot_be_read(missing: int) -> None:
    records = {slot: record for slot, record in _log(1, 10).items() if slot.version != missing}
    with pytest.raises(
        MissingVersionError, match=r"Version 10 is to be kept.*an earlier version is missing.*Nothing was"
    ):
        _plan(_holding(records, _slots(4)), KeepPolicy(last=1))


def test_a_version_that_cannot_be_read_may_go() -> None:
    records = {slot: record for slot, record in _log(1, 10).items() if slot.version != 5}
    with pytest.raises(MissingVersionError):
        _plan(_holding(records, _slots(4, 8)), KeepPolicy(last=5))
    assert _numbers(_plan(_holding(records, _slots(4, 8)), KeepPolicy(last=3)).kept) == [8, 9, 10]


def test_what_lies_before_something_missing_still_counts() -> None:
    """A listing may lag behind, or the versions between two anchors were forgotten."""
    records = {slot: record for slot, record in _log(1, 10).items() if slot.version not in (6, 7)}
    found = _plan(_holding(records, _slots(5, 8)), KeepPolicy(last=99))
    assert not found.keys


@pytest.mark.parametrize("damaged", [2, 9, 10])
def test_a_damaged_record_hides_nothing(damaged: int) -> None:
    """What it follows is known by its slot, so that `repair` can still put it back."""
    records = _log(1, 10)
    records[Slot(damaged, ONE)] = None
    found = _plan(_holding(records, _slots(8)), KeepPolicy(last=1))
    assert {8, 9, 10} - {damaged} <= set(_numbers(found.kept))
    assert (Slot(damaged, ONE) in found.forgotten) == (damaged == 2)


def test_the_last_slot_of_an_epoch_may_be_a_seal_if_it_is_damaged() -> None:
    records = _two_epochs() | {Slot(7, ONE): None}
    assert Slot(7, ONE).key not in _plan(_holding(records, _slots(9, epoch=TWO)), KeepPolicy(last=1)).keys


def _times(**at: float) -> dict[str, float]:
    return {Slot(int(name[1:]), ONE).key: time_s for name, time_s in at.items()}


def test_what_became_dispensable_just_now_stays() -> None:
    """10 was stored at 1000 and made 9 dispensable; 4 to 8 had been for long."""
    contents = _holding(_log(1, 10), _slots(4, 9), stored_s=_times(v9=500, v10=1000))
    assert _numbers(_plan(contents, KeepPolicy(last=1), 1000).kept) == [9, 10]
    found = _plan(contents, KeepPolicy(last=1), 999)
    assert (_numbers(found.asked), _numbers(found.leading), found.recent) == ([10], [9], [])
    found = _plan(contents, KeepPolicy(last=1), 499)
    assert _numbers(found.recent) == [4, 5, 6, 7, 8]  # at 499, 8 was the newest, and 4 its anchor


def test_what_an_anchor_made_dispensable_just_now_stays() -> None:
    announced = keys.announcement(8, ONE)
    contents = _holding(_log(1, 10), _slots(4, 8), [announced], {announced: 1000})
    assert _numbers(_plan(contents, KeepPolicy(last=1), 1000).kept) == [8, 9, 10]
    assert _numbers(_plan(contents, KeepPolicy(last=1), 999).recent) == [4, 5, 6, 7]


def test_what_no_store_tells_the_age_of_goes_only_without_grace() -> None:
    contents = _holding(_log(1, 10), _slots(8), stored_s={slot.key: 0.0 for slot in _log(1, 10)})
    assert not _plan(contents, KeepPolicy(last=1), 1e12).keys
    assert len(_plan(contents, KeepPolicy(last=1)).keys) == 7


@pytest.mark.parametrize("wrong", [{}, {"last": 0}, {"anchors": -1}, {"last": 3, "step_every": 0}])
def test_keeping_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        KeepPolicy(**wrong)


def _references(epochs: int = 1, damaged: Slot | None = None) -> References:
    """Versions 4 (an anchor), 8 and 9 of epoch 1, an announced anchor of 8 and a compaction; maybe a version
    of epoch 2.
    """
    records: dict[Slot, Record | None] = {
        Slot(4, ONE): _record(4, anchor=True),
        Slot(8, ONE): _record(8, base=Slot(7, ONE)),
        Slot(9, ONE): _record(9, base=Slot(8, ONE)),
    }
    if epochs > 1:
        records[Slot(10, TWO)] = _record(10, epoch=TWO, base=Slot(9, ONE))
    if damaged is not None:
        records[damaged] = None
    compactions = {
        keys.announcement(8, ONE): _record(8, anchor=True),
        keys.compaction(4, 9, TOOL): dataclasses.replace(_record(9, epoch=TOOL), kind="compaction"),
    }
    return References(records, compactions)


@pytest.mark.parametrize(
    ("key", "named", "in_progress"),
    [
        (f"parts/0000000009.{ONE}.0/part", True, False),
        (f"parts/0000000009.{ONE}.1/part", False, False),  # of an attempt that was given up
        (f"parts/0000000003.{ONE}.0/part", False, False),  # of a version that was forgotten
        (f"parts/0000000010.{ONE}.0/part", False, True),  # of the next version
        (f"parts/0000000010.{TWO}.0/part", False, True),  # of a writer that opens the channel
        (f"parts/0000000009.{TOOL}.0/part", True, False),
        (f"parts/0000000099.{TOOL}.0/part", False, False),  # tools are spared by age alone
        (f"anchors/0000000004.{ONE}.0/model.safetensors", True, False),
        (f"anchors/0000000004.{ONE}.0/notes.txt", True, False),  # all in an anchor's folder is of it
        (f"anchors/0000000004.{ONE}.1/config.json", False, False),
        (f"anchors/0000000008.{ONE}.0/model.safetensors", True, False),
        (f"anchors/0000000009.{ONE}.0/model.safetensors", False, True),  # to be announced, whatever its age
        (f"anchors/0000000007.{ONE}.0/model.safetensors", False, False),
        (f"anchors/0000000099.{TOOL}.0/model.safetensors", False, False),
    ],
)
def test_what_names_a_file_and_who_may_still(key: str, named: bool, in_progress: bool) -> None:
    references = _references()
    assert (key in references, references.in_progress(key)) == (named, in_progress)
    # Once epoch 2 has a version, nobody waits for epoch 1.
    assert _references(epochs=2).in_progress(key) == (
        in_progress and TWO in key and "parts/0000000010" not in key
    )


def test_the_files_of_a_damaged_record_stay() -> None:
    references = _references(2, damaged=Slot(3, ONE))
    assert f"parts/0000000003.{ONE}.0/part" in references
    assert f"parts/0000000003.{THREE}.0/part" not in references


@pytest.mark.parametrize(
    ("modified_s", "grace_s", "old"),
    [
        (1.0, 3600, True),
        (6400.0, 3600, True),
        (6401.0, 3600, False),
        (0.0, 3600, False),
        (0.0, 0, True),
        (1e9, 0, True),
    ],
)
def test_what_is_old(modified_s: float, grace_s: float, old: bool) -> None:
    assert retention.was_stored(modified_s, math.inf if grace_s <= 0 else 10_000.0 - grace_s) == old
