"""One writer after another, where the store decides who may write and where it does not. No key ever gets two contents."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from deltasync import open_store
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import EpochDocument, Record, VersionId, sha256_hex
from deltasync.channel.signing import Signer, new_key
from deltasync.config import PublisherSettings
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    DeltaSyncError,
    FencedError,
    PublishError,
    StoreError,
    UnsupportedFormatError,
)
from deltasync.publish.acquire import open_channel
from deltasync.publish.log import Lease
from deltasync.stores import Store
from tests.channels import EPOCH, filled, states_of
from tests.faults import flipped
from tests.writers import QUICK, Place, Script, WriterStore, head, history, restore, snapshot


def test_the_next_writer_goes_on_and_the_one_before_stops(anywhere: Place) -> None:
    a = anywhere.script("a", resume=False)
    assert (a.channel, a.tip) == (None, None)
    first, second = a.publish("one"), a.publish("two")
    b = anywhere.script("b")
    assert b.channel == a.log.channel
    assert b.end is not None
    assert (b.end.sha256, b.tip) == (second.sha256, second.version)
    third = b.publish("three")
    for _ in range(2):
        with pytest.raises(FencedError, match="Another publisher opened the channel"):
            a.publish("never")
    for each in (a, b):
        each.log.close()
    assert history(anywhere.store) == [first.version, second.version, third.version]
    assert third.record.base == second.version
    assert keys.epoch_number(third.version.epoch) == keys.epoch_number(second.version.epoch) + 1
    found = head(anywhere.store)
    assert found is not None
    assert found.newest == third.version


def test_what_says_who_opened_the_channel(quick: Place) -> None:
    quick.script("a").publish()
    b = quick.script("b")
    opening = b.reader.opening(b.log.epoch)
    assert opening is not None
    assert opening.run_id == b.log.run_id
    assert opening.continues == (b.tip if b.log.fencing == "seal" else None)
    assert opening.writer.isprintable()
    assert b.channel is not None
    assert b.channel.fencing == b.log.fencing


def test_a_writer_that_publishes_nothing_is_succeeded_too(quick: Place) -> None:
    end = quick.script("a").publish().version
    silent = [quick.script(name) for name in ("b", "c", "d")]
    assert [each.tip for each in silent] == [end] * 3
    for each in silent[:2]:
        with pytest.raises(FencedError):
            each.publish()
    last = silent[2].publish()
    assert history(quick.store) == [end, last.version]
    assert last.record.base == end


def test_a_channel_without_a_version(quick: Place) -> None:
    a = quick.script("a", resume=False)
    a.create()
    if a.log.fencing == "lease":  # it dies after it has put channel.json
        assert a.log.channel is None
        quick.damage(keys.CHANNEL, documents.encode(a.create()))
    with pytest.raises(ChannelInUseError, match="already holds run"):
        quick.script("b", resume=False)
    b = quick.script("b")
    assert (b.end, b.tip) == (None, None)
    first = b.publish()
    assert (first.record.version, first.record.base) == (1, None)
    with pytest.raises(FencedError):
        a.publish()
    c = quick.script("c")
    assert c.tip == first.version
    assert history(quick.store) == [first.version]


class TestTwoAtOnce:
    def test_open_one_log_and_one_of_them_writes(self, anywhere: Place) -> None:
        end = anywhere.script("a").publish().version
        stores = [anywhere.writer(name) for name in ("b", "c")]
        step = "create", "versions/"
        gates = [store.hold_at(*(step if store.can_create else ("put", "epochs/"))) for store in stores]

        def run(store: WriterStore) -> Script:
            opened = Script(store, lease=anywhere.lease)
            opened.publish(store._name)
            return opened

        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(run, store) for store in stores]
            for gate in gates:
                assert gate.entered.wait(60)
            for gate in gates:
                gate.opened.set()
            errors = [run.exception() for run in runs]
        won = [run.result() for run, error in zip(runs, errors, strict=True) if error is None]
        lost = [error for error in errors if error is not None]
        assert len(won) == len(lost) == 1
        assert isinstance(lost[0], FencedError)
        assert str(lost[0]).startswith("Another publisher open")
        found = history(anywhere.store)
        assert found[:1] == [end]
        assert {version.epoch for version in found[1:]} <= {won[0].log.epoch}
        assert won[0].log.tip == found[-1]

    def test_create_one_channel(self, anywhere: Place) -> None:
        both = [anywhere.script(name, resume=False) for name in ("a", "b")]
        both.sort(key=lambda each: each.log.epoch, reverse=True)
        if both[0].log.fencing == "seal":
            both.reverse()  # there the first one to create it wins, here the greater epoch
        winner, loser = both
        first = winner.publish("winner")
        with pytest.raises(FencedError, match="Another publisher"):
            loser.publish("loser")
        assert history(anywhere.store) == [first.version]

    def test_the_one_that_claimed_first_goes_on_from_what_was_there_and_stops(self, leased: Place) -> None:
        a = leased.script("a")
        first = a.publish()
        leased.lease = Lease(0.5, 0.1, 0.1)
        store = leased.writer("b")
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Script, store, lease=leased.lease)
            while ("put", keys.EPOCHS) not in [(verb, key[: len(keys.EPOCHS)]) for verb, key in store.calls]:
                time.sleep(0.001)
            c = Script(leased.writer("c"), lease=QUICK)
            second = c.publish()
            b = opening.result()
        assert b.tip == first.version
        with pytest.raises(FencedError, match=f"as epoch {c.log.epoch}, after {b.log.epoch}"):
            b.publish()
        assert history(leased.store) == [first.version, second.version]

    def test_a_lesser_epoch_that_came_later_leaves_the_channel_alone(self, leased: Place) -> None:
        a, b = (leased.script(name, resume=False) for name in ("a", "b"))
        greater, lesser = sorted((a, b), key=lambda each: each.log.epoch, reverse=True)
        first = greater.publish()
        leased.store.delete(keys.epoch_document(greater.log.epoch))
        with pytest.raises(FencedError, match="created the channel"):
            lesser.publish()
        assert history(leased.store) == [first.version]

    def test_a_version_that_comes_before_the_seal_is_the_end(self, deciding: Place) -> None:
        a = deciding.script("a")
        a.publish()
        store = deciding.writer("b")
        gate = store.hold_at("create", "versions/")
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Script, store)
            assert gate.entered.wait(60)
            ends = [a.publish().version for _ in range(3)]
            gate.opened.set()
            b = opening.result()
        assert b.tip == ends[-1]
        assert [call for call in store.calls if call[0] == "list"].count(
            ("list", "versions/")
        ) <= 4  # it does not start over
        with pytest.raises(FencedError):
            a.publish()
        assert len(history(deciding.store)) == 4


def test_many_writers_that_know_nothing_of_each_other(deciding: Place) -> None:
    """Whatever one of them was told is published stays in the one log there is."""

    def run(name: str) -> list[VersionId]:
        kept = []
        for number in range(6):
            with contextlib.suppress(FencedError):
                writer = deciding.script(f"{name}{number}", retries=9)
                for _ in range(number):
                    kept.append(writer.publish(name).version)
        return kept

    with ThreadPoolExecutor(4) as pool:
        kept = [version for found in pool.map(run, "abcd") for version in found]
    found = history(deciding.store)
    assert set(kept) == set(found)
    assert len({version.epoch for version in found}) > 1


def test_a_seal_in_the_place_of_a_forgotten_version_does_not_count(deciding: Place) -> None:
    a = deciding.script("a")
    a.publish()
    store = deciding.writer("b")
    gate = store.hold_at("create", "versions/")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Script, store)
        assert gate.entered.wait(60)
        second, third = a.publish(), a.publish()
        deciding.forget(second.key)
        gate.opened.set()
        b = opening.result()
    assert b.tip == third.version
    fourth = b.publish()
    assert (fourth.record.version, fourth.record.base) == (4, third.version)
    with pytest.raises(FencedError):
        a.publish()
    sealed = ChannelSlots(deciding.store)
    assert sealed[2, a.log.epoch].kind == sealed[4, a.log.epoch].kind == "seal"
    assert sealed[4, a.log.epoch].next_epoch == b.log.epoch


class ChannelSlots(dict[tuple[int, str], Record]):
    """The documents of all slots."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        for info in store.list(keys.VERSIONS):
            found = record.decode(store.read(info.key, 1 << 30), info.key, None).record
            self[found.version, found.epoch] = found


