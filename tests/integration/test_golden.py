"""Two readers agree on committed channels: deltasync's and one written from docs/format.md alone."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltasync import Publisher, Replica
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.errors import CorruptDataError, DeltaSyncError
from deltasync.following import LiveWeights
from deltasync.kernels import native
from deltasync.live import HostMemory
from deltasync.stores import open_store
from deltasync.tensors import fingerprint
from deltasync.tensors.bits import bits_of, dtype_name
from tests import independent_reader
from tests.golden import make
from tests.independent_reader import Channel, Damaged
from tests.writers import QUICK

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
VERSIONS = range(1, 7)
BEFORE = "before"
"""Nobody writes it again: the signed channel whose documents were not filled with blanks."""
SMALL = [
    "signed/channel",
    f"{BEFORE}/channel",
    "lease/channel",
    "owned/channel",
    "ranks/raw",
    "ranks/packed",
    "ranks/context",
    "detour/channel",
    "announced/channel",
]


def _expected(name: str) -> dict[str, Any]:
    """The rows of each version of a channel."""
    path = GOLDEN / name
    while not (path / "expected.json").exists():
        path = path.parent
    return json.loads((path / "expected.json").read_text(encoding="utf-8"))


def _row(dtype: str, shape: tuple[int, ...], bits: np.ndarray) -> list[Any]:
    little_endian = bits.astype(bits.dtype.newbyteorder("<"), copy=False)
    return [dtype, list(shape), hashlib.sha256(little_endian.tobytes()).hexdigest()]


def _by_replica(replica: Replica) -> dict[str, list[Any]]:
    tensors = replica.state_dict()
    return {
        name: _row(dtype_name(tensor.dtype), tuple(tensor.shape), bits_of(tensor))
        for name, tensor in tensors.items()
    }


def _independently(channel: Channel, version: int | None, by: str = "") -> dict[str, list[Any]]:
    return {name: _row(*found) for name, found in channel.read(version, by).items()}


def test_make_writes_the_committed_bytes(tmp_path: Path) -> None:
    make.main(tmp_path)
    written = {
        path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    committed = {
        path.relative_to(GOLDEN): path
        for path in GOLDEN.rglob("*")
        if path.suffix in (".json", ".safetensors") and not path.is_relative_to(GOLDEN / BEFORE)
    }
    assert written.keys() == committed.keys()
    assert not [path for path, data in written.items() if data != committed[path].read_bytes()]


@pytest.fixture(scope="module", params=make.CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return request.param


def test_independent_reader_gives_published_bits_at_every_version(codec: str) -> None:
    expected = _expected(codec)["versions"]
    channel = Channel(GOLDEN / codec)
    assert [int(version) for version in expected] == list(VERSIONS)
    assert channel.newest()[:2] == (VERSIONS[-1], make.SECOND)
    for version in VERSIONS:
        assert _independently(channel, version) == expected[str(version)], version


def test_replica_that_follows_gives_published_bits_at_every_version(codec: str) -> None:
    expected = _expected(codec)["versions"]
    replica = Replica(f"file://{GOLDEN / codec}")
    for version in VERSIONS:
        assert replica.sync(version) == version
        assert _by_replica(replica) == expected[str(version)], version


def test_a_replica_that_looks_again_at_its_version_takes_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refresh finds the version of an older epoch where it is; that says nothing of another number."""
    monkeypatch.setattr("deltasync.following.cursor.REFRESH_S", 0.0)
    replica = Replica(f"file://{GOLDEN / 'packed'}")
    assert [replica.sync(version) for version in VERSIONS] == list(VERSIONS)


def test_replica_that_starts_late_gives_published_bits_at_every_version(codec: str) -> None:
    expected = _expected(codec)["versions"]
    for version in VERSIONS:
        replica = Replica(f"file://{GOLDEN / codec}")
        replica.sync(version)
        assert _by_replica(replica) == expected[str(version)], version


@pytest.mark.parametrize("name", SMALL)
def test_both_readers_give_the_published_bits_of_the_other_channels(name: str) -> None:
    expected = _expected(name)["versions"]
    channel, store = Channel(GOLDEN / name), open_store(f"file://{GOLDEN / name}")
    for version in map(int, expected):
        replica = Replica(store)
        assert replica.sync(version) == version
        assert _independently(channel, version) == _by_replica(replica) == expected[str(version)], version
    newest = Replica(store)
    assert newest.sync() == int(list(expected)[-1])
    assert channel.newest() == dataclasses.astuple(newest.identity)
    assert _independently(channel, None) == _by_replica(newest) == list(expected.values())[-1]


