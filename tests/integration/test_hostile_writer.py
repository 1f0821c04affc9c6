"""Somebody else can write to the bucket. A replica that requires signatures takes nothing from them, whatever
they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltasync import Replica, open_store, ops
from deltasync.channel import documents, keys, signing
from deltasync.channel.documents import Head, VersionId
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    RunMismatchError,
)
from deltasync.stores import Store
from deltasync.stores.base import ObjectInfo
from deltasync.stores.cache import CachedStore
from tests.builders import Weights, trained, weights
from tests.channels import EPOCH, Made
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

Objects = dict[str, bytes]
NEWEST = 6
SECOND = "000002-0000000b"


class Channel:
    """A signed channel of six versions in two epochs: weights of 1 and 4, compactions from 1 to 6 and from 2
    to 5.
    """

    def __init__(self, folder: Path) -> None:
        self.keys = folder
        for name in ("ours", "theirs"):
            signing.new_key(folder / name, name)
        self.ours, self.theirs = Signer(folder / "ours"), Signer(folder / "theirs")
        self.made, self.versions = self.run(0, self.ours)
        self.objects = objects_of(self.made.store)
        self.other_run = objects_of(self.run(70, self.ours, "other")[0].store)

    def run(self, seed: int, signer: Signer | None, run_id: str = "run") -> tuple[Made, list[VersionId]]:
        made = Made(new_store(), signer, run_id=run_id)
        model: Weights = weights(seed)
        made.create(model)
        made.open(EPOCH, None)
        written = [made.anchor(model).version]
        for number in range(2, NEWEST + 1):
            if number == 4:
                made.seal(SECOND)
                made.open(SECOND, made.tip)
            model = trained(model, seed + number)
            written.append(made.delta(model, parts=number % 3).version)
        made.announce(written[3])
        made.compaction(written[0], written[5])
        made.compaction(written[1], written[4])
        made.head()
        return made, written

    def replica(self, objects: Objects, at: int | None = None) -> tuple[Store, Replica]:
        """A replica that requires our key, at a version of the honest channel, which then turns into these
        objects.
        """
        store = new_store()
        replica = Replica(store, trusted_keys=self.keys / "ours.pub")
        if at is not None:
            put(store, self.objects)
            replica.sync(at)
            store.delete(*self.objects)
        put(store, objects)
        return store, replica

    def holds(self, replica: Replica) -> None:
        """The very bits that were published as the version that it says it has."""
        if replica.identity is not None:
            assert replica.identity in self.versions
            assert_same_bits(replica.state_dict(), self.made.bits[replica.identity.sha256])

    def never_wrong(self, objects: Objects, at: int | None) -> bool:
        """The replica refuses and keeps what it has, or goes to what was published. Whether it arrived at the
        newest.
        """
        _, replica = self.replica(objects, at)
        try:
            replica.sync()
        except DeltaSyncError as error:
            assert "\n" not in str(error)
        assert at is None or (replica.version is not None and replica.version >= at)
        self.holds(replica)
        return replica.version == NEWEST

    def refuses(self, objects: Objects, error: type[DeltaSyncError], match: str = ".") -> None:
        """A replica without a version gets none, and says why."""
        _, replica = self.replica(objects)
        with pytest.raises(error, match=match):
            replica.sync()
        assert replica.version is None


def new_store() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


def put(store: Store, objects: Objects) -> None:
    for key, data in objects.items():
        store.put(key, data)


def objects_of(store: Store) -> Objects:
    return {info.key: store.read(info.key, 1 << 30) for info in store.list("")}


def taken_apart(data: bytes) -> tuple[bytes, bytes]:
    """Body and document of a record."""
    (length,) = struct.unpack("<Q", data[-8:])
    return data[: -8 - length], data[-8 - length : -8]


def put_together(body: bytes, document: bytes) -> bytes:
    return body + document + struct.pack("<Q", len(document))


def stripped(document: bytes) -> bytes:
    """A signed document without its signature."""
    return document[: document.index(b',"signature"')] + b"}\n"


def altered(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """A signed object whose document is changed."""
    if data.startswith(b"{"):
        return change(data)
    body, document = taken_apart(data)
    return put_together(body, change(document))


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    return Channel(tmp_path_factory.mktemp("hostile"))


def signed(objects: Objects) -> list[str]:
    return [
        key
        for key in objects
        if key.startswith((keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS)) or key == keys.CHANNEL
    ]


def test_a_whole_channel_by_somebody_else_is_refused(channel: Channel) -> None:
    theirs, unsigned = (objects_of(channel.run(1, signer)[0].store) for signer in (channel.theirs, None))
    claimed = {
        key: data.replace(channel.theirs.public.encode(), channel.ours.public.encode())
        for key, data in theirs.items()
    }
    for objects, why in ((theirs, "not trusted"), (unsigned, "not signed"), (claimed, "does not fit")):
        channel.refuses(objects, CorruptDataError, why)
        assert not channel.never_wrong(objects, 3)
        with_ours = objects | {keys.CHANNEL: channel.objects[keys.CHANNEL]}
        channel.refuses(with_ours, DeltaSyncError)
        assert not channel.never_wrong(with_ours, 3)


def test_another_run_that_we_signed_is_refused_by_whoever_knows_the_first(channel: Channel) -> None:
    ours, other = channel.objects, channel.other_run
    assert ours.keys() == other.keys()
    _, replica = channel.replica(other, at=2)
    with pytest.raises(RunMismatchError):
        replica.sync()
    channel.holds(replica)
    for key in signed(ours):
        for at in (None, 1, 5):
            channel.never_wrong(ours | {key: other[key]}, at)
            if key != keys.CHANNEL:  # without it, a replica takes the other run as the first that it sees
                channel.never_wrong(other | {keys.CHANNEL: ours[keys.CHANNEL], key: ours[key]}, at)


def test_a_large_compaction_is_not_read_before_its_document_is_found_to_be_ours(channel: Channel) -> None:
    """A compaction may be as large as the model takes; anybody can store one of that size."""
    store, _ = channel.replica(channel.objects)
    key = keys.compaction(2, NEWEST, "000000-0000000d")
    claim = channel.objects[keys.compaction(1, NEWEST, SECOND)]
    for large in (
        bytes(6 << 20),
        bytes(6 << 20) + claim,
        bytes(6 << 20) + struct.pack("<Q", (6 << 20) - 100),
    ):
        store.put(key, large)
        ranged = FaultyStore(store)
        reader = ChannelReader(ranged, channel.keys / "ours.pub")
        (info,) = (info for _, info in reader.compactions() if info.key == key)
        with pytest.raises(CorruptDataError):
            reader.stored(key, known=info)
        assert (
            0 < sum(size for _, key, size in ranged.bytes_read if key.startswith(keys.COMPACTIONS)) < 1 << 20
        )
        for at in (1, 2):
            assert channel.never_wrong(channel.objects | {key: large}, at)

    # One of ours of that size is taken.
    large_made = Made(new_store(), channel.ours)
    model: Weights = {"w": torch.zeros(3 << 20, dtype=torch.bfloat16)}
    large_made.codec_name = "raw"
    large_made.create(model)
    large_made.anchor(model)
    after = {"w": model["w"].clone()}
    after["w"].view(torch.int16)[::2] += torch.arange(3 << 19, dtype=torch.int16) % 97 + 1
    large_made.delta({"w": model["w"].clone().index_fill_(0, torch.tensor([5]), 1.0)})
    middle = large_made.tip
    large_made.delta(after, parts=1)
    assert middle is not None and large_made.tip is not None
    reader = ChannelReader(large_made.store, channel.keys / "ours.pub")
    first = reader.numbered(1).version
    compaction = large_made.compaction(first, large_made.tip)
    assert compaction.size > reader.channel().most_bytes(keys.VERSIONS)
    (info,) = (info for span, info in reader.compactions() if span.base == 1)
    assert reader.stored(compaction.key, known=info) == reader.stored(compaction.key) == compaction
    assert not ops.check(reader).problems
    way = find_chain(reader, None, large_made.tip, avoid={middle.key: "left out"})
    assert [stored.key for stored in way] == [first.key, compaction.key]


def test_what_lies_beside_the_weights_is_ours_too(channel: Channel, tmp_path: Path) -> None:
    folder = keys.anchor_folder(4, SECOND)
    config = f"{folder}/config.json"
    code = {f"{folder}/modeling.py": b"print('theirs')", f"{folder}/tokenizer.json": b"{}"}
    store, _ = channel.replica(channel.objects | code)
    reader = ChannelReader(store, channel.keys / "ours.pub")
    ops.export(reader, NEWEST, tmp_path / "export")
    assert (tmp_path / "export/config.json").read_bytes() == channel.objects[config]
    assert (
        not (tmp_path / "export/modeling.py").exists() and not (tmp_path / "export/tokenizer.json").exists()
    )
    store.put(config, b'{"auto_map": {"AutoModel": "theirs"}}')
    with contextlib.suppress(CorruptDataError):  # or that of another anchor
        ops.export(ChannelReader(store, channel.keys / "ours.pub"), NEWEST, tmp_path / "again")
    assert (
        not (tmp_path / "again").exists()
        or (tmp_path / "again/config.json").read_bytes() == channel.objects[config]
    )


def test_a_copy_takes_nothing_of_theirs(channel: Channel) -> None:
    store, _ = channel.replica(channel.objects)
    target = new_store()
    ops.copy(ChannelReader(store, channel.keys / "ours.pub"), target)
    assert objects_of(target) == channel.objects
    slot = keys.slot(2, EPOCH)
    store.put(slot, altered(channel.objects[slot], lambda found: channel.theirs.seal(slot, stripped(found))))
    target = new_store()
    copied = ops.copy(ChannelReader(store, channel.keys / "ours.pub"), target)
    assert any("not trusted" in str(problem) for problem in copied.problems)
    assert slot not in objects_of(target)
    store.put(keys.CHANNEL, channel.theirs.seal(keys.CHANNEL, stripped(channel.objects[keys.CHANNEL])))
    with pytest.raises(CorruptDataError):
        ops.copy(ChannelReader(store, channel.keys / "ours.pub"), new_store())


def test_pruning_spares_what_a_record_of_theirs_stands_in_the_place_of(channel: Channel) -> None:
    for key in (keys.slot(2, EPOCH), keys.slot(4, SECOND), keys.slot(5, SECOND)):
        objects = channel.objects | {key: altered(channel.objects[key], stripped)}
        store, _ = channel.replica(objects)
        with contextlib.suppress(DeltaSyncError):
            ops.gc(ChannelReader(store, channel.keys / "ours.pub"), grace_s=0)
        assert objects_of(store).keys() >= objects.keys()
        report = ops.check(ChannelReader(store, channel.keys / "ours.pub"))
        assert any("sign" in str(problem) for problem in report.problems)


def test_the_cache_of_a_machine_is_no_way_around(channel: Channel, tmp_path: Path) -> None:
    """Somebody puts a record of theirs there; the cache only looks at digests."""
    key = channel.versions[-1].key
    theirs = altered(channel.objects[key], lambda found: channel.theirs.seal(key, stripped(found)))
    digest = documents.sha256_hex(theirs)
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / digest).write_bytes(theirs)
    named = dataclasses.replace(channel.versions[-1], sha256=digest)
    head = Head(run_id="run", version=named.version, epoch=named.epoch, sha256=digest)
    store, _ = channel.replica(channel.objects | {keys.HEAD: documents.encode(head), key: theirs})
    cached = CachedStore(store, tmp_path / "cache", 1 << 20)
    with pytest.raises(CorruptDataError, match="not trusted"):
        ChannelReader(cached, channel.keys / "ours.pub").record(named)
    replica = Replica(cached, trusted_keys=channel.keys / "ours.pub")
    with pytest.raises(CorruptDataError, match="not trusted"):
        replica.sync()
    assert replica.version == NEWEST - 1
    channel.holds(replica)


def test_a_flood_of_records_hides_no_version_from_who_runs(channel: Channel) -> None:
    flood = [ObjectInfo(keys.slot(1 + at, "999999-ffffffff"), 5 << 20, time.time()) for at in range(3_000)]
    store, _ = channel.replica(channel.objects)
    flooded = FaultyStore(store)
    flooded.flood(flood)
    replica = Replica(flooded, trusted_keys=channel.keys / "ours.pub")
    assert replica.sync() == NEWEST  # head leads there
    store.delete(keys.HEAD)
    goes_on = dataclasses.replace(channel.made, store=store, bits=dict(channel.made.bits))
    for seed in (1, 2, 3):
        assert goes_on.tip is not None
        goes_on.delta(trained(goes_on.bits[goes_on.tip.sha256], seed))
        flooded.calls.clear()
        replica.sync()
        assert replica.identity == goes_on.tip
        assert len(flooded.calls) < 500
