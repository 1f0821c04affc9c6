"""One bad byte at rest, in each kind of object: replicas get on by themselves, and `repair` makes good what
can be.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from deltasync import ops
from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer, Trusted, new_key
from deltasync.errors import ConfigError, CorruptDataError, DeltaSyncError, NotPublishedError
from deltasync.following import Replica
from deltasync.ops import Repair, source_of
from deltasync.ops.cli import main
from deltasync.stores import Store, open_store
from tests.channels import EPOCH, Made, filled, states_of
from tests.conftest import assert_same_bits
from tests.faults import flipped

STATES = states_of(1200, 14)


def _files(version: int, epoch: str = EPOCH) -> tuple[str, str]:
    """A part and a weight file of a version."""
    return (
        f"{keys.parts_folder(version, epoch)}/000-00001.safetensors",
        f"{keys.anchor_folder(version, epoch)}/model.safetensors",
    )


# Versions 1 to 8: 4 and 7 have parts, 5's anchor is announced, a compaction leads from 2 to 6.
OBJECTS: dict[str, str] = {
    "a record": keys.slot(6, EPOCH),
    "a record with parts": keys.slot(7, EPOCH),
    "a part": _files(7)[0],
    "an older record": keys.slot(3, EPOCH),
    "an older part": _files(4)[0],
    "the first record": keys.slot(1, EPOCH),
    "the first anchor's weights": _files(1)[1],
    "an announced anchor's weights": _files(5)[1],
    "an announced anchor's config": f"{keys.anchor_folder(5, EPOCH)}/config.json",
    "an announcement": keys.announcement(5, EPOCH),
    "a compaction": keys.compaction(2, 6, EPOCH),
    "head": keys.HEAD,
}
OUTCOMES = {
    "head": "bypassed",
    "a record": "bypassed",
    "a record with parts": "left",
    "a part": "left",
    "an older part": "bypassed",
    "an announced anchor's weights": "bypassed",
    "an announced anchor's config": "left",
    "an announcement": "bypassed",
}
LOST = {
    "a part": [7, 8],
    "a record with parts": [8],
    "an older part": [4],
    "an older record": [4],
    "the first record": [2, 3, 4],
    "the first anchor's weights": [1, 2, 3, 4],
}
"""What is done about it without a copy, if it is not "not needed"."""


def halved(data: bytes) -> bytes:
    """The first half: also of a document not only the end of the line is gone."""
    return data[: len(data) // 2]


def flipped_at(data: bytes, at: int) -> bytes:
    """One bit of one byte inverted."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _fill(store: Store, signer: Signer | None = None) -> tuple[Made, list[VersionId]]:
    return filled(store, STATES[:8], anchors=(5,), parts=(4, 7), compactions=((2, 6),), signer=signer)


def _damage(store: Store, key: str, change: Callable[[bytes], bytes] = flipped) -> None:
    store.put(key, change(store.read(key, 1 << 30)))


def _repair(store: Store, source: str | None = None, **options: object) -> Repair:
    where = None if source is None else source_of(source)
    return ops.repair(ChannelReader(store), source=where, **options)  # type: ignore[arg-type]


def _is_right(replica: Replica, number: int) -> bool:
    with contextlib.suppress(DeltaSyncError):
        if replica.sync() == number:
            assert_same_bits(replica.state_dict(), STATES[number - 1])
            return True
    return False


@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("what", OBJECTS)
def test_replicas_are_right_again_by_the_next_anchor(memory_url: str, what: str, place: float) -> None:
    """The byte is bad from the moment on that the object is stored; one replica follows closely, one from far
    behind.
    """
    store = open_store(memory_url)
    channel, versions = filled(store, STATES[:2])
    running, behind = Replica(store), Replica(store)
    for replica in (running, behind):
        replica.sync(2)
    for number in range(3, 13):
        made = {info.key for info in store.list("")}
        version = channel.delta(STATES[number - 1], parts=int(number in (4, 7))).version
        versions.append(version)
        if number % 4 == 1:
            channel.announce(version)
        if number == 6:
            channel.compaction(versions[1], version)
        channel.head()
        if OBJECTS[what] in {info.key for info in store.list("")} - (made if what != "head" else set()):
            _damage(store, OBJECTS[what], lambda data: flipped_at(data, int(place * len(data))))
        _is_right(running, number)
        if number % 4 == 1:
            assert _is_right(Replica(store), number)
    assert _is_right(running, 12)
    assert _is_right(behind, 12)
    assert _is_right(Replica(store), 12)


def test_replicas_do_without_a_seal_and_its_epochs_document(memory_url: str) -> None:
    for harm in (keys.slot(5, EPOCH), "epochs/"):
        store = open_store(f"{memory_url}-{harm.partition('/')[0]}")
        channel, _ = filled(store, STATES[:4], seals=(4,))
        running = Replica(store)
        running.sync()
        _damage(store, next(info.key for info in store.list("") if info.key.startswith(harm)), halved)
        channel.delta(STATES[4])
        channel.head()
        assert _is_right(running, 5) and _is_right(Replica(store), 5)
        (done,) = _repair(store).objects
        assert done.outcome == "not needed"


