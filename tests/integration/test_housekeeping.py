"""forget, prune, check, fold, export and cp on real channels; each also by its command."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from deltasync import Publisher, Replica, codec, fingerprint, housekeeping, layout, manifest, open_store
from deltasync.bits import bits_of
from deltasync.cli import main
from deltasync.cli.progress import progress_bars, ranges
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FingerprintMismatchError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    ObjectExistsError,
    RunMismatchError,
    StoreError,
)
from deltasync.kernels import cpu
from deltasync.manifest import Fold, Head, Manifest
from deltasync.reader import ChannelReader
from deltasync.retention import Keep
from deltasync.stores import ObjectInfo, Store
from tests.conftest import assert_same_bits
from tests.faults import FOREVER, FaultyStore, flipped, truncated

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # other people's warnings at import are not ours to fix
    import transformers

Weights = dict[str, torch.Tensor]
DAY_S = 86400.0


class AgedStore(FaultyStore):
    """A faulty store whose clock is `ahead_s` ahead, and in which objects can be as old as a test says."""

    def __init__(self, inner: Store, ahead_s: float = 0.0) -> None:
        super().__init__(inner)
        self.ahead_s = ahead_s
        self._age_s: dict[str, float] = {}

    def age(self, age_s: float) -> None:
        """Everything that is there now is `age_s` older."""
        for info in self.inner.list(""):
            self._age_s[info.key] = self._age_s.get(info.key, 0.0) + age_s

    def replace(self, key: str, data: bytes) -> None:
        self._age_s.pop(key, None)
        super().replace(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            yield dataclasses.replace(info, modified_s=info.modified_s + self.ahead_s - self._age_s.get(info.key, 0.0))


def _states(element_count: int) -> list[Weights]:
    random = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(element_count, generator=random).to(torch.bfloat16), "ids": torch.arange(9)}]
    for _ in range(11):
        w, ids = (tensor.clone() for tensor in states[-1].values())
        w.view(torch.int16)[torch.randint(0, element_count, (20,), generator=random)] += 1
        ids[0] += 1
        states.append({"w": w, "ids": ids})
    return states


STATES = _states(1200)
LARGE = _states(360_000)  # ten deltas are the cheaper way than an anchor


def _publish(publisher: Publisher, version: int, states: list[Weights] = STATES) -> None:
    assert publisher.publish(states[version - 1].items(), step=10 * version).wait(60).version == version


def _fill(store: Store, newest: int = 10, states: list[Weights] = STATES) -> None:
    """Versions 1 to `newest`, with anchors at 1, 5 and 9."""
    files = {"config.json": b"{}", "tokenizer.json": b"[]"}
    with Publisher(store, anchor_every=4, model_files=files) as publisher:
        for version in range(1, newest + 1):
            _publish(publisher, version, states)


def _reader(store: Store) -> ChannelReader:
    return ChannelReader(store)


def _data(store: Store) -> list[str]:
    return [info.key for prefix in layout.DATA for info in store.list(prefix)]


def _assert_readable(store: Store, *versions: int) -> None:
    for version in versions:
        replica = Replica(store)
        replica.sync(version)
        assert_same_bits(replica.state_dict(), STATES[version - 1])


def _forget(store: Store, **keep: int) -> None:
    housekeeping.forget(_reader(store), Keep(**keep))


def _prune(store: Store, grace_s: float = 0.0) -> housekeeping.Pruned:
    return housekeeping.prune(_reader(store), grace_s=grace_s)


def _deltasync(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def store(memory_url: str) -> AgedStore:
    store = AgedStore(open_store(memory_url))
    _fill(store)
    store.calls.clear()
    return store


# forget and prune


def test_what_is_kept_stays_readable_and_nothing_else_stays(channel_url: str) -> None:
    store = open_store(channel_url)
    _fill(store)
    found = housekeeping.forget(_reader(store), Keep(last=1, anchors=2))
    assert found.kept == [5, 9, 10]
    assert _reader(store).versions() == [5, 9, 10]
    _assert_readable(store, 5, 9, 10)
    assert len(_data(store)) == 9 + 3 * 3  # bytes stay until they are pruned
    pruned = _prune(store)
    assert len(pruned.objects) == 3 + 6 and not pruned.waiting
    assert len(_data(store)) == 3 + 2 * 3
    _assert_readable(store, 5, 9, 10)
    with pytest.raises(MissingVersionError):
        _assert_readable(store, 6)
    assert not _prune(store).objects


def test_a_dry_run_changes_nothing(store: AgedStore) -> None:
    before = list(store.inner.list(""))
    assert housekeeping.forget(_reader(store), Keep(last=1), dry_run=True).versions == list(range(8, 0, -1))
    store.inner.create("deltas/0000000003.1/part", b"left")
    found = housekeeping.prune(_reader(store), grace_s=0, dry_run=True)
    assert [info.key for info in found.objects] == ["deltas/0000000003.1/part"]
    store.inner.delete("deltas/0000000003.1/part")
    assert list(store.inner.list("")) == before
    assert not {operation for operation, _ in store.calls} & {"create", "replace", "delete"}


def test_forgetting_nothing_writes_nothing(store: AgedStore) -> None:
    assert not housekeeping.forget(_reader(store), Keep(last=10)).versions
    assert not {operation for operation, _ in store.calls} & {"create", "replace", "delete"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ("create", "forgotten/"),
        ("delete", "folds/"),
        *[("delete", layout.manifest(version)) for version in (8, 5, 3, 1)],
    ],
)
def test_forget_can_be_cut_short_anywhere(store: AgedStore, operation: str, key: str, after: bool) -> None:
    housekeeping.write_fold(_reader(store), 2, 6)
    store.fail_at(operation, key, after=after, error=StoreError)
    with pytest.raises(StoreError):
        _forget(store, last=1, anchors=1)
    if operation == "create":
        assert _reader(store).versions() == list(range(1, 11))
    assert _prune(store, grace_s=3600).objects == []
    _assert_readable(store, *_reader(store).versions())
    assert housekeeping.check(_reader(store), read_data=True).problems == []
    _forget(store, last=1, anchors=1)
    assert _reader(store).versions() == [9, 10]
    _prune(store)
    assert len(_data(store)) == 2 + 3
    assert [info.key for info in store.list(layout.FORGOTTEN)] == ["forgotten/clock"]
    _assert_readable(store, 9, 10)


@pytest.mark.parametrize("key", ["anchors/0000000001/model", "deltas/0000000004", "deltas/0000000007", "forgotten/"])
def test_prune_can_be_cut_short_anywhere(store: AgedStore, key: str) -> None:
    _forget(store, last=1, anchors=1)
    store.fail_at("delete", key, error=StoreError)
    with pytest.raises(StoreError):
        _prune(store)
    _assert_readable(store, 9, 10)
    _prune(store)
    assert len(_data(store)) == 2 + 3
    assert [info.key for info in store.list(layout.FORGOTTEN)] == ["forgotten/clock"]


def test_what_was_forgotten_just_now_is_spared_however_old_it_is(store: AgedStore) -> None:
    store.age(DAY_S)
    _forget(store, last=1, anchors=1)
    pruned = _prune(store, grace_s=3600)
    assert not pruned.objects and len(pruned.waiting) == 13
    store.age(3601)
    assert len(_prune(store, grace_s=3600).objects) == 13


def test_forgetting_again_counts_from_the_last_time(store: AgedStore) -> None:
    store.fail_at("delete", layout.manifest(5), error=StoreError)
    with pytest.raises(StoreError):
        _forget(store, last=1)
    store.age(DAY_S)  # until now, 1 to 5 could be planned on
    _forget(store, last=1)
    pruned = {info.key for info in _prune(store, grace_s=3600).objects}
    assert pruned == {f"{layout.delta_dir(version)}/{layout.delta_part(1, 1)}" for version in (6, 7, 8)}


def test_what_dead_publishers_left_goes_when_it_is_old(store: AgedStore) -> None:
    left = ["deltas/0000000004.1/part", "anchors/0000000009.1/config.json", "folds/0000000002-0000000004/part"]
    ahead = ["deltas/0000000011/part", "anchors/0000000012/model.safetensors"]
    for key in (*left, *ahead):
        store.create(key, b"left")
    assert not _prune(store, grace_s=3600).objects
    store.age(3601)
    assert sorted(info.key for info in _prune(store, grace_s=3600).objects) == sorted(left)
    assert {info.key for info in _prune(store, grace_s=0).waiting} == set(ahead)


@pytest.mark.parametrize("ahead_s", [-DAY_S, DAY_S])
def test_it_does_not_matter_what_the_clock_of_this_machine_says(memory_url: str, ahead_s: float) -> None:
    store = AgedStore(open_store(memory_url), ahead_s)
    _fill(store, 3)
    store.create("deltas/0000000002.1/part", b"left")
    assert not _prune(store, grace_s=3600).objects
    store.age(3601)
    assert len(_prune(store, grace_s=3600).objects) == 1


def test_heartbeats_of_replicas_that_are_long_gone(store: AgedStore) -> None:
    store.replace(layout.replica("old"), b"{}")
    store.age(7 * DAY_S + 1)
    store.replace(layout.replica("new"), b"{}")
    assert _prune(store).heartbeats == [layout.replica("old")]
    assert [info.key for info in store.list(layout.REPLICAS)] == [layout.replica("new")]


@pytest.mark.parametrize("key", [layout.manifest(3), "folds/0000000002-0000000006/fold.json", layout.forgotten("x")])
def test_nothing_is_pruned_while_a_document_is_damaged(store: AgedStore, key: str) -> None:
    store.replace(key, b"{")
    store.create("deltas/0000000004.1/part", b"left")
    with pytest.raises(FormatError):
        _prune(store)
    assert store.read("deltas/0000000004.1/part") == b"left"


def test_nothing_is_pruned_while_the_manifest_of_head_is_missing(store: AgedStore) -> None:
    store.delete(layout.manifest(10))
    with pytest.raises(MissingVersionError, match="Nothing was pruned"):
        _prune(store)
    assert len(_data(store)) == 9 + 3 * 3


STEPS_OF_PRUNE = [
    ("list", "anchors/"),
    ("list", "deltas/"),
    ("read", "head.json"),
    ("list", "manifests/"),
    ("read", "manifests/0000000004"),
    ("list", "forgotten/"),
    ("delete", ""),
]


@pytest.mark.parametrize(("operation", "key"), STEPS_OF_PRUNE)
def test_a_version_that_is_published_during_a_prune_is_untouched(store: AgedStore, operation: str, key: str) -> None:
    store.create("deltas/0000000004.1/part", b"left")
    gate = store.hold_at(operation, key)
    with ThreadPoolExecutor(1) as pool, Publisher(store.inner, anchor_every=2, resume=True) as publisher:
        pruning = pool.submit(_prune, store)
        assert gate.entered.wait(30)
        for version in (11, 12):
            _publish(publisher, version)
        gate.opened.set()
        assert [info.key for info in pruning.result(60).objects] == ["deltas/0000000004.1/part"]
    _assert_readable(store, 10, 11, 12)
    assert housekeeping.check(_reader(store), read_data=True).problems == []


@pytest.mark.parametrize(("operation", "key"), STEPS_OF_PRUNE)
@pytest.mark.parametrize("step", ["payload", "manifest"])
def test_a_version_that_is_half_uploaded_during_a_prune_is_untouched(
    store: AgedStore, operation: str, key: str, step: str
) -> None:
    store.create("deltas/0000000004.1/part", b"left")
    uploading = FaultyStore(store.inner)
    with ThreadPoolExecutor(1) as pool, Publisher(uploading, resume=True) as publisher:
        upload = uploading.hold_at("create", "manifests/") if step == "payload" else uploading.hold_at("replace")
        gate = store.hold_at(operation, key)
        receipt = publisher.publish(STATES[10].items())
        assert upload.entered.wait(30)
        pruning = pool.submit(_prune, store)
        assert gate.entered.wait(30)
        upload.opened.set()
        receipt.wait(60)
        gate.opened.set()
        pruning.result(60)
    _assert_readable(store, 10, 11)


@pytest.mark.parametrize(("operation", "key"), STEPS_OF_PRUNE)
def test_a_fold_that_is_written_during_a_prune_is_untouched(store: AgedStore, operation: str, key: str) -> None:
    store.create("deltas/0000000004.1/part", b"left")
    gate = store.hold_at(operation, key)
    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(_prune, store)
        assert gate.entered.wait(30)
        housekeeping.write_fold(_reader(store.inner), 2, 6)
        gate.opened.set()
        assert [info.key for info in pruning.result(60).objects] == ["deltas/0000000004.1/part"]
    report = housekeeping.check(_reader(store), read_data=True)
    assert (report.folds, report.problems) == (1, [])


@pytest.mark.parametrize(("operation", "key"), STEPS_OF_PRUNE[:-1])
def test_what_is_forgotten_during_a_prune_is_spared(store: AgedStore, operation: str, key: str) -> None:
    store.age(DAY_S)
    gate = store.hold_at(operation, key)
    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(_prune, store, 3600)
        assert gate.entered.wait(30)
        _forget(store.inner, last=1, anchors=1)
        gate.opened.set()
        assert pruning.result(60).objects == []
    _assert_readable(store, 9, 10)


@pytest.mark.parametrize("key", ["deltas/0000000003", "deltas/0000000007", "manifests/0000000004"])
def test_a_reader_in_progress_completes(memory_url: str, key: str) -> None:
    """It planned on deltas 2 to 10. Their bytes are there until the grace is over; manifests that are gone are passed by."""
    store = open_store(memory_url)
    _fill(store, states=LARGE)
    behind = FaultyStore(store)
    replica = Replica(behind)
    replica.sync(1)
    gate = behind.hold_at("read", key)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(replica.sync)
        assert gate.entered.wait(30)
        _forget(store, last=1, anchors=1)
        assert not _prune(store, grace_s=3600).objects
        gate.opened.set()
        assert reading.result(60) == 10
    assert_same_bits(replica.state_dict(), LARGE[9])


def test_a_version_that_was_staged_before_commits_after(store: AgedStore) -> None:
    """All manifests read, all bytes still to be fetched: whoever has planned so can finish until the grace is over."""
    reader = _reader(store)
    housekeeping.read_manifests(reader)
    plan = reader.plan(None, reader.head(), 4)
    _forget(store, last=1)
    _prune(store, grace_s=3600)
    assert [len(list(reader.patches(step))) for step in plan] == [2, 2, 2, 2]


# check


def _repoint(store: Store, version: int, **changes: object) -> None:
    """Rewrite a manifest, and those after it and head so that digests agree."""
    reader = _reader(store)
    head = reader.head()
    sha256 = ""
    for number in range(version, head.version + 1):
        document = reader.manifest(number)
        if number == version:
            document = dataclasses.replace(document, **changes)
        else:
            assert document.delta is not None
            delta = dataclasses.replace(document.delta, base_manifest_sha256=sha256)
            document = dataclasses.replace(document, delta=delta, chain=[])
        data = manifest.encode(document)
        sha256 = manifest.sha256_hex(data)
        store.replace(layout.manifest(number), data)
    store.replace(layout.HEAD, manifest.encode(dataclasses.replace(head, manifest_sha256=sha256)))


def _change(store: Store, key: str, change: Callable[[bytes], bytes]) -> None:
    store.replace(key, change(store.read(key)))


def _edit(store: Store, key: str, kind: type[Head] | type[Manifest] | type[Fold], **changes: object) -> None:
    _change(store, key, lambda data: manifest.encode(dataclasses.replace(manifest.decode(data, kind, key), **changes)))


def _wrong_chain(store: Store) -> None:
    first, *rest = _reader(store).manifest(8).chain
    assert rest
    _repoint(store, 8, chain=[msgspec.structs.replace(first, delta_bytes=1), *rest])


def _wrong_fold(store: Store) -> None:
    """A fold whose digests are right and whose bits are not: it leaves a change out."""
    reader = _reader(store)
    old, new = (bits_of(STATES[version - 1]["w"]) for version in (2, 6))
    index_K, step_K = cpu.diff(old, new)
    encoder = codec.get("packed").encoder()
    digest = fingerprint.to_hex(cpu.fingerprint(fingerprint.tensor_key("w"), new))
    encoder.add(reader.specs["w"], index_K[1:], step_K[1:], new, digest)
    payload = encoder.finish(6, 2).to_bytes()
    housekeeping.store_fold(reader, 2, 6, codec_name="packed", changed=index_K.size - 1, payload=payload)


PART = layout.delta_part(1, 1)
DAMAGE: dict[str, tuple[Callable[[Store], object], int, int, str]] = {
    # what is done, exit code, exit code with --read-data, what is said
    "a payload is missing": (lambda s: s.delete(f"deltas/0000000003/{PART}"), 5, 5, "manifests/0000000003.json refers to"),
    "a weight file is missing": (lambda s: s.delete("anchors/0000000005/model.safetensors"), 5, 5, "not in the store"),
    "a payload is short": (lambda s: _change(s, f"deltas/0000000003/{PART}", truncated), 4, 4, "bytes"),
    "a payload is altered": (lambda s: _change(s, f"deltas/0000000003/{PART}", flipped), 0, 4, "does not have the sha256"),
    "an anchor is altered": (lambda s: _change(s, "anchors/0000000005/model.safetensors", flipped), 0, 4, "sha256"),
    "a fold is altered": (lambda s: _change(s, f"folds/0000000001-0000000006/{PART}", flipped), 0, 4, "sha256"),
    "a fold is missing": (lambda s: s.delete(f"folds/0000000001-0000000006/{PART}"), 5, 5, "fold.json refers to"),
    "a fold does not give the bits": (_wrong_fold, 0, 9, "Version 6 did not give the published bits in w"),
    "a fold is of other manifests": (
        lambda s: _edit(s, "folds/0000000001-0000000006/fold.json", Fold, base_manifest_sha256="0" * 64),
        4,
        4,
        "manifests/0000000001.json does not have the sha256",
    ),
    "a manifest is damaged": (
        lambda s: s.replace(layout.manifest(7), b"{"),
        5,
        5,
        "manifests/0000000007.json is not a JSON",
    ),
    "a manifest is missing": (
        lambda s: s.delete(layout.manifest(7)),
        5,
        5,
        "Version 8 has no anchor and builds on version 7",
    ),
    "a manifest was rewritten": (
        lambda s: _edit(s, layout.manifest(3), Manifest, step=7),
        4,
        4,
        "manifests/0000000003.json",
    ),
    "a manifest is of another run": (lambda s: _edit(s, layout.manifest(1), Manifest, run_id="x"), 5, 5, "belongs to run x"),
    "a chain is wrong": (_wrong_chain, 4, 4, "manifests/0000000008.json names another chain"),
    "a version does not give the bits": (lambda s: _repoint(s, 10, fingerprint="0" * 16), 0, 9, "Version 10 did not give"),
    "head is damaged": (lambda s: s.replace(layout.HEAD, b"{"), 4, 4, "head.json is not a JSON object"),
    "head is missing": (lambda s: s.delete(layout.HEAD), 5, 5, "no complete version"),
    "head names another manifest": (
        lambda s: _edit(s, layout.HEAD, Head, manifest_sha256="0" * 64),
        4,
        4,
        "0000000010.json",
    ),
    "head names no version": (lambda s: _edit(s, layout.HEAD, Head, version=11), 5, 5, "version 11, which has no manifest"),
    "head is of another run": (lambda s: _edit(s, layout.HEAD, Head, run_id="x"), 5, 5, "head.json belongs to run x"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "channel"
    store = open_store(f"file://{path}")
    _fill(store)
    housekeeping.write_fold(_reader(store), 1, 6)
    housekeeping.write_fold(_reader(store), 5, 9, codec_name="context")
    return path


@pytest.fixture
def copied(sound: Path, memory_url: str) -> Store:
    target = open_store(memory_url)
    housekeeping.copy(_reader(open_store(f"file://{sound}")), target)
    return target


def test_a_sound_channel_has_no_problems(copied: Store) -> None:
    report = housekeeping.check(_reader(copied), read_data=True)
    assert report.problems == [] and report.exit_code == 0
    assert (report.head, report.versions, report.anchors, report.folds) == (10, 10, 3, 2)
    assert (report.garbage_objects, report.publishing, report.unproven) == (0, 0, [])
    assert report.proven == list(range(1, 11))
    assert report.data_bytes == sum(info.bytes for prefix in layout.DATA for info in copied.list(prefix))


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_finds_what_is_wrong(copied: Store, damage: str) -> None:
    harm, exit_code, exit_code_with_data, said = DAMAGE[damage]
    harm(copied)
    report = housekeeping.check(_reader(copied))
    assert report.exit_code == exit_code, report.problems
    with_data = housekeeping.check(_reader(copied), read_data=True)
    assert with_data.exit_code == exit_code_with_data, with_data.problems
    assert any(said in str(problem) for problem in with_data.problems)
    assert len({str(problem) for problem in with_data.problems}) == len(with_data.problems) <= 2


@pytest.mark.parametrize("damage", [name for name, found in DAMAGE.items() if name.startswith("a ") and found[2] < 9])
def test_what_is_not_damaged_is_still_proven(copied: Store, damage: str) -> None:
    DAMAGE[damage][0](copied)
    report = housekeeping.check(_reader(copied), read_data=True)
    assert report.proven is not None and {9, 10} <= set(report.proven)
    assert len(report.proven) >= 5


def test_check_without_data_reads_no_data_and_is_told_of_garbage(store: AgedStore) -> None:
    store.create("deltas/0000000004.1/part", b"left")
    store.calls.clear()
    report = housekeeping.check(_reader(store))
    assert (report.garbage_objects, report.garbage_bytes, report.exit_code, report.proven) == (1, 4, 0, None)
    assert not [key for operation, key in store.calls if operation == "read" and key.startswith(layout.DATA)]
    assert len(store.calls) == 2 + 10 + 3  # channel, head, manifests; listings of manifests, of folds and of everything


def test_a_version_after_head_is_being_published(store: AgedStore) -> None:
    uploading = FaultyStore(store.inner)
    with Publisher(uploading, resume=True) as publisher:
        gate = uploading.hold_at("replace")
        publisher.publish(STATES[10].items())
        assert gate.entered.wait(30)
        report = housekeeping.check(_reader(store), read_data=True)
        gate.opened.set()
    assert (report.publishing, report.exit_code, report.proven) == (1, 0, list(range(1, 12)))


def test_anchors_whose_base_was_forgotten_are_no_problem(store: AgedStore) -> None:
    _forget(store, last=1, anchors=2)
    _prune(store)
    report = housekeeping.check(_reader(store), read_data=True)
    assert (report.problems, report.proven) == ([], [5, 9, 10])


# fold


@pytest.mark.parametrize("codec_name", ["packed", "context", "raw"])
@pytest.mark.parametrize(("base", "version"), [(1, 2), (2, 8), (1, 10), (5, 9)])
def test_a_fold_gives_the_bits(store: AgedStore, codec_name: str, base: int, version: int) -> None:
    fold = housekeeping.write_fold(_reader(store), base, version, codec_name=codec_name)
    assert (fold.base_version, fold.version, fold.codec) == (base, version, codec_name)
    old, new = (torch.cat([t.view(-1).to(torch.float64) for t in STATES[v - 1].values()]) for v in (base, version))
    assert fold.changed == int((old != new).sum())
    assert housekeeping.check(_reader(store), read_data=True).problems == []
    # Its payload is written before its document.
    created = [key for operation, key in store.calls if operation == "create"]
    assert created == [fold.files[0].key, layout.fold_document(layout.fold_dir(base, version))]


def test_replicas_far_behind_take_it(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    _fill(store, states=LARGE)
    housekeeping.write_fold(_reader(store), 1, 9)
    replica = Replica(store)
    replica.sync(1)
    store.calls.clear()
    replica.sync()
    assert_same_bits(replica.state_dict(), LARGE[9])
    read = {key.split("/")[0] for operation, key in store.calls if operation == "read" and key.startswith(layout.DATA)}
    assert read == {"folds", "deltas"}


def test_a_fold_of_dense_changes_and_one_of_none(memory_url: str) -> None:
    random = torch.Generator().manual_seed(1)
    noise = [{"w": torch.randint(0, 1 << 15, (500,), generator=random, dtype=torch.int16)} for _ in range(3)]
    with Publisher(memory_url, anchor_every=99) as publisher:
        for weights in [*noise, noise[0]]:
            publisher.publish(weights.items()).wait(60)
    reader = _reader(open_store(memory_url))
    assert housekeeping.write_fold(reader, 1, 3).changed == int((noise[0]["w"] != noise[2]["w"]).sum())
    nothing = housekeeping.write_fold(reader, 1, 4)
    assert (nothing.changed, nothing.files) == (0, [])
    assert housekeeping.check(reader, read_data=True).problems == []


def test_a_fold_that_is_there_is_not_written_again(store: AgedStore) -> None:
    first = housekeeping.write_fold(_reader(store), 2, 6)
    store.calls.clear()
    assert housekeeping.write_fold(_reader(store), 2, 6, codec_name="raw") == first
    assert not [call for call in store.calls if call[0] == "create"]


def test_what_a_dead_writer_left_of_a_fold_is_not_used(store: AgedStore) -> None:
    store.fail_at("create", layout.fold_document(layout.fold_dir(2, 6)), error=StoreError)
    with pytest.raises(StoreError):
        housekeeping.write_fold(_reader(store), 2, 6)
    assert housekeeping.check(_reader(store)).garbage_objects == 1
    fold = housekeeping.write_fold(_reader(store), 2, 6)
    assert fold.files[0].key.startswith("folds/0000000002-0000000006.1/")
    assert [info.key for info in _prune(store).objects] == [f"folds/0000000002-0000000006/{PART}"]
    assert housekeeping.check(_reader(store), read_data=True).problems == []


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
def test_a_fold_that_cannot_be(store: AgedStore, base: int, version: int, error: type[DeltaSyncError]) -> None:
    _forget(store, last=5)
    with pytest.raises(error, match=r"fold"):
        housekeeping.write_fold(_reader(store), base, version)


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
def test_an_export_is_a_checkpoint_that_transformers_loads(tmp_path: Path, memory_url: str, shard_bytes: int) -> None:
    model = _tiny()
    model.config.save_pretrained(tmp_path / "config")
    states = []
    with Publisher(memory_url, model_files=tmp_path / "config", anchor_every=2) as publisher:
        for _ in range(4):
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            publisher.publish(states[-1].items()).wait(60)
            with torch.no_grad():
                model.lm_head.weight[0] += 1
    reader = _reader(open_store(memory_url))
    for asked, version in ((2, 2), (None, 4)):
        directory = tmp_path / "out" / str(version)
        assert housekeeping.export(reader, asked, directory, shard_bytes=shard_bytes) == version
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        assert_same_bits(loaded.state_dict(), states[version - 1])
        assert (directory / "model.safetensors.index.json").exists() == (shard_bytes == 4096)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["2", "4"]


def test_an_export_takes_config_and_tokenizer_from_another_anchor_if_need_be(tmp_path: Path, memory_url: str) -> None:
    with Publisher(memory_url) as publisher:
        _publish(publisher, 1)
    with Publisher(memory_url, resume=True, anchor_every=1, model_files={"config.json": b"{}"}) as publisher:
        _publish(publisher, 2)
    housekeeping.export(_reader(open_store(memory_url)), 1, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_never_writes_over_anything(store: AgedStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    housekeeping.export(_reader(store), 3, tmp_path / "empty")
    (tmp_path / "file").write_text("years of work")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    for name in ("file", "full", "empty"):
        with pytest.raises(ConfigError, match="left as it is"):
            housekeeping.export(_reader(store), 3, tmp_path / name)
    assert (tmp_path / "full" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "years of work"


def test_an_export_that_fails_leaves_nothing(store: AgedStore, tmp_path: Path, memory_url: str) -> None:
    odd = open_store(f"{memory_url}-odd")
    with Publisher(odd, model_files={"a": b"a file", "a/b": b"a file in it"}) as publisher:  # which only an object store has
        _publish(publisher, 1)
    with pytest.raises(ConfigError, match="cannot be written"):
        housekeeping.export(_reader(odd), 1, tmp_path / "out")
    _change(store.inner, "anchors/0000000005/model.safetensors", flipped)
    with pytest.raises(CorruptDataError):
        housekeeping.export(_reader(store), 6, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        housekeeping.export(_reader(store), 9, tmp_path / "file" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# cp


def test_a_copy_is_the_channel(sound: Path, channel_url: str) -> None:
    source, target = open_store(f"file://{sound}"), open_store(channel_url)
    copied = housekeeping.copy(_reader(source), target)
    assert list(target.list("")) == list(source.list(""))
    assert all(target.read(info.key) == source.read(info.key) for info in source.list(""))
    assert (copied.version, copied.objects, copied.skipped) == (10, len(list(source.list(""))) - 1, 0)
    again = housekeeping.copy(_reader(source), target)
    assert (again.objects, again.bytes, again.skipped) == (0, 0, copied.objects)
    assert housekeeping.check(_reader(target), read_data=True).problems == []


def test_a_copy_leaves_garbage_heartbeats_and_unfinished_versions_behind(store: AgedStore, tmp_path: Path) -> None:
    for key in ("deltas/0000000004.1/part", "folds/0000000002-0000000003/part", layout.replica("a"), layout.forgotten("b")):
        store.create(key, b"{}")
    uploading = FaultyStore(store.inner)
    target = open_store(f"file://{tmp_path}/copy")
    with Publisher(uploading, resume=True) as publisher:
        gate = uploading.hold_at("replace")
        publisher.publish(STATES[10].items())
        assert gate.entered.wait(30)
        housekeeping.copy(_reader(store), target)
        gate.opened.set()
    report = housekeeping.check(_reader(target), read_data=True)
    assert (report.head, report.garbage_objects, report.publishing, report.problems) == (10, 0, 0, [])
    assert {info.key.split("/")[0] for info in target.list("")} == {
        "channel.json",
        "head.json",
        "manifests",
        "anchors",
        "deltas",
    }


CUTS = ("channel", "anchors/0000000005", "deltas/0000000004", "manifests/0000000006", "folds/", "head")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("newer", "key"),
    [(newer, key) for newer in (False, True) for key in CUTS if not (newer and key == "channel")],  # is there then
)
def test_a_copy_that_is_cut_short_is_a_channel_or_none_and_goes_on(
    memory_url: str, key: str, after: bool, newer: bool
) -> None:
    source, target = open_store(memory_url), FaultyStore(open_store(f"{memory_url}-copy"))
    _fill(source, 3 if newer else 10)
    before = None
    if newer:
        housekeeping.copy(_reader(source), target)
        before = 3
        with Publisher(source, resume=True, anchor_every=4) as publisher:
            for version in range(4, 11):
                _publish(publisher, version)
    housekeeping.write_fold(_reader(source), 2, 6)
    target.fail_at("replace" if key == "head" else "create", key, after=after, error=StoreError)
    with pytest.raises(StoreError):
        housekeeping.copy(_reader(source), target)
    if key == "head" and after:
        _assert_readable(target, 10)
    elif before is None:
        with pytest.raises(NotPublishedError):
            Replica(target).sync()
    else:
        assert Replica(target).sync() == before
        assert housekeeping.check(_reader(target), read_data=True).problems == []
    housekeeping.copy(_reader(source), target)
    _assert_readable(target, 1, 6, 10)
    assert housekeeping.check(_reader(target), read_data=True).problems == []


def test_a_copy_of_a_channel_that_grows_meanwhile(store: AgedStore, memory_url: str) -> None:
    target = open_store(f"{memory_url}-copy")
    gate = store.hold_at("list", "manifests/")
    with ThreadPoolExecutor(1) as pool, Publisher(store.inner, resume=True, anchor_every=4) as publisher:
        copying = pool.submit(housekeeping.copy, _reader(store), target)
        assert gate.entered.wait(30)
        _publish(publisher, 11)
        gate.opened.set()
        assert copying.result(60).version == 10
    _assert_readable(target, 10)
    assert _reader(target).versions() == list(range(1, 11))
    assert housekeeping.copy(_reader(store), target).objects == 2
    _assert_readable(target, 10, 11)


def test_a_copy_while_versions_are_forgotten(store: AgedStore, memory_url: str) -> None:
    target = open_store(f"{memory_url}-copy")
    gate = store.hold_at("read", layout.manifest(3))
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(housekeeping.copy, _reader(store), target)
        assert gate.entered.wait(30)
        while ("read", layout.manifest(10)) not in store.calls:  # by then 4 was read long ago
            time.sleep(0.01)
        _forget(store.inner, last=1, anchors=1)
        gate.opened.set()
        with pytest.raises(MissingVersionError, match="run it again"):
            copying.result(60)
    assert not list(target.list(""))
    housekeeping.copy(_reader(store), target)
    assert housekeeping.check(_reader(target), read_data=True).proven == [9, 10]


def test_copies_that_are_refused(store: AgedStore, memory_url: str) -> None:
    with pytest.raises(ConfigError, match="both source and target"):
        housekeeping.copy(_reader(store), store)
    other = open_store(f"{memory_url}-other")
    with Publisher(other) as publisher:
        _publish(publisher, 1)
    before = list(other.list(""))
    with pytest.raises(RunMismatchError, match="Nothing was copied"):
        housekeeping.copy(_reader(store), other)
    assert list(other.list("")) == before
    with pytest.raises(NotPublishedError):
        housekeeping.copy(_reader(open_store(f"{memory_url}-none")), other)

    ahead = open_store(f"{memory_url}-ahead")
    housekeeping.copy(_reader(store), ahead)
    with Publisher(ahead, resume=True) as publisher:
        _publish(publisher, 11)
    with pytest.raises(ChannelInUseError, match="ahead of"):
        housekeeping.copy(_reader(store), ahead)
    with Publisher(store.inner, resume=True) as publisher:
        publisher.publish(STATES[11].items()).wait(60)
    with pytest.raises(ChannelInUseError, match="another version 11"):
        housekeeping.copy(_reader(store), ahead)


@pytest.mark.parametrize("key", [f"deltas/0000000003/{PART}", layout.manifest(3), "anchors/0000000005/config.json"])
def test_other_bytes_in_the_target_are_left_and_told(store: AgedStore, memory_url: str, key: str) -> None:
    target = open_store(f"{memory_url}-copy")
    target.create(key, b"other")
    with pytest.raises(ObjectExistsError, match="other bytes"):
        housekeeping.copy(_reader(store), target)
    assert target.read(key) == b"other"
    with pytest.raises(NotPublishedError):
        _reader(target).head()


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda s: _change(s, f"deltas/0000000003/{PART}", flipped), CorruptDataError),
        (lambda s: _edit(s, layout.manifest(3), Manifest, step=7), CorruptDataError),
        (lambda s: s.delete(f"deltas/0000000003/{PART}"), MissingVersionError),
        (lambda s: s.replace(layout.manifest(3), b"{"), CorruptDataError),
    ],
    ids=["payload altered", "manifest rewritten", "payload missing", "manifest damaged"],
)
def test_damage_is_not_copied(
    store: AgedStore, memory_url: str, harm: Callable[[Store], None], error: type[DeltaSyncError]
) -> None:
    harm(store)
    target = open_store(f"{memory_url}-copy")
    with pytest.raises(error):
        housekeeping.copy(_reader(store), target)
    with pytest.raises(NotPublishedError):
        _reader(target).head()


def test_an_error_ends_a_copy_at_once(store: AgedStore, memory_url: str) -> None:
    target = FaultyStore(open_store(f"{memory_url}-copy"))
    target.fail_at("create", "anchors/0000000001", times=FOREVER, error=StoreError)
    slow = target.hold_at("create", "deltas/")
    threading.Timer(0.3, slow.opened.set).start()
    with pytest.raises(StoreError):
        housekeeping.copy(_reader(store), target)
    assert len([key for operation, key in target.calls if operation == "create"]) < 12
    time.sleep(0.1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deltasync-housekeeping")]


# The commands


@pytest.mark.parametrize(
    "command", ["check", "forget", "prune", "fold", "export", "cp", "log", "show", "serve", "bench codec"]
)
def test_every_help_names_the_exit_codes(command: str) -> None:
    shown = _deltasync(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "Exit codes: 0 done, 1 error" in shown.stdout


@pytest.fixture
def url(sound: Path, tmp_path: Path) -> str:
    url = f"file://{tmp_path}/channel"
    housekeeping.copy(_reader(open_store(f"file://{sound}")), open_store(url))
    return url


def test_forget_and_prune_as_commands(url: str) -> None:
    planned = _deltasync("forget", url, "--keep-last", 1, "--keep-step-every", 50, "--dry-run")
    assert "would forget  7 versions: 1-4, 6-8, and 1 fold" in planned.stdout
    assert "would keep    3 versions: 5, 9-10" in planned.stdout
    forgot = json.loads(_deltasync("forget", url, "--keep-last", 1, "--keep-step-every", 50, "--json").stdout)
    assert (forgot["kept"], forgot["forgotten"], len(forgot["folds"])) == ([5, 9, 10], [1, 2, 3, 4, 6, 7, 8], 1)
    spared = _deltasync("prune", url).stdout
    assert "deleted       0 objects, 0 bytes" in spared and "spared        10 objects" in spared
    assert "would delete  10 objects" in _deltasync("prune", url, "--grace", "0", "--dry-run").stdout
    pruned = json.loads(_deltasync("prune", url, "--grace", "0s", "--json").stdout)
    assert len(pruned["objects"]) == 10 and pruned["bytes"] > 2400 and pruned["waiting_objects"] == 0
    checked = json.loads(_deltasync("check", url, "--read-data", "--json").stdout)
    assert (checked["problems"], checked["proven"]) == ([], [5, 9, 10])


def test_check_as_a_command(url: str) -> None:
    sound = _deltasync("check", url, "--read-data")
    assert sound.exit_code == 0
    assert "holds         10 versions, 3 anchors, 2 folds" in sound.stdout
    assert "proven        the bits of 10 versions" in sound.stdout
    store = open_store(url)
    store.delete(f"deltas/0000000003/{PART}")
    _change(store, f"deltas/0000000007/{PART}", truncated)
    damaged = _deltasync("check", url)
    assert damaged.exit_code == 5
    assert f"MissingVersionError: deltas/0000000003/{PART}, which manifests/0000000003.json refers to" in damaged.stdout
    assert "problems      2" in damaged.stdout
    assert "not proven    the bits of 4 versions: 3-4, 7-8" in _deltasync("check", url, "--read-data").stdout
    as_json = _deltasync("check", url, "--json")
    assert as_json.exit_code == 5
    assert [problem["exit_code"] for problem in json.loads(as_json.stdout)["problems"]] == [5, 4]


def test_fold_log_and_show_as_commands(url: str) -> None:
    assert "fold 2-6: " in _deltasync("fold", url, 2, 6, "--codec", "context").stdout
    assert json.loads(_deltasync("fold", url, 2, 6, "--json").stdout)["codec"] == "context"
    rows = [json.loads(line) for line in _deltasync("log", url, "--json").stdout.splitlines()]
    assert [row["version"] for row in rows if row["kind"] != "fold"] == list(range(1, 11))
    assert [(row["base_version"], row["version"]) for row in rows if row["kind"] == "fold"] == [(1, 6), (2, 6), (5, 9)]
    shown = _deltasync("log", url).stdout
    assert "9 deltas " in shown and "3 anchors " in shown and "3 folds " in shown and "2-6" in shown
    assert "1 deltas " in _deltasync("log", url, "--last", 1).stdout
    assert _deltasync("show", url, 6).stdout.count("fold   ") == 2
    assert json.loads(_deltasync("show", url, 6, "--json").stdout)["chain"][-1][0] == 5


def test_export_as_a_command(url: str, tmp_path: Path) -> None:
    done = _deltasync("export", url, "latest", tmp_path / "out")
    assert done.stdout.startswith(f"version 10 in {tmp_path / 'out'}: 3 files")
    assert json.loads(_deltasync("export", url, 3, tmp_path / "three", "--json").stdout)["version"] == 3
    bare = f"file://{tmp_path}/bare"
    with Publisher(bare) as publisher:
        _publish(publisher, 1)
    assert "holds no config.json" in _deltasync("export", bare, 1, tmp_path / "bare-out").stderr


def test_cp_as_a_command(url: str, tmp_path: Path) -> None:
    target = f"file://{tmp_path}/copy"
    assert f"{target} is at version 10: copied " in _deltasync("cp", url, target).stdout
    assert json.loads(_deltasync("cp", url, target, "--json").stdout)["objects"] == 0
    assert "objects there already" in _deltasync("cp", url, target).stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["forget", "URL"], 2, "Say what to keep"),
        (["forget", "URL", "--keep-last", "0"], 2, "x>=1"),
        (["forget", "memory://no-channel", "--keep-last", "1"], 5, "holds no channel yet"),
        (["prune", "URL", "--grace", "soon"], 2, "not a duration"),
        (["fold", "URL", "6", "2"], 3, "to a later one"),
        (["fold", "URL", "2", "60"], 5, "not published yet, or forgotten"),
        (["export", "URL", "newest", "x"], 2, "neither a version nor"),
        (["export", "URL", "0", "x"], 2, "neither a version nor"),
        (["export", "URL", "60", "x"], 5, "Version 60 is not published"),
        (["cp", "URL", "URL"], 3, "both source and target"),
        (["check", "memory://no-channel"], 5, "holds no channel yet"),
    ],
)
def test_bad_input_gets_one_sentence_and_an_exit_code(url: str, arguments: list[str], exit_code: int, said: str) -> None:
    done = _deltasync(*[url if argument == "URL" else argument for argument in arguments])
    assert done.exit_code == exit_code
    assert said in done.stderr


def test_a_foreign_writer_may_put_files_elsewhere(store: AgedStore) -> None:
    """Readers take keys from manifests, so that is what is checked; and `prune` leaves what it does not know."""
    document = _reader(store).manifest(10)
    assert document.delta is not None
    (file,) = document.delta.files
    store.create("elsewhere/payload", store.read(file.key))
    store.create("deltas/elsewhere/payload", b"not ours")
    delta = dataclasses.replace(document.delta, files=[dataclasses.replace(file, key="elsewhere/payload")])
    _repoint(store, 10, delta=delta)
    assert [info.key for info in _prune(store).objects] == [file.key]
    report = housekeeping.check(_reader(store), read_data=True)
    assert (report.problems, report.garbage_objects) == ([], 0)
    _assert_readable(store, 10)


def test_bars_are_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as tell:
        tell("counting", 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bars() as tell:
        for done in (0, 1, 2):
            tell("counting", done, 2)
    shown = capsys.readouterr()
    assert "counting" in shown.err and shown.out == ""


@pytest.mark.parametrize(("numbers", "shown"), [([], ""), ([3], "3"), ([1, 2, 3, 7, 9, 10], "1-3, 7, 9-10")])
def test_versions_are_shown_as_ranges(numbers: list[int], shown: str) -> None:
    assert ranges(reversed(numbers)) == shown


def test_progress_is_told(store: AgedStore) -> None:
    told: list[tuple[str, int, int]] = []

    def tell(what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        told.append((what, done, total))

    housekeeping.check(_reader(store), read_data=True, progress=tell)
    housekeeping.forget(_reader(store), Keep(last=1), progress=tell)
    housekeeping.prune(_reader(store), grace_s=0, progress=tell)
    assert {what: (done, total) for what, done, total in told} == {
        "manifests": (2, 2),
        "replaying": (10, 10),
        "forgetting": (8, 8),
        "pruning": (14, 14),
    }


def test_wrong_bits_are_an_apply_error(copied: Store) -> None:
    _wrong_fold(copied)
    (problem,) = housekeeping.check(_reader(copied), read_data=True).problems
    assert isinstance(problem, FingerprintMismatchError)
