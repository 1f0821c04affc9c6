"""gc, check, compaction, export and cp on channels of records; each also by its command."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from deltasync import codec, ops, tensors
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import DeltaFiles, VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.signing import Signer, new_key
from deltasync.codec.base import Encoded
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    RunMismatchError,
    StoreError,
    TransientStoreError,
)
from deltasync.following import Replica
from deltasync.ops import KeepPolicy, compaction
from deltasync.ops.cli import main
from deltasync.ops.cli.output import ranges
from deltasync.serve import heartbeat
from deltasync.stores import Store, open_store
from deltasync.tensors.bits import bits_of
from tests import deltas
from tests.channels import EPOCH, Made, filled, made, states_of
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore, flipped, truncated

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's warnings at import are not ours to fix
    import transformers

DAY_S = 86400.0
STATES = states_of(1200)


def _fill(store: Store, newest: int = 10) -> tuple[Made, list[VersionId]]:
    """Versions 1 to `newest`: anchors of 5 and 9 are announced, payloads of even versions are parts, a seal
    follows 6.
    """
    return filled(store, STATES[:newest], anchors=(5, 9), parts=range(2, 99, 2), seals=(6,))


def _reader(store: Store) -> ChannelReader:
    return ChannelReader(store)


def _versions(store: Store) -> list[int]:
    held = ops.scan_channel(_reader(store))
    return [slot.version for slot, found in held.records.items() if found is not None and found.is_version]


def _assert_readable(store: Store, *versions: int) -> None:
    for version in versions:
        replica = Replica(store)
        replica.sync(version)
        assert_same_bits(replica.state_dict(), STATES[version - 1])


def _gc(store: Store, grace_s: float = 0.0, **keep: int) -> ops.Collected:
    return ops.gc(_reader(store), KeepPolicy(**keep) if keep else None, grace_s=grace_s)


def _check(store: Store) -> ops.Report:
    return ops.check(_reader(store), read_data=True)


def _key_of(store: Store, version: int) -> str:
    """Of the record of a version."""
    return _reader(store).numbered(version).key


def _part_of(store: Store, version: int) -> str:
    delta = _reader(store).numbered(version).record.delta
    assert delta is not None
    return delta.parts[0].key


def _anchor_of(version: int) -> str:
    return f"{keys.anchor_folder(version, EPOCH)}/model.safetensors"


def _deltasync(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    store = FaultyStore(open_store(memory_url))
    _fill(store)
    store.calls.clear()
    return store


# gc


def test_a_dry_run_changes_nothing(store: FaultyStore) -> None:
    left = f"{keys.parts_folder(2, EPOCH, 1)}/000-00001.safetensors"
    store.inner.put(left, b"left")
    store.age(DAY_S)
    before = list(store.inner.list(""))
    found = ops.gc(_reader(store), KeepPolicy(last=1), dry_run=True)
    assert found.plan is not None and [slot.version for slot in found.plan.forgotten] == list(range(1, 9))
    assert [info.key for info in ops.gc(_reader(store), dry_run=True).objects] == [left]
    assert list(store.inner.list("")) == before
    written = {call for call in store.calls if call[0] in ("create", "put", "delete")}
    assert {key.partition("/")[0] for _, key in written} == {"probe"}, "to read the store's clock"
    assert {info.key for info in found.objects} == {info.key for info in _gc(store, last=1).objects} > {left}


def test_no_payload_is_read_to_collect_garbage(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    filled(store.inner, states_of(300_000, 6), anchors=(4,), parts=(2,))
    weights = {info.key: info.bytes for info in store.list("versions/")}
    assert (
        max(weights.values())
        < 1 << 14
        < min(info.bytes for info in store.list("anchors/0000000001") if "model" in info.key)
    )
    store.calls.clear()
    assert len(_gc(store, grace_s=3600).young) == 6
    assert [key for operation, key in store.calls if operation == "read"] == ["channel.json"]
    store.calls.clear()
    assert _gc(store, last=1).objects
    read = [key for operation, key in store.calls if operation == "read"]
    # channel, head, the record that it names and the next one; records, the compaction; what may announce the
    # first anchor
    assert len(read) == 4 + 6 + 1 + 1
    assert not [key for key in read if key.startswith(("parts/", "anchors/"))]


def test_what_became_dispensable_just_now_is_spared_however_old_it_is(store: FaultyStore) -> None:
    store.age(DAY_S)
    made = Made(
        store.inner, epoch=_reader(store).numbered(10).record.epoch, tip=_reader(store).numbered(10).version
    )
    made.specs, made.bits = _reader(store).specs, {made.tip.sha256: STATES[9]}  # type: ignore[union-attr]
    made.announce(made.tip)  # type: ignore[arg-type]
    _gc(store, 3600, last=1)
    assert _versions(store) == [9, 10]  # until now, 9 was needed
    store.age(3601)
    _gc(store, 3600, last=1)
    assert _versions(store) == [10]
    _assert_readable(store, 10)


def test_files_of_forgotten_versions_go_when_they_are_old(store: FaultyStore) -> None:
    store.fail_at("delete", "anchors/", error=StoreError)
    with pytest.raises(StoreError):
        _gc(store, last=1, anchors=1)  # with its records deleted, and none of its files
    found = _gc(store, grace_s=3600)
    assert not found.objects and len(found.young) == 16
    store.age(3601)
    assert len(_gc(store, grace_s=3600).objects) == 12


def test_what_dead_publishers_left_goes_when_somebody_goes_on(store: FaultyStore) -> None:
    epoch, later = _reader(store).numbered(10).record.epoch, keys.new_epoch(7)
    tool = keys.anchor_folder(9, keys.new_author())
    left = [f"{keys.parts_folder(4, EPOCH, 1)}/x", f"{keys.anchor_folder(6, EPOCH)}/x", f"{tool}/x"]
    ahead = [
        f"{keys.parts_folder(11, epoch)}/x",
        f"{keys.anchor_folder(10, epoch)}/x",
        f"{keys.parts_folder(11, later)}/x",
    ]
    for key in (*left, *ahead, "parts/notes.txt", "anchors/elsewhere/x"):
        store.inner.put(key, b"left")
    assert not _gc(store, grace_s=3600).objects
    store.age(3601)
    found = _gc(store, grace_s=3600)
    assert {info.key for info in found.objects} == set(left)
    assert {info.key for info in found.waiting} == set(ahead)


@pytest.mark.parametrize("ahead_s", [-DAY_S, DAY_S])
def test_it_does_not_matter_what_the_clock_of_this_machine_says(memory_url: str, ahead_s: float) -> None:
    store = FaultyStore(open_store(memory_url), ahead_s=ahead_s)
    _fill(store, 3)
    store.put(f"{keys.parts_folder(2, EPOCH, 1)}/x", b"left")
    assert not _gc(store, grace_s=3600).objects
    store.age(3601)
    assert len(_gc(store, grace_s=3600).objects) == 1


def test_heartbeats_of_replicas_that_are_long_gone(store: FaultyStore) -> None:
    store.put(keys.replica("old"), b"{}")
    store.age(7 * DAY_S + 1)
    store.put(keys.replica("new"), b"{}")
    assert _gc(store).heartbeats == [keys.replica("old")]
    assert [info.key for info in store.list(keys.REPLICAS)] == [keys.replica("new")]


@pytest.mark.parametrize(
    ("served", "pin", "state", "age_s", "kept"),
    [
        (3, "3", "serving", 0.0, {1, 2, 3}),
        (10, "6", "serving", 0.0, {5, 6}),  # it is on its way there
        (7, None, "serving", 0.0, {5, 6, 7}),
        (3, "99", "serving", 0.0, {1, 2, 3}),
        (3, "3", "stopped", 0.0, set()),
        (3, "3", "serving", 3601.0, set()),
    ],
    ids=["pinned", "pinned to another", "slow", "pinned to nothing", "stopped", "silent"],
)
def test_versions_that_live_replicas_serve_or_are_pinned_to_stay(
    store: FaultyStore, served: int, pin: str | None, state: str, age_s: float, kept: set[int]
) -> None:
    identity = _reader(store).numbered(served).version
    store.age(DAY_S)
    beat = heartbeat.Heartbeat(
        replica_id="r", run_id=_reader(store).channel().run_id, version=served, state=state, epoch=identity.epoch,
        sha256=identity.sha256, pin=pin, boot="00000000",
    )  # fmt: skip
    heartbeat.write(store, beat)
    store.age(age_s)
    found = _gc(store, last=1)
    assert found.plan is not None and {slot.version for slot in found.plan.recent} == kept
    _assert_readable(store, *kept)


def _beat(store: FaultyStore, name: str, version: int, boot: str = "00000000", **more: Any) -> str:
    """Store a heartbeat of a replica that serves a version; return its key."""
    reader = _reader(store)
    identity = reader.numbered(version).version
    heartbeat.write(
        store,
        heartbeat.Heartbeat(
            replica_id=name, run_id=reader.channel().run_id, version=version, state="serving", epoch=identity.epoch,
            sha256=identity.sha256, boot=boot, **more,
        ),
    )  # fmt: skip
    return keys.replica(name, boot)


@pytest.mark.parametrize("machine_s", [-7200.0, 7200.0])
@pytest.mark.parametrize("age_s", [0.0, 30.0])
def test_what_a_live_replica_serves_stays_whatever_this_machines_clock_says(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, machine_s: float, age_s: float
) -> None:
    store = FaultyStore(open_store(memory_url))
    _fill(store)
    store.age(DAY_S)
    store.age(age_s, _beat(store, "r", 3))
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + machine_s)
    for dry_run in (True, False):
        found = ops.gc(_reader(store), KeepPolicy(last=1), grace_s=0.0, dry_run=dry_run)
        assert found.plan is not None and {slot.version for slot in found.plan.recent} == {1, 2, 3}
    _assert_readable(store, 3)


def test_what_a_boot_was_heard_to_serve_within_the_grace_stays(store: FaultyStore) -> None:
    store.age(30 * DAY_S)
    first = _beat(store, "r", 3, "0000000a")
    store.age(6 * DAY_S, first)  # it may come back: a machine that sleeps, a network that is cut
    _beat(store, "r", 10, "0000000b")  # another start under the same name
    found = ops.gc(_reader(store), KeepPolicy(last=1), grace_s=7 * DAY_S)
    assert found.plan is not None and {slot.version for slot in found.plan.recent} == {1, 2, 3}
    store.age(1.5 * DAY_S, first)
    found = ops.gc(_reader(store), KeepPolicy(last=1), grace_s=7 * DAY_S)
    assert found.plan is not None and not found.plan.recent and found.heartbeats == [first]


def test_a_heartbeat_is_not_deleted_within_the_grace(store: FaultyStore) -> None:
    store.age(30 * DAY_S)
    store.age(8 * DAY_S, _beat(store, "r", 3))
    assert ops.gc(_reader(store), KeepPolicy(last=1), grace_s=14 * DAY_S).heartbeats == []
    assert _gc(store, last=1).heartbeats == ["replicas/r/00000000.json"]


def test_all_heartbeats_are_read_before_a_version_is_deleted(store: FaultyStore) -> None:
    store.age(DAY_S)
    old = _beat(store, "old", 3)
    store.age(20.0, old)
    young = store.inner.read(_beat(store, "young", 10), 1 << 20)
    for number in range(10_000):
        store.inner.put(keys.replica(f"r{number}"), young)
    found = ops.gc(_reader(store), KeepPolicy(last=1), grace_s=0.0)
    assert found.plan is not None and {slot.version for slot in found.plan.recent} == {1, 2, 3}


@pytest.mark.parametrize("version", [4, 10])
def test_the_files_of_a_damaged_record_are_not_deleted(store: FaultyStore, version: int) -> None:
    key, part = _key_of(store, version), _part_of(store, version)
    whole = store.read(key, 1 << 30)
    store.put(key, truncated(whole))
    store.put(f"{keys.parts_folder(2, EPOCH, 1)}/x", b"left")
    assert [info.key for info in _gc(store).objects] == [f"{keys.parts_folder(2, EPOCH, 1)}/x"]
    assert store.read(part, 1 << 30)
    store.put(key, whole)
    assert _check(store).problems == []


def test_the_files_of_a_damaged_compaction_are_not_deleted(store: FaultyStore) -> None:
    key = _announcement(store, 5)
    store.put(key, b"")
    assert not _gc(store).objects


@pytest.mark.parametrize("behind", range(1, 30))
def test_nothing_that_is_named_goes_while_listings_are_behind(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    store = FaultyStore(open_store(memory_url))
    _fill(store)
    store.behind = behind
    monkeypatch.setattr("deltasync.ops.scan._LISTED_DELAY_S", 0.0)
    for _ in range(2):
        with contextlib.suppress(TransientStoreError):  # it is found out
            _gc(store)
        try:
            _gc(store, last=5)
        except (MissingVersionError, NotPublishedError, TransientStoreError) as error:
            assert re.search("Nothing was (deleted|changed)", str(error))
    store.behind = 0
    assert _check(store).problems == []
    _assert_readable(store, 6, 7, 8, 9, 10)


STEPS = [
    ("list", "anchors/"),
    ("list", "parts/"),
    ("list", "versions/"),
    ("read", "versions/0000000/0000000004"),
    ("list", "compactions/"),
    ("delete", "parts/"),
]
LEFT = f"{keys.parts_folder(4, EPOCH, 1)}/x"


@pytest.mark.parametrize(("operation", "key"), STEPS)
@pytest.mark.parametrize("opens", [False, True], ids=["goes on", "opens"])
def test_a_version_that_is_published_during_a_collection_is_untouched(
    memory_url: str, operation: str, key: str, opens: bool
) -> None:
    store = FaultyStore(open_store(memory_url))
    channel, versions = _fill(store)
    store.put(LEFT, b"left")
    weights = channel.store_anchor(STATES[9], 10)  # half an anchor of 10, and half of 11, are there
    gate = store.hold_at(operation, key)
    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(_gc, store)
        assert gate.entered.wait(30)
        channel.store = store.inner
        channel._compaction(None, versions[9], STATES[9], None, anchor=weights)
        if opens:
            channel.seal(keys.new_epoch(9))
        for state in STATES[10:12]:
            channel.delta(state, parts=2)
        channel.head()
        gate.opened.set()
        assert [info.key for info in collecting.result(60).objects] == [LEFT]
    _assert_readable(store, 10, 11, 12)
    assert _check(store).problems == []


@pytest.mark.parametrize(("operation", "key"), STEPS)
def test_a_compaction_that_is_written_during_a_collection_is_untouched(
    store: FaultyStore, operation: str, key: str
) -> None:
    store.put(LEFT, b"left")
    gate = store.hold_at(operation, key)
    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(_gc, store)
        assert gate.entered.wait(30)
        ops.write_compaction(_reader(store.inner), 2, 6)
        gate.opened.set()
        assert [info.key for info in collecting.result(60).objects] == [LEFT]
    report = _check(store)
    assert (report.compactions, report.problems) == (1, [])


@pytest.mark.parametrize(
    "place", ["parts/0000000004", "versions/0000000/0000000005", "versions/0000000/0000000009"]
)
def test_a_reader_in_progress_completes(memory_url: str, place: str) -> None:
    """It planned on versions that are forgotten then. It takes another way, or finishes until the grace is
    over.
    """
    store, large = open_store(memory_url), states_of(360_000, 10)
    channel, versions = filled(store, large, parts=range(2, 11, 2))
    behind = FaultyStore(store)
    replica = Replica(behind)
    replica.sync(1)
    gate = behind.hold_at("read", place)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(replica.sync)
        assert gate.entered.wait(30)
        channel.announce(versions[8])
        _gc(store, last=1)
        assert _versions(store) == [9, 10]
        assert not _gc(store, grace_s=3600).objects
        gate.opened.set()
        assert reading.result(60) == 10
    assert_same_bits(replica.state_dict(), large[9])


# check


def _change(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    store.put(key, change(store.read(key, 1 << 30)))


def _edit(store: Store, key: str, **changes: object) -> StoredRecord:
    """Store a record anew with other fields and without its payload."""
    found = record.decode(store.read(key, 1 << 30), key, None).record
    stored = record.encode(dataclasses.replace(found, **changes), key, None, None)  # type: ignore[arg-type]
    assert stored.data is not None
    store.put(key, stored.data)
    return stored


def _wrong_compaction(store: Store) -> None:
    """A compaction whose digests are right and whose bits are not: it leaves a change out."""
    reader = _reader(store)
    old, new = (bits_of(STATES[version - 1]["w"]) for version in (2, 6))
    right = deltas.between(reader.layout, {"w": old}, {"w": new}).steps[2]
    lossy = tensors.Delta(reader.layout, {2: tensors.Sparse(right.at_K[1:], right.data_K[1:])})
    payload = codec.get("packed").encode(lossy, lambda _: (new, 0), deltas.digests({"w": new}), 6, 2)
    two, six = reader.numbered(2).version, reader.numbered(6)
    delta = DeltaFiles(codec="packed", changed=lossy.changed)
    prints, author = {"w": 0, "ids": 0}, keys.new_author()
    made = compaction.encode_shortcut(
        reader, six.version, payload, prints, None, author, base=two, delta=delta
    )
    assert made.data is not None
    as_published = dataclasses.replace(made.record, fingerprint=six.record.fingerprint)
    compaction.put_shortcut(reader, record.encode(as_published, made.key, payload, None))


def _compaction_key(store: Store, base: int, version: int) -> str:
    (key,) = [
        info.key
        for span, info in _reader(store).compactions()
        if (span.base, span.version) == (base, version)
    ]
    return key


def _announcement(store: Store, version: int) -> str:
    (key,) = [info.key for span, info in _reader(store).announcements() if span.version == version]
    return key


def _wrong_bits(store: Store) -> None:
    """The newest version names another fingerprint than its bits have."""
    stored = _edit(store, _key_of(store, 10), fingerprint="0" * 16)
    head = documents.decode(store.read(keys.HEAD, 1 << 30), documents.Head, keys.HEAD)
    store.put(keys.HEAD, documents.encode(dataclasses.replace(head, sha256=stored.sha256)))


def _edit_head(store: Store, **changes: object) -> None:
    head = documents.decode(store.read(keys.HEAD, 1 << 30), documents.Head, keys.HEAD)
    store.put(keys.HEAD, documents.encode(dataclasses.replace(head, **changes)))  # type: ignore[arg-type]


DAMAGE: dict[str, tuple[Callable[[Store], object], int, int, str]] = {
    # what is done, exit code, exit code with --read-data, what is said
    "a part is missing": (lambda s: s.delete(_part_of(s, 4)), 5, 5, "which versions/0000000/0000000004"),
    "a weight file is missing": (lambda s: s.delete(_anchor_of(5)), 5, 5, "not in the store"),
    "a part is short": (lambda s: _change(s, _part_of(s, 4), truncated), 4, 4, "bytes"),
    "a part is altered": (lambda s: _change(s, _part_of(s, 4), flipped), 0, 4, "does not have the sha256"),
    "an anchor is altered": (lambda s: _change(s, _anchor_of(5), flipped), 0, 4, "sha256"),
    "a config is altered": (
        lambda s: s.put(f"{keys.anchor_folder(5, EPOCH)}/config.json", b"[]"),
        0,
        4,
        "sha256",
    ),
    "a compaction is altered": (lambda s: _change(s, _compaction_key(s, 1, 6), flipped), 4, 4, "body"),
    "a compaction does not give the bits": (
        _wrong_compaction,
        0,
        9,
        "Version 6 did not give the published bits in w",
    ),
    "a compaction is of another version": (
        lambda s: _edit(s, _compaction_key(s, 1, 6), sha256="0" * 64),
        4,
        4,
        "another digest for version 6",
    ),
    "a record is damaged": (
        lambda s: _change(s, _key_of(s, 7), flipped),
        4,
        4,
        "versions/0000000/0000000007",
    ),
    "a record is missing": (lambda s: s.delete(_key_of(s, 7)), 5, 5, "Version 8 is not reachable"),
    "a record was rewritten": (
        lambda s: _edit(s, _key_of(s, 3), step=7),
        4,
        4,
        "versions/0000000/0000000003",
    ),
    "a record is of another run": (lambda s: _edit(s, _key_of(s, 1), run_id="x"), 4, 4, "belongs to run x"),
    "a version does not give the bits": (_wrong_bits, 0, 9, "Version 10 did not give"),
    "a seal is damaged": (
        lambda s: _change(s, keys.slot(7, EPOCH), flipped),
        4,
        4,
        "versions/0000000/0000000007.000001",
    ),
    "an epoch's document is damaged": (
        lambda s: s.put(next(iter(s.list(keys.EPOCHS))).key, b"{"),
        4,
        4,
        "epochs/000002",
    ),
    "head is damaged": (lambda s: s.put(keys.HEAD, b"{"), 4, 4, "head.json is not a JSON object"),
    "head names another record": (
        lambda s: _edit_head(s, sha256="0" * 64),
        4,
        4,
        "head.json has another digest",
    ),
    "head names no version": (lambda s: _edit_head(s, version=11), 5, 5, "0000000011"),
    "head is of another run": (lambda s: _edit_head(s, run_id="x"), 4, 4, "head.json belongs to run x"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "channel"
    store = open_store(f"file://{path}")
    _fill(store)
    ops.write_compaction(_reader(store), 1, 6)
    ops.write_compaction(_reader(store), 5, 9, codec_name="context")
    return path


@pytest.fixture
def copied(sound: Path, memory_url: str) -> Store:
    target = open_store(memory_url)
    ops.copy(_reader(open_store(f"file://{sound}")), target)
    return target


def test_a_sound_channel_has_no_problems(copied: Store) -> None:
    report = _check(copied)
    assert report.problems == [] and report.exit_code == 0
    assert (report.newest, report.versions, report.anchors, report.compactions) == (
        _reader(copied).numbered(10).version,
        10,
        3,
        2,
    )
    assert (report.garbage_objects, report.publishing, report.unproven, report.unreachable) == (0, 0, [], [])
    assert report.proven == list(range(1, 11))
    folders = (keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS, keys.PARTS, keys.ANCHORS)
    assert report.data_bytes == sum(info.bytes for prefix in folders for info in copied.list(prefix))


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_finds_what_is_wrong(copied: Store, damage: str) -> None:
    harm, exit_code, exit_code_with_data, said = DAMAGE[damage]
    harm(copied)
    report = ops.check(_reader(copied))
    assert report.exit_code == exit_code, report.problems
    with_data = _check(copied)
    assert with_data.exit_code == exit_code_with_data, with_data.problems
    assert any(said in str(problem) for problem in with_data.problems)
    assert len({str(problem) for problem in with_data.problems}) == len(with_data.problems) <= 2


def test_check_without_data_reads_records_only_and_is_told_of_garbage(store: FaultyStore) -> None:
    store.inner.put(LEFT, b"left")
    report = ops.check(_reader(store))
    assert (report.garbage_objects, report.garbage_bytes, report.exit_code, report.proven) == (1, 4, 0, None)
    assert not [
        key
        for operation, key in store.calls
        if operation == "read" and key.startswith(("parts/", "anchors/"))
    ]
    # channel, head three times, the record that it names and the next one, an epoch, 10 versions and a seal,
    # 2 announcements; listings of records, compactions, announcements and everything
    assert len(store.calls) == 1 + 3 + 2 + 1 + 11 + 2 + 4


def test_versions_that_a_suspended_writer_left_are_proven_too(memory_url: str) -> None:
    store = open_store(memory_url)
    channel, versions = filled(store, STATES[:6])
    channel.epoch, channel.tip = keys.new_epoch(2), versions[3]
    channel.delta(STATES[6])
    channel.delta(STATES[7])
    report = _check(store)
    assert (report.problems, report.proven) == ([], [1, 2, 3, 4, 5, 5, 6, 6])
    assert report.newest == channel.tip


# compaction


def test_a_compaction_that_changes_everything_and_one_of_nothing(memory_url: str) -> None:
    random = torch.Generator().manual_seed(1)
    noise = [{"w": torch.randint(0, 1 << 15, (500,), generator=random, dtype=torch.int16)} for _ in range(3)]
    filled(open_store(memory_url), [*noise, noise[0]])
    reader = _reader(open_store(memory_url))
    everything = ops.write_compaction(reader, 1, 3).record.delta
    assert everything is not None and everything.changed == int((noise[0]["w"] != noise[2]["w"]).sum())
    nothing = ops.write_compaction(reader, 1, 4).record.delta
    assert nothing is not None and (nothing.changed, nothing.parts) == (0, [])
    assert _check(open_store(memory_url)).problems == []


def test_a_compaction_that_is_there_is_not_written_again(store: FaultyStore) -> None:
    first = ops.write_compaction(_reader(store), 2, 6)
    store.calls.clear()
    assert ops.write_compaction(_reader(store), 2, 6, codec_name="raw").sha256 == first.sha256
    assert not [call for call in store.calls if call[0] == "put"]
    _change(store.inner, first.key, flipped)
    assert ops.write_compaction(_reader(store), 2, 6).key != first.key


def test_a_compaction_that_would_not_give_the_bits_is_not_stored(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(codec.get("packed"))
    encode = kind.encode

    def lossy(self: Any, delta: tensors.Delta, *arguments: Any) -> Encoded:
        at_K, step_K = delta.steps[2]
        steps = {**delta.steps, 2: tensors.Sparse(at_K[1:], step_K[1:])}
        return encode(self, tensors.Delta(delta.layout, steps), *arguments)

    monkeypatch.setattr(kind, "encode", lossy)
    with pytest.raises(CorruptDataError, match="decodes to other bits"):
        ops.write_compaction(_reader(store), 2, 6)
    assert not [call for call in store.calls if call[0] == "put"]


@pytest.mark.parametrize(
    ("base", "version", "error"),
    [
        (6, 6, ConfigError),
        (6, 2, ConfigError),
        (0, 2, ConfigError),
        (2, 11, MissingVersionError),
        (1, 9, MissingVersionError),
    ],
)
def test_a_compaction_that_cannot_be(
    store: FaultyStore, base: int, version: int, error: type[DeltaSyncError]
) -> None:
    _gc(store, last=5)
    with pytest.raises(error, match=r"compaction"):
        ops.write_compaction(_reader(store), base, version)


# export


def _tiny() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 4096], ids=["one file", "sharded"])
def test_an_export_is_a_checkpoint_that_transformers_loads(
    tmp_path: Path, memory_url: str, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _tiny()
    model.config.save_pretrained(tmp_path / "config")
    states = []
    for _ in range(4):
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        with torch.no_grad():
            model.lm_head.weight[0] += 1
    config = (tmp_path / "config" / "config.json").read_bytes()
    put_file = Made.put_file
    monkeypatch.setattr(
        Made,
        "put_file",
        lambda made, key, data: put_file(made, key, config if key.endswith("config.json") else data),
    )
    filled(open_store(memory_url), states, anchors=(3,))
    reader = _reader(open_store(memory_url))
    for asked, version in ((2, 2), (None, 4)):
        directory = tmp_path / "out" / str(version)
        assert ops.export(reader, asked, directory, shard_bytes=shard_bytes).version == version
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        assert_same_bits(loaded.state_dict(), states[version - 1])
        assert (directory / "model.safetensors.index.json").exists() == (shard_bytes == 4096)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["2", "4"]


@pytest.mark.parametrize("damaged", [5, 9])
def test_an_export_takes_config_and_tokenizer_from_another_anchor_if_need_be(
    store: FaultyStore, tmp_path: Path, damaged: int
) -> None:
    epoch = _reader(store).numbered(damaged).record.epoch
    store.put(f"{keys.anchor_folder(damaged, epoch)}/config.json", b"[]")
    ops.export(_reader(store), damaged + 1, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_what_could_run_code_is_not_exported(memory_url: str, tmp_path: Path) -> None:
    store = open_store(memory_url)
    channel, versions = filled(store, STATES[:2])
    weights = channel.store_anchor(STATES[1], 2)
    more = [
        channel.put_file(f"{weights.directory}/{name}", b"x") for name in ("model.pkl", "tokenizer/vocab.txt")
    ]
    weights = dataclasses.replace(weights, model_files=[*weights.model_files, *more])
    channel._compaction(None, versions[1], STATES[1], None, anchor=weights)
    ops.export(_reader(store), None, tmp_path / "out")
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*"))
    assert found == ["config.json", "model.safetensors", "tokenizer/vocab.txt"]


@pytest.mark.parametrize(
    "sizes", [(257 << 20,), (1,) * 1025, (1 << 60, 0)], ids=["too large", "too many", "2^60"]
)
def test_more_than_files_beside_weights_have_is_refused_unread(
    memory_url: str, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    store = FaultyStore(open_store(memory_url))
    filled(store.inner, STATES[:3], anchors=(2,))
    key = _announcement(store.inner, 2)
    anchor = record.decode(store.inner.read(key, 1 << 30), key, None).record.anchor
    assert anchor is not None
    files = [
        documents.File(key=f"{anchor.directory}/{number}.json", bytes=size, sha256="0" * 64)
        for number, size in enumerate(sizes)
    ]
    _edit(store.inner, key, anchor=dataclasses.replace(anchor, model_files=files))
    ops.export(_reader(store), 2, tmp_path / "out")  # by another anchor, and with that one's files
    assert not [key for _, key in store.calls if key.startswith(anchor.directory)]
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"


def test_an_export_never_writes_over_anything(store: FaultyStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ops.export(_reader(store), 3, tmp_path / "empty")
    (tmp_path / "file").write_text("years of work")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    for name in ("file", "full", "empty"):
        with pytest.raises(ConfigError, match="Nothing was written"):
            ops.export(_reader(store), 3, tmp_path / name)
    assert (
        (tmp_path / "full" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "years of work"
    )


def test_an_export_that_fails_leaves_nothing(store: FaultyStore, tmp_path: Path) -> None:
    store.delete(_key_of(store, 7))
    with pytest.raises(MissingVersionError):
        ops.export(_reader(store), 8, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        ops.export(_reader(store), 9, tmp_path / "file" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# cp


def test_a_copy_is_the_channel(sound: Path, channel_url: str) -> None:
    source, target = open_store(f"file://{sound}"), open_store(channel_url)
    copied = ops.copy(_reader(source), target)
    assert list(target.list("")) == list(source.list(""))
    assert all(target.read(info.key, 1 << 30) == source.read(info.key, 1 << 30) for info in source.list(""))
    assert (copied.version, copied.skipped) == (_reader(source).numbered(10).version, 0)
    assert copied.objects == len(list(source.list(""))) - 1
    again = ops.copy(_reader(source), target)
    assert (again.objects, again.bytes, again.skipped) == (0, 0, copied.objects)
    assert _check(target).problems == []


def test_a_copy_leaves_garbage_and_heartbeats_behind(store: FaultyStore, tmp_path: Path) -> None:
    for key in (LEFT, keys.replica("a"), keys.probe(EPOCH), f"{keys.parts_folder(11, EPOCH)}/x", "notes.txt"):
        store.put(key, b"{}")
    target = open_store(f"file://{tmp_path}/copy")
    ops.copy(_reader(store), target)
    report = _check(target)
    assert (report.garbage_objects, report.publishing, report.problems) == (0, 0, [])
    assert {info.key.split("/")[0] for info in target.list("")} == {
        "channel.json",
        "head.json",
        *("versions", "parts", "anchors", "announcements", "epochs"),
    }


CUTS = (
    *("parts/0000000006", "anchors/0000000005", "versions/0000000/0000000006", "versions/0000000/0000000009"),
    *("announcements/", "epochs/", "channel", "head"),
)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("newer", "key"),
    # is there then
    [(newer, key) for newer in (False, True) for key in CUTS if not (newer and key == "channel")],
)
def test_a_copy_that_is_cut_short_is_a_channel_or_none_and_goes_on(
    memory_url: str, key: str, after: bool, newer: bool
) -> None:
    """If it was copied before, what lies between is forgotten since: the anchor's announcement must come
    first.
    """
    source, target = open_store(memory_url), FaultyStore(open_store(f"{memory_url}-copy"))
    if newer:
        channel, versions = filled(source, STATES[:3])
        ops.copy(_reader(source), target)
        for number, state in enumerate(STATES[3:10], start=4):
            if number == 7:
                channel.seal(keys.new_epoch(2))
                channel.put_file(keys.epoch_document(channel.epoch), b"{}")
            stored = channel.delta(state, parts=2 * (number % 2 == 0))
            versions.append(stored.version)
            if number in (5, 9):
                channel.announce(stored.version)
        channel.head()
        _gc(source, last=6)
    else:
        _fill(source)
        ops.write_compaction(_reader(source), 2, 6)
    target.fail_at("put" if key == "head" else "create", key, after=after, error=StoreError)
    with pytest.raises(StoreError):
        ops.copy(_reader(source), target)
    if newer:
        assert (Replica(target).sync() or 0) >= 3
        assert _check(target).unreachable == []
    elif key != "head" and not (key == "channel" and after):
        with pytest.raises(NotPublishedError):
            Replica(target).sync()
    else:
        assert Replica(target).sync() == 10
    ops.copy(_reader(source), target)
    _assert_readable(target, 5, 6, 10)
    assert [problem for problem in _check(target).problems if "epochs/" not in str(problem)] == []


def test_a_copy_of_a_channel_that_grows_meanwhile(memory_url: str) -> None:
    store, target = FaultyStore(open_store(memory_url)), open_store(f"{memory_url}-copy")
    channel, _ = _fill(store)
    gate = store.hold_at("read", "versions/0000000/0000000004")
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(ops.copy, _reader(store), target)
        assert gate.entered.wait(30)
        channel.store = store.inner
        channel.delta(STATES[10], parts=1)
        channel.head()
        gate.opened.set()
        copied = copying.result(60).version
    assert copied is not None and copied.version == 10
    assert Replica(target).sync() == 10 and _versions(target) == list(range(1, 11))
    assert ops.copy(_reader(store), target).objects == 2
    _assert_readable(target, 10, 11)


def test_a_copy_while_versions_are_forgotten(store: FaultyStore, memory_url: str) -> None:
    target = open_store(f"{memory_url}-copy")
    gate = store.hold_at("read", _part_of(store, 4))
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(ops.copy, _reader(store), target)
        assert gate.entered.wait(30)
        _gc(store.inner, last=1, anchors=1)
        gate.opened.set()
        problems = copying.result(60).problems
    assert problems and all(isinstance(problem, MissingVersionError) for problem in problems)
    _assert_readable(target, 9, 10)
    assert set(_check(target).proven or []) == set(_versions(target)) >= {9, 10}


def test_copies_that_are_refused(memory_url: str) -> None:
    store = open_store(memory_url)
    channel, _ = _fill(store)
    with pytest.raises(ConfigError, match="both source and target"):
        ops.copy(_reader(store), store)
    other = open_store(f"{memory_url}-other")
    filled(other, STATES[:1])
    _edit_channel(other, run_id="other")
    before = list(other.list(""))
    with pytest.raises(RunMismatchError, match="Nothing was copied"):
        ops.copy(_reader(store), other)
    assert list(other.list("")) == before
    with pytest.raises(NotPublishedError):
        ops.copy(_reader(open_store(f"{memory_url}-none")), other)

    ahead = open_store(f"{memory_url}-ahead")
    ops.copy(_reader(store), ahead)
    channel.store = ahead
    channel.delta(STATES[10])
    with pytest.raises(ChannelInUseError, match="ahead of"):
        ops.copy(_reader(store), ahead)
    ahead.delete(_key_of(ahead, 11))
    channel.tip = _reader(ahead).numbered(10).version
    channel.seal(keys.new_epoch(3))
    channel.delta(STATES[10])
    with pytest.raises(ChannelInUseError, match="another publisher wrote it"):
        ops.copy(_reader(store), ahead)


def _edit_channel(store: Store, **changes: object) -> None:
    channel = documents.decode(store.read(keys.CHANNEL, 1 << 30), documents.Channel, keys.CHANNEL)
    store.put(keys.CHANNEL, documents.encode(dataclasses.replace(channel, **changes)))  # type: ignore[arg-type]


def test_other_bytes_in_the_target_are_left_and_told(store: FaultyStore, memory_url: str) -> None:
    for number, key in enumerate((_part_of(store, 4), _key_of(store, 3), _anchor_of(5))):
        target = open_store(f"{memory_url}-copy-{number}")
        target.put(key, b"other")
        with pytest.raises(ObjectExistsError, match="other bytes"):
            ops.copy(_reader(store), target)
        assert target.read(key, 1 << 30) == b"other"
        with pytest.raises(NotPublishedError):
            _reader(target).channel()


@pytest.mark.parametrize(
    "harm",
    [
        lambda s: _change(s, _part_of(s, 4), flipped),
        lambda s: _edit(s, _key_of(s, 3), step=7),
        lambda s: s.delete(_part_of(s, 4)),
        lambda s: s.put(_key_of(s, 3), b"{"),
    ],
    ids=["part altered", "record rewritten", "part missing", "record damaged"],
)
def test_damage_is_told_and_not_copied(
    store: FaultyStore, memory_url: str, harm: Callable[[Store], None]
) -> None:
    harm(store)
    target = open_store(f"{memory_url}-copy")
    (problem,) = ops.copy(_reader(store), target).problems
    assert "0000000003" in str(problem) or "0000000004" in str(problem)
    assert Replica(target).sync() == 10
    assert {5, 6, 7, 8, 9, 10} <= set(_check(target).proven or [])


# The commands


@pytest.mark.parametrize("command", ["check", "repair", "gc", "export", "relay", "log", "serve"])
def test_every_help_names_the_exit_codes(command: str) -> None:
    shown = _deltasync(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "Exit codes: 0 done, 1 error" in shown.stdout


@pytest.fixture
def url(sound: Path, tmp_path: Path) -> str:
    url = f"file://{tmp_path}/channel"
    ops.copy(_reader(open_store(f"file://{sound}")), open_store(url))
    return url


def test_gc_as_a_command(url: str) -> None:
    options = ("--keep-last", 1, "--keep-step-every", 50)
    spared = _deltasync("gc", url, *options).stdout
    assert (
        "kept          10 versions: 1-10; 1 of them are bases of others; 7 of them were needed less than "
        "3600 s ago" in spared
    )
    assert "deleted       0 objects, 0 bytes" in spared and "not checked   16 objects" in spared
    options = (*options, "--grace", "0")
    planned = _deltasync("gc", url, *options, "--dry-run").stdout
    assert "would forget  7 versions: 1-4, 6-8, and 1 compaction" in planned
    assert "would keep    3 versions: 5, 9-10; 1 of them are bases of others" in planned
    assert "would delete  10 objects" in planned
    found = json.loads(_deltasync("gc", url, *options, "--json").stdout)
    assert (found["kept"], found["forgotten"]) == ([5, 9, 10], [1, 2, 3, 4, 6, 7, 8])
    assert found["records"][0].startswith("versions/0000000/0000000008.000002-")
    assert len(found["objects"]) == 10 and found["bytes"] > 2400 and found["waiting_objects"] == 0
    assert "deleted       0 objects" in _deltasync("gc", url, "--grace", "0").stdout
    checked = json.loads(_deltasync("check", url, "--read-data", "--json").stdout)
    assert (checked["problems"], checked["proven"]) == ([], [5, 9, 10])


def test_check_as_a_command(url: str) -> None:
    sound = _deltasync("check", url, "--read-data")
    assert sound.exit_code == 0
    assert "holds         10 versions, 3 anchors, 2 compactions" in sound.stdout
    assert "proven        the bits of 10 versions" in sound.stdout
    assert "proven        nothing" in _deltasync("check", url).stdout
    store = open_store(url)
    store.delete(_part_of(store, 4))
    _change(store, _part_of(store, 10), truncated)
    damaged = _deltasync("check", url)
    assert damaged.exit_code == 5
    assert f"MissingVersionError: {_part_of(store, 4)}, which {_key_of(store, 4)} names" in damaged.stdout
    assert "problems      2" in damaged.stdout and "not reachable 4, 10" in damaged.stdout
    assert "not proven    the bits of 2 versions: 4, 10" in _deltasync("check", url, "--read-data").stdout
    as_json = _deltasync("check", url, "--json")
    assert as_json.exit_code == 5
    assert sorted(problem["exit_code"] for problem in json.loads(as_json.stdout)["problems"]) == [4, 5]
    assert json.loads(as_json.stdout)["newest"]["sha256"] == _reader(store).numbered(10).sha256


def test_compaction_log_and_show_as_commands(url: str) -> None:
    stored = ops.write_compaction(_reader(open_store(url)), 2, 6, codec_name="context")
    rows = [json.loads(line) for line in _deltasync("log", url, "--json").stdout.splitlines()]
    assert [row["version"] for row in rows if row["kind"] in ("delta", "anchor")] == list(range(1, 11))
    assert [row["version"] for row in rows if row["kind"] == "announced"] == [5, 9]
    assert [(row["base_version"], row["version"]) for row in rows if row["kind"] == "compaction"] == [
        (1, 6),
        (2, 6),
        (5, 9),
    ]
    reader = _reader(open_store(url))
    assert all(row["sha256"] == reader.numbered(row["version"]).sha256 for row in rows)
    shown = _deltasync("log", url).stdout
    assert "9 deltas " in shown and "3 anchors " in shown and "3 compactions " in shown and "2-6" in shown
    assert reader.numbered(10).sha256[:12] in shown
    assert "1 deltas " in _deltasync("log", url, "--last", 1).stdout
    assert _deltasync("log", url, 6).stdout.count("compaction   ") == 2
    document = json.loads(_deltasync("log", url, 6, "--json").stdout)
    assert document["document"]["base"]["version"] == 5 and document["sha256"] == reader.numbered(6).sha256
    for what, said in (
        (stored.key, "of record"),
        (keys.slot(7, EPOCH), "next_epoch"),
        ("latest", "since version 9"),
    ):
        assert said in _deltasync("log", url, what).stdout
    assert f"anchor           {_announcement(reader.store, 9)}" in _deltasync("log", url, 9).stdout


def test_log_goes_on_past_a_damaged_record(url: str) -> None:
    store = open_store(url)
    _change(store, _key_of(store, 6), truncated)
    done = _deltasync("log", url, "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["version"] for row in rows if row["kind"] in ("delta", "anchor")] == [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        10,
    ]
    assert "versions/0000000/0000000006" in done.stderr


def test_what_is_signed_is_shown_so(memory_url: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    new_key(tmp_path / "key", "test")
    url = f"file://{tmp_path}/signed"
    filled(open_store(url), STATES[:4], anchors=(3,), signer=Signer(tmp_path / "key"))
    public = Signer(tmp_path / "key").public
    assert f"signed by        {public} (not checked)" in _deltasync("log", url, "latest").stdout
    trusted = ("--trusted-keys", tmp_path / "key.pub")
    assert _deltasync("log", url, "latest", *trusted).stdout.count("(not checked)") == 0
    with pytest.raises(ConfigError, match="signing_key"):
        ops.write_compaction(_reader(open_store(url)), 1, 3)
    for command in ("check", "log", "relay"):
        more = (f"file://{tmp_path}/copy", "--once") if command == "relay" else ()
        assert _deltasync(command, url, *more, *trusted).exit_code == 0


def test_export_as_a_command(url: str, tmp_path: Path) -> None:
    done = _deltasync("export", url, "latest", tmp_path / "out")
    assert done.stdout.startswith(
        f"version 10 ({_reader(open_store(url)).numbered(10).sha256[:12]}) in {tmp_path / 'out'}: 2 files"
    )
    assert json.loads(_deltasync("export", url, 3, tmp_path / "three", "--json").stdout)["version"] == 3
    for info in open_store(url).list(keys.ANCHORS):
        if info.key.endswith("config.json"):
            open_store(url).delete(info.key)
    assert "holds no config.json" in _deltasync("export", url, 1, tmp_path / "bare-out").stderr


def test_cp_as_a_command(url: str, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/copy"
    assert f"{target} is at version 10 (" in _deltasync("relay", url, target, "--once").stdout
    again = json.loads(_deltasync("relay", url, target, "--once", "--json").stdout)
    assert (again["objects"], again["version"]["version"], again["problems"]) == (0, 10, [])
    assert "objects there already" in _deltasync("relay", url, target, "--once").stdout
    store = open_store(url)
    store.delete(_part_of(store, 4))
    damaged = _deltasync("relay", url, f"file://{tmp_path}/other", "--once")
    assert damaged.exit_code == 5 and "not copied: parts/0000000004" in damaged.stderr


def test_a_foreign_writer_may_put_files_elsewhere(store: FaultyStore) -> None:
    """Readers take keys from records, so that is what is checked; and `gc` leaves what it does not know."""
    store.put("elsewhere/payload", store.read(_part_of(store, 10), 1 << 30))
    store.put("parts/elsewhere/payload", b"not ours")
    stored = _reader(store).numbered(10)
    assert stored.record.delta is not None
    part = dataclasses.replace(stored.record.delta.parts[0], key="elsewhere/payload")
    left = stored.record.delta.parts[0].key
    parts = [part, *stored.record.delta.parts[1:]]
    _edit(store, stored.key, delta=dataclasses.replace(stored.record.delta, parts=parts))
    store.delete(keys.HEAD)
    assert [info.key for info in _gc(store).objects] == [left]
    report = _check(store)
    assert (report.problems, report.garbage_objects) == ([], 0)
    _assert_readable(store, 10)


@pytest.mark.parametrize(("numbers", "shown"), [([], ""), ([3], "3"), ([1, 2, 3, 7, 9, 10], "1-3, 7, 9-10")])
def test_versions_are_shown_as_ranges(numbers: list[int], shown: str) -> None:
    assert ranges(reversed(numbers)) == shown


def test_progress_is_told(store: FaultyStore) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        told.append((what, done, total))

    with ops.reporting(tell):
        ops.check(_reader(store), read_data=True)
        _gc(store, last=1)
    assert {what: (done, total) for what, done, total in told} == {
        "records": (13, 13),
        "replaying": (10, 10),
        "unlisted records": (1, 1),
        "records deleted": (9, 9),
        "files deleted": (12, 12),
    }


CUT: dict[str, Callable[[str], bool]] = {
    "all records": lambda key: key.startswith(keys.VERSIONS),
    "the newest record": lambda key: key.startswith(f"{keys.VERSIONS}0000000/0000000006"),
    "a record in the middle": lambda key: key.startswith(f"{keys.VERSIONS}0000000/0000000003"),
    "everything": lambda _: True,
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("command", ["check", "gc", "gc --keep-last 2", "cp"])
def test_a_listing_that_leaves_out_records_is_found_out(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    monkeypatch.setattr("deltasync.ops.scan._LISTED_DELAY_S", 0.0)
    made(open_store(memory_url), 6)
    before = {info.key for info in open_store(memory_url).list("")}
    store = FaultyStore(open_store(memory_url))
    store.hide(CUT[name])
    reader, target = ChannelReader(store), open_store(f"file://{tmp_path}/copy")
    calls: dict[str, Callable[[], object]] = {
        "check": lambda: ops.check(reader),
        "gc": lambda: ops.gc(reader, grace_s=0),
        "gc --keep-last 2": lambda: ops.gc(reader, KeepPolicy(last=2), grace_s=0),
        "cp": lambda: ops.copy(reader, target),
    }
    if command == "gc" and name == "everything":
        assert ops.gc(reader, grace_s=0).objects == []  # it lists no file that it could delete
    else:
        with pytest.raises(TransientStoreError, match=r"omits versions/.* which exists"):
            calls[command]()
    assert {info.key for info in open_store(memory_url).list("")} == before
    assert list(target.list("")) == []
    store.heal()
    calls[command]()


def test_an_older_copy_at_the_target_is_known_though_it_is_not_listed(memory_url: str) -> None:
    made(open_store(memory_url), 3)
    there = FaultyStore(open_store(f"{memory_url}/copy"))
    made(there, 5)
    there.hide(lambda _: True)
    with pytest.raises(ChannelInUseError, match=r"has version 5, ahead of .* at version 3"):
        ops.copy(ChannelReader(open_store(memory_url)), there)
