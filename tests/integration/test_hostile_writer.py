"""Somebody else can write to the bucket. A replica that requires signatures takes nothing from them, whatever they do."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync import Publisher, Replica, chain, housekeeping, layout, manifest, open_store, signing
from deltasync.errors import (
    CorruptDataError,
    DeltaSyncError,
    HeadRewindError,
    MissingVersionError,
    RunMismatchError,
    SignatureError,
)
from deltasync.housekeeping.survey import fold_keys
from deltasync.manifest import Fold, Head, Manifest
from deltasync.reader import ChannelReader
from deltasync.signing import Signer
from deltasync.stores import Store
from deltasync.stores.cache import CachedStore
from tests.conftest import assert_same_bits

Weights = dict[str, torch.Tensor]
Objects = dict[str, bytes]
NEWEST = 6


class Channel:
    """A signed channel of six versions: anchors at 1 and 4, a fold from 1 to 6, a config beside the anchors."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder
        for name in ("ours", "theirs"):
            signing.new_key(folder / name, name)
        self.ours, self.theirs = Signer(folder / "ours"), Signer(folder / "theirs")
        self.published, self.objects = self.run(0, "ours")
        self.other_run = self.run(7, "ours")[1]

    def run(self, seed: int, name: str | None) -> tuple[list[Weights], Objects]:
        store = open_store(f"memory://{uuid.uuid4().hex}")
        random = torch.Generator().manual_seed(seed)
        weights = {"w": torch.randn(60, 90, generator=random).bfloat16(), "b": torch.randn(9, generator=random)}
        published = []
        key = None if name is None else self.keys / name
        files = {"config.json": b'{"model_type": "qwen3"}'}
        with Publisher(store, dtype="keep", anchor_every=3, signing_key=key, model_files=files) as publisher:
            for _ in range(NEWEST):
                weights["w"].view(torch.int16)[:, :2] += 1
                weights["b"][:2] *= 2
                publisher.publish(weights.items()).wait(60)
                published.append({name: tensor.clone() for name, tensor in weights.items()})
        signer = None if key is None else Signer(key)
        housekeeping.write_fold(ChannelReader(store, signer and signer.trusted), 1, NEWEST, signer=signer)
        return published, {info.key: store.read(info.key) for info in store.list("")}

    def replica(self, objects: Objects, at: int | None = None) -> tuple[Store, Replica]:
        """A replica that requires our key, at a version of the honest channel, which then turns into these objects."""
        store = open_store(f"memory://{uuid.uuid4().hex}")
        replica = Replica(store, trusted_keys=self.keys / "ours.pub")
        if at is not None:
            put(store, self.objects)
            replica.sync(at)
            store.delete(*self.objects)
        put(store, objects)
        return store, replica

    def refuses(self, objects: Objects, error: type[DeltaSyncError], match: str = ".", at: int | None = None) -> None:
        _, replica = self.replica(objects, at)
        with pytest.raises(error, match=match) as caught:
            replica.sync()
        assert "\n" not in str(caught.value)
        assert replica.version == at
        if at is not None:
            assert_same_bits(replica.state_dict(), self.published[at - 1])


def put(store: Store, objects: Objects) -> None:
    for key, data in objects.items():
        store.replace(key, data)


def head(version: int, data: bytes, run_id: str) -> bytes:
    """A head that names a manifest with these bytes; anybody can write one."""
    found = Head(format=manifest.FORMAT, run_id=run_id, version=version, manifest_sha256=manifest.sha256_hex(data))
    return manifest.encode(found)


def stripped(data: bytes) -> bytes:
    """A signed document without its signature."""
    return data[: data.index(b',"signature"')] + b"}\n"


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    return Channel(tmp_path_factory.mktemp("hostile"))


def documents(objects: Objects) -> Iterator[str]:
    return (key for key in objects if key.endswith(".json") and not key.startswith("anchors/"))


def test_the_honest_channel_is_taken(channel: Channel) -> None:
    for at in (None, *range(1, NEWEST + 1)):
        _, replica = channel.replica(channel.objects, at)
        assert replica.sync() == NEWEST
        assert_same_bits(replica.state_dict(), channel.published[-1])
    assert len(list(documents(channel.objects))) == 2 + NEWEST + 1


