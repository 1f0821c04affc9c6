from __future__ import annotations

import json
from typing import Any

import pytest

from deltasync import manifest
from deltasync.errors import CorruptDataError, FormatError, UnsupportedFormatError
from deltasync.manifest import Anchor, Channel, Delta, FileRef, Head, Manifest

FILE = FileRef(key="deltas/0000000002/part-00001-of-00001.safetensors", bytes=10, sha256="a" * 64)
DELTA = Delta(base_version=1, base_manifest_sha256="0" * 64, codec="packed", changed=3, files=[FILE])
ANCHOR = Anchor(
    directory="anchors/0000000002", files=[FileRef(key="anchors/0000000002/model.safetensors", bytes=10, sha256="a" * 64)]
)
TABLE: dict[str, tuple[str, tuple[int, ...]]] = {"w": ("bfloat16", (2, 3)), "scale": ("float32", ())}


def _manifest(**fields: Any) -> Manifest:
    defaults: dict[str, Any] = {
        "format": manifest.FORMAT,
        "run_id": "run",
        "version": 2,
        "kind": "delta",
        "step": None,
        "created_at": "2025-01-01T00:00:00+00:00",
        "total": 6,
        "fingerprint": "0" * 16,
        "anchor_version": 1,
        "delta": DELTA,
    }
    return Manifest(**(defaults | fields))


HEAD = Head(format=manifest.FORMAT, run_id="run", version=2, manifest_sha256="b" * 64)
CHANNEL = Channel(
    format=manifest.FORMAT,
    run_id="run",
    created_at="2025-01-01T00:00:00+00:00",
    dtype="bfloat16",
    tensors=TABLE,
    tensors_sha256=manifest.table_sha256(TABLE),
)
DOCUMENTS = [
    _manifest(),
    _manifest(kind="anchor", anchor=ANCHOR, anchor_version=2, step=7, coalesced=3),
    _manifest(kind="anchor", anchor=ANCHOR, anchor_version=2, delta=None),
    HEAD,
    CHANNEL,
]


def _altered(document: Channel | Head | Manifest, **fields: Any) -> bytes:
    return json.dumps(json.loads(manifest.encode(document)) | fields).encode()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_round_trip(document: Channel | Head | Manifest) -> None:
    data = manifest.encode(document)
    assert manifest.decode(data, type(document), "key") == document
    assert data.endswith(b"\n") and data.count(b"\n") == 1


def test_channel_gives_specs() -> None:
    specs = CHANNEL.specs
    assert list(specs) == ["w", "scale"]
    assert specs["w"].shape == (2, 3)
    assert specs["scale"].element_count == 1