class TestDying:
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("new", [False, True])
    def test_after_any_step_the_next_writer_goes_on(self, quick: Place, new: bool, after: bool) -> None:
        """The store fails for good at call k of an opening and its first version, for each k."""
        step, died = 0, True
        while died:
            place = Place(open_store(f"memory://{uuid.uuid4().hex}"), quick.decides)
            known = [] if new else [place.script("a").publish().version]
            died = _publish_until(place.writer("b"), step, after, place.lease)
            c = place.script("c")
            end = c.tip
            if end is not None and end not in known:
                known.append(end)
            assert ([] if c.channel is None else history(place.store)) == known
            last = c.publish("c")
            assert history(place.store) == [*known, last.version]
            place.journal.check(place.store)
            step += 1
        assert step > 5


def _publish_until(store: WriterStore, step: int, after: bool, lease: Lease) -> bool:
    """Open and publish, with a store that fails at each call from call `step` on; whether that happened."""
    died, perform = False, store.ask

    def counted(operation: str, key: str, action: Callable[[], object]) -> object:
        nonlocal died
        if len(store.calls) < step:
            return perform(operation, key, action)
        store.calls.append((operation, key))
        if after and not died:
            action()
        died = True
        raise StoreError("the writer is dead")

    store.ask = counted  # type: ignore[method-assign, assignment]
    try:
        Script(store, lease=lease).publish("b")
    except DeltaSyncError:
        assert died
    return died