def test_a_whole_channel_by_somebody_else_is_refused(channel: Channel) -> None:
    theirs, unsigned = channel.run(1, "theirs")[1], channel.run(1, None)[1]
    claimed = {
        key: data.replace(channel.theirs.public.encode(), channel.ours.public.encode()) for key, data in theirs.items()
    }
    for at in (None, 3):
        error = SignatureError
        channel.refuses(theirs, error, "not trusted", at)
        channel.refuses(unsigned, error, "not signed", at)
        channel.refuses(claimed, error, "does not fit", at)
        # With our channel.json, which names another run.
        channel.refuses(theirs | {"channel.json": channel.objects["channel.json"]}, error, "head.json is signed", at)


def test_another_run_that_we_signed_is_refused_by_whoever_knows_the_first(channel: Channel) -> None:
    ours, other = channel.objects, channel.other_run
    channel.refuses(other, RunMismatchError, at=2)
    for key in ("head.json", "channel.json"):
        channel.refuses(ours | {key: other[key]}, RunMismatchError)
    newest = layout.manifest(NEWEST)
    channel.refuses(ours | {newest: other[newest]}, CorruptDataError, "sha256", at=2)
    channel.refuses(ours | {newest: other[newest], "head.json": other["head.json"]}, RunMismatchError, at=2)
    forged = head(NEWEST, other[newest], str(json.loads(ours["head.json"])["run_id"]))
    channel.refuses(ours | {newest: other[newest], "head.json": forged}, SignatureError, "not signed", at=2)


def resigned_by_us(channel: Channel, key: str, alter: Callable[[dict[str, object]], None]) -> bytes:
    """What only a stolen key can do: another document with our signature."""
    document = json.loads(stripped(channel.objects[key]))
    alter(document)
    return channel.ours.seal(key, json.dumps(document, separators=(",", ":")).encode() + b"\n")


@pytest.mark.parametrize("which", ["channel.json", "head.json", layout.manifest(NEWEST), layout.manifest(4)])
@pytest.mark.parametrize("kind", ["stripped", "by them", "in our name", "moved", "no algorithm"])
def test_every_document_must_be_ours_at_its_place(channel: Channel, which: str, kind: str) -> None:
    ours = channel.objects
    plain = stripped(ours[which])
    if kind == "stripped":
        data = plain
    elif kind == "by them":
        data = channel.theirs.seal(which, plain)
    elif kind == "in our name":
        data = channel.theirs.seal(which, plain).replace(channel.theirs.public.encode(), channel.ours.public.encode())
    elif kind == "moved":
        data = channel.ours.seal("manifests/0000000099.json", plain)
    else:
        data = ours[which].replace(b'"ed25519"', b'"none"')
    objects = ours | {which: data}
    if which == layout.manifest(NEWEST):  # head's digest must not be what saves us
        objects["head.json"] = resigned_by_us(
            channel, "head.json", lambda found: found.update(manifest_sha256=manifest.sha256_hex(data))
        )
    if which == layout.manifest(4):
        _, replica = channel.replica(objects)
        with pytest.raises(SignatureError):
            replica.sync(4)  # asked for by its number, so that no digest is known
        assert replica.version is None
    else:
        channel.refuses(objects, SignatureError)
        if which != "channel.json":  # which is read once
            channel.refuses(objects, SignatureError, at=5)


def test_a_head_is_no_more_than_a_pointer_to_what_we_signed(channel: Channel) -> None:
    ours = channel.objects
    run_id = str(json.loads(ours["head.json"])["run_id"])
    second, third = ours[layout.manifest(2)], ours[layout.manifest(3)]
    replayed = ours | {layout.manifest(NEWEST + 1): third}
    for at in (None, 5):
        channel.refuses(ours | {"head.json": head(3, third, run_id)}, SignatureError, "not signed", at)
        replayed["head.json"] = head(NEWEST + 1, third, run_id)
        channel.refuses(replayed, SignatureError, "not signed", at)
        # Even with a head of ours, as if we had written it.
        replayed["head.json"] = channel.ours.seal("head.json", replayed["head.json"])
        channel.refuses(replayed, SignatureError, "put where it does not belong", at)
        swapped = ours | {layout.manifest(2): third, layout.manifest(3): second}
        _, replica = channel.replica(swapped, None)
        for version in (2, 3):
            with pytest.raises(SignatureError, match="put where it does not belong"):
                replica.sync(version)


def test_a_rewound_head_is_refused_while_a_replica_runs(channel: Channel) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    replica = Replica(store, trusted_keys=channel.keys / "ours.pub")
    with Publisher(store, dtype="keep", signing_key=channel.keys / "ours") as publisher:
        publisher.publish(channel.published[0].items()).wait(60)
        old = store.read("head.json")
        publisher.publish(channel.published[1].items()).wait(60)
        replica.sync()
        store.replace("head.json", old)
        with pytest.raises(HeadRewindError):
            replica.sync()
        assert replica.version == 2
        publisher.publish(channel.published[2].items()).wait(60)
    assert replica.sync() == 3
    assert_same_bits(replica.state_dict(), channel.published[2])