@pytest.mark.parametrize("change", [flipped, halved, None], ids=["flipped", "short", "missing"])
@pytest.mark.parametrize("what", OBJECTS)
def test_bytes_are_put_back_from_a_copy(
    memory_url: str, tmp_path: Path, what: str, change: Callable | None
) -> None:
    store, copy = open_store(memory_url), open_store(f"file://{tmp_path}/copy")
    _fill(store)
    ops.copy(ChannelReader(store), copy)
    whole = {info.key: store.read(info.key, 1 << 30) for info in store.list("")}
    if change is None:
        store.delete(OBJECTS[what])
    else:
        _damage(store, OBJECTS[what], change)
    found = _repair(store, str(tmp_path / "copy"))
    assert found.exit_code == 0
    if change is None and what in ("head", "a record", "a compaction", "an announcement"):
        assert not found.objects  # nobody needs it; a compaction leads to version 6
    elif not (change is flipped and what == "an announcement"):
        # it then names another file, as far as anybody knows
        assert [done.outcome for done in found.objects] == ["bypassed" if what == "head" else "put back"]
        assert {info.key: store.read(info.key, 1 << 30) for info in store.list("")} == whole
    assert _is_right(Replica(store), 8)


@pytest.mark.parametrize("what", ["a part", "an older part", "an older record", "the first anchor's weights"])
def test_bytes_are_put_back_from_the_cache_of_a_node(memory_url: str, tmp_path: Path, what: str) -> None:
    store = open_store(memory_url)
    _fill(store)
    whole = {info.key: store.read(info.key, 1 << 30) for info in store.list("")}
    for data in whole.values():
        (tmp_path / ops.repair.__globals__["sha256_hex"](data)).write_bytes(data)
    _damage(store, OBJECTS[what])
    found = _repair(store, str(tmp_path))
    assert ([done.outcome for done in found.objects], found.exit_code) == (["put back"], 0)
    assert {info.key: store.read(info.key, 1 << 30) for info in store.list("")} == whole