class TestDamage:
    def test_what_cannot_be_read_is_followed_by_full_weights(self, anywhere: Place) -> None:
        a = anywhere.script("a")
        a.publish()
        second = a.publish()
        damaged = flipped(anywhere.store.read(second.key, 1 << 30))
        anywhere.damage(second.key, damaged)
        b = anywhere.script("b")
        assert b.end is None
        assert b.tip is not None
        assert (b.tip.version, b.tip.sha256) == (2, sha256_hex(damaged))
        third = b.publish()
        assert (third.record.kind, third.record.base) == ("anchor", b.tip)
        with pytest.raises(FencedError):
            a.publish()
        c = anywhere.script("c")
        assert c.tip == third.version
        assert c.end is not None

    def test_a_record_that_is_too_large_is_not_read_whole(self, quick: Place) -> None:
        a = quick.script("a")
        first = a.publish()
        data = first.data
        assert data is not None
        most = a.log._bounds.most_bytes(first.key)
        quick.damage(first.key, data + bytes(most))
        b = quick.script("b")
        assert b.tip is not None
        assert b.tip.sha256 == sha256_hex((data + bytes(most))[:most])
        assert b.publish().record.kind == "anchor"

    def test_an_answer_that_is_damaged_once_is_asked_for_again(self, quick: Place) -> None:
        end = quick.script("a").publish().version
        store, answers = quick.writer("b"), iter([True, True])
        store.tamper("versions/", lambda data: flipped(data) if next(answers, False) else data)
        assert Script(store, lease=QUICK).end is not None
        assert history(quick.store) == [end]

    def test_a_damaged_seal_is_told_by_the_document_of_its_epoch(self, memory: Place) -> None:
        a = memory.script("a")
        end = a.publish().version
        b = memory.script("b")
        key = keys.slot(2, a.log.epoch)
        memory.damage(key, flipped(memory.store.read(key, 1 << 30)))
        c = memory.script("c")
        assert c.tip == end
        with pytest.raises(FencedError):
            b.publish()
        second = c.publish()
        assert second.record.base == end
        assert keys.epoch_number(c.log.epoch) == 3

    def test_a_damaged_document_of_an_epoch_is_done_without(self, memory: Place) -> None:
        end = memory.script("a").publish().version
        b = memory.script("b")
        key = keys.epoch_document(b.log.epoch)
        memory.damage(key, b"{")
        c = memory.script("c")
        assert c.tip == end
        with pytest.raises(FencedError):
            b.publish()
        assert c.publish().record.base == end

    def test_the_document_of_another_runs_epoch_says_nothing(self, quick: Place) -> None:
        first = quick.script("a").publish()
        epoch = "000007-00000000"
        stray = VersionId(41, epoch, "0" * 64)
        opening = EpochDocument(run_id="other", epoch=epoch, continues=stray, writer="", created_at=documents.now())
        quick.damage(keys.epoch_document(epoch), documents.encode(opening))
        b = quick.script("b")
        assert b.tip == first.version
        assert keys.epoch_number(b.log.epoch) == 2
        assert b.publish().record.version == 2

    def test_a_record_of_a_newer_writer_is_not_passed_over(self, quick: Place) -> None:
        a = quick.script("a")
        first = a.publish()
        newer = record.encode(dataclasses.replace(first.record, requires=["new"]), first.key, None, None).data
        assert newer is not None
        quick.damage(first.key, newer)
        with pytest.raises(UnsupportedFormatError, match="Upgrade"):
            quick.script("b")