def test_a_forged_fold_costs_a_detour(channel: Channel) -> None:
    (key,) = (key for key in channel.objects if key.endswith("fold.json"))
    fold = json.loads(channel.objects[key])
    payload = fold["files"][0]["key"]
    altered = bytearray(channel.objects[payload])
    altered[-5] ^= 1
    fold["files"][0]["sha256"] = manifest.sha256_hex(bytes(altered))
    del fold["signature"]
    forged = json.dumps(fold, separators=(",", ":")).encode() + b"\n"
    for data in (forged, channel.theirs.seal(key, forged), stripped(channel.objects[key])):
        objects = channel.objects | {key: data, payload: bytes(altered)}
        store, replica = channel.replica(objects, at=1)
        assert replica.sync() == NEWEST
        assert_same_bits(replica.state_dict(), channel.published[-1])
        reader = ChannelReader(store, channel.keys / "ours.pub")
        with pytest.raises(SignatureError):
            housekeeping.read_folds(reader)
        with pytest.raises(SignatureError):
            reader.fold(chain.Step(NEWEST, reader.head().manifest_sha256, 1, 0, key))


def test_what_lies_beside_the_weights_is_ours_too(channel: Channel, tmp_path: Path) -> None:
    config = next(key for key in channel.objects if key == "anchors/0000000004/config.json")
    code = {"anchors/0000000004/modeling.py": b"print('theirs')", "anchors/0000000004/tokenizer.json": b"{}"}
    store, _ = channel.replica(channel.objects | code)
    reader = ChannelReader(store, channel.keys / "ours.pub")
    housekeeping.export(reader, NEWEST, tmp_path / "export")
    assert (tmp_path / "export/config.json").read_bytes() == channel.objects[config]
    assert not (tmp_path / "export/modeling.py").exists() and not (tmp_path / "export/tokenizer.json").exists()
    store.replace(config, b'{"auto_map": {"AutoModel": "theirs"}}')
    with pytest.raises(CorruptDataError, match=r"config\.json"):
        housekeeping.export(ChannelReader(store, channel.keys / "ours.pub"), NEWEST, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_copy_is_signed_as_the_original(channel: Channel) -> None:
    store, _ = channel.replica(channel.objects)
    target = open_store(f"memory://{uuid.uuid4().hex}")
    housekeeping.copy(ChannelReader(store, channel.keys / "ours.pub"), target)
    assert {info.key: target.read(info.key) for info in target.list("")} == channel.objects
    target.replace("channel.json", channel.theirs.seal("channel.json", stripped(channel.objects["channel.json"])))
    with pytest.raises(SignatureError):
        housekeeping.copy(ChannelReader(store, channel.keys / "ours.pub"), target)
    theirs, _ = channel.replica(channel.run(1, "theirs")[1])
    with pytest.raises(SignatureError):
        housekeeping.copy(ChannelReader(theirs, channel.keys / "ours.pub"), open_store(f"memory://{uuid.uuid4().hex}"))


def test_looking_after_a_channel_stops_at_what_is_not_ours(channel: Channel) -> None:
    key = layout.manifest(2)
    objects = channel.objects | {key: channel.theirs.seal(key, stripped(channel.objects[key]))}
    store, _ = channel.replica(objects)
    reader = ChannelReader(store, channel.keys / "ours.pub")
    with pytest.raises(SignatureError):
        housekeeping.prune(reader, grace_s=0)
    assert {info.key for info in store.list("")} >= objects.keys()
    report = housekeeping.check(ChannelReader(store, channel.keys / "ours.pub"))
    assert any(isinstance(problem, SignatureError) for problem in report.problems)


def test_the_cache_of_a_machine_is_no_way_around(channel: Channel, tmp_path: Path) -> None:
    """Somebody puts a manifest of theirs there, and a head that names its digest; the cache only looks at digests."""
    key = layout.manifest(NEWEST)
    theirs = channel.theirs.seal(key, stripped(channel.objects[key]))
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / manifest.sha256_hex(theirs)).write_bytes(theirs)
    signed_head = resigned_by_us(
        channel, "head.json", lambda found: found.update(manifest_sha256=manifest.sha256_hex(theirs))
    )
    store, _ = channel.replica(channel.objects | {"head.json": signed_head})
    replica = Replica(CachedStore(store, tmp_path / "cache", 1 << 20), trusted_keys=channel.keys / "ours.pub")
    with pytest.raises(SignatureError, match="not trusted"):
        replica.sync()


