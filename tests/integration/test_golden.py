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

from deltasync import Replica, errors, fingerprint, signing
from deltasync.bits import bits_of, dtype_name
from deltasync.kernels import cpu
from tests import independent_reader
from tests.independent_reader import Channel, Damaged

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
VERSIONS = range(1, 7)
DAMAGED = ("sha256", "stream", "fingerprint")


def _expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def _row(dtype: str, shape: tuple[int, ...], bits: np.ndarray) -> list[Any]:
    little_endian = bits.astype(bits.dtype.newbyteorder("<"), copy=False)
    return [dtype, list(shape), hashlib.sha256(little_endian.tobytes()).hexdigest()]


def _by_replica(replica: Replica) -> dict[str, list[Any]]:
    tensors = replica.state_dict()
    return {name: _row(dtype_name(tensor.dtype), tuple(tensor.shape), bits_of(tensor)) for name, tensor in tensors.items()}


def _independently(channel: Channel, version: int) -> dict[str, list[Any]]:
    return {name: _row(*found) for name, found in channel.read(version).items()}


@pytest.fixture(scope="module", params=["raw", "packed", "context", "without_chain"])
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


def test_independent_reader_gives_published_bits_at_every_version(folder: Path) -> None:
    expected = _expected(GOLDEN)["versions"]
    channel = Channel(folder)
    assert [int(version) for version in expected] == list(VERSIONS)
    assert channel.head == VERSIONS[-1]
    for version in VERSIONS:
        assert _independently(channel, version) == expected[str(version)], version


def test_replica_that_follows_gives_published_bits_at_every_version(folder: Path) -> None:
    expected = _expected(GOLDEN)["versions"]
    replica = Replica(f"file://{folder}")
    for version in VERSIONS:
        assert replica.sync(version) == version
        assert _by_replica(replica) == expected[str(version)], version


def test_replica_that_starts_late_gives_published_bits_at_every_version(folder: Path) -> None:
    expected = _expected(GOLDEN)["versions"]
    for version in VERSIONS:
        replica = Replica(f"file://{folder}")
        replica.sync(version)
        assert _by_replica(replica) == expected[str(version)], version


def test_a_channel_that_starts_from_a_model_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = GOLDEN / "reference"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    expected = _expected(folder)["versions"]
    (snapshot,) = (folder / "hub").glob("*/snapshots/*")
    assert len(list(snapshot.glob("*.safetensors"))) == 2
    channel = Channel(folder / "channel", snapshot)
    assert [sorted(path.name for path in (folder / "channel").iterdir())] == [
        ["channel.json", "deltas", "head.json", "manifests"]
    ]
    replica = Replica(f"file://{folder}/channel")
    for version in (1, 2):
        assert _independently(channel, version) == expected[str(version)]
        assert replica.sync(version) == version
        assert _by_replica(replica) == expected[str(version)]


def test_a_signed_channel_is_verified_by_both_readers(tmp_path: Path) -> None:
    folder = GOLDEN / "signed"
    expected = _expected(folder)
    keys = expected["keys"]
    (tmp_path / "keys").write_text("\n".join(keys))
    channel = Channel(folder / "channel", keys=frozenset(keys))
    replica = Replica(f"file://{folder}/channel", trusted_keys=tmp_path / "keys")
    for version in (1, 2, 3, 4, 5):
        assert _independently(channel, version) == expected["versions"][str(version)]
        assert replica.sync(version) == version
        assert _by_replica(replica) == expected["versions"][str(version)]
    assert {name: _row(*row) for name, row in channel.read_by_fold(1, 5).items()} == expected["versions"]["5"]
    assert [signing.signed_by((folder / f"channel/manifests/{v:010}.json").read_bytes()) for v in (2, 3)] == keys
    without = Channel(folder / "channel")
    assert _independently(without, 5) == expected["versions"]["5"]

    for trusted in keys:
        (tmp_path / "keys").write_text(trusted)
        with pytest.raises(errors.SignatureError):
            Replica(f"file://{folder}/channel", trusted_keys=tmp_path / "keys").sync()
        with pytest.raises(Damaged, match=r"signed by another key"):
            Channel(folder / "channel", keys=frozenset([trusted])).read(5)


