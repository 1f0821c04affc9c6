"""What a replica reads before it fetches weights, and which way it takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from deltasync import Replica, limits, open_store
from deltasync.channel import keys, record
from deltasync.channel.documents import VersionId
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.errors import MissingVersionError
from deltasync.following import Cursor
from deltasync.stores import Store
from tests.builders import trained
from tests.channels import Made, filled, made, states_of
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore, flipped


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


def asked(store: FaultyStore) -> list[str]:
    return [key for operation, key in store.calls if operation in ("read", "list")]


def identity(store: Store, number: int) -> VersionId:
    return ChannelReader(store).numbered(number).version


def holds(replica: Replica, channel: Made) -> bool:
    assert channel.tip is not None and replica.identity == channel.tip
    assert_same_bits(replica.state_dict(), channel.bits[channel.tip.sha256])
    return True


def at(store: Store, number: int) -> Replica:
    replica = Replica(store)
    replica.sync(number)
    return replica


def test_a_cold_start_reads_few_documents_before_weights(store: FaultyStore) -> None:
    channel = made(store, 60)
    channel.announce(identity(store, 59))
    store.calls.clear()
    replica = Replica(store)
    assert replica.sync() == 60
    calls = asked(store)
    before = calls[: [key.startswith(keys.ANCHORS) for key in calls].index(True)]
    announcement = keys.announcement(59, channel.epoch)
    assert sorted(before[:3]) == sorted([keys.CHANNEL, keys.HEAD, keys.slot(60, channel.epoch)])
    assert sorted(before[3:]) == sorted([keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS, announcement])
    assert holds(replica, channel)


def test_a_replica_a_little_behind_lists_nothing(store: FaultyStore) -> None:
    channel = made(store, 5)
    replica = at(store, 2)
    store.calls.clear()
    replica.sync()
    assert holds(replica, channel)
    assert not any(operation == "list" for operation, _ in store.calls)


class TestFolders:
    """Records are listed by folders; here ten numbers share one."""

    @pytest.fixture(autouse=True)
    def folders_of_ten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keys, "FOLDER", 10)

    @staticmethod
    def listed(store: FaultyStore) -> set[str]:
        return {key for verb, key in store.calls if verb == "list" and key.startswith(keys.VERSIONS)}

    @pytest.mark.parametrize("count", [60, 140])
    def test_a_join_lists_the_records_since_the_newest_anchor(self, store: FaultyStore, count: int) -> None:
        channel = made(store, count)
        for number in (5, count - 15, count - 2):
            channel.announce(identity(store, number))
        store.calls.clear()
        replica = Replica(store)
        assert replica.sync() == count
        assert self.listed(store) == {keys.folder(count - 2), keys.folder(count)}
        assert holds(replica, channel)

    def test_a_join_lists_where_the_newest_compaction_starts_and_ends(self, store: FaultyStore) -> None:
        channel = made(store, 90, compactions=[(1, 40), (1, 85)])
        store.calls.clear()
        replica = Replica(store)
        assert replica.sync() == 90
        assert self.listed(store) == {keys.folder(number) for number in (1, 85, 90)}
        assert holds(replica, channel)

    def test_a_replica_behind_lists_the_records_since_its_version(self, store: FaultyStore) -> None:
        channel = made(store, 60)
        channel.announce(identity(store, 5))
        replica = at(store, 41)
        store.calls.clear()
        replica.sync()
        assert self.listed(store) == {keys.folder(number) for number in (41, 51, 60)}
        assert holds(replica, channel)

    def test_where_the_newest_records_lead_nowhere_all_are_listed(self, store: FaultyStore) -> None:
        channel = made(store, 60, compactions=[(1, 59)])
        channel.announce(identity(store, 48))
        store.tamper(keys.COMPACTIONS, flipped)
        store.calls.clear()
        replica = Replica(store)
        assert replica.sync() == 60
        assert keys.VERSIONS in self.listed(store)
        assert holds(replica, channel)

    def test_a_replica_far_behind_lists_as_a_joiner(self, store: FaultyStore) -> None:
        channel = made(store, 250, compactions=[(1, 245)])
        replica = at(store, 41)
        store.calls.clear()
        replica.sync()
        assert self.listed(store) == {keys.folder(number) for number in (1, 245, 250)}
        assert holds(replica, channel)

    def test_many_folders_are_listed_at_once(self, store: FaultyStore) -> None:
        channel = made(store, 200)
        channel.announce(identity(store, 15))
        store.calls.clear()
        replica = Replica(store)
        assert replica.sync() == 200
        assert self.listed(store) == {keys.VERSIONS}
        assert holds(replica, channel)


class TestFolds:
    def test_a_replica_far_behind_takes_a_compaction(self, store: FaultyStore) -> None:
        channel = made(store, 20, compactions=[(2, 19)])
        replica = at(store, 1)
        store.calls.clear()
        replica.sync()
        assert holds(replica, channel)
        read = {key for key in asked(store) if key.endswith(".safetensors")}
        slots = [keys.slot(number, channel.epoch) for number in (2, 21, 22)]
        assert read == {keys.compaction(2, 19, channel.epoch), *slots}

    @pytest.mark.parametrize(
        "damage", ["bytes", "missing", "wrong bits", "other run", "other version", "other base"]
    )
    def test_a_bad_compaction_is_passed_by(self, store: FaultyStore, damage: str) -> None:
        channel = made(store, 20)
        base, version, other = (identity(store, number) for number in (2, 19, 4))
        key = keys.compaction(2, 19, channel.epoch)
        channel.compaction(base, version)
        if damage == "bytes":
            store.tamper(key, flipped)
        elif damage == "missing":
            store.drop(key)
        else:
            honest = ChannelReader(store).stored(key).record
            changed = {
                "wrong bits": {},
                "other run": {"run_id": "x"},
                "other version": {"sha256": "0" * 64},
                "other base": {"base": dataclasses.replace(base, sha256=other.sha256)},
            }[damage]
            after = channel.bits[version.sha256]
            after = trained(after, 99) if damage == "wrong bits" else after
            payload = channel.encode(channel.bits[base.sha256], after, 19, 2, 1)[0][0]
            stored = record.encode(dataclasses.replace(honest, **changed), key, payload, None)  # type: ignore[arg-type]
            assert stored.data is not None
            store.put(key, stored.data)
        replica = at(store, 1)
        store.calls.clear()
        replica.sync()
        assert holds(replica, channel)
        assert {keys.slot(number, channel.epoch) for number in range(2, 20)} <= set(asked(store))


class TestBatches:
    @pytest.mark.parametrize("encoding", ["packed", "context", "raw"])
    def test_several_deltas_are_one_commit(
        self, store: FaultyStore, encoding: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        channel = made(store, 1)
        channel.codec_name = encoding
        for number in range(2, 6):
            assert channel.tip is not None
            model = trained(channel.bits[channel.tip.sha256], number)
            if number == 4:
                model["layer.weight"] = model["layer.weight"] * -1.5
            channel.delta(model, parts=number % 2)
        channel.head()
        replica = at(store, 1)
        with caplog.at_level("INFO", "deltasync.following.loop"):
            assert replica.sync() == 5
        assert ["steps=4" in line.getMessage() for line in caplog.records] == [True]
        assert holds(replica, channel)

    def test_changes_that_cancel_out_leave_the_bits_as_they_were(self, store: FaultyStore) -> None:
        channel = made(store, 2)
        channel.delta(channel.bits[identity(store, 1).sha256])
        channel.head()
        replica = at(store, 1)
        assert replica.sync() == 3
        assert holds(replica, channel)

    @pytest.mark.parametrize(("most", "records"), [(3, 3), (64, 8), (1, 1)])
    def test_batches_are_bounded_by_their_number(
        self, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, most: int, records: int
    ) -> None:
        channel = made(store, 9)
        monkeypatch.setattr(limits, "BATCH_RECORDS", most)
        way = Cursor(ChannelReader(store)).next(identity(store, 1))
        assert [stored.record.version for stored in way] == list(range(2, 2 + records))
        replica = at(store, 1)
        assert replica.sync() == 9
        assert holds(replica, channel)

    @pytest.mark.parametrize("records", [1, 2, 5])
    def test_batches_are_bounded_by_their_bytes(
        self, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, records: int
    ) -> None:
        made(store, 9)
        reader = ChannelReader(store)
        sizes = [reader.numbered(number).record.payload_bytes for number in range(2, 10)]
        monkeypatch.setattr(limits, "BATCH_BYTES", sum(sizes[:records]))
        assert len(Cursor(reader).next(identity(store, 1))) == records

    def test_a_version_in_a_batch_that_does_not_give_its_bits_is_found_and_passed_by(
        self, store: FaultyStore
    ) -> None:
        channel = made(store, 6)
        base = channel.tip
        assert base is not None
        model = trained(channel.bits[base.sha256], 70)
        encoded, changed = channel.encode(channel.bits[base.sha256], model, 7, 6, 1)[0]
        honest = channel.delta(model).record
        channel.tip = base
        channel.append(dataclasses.replace(honest, fingerprint="0" * 16), encoded, model)
        assert changed
        for seed in (71, 72):
            assert channel.tip is not None
            channel.delta(trained(channel.bits[channel.tip.sha256], seed))
        channel.head()
        replica = at(store, 1)
        with pytest.raises(
            MissingVersionError, match=r"Cannot reach version .* from version 6.*published bits"
        ):
            replica.sync(7)
        assert replica.version == 6
        assert_same_bits(replica.state_dict(), channel.bits[base.sha256])
        assert at(store, 9).identity == channel.tip, "who does not stop there does not meet it"
        assert channel.tip is not None
        channel.announce(channel.tip)
        assert replica.sync() == 9
        assert holds(replica, channel)
        assert torch.equal(replica.state_dict()["ids"], channel.bits[channel.tip.sha256]["ids"])


def test_a_version_that_only_a_compaction_shows_to_be_anothers_is_left_for_full_weights(
    memory_url: str,
) -> None:
    """The deltas from it are gone, so nothing else tells that it is not on the chain."""
    store = open_store(memory_url)
    _, versions = filled(store, states_of(500, 4), compactions=((2, 4),))
    store.delete(versions[2].key)
    other = dataclasses.replace(versions[1], sha256="f" * 64)
    chain = find_chain(ChannelReader(store), other, versions[3])
    assert [stored.record.version for stored in chain] == [1, 2, 4]