def _never_wrong(channel: Channel, objects: Objects, at: int | None) -> bool:
    """The replica refuses and keeps what it has, or arrives at the very bits that were published. Whether it arrived."""
    _, replica = channel.replica(objects, at)
    try:
        version = replica.sync()
    except DeltaSyncError as error:
        assert "\n" not in str(error)
        assert replica.version is None or replica.version >= (at or 0)
    else:
        assert version == NEWEST
    if replica.version is not None:
        assert_same_bits(replica.state_dict(), channel.published[replica.version - 1])
    return replica.version == NEWEST


def test_every_object_altered_removed_or_replaced_by_every_other(channel: Channel) -> None:
    ours = channel.objects
    arrived: dict[str, bool] = {}
    for key in ours:
        middle = len(ours[key]) // 2
        altered = ours[key][:middle] + bytes([ours[key][middle] ^ 4]) + ours[key][middle + 1 :]
        for at in (None, 1, 5):
            arrived[key] = _never_wrong(channel, ours | {key: altered}, at)
            _never_wrong(channel, {other: data for other, data in ours.items() if other != key}, at)
        for other in (other for other in ours if other != key and other[:4] == key[:4]):
            _never_wrong(channel, ours | {key: ours[other]}, None)
        _never_wrong(channel, ours | {key: channel.other_run.get(key, b"")}, 1)
    # From version 5 all it takes is the newest delta, which its manifest, head and channel.json lead to.
    assert {key for key, taken in arrived.items() if not taken} == {
        "head.json",
        layout.manifest(NEWEST),
        f"{layout.delta_dir(NEWEST)}/part-00001-of-00001.safetensors",
    }


@settings(max_examples=40)
@given(data=st.data())
def test_several_objects_altered_at_random(channel: Channel, data: st.DataObject) -> None:
    objects = dict(channel.objects)
    for key in data.draw(st.lists(st.sampled_from(sorted(objects)), min_size=1, max_size=4, unique=True)):
        how = data.draw(st.sampled_from(["flip", "cut", "swap", "strip", "resign"]))
        original = objects[key]
        at = data.draw(st.integers(0, len(original) - 1))
        if how == "flip":
            objects[key] = original[:at] + bytes([original[at] ^ data.draw(st.integers(1, 255))]) + original[at + 1 :]
        elif how == "cut":
            objects[key] = original[:at]
        elif how == "swap":
            objects[key] = data.draw(st.sampled_from([channel.objects, channel.other_run])).get(key, original)
        elif b',"signature"' in original:
            plain = stripped(original)
            objects[key] = plain if how == "strip" else channel.theirs.seal(key, plain)
    _never_wrong(channel, objects, data.draw(st.sampled_from([None, 1, 3, 5])))


def test_a_stolen_key_signs_what_it_likes_until_it_is_revoked(channel: Channel, tmp_path: Path) -> None:
    """What signatures cannot stop, said as it is; and that revoking the key stops it on a replica that runs."""
    stolen, objects = channel.run(1, "ours")
    (tmp_path / "trusted").write_bytes((channel.keys / "ours.pub").read_bytes())
    store = open_store(f"memory://{uuid.uuid4().hex}")
    put(store, objects)
    replica = Replica(store, trusted_keys=tmp_path / "trusted")
    assert replica.sync(3) == 3
    assert_same_bits(replica.state_dict(), stolen[2])
    (tmp_path / "trusted").write_bytes((channel.keys / "theirs.pub").read_bytes())
    with pytest.raises(SignatureError, match="not trusted"):
        replica.sync()
    assert replica.version == 3


def test_documents_are_what_the_tests_take_them_for(channel: Channel) -> None:
    for key in documents(channel.objects):
        assert signing.signed_by(channel.objects[key]) == channel.ours.public
    newest = manifest.decode(channel.objects[layout.manifest(4)], Manifest, "")
    assert newest.anchor is not None and [file.key for file in newest.anchor.companions or []] == [
        "anchors/0000000004/config.json"
    ]
    (key,) = fold_keys(ChannelReader(channel.replica(channel.objects)[0]))
    fold = manifest.decode(channel.objects[key], Fold, key)
    assert (fold.base_version, fold.version) == (1, NEWEST)
    with pytest.raises(MissingVersionError):
        ChannelReader(channel.replica(channel.objects)[0]).manifest(NEWEST + 1)
