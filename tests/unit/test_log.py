"""The log of an epoch: two outcomes of a put, what happens while neither is known, and head behind it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from deltasync import Publisher, codec, open_store, ops, tensors
from deltasync.channel import documents, keys, payloads
from deltasync.channel.documents import Anchor, DeltaFiles, File, Record
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FencedError,
    PublishPendingError,
    StoreError,
    TransientStoreError,
)
from deltasync.stores.leased import CLAIMS
from tests.faults import flipped
from tests.waiting import wait_until
from tests.writers import TENSORS, Place, Script, head, history


def verb(place: Place) -> str:
    """How records are put there."""
    return "create" if place.decides else "put"


class TestLostReplies:
    @pytest.mark.parametrize("after", [True, False])
    def test_a_version_stays_pending_until_there_is_an_answer(self, quick: Place, after: bool) -> None:
        store = quick.writer()
        a = Script(store, lease=quick.lease, retries=0)
        first = a.publish().version
        store.fail_at(verb(quick), keys.VERSIONS, after=after, times=1 if after else 2)
        with pytest.raises(PublishPendingError, match="has not said whether it has version 2"):
            a.publish("second")
        pending = a.log.pending
        assert pending is not None
        assert (pending.record.version, a.log.tip, a.log.next_version) == (2, first, 3)
        if not after:  # otherwise it would find its bytes
            with pytest.raises(PublishPendingError):
                a.log.settle()
            assert a.log.pending is pending
        third = a.publish("third")  # puts the pending one first
        assert (third.record.version, third.record.base) == (3, pending.version)
        assert history(quick.store) == [first, pending.version, third.version]
        assert a.log.pending is None
        assert a.log.published == {1: first.sha256, 2: pending.sha256, 3: third.sha256}

    def test_the_channel_is_created_with_the_same_bytes(self, quick: Place) -> None:
        store = quick.writer()
        a = Script(store, lease=quick.lease, retries=0)
        store.fail_at(verb(quick), keys.CHANNEL, after=True)
        with pytest.raises(PublishPendingError, match=r"channel\.json"):
            a.publish()
        assert a.log.channel is None
        assert (a.log.pending, a.log.next_version) == (None, 1)
        created = a.create()
        a.log.give_up(1)
        a.publish("again")
        assert a.log.channel == created == ChannelReader(quick.store).channel()

    def test_a_damaged_answer_is_no_other_writer(self, memory: Place) -> None:
        store = memory.writer()
        a = Script(store)
        a.publish()
        store.fail_at("create", keys.VERSIONS, after=True)
        answers = iter([True, True])
        store.tamper(keys.VERSIONS, lambda data: flipped(data) if next(answers, False) else data)
        a.publish()
        assert len(history(memory.store)) == 2

    def test_a_slot_that_is_taken_and_empty_is_asked_for_again(self, memory: Place) -> None:
        store = memory.writer()
        a = Script(store, retries=1)
        a.publish()
        store.fail_at("create", keys.VERSIONS, after=True)
        store.drop(keys.VERSIONS)
        with pytest.raises(PublishPendingError, match="cannot be read back"):
            a.publish()
        store.heal()
        a.log.settle()
        assert len(history(memory.store)) == 2


class TestErrorsThatDoNotPass:
    def test_of_a_file_leave_the_number_free(self, quick: Place) -> None:
        """The next publish takes it, and a folder that nobody has used."""
        store = quick.writer()
        a = Script(store, lease=quick.lease)
        first = a.publish().version
        for number, error in enumerate((StoreError, TransientStoreError)):
            fault = store.fail_at("put", keys.PARTS, times=4, after=True, error=error)
            with pytest.raises(error):
                a.publish(f"given up {number}")
            assert fault.hits == (1 if error is StoreError else 4)
            store.heal()
            assert (a.log.pending, a.log.next_version, a.log.attempt(2)) == (None, 2, number)
            a.log.give_up(2)
        second = a.publish("second")
        assert [file.key.split("/")[1] for file in second.record.files] == [f"0000000002.{a.log.epoch}.2"]
        assert history(quick.store) == [first, second.version]
        assert a.log.attempt(3) == 0

    def test_of_head_are_not_the_publishers(self, quick: Place, caplog: pytest.LogCaptureFixture) -> None:
        store = quick.writer()
        a = Script(store, lease=quick.lease)
        fault = store.fail_at("put", keys.HEAD, times=2, error=StoreError)
        for _ in range(2):
            a.publish()
        assert fault.hits == 2
        assert head(quick.store) is None
        assert "head is behind version 2" in caplog.text
        a.log.close()
        found = head(quick.store)
        assert found is not None
        assert found.newest == a.log.tip


class TestSuspended:
    def test_a_request_later_than_is_assumed_costs_a_fork_and_a_seal(self, leased: Place) -> None:
        """A zombie: it has looked, and its request takes effect long after the next writer has settled. It
        learns of it.
        """
        store = leased.writer()
        a = Script(store)
        first = a.publish().version
        gate = store.hold_at("put", keys.VERSIONS)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(a.publish, "late", wait=False)
            assert gate.entered.wait(60)
            b = leased.script("b")
            assert b.tip == first
            second = b.publish("b")
            leased.journal.forget(keys.slot(2, a.log.epoch))  # of the seal
            gate.opened.set()
            with pytest.raises(FencedError, match="Another publisher has claimed"):
                late.result()
        fork = ChannelReader(leased.store).stored(keys.slot(2, a.log.epoch))
        assert (fork.record.version, fork.record.base) == (2, first)
        assert fork.key != second.key
        with pytest.raises(FencedError):
            a.publish("never")
        assert history(leased.store) == [first, second.version]
        assert ops.check(ChannelReader(leased.store)).orphans == [fork.key]
        third = leased.script("c").publish("c")
        assert third.record.base == second.version
        assert history(leased.store) == [first, second.version, third.version]

    def test_a_repetition_looks_again(self, leased: Place) -> None:
        store = leased.writer()
        a = Script(store)
        a.publish()
        store.calls.clear()
        store.fail_at("put", keys.VERSIONS)
        a.publish()
        order = [
            call[1][:7]
            for call in store.calls
            if call == ("list", CLAIMS) or (call[0] == "put" and call[1].startswith(keys.VERSIONS))
        ]
        # A slow machine looks more than once before a put.
        assert [before for before, call in itertools.pairwise(order) if call == "version"] == ["claims/"] * 2


class TestHead:
    def test_nobody_waits_for_it_and_only_the_newest_is_written(self, quick: Place) -> None:
        store = quick.writer()
        a = Script(store, lease=quick.lease)
        gate = store.hold_at("put", keys.HEAD)
        store.calls.clear()
        found = [a.publish(str(number), wait=False).version for number in range(5)]
        assert gate.entered.wait(60)
        assert history(quick.store) == found
        gate.opened.set()
        a.log.close()
        assert store.calls.count(("put", keys.HEAD)) <= 3
        assert store.calls.count(("read", keys.HEAD)) <= 3
        last = head(quick.store)
        assert last is not None
        assert last.newest == found[-1]

    def test_a_damaged_one_is_replaced(self, quick: Place) -> None:
        a = quick.script("a")
        a.publish()
        quick.store.put(keys.HEAD, b"not json")
        last = a.publish()
        found = head(quick.store)
        assert found is not None
        assert found.newest == last.version

    def test_a_writer_that_published_nothing_leaves_it(self, quick: Place) -> None:
        a = quick.script("a")
        quick.damage(a.publish().key, b"damaged")
        quick.forget(keys.HEAD)
        b = quick.script("b")
        assert b.log.tip is not None
        b.log.close()
        assert head(quick.store) is None


class TestFolds:
    def test_they_name_both_ends(self, anywhere: Place) -> None:
        a = anywhere.script("a")
        found = [a.publish(str(number)) for number in range(3)]
        part = a.log.put_file(
            keys.parts_folder(3, a.log.epoch, 7), "000-00001.safetensors", b"a compaction's"
        )
        delta = DeltaFiles(codec="packed", changed=1, parts=[part])
        compaction = a.log.shortcut(found[2].version, "1" * 16, None, base=found[0].version, delta=delta)
        anchor = found[0].record.anchor
        assert anchor is not None
        announced = a.log.shortcut(found[0].version, "2" * 16, None, anchor=anchor)
        reader = ChannelReader(anywhere.store)
        for each, base, version in (
            (compaction, found[0].version, found[2].version),
            (announced, None, found[0].version),
        ):
            read = reader.stored(each.key, each.sha256)
            assert (read.record, read.version, read.record.base) == (each.record, version, base)
        assert {info.key for _, info in reader.shortcuts()} == {compaction.key, announced.key}


class TestBounds:
    def document(self, a: Script, **changes: object) -> Record:
        anchor = Anchor(directory=keys.anchor_folder(1, a.log.epoch))
        plain = Record(
            run_id="x",
            kind="anchor",
            version=9,
            epoch=a.log.epoch,
            created_at=documents.now(),
            fingerprint="0" * 16,
            anchor=anchor,
        )
        return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]

    @pytest.fixture
    def created(self, quick: Place) -> Iterator[Script]:
        """A channel; nothing but channel.json may be there at the end."""
        a = quick.script("a")
        a.create()
        yield a
        a.log.close()
        assert not list(quick.store.list(keys.VERSIONS))
        assert (a.log.pending, a.log.tip, a.log.next_version) == (None, None, 1)

    def test_weights_that_are_larger_than_the_channels(self, created: Script) -> None:
        folder = keys.anchor_folder(1, created.log.epoch)
        most = created.create().most_payload_bytes
        file = File(key=f"{folder}/model.safetensors", bytes=most + 1, sha256="0" * 64)
        with pytest.raises(ConfigError, match="this channel allows"):
            created.log.append(self.document(created, anchor=Anchor(directory=folder, files=[file])), None)

    def test_a_record_that_is_too_large(self, created: Script) -> None:
        folder = keys.anchor_folder(1, created.log.epoch)
        files = [File(key=f"{folder}/{number}", bytes=0, sha256="0" * 64) for number in range(50_000)]
        with pytest.raises(
            ConfigError, match=r"versions/0000000/0000000001\S* has [\d,]+ bytes; this channel allows 5,2"
        ):
            created.log.append(self.document(created, anchor=Anchor(directory=folder, files=files)), None)

    def test_what_readers_would_refuse(self, created: Script) -> None:
        with pytest.raises(CorruptDataError):
            created.log.append(self.document(created, kind="delta"), None)
        with pytest.raises(CorruptDataError):
            created.log.append(self.document(created, created_at="yesterday"), None)


def _specs() -> dict[str, documents.TensorSpec]:
    return {name: documents.TensorSpec(name, dtype, shape) for name, (dtype, shape) in TENSORS.items()}


def test_a_payload_goes_into_the_record(anywhere: Place) -> None:
    a = anywhere.script("a")
    a.publish()
    log, spec = a.log, _specs()["w"]
    index_K, new_K = np.array([3, 5], np.int32), np.array([7, 9], np.uint16)
    new = np.zeros(spec.element_count, np.uint16)
    new[index_K] = new_K
    changes = tensors.Delta(tensors.Layout(_specs()), {2: tensors.Sparse(index_K, new_K)})
    payload = codec.get("raw").encode(
        changes, lambda _: (new, 0), {"w": 0xAB}, log.next_version, log.next_version - 1
    )
    document = Record(
        run_id=log.run_id,
        kind="delta",
        version=log.next_version,
        epoch=log.epoch,
        created_at=documents.now(),
        fingerprint="0" * 16,
        delta=DeltaFiles(codec="raw", changed=2),
        step=-5,
    )
    stored = log.append(document, payload)
    reader = ChannelReader(anywhere.store)
    found = reader.record(stored.version)
    assert found.record == stored.record
    assert found.data == stored.data
    assert (found.record.step, found.record.base) == (-5, a.tip or found.record.base)
    old_N = np.arange(reader.specs["w"].element_count).astype(new_K.dtype)
    delta, fingerprints = payloads.delta(reader, found, lambda _: old_N)
    assert fingerprints == {"w": 0xAB}
    steps = delta.of("w")
    np.testing.assert_array_equal(steps.at_K, index_K)
    np.testing.assert_array_equal(old_N[index_K] + steps.data_K, new_K)
    log.close()


def test_closing_brings_head_up_to_date_and_leaves_no_thread_and_no_probe(quick: Place) -> None:
    a = quick.script("a")
    a.publish()
    a.log.close()
    assert not a.log.busy
    head = a.log.reader.head()
    assert head is not None
    assert head.newest == a.log.tip
    assert not list(quick.store.list("probe/"))


@pytest.mark.parametrize("digits", ["4", "6"])
def test_a_writer_of_a_lost_epoch_stops_whatever_digits_the_other_drew(
    tmp_path: Path, digits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store went back to a backup while a publisher ran, and another one opened it with the same number."""
    weights = {"w": torch.zeros(9)}

    def opened(digit: str, resume: bool) -> Publisher:
        with monkeypatch.context() as patch:
            patch.setattr("secrets.token_hex", lambda size=32: digit * 2 * size)
            return Publisher(f"file://{tmp_path}/run", resume=resume)

    def publish(publisher: Publisher) -> None:
        weights["w"] += 1
        publisher.publish(weights.items()).wait(60)
        log = publisher._opened.log
        assert log is not None
        wait_until(lambda: not log.busy)  # head follows

    with opened("1", False) as first:
        publish(first)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    old = opened("5", True)
    publish(old)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")
    with opened(digits, True) as new:
        for _ in range(2):
            publish(new)
        with pytest.raises(FencedError, match="head names epoch 000002-"):
            for _ in range(2):  # the first one finds the other in head, which it moves behind its version
                publish(old)
        publish(new)
        assert new.version == 4
    with contextlib.suppress(DeltaSyncError):
        old.close()
    assert ChannelReader(open_store(f"file://{tmp_path}/run")).head().version == 4  # type: ignore[union-attr]
