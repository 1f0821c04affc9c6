"""One writer after another, where the store decides who may write and where it does not. No key ever gets two
contents.
"""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path

import pytest

from deltasync import open_store
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import EpochDocument, VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer, new_key
from deltasync.config import PublisherSettings
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    FencedError,
    FormatError,
    PublishError,
)
from deltasync.opening.acquire import open_channel
from tests.channels import EPOCH, filled, states_of
from tests.writers import QUICK, Place, Script, WriterStore, head, history, snapshot


def test_a_channel_without_a_version(quick: Place) -> None:
    a = quick.script("a", resume=False)
    a.create()
    assert a.log.channel is None
    quick.damage(keys.CHANNEL, documents.encode(a.create()))  # it dies after it has put channel.json
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


class TestDamage:
    def test_a_record_that_is_too_large_is_not_read_whole(self, quick: Place) -> None:
        a = quick.script("a")
        first = a.publish()
        data = first.data
        assert data is not None
        assert a.log.channel is not None
        most = a.log.channel.most_bytes(first.key)
        quick.damage(first.key, data + bytes(most))
        b = quick.script("b")
        assert b.tip is not None and b.end is None
        second = b.publish().record
        assert (second.kind, second.version) == ("anchor", 2)

    def test_the_document_of_another_runs_epoch_says_nothing(self, quick: Place) -> None:
        first = quick.script("a").publish()
        epoch = "000007-00000000"
        stray = VersionId(41, epoch, "0" * 64)
        opening = EpochDocument(
            run_id="other", epoch=epoch, continues=stray, writer="", created_at=documents.now()
        )
        quick.damage(keys.epoch_document(epoch), documents.encode(opening))
        b = quick.script("b")
        assert b.tip == first.version
        assert keys.epoch_number(b.log.epoch) == 2
        assert b.publish().record.version == 2

    def test_junk_among_the_next_epochs_fences_nobody(self, quick: Place) -> None:
        quick.script("a").publish()
        quick.damage(keys.epoch_document("000003-00000000"), b"junk")
        assert quick.script("b").publish().record.version == 2

    def test_a_record_of_a_newer_writer_is_not_passed_over(self, quick: Place) -> None:
        a = quick.script("a")
        first = a.publish()
        newer = record.encode(dataclasses.replace(first.record, requires=["new"]), first.key, None, None).data
        assert newer is not None
        quick.damage(first.key, newer)
        with pytest.raises(FormatError, match="Upgrade"):
            quick.script("b")


class TestJunk:
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

    def test_an_end_that_cannot_be_read_keeps_its_number(self, tmp_path: Path) -> None:
        """All between was forgotten: the seal in the place of the second version does not count."""
        store = open_store(f"memory://{uuid.uuid4().hex}")
        new_key(tmp_path / "key", "test")
        signer = Signer(tmp_path / "key")
        _, versions = filled(store, states_of(500, 5), compactions=((1, 4),), signer=signer)
        store.delete(*(keys.slot(number, EPOCH) for number in (2, 3, 4)))
        store.put(keys.slot(5, EPOCH), b"x")
        b = Script(store, lease=QUICK, signer=signer)
        assert b.tip is not None and b.tip.slot == versions[4].slot
        found = b.publish().record
        assert (found.version, found.kind) == (6, "anchor")

    def test_where_nothing_can_be_read_an_operator_is_asked(self, tmp_path: Path) -> None:
        store = open_store(f"memory://{uuid.uuid4().hex}")
        filled(store, states_of(500, 3))
        store.delete(*(keys.slot(number, EPOCH) for number in (1, 2)), keys.HEAD)
        store.put(keys.slot(3, EPOCH), b"x")
        before = snapshot(store)
        with pytest.raises(ChannelInUseError, match="`deltasync check`, then `deltasync repair`"):
            Script(store, lease=QUICK)
        assert snapshot(store) == before


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
        assert ChannelReader(store).channel().fencing == "lease"
        assert not [key for verb, key in store.calls if verb == "create"]


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


class TestListingsThatLie:
    """No listing rewinds a channel: what channel.json, head.json and the records themselves tell counts
    more.
    """

    def test_a_channel_without_its_description_is_not_begun_anew(self, quick: Place) -> None:
        first = quick.script("a", resume=False)
        first.publish("a")
        first.log.close()
        quick.forget(keys.CHANNEL)
        for resume in (False, True):
            with pytest.raises(ChannelInUseError, match=r"channel\.json is missing. Put it back"):
                quick.script("b", resume=resume)
