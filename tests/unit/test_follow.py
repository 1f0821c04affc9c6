"""Replicas of format 2, over channels that were made record by record."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from deltasync.channel import keys
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer, new_key
from deltasync.errors import CorruptDataError, MissingVersionError
from deltasync.following import Replica, search
from deltasync.following.cursor import Cursor
from deltasync.stores import Store, open_store
from tests.builders import trained, weights
from tests.channels import Made, made
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore


@pytest.fixture
def store(channel_url: str) -> Store:
    return open_store(channel_url)


def _holds(replica: Replica, channel: Made) -> None:
    assert replica.digest is not None
    assert_same_bits(replica.state_dict(), channel.bits[replica.digest])


def _damage(store: Store, key: str) -> None:
    data = bytearray(store.read(key, 1 << 30))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def test_steady_state_is_one_request(memory_url: str) -> None:
    store = FaultyStore(open_store(memory_url))
    channel = made(store, 2)
    reader = ChannelReader(store)
    cursor, have = Cursor(reader), channel.tip
    assert cursor.next(have) == []
    for seed in range(3):
        store.calls.clear()
        assert cursor.next(have) == []
        assert store.calls == [("read", keys.slot(have.version + 1, have.epoch))]
        made_now = channel.delta(trained(channel.bits[have.sha256], seed))
        store.calls.clear()
        (found,) = cursor.next(have)
        assert found.sha256 == made_now.sha256
        assert store.calls == [("read", made_now.key)]
        have = found.version
        assert cursor.next(have) == []


@pytest.mark.parametrize("codec_name", ["packed", "context", "raw"])
def test_full_weights_between_deltas(store: Store, codec_name: str) -> None:
    """As of a writer that starts over: the steps before them do not matter, those after them do."""
    channel = Made(store, codec_name=codec_name)
    channel.create(weights())
    channel.anchor(weights())
    channel.head()
    replica = Replica(store)
    assert replica.sync() == 1
    for kind in ("delta", "anchor", "delta", "anchor", "anchor", "delta", "delta"):
        assert channel.tip is not None
        model = trained(channel.bits[channel.tip.sha256], channel.tip.version)
        channel.anchor(model) if kind == "anchor" else channel.delta(model)
    channel.head()
    assert replica.sync() == 8
    _holds(replica, channel)


def test_a_seal_leads_into_the_next_epoch(store: Store) -> None:
    channel = made(store, 2)
    replica = Replica(store)
    replica.sync()
    channel.seal("000002-0000000a")
    assert replica.sync() == 2
    channel.delta(trained(channel.bits[channel.tip.sha256], 5))
    assert replica.sync() == 3
    assert replica.identity == channel.tip
    _holds(replica, channel)
    fresh = Replica(store)
    assert fresh.sync() == 3
    _holds(fresh, channel)


def test_an_older_epoch_is_not_gone_back_to(store: Store) -> None:
    channel = made(store, 2)
    old_tip, old_epoch = channel.tip, channel.epoch
    channel.seal("000002-0000000a")
    channel.delta(trained(channel.bits[channel.tip.sha256], 5))
    replica = Replica(store)
    assert replica.sync() == 3
    new = replica.identity
    channel.tip, channel.epoch = old_tip, old_epoch  # a zombie, on a store that does not decide
    store.delete(keys.slot(3, old_epoch))
    for seed in (20, 21, 22):
        channel.delta(trained(channel.bits[channel.tip.sha256], seed))
        channel.head()
    assert replica.sync() == 3
    assert replica.identity == new
    fresh = Replica(store)
    fresh.sync()
    # Head is a hint of the zombie: followed at first, left at the next listing.
    assert fresh.identity in (new, channel.tip)


def test_a_damaged_part_is_gone_around_by_an_announced_anchor(store: Store) -> None:
    channel = made(store, 3)
    replica = Replica(store)
    replica.sync()
    broken = channel.delta(trained(channel.bits[channel.tip.sha256], 30), parts=2)
    _damage(store, broken.record.payload_files[0].key)
    with pytest.raises((MissingVersionError, CorruptDataError)):
        replica.sync()
    assert replica.version == 3
    channel.delta(trained(channel.bits[channel.tip.sha256], 31))
    channel.announce(channel.tip)
    channel.delta(trained(channel.bits[channel.tip.sha256], 32))
    channel.head()
    assert replica.sync() == 6
    _holds(replica, channel)
    fresh = Replica(store)
    assert fresh.sync() == 6
    _holds(fresh, channel)


def test_a_version_that_does_not_give_its_bits_is_passed_by(store: Store) -> None:
    channel = made(store, 3)
    replica = Replica(store)
    replica.sync()
    model = trained(channel.bits[channel.tip.sha256], 30)
    base = channel.tip
    wrong = channel.delta(model)
    lies = dataclasses.replace(wrong.record, fingerprint="0" * 16)
    channel.tip = base
    encoded = channel.encode(channel.bits[base.sha256], model, 4, 3, 1)[0][0]
    channel.append(lies, encoded, model)
    with pytest.raises(Exception, match=r"way|bits"):
        replica.sync()
    assert replica.version == 3
    _holds(replica, channel)
    channel.delta(trained(model, 33))
    channel.announce(channel.tip)
    channel.head()
    assert replica.sync() == 5
    _holds(replica, channel)


def test_an_answer_with_a_wrong_fingerprint_is_asked_for_again(store: Store) -> None:
    """Its document is as good as any: nothing has named its digest yet."""
    channel = made(store, 3)
    faulty = FaultyStore(store)
    replica = Replica(faulty)
    replica.sync()
    following = channel.delta(trained(channel.bits[channel.tip.sha256], 30))
    promised = str(following.record.fingerprint).encode()
    answers = [promised.translate(bytes.maketrans(b"0123456789abcdef", b"1032547698badcfe"))]
    faulty.tamper(following.key, lambda data: data.replace(promised, answers.pop()) if answers else data)
    assert replica.sync() == 4
    assert replica.identity == channel.tip
    assert not answers
    _holds(replica, channel)


def test_without_head_and_with_a_wrong_one(store: Store) -> None:
    channel = made(store, 4)
    store.delete(keys.HEAD)
    replica = Replica(store)
    assert replica.sync() == 4
    _holds(replica, channel)
    channel.head(dataclasses.replace(channel.tip, version=900, sha256="f" * 64))
    channel.delta(trained(channel.bits[channel.tip.sha256], 40))
    assert replica.sync() == 5
    fresh = Replica(store)
    assert fresh.sync() == 5
    _holds(fresh, channel)


def test_a_way_starts_from_nothing_where_the_way_from_here_is_gone(store: Store) -> None:
    channel = made(store, 12)
    reader = ChannelReader(store)
    tip = channel.tip
    at_2 = reader.numbered(2).version
    assert [stored.record.version for stored in find_chain(reader, at_2, tip)] == list(range(3, 13))
    store.delete(keys.slot(5, channel.epoch))
    with pytest.raises(MissingVersionError, match="Cannot reach"):
        find_chain(reader, at_2, tip)
    channel.announce(reader.numbered(9).version)
    way = find_chain(reader, at_2, tip)
    assert way[0].use_anchor and [stored.record.version for stored in way] == [9, 10, 11, 12]


def test_a_compaction_that_promises_other_bits_than_its_version_is_passed_by(store: Store) -> None:
    channel = made(store, 20)
    first = ChannelReader(store).numbered(1).version
    lie = trained(channel.bits[channel.tip.sha256], 99)
    honest, channel.bits[channel.tip.sha256] = channel.bits[channel.tip.sha256], lie
    channel.compaction(first, channel.tip)
    channel.bits[channel.tip.sha256] = honest
    replica = Replica(store)
    replica.sync(1)
    assert replica.sync() == 20
    _holds(replica, channel)


@pytest.mark.parametrize("signed", [False, True])
def test_a_version_that_a_restored_store_does_not_know(
    store: Store, tmp_path: Path, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LOST_S", 0.0)
    signer = None
    if signed:
        pytest.importorskip("cryptography")
        new_key(tmp_path / "key", "trainer")
        signer = Signer(tmp_path / "key")
    channel = made(store, 2, signer)
    known, model = channel.tip, channel.bits[channel.tip.sha256]
    sealed = channel.seal("000002-00000002")
    lost = channel.delta(trained(model, 40))
    replica = Replica(ChannelReader(store, None if signer is None else signer.trusted))
    assert replica.sync() == 3
    store.delete(sealed.key, lost.key)
    channel.head(known)
    with pytest.raises(MissingVersionError, match="not in the store") if signed else contextlib.nullcontext():
        for _ in range(12):  # of as many refreshes one is a listing
            replica.sync()
    assert replica.identity == (lost.version if signed else known)
    _holds(replica, channel)


@pytest.mark.parametrize("digits", ["44444444", "66666666"])
@pytest.mark.parametrize("takes", ["version", "seal"])
def test_no_epoch_is_newer_by_its_random_digits(memory_url: str, digits: str, takes: str) -> None:
    """A store went back to a backup; another writer opened it, with the number that the lost epoch had."""
    store = FaultyStore(open_store(memory_url))
    channel = made(store, 2)
    known, first, model = channel.tip, channel.epoch, channel.bits[channel.tip.sha256]
    sealed = channel.seal("000002-55555555")
    replica = Replica(store)
    lost = [sealed.key]
    if takes == "version":
        lost.append(channel.delta(trained(model, 40)).key)
    assert replica.sync() == (3 if takes == "version" else 2)
    store.delete(*lost)
    channel.tip, channel.epoch = known, first
    channel.seal(f"000002-{digits}")
    for seed in range(2):
        channel.delta(trained(channel.bits[channel.tip.sha256], seed))
    channel.head()
    assert replica.sync() == 4  # at the first refresh, not after a while
    _holds(replica, channel)
    have = channel.delta(trained(model, 9))
    store.calls.clear()
    assert replica.poll() == 5  # and it polls that epoch
    assert store.calls == [("read", have.key)]


def test_a_version_in_whose_place_a_restored_store_has_a_seal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LOST_S", 0.0)
    channel = made(store, 2)
    known, model = channel.tip, channel.bits[channel.tip.sha256]
    lost = channel.delta(trained(model, 40))
    replica = Replica(ChannelReader(store))
    assert replica.sync() == 3
    store.delete(lost.key)
    channel.tip = known
    channel.head(known)
    assert channel.seal("000002-00000002").key == lost.key
    for _ in range(12):  # of as many looks one is a listing
        replica.sync()
    assert replica.identity == known
    _holds(replica, channel)