def test_a_channel_that_starts_from_a_model_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GOLDEN / "reference"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    expected = _expected("reference")["versions"]
    (snapshot,) = (folder / "hub").glob("*/snapshots/*")
    assert len(list(snapshot.glob("*.safetensors"))) == 2
    channel = Channel(folder / "channel", snapshot)
    assert not (folder / "channel/anchors").exists()
    replica = Replica(f"file://{folder}/channel")
    for version in (1, 2):
        assert _independently(channel, version) == expected[str(version)]
        assert replica.sync(version) == version
        assert _by_replica(replica) == expected[str(version)]


@pytest.mark.parametrize("name", ["signed", BEFORE])
def test_a_signed_channel_is_verified_by_both_readers(tmp_path: Path, name: str) -> None:
    folder, expected = GOLDEN / name / "channel", _expected(name)
    keys = expected["keys"]
    (tmp_path / "keys").write_text("\n".join(keys))
    channel = Channel(folder, keys=frozenset(keys))
    replica = Replica(f"file://{folder}", trusted_keys=tmp_path / "keys")
    for version in (1, 2, 3, 4, 5):
        assert _independently(channel, version) == expected["versions"][str(version)]
        assert replica.sync(version) == version
        assert _by_replica(replica) == expected["versions"][str(version)]
    assert _independently(channel, 5, "compaction") == expected["versions"]["5"]
    first, second = (channel.record(channel_key)[0]["object"] for channel_key in _records(folder, 2, 3))
    assert [keys[0] in str(first), keys[1] in str(second)] == [True, True]

    (tmp_path / "keys").write_text(keys[1])
    with pytest.raises(CorruptDataError, match=r"channel\.json is signed with the key"):
        Replica(f"file://{folder}", trusted_keys=tmp_path / "keys").sync()
    with pytest.raises(Damaged, match=r"signed by another key"):
        Channel(folder, keys=frozenset(keys[1:]))
    (tmp_path / "keys").write_text(keys[0])
    old = Replica(f"file://{folder}", trusted_keys=tmp_path / "keys")
    assert old.sync(2) == 2
    with pytest.raises(DeltaSyncError):
        old.sync(3)
    with pytest.raises(Damaged, match=r"signed by another key"):
        Channel(folder, keys=frozenset(keys[:1])).read(3)


def _records(folder: Path, *versions: int) -> list[str]:
    """Keys of the versions' records, not of seals."""
    paths = [sorted(folder.glob(f"versions/*/{version:010}.*"))[-1] for version in versions]
    return [str(path.relative_to(folder)) for path in paths]


def test_an_altered_signed_document_is_refused_by_both_readers(tmp_path: Path) -> None:
    keys = _expected("signed")["keys"]
    (tmp_path / "keys").write_text("\n".join(keys))
    source = GOLDEN / "signed/channel"
    record, other = _records(source, 4, 5)
    (compaction,) = (str(path.relative_to(source)) for path in source.glob("compactions/*"))
    for key in ("channel.json", record, compaction):
        original = (source / key).read_bytes()
        for number, altered in enumerate(
            (
                original.replace(b'"run_id":"run"', b'"run_id":"ran"'),
                re.sub(b'("ed25519":")[0-9a-f]{2}', rb"\g<1>00", original),
                re.sub(b',"signature":[^\n]*', b"}", original),
                (source / other).read_bytes(),
                original[:100] + bytes([original[100] ^ 1]) + original[101:],
            )
        ):
            assert altered != original
            folder = tmp_path / f"{key.replace('/', '-')}-{number}"
            shutil.copytree(source, folder)
            (folder / key).write_bytes(altered)
            with pytest.raises(Damaged):
                _ = Channel(folder, keys=frozenset(keys)).record(key)
            reader = ChannelReader(open_store(f"file://{folder}"), tmp_path / "keys")
            with pytest.raises(CorruptDataError):
                reader.stored(key)


