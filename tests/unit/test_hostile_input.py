"""Channels written to do harm: more bytes than declared, paths that lead elsewhere, numbers at the edges of their types."""

from __future__ import annotations

import ast
import dataclasses
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

import deltasync
from deltasync import Publisher, Replica, codec, heartbeat, layout, manifest, open_store
from deltasync.anchor import metadata
from deltasync.checkpoint import load
from deltasync.codec.base import FORMAT
from deltasync.errors import CorruptDataError, DeltaSyncError, FormatError, StageError
from deltasync.heartbeat import Heartbeat, heartbeat_of
from deltasync.live import LiveMemory
from deltasync.manifest import Anchor, Channel, FileRef, Manifest, Reference
from deltasync.reader import ChannelReader
from deltasync.types import TensorSpec
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

SPECS = {"w": TensorSpec("w", "bfloat16", (20, 40)), "v": TensorSpec("v", "float32", (300,))}
LARGEST = (1 << 63) - 1


def _weights(round_: int) -> dict[str, torch.Tensor]:
    return {
        "w": (torch.arange(800, dtype=torch.int32) + round_).to(torch.int16).view(torch.bfloat16).reshape(20, 40),
        "v": (torch.arange(300, dtype=torch.int32) * (1 + round_)).view(torch.float32),
    }


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    """A channel at version 2, whose replicas go by its delta."""
    with Publisher(memory_url, dtype="keep") as publisher:
        publisher.publish(_weights(0).items()).wait(60)
        weights = _weights(0)
        weights["w"].view(torch.int16)[3, :5] += 1
        assert publisher.publish(weights.items()).wait(60).kind == "delta"
    return FaultyStore(open_store(memory_url))


