"""Readers before bytes that are damaged, cut, missing, or wrong in themselves: no wrong bits, and the right
ones later.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys, record
from deltasync.channel.documents import sha256_hex
from deltasync.channel.record import StoredRecord
from deltasync.codec import tiles
from deltasync.errors import (
    ApplyError,
    CorruptDataError,
    FingerprintMismatchError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    StageError,
)
from deltasync.live import HostMemory
from deltasync.tensors import Delta
from tests.channels import Made
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore

Weights = dict[str, torch.Tensor]

FIRST: Weights = {
    "a.weight": torch.linspace(-1, 1, 800, dtype=torch.bfloat16).reshape(20, 40),
    "b.weight": torch.linspace(-2, 2, 800, dtype=torch.bfloat16).reshape(20, 40),
    "scale": torch.tensor([1.0, 2.0], dtype=torch.float8_e5m2),
}
REFUSED = (CorruptDataError, MissingVersionError)


def _second() -> Weights:
    """One element of `a` by one ulp, one of `b` by a difference that escapes, and all of `scale`."""
    weights = {name: tensor.clone() for name, tensor in FIRST.items()}
    weights["a.weight"].view(torch.int16)[2, 3] += 1
    weights["b.weight"].view(torch.int16)[5, 9] += 3000
    weights["scale"].view(torch.int8)[:] += 1
    return weights


@dataclasses.dataclass
class Scene:
    """A channel at version 2, whose payload is in a part, read through a store that can lie, and a replica at
    version 1.
    """

    store: FaultyStore
    replica: Replica
    channel: Made
    first: StoredRecord
    second: StoredRecord

    def assert_at(self, version: int) -> None:
        assert self.replica.version == version
        assert_same_bits(self.replica.state_dict(), FIRST if version == 1 else _second())


def _scene(url: str, codec: str = "packed") -> Scene:
    store = FaultyStore(open_store(url))
    channel = Made(store.inner, codec_name=codec)
    channel.create(FIRST)
    first = channel.anchor(FIRST)
    replica = Replica(store)
    replica.sync()
    second = channel.delta(_second(), parts=1, inline=False)
    channel.head()
    return Scene(store, replica, channel, first, second)


@pytest.fixture
def scene(memory_url: str) -> Scene:
    return _scene(memory_url)


def test_a_join_that_runs_out_of_memory_has_what_came_before(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: HostMemory, delta: Delta) -> None:
        first = delta.part(next(delta.split(1)))
        assert 0 < first.changed < delta.changed
        apply(self, first)
        raise MemoryError("Unable to allocate 1.16 GiB for an array (by the test)")

    apply = HostMemory.apply
    monkeypatch.setattr(HostMemory, "apply", full)
    replica = Replica(scene.store)
    with pytest.raises(StageError, match="Not enough memory for version 2"):
        replica.sync()
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), FIRST)
    monkeypatch.undo()
    assert replica.sync() == 2
    assert_same_bits(replica.state_dict(), _second())


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_a_delta_with_other_bits_than_its_record_says_is_not_joined_by(memory_url: str, codec: str) -> None:
    scene = _scene(memory_url, codec)
    _replaced(scene, scene.second, fingerprint="0" * 16)
    replica = Replica(scene.store)
    with pytest.raises(MissingVersionError, match="tensors of version 2 are not its model"):
        replica.sync()
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), FIRST)


def _replaced(scene: Scene, stored: StoredRecord, **fields: Any) -> StoredRecord:
    """Put another document into a slot; what follows does not follow it any more."""
    payload = None
    assert not stored.record.delta or not stored.record.body_bytes > 500
    changed = record.encode(dataclasses.replace(stored.record, **fields), stored.key, payload, None)
    assert changed.data is not None
    scene.store.inner.put(stored.key, changed.data)
    if stored.record.version == scene.second.record.version:
        scene.channel.tip = changed.version
        scene.channel.head()
    return changed


def test_a_record_of_another_run_is_passed_over(scene: Scene) -> None:
    _replaced(scene, scene.second, run_id="other")
    with pytest.raises(CorruptDataError, match="belongs to run other"):
        scene.replica.sync()
    scene.assert_at(1)


def test_a_replica_before_the_first_anchor(memory_url: str) -> None:
    replica = Replica(memory_url)
    with pytest.raises(NotPublishedError):
        replica.sync()
    before = time.monotonic()
    with pytest.raises(NotPublishedError):
        replica.sync(timeout_s=0.2)
    assert time.monotonic() - before >= 0.2


@pytest.mark.parametrize("version", [None, 2])
def test_sync_waits_until_the_version_exists(memory_url: str, version: int | None) -> None:
    replica = Replica(memory_url)

    def publish() -> None:
        time.sleep(0.1)
        with Publisher(memory_url, dtype="keep") as publisher:
            publisher.publish(FIRST.items()).wait(60)
            publisher.publish((_second() if version else FIRST).items())

    thread = threading.Thread(target=publish)
    thread.start()
    found = replica.sync(version, timeout_s=60)
    thread.join()
    assert found == version or (version is None and found in (1, 2))
    assert_same_bits(replica.state_dict(), _second() if version else FIRST)


# From here on the digests are right, so that what stands between wrong bytes and live weights is decoding and
# fingerprints.


def _file(scene: Scene, stored: StoredRecord) -> bytes:
    return scene.store.inner.read(stored.record.payload_files[0].key, 1 << 24)


def _sign(scene: Scene, stored: StoredRecord, data: bytes) -> StoredRecord:
    """Replace the only file of a version, and let its record name it."""
    (file,) = stored.record.payload_files
    scene.store.inner.put(file.key, data)
    named = dataclasses.replace(file, bytes=len(data), sha256=sha256_hex(data))
    if stored.record.delta is not None:
        return _replaced(scene, stored, delta=dataclasses.replace(stored.record.delta, parts=[named]))
    assert stored.record.anchor is not None
    scene.store.inner.delete(scene.second.key, keys.HEAD)  # which would not follow it
    return _replaced(scene, stored, anchor=dataclasses.replace(stored.record.anchor, files=[named]))


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_a_flipped_byte_of_an_anchor_is_an_error_or_does_no_harm(memory_url: str, mask: int) -> None:
    scene = _scene(memory_url)
    original = _file(scene, scene.first)
    for position in range(mask % 20, len(original), 20):
        data = original[:position] + bytes([original[position] ^ mask]) + original[position + 1 :]
        _sign(scene, scene.first, data)
        replica = Replica(scene.store)
        try:
            replica.sync()
        except (FormatError, MissingVersionError, FingerprintMismatchError):
            assert replica.version is None
        else:
            assert_same_bits(replica.state_dict(), FIRST)


def _safetensors(original: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header."""
    length = int.from_bytes(original[:8], "little")
    header = json.loads(original[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + original[8 + length :]


def _set_metadata(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({key: value})


def _set_vector(width: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        rows = json.loads(header["__metadata__"]["vectors"])
        rows[width] |= fields
        header["__metadata__"]["vectors"] = json.dumps(rows)

    return change


def _renamed(entry: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update({"other": header.pop(entry)})


@pytest.mark.parametrize(
    "change",
    [
        _set_metadata("format", "deltasync/1"),
        _set_metadata("codec", "raw"),
        _set_metadata("codec", "telepathy"),
        _set_metadata("version", "3"),
        _set_metadata("version", "two"),
        _set_metadata("base_version", "2"),
        _set_metadata("changed", "1"),
        _set_metadata("changed", "100"),
        _set_metadata("vectors", "[]"),
        _set_metadata("vectors", '{"2": 1}'),
        _set_metadata("vectors", '{"2": {}}'),
        _set_metadata(
            "vectors", '{"4": {"tensor": 0, "tensors": 0, "block": 0, "blocks": 0, "planes": null}}'
        ),
        _set_metadata("vectors", '{"two": {}}'),
        _set_metadata("vectors", "[" * 100_000),
        _set_metadata("vectors", "{}"),
        _set_metadata("block_elements", "0"),
        _set_metadata("block_elements", "-1"),
        _set_metadata("block_elements", "many"),
        _set_metadata("block_elements", "1" * 5000),
        _set_metadata("block_elements", "1"),
        *(
            _set_vector("2", **{field: wrong})
            for field in ("tensor", "tensors", "block", "blocks")
            for wrong in (-1, 3, 10**30, 1.0, "0", None, True)
        ),
        _set_vector("2", tensors=1),
        _set_vector("2", blocks=0),
        *(
            _set_vector("2", groups=wrong)
            for wrong in ([], [1], [0, 1], [0, 0], [-1], [0.0], ["0"], [True], 0, None, {})
        ),
        _set_vector("2", planes=[1, 2]),
        _set_vector("2", planes="all"),
        lambda header: header.pop("__metadata__"),
        lambda header: header[".2.tables"].update(dtype="I8"),
        lambda header: header[".2.blocks"].update(dtype="F32"),
        *(_renamed(f".2.{entry}") for entry in ("fingerprints", "blocks", "tables", "words")),
    ],
)
def test_a_payload_whose_header_contradicts_itself_is_a_format_error(
    scene: Scene, change: Callable[[dict[str, Any]], object]
) -> None:
    data = _safetensors(_file(scene, scene.second), lambda header: (change(header), None)[1])
    _sign(scene, scene.second, data)
    with pytest.raises((FormatError, MissingVersionError)):
        scene.replica.sync()
    scene.assert_at(1)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "U16", "I16", "F8_E4M3", "BOOL"])
def test_streams_of_another_dtype_are_a_format_error(scene: Scene, dtype: str) -> None:
    def change(header: dict[str, Any]) -> None:
        for key in (".2.words", ".2.tables", ".2.blocks", ".2.fingerprints"):
            start, end = header[key]["data_offsets"]
            width = 1 if dtype in ("F8_E4M3", "BOOL") else 2
            if (end - start) % width == 0:
                header[key] |= {"dtype": dtype, "shape": [(end - start) // width]}

    _sign(scene, scene.second, _safetensors(_file(scene, scene.second), change))
    with pytest.raises((FormatError, MissingVersionError)):
        scene.replica.sync()
    scene.assert_at(1)


@pytest.mark.parametrize("dtype", ["U16", "F16", "I16", "C64", "F4", "nonsense"])
def test_an_anchor_with_a_tensor_of_another_dtype_is_a_format_error(scene: Scene, dtype: str) -> None:
    def change(header: dict[str, Any]) -> None:
        start, end = header["a.weight"]["data_offsets"]
        size = {"C64": (end - start) // 8, "F4": 2 * (end - start)}.get(dtype, (end - start) // 2)
        header["a.weight"] |= {"dtype": dtype, "shape": [size]}

    _sign(scene, scene.first, _safetensors(_file(scene, scene.first), change))
    with pytest.raises((FormatError, MissingVersionError), match=r"anchors/.*\.safetensors"):
        Replica(scene.store).sync()


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update({"c.weight": header.pop("a.weight")}),
        lambda header: header["a.weight"].update(shape=[40, 20]),
        _set_metadata("deltasync.fingerprints", "{}"),
        _set_metadata("deltasync.fingerprints", '{"a.weight": 7}'),
        lambda header: header.pop("__metadata__"),
    ],
    ids=["other name", "other shape", "no fingerprints", "bad fingerprint", "no metadata"],
)
def test_an_anchor_that_is_not_of_this_channel_is_a_format_error(
    scene: Scene, change: Callable[[dict[str, Any]], object]
) -> None:
    data = _safetensors(_file(scene, scene.first), lambda header: (change(header), None)[1])
    _sign(scene, scene.first, data)
    with pytest.raises((FormatError, MissingVersionError), match=r"anchors/.*\.safetensors"):
        Replica(scene.store).sync()


def test_a_context_delta_on_rotten_memory_is_loaded_anew(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tensor as small as this one would be coded by gaps.
    for name, size in {"TILE": 100, "SMALL": 160, "LEAST": 400, "FEW": 1}.items():
        monkeypatch.setattr(tiles, name, size)
    scene = _scene(memory_url, "context")
    # So many elements of another exponent, the changed one among them, that the delta makes no sense any
    # more.
    scene.replica.state_dict()["a.weight"].view(torch.int16)[:3] = 0
    assert scene.replica.sync() == 2
    scene.assert_at(2)


def test_rotten_memory_is_never_passed_off_as_a_version(scene: Scene) -> None:
    scene.replica.state_dict()["a.weight"].view(torch.int16)[2, 3] += 5
    scene.store.drop(keys.ANCHORS)
    with pytest.raises((MissingVersionError, ApplyError)):
        scene.replica.sync()
    assert scene.replica.version is None
    scene.store.heal()
    assert scene.replica.sync() == 2
    scene.assert_at(2)