def test_what_has_another_digest_is_not_put_back(memory_url: str, tmp_path: Path) -> None:
    store, copy = open_store(memory_url), open_store(f"file://{tmp_path}/copy")
    _fill(store)
    ops.copy(ChannelReader(store), copy)
    for place in (store, copy):
        _damage(place, OBJECTS["an older part"])
    (tmp_path / "other").mkdir()
    for source, outcome in ((str(tmp_path / "copy"), "bypassed"), (str(tmp_path / "other"), "not needed")):
        assert [done.outcome for done in _repair(store, source).objects] == [outcome]
    with pytest.raises(ConfigError, match="neither the URL"):
        source_of(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("what", OBJECTS)
def test_without_a_copy_what_can_be_done_is_done(memory_url: str, what: str) -> None:
    store = open_store(memory_url)
    channel, _versions = _fill(store)
    before = {info.key: store.read(info.key, 1 << 30) for info in store.list("")}
    _damage(store, OBJECTS[what])
    damaged = store.read(OBJECTS[what], 1 << 30)
    found = _repair(store)
    (done,) = found.objects
    # which names another file now, as far as anybody knows
    assert done.key == OBJECTS[what] or what == "an announcement"
    assert done.outcome == OUTCOMES.get(what, "not needed"), done.how
    touched = {key for key, data in before.items() if store.read(key, 1 << 30) != data}
    assert touched <= {OBJECTS[what]} and (what == "head" or store.read(OBJECTS[what], 1 << 30) == damaged)
    assert found.lost == LOST.get(what, [])
    assert (found.exit_code == 0) == (not found.lost and done.outcome != "left")
    if what in ("a record with parts", "a part"):  # nothing leads on until the publisher's next anchor
        version = channel.delta(STATES[8]).version
        channel.announce(version)
        channel.head()
        (done,) = _repair(store).objects
        assert done.outcome == "bypassed" and "compactions/0000000006-0000000009.000000-" in done.how
        assert [again.outcome for again in _repair(store).objects] == ["not needed"]
        assert _is_right(Replica(store), 9)
    else:
        assert _is_right(Replica(store), 8)


def test_a_damaged_anchor_is_replaced_by_one_of_the_newest_version(memory_url: str) -> None:
    store = open_store(memory_url)
    _fill(store)
    _damage(store, OBJECTS["an announced anchor's weights"])
    _damage(store, keys.announcement(5, EPOCH), halved)
    found = _repair(store)
    assert [done.outcome for done in found.objects] == ["bypassed"] and found.exit_code == 0
    (span,) = [span for span, _ in ChannelReader(store).announcements() if span.epoch.startswith(keys.TOOL)]
    assert (span.base, span.version) == (0, 8)
    for key in (keys.slot(1, EPOCH), keys.slot(3, EPOCH)):  # it is really another way
        store.delete(key)
    assert _is_right(Replica(store), 8)
    files = [info.key.rpartition("/")[2] for info in store.list(f"{keys.ANCHORS}0000000008.000000-")]
    assert files == ["config.json", "model.safetensors"]


def test_a_compaction_leads_running_replicas_around_a_damaged_record(memory_url: str) -> None:
    store = open_store(memory_url)
    large = states_of(360_000, 9)
    _channel, _versions = filled(store, large, anchors=(8,))
    running = Replica(store)
    running.sync(5)
    _damage(store, keys.slot(6, EPOCH))
    (done,) = _repair(store, replay=False).objects
    assert done.outcome == "bypassed" and f"{keys.COMPACTIONS}0000000005-0000000008" in done.how
    for info in list(store.list(keys.ANCHORS)):
        store.delete(info.key)
    assert running.sync() == 9
    assert_same_bits(running.state_dict(), large[8])


def test_a_repair_while_somebody_publishes(memory_url: str) -> None:
    """What is published between its looks is not taken for damage."""
    store = open_store(memory_url)
    channel, _versions = _fill(store)
    _damage(store, OBJECTS["an older part"])

    class Growing:
        """Publishes a version whenever it is told of progress."""

        count = 8

        def __call__(self, what: str, done: int, total: int) -> None:
            if self.count < 12:
                self.count += 1
                channel.delta(STATES[self.count - 1], parts=2)
                channel.head()

    with ops.reporting(Growing()):
        found = ops.repair(ChannelReader(store))
    assert [done.key for done in found.objects] == [OBJECTS["an older part"]]
    assert _is_right(Replica(store), 12)


def test_channel_json_comes_back_from_a_copy_of_this_run_only(memory_url: str, tmp_path: Path) -> None:
    store, copy = open_store(memory_url), open_store(f"file://{tmp_path}/copy")
    _fill(store)
    ops.copy(ChannelReader(store), copy)
    whole = store.read(keys.CHANNEL, 1 << 30)
    _damage(store, keys.CHANNEL, halved)
    _damage(store, keys.CHANNEL, lambda data: data[:-1])
    with pytest.raises(CorruptDataError, match=r"from a copy of the channel \(--from\)"):
        _repair(store)
    assert _repair(store, str(tmp_path / "copy")).objects[0].outcome == "put back"
    assert store.read(keys.CHANNEL, 1 << 30) == whole
    store.delete(keys.CHANNEL)
    _damage(copy, keys.CHANNEL, lambda data: data.replace(b'"run"', b'"ran"'))
    with pytest.raises(NotPublishedError, match=r"from a copy of the channel \(--from\)"):
        _repair(store, str(tmp_path / "copy"))


def test_what_is_added_to_a_signed_channel_is_signed(memory_url: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    new_key(tmp_path / "key", "test")
    signer = Signer(tmp_path / "key")
    store = open_store(memory_url)
    _fill(store, signer)
    _damage(store, OBJECTS["an announced anchor's weights"])
    trusted = Trusted(path=tmp_path / "key.pub")
    with pytest.raises(ConfigError, match="signing_key"):
        ops.repair(ChannelReader(store, trusted))
    (done,) = ops.repair(ChannelReader(store, trusted), signer=signer).objects
    assert done.outcome == "bypassed"
    replica = Replica(ChannelReader(store, trusted))
    assert _is_right(replica, 8)


def test_repair_as_a_command(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    store = open_store(url)
    _fill(store)
    ops.copy(ChannelReader(store), open_store(f"file://{tmp_path}/copy"))
    assert "nothing to repair" in CliRunner().invoke(main, ["repair", url]).stdout
    _damage(store, OBJECTS["a part"])
    left = CliRunner().invoke(main, ["repair", url])
    assert left.exit_code == 5
    assert f"left          {OBJECTS['a part']}" in left.stdout
    assert "not reachable" in left.stdout and "7-8" in left.stdout
    done = CliRunner().invoke(main, ["repair", url, "--from", f"file://{tmp_path}/copy", "--json"])
    assert done.exit_code == 0
    assert [each["outcome"] for each in json.loads(done.stdout)["objects"]] == ["put back"]
    assert CliRunner().invoke(main, ["check", url, "--read-data"]).exit_code == 0


def _rotted(data: bytes) -> bytes:
    """One digit of the model's fingerprint is another one: the record is whole, and promises bits that it
    does not give.
    """
    at = data.rindex(b'"fingerprint":"') + 15
    return data[:at] + (b"1" if data[at : at + 1] == b"0" else b"0") + data[at + 1 :]


@pytest.mark.parametrize("later", [0, 1])
def test_a_running_replica_takes_a_restored_record_though_it_refused_what_was_in_its_place(
    memory_url: str, later: int
) -> None:
    store = open_store(memory_url)
    made, _ = filled(store, STATES[:3])
    replica = Replica(store)
    assert _is_right(replica, 3)
    stored = made.delta(STATES[3])
    assert stored.data is not None
    if later:
        made.delta(STATES[4])
    store.put(stored.key, _rotted(stored.data))
    for _ in range(2):  # alone, then around it
        with pytest.raises(DeltaSyncError):
            replica.sync()
    assert replica.version == 3
    store.put(stored.key, stored.data)
    assert _is_right(replica, 4 + later)
    made.delta(STATES[4 + later])
    assert _is_right(replica, 5 + later)
