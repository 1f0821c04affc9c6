"""Channels written to do harm: more bytes than declared, paths that lead elsewhere, numbers at the edges of
their types.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

import deltasync
from deltasync import Replica, codec, limits, open_store, ops
from deltasync.channel import documents, keys, payloads, record
from deltasync.channel.documents import Anchor, Channel, DeltaFiles, File, Record, Reference
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.codec.base import FORMAT, Encoded
from deltasync.errors import CorruptDataError, DeltaSyncError, FormatError, MissingVersionError, StageError
from deltasync.live import HostMemory
from deltasync.opening.checkpoint import load
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat, heartbeat_of
from deltasync.stores.base import ObjectInfo
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec
from tests.channels import EPOCH, RUN, Made, made
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

SPECS = {"w": TensorSpec("w", "bfloat16", (20, 40)), "v": TensorSpec("v", "float32", (300,))}
LARGEST = (1 << 63) - 1


def _weights(round_: int) -> dict[str, torch.Tensor]:
    return {
        "w": (torch.arange(800, dtype=torch.int32) + round_)
        .to(torch.int16)
        .view(torch.bfloat16)
        .reshape(20, 40),
        "v": (torch.arange(300, dtype=torch.int32) * (1 + round_)).view(torch.float32),
    }


@pytest.fixture
def channel(memory_url: str) -> Made:
    """A channel at version 1, whose next version is what a test makes of it."""
    found = Made(FaultyStore(open_store(memory_url)))
    found.create(_weights(0))
    found.anchor(_weights(0))
    return found


def _append(
    channel: Made, payload: Encoded | None, name: str, changed: int = 800, parts: Sequence[File] = ()
) -> None:
    """Version 2, with this payload and these parts."""
    delta = DeltaFiles(codec=name, changed=changed, parts=list(parts))
    channel.append(channel.record("delta", 2, _weights(0), delta=delta), payload, _weights(0))


def _store_part(channel: Made, data: bytes) -> File:
    return channel.put_file(f"{keys.parts_folder(2, EPOCH)}/{keys.part(0, 1)}", data)


def _refused(channel: Made, match: str, caplog: pytest.LogCaptureFixture) -> None:
    """A replica at version 1 does not take version 2; what it says of it matches."""
    replica = Replica(channel.store)
    replica.sync(1)
    said = ""
    try:
        replica.sync()
    except DeltaSyncError as error:
        said = str(error)
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), _weights(0))
    assert re.search(match, said + caplog.text)


# Sizes


def test_an_object_that_is_larger_than_declared_is_not_read(
    channel: Made, caplog: pytest.LogCaptureFixture
) -> None:
    part = _store_part(channel, b"x" * 10)
    _append(channel, None, "packed", parts=[part])
    channel.store.put(part.key, bytes(1 << 20))
    _refused(channel, "10 bytes|may have", caplog)


@pytest.mark.parametrize("size", [1 << 30, LARGEST])
def test_a_version_that_declares_more_than_its_tensors_take_is_not_fetched(
    channel: Made, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    part = _store_part(channel, b"x" * 10)
    _append(channel, None, "packed", parts=[dataclasses.replace(part, bytes=size)])
    _refused(channel, "more than the channel's tensors take", caplog)
    channel.announce(channel.tip)
    (compaction,) = (info.key for info in channel.store.list(keys.ANNOUNCEMENTS))
    stored = ChannelReader(channel.store).stored(compaction)
    assert stored.record.anchor is not None
    (file,) = stored.record.anchor.files
    anchor = dataclasses.replace(stored.record.anchor, files=[dataclasses.replace(file, bytes=size)])
    channel.store.put(
        compaction,
        record.encode(dataclasses.replace(stored.record, anchor=anchor), compaction, None, None).data,
    )
    _refused(channel, "more than the channel's tensors take", caplog)
    assert isinstance(channel.store, FaultyStore)
    read = [key for operation, key in channel.store.calls if operation == "read"]
    assert part.key not in read and file.key not in read


def test_a_copy_reads_no_more_than_the_tensors_can_take(channel: Made, memory_url: str) -> None:
    """A record whose part says that it is as large as the object is, which is larger than any part may be."""
    part = _store_part(channel, bytes(2 << 20))
    _append(channel, None, "packed", parts=[part])
    opening = channel.put_file(keys.epoch_document("000002-00000000"), b" " * (limits.SMALL_BYTES + 1))
    target = open_store(f"{memory_url}/copy")
    copied = ops.copy(ChannelReader(channel.store), target)
    assert {type(problem) for problem in copied.problems} == {CorruptDataError}
    assert any("more than the channel's tensors take" in str(problem) for problem in copied.problems)
    assert any("may have 4096 at most" in str(problem) for problem in copied.problems)
    assert isinstance(channel.store, FaultyStore)
    assert part.key not in {key for operation, key in channel.store.calls if operation == "read"}
    assert not {part.key, opening.key, keys.slot(2, EPOCH)} & {info.key for info in target.list("")}


def test_every_object_is_asked_for_with_a_bound(memory_url: str) -> None:
    channel = made(open_store(memory_url), 3, compactions=[(1, 3)])
    channel.announce(channel.tip)
    found = ChannelReader(channel.store).channel()
    bounds = {
        keys.CHANNEL: 32 << 20,
        keys.HEAD: 4096,
        channel.tip.key: found.most_bytes(channel.tip.key),
        keys.compaction(1, 3, EPOCH): found.most_bytes(keys.compaction(1, 3, EPOCH)),
        keys.announcement(3, EPOCH): found.most_bytes(keys.announcement(3, EPOCH)),
    }
    for key, bound in bounds.items():
        store = FaultyStore(channel.store)
        store.endless(key)
        reader = ChannelReader(store)
        with contextlib.suppress(DeltaSyncError):
            reader.head()
            reader.newest()
            reader.stored(keys.compaction(1, 3, EPOCH))
            reader.stored(keys.announcement(3, EPOCH))
        assert store.bounds and set(store.bounds) == {bound}
        assert bound < 8 << 20 or key == keys.CHANNEL
    store = FaultyStore(channel.store)
    store.put(keys.HEAD, bytes(120 << 20))
    replica = Replica(store)
    assert replica.sync() == 3  # by a listing
    assert_same_bits(replica.state_dict(), channel.bits[channel.tip.sha256])


def test_a_listing_of_100_000_strange_keys_costs_a_bounded_number_of_reads(memory_url: str) -> None:
    channel = made(open_store(memory_url), 3)
    flood = [ObjectInfo(keys.slot(1 + at, "999999-ffffffff"), 5 << 20, time.time()) for at in range(50_000)]
    flood += [ObjectInfo(keys.announcement(3, f"000000-{at:08x}"), 1, time.time()) for at in range(50_000)]
    store = FaultyStore(channel.store)
    store.flood(flood)
    reader = ChannelReader(store)
    assert reader.newest() is None
    with pytest.raises(MissingVersionError):
        find_chain(reader, None, channel.tip)
    assert len(store.calls) < 12 * limits.DAMAGED_RECORDS


def test_a_payload_that_changes_more_than_its_record_says_is_corrupt(
    channel: Made, caplog: pytest.LogCaptureFixture
) -> None:
    after = _weights(0)
    after["w"].view(torch.int16)[3, :5] += 1
    ((payload, changed),) = channel.encode(_weights(0), after, 2, 1, 1)
    _append(channel, payload, "packed", changed - 1)
    _refused(channel, "more elements than its record says, 4", caplog)


@pytest.mark.parametrize("name", ["packed", "context", "raw"])
def test_a_delta_of_other_shapes_is_corrupt(
    channel: Made, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = TensorSpec("w", "bfloat16", (20, 4000))
    index_K, step_K = np.array([3, 79_999], np.int32), np.array([1, 1], np.uint16)
    delta = Delta(Layout({"w": spec}), {2: Sparse(index_K, step_K)})
    new = np.zeros(spec.element_count, np.uint16)
    _append(channel, codec.get(name).encode(delta, lambda _: (new, 0), {"w": 0}, 2, 1), name)
    _refused(channel, "'w'" if name == "raw" else "malformed block of elements of 2 bytes", caplog)


@pytest.mark.parametrize("name", ["packed", "context", "raw"])
def test_a_delta_of_other_dtypes_is_corrupt_or_not_the_published_bits(
    channel: Made, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    index_K = np.arange(0, 800, 3, dtype=np.int32)
    spec = TensorSpec("w", "float64", (20, 40))
    delta = Delta(Layout({"w": spec}), {8: Sparse(index_K, np.full(index_K.size, 1 << 40, np.uint64))})
    _append(
        channel, codec.get(name).encode(delta, lambda _: (np.zeros(800, np.uint64), 0), {"w": 0}, 2, 1), name
    )
    _refused(channel, "w" if name == "raw" else "elements of '8' bytes", caplog)


_ONE = bytes([0, 0x80, 0x20])  # a table: symbol 0 has all 4096 slots


def test_a_payload_with_more_tables_than_groups_is_corrupt(
    channel: Made, caplog: pytest.LogCaptureFixture
) -> None:
    _append(channel, _vector_payload(blocks=[[1, 2]], tables=_ONE * 2 * 200_000), "packed")
    _refused(channel, "more tables than groups|malformed block", caplog)


def test_a_payload_with_more_classes_than_groups_is_corrupt(
    channel: Made, caplog: pytest.LogCaptureFixture
) -> None:
    encoded = _vector_payload(blocks=[])
    group = bytes([0, 0, 255, 0]) + _ONE * 2
    arrays = {
        **{f".2.{entry}": encoded.arrays[f".2.{entry}"] for entry in ("tensors", "counts", "fingerprints")},
        ".2.tiles": torch.tensor([[1, 1], [0, 0], [0, 0], [0, 0]], dtype=torch.int32),
        ".2.tile_tables": torch.frombuffer(bytearray(group * 100_000), dtype=torch.uint8),
        ".2.tile_words": torch.ones(1, dtype=torch.int32),
    }
    row = {"tensor": 0, "tensors": 1, "tiles": {"groups": [0], "planes": None}}
    metadata = encoded.metadata | {
        "codec": "context",
        "vectors": json.dumps({"2": row}),
        "tile_elements": str(1 << 30),
    }
    _append(channel, Encoded(arrays, metadata), "context")
    _refused(channel, "more tables than groups", caplog)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"changed": True}, "without changed elements, or without a fingerprint"),
        ({"changed": 0}, "without changed elements, or without a fingerprint"),
        ({"fingerprint": "0x1_0"}, "without changed elements, or without a fingerprint"),
        ({"fingerprint": 7}, "header cannot be read"),
    ],
)
def test_a_row_of_the_table_of_patches_that_says_nonsense_is_corrupt(
    fields: dict[str, Any], expected: str
) -> None:
    rows = {"w": {"changed": 1, "fingerprint": "0" * 16} | fields}
    data = Encoded({}, _payload_metadata(rows, "raw")).to_bytes()
    with pytest.raises(CorruptDataError, match=expected):
        codec.get("raw").decode(codec.open_payload(data), Layout(SPECS), lambda _: np.zeros(800, np.uint16))


def _vector_payload(
    *, blocks: Sequence[Sequence[int]], tables: bytes = b"", changed: int = 1, block_elements: int = 800
) -> Encoded:
    """A payload of `packed` that changes `w`, by blocks that are in one group."""
    row = {
        "tensor": 0,
        "tensors": 1,
        "block": 0,
        "blocks": len(blocks),
        "groups": [0][: len(blocks)],
        "planes": None,
    }
    entries = {
        "tensors": torch.ones(1, dtype=torch.uint8),
        "counts": torch.tensor([changed], dtype=torch.int32),
        "fingerprints": torch.zeros(1, dtype=torch.int64),
        "blocks": torch.tensor(blocks, dtype=torch.int32).reshape(-1, 2),
        "tables": torch.from_numpy(np.frombuffer(bytearray(tables), np.uint8)),
        "words": torch.zeros(sum(words for _, words in blocks), dtype=torch.int32),
    }
    arrays = {f".2.{entry}": array for entry, array in entries.items()}
    extra = {"block_elements": str(block_elements), "vectors": json.dumps({"2": row})}
    return Encoded.of("packed", 2, 1, changed, arrays, extra)


def _payload_metadata(rows: dict[str, Any], name: str) -> dict[str, str]:
    return {
        "changed": str(sum(int(row["changed"]) for row in rows.values())),
        "format": FORMAT,
        "codec": name,
        "version": "2",
        "base_version": "1",
        "patches": json.dumps(rows),
    }


# 32-bit differences between neighbours of the first overflow and seem positive.
@pytest.mark.parametrize(
    "index",
    [
        [0, 2**31 - 1, -(2**31), -1, 3],
        [0, 1, 1],
        [1, 0],
        [-1, 0],
        [0, 800],
        [799, 2**31 - 1],
        [-(2**31), 0],
    ],
)
def test_raw_indices_outside_the_tensor_or_out_of_order_are_corrupt(
    channel: Made, index: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    index_K = torch.tensor(index, dtype=torch.int32)
    arrays = {"w.indices": index_K, "w.values": torch.zeros(len(index), dtype=torch.bfloat16)}
    row = {"w": {"changed": len(index), "fingerprint": "0" * 16}}
    _append(channel, Encoded(arrays, _payload_metadata(row, "raw")), "raw")
    _refused(channel, "not ascending", caplog)


@pytest.mark.parametrize("frames", ["bomb", "window", "two", "cut", "other", "unsized"])
def test_planes_that_are_not_the_table_are_corrupt(
    channel: Made, frames: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = zstandard.ZstdCompressor().compress(bytes(800))
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)
    frame = {
        "bomb": zstandard.ZstdCompressor().compress(bytes(1 << 27)),
        "window": zstandard.ZstdCompressor(compression_params=wide).compressobj(800).compress(bytes(800))
        or b"\x28",
        "two": good + good,
        "cut": good[:-1],
        "other": zstandard.ZstdCompressor().compress(bytes(801)),
        "unsized": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(800)),
    }[frames]
    payload = _vector_payload(blocks=[[0, 0]] * 400, block_elements=2)
    row = json.loads(payload.metadata["vectors"])["2"] | {"planes": [len(good)] * 3 + [len(frame)]}
    whole = torch.frombuffer(bytearray(3 * good + frame), dtype=torch.uint8)
    metadata = payload.metadata | {"vectors": json.dumps({"2": row})}
    _append(channel, Encoded(payload.arrays | {".2.blocks": whole}, metadata), "packed")
    _refused(channel, "plane of '.2.blocks'", caplog)


# The table of tensors


def _channel(tensors: dict[str, Any]) -> bytes:
    return json.dumps(
        {
            "format": documents.FORMAT,
            "run_id": RUN,
            "created_at": "now",
            "fencing": "seal",
            "epoch": EPOCH,
            "dtype": "keep",
            "tensors": tensors,
            "tensors_sha256": documents.table_sha256(tensors),
        }
    ).encode()


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": ["bfloat16", [LARGEST]]},
        {"w": ["bfloat16", [1 << 32, 1 << 31]]},
        {"w": ["bfloat16", [1 << 64]]},
        {"w": ["int8", [1] * 100_000]},
        {"w": ["int8", [1 << 62] * 60]},
        {"w": ["int8", [0, 1 << 62, 1 << 62]]},
        {f"w{number}": ["int8", [1 << 62]] for number in range(2)},
    ],
    ids=["largest", "product", "too large", "dimensions", "power", "empty", "sum"],
)
def test_a_table_of_more_bytes_than_there_can_be_is_corrupt(tensors: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        documents.decode(_channel(tensors), Channel, "channel.json")


def test_a_model_that_is_larger_than_the_machine_is_refused_before_it_is_allocated() -> None:
    specs = {"w": TensorSpec("w", "bfloat16", (1 << 61,))}
    with pytest.raises(StageError, match="bytes of memory"):
        HostMemory.on_host(specs)


# Keys and paths

PATHS = [
    "..",
    "../x",
    "a/../../x",
    "/etc/passwd",
    "a//b",
    "%2e%2e/x",
    "a%2f..",
    "a\0b",
    "a\nb",
    ".",
    ".hidden",
    "a/.b",
    "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/x",
    "é",
    "a\\b",
    "a" * 901,
    "",
]


KEY = keys.slot(1, EPOCH)
FOLDER = keys.anchor_folder(1, EPOCH)


def _record(**fields: Any) -> bytes:
    file = File(key=f"{FOLDER}/model.safetensors", bytes=1, sha256="0" * 64)
    document = Record(
        run_id=RUN,
        kind="anchor",
        version=1,
        epoch=EPOCH,
        created_at="2025-01-01T00:00:00+00:00",
        fingerprint="0" * 16,
        anchor=Anchor(directory=FOLDER, files=[file]),
    )
    return documents.encode(dataclasses.replace(document, **fields))


@pytest.mark.parametrize("path", PATHS)
def test_keys_that_lead_elsewhere_are_corrupt(path: str) -> None:
    for key, directory in ((path, FOLDER), (f"{path}/model.safetensors", path)):
        file = File(key=key, bytes=1, sha256="0" * 64)
        with pytest.raises(CorruptDataError):
            documents.decode(_record(anchor=Anchor(directory=directory, files=[file])), Record, KEY)


@pytest.mark.parametrize(
    "where",
    [
        {"path": "relative"},
        {"path": ""},
        {"repo": "../../x", "revision": "0" * 40},
        {"repo": "a/b/c", "revision": "0" * 40},
        {"repo": "a/..", "revision": "0" * 40},
        {"repo": "a/b", "revision": "../../../etc"},
        {"repo": "a/b", "revision": "refs/pr/1"},
        {"repo": "a/b", "revision": ""},
        {"repo": "a b", "revision": "main"},
        {"repo": "https://example.org/x", "revision": "main"},
    ],
)
def test_references_that_lead_elsewhere_are_corrupt(where: dict[str, str]) -> None:
    anchor = Anchor(directory="", files=[], reference=Reference(**where))  # type: ignore[arg-type]
    with pytest.raises(CorruptDataError):
        documents.decode(_record(anchor=anchor, requires=["reference"]), Record, KEY)


@pytest.mark.parametrize(
    "file",
    ["..", "../model.safetensors", "/model.safetensors", "*", "**/*.bin", "", "x.bin", "a/b.safetensors"],
)
def test_the_index_of_a_checkpoint_names_files_beside_it(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CorruptDataError):
        load(Reference(path=str(tmp_path)))


# JSON


@pytest.mark.parametrize(
    "number", ["1" * 20, "1" * 400, "1" * 5000, "1e400", "1e5", "NaN", "Infinity", "-0", "-1"]
)
@pytest.mark.parametrize("field", ["version", "body_bytes", "step", "coalesced"])
def test_numbers_that_no_document_has_are_corrupt(field: str, number: str) -> None:
    data = json.dumps(json.loads(_record()) | {field: "@"}).replace('"@"', number).encode()
    if (field, number) in (("step", "-0"), ("step", "-1"), ("body_bytes", "-0")):
        documents.decode(data, Record, KEY)
        return
    with pytest.raises(CorruptDataError):
        documents.decode(data, Record, KEY)


@pytest.mark.parametrize(
    "text", ["", "now", "2025-01-01", "2025-01-01T00:00:00", "2025-13-01T00:00:00+00:00", "1" * 5000]
)
def test_a_version_from_no_time_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptDataError, match=r"no time|created_at"):
        documents.decode(_record(created_at=text), Record, KEY)


@pytest.mark.parametrize("nest", [lambda n: b"[" * n + b"]" * n, lambda n: b'{"a":' * n + b"1" + b"}" * n])
def test_fields_nested_deeply_are_corrupt(nest: Callable[[int], bytes]) -> None:
    data = _record().rstrip()[:-1] + b',"unknown":' + nest(100_000) + b"}"
    with pytest.raises(CorruptDataError):
        documents.decode(data, Record, KEY)


def test_a_document_with_many_unknown_fields_is_read() -> None:
    data = json.dumps(
        json.loads(_record()) | {f"unknown{number}": number for number in range(100_000)}
    ).encode()
    assert documents.decode(data, Record, KEY) == documents.decode(_record(), Record, KEY)


def test_of_fields_given_twice_the_last_one_counts_for_every_check() -> None:
    data = b'{"format":"deltasync/9","requires":["teleport"],' + _record()[1:]
    assert documents.decode(data, Record, KEY) == documents.decode(_record(), Record, KEY)
    data = _record().rstrip()[:-1] + b',"requires":["teleport"]}'
    with pytest.raises(FormatError, match="teleport"):
        documents.decode(data, Record, KEY)


@pytest.mark.parametrize(
    "damaged",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"replica_id":"\xff"',
        b'{"\xff":1}',
        json.dumps({"replica_id": "r", "run_id": "run", "version": 10**30, "state": "serving"}).encode(),
        b'{"replica_id":"r","run_id":"run","version":1,"state":"serving","time_s":1e400}',
        b" " * (2 << 20),
    ],
    ids=["deep list", "deep object", "no utf-8", "no utf-8 in a key", "large", "infinite", "long"],
)
def test_a_damaged_heartbeat_hides_no_other(memory_url: str, damaged: bytes) -> None:
    store = open_store(memory_url)
    good = Heartbeat(replica_id="good", run_id="run", version=3, state="serving")
    heartbeat.write(store, good)
    store.put(keys.replica("bad"), damaged)
    (found,) = heartbeat.read_all(store, "run")
    assert found == dataclasses.replace(good, time_s=found.time_s)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"run_id":"run","state":"serving","version":"3"}',
        b'{"run_id":"run","state":7,"version":3}',
        b'{"run_id":"run","version":3}',
        b'{"run_id":"run","state":"\xff","version":3}',
        json.dumps({"run_id": "run", "state": "serving", "version": 10**30}).encode(),
        b'{"run_id":"other","state":"serving","version":3}',
        b'{"state":"serving","version":3}',
    ],
)
def test_a_server_that_answers_anything_else_serves_nothing(answer: bytes) -> None:
    assert heartbeat_of("http://localhost", answer, "run").version is None


# safetensors


def _file(header: dict[str, Any] | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + body


_META = {"format": "pt", "deltasync.fingerprints": json.dumps({"w": "0" * 16, "v": "0" * 16})}


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


_W, _V = _entry("BF16", [20, 40], 0, 1600), _entry("F32", [300], 1600, 2800)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8,
        _file({}, length=1 << 63),
        _file({"__metadata__": _META}, length=101),
        _file(b"[]"),
        _file(b"[" * 100_000),
        _file({"__metadata__": []}),
        _file({"__metadata__": _META, "w": _W}, bytes(1600)),
        _file({"__metadata__": _META, "w": _W, "v": _V}, bytes(2799)),
        _file({"__metadata__": _META, "w": _W, "v": _V}, bytes(2801)),
        _file({"__metadata__": _META, "w": _W, "v": _entry("F32", [300], 400, 1600)}, bytes(1600)),
        _file({"__metadata__": _META, "w": _W, "v": _entry("F32", [300], 1700, 2900)}, bytes(2900)),
        _file({"__metadata__": _META, "w": _entry("BF16", [20, 40], 1600, 0), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("BF16", [20, 40], -1600, 0), "v": _V}, bytes(2800)),
        _file(
            {"__metadata__": _META, "w": _entry("BF16", [20, 40], 1 << 63, (1 << 63) + 1600), "v": _V},
            bytes(2800),
        ),
        _file({"__metadata__": _META, "w": _entry("BF16", [1 << 32, 1 << 32], 0, 0), "v": _V}, bytes(2800)),
        _file(
            {
                "__metadata__": _META,
                "w": _entry("BF16", [0, 1 << 63], 0, 0),
                "v": _entry("F32", [300], 0, 1200),
            },
            bytes(1200),
        ),
        _file({"__metadata__": _META, "w": _entry("U64", [200], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("F8_E8M0", [1600], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("F4", [3200], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("BF16", [800], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "../w": _W, "v": _V}, bytes(2800)),
    ],
)
def test_weight_files_that_lie_about_themselves_are_corrupt(channel: Made, data: bytes) -> None:
    file = channel.put_file(f"{keys.anchor_folder(2, EPOCH)}/model.safetensors", data)
    anchor = Anchor(directory=keys.anchor_folder(2, EPOCH), files=[file])
    channel.append(channel.record("anchor", 2, _weights(1), anchor=anchor), None, _weights(1))
    replica = Replica(channel.store)
    with pytest.raises((CorruptDataError, MissingVersionError)):
        replica.sync()
    assert replica.version is None
    reader = ChannelReader(channel.store)
    with pytest.raises(CorruptDataError):
        list(payloads.weights(reader, reader.record(channel.tip)))


# Code

_FORBIDDEN = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "torch.load",
    "numpy.load",
    "np.load",
    "joblib.load",
    "yaml.load",
    "os.system",
    "eval",
    "exec",
    "compile",
    "__import__",
}
_MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib"}


def _forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            yield from (name for name in names if name.partition(".")[0] in _MODULES)
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                yield "from pickle import"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in _FORBIDDEN:
                yield called
            yield from ("shell=True" for keyword in node.keywords if keyword.arg == "shell")


@pytest.mark.parametrize("package", ["deltasync", "vllm_plugin", "sglang_plugin", "trl_callback"])
def test_nothing_that_is_read_is_ever_executed(package: str) -> None:
    paths = list((Path(deltasync.__file__).parents[1] / package).rglob("*.py"))
    assert paths
    found = {str(path): list(_forbidden(ast.parse(path.read_text()))) for path in paths}
    assert not {path: calls for path, calls in found.items() if calls}


def test_the_search_for_such_code_finds_it() -> None:
    code = (
        "import dill\nfrom pickle import loads\neval('1')\ntorch.load(x)\nrun(x, shell=True)\npickle.loads(x)"
    )
    assert len(list(_forbidden(ast.parse(code)))) == 6
