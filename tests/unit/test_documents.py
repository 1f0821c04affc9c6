"""Documents and records of a channel: to bytes and back, and what is none."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
from typing import Any

import pytest
import torch

from deltasync import codec
from deltasync.channel import documents, keys, record
from deltasync.channel.documents import (
    Anchor,
    Channel,
    DeltaFiles,
    EpochDocument,
    File,
    Head,
    Record,
    Reference,
    VersionId,
)
from deltasync.codec.base import Encoded, open_payload
from deltasync.errors import CorruptDataError, FormatError
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec

EPOCH, NEXT = "000001-0000000a", "000002-0000000b"
TABLE: dict[str, tuple[str, tuple[int, ...]]] = {"w": ("bfloat16", (2, 3)), "scale": ("float32", ())}
BASE = VersionId(1, EPOCH, "a" * 64)
FILE = File(key="parts/0000000002.000001-0000000a.0/000-00001.safetensors", bytes=10, sha256="a" * 64)
DELTA = DeltaFiles(codec="packed", changed=3, parts=[FILE])
FOLDER = "anchors/0000000002.000001-0000000a.0"
ANCHOR = Anchor(
    directory=FOLDER,
    files=[File(key=f"{FOLDER}/model.safetensors", bytes=10, sha256="a" * 64)],
    model_files=[File(key=f"{FOLDER}/config.json", bytes=2, sha256="a" * 64)],
)
REFERENCE = Anchor(
    reference=Reference(repo="a/b", revision="0" * 40, fingerprints={"w": "0" * 16}, tied={"scale": "w"})
)


def _record(**fields: Any) -> Record:
    given: dict[str, Any] = {
        "run_id": "run",
        "kind": "delta",
        "version": 2,
        "epoch": EPOCH,
        "created_at": "2026-01-01T00:00:00+00:00",
        "base": BASE,
        "fingerprint": "0" * 16,
        "delta": DELTA,
    }
    return Record(**{name: value for name, value in (given | fields).items() if value is not None})


def _key(document: Any) -> str:
    if isinstance(document, Record):
        if document.kind == "announcement":
            return keys.announcement(document.version, EPOCH)
        if document.kind == "compaction":
            return keys.compaction(BASE.version, document.version, EPOCH)
        return keys.slot(document.version, document.epoch)
    return keys.epoch_document(document.epoch) if isinstance(document, EpochDocument) else "key"


HEAD = Head(run_id="run", version=2, epoch=EPOCH, sha256="b" * 64)
CHANNEL = Channel(
    run_id="run",
    created_at="2026-01-01T00:00:00+00:00",
    fencing="seal",
    epoch=EPOCH,
    dtype="bfloat16",
    tensors=TABLE,
    tensors_sha256=documents.table_sha256(TABLE),
)
OPENING = EpochDocument(
    run_id="run", epoch=NEXT, continues=BASE, writer="host", created_at="2026-01-01T00:00:00+00:00"
)
RECORDS = {
    "delta": _record(step=-7, coalesced=3, token_lag=(0.5, 1.0, 3.0)),
    "first": _record(kind="anchor", version=1, base=None, delta=None, anchor=ANCHOR),
    "reference": _record(
        kind="anchor", version=1, base=None, delta=None, anchor=REFERENCE, requires=["reference"]
    ),
    "anchor": _record(kind="anchor", delta=None, anchor=ANCHOR, requires=["reference"]),
    "seal": _record(kind="seal", delta=None, fingerprint=None, next_epoch=NEXT),
    "empty seal": _record(kind="seal", version=1, base=None, delta=None, fingerprint=None, next_epoch=NEXT),
    "compaction": _record(kind="compaction", version=9, sha256="c" * 64),
    "announced": _record(
        kind="announcement", version=9, base=None, sha256="c" * 64, delta=None, anchor=ANCHOR
    ),
}
DOCUMENTS = [*RECORDS.values(), HEAD, CHANNEL, OPENING, dataclasses.replace(OPENING, continues=None)]


def _decode(document: Any, data: bytes, key: str | None = None) -> Any:
    return documents.decode(data, type(document), _key(document) if key is None else key)


def _altered(document: Any, **fields: Any) -> bytes:
    return json.dumps(json.loads(documents.encode(document)) | fields).encode()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_round_trip(document: Any) -> None:
    data = documents.encode(document)
    assert _decode(document, data) == document
    assert data.endswith(b"\n") and data.count(b"\n") == 1


@pytest.mark.parametrize("document", DOCUMENTS)
def test_fields_that_are_null_may_be_absent(document: Any) -> None:
    present = {
        name: value for name, value in json.loads(documents.encode(document)).items() if value is not None
    }
    if isinstance(document, EpochDocument) and document.continues is None:
        present["continues"] = None
    assert _decode(document, json.dumps(present).encode()) == document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_unknown_fields_are_ignored(document: Any) -> None:
    assert _decode(document, _altered(document, from_the_future={"a": [1, None]})) == document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_unknown_required_features_are_refused_by_name(document: Any) -> None:
    with pytest.raises(FormatError, match="teleport"):
        _decode(document, _altered(document, requires=["teleport"]))
    bare = json.dumps({"format": documents.FORMAT, "requires": ["teleport"]}).encode()
    with pytest.raises(FormatError):
        _decode(document, bare)


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("found", ["deltasync/1", None, 2])
def test_another_format_is_refused(document: Any, found: object) -> None:
    with pytest.raises(FormatError):
        _decode(document, _altered(document, format=found))


NO_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"1",
    b'"head"',
    b"\xff\xfe",
    b'{"format":"deltasync/2"',
    b"[" * 10**5,
    b'{"a":' * 10**5,
]


@pytest.mark.parametrize("data", NO_JSON)
@pytest.mark.parametrize("kind", [Channel, Head, Record, EpochDocument])
def test_what_is_no_json_object_is_corrupt(data: bytes, kind: type[Any]) -> None:
    with pytest.raises(CorruptDataError):
        documents.decode(data, kind, "key")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_truncation_is_corrupt(document: Any) -> None:
    data = documents.encode(document).rstrip()
    for size in range(len(data)):
        with pytest.raises(CorruptDataError):
            _decode(document, data[:size])


@pytest.mark.parametrize("name", ["run_id", "epoch", "sha256"])
def test_a_line_break_behind_a_name_or_a_digest_is_corrupt(name: str) -> None:
    with pytest.raises(CorruptDataError):
        _decode(HEAD, _altered(HEAD, **{name: f"{getattr(HEAD, name)}\n"}))


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_good_at_its_own_place_only(name: str) -> None:
    document = RECORDS[name]
    version = document.version
    other = [
        keys.slot(version, NEXT),
        keys.slot(version + 1, EPOCH),
        keys.announcement(version + 1, EPOCH),
        keys.HEAD,
        "x",
    ]
    for key in [
        *other,
        keys.compaction(1, version, EPOCH) if document.kind != "compaction" else keys.slot(version, EPOCH),
    ]:
        with pytest.raises(CorruptDataError):
            _decode(document, documents.encode(document), key)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("field", ["base", "fingerprint", "delta", "anchor", "next_epoch", "sha256"])
def test_a_record_has_what_its_kind_has_and_nothing_else(name: str, field: str) -> None:
    document = json.loads(documents.encode(RECORDS[name]))
    filled = json.loads(documents.encode(RECORDS["delta"]))
    more = filled | {
        "next_epoch": NEXT,
        "sha256": "d" * 64,
        "anchor": json.loads(documents.encode(RECORDS["first"]))["anchor"],
    }
    if document[field] is None:
        document[field] = more[field]
        if field == "base":
            document["version"] = 2
    else:
        document[field] = None
    with pytest.raises(CorruptDataError):
        documents.decode(json.dumps(document).encode(), Record, _key(RECORDS[name]))


@pytest.mark.parametrize("field", ["run_id", "version", "kind", "created_at", "epoch"])
def test_a_record_without_a_field_is_corrupt(field: str) -> None:
    document = json.loads(documents.encode(RECORDS["delta"]))
    del document[field]
    with pytest.raises(CorruptDataError):
        documents.decode(json.dumps(document).encode(), Record, _key(RECORDS["delta"]))


_BASE = {"version": 1, "epoch": EPOCH, "sha256": "a" * 64}
_FILE = {"key": FILE.key, "bytes": 10, "sha256": "a" * 64}


def _delta(**fields: Any) -> dict[str, Any]:
    return {"delta": {"codec": "raw", "changed": 1, "parts": [_FILE]} | fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 0},
        {"version": -1},
        {"version": "2"},
        {"version": 2.5},
        {"version": 10**10},
        {"run_id": ""},
        {"run_id": "a b"},
        {"run_id": "a" * 65},
        {"epoch": "1-0000000a"},
        {"epoch": "000001-0000000A"},
        {"fingerprint": "0" * 15},
        {"fingerprint": "G" * 16},
        {"coalesced": 0},
        {"token_lag": [0, 1]},
        {"token_lag": [0, 1, -1]},
        {"token_lag": [0, 1, 1e30]},
        {"step": 2**63},
        {"step": 1.5},
        {"requires": None},
        {"requires": "teleport"},
        {"requires": [["teleport"]]},
        {"requires": [{}]},
        {"requires": ["reference"] * 17},
        {"kind": "anchor"},
        {"kind": "compaction"},
        {"kind": "record"},
        {"base": _BASE | {"version": 2}},
        {"base": _BASE | {"version": 0}},
        {"base": _BASE | {"sha256": "A" * 64}},
        {"base": _BASE | {"epoch": "x"}},
        {"base": 1},
        {"body_bytes": -1},
        {"body_sha256": "x"},
        {"created_at": "0" * 41},
        _delta(changed=-1),
        _delta(codec=7),
        _delta(parts=None),
        _delta(parts=[_FILE] * 65_537),
        _delta(parts=[_FILE | {"sha256": "A" * 64}]),
        _delta(parts=[_FILE | {"bytes": -1}]),
        _delta(parts=[_FILE | {"bytes": 2**63}]),
        _delta(parts=[_FILE | {"key": "../../etc/passwd"}]),
        _delta(parts=[_FILE | {"key": ""}]),
    ],
)
def test_a_record_that_contradicts_its_schema_or_itself_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        _decode(RECORDS["delta"], _altered(RECORDS["delta"], **fields))


def test_what_lies_beside_weights_is_bounded() -> None:
    file = File(key=f"{FOLDER}/tokenizer.json", bytes=1, sha256="a" * 64)
    for model_files in ([file] * 1025, [dataclasses.replace(file, bytes=(256 << 20) + 1)]):
        large = dataclasses.replace(
            RECORDS["anchor"], anchor=dataclasses.replace(ANCHOR, model_files=model_files)
        )
        with pytest.raises(CorruptDataError):
            _decode(large, documents.encode(large))


@pytest.mark.parametrize(
    "fields",
    [
        {"tensors": {"w": ["bfloat16", [2, 4]], "scale": ["float32", []]}},
        {"tensors": {"w": ["complex64", [2, 3]], "scale": ["float32", []]}},
        {"tensors": {"w": ["bfloat16", [-2, 3]]}},
        {"tensors": {"w": ["bfloat16"]}},
        {"tensors": []},
        {"tensors_sha256": "0" * 64},
        {"fencing": "hope"},
        {"fencing": None},
        {"epoch": "first"},
    ],
)
def test_a_damaged_channel_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        _decode(CHANNEL, _altered(CHANNEL, **fields))


def test_a_channel_gives_specs_whatever_the_order_of_names() -> None:
    assert CHANNEL.specs == {
        "w": TensorSpec("w", "bfloat16", (2, 3)),
        "scale": TensorSpec("scale", "float32", ()),
    }
    assert documents.table_sha256(dict(reversed(TABLE.items()))) == documents.table_sha256(TABLE)


@pytest.mark.parametrize(
    "fields", [{"version": 0}, {"version": None}, {"sha256": "b" * 63}, {"run_id": 7}, {"epoch": ""}]
)
def test_a_damaged_head_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        _decode(HEAD, _altered(HEAD, **fields))


@pytest.mark.parametrize("fields", [{"epoch": EPOCH}, {"continues": {}}, {"writer": "x" * 201}])
def test_a_damaged_opening_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        _decode(OPENING, _altered(OPENING, **fields))


# Records as objects


def _payload() -> Encoded:
    bits = torch.arange(6, dtype=torch.int16).numpy().view("u2")
    changes = Delta(
        Layout({"w": TensorSpec("w", "bfloat16", (2, 3))}), {2: Sparse(bits[:2].astype("i4"), bits[:2])}
    )
    return codec.get("raw").encode(changes, lambda _: (bits, 0), {"w": 0}, 2, 1)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("payload", [None, _payload()])
def test_a_record_is_a_safetensors_file_that_ends_in_its_document(name: str, payload: Encoded | None) -> None:
    key = _key(RECORDS[name])
    stored = record.encode(RECORDS[name], key, payload, None)
    assert stored.data is not None
    (length,) = struct.unpack("<Q", stored.data[-8:])
    document = stored.data[-8 - length : -8]
    assert documents.decode(document, Record, key) == stored.record
    assert stored.record.body_bytes == len(stored.data) - 8 - length
    assert record.decode(stored.data, key, None) == stored
    assert (stored.sha256, stored.size) == (documents.sha256_hex(stored.data), len(stored.data))
    if payload is not None:
        opened = open_payload(stored.data)
        assert opened.arrays.keys() == payload.arrays.keys() and opened.metadata == payload.metadata
    without = dataclasses.replace(stored.record, body_bytes=0, body_sha256="0" * 64)
    assert without == RECORDS[name]


def test_of_a_record_every_bit_counts() -> None:
    key = _key(RECORDS["delta"])
    stored = record.encode(RECORDS["delta"], key, _payload(), None)
    assert stored.data is not None
    for at in range(len(stored.data)):
        altered = bytearray(stored.data)
        altered[at] ^= 0x10
        try:
            found = record.decode(bytes(altered), key, None)
        except FormatError:
            continue
        # the document, which has no other digest
        assert at >= stored.record.body_bytes and found.sha256 != stored.sha256
    for size in range(len(stored.data)):
        with pytest.raises(CorruptDataError):
            record.decode(stored.data[:size], key, None)


@pytest.mark.parametrize("length", [0, 1 << 62, (1 << 64) - 1])
def test_a_document_of_another_length_is_none(length: int) -> None:
    key = _key(RECORDS["delta"])
    data = record.encode(RECORDS["delta"], key, None, None).data
    assert data is not None
    with pytest.raises(CorruptDataError, match="does not end in a document"):
        record.decode(data[:-8] + struct.pack("<Q", length), key, None)


def test_bounds_follow_from_the_table() -> None:
    names = len("w") + len("scale")
    most = (5 << 20) + 2 * 1024 + 32 * names
    assert CHANNEL.most_bytes(keys.slot(7, EPOCH)) == CHANNEL.most_bytes(keys.announcement(7, EPOCH)) == most
    payloads = 32 * 7 + 2 * 4096 + 64 * names + (1 << 20)
    assert CHANNEL.most_payload_bytes == payloads
    assert CHANNEL.most_bytes(keys.compaction(3, 7, EPOCH)) == most + payloads


def test_threads_may_decode_the_first_document_of_a_process() -> None:
    """msgspec shows other threads a class that it still looks at, and decoding by that ends the process."""
    script = """
import dataclasses, sys, threading
import msgspec
from deltasync.channel import documents
from deltasync.serve import heartbeat

kinds = {kind for kind in vars(documents).values() if dataclasses.is_dataclass(kind) and "documents" in kind.__module__}
print(*sorted(kind.__name__ for kind in {*kinds, heartbeat.Heartbeat} if "__msgspec_cache__" not in vars(kind)))

sys.setswitchinterval(1e-6)
begun = threading.Barrier(8)

def decode():
    begun.wait()
    try:
        msgspec.convert({"format": "none"}, documents.Record)
    except msgspec.ValidationError:
        pass

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