_FAR = "999999-ffffffff"


def _junk(what: str, a: Script) -> tuple[str, bytes]:
    """A key and the bytes that somebody without the signing key stores there, in the channel of `a` at version 2."""
    channel, end = a.log.channel, a.log.tip
    assert channel is not None and end is not None
    far = VersionId(keys.LARGEST_VERSION - 1, _FAR, "0" * 64)
    if what == "an epoch":
        return keys.epoch_document(_FAR), b"{}"
    if what == "an opening":
        opening = EpochDocument(run_id=channel.run_id, epoch=_FAR, continues=far, writer="", created_at=documents.now())
        return keys.epoch_document(_FAR), documents.encode(opening)
    if what == "head":
        head = documents.Head(run_id=channel.run_id, version=far.version, epoch=_FAR, sha256=far.sha256)
        return keys.HEAD, documents.encode(head)
    version, epoch = {
        "the next record": (3, end.epoch),
        "a far record": (5_000_000_000, end.epoch),
        "the last number": (keys.LARGEST_VERSION, _FAR),
        "a record that was signed for another place": (3, "000002-ffffffff"),
    }[what]
    signed = a.reader.stored(end.key).data
    assert signed is not None
    return keys.slot(version, epoch), b"x" if "signed" not in what else signed


class TestJunk:
    @pytest.mark.parametrize(
        "what",
        [
            *("an epoch", "an opening", "head", "the next record", "a far record", "the last number"),
            "a record that was signed for another place",
        ],
    )
    def test_what_nobody_signed_decides_nothing_and_leaves_nothing(
        self, quick: Place, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        new_key(tmp_path / "key", "test")
        signer = Signer(tmp_path / "key")
        a = quick.script("a", signer=signer)
        a.publish()
        second = a.publish().version
        key, data = _junk(what, a)
        quick.damage(key, data)
        b = quick.script("b", signer=signer)
        assert b.tip == second
        named = [found.getMessage() for found in caplog.records if key in found.getMessage()]
        assert len(named) == (what != "head")
        third = b.publish()
        assert third.record.base == second
        assert keys.epoch_number(third.record.epoch) == 2
        for _ in range(2):
            with pytest.raises(FencedError):
                a.publish()
        quick.forget(key)
        c = quick.script("c", signer=signer)
        assert c.tip == third.version
        assert c.publish().record.version == 4
        assert keys.epoch_number(c.log.epoch) == 3

    @pytest.mark.parametrize("what", ["an epoch", "an opening", "head", "a far record", "the last number"])
    def test_one_object_of_a_great_number_moves_no_number_of_an_unsigned_channel(self, quick: Place, what: str) -> None:
        a = quick.script("a")
        a.publish()
        second = a.publish().version
        key, data = _junk(what, a)
        quick.damage(key, data)
        b = quick.script("b")
        assert (b.tip, keys.epoch_number(b.log.epoch)) == (second, 2)
        quick.forget(key)
        assert b.publish().record.version == 3

    def test_a_damaged_record_whose_signature_holds_is_the_end(self, quick: Place, tmp_path: Path) -> None:
        new_key(tmp_path / "key", "test")
        signer = Signer(tmp_path / "key")
        a = quick.script("a", signer=signer)
        a.publish()
        second = a.publish()
        data = quick.store.read(second.key, 1 << 30)
        quick.damage(second.key, bytes([data[0] ^ 1]) + data[1:])
        b = quick.script("b", signer=signer)
        assert b.end is None
        assert b.publish().record.version == 3

    def test_an_end_whose_record_is_junk_is_the_one_that_a_signed_shortcut_names(self, tmp_path: Path) -> None:
        """All between was forgotten: the version before the junk is known by a compaction only."""
        store = open_store(f"memory://{uuid.uuid4().hex}")
        new_key(tmp_path / "key", "test")
        signer = Signer(tmp_path / "key")
        _, versions = filled(store, states_of(500, 5), compactions=((1, 4),), signer=signer)
        store.delete(*(keys.slot(number, EPOCH) for number in (2, 3, 4)))
        store.put(keys.slot(5, EPOCH), b"x")
        b = Script(store, lease=QUICK, signer=signer)
        assert b.tip == versions[3]
        assert b.publish().record.version == 5


class TestRestoredBackup:
    def test_versions_that_follow_are_other_versions(self, quick: Place) -> None:
        a = quick.script("a")
        first, second = a.publish(), a.publish("lost")
        a.log.close()
        saved = snapshot(quick.store)
        lost = [a2.publish("lost") for a2 in [quick.script("b")] for _ in range(2)]
        restore(quick.store, saved)
        quick.journal.forget(keys.slot(3, a.log.epoch))  # the one key that several may write, a seal each
        c = quick.script("c")
        assert c.tip == second.version
        found = [c.publish("kept") for _ in range(2)]
        assert [each.record.version for each in found] == [each.record.version for each in lost] == [3, 4]
        assert not {each.version for each in found} & {each.version for each in lost}
        assert not {each.key for each in found} & {each.key for each in lost}
        assert history(quick.store) == [first.version, second.version, *(each.version for each in found)]

    def test_the_old_writer_stops_at_head(self, memory: Place) -> None:
        """A writer of whose epoch the store knows nothing any more: no seal fences it."""
        a = memory.script("a")
        first = a.publish()
        saved = snapshot(memory.store)
        b = memory.script("b")
        b.publish("lost")
        restore(memory.store, saved)
        memory.journal.forget(keys.slot(2, a.log.epoch))
        memory.script("c")
        d = memory.script("d")
        second = d.publish()
        d.log.close()
        found = memory.store.read(keys.HEAD, 1 << 30)
        b.publish("a fork")
        with pytest.raises(FencedError, match=f"head names epoch {d.log.epoch}"):
            b.publish()
        assert memory.store.read(keys.HEAD, 1 << 30) == found
        assert history(memory.store) == [first.version, second.version]


def test_a_head_that_names_a_version_which_is_not_there_stops_nobody(quick: Place) -> None:
    a = quick.script("a")
    a.publish()
    found = head(quick.store)
    assert found is not None
    wrong = dataclasses.replace(found, epoch=keys.new_epoch(100_001))
    quick.damage(keys.HEAD, documents.encode(wrong))
    second = a.publish().version
    assert head(quick.store) == dataclasses.replace(found, version=second.version, sha256=second.sha256)


class TestStoresThatDoNotDecide:
    def test_what_is_claimed_can_be_filled_at_once_but_a_version_waits(self, leased: Place) -> None:
        leased.lease = Lease(0.5, 0.1, 0.1)
        a = leased.script("a", resume=False)
        folder = keys.anchor_folder(1, a.log.epoch)
        a.log.put_file(folder, "model-00001-of-00002.safetensors", b"meanwhile")
        assert not list(leased.store.list(keys.VERSIONS))
        claimed_s = _stored_s(leased.store, keys.EPOCHS)
        a.publish()
        assert _stored_s(leased.store, keys.CHANNEL) - claimed_s >= 0.5

    def test_if_none_match_that_is_ignored_is_found_out(self, memory: Place, caplog: pytest.LogCaptureFixture) -> None:
        a = Script(memory.writer("a", ignores=True), lease=QUICK)
        assert a.log.fencing == "lease"
        assert "does not decide which of two publishers may write" in caplog.text
        first = a.publish()
        b = Script(memory.writer("b", ignores=True), lease=QUICK)
        second = b.publish()
        with pytest.raises(FencedError):
            a.publish()
        assert history(memory.store) == [first.version, second.version]

    def test_a_channel_that_seals_is_not_written_through_them(self, memory: Place) -> None:
        memory.script("a").publish()
        before = snapshot(memory.store)
        for options in ({"ignores": True}, {"decides": False}):
            store = WriterStore(memory.store, memory.journal, "b", **options)
            with pytest.raises(ConfigError, match="nothing may be written"):
                Script(store, lease=QUICK)
        assert snapshot(memory.store) == before

    def test_a_channel_with_leases_keeps_them_where_the_store_decides(self, leased: Place) -> None:
        leased.script("a").publish()
        store = WriterStore(leased.store, leased.journal, "b")
        b = Script(store, lease=QUICK)
        b.publish()
        assert b.log.fencing == "lease"
        assert not [key for verb, key in store.calls if verb == "create"]


def _stored_s(store: Store, prefix: str) -> float:
    return max(info.modified_s for info in store.list(prefix))


class TestWhatIsRefused:
    def test_another_run_and_another_dtype(self, quick: Place) -> None:
        a = quick.script("a")
        a.publish()
        before = snapshot(quick.store)
        with pytest.raises(ChannelInUseError, match=f"already holds run {a.log.run_id}. Pass resume=True"):
            quick.script("b", resume=False)
        settings = PublisherSettings(dtype="float16")
        with pytest.raises(ChannelInUseError, match="is published in bfloat16, not in float16"):
            open_channel(a.reader, settings, True, None)
        assert issubclass(ChannelInUseError, PublishError)
        assert snapshot(quick.store) == before

    def test_a_signed_channel_needs_the_key(self, quick: Place, tmp_path: Path) -> None:
        pytest.importorskip("cryptography")
        new_key(tmp_path / "key", "trainer")
        signer = Signer(tmp_path / "key")
        first = quick.script("a", signer=signer).publish()
        with pytest.raises(ConfigError, match="This channel is signed"):
            quick.script("b")
        c = quick.script("c", signer=signer)
        assert c.tip == first.version
        c.publish()
        slots = [info.key for info in quick.store.list(keys.VERSIONS)]
        assert {record.signed_by(quick.store.read(key, 1 << 30)) for key in slots} == {signer.public}
        opening = quick.store.read(keys.epoch_document(c.log.epoch), 1 << 30)
        assert documents.decode(opening, EpochDocument, keys.epoch_document(c.log.epoch)).epoch == c.log.epoch

    def test_a_lease_that_is_too_short(self) -> None:
        with pytest.raises(ConfigError, match=r"settle_s must be more than 25 s, and is 25 s\."):
            Lease(25.0)


def test_the_log_says_what_was_opened(quick: Place, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltasync")
    a = quick.script("a")
    assert f"opened run={a.log.run_id} epoch={a.log.epoch} after=None fencing={a.log.fencing}" in caplog.text


class TestListingsThatLie:
    """No listing rewinds a channel: what channel.json, head.json and the records themselves tell counts more."""

    HIDDEN: ClassVar[dict[str, Callable[[str], bool]]] = {
        "everything": lambda _: True,
        "records": lambda key: key.startswith(keys.VERSIONS),
        "the newest records": lambda key: "/000000000" in key and key.split("/")[-1][:10] > "0000000002",
        "epochs": lambda key: key.startswith(keys.EPOCHS),
    }

    @pytest.mark.parametrize("with_head", [True, False], ids=["", "head is gone"])
    @pytest.mark.parametrize("name", HIDDEN)
    def test_the_next_writer_goes_on_from_the_newest_version(self, quick: Place, name: str, with_head: bool) -> None:
        first = quick.script("a", resume=False)
        written = [first.publish("a").version for _ in range(4)]
        first.log.close()
        second = quick.script("b")
        written.append(second.publish("b").version)
        second.log.close()
        if not with_head:
            quick.forget(keys.HEAD)
            if not quick.decides and name == "everything":
                return  # then nothing tells of the second epoch
        store = quick.writer("c")
        store.hide(self.HIDDEN[name])
        third = Script(store, lease=quick.lease)
        assert third.tip == written[-1]
        assert third.log.epoch > written[-1].epoch
        with pytest.raises(FencedError):
            second.publish("late")
        third.publish("c")
        third.log.close()

    def test_one_that_another_writer_creates_meanwhile_is_opened(self, memory: Place) -> None:
        store = memory.writer("b")
        gate = store.hold_at("list", keys.VERSIONS)
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(Script, store)
            assert gate.entered.wait(60)
            first = memory.script("a", resume=False)
            version = first.publish("a").version
            gate.opened.set()
            assert opening.result().tip == version

    def test_a_channel_without_its_description_is_not_begun_anew(self, quick: Place) -> None:
        first = quick.script("a", resume=False)
        first.publish("a")
        first.log.close()
        quick.forget(keys.CHANNEL)
        for resume in (False, True):
            with pytest.raises(ChannelInUseError, match=r"channel\.json is missing. Put it back"):
                quick.script("b", resume=resume)