def test_table_digest_does_not_depend_on_the_order_of_names() -> None:
    assert manifest.table_sha256(dict(reversed(TABLE.items()))) == manifest.table_sha256(TABLE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_unknown_fields_are_ignored(document: Channel | Head | Manifest) -> None:
    data = _altered(document, from_the_future={"a": [1, None]})
    assert manifest.decode(data, type(document), "key") == document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_unknown_required_features_are_refused_by_name(document: Channel | Head | Manifest) -> None:
    with pytest.raises(UnsupportedFormatError, match="teleport"):
        manifest.decode(_altered(document, requires=["teleport"]), type(document), "key")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_required_feature_is_refused_even_if_it_changes_the_fields(document: Channel | Head | Manifest) -> None:
    data = json.dumps({"format": manifest.FORMAT, "requires": ["teleport"]}).encode()
    with pytest.raises(UnsupportedFormatError):
        manifest.decode(data, type(document), "key")


@pytest.mark.parametrize("found", ["deltasync/2", None, 1])
def test_another_format_is_refused(found: object) -> None:
    with pytest.raises(UnsupportedFormatError):
        manifest.decode(_altered(HEAD, format=found), Head, "key")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"1",
        b'"head"',
        b"\xff\xfe",
        b'{"format": "deltasync/1"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
@pytest.mark.parametrize("kind", [Channel, Head, Manifest])
def test_what_is_no_json_object_is_corrupt(data: bytes, kind: type) -> None:
    with pytest.raises(CorruptDataError):
        manifest.decode(data, kind, "key")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_truncation_is_corrupt(document: Channel | Head | Manifest) -> None:
    data = manifest.encode(document).rstrip()
    for size in range(len(data)):
        with pytest.raises(CorruptDataError):
            manifest.decode(data[:size], type(document), "key")


@pytest.mark.parametrize("document", [_manifest(), HEAD, CHANNEL])
def test_every_flipped_byte_is_a_format_error_or_a_valid_document(document: Channel | Head | Manifest) -> None:
    data = manifest.encode(document)
    for position in range(len(data)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            altered = data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]
            try:
                manifest.decode(altered, type(document), "key")
            except FormatError:
                continue


@pytest.mark.parametrize("field", ["run_id", "version", "kind", "created_at", "total", "fingerprint", "anchor_version"])
def test_a_manifest_without_a_field_is_corrupt(field: str) -> None:
    document = json.loads(manifest.encode(_manifest()))
    del document[field]
    with pytest.raises(CorruptDataError):
        manifest.decode(json.dumps(document).encode(), Manifest, "key")


_FILE = json.loads(manifest.encode(_manifest()))["delta"]["files"][0]


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 0},
        {"version": -1},
        {"version": "2"},
        {"version": 2.5},
        {"total": -1},
        {"fingerprint": "0" * 15},
        {"fingerprint": "G" * 16},
        {"coalesced": 0},
        {"requires": None},
        {"requires": "teleport"},
        {"requires": [["teleport"]]},
        {"requires": [{}]},
        {"delta": None},
        {"kind": "anchor"},
        {"kind": "fold"},
        {"anchor_version": 3},
        {"delta": {"base_version": 2, "codec": "raw", "changed": 0, "files": []}},
        {"delta": {"base_version": 0, "codec": "raw", "changed": 0, "files": []}},
        {"delta": {"base_version": 1, "codec": "raw", "changed": -1, "files": []}},
        {"delta": {"base_version": 1, "codec": "raw", "changed": 1, "files": [_FILE | {"sha256": "A" * 64}]}},
        {"delta": {"base_version": 1, "codec": "raw", "changed": 1, "files": [_FILE | {"bytes": -1}]}},
        {"delta": {"base_version": 1, "codec": "raw", "changed": 1, "files": [_FILE | {"key": "../../etc/passwd"}]}},
        {"delta": {"base_version": 1, "codec": "raw", "changed": 1, "files": [_FILE | {"key": ""}]}},
        {"delta": {"base_version": 1, "codec": "raw", "changed": 1, "files": None}},
    ],
)
def test_a_manifest_that_contradicts_its_schema_or_itself_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        manifest.decode(_altered(_manifest(), **fields), Manifest, "key")


@pytest.mark.parametrize(
    "fields",
    [
        {"tensors": {"w": ["bfloat16", [2, 4]], "scale": ["float32", []]}},
        {"tensors": {"w": ["complex64", [2, 3]], "scale": ["float32", []]}},
        {"tensors": {"w": ["bfloat16", [-2, 3]]}},
        {"tensors": {"w": ["bfloat16"]}},
        {"tensors": []},
        {"tensors_sha256": "0" * 64},
    ],
)
def test_a_channel_whose_table_is_not_what_its_digest_says_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        manifest.decode(_altered(CHANNEL, **fields), Channel, "key")


@pytest.mark.parametrize("fields", [{"version": 0}, {"version": None}, {"manifest_sha256": "b" * 63}, {"run_id": 7}])
def test_a_damaged_head_is_corrupt(fields: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError):
        manifest.decode(_altered(HEAD, **fields), Head, "key")
