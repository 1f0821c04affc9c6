"""How the newest version of a long log is found without listing all of it."""

from __future__ import annotations

import pytest

from deltasync import Publisher, Replica, limits, open_store
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.stores import Store
from tests.channels import Made, made, states_of
from tests.faults import FaultyStore, flipped

LATER = "000002-0000000b"


@pytest.fixture(autouse=True)
def small_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten numbers share a folder, and a search passes over four damaged records."""
    monkeypatch.setattr(keys, "FOLDER", 10)
    monkeypatch.setattr(limits, "DAMAGED_RECORDS", 4)


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


def listed(store: FaultyStore) -> list[str]:
    return [key for verb, key in store.calls if verb == "list" and key.startswith(keys.VERSIONS)]


def newest(store: Store) -> VersionId | None:
    return ChannelReader(store).newest_version()


def test_the_newest_folders_are_listed(store: FaultyStore) -> None:
    channel = made(store, 62)
    store.calls.clear()
    assert newest(store) == channel.tip
    assert listed(store) == [keys.VERSIONS, keys.folder(62), keys.folder(52)]  # first the names of folders


@pytest.mark.parametrize("has_head", [True, False])
def test_a_join_reads_the_channel_and_head_once(store: FaultyStore, has_head: bool) -> None:
    made(store, 3)
    if not has_head:
        store.delete(keys.HEAD)
    store.calls.clear()
    assert Replica(store).sync() == 3
    assert [store.calls.count(("read", key)) for key in (keys.CHANNEL, keys.HEAD)] == [1, 1]


def test_a_store_that_does_not_list_folders_lists_all(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = made(store, 62)
    monkeypatch.setattr(FaultyStore, "folders", None)
    store.calls.clear()
    assert newest(store) == channel.tip
    assert listed(store) == [keys.VERSIONS]


@pytest.mark.parametrize("has_document", [True, False])
def test_an_epoch_that_forked_off_long_before_has_the_newest_version(
    store: FaultyStore, has_document: bool
) -> None:
    channel = made(store, 62)
    old = ChannelReader(store).numbered(21).version
    later = Made(store, epoch=LATER, tip=old, bits=channel.bits, specs=channel.specs)
    later.delta(channel.bits[old.sha256])
    if has_document:
        later.open(LATER, old)
        assert newest(store) == later.tip
    else:  # nothing says that it is there: the newest folders are the log, and head says the rest
        assert newest(store) == channel.tip
        later.head()
        replica = Replica(store)
        assert replica.sync() == 22 and replica.identity == later.tip


def test_an_epoch_without_a_version_is_passed_over(store: FaultyStore) -> None:
    channel = made(store, 62)
    channel.open(LATER, channel.tip)
    store.calls.clear()
    assert newest(store) == channel.tip
    assert keys.VERSIONS in listed(store) and len(listed(store)) == 3


def test_an_epoch_whose_document_cannot_be_read_may_have_forked_anywhere(store: FaultyStore) -> None:
    channel = made(store, 262)
    channel.open(LATER, channel.tip)
    store.drop(keys.EPOCHS)
    store.calls.clear()
    assert newest(store) == channel.tip
    assert listed(store).count(keys.VERSIONS) == 2  # the names of folders, then all records


def test_damaged_records_are_passed_over_as_in_a_short_log(store: FaultyStore) -> None:
    channel = made(store, 62)
    for number in (59, 60, 61, 62):
        store.tamper(keys.slot(number, channel.epoch), flipped)
    found = newest(store)
    assert found is not None and found.version == 58


def test_a_resume_lists_a_few_folders(store: FaultyStore) -> None:
    found = states_of(500, 3)
    with Publisher(store) as publisher:
        for step in range(130):
            publisher.publish(found[step % 3], step=step).wait(60)
    store.calls.clear()
    with Publisher(store, resume=True) as publisher:
        assert publisher.publish(found[125 % 3], step=125).wait(60).version == 131
    assert len({key for key in listed(store) if key != keys.VERSIONS}) < 8