def test_a_compaction_gives_the_published_bits_to_both_readers(codec: str) -> None:
    expected = _expected(codec)["versions"][str(VERSIONS[-1])]
    assert _independently(Channel(GOLDEN / codec), VERSIONS[-1], "compaction") == expected

    reader = ChannelReader(open_store(f"file://{GOLDEN / codec}"))
    memory, tensors = HostMemory.on_host(reader.specs)
    memory.audit()
    follower = LiveWeights(reader, memory)
    newest = reader.newest()
    (key,) = (info.key for span, info in reader.compactions() if span.base == 1)
    assert newest is not None
    compaction, first = reader.stored(key), reader.record(reader.numbered(1).version)
    for way in ([first], [compaction]):
        follower.confirm(follower.commit(follower.stage(way)))
    assert follower.version == newest.version
    found = {
        name: _row(dtype_name(tensor.dtype), tuple(tensor.shape), bits_of(tensor))
        for name, tensor in tensors.items()
    }
    assert found == expected


@pytest.mark.parametrize(
    ("case", "independently", "by_replica"),
    [
        ("record", "body of", "has another body than its document says"),
        ("part", "length or sha256", "does not have the sha256"),
        ("stream", "end of a stream|slot|stream too short|state", "malformed block"),
        ("fingerprint", "fingerprint of w", "did not give the published bits"),
        ("requires", "requires", "requires telepathy"),
        ("changed", "changed", "changes more elements than its record says"),
        ("bound", "bound", "more than the channel's tensors take"),
    ],
)
def test_a_damaged_version_is_refused_by_both_readers(
    case: str, independently: str, by_replica: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = GOLDEN / "damaged" / case, _expected("damaged")["versions"]["1"]
    replica = Replica(f"file://{folder}")
    assert replica.sync(1) == 1
    said = ""
    try:
        assert replica.sync() == 1
    except DeltaSyncError as error:
        said = str(error)
    assert replica.version == 1
    assert _by_replica(replica) == expected
    assert re.search(by_replica, said + caplog.text)

    channel = Channel(folder)
    assert _independently(channel, 1) == expected
    with pytest.raises(Damaged, match=independently):
        channel.read(2)


def test_there_is_a_damaged_channel_for_each_case() -> None:
    assert {path.name for path in (GOLDEN / "damaged").iterdir() if path.is_dir()} == make.DAMAGED.keys()


def test_golden_channels_cover_the_format(codec: str) -> None:
    """What `make.py` means to write is there, so that a later run of it cannot lose it unnoticed."""
    folder = GOLDEN / codec
    channel = Channel(folder)
    records = dict(
        zip(VERSIONS, (channel.record(key)[0] for key in _records(folder, *VERSIONS)), strict=True)
    )
    assert {dtype for dtype, _ in channel.table.values()} == independent_reader.DTYPES.keys()
    assert {(), (0, 4)} <= {shape for _, shape in channel.table.values()}
    assert [record["kind"] for record in records.values()] == ["anchor", *["delta"] * 5]
    assert len(records[1]["anchor"]["files"]) > 1
    assert records[3]["delta"]["changed"] == 0
    assert [len(records[version]["delta"]["parts"]) for version in VERSIONS[1:]] == [0, 0, 2, 0, 0]
    seal, _ = channel.record(independent_reader.slot(6, make.EPOCH))
    assert (seal["kind"], seal["next_epoch"]) == ("seal", make.SECOND)
    (announced,) = folder.glob("announcements/*")
    assert channel.record(str(announced.relative_to(folder)))[0]["anchor"]["files"]

    if codec == "raw":
        return
    parts = [independent_reader.safetensors(channel.file(part)) for part in records[4]["delta"]["parts"]]
    rows = [row for metadata, _ in parts for row in json.loads(metadata["vectors"]).values()]
    assert len(rows) > 2
    if codec == "packed":
        assert max(row["blocks"] for row in rows) > 2
    else:
        assert any("tiles" in row for row in rows)
        tables = [
            data
            for _, entries in parts
            for name, (_, _, data) in entries.items()
            if name.endswith(".tile_tables")
        ]
        assert max(data[0] for data in tables) > 0  # there are two classes in one group


def payload(record: independent_reader.Record) -> dict[str, str]:
    return independent_reader.safetensors(record["object"])[0]


def test_other_channels_cover_the_format() -> None:
    (stored,) = (GOLDEN / "announced/channel").glob("announcements/*")
    announced = Channel(GOLDEN / "announced/channel")
    record, _ = announced.record(str(stored.relative_to(announced.folder)))
    assert record["anchor"]["files"]
    ranks = Channel(GOLDEN / "ranks/packed")
    record, _ = ranks.record(*_records(ranks.folder, 2))
    row = json.loads(payload(record)["vectors"])["2"]
    assert (row["block"], row["blocks"], len(record["delta"]["parts"])) == (0, 1, 2)
    ranks = Channel(GOLDEN / "ranks/context")
    record, _ = ranks.record(*_records(ranks.folder, 2))
    _, entries = independent_reader.safetensors(record["object"])
    assert np.frombuffer(entries[".2.ranges"][2], "<i8").tolist() == [0, make.BLOCK]
    lease = Channel(GOLDEN / "lease/channel")
    assert [epoch for epoch, number in lease.slots() if number == 3] == [make.EPOCH, make.SECOND]
    reader = ChannelReader(open_store(f"file://{GOLDEN}/detour/channel"))
    newest = reader.newest()
    assert newest is not None
    assert [stored.record.kind for stored in find_chain(reader, None, newest.version)] == [
        "announcement",
        "compaction",
        "delta",
    ]


def test_example_of_classes_of_the_page_holds() -> None:
    page = (TESTS.parent / "docs/format.md").read_text(encoding="utf-8")
    example = re.search(
        r"classes and tables are `(\w+)`.*?`([\w ]+)` and three.*?`(\w+)`, and becomes `([\w ]+)`",
        page,
        re.DOTALL,
    )
    assert example is not None
    data, (old, new) = (
        bytes.fromhex(example[1]),
        ([int(bits, 16) for bits in example[at].split()] for at in (2, 4)),
    )
    classes, at = independent_reader.class_tables(data, 0)
    stream = independent_reader.Stream([int(example[3], 16)])
    for index, step in independent_reader.class_block(
        stream, classes, [bits >> 7 & 255 for bits in old], 3, 16
    ):
        old[index] = (old[index] + step) % 2**16
    stream.end()
    assert (at, old) == (len(data), new)


def test_fingerprint_example_of_the_page_holds() -> None:
    page = (TESTS.parent / "docs/format.md").read_text(encoding="utf-8")
    example = re.search(r'`name = "(\w+)"`.*\(bits ([0-9A-Fx, ]+)\): `([0-9a-f]{16})`', page)
    assert example is not None
    name, values, digits = example.groups()
    bits = np.array([int(value, 16) for value in values.split(", ")], np.uint16)
    assert f"{independent_reader.fingerprint(name, bits):016x}" == digits
    assert fingerprint.to_hex(native.fingerprint(fingerprint.tensor_key(name), bits)) == digits


def test_planes_example_of_the_page_holds() -> None:
    page = (TESTS.parent / "docs/format.md").read_text(encoding="utf-8")
    example = re.search(r"1,000 elements 1\.0 .*`([0-9a-f]+)` and\s+`([0-9a-f]+)`", page)
    assert example is not None
    frames = [bytes.fromhex(frame) for frame in example.groups()]
    entry = "U8", (22,), b"".join(frames)
    bits = independent_reader.planes(entry, [len(frame) for frame in frames], "bfloat16", (1000,))
    assert bits.tolist() == [0x3F80] * 1000


def test_independent_reader_imports_nothing_but_numpy_zstandard_and_the_standard_library() -> None:
    tree = ast.parse((TESTS / "independent_reader.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names | {"numpy", "zstandard"}


def test_a_channel_of_writers_that_claimed_by_their_openings_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltasync.opening.acquire.LeasedStore", QUICK)
    url = f"file://{shutil.copytree(GOLDEN / 'lease/channel', tmp_path / 'run')}"
    replica = Replica(url)
    replica.sync()
    weights = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    changed = bits_of(next(iter(weights.values())))
    with Publisher(url, resume=True) as publisher:
        for version in (6, 7):
            changed[version] ^= 1
            receipt = publisher.publish(weights.items()).wait(60)
            assert (receipt.version, receipt.kind) == (version, "delta")
            assert replica.sync() == version
            for name, tensor in replica.state_dict().items():
                np.testing.assert_array_equal(bits_of(tensor), bits_of(weights[name]))
    assert ChannelReader(open_store(url)).channel().fencing == "lease"
    assert len([*(tmp_path / "run/claims").iterdir()]) == 1