def test_an_altered_signed_document_is_refused_by_both_readers(tmp_path: Path) -> None:
    keys = _expected(GOLDEN / "signed")["keys"]
    (tmp_path / "keys").write_text("\n".join(keys))
    manifest = "manifests/0000000004.json"
    for key in ("channel.json", "head.json", manifest):
        folder = tmp_path / key.replace("/", "-")
        shutil.copytree(GOLDEN / "signed/channel", folder)
        original = (folder / key).read_bytes()
        for altered in (
            original.replace(b'"dtype":"keep"', b'"dtype":"keeq"').replace(b'"requires":[]', b'"requires":[] '),
            re.sub(b'("ed25519":")[0-9a-f]{2}', rb"\g<1>00", original),
            re.sub(b',"signature":.*', b"}", original),
            (folder / ("manifests/0000000005.json" if key == manifest else manifest)).read_bytes(),
        ):
            assert altered != original
            (folder / key).chmod(0o644)
            (folder / key).write_bytes(altered)
            with pytest.raises(errors.SignatureError):
                Replica(f"file://{folder}", trusted_keys=tmp_path / "keys").sync(4)
            with pytest.raises(Damaged):
                Channel(folder, keys=frozenset(keys)).document(key)


@pytest.mark.parametrize("codec", ["raw", "packed", "context"])
def test_a_fold_gives_the_published_bits_to_both_readers(codec: str) -> None:
    expected = _expected(GOLDEN)["versions"][str(VERSIONS[-1])]
    found = Channel(GOLDEN / codec).read_by_fold(1, VERSIONS[-1])
    assert {name: _row(*row) for name, row in found.items()} == expected

    replica = Replica(f"file://{GOLDEN / codec}")
    replica.sync(1)
    follower, reader = replica._follower, replica._reader
    assert follower is not None
    (fold,) = reader._list_folds(reader.head())
    follower.confirm(
        follower.commit(follower.stage(dataclasses.replace(fold, manifest_sha256=reader.head().manifest_sha256)))
    )
    assert replica.version == VERSIONS[-1]
    assert _by_replica(replica) == expected


def test_manifests_name_their_chain_except_in_the_old_channel() -> None:
    assert [Channel(GOLDEN / name).links() for name in ("raw", "packed", "context", "without_chain")] == [11, 11, 11, 0]


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_version_is_refused_by_both_readers(case: str) -> None:
    folder = GOLDEN / "damaged" / case
    expected = _expected(folder)
    refused = expected["refused"]

    replica = Replica(f"file://{folder}")
    replica.sync(refused - 1)
    with pytest.raises(getattr(errors, expected["error"])):
        replica.sync()
    assert replica.version == refused - 1
    assert _by_replica(replica) == expected["versions"][str(refused - 1)]

    channel = Channel(folder)
    assert _independently(channel, refused - 1) == expected["versions"][str(refused - 1)]
    with pytest.raises(Damaged, match="end of a stream|slot|stream too short" if case == "stream" else case):
        channel.read(refused)


def test_golden_channels_cover_the_format() -> None:
    """What `make.py` means to write is there, so that a later run of it cannot lose it unnoticed."""
    for codec in ("raw", "packed", "context"):
        channel = Channel(GOLDEN / codec)
        manifests = {manifest["version"]: manifest for manifest in channel.chain()}
        assert {dtype for dtype, _ in channel.table.values()} == independent_reader.DTYPES.keys()
        assert {(), (0, 4)} <= {shape for _, shape in channel.table.values()}
        assert [version for version in VERSIONS if manifests[version]["anchor"]] == [1, 5]
        assert manifests[1]["delta"] is None and manifests[5]["delta"] is not None
        assert len(manifests[1]["anchor"]["files"]) > 1
        assert manifests[3]["delta"]["files"] == [] and manifests[3]["delta"]["changed"] == 0
        patches = {}
        for version in (2, 4, 5, 6):
            metadata, _ = channel.file(manifests[version]["delta"]["files"][0])
            patches[version] = json.loads(metadata["patches"])
        assert list(patches[4]) != [name for name in channel.table if name in patches[4]]  # another order than the table's
        if codec != "raw":
            dense = {name for name, row in patches[5].items() if row.get("dense")}
            assert dense == {"model.layers.0.q_proj.weight", "e5m2"}
            assert len({row.get("group") for row in patches[4].values()}) > 2


def test_fingerprint_example_of_the_page_holds() -> None:
    page = (TESTS.parent / "docs/format.md").read_text(encoding="utf-8")
    example = re.search(r'`name = "(\w+)"`.*\(bits ([0-9A-Fx, ]+)\): `([0-9a-f]{16})`', page)
    assert example is not None
    name, values, digits = example.groups()
    bits = np.array([int(value, 16) for value in values.split(", ")], np.uint16)
    assert f"{independent_reader.fingerprint(name, bits):016x}" == digits
    assert fingerprint.to_hex(cpu.fingerprint(fingerprint.tensor_key(name), bits)) == digits


def test_independent_reader_imports_nothing_but_numpy_and_the_standard_library() -> None:
    tree = ast.parse((TESTS / "independent_reader.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names | {"numpy"}