def _rewrite(store: FaultyStore, version: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and let head name it as it is then."""
    key = layout.manifest(version)
    document = json.loads(store.inner.read(key))
    change(document)
    store.inner.replace(key, json.dumps(document).encode())
    head = json.loads(store.inner.read(layout.HEAD))
    head |= {"version": version, "manifest_sha256": manifest.sha256_hex(store.inner.read(key))}
    store.inner.replace(layout.HEAD, json.dumps(head).encode())


def _replace_payload(store: FaultyStore, data: bytes, changed: int = 800) -> None:
    def change(document: dict[str, Any]) -> None:
        delta = document["delta"]
        store.inner.replace(delta["files"][0]["key"], data)
        delta["files"][0] |= {"bytes": len(data), "sha256": manifest.sha256_hex(data)}
        delta["changed"] = changed
        delta["codec"] = codec.open_payload(data).codec

    _rewrite(store, 2, change)


def _refused(store: FaultyStore, match: str) -> None:
    replica = Replica(store)
    replica.sync(1)
    before = {name: tensor.clone() for name, tensor in replica.state_dict().items()}
    with pytest.raises(FormatError, match=match):
        replica.sync()
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), before)


# Sizes


def test_an_object_that_is_larger_than_declared_is_not_read(store: FaultyStore) -> None:
    key = json.loads(store.read(layout.manifest(2)))["delta"]["files"][0]["key"]
    store.inner.replace(key, bytes(1 << 20))
    _refused(store, "may have")


@pytest.mark.parametrize("part", ["delta", "anchor"])
@pytest.mark.parametrize("size", [1 << 30, LARGEST])
def test_a_version_that_declares_more_than_its_tensors_take_is_not_fetched(store: FaultyStore, part: str, size: int) -> None:
    replica = Replica(store)
    if part == "delta":
        replica.sync(1)
    _rewrite(store, 2 if part == "delta" else 1, lambda document: document[part]["files"][0].update(bytes=size))
    store.calls.clear()
    with pytest.raises(FormatError, match=r"take [\d,]+ at most"):
        replica.sync()
    assert not any(key.startswith(f"{part}s/") for _, key in store.calls)


def test_a_payload_that_changes_more_than_its_manifest_says_is_corrupt(store: FaultyStore) -> None:
    _rewrite(store, 2, lambda document: document["delta"].update(changed=4))
    _refused(store, "more elements than its manifest says, 4")


@pytest.mark.parametrize("name", ["packed", "context", "raw"])
def test_a_delta_of_other_shapes_is_corrupt(store: FaultyStore, name: str) -> None:
    spec = TensorSpec("w", "bfloat16", (20, 4000))
    index_K, step_K = np.array([3, 79_999], np.int32), np.array([1, 1], np.uint16)
    encoder = codec.get(name).encoder()
    encoder.add(spec, index_K, step_K, np.zeros(spec.element_count, np.uint16), "0" * 16)
    _replace_payload(store, encoder.finish(2, 1).to_bytes())
    _refused(store, "w")


@pytest.mark.parametrize("name", ["packed", "context", "raw"])
def test_a_delta_of_other_dtypes_is_corrupt_or_not_the_published_bits(store: FaultyStore, name: str) -> None:
    encoder = codec.get(name).encoder()
    index_K = np.arange(0, 800, 3, dtype=np.int32)
    spec = TensorSpec("w", "float64", (20, 40))
    encoder.add(spec, index_K, np.full(index_K.size, 1 << 40, np.uint64), np.zeros(800, np.uint64), "0" * 16)
    _replace_payload(store, encoder.finish(2, 1).to_bytes())
    replica = Replica(store)
    replica.sync(1)
    with pytest.raises(DeltaSyncError):
        replica.sync()
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), _weights(0))


def test_a_payload_with_more_tables_than_patches_is_corrupt(store: FaultyStore) -> None:
    one = bytes([0, 0x80, 0x20])  # symbol 0 has all 4096 slots
    row = {"w": {"changed": 1, "fingerprint": "0" * 16, "group": 0}}
    arrays = {
        ".words": torch.zeros(2, dtype=torch.int32),
        ".blocks": torch.tensor([[1, 2]], dtype=torch.int32),
        ".tables": torch.frombuffer(bytearray(one * 2 * 200_000), dtype=torch.uint8),
    }
    _replace_payload(store, save(arrays, _payload_metadata(row, block_elements="800")))
    with pytest.raises(CorruptDataError, match="more tables"):
        list(codec.get("packed").decode(codec.open_payload(save(arrays, _payload_metadata(row, "800"))), SPECS))


def _payload_metadata(rows: dict[str, Any], block_elements: str = "", name: str = "packed") -> dict[str, str]:
    return {
        "format": FORMAT,
        "codec": name,
        "version": "2",
        "base_version": "1",
        "patches": json.dumps(rows),
        "block_elements": block_elements,
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
def test_raw_indices_outside_the_tensor_or_out_of_order_are_corrupt(store: FaultyStore, index: list[int]) -> None:
    index_K = torch.tensor(index, dtype=torch.int32)
    arrays = {"w.indices": index_K, "w.values": torch.zeros(len(index), dtype=torch.bfloat16)}
    row = {"w": {"changed": len(index), "fingerprint": "0" * 16}}
    _replace_payload(store, save(arrays, _payload_metadata(row, name="raw")))
    _refused(store, "not ascending")


def test_patches_that_are_merged_are_held_in_bounded_memory_and_give_the_right_bits(memory_url: str) -> None:
    replica = Replica(memory_url)
    with Publisher(memory_url, dtype="keep", anchor_every=1000) as publisher:
        publisher.publish(_weights(0).items()).wait(60)
        replica.sync()
        for round_ in (*range(1, 12), 0, 7):
            publisher.publish(_weights(round_).items()).wait(60)
    assert replica.sync() == 14
    assert_same_bits(replica.state_dict(), _weights(7))


# The table of tensors


def _channel(tensors: dict[str, Any]) -> bytes:
    return json.dumps(
        {
            "format": manifest.FORMAT,
            "run_id": "run",
            "created_at": "now",
            "dtype": "keep",
            "tensors": tensors,
            "tensors_sha256": manifest.table_sha256(tensors),
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
        manifest.decode(_channel(tensors), Channel, "channel.json")


def test_a_model_that_is_larger_than_the_machine_is_refused_before_it_is_allocated() -> None:
    specs = {"w": TensorSpec("w", "bfloat16", (1 << 61,))}
    with pytest.raises(StageError, match="bytes of memory"):
        LiveMemory.on_host(specs)


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


def _manifest(**fields: Any) -> bytes:
    file = FileRef(key="anchors/0000000001/model.safetensors", bytes=1, sha256="0" * 64)
    document = Manifest(
        format=manifest.FORMAT,
        run_id="run",
        version=1,
        kind="anchor",
        step=None,
        created_at="2025-01-01T00:00:00+00:00",
        total=1,
        fingerprint="0" * 16,
        anchor_version=1,
        anchor=Anchor(directory="anchors/0000000001", files=[file]),
    )
    return manifest.encode(dataclasses.replace(document, **fields))


@pytest.mark.parametrize("path", PATHS)
def test_keys_that_lead_elsewhere_are_corrupt(path: str) -> None:
    for key, directory in ((path, "anchors/0000000001"), (f"{path}/model.safetensors", path)):
        file = FileRef(key=key, bytes=1, sha256="0" * 64)
        with pytest.raises(CorruptDataError):
            manifest.decode(_manifest(anchor=Anchor(directory=directory, files=[file])), Manifest, "key")


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
        manifest.decode(_manifest(anchor=anchor, requires=["reference"]), Manifest, "key")


@pytest.mark.parametrize(
    "file", ["..", "../model.safetensors", "/model.safetensors", "*", "**/*.bin", "", "x.bin", "a/b.safetensors"]
)
def test_the_index_of_a_checkpoint_names_files_beside_it(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CorruptDataError):
        load(Reference(path=str(tmp_path)))


@pytest.mark.parametrize(
    "digits", ["1" * 5000, "\N{ARABIC-INDIC DIGIT ONE}" * 10, "9" * 20], ids=["long", "of another script", "beyond 2**63"]
)
def test_listed_keys_with_strange_numbers_are_of_no_version(digits: str) -> None:
    assert layout.manifest_version(f"manifests/{digits}.json") is None
    assert layout.data_versions(f"deltas/{digits}/x") == ()
    assert layout.data_versions(f"folds/{digits}-{digits}/x") == ()
    assert layout.fold_span(f"folds/{digits}-{digits}/fold.json") is None


# JSON


@pytest.mark.parametrize("number", ["1" * 20, "1" * 400, "1" * 5000, "1e400", "1e5", "NaN", "Infinity", "-0", "-1"])
@pytest.mark.parametrize("field", ["version", "total", "step", "coalesced"])
def test_numbers_that_no_document_has_are_corrupt(field: str, number: str) -> None:
    data = json.dumps(json.loads(_manifest()) | {field: "@"}).replace('"@"', number).encode()
    if (field, number) in (("step", "-0"), ("step", "-1"), ("total", "-0")):
        manifest.decode(data, Manifest, "key")
        return
    with pytest.raises(CorruptDataError):
        manifest.decode(data, Manifest, "key")


@pytest.mark.parametrize("text", ["", "now", "2025-01-01", "2025-01-01T00:00:00", "2025-13-01T00:00:00+00:00", "1" * 5000])
def test_a_version_from_no_time_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptDataError, match="no time"):
        manifest.decode(_manifest(created_at=text), Manifest, "key")


@pytest.mark.parametrize("nest", [lambda n: b"[" * n + b"]" * n, lambda n: b'{"a":' * n + b"1" + b"}" * n])
def test_fields_nested_deeply_are_corrupt(nest: Callable[[int], bytes]) -> None:
    data = _manifest().rstrip()[:-1] + b',"unknown":' + nest(100_000) + b"}"
    with pytest.raises(CorruptDataError):
        manifest.decode(data, Manifest, "key")


def test_a_document_with_many_unknown_fields_is_read() -> None:
    data = json.dumps(json.loads(_manifest()) | {f"unknown{number}": number for number in range(100_000)}).encode()
    assert manifest.decode(data, Manifest, "key") == manifest.decode(_manifest(), Manifest, "key")


def test_of_fields_given_twice_the_last_one_counts_for_every_check() -> None:
    data = b'{"format":"deltasync/2","requires":["teleport"],' + _manifest()[1:]
    assert manifest.decode(data, Manifest, "key") == manifest.decode(_manifest(), Manifest, "key")
    data = _manifest().rstrip()[:-1] + b',"requires":["teleport"]}'
    with pytest.raises(FormatError, match="teleport"):
        manifest.decode(data, Manifest, "key")


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
    good = Heartbeat(replica_id="good", run_id="run", version=3, state="serving", time_s=1.0)
    heartbeat.write(store, good)
    store.replace(layout.replica("bad"), damaged)
    assert heartbeat.read_all(store, "run") == [good]


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


_META = metadata({"w": 0, "v": 0}, ["w", "v"])


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
        _file({"__metadata__": _META, "w": _entry("BF16", [20, 40], 1 << 63, (1 << 63) + 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("BF16", [1 << 32, 1 << 32], 0, 0), "v": _V}, bytes(2800)),
        _file(
            {"__metadata__": _META, "w": _entry("BF16", [0, 1 << 63], 0, 0), "v": _entry("F32", [300], 0, 1200)}, bytes(1200)
        ),
        _file({"__metadata__": _META, "w": _entry("U64", [200], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("F8_E8M0", [1600], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("F4", [3200], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "w": _entry("BF16", [800], 0, 1600), "v": _V}, bytes(2800)),
        _file({"__metadata__": _META, "../w": _W, "v": _V}, bytes(2800)),
    ],
)
def test_weight_files_that_lie_about_themselves_are_corrupt(store: FaultyStore, data: bytes) -> None:
    def change(document: dict[str, Any]) -> None:
        (file,) = document["anchor"]["files"]
        store.inner.replace(file["key"], data)
        file |= {"bytes": len(data), "sha256": manifest.sha256_hex(data)}

    _rewrite(store, 1, change)
    replica = Replica(store)
    with pytest.raises(CorruptDataError):
        replica.sync()
    assert replica.version is None
    with pytest.raises(CorruptDataError):
        list(ChannelReader(store).patches(ChannelReader(store).plan(None, ChannelReader(store).head())[0]))


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
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in _MODULES)
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                yield "from pickle import"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in _FORBIDDEN:
                yield called
            yield from ("shell=True" for keyword in node.keywords if keyword.arg == "shell")


@pytest.mark.parametrize("package", ["deltasync", "vllm_plugin", "trl_callback"])
def test_nothing_that_is_read_is_ever_executed(package: str) -> None:
    paths = list((Path(deltasync.__file__).parents[1] / package).rglob("*.py"))
    assert paths
    found = {str(path): list(_forbidden(ast.parse(path.read_text()))) for path in paths}
    assert not {path: calls for path, calls in found.items() if calls}


def test_the_search_for_such_code_finds_it() -> None:
    code = "import dill\nfrom pickle import loads\neval('1')\ntorch.load(x)\nrun(x, shell=True)\npickle.loads(x)"
    assert len(list(_forbidden(ast.parse(code)))) == 6
