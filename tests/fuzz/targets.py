"""Readers of bytes that somebody else wrote. Each target takes any bytes and raises only if a reader did what it must not.

A reader may raise an error of deltasync/errors.py. Anything else that it raises is a bug, and so is what an assertion here
finds.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from obstore.store import MemoryStore

from deltasync import anchor, checkpoint, codec, heartbeat, housekeeping, layout, manifest, signing
from deltasync.dashboard.heat import read_changed
from deltasync.errors import DeltaSyncError, SignatureError
from deltasync.manifest import Channel, FileRef, Fold, Forgotten, Head, Manifest, Reference
from deltasync.reader import ChannelReader
from deltasync.replica import Replica
from deltasync.signing import Trusted
from deltasync.stores import Store
from deltasync.stores.events import _events
from deltasync.stores.object import ObstoreStore
from deltasync.types import Patch, TensorSpec
from tests.fuzz import containers
from tests.fuzz.containers import Parts

SPECS = {
    spec.name: spec
    for spec in (
        TensorSpec("w", "bfloat16", (20, 40)),
        TensorSpec("half", "float16", (33,)),
        TensorSpec("wide", "float32", (300,)),
        TensorSpec("scale", "float8_e5m2", (5,)),
        TensorSpec("one", "int64", ()),
    )
}
_TRUSTED = Trusted(["1" * 64])
_TOTAL = sum(spec.element_count for spec in SPECS.values())


def old_bits(name: str) -> np.ndarray:
    """Weights before a delta: the same in every process."""
    spec = SPECS[name]
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = generator.normal(0, 0.02, spec.element_count).astype(np.float32).view(np.uint32)
    return (values >> np.uint32(16) if spec.item_bytes == 2 else values).astype(spec.bits_dtype)


def documents(data: bytes) -> None:
    """The first byte chooses the kind; a channel's table gets the digest that it should have. Nobody has signed any."""
    kinds = Channel, Head, Manifest, Fold, Forgotten
    kind, body = kinds[data[0] % len(kinds)] if data else Head, data[1:]
    if kind is Channel:
        with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError, TypeError, LookupError):
            table = msgspec.json.decode(body)
            digest = manifest.table_sha256(table["tensors"])
            body = msgspec.json.encode(table | {"tensors_sha256": digest})
    signing.signed_by(body)
    with pytest.raises(SignatureError):
        _TRUSTED.check("key", body)
    with contextlib.suppress(DeltaSyncError):
        document: Any = manifest.decode(body, kind, "key")
        assert manifest.decode(manifest.encode(document), kind, "key") == document
        if isinstance(document, Channel):
            assert all(0 <= spec.element_count * spec.item_bytes < 1 << 63 for spec in document.specs.values())
        if isinstance(document, Manifest):
            document.chain_onward("0" * 64)
            assert layout.manifest_version(layout.manifest(document.version)) == document.version
            assert str(document.reference)


def small(data: bytes) -> None:
    """Heartbeats, replies of servers, keys, the Hub's events, headers and bodies of requests: the first byte chooses."""
    which, body = data[0] % 6 if data else 0, data[1:]
    text = body.decode("utf-8", "replace")
    if which == 0:
        store = _store()
        store.replace(layout.replica("r"), body)
        for beat in heartbeat.read_all(store, "run"):
            heartbeat.is_live(beat)
            heartbeat._describe(beat)
    elif which == 1:
        beat = heartbeat.heartbeat_of("http://localhost", body, "run")
        heartbeat._serves(beat, 1)
        heartbeat._describe(beat)
    elif which == 2:
        for parse in (layout.manifest_version, layout.fold_span, layout.data_versions):
            parse(text)
        with contextlib.suppress(DeltaSyncError):
            layout.check_key(text)
            assert re.fullmatch(r"[\x21-\x7e]{1,900}", text)
            assert not text.startswith("/") and not any(part in ("", ".", "..") for part in text.split("/"))
    elif which == 3:
        with contextlib.suppress(msgspec.DecodeError):  # `EventWatch` connects anew
            list(_events(cast("Any", _Lines(text))))
    elif which == 4:
        from vllm_plugin.access import presents

        assert not presents(text, "a token that no text holds")
    else:
        from vllm_plugin.bodies import Sync, WeightUpdate, parse

        for kind in (WeightUpdate, Sync):
            with contextlib.suppress(DeltaSyncError):
                wanted: WeightUpdate = parse(body, kind)
                assert wanted.version is None or 1 <= wanted.version < 1 << 63
                assert 0 < wanted.timeout_s <= 3600


class _Lines:
    def __init__(self, text: str) -> None:
        self._text = text

    def iter_lines(self) -> list[str]:
        return self._text.splitlines()


def payload(data: bytes) -> None:
    """A delta's payload of any codec, whole and in parts."""
    with contextlib.suppress(DeltaSyncError):
        read_changed(_holding(data), FileRef(key="deltas/x", bytes=len(data), sha256="0" * 64))
    with contextlib.suppress(DeltaSyncError):
        opened = codec.open_payload(data)
        reader = codec.get(opened.codec)
        for wanted in (None, _wanted):
            for patch in reader.decode(opened, SPECS, old_bits, wanted):
                _check(patch)
                patch.apply(old_bits(patch.name))


def _wanted(name: str) -> np.ndarray | None:
    count = SPECS[name].element_count
    return np.array([[0, 1], [count // 2, count // 2 + 70]], np.int64) if count > 100 else np.empty((0, 2), np.int64)


def _check(patch: Patch) -> None:
    spec = SPECS[patch.name]
    assert patch.data.dtype == spec.bits_dtype
    if patch.index_K is None:
        assert patch.data.size == spec.element_count
        return
    index_K = patch.index_K.astype(np.int64)
    assert patch.index_K.size == patch.data.size <= spec.element_count
    assert index_K.size and index_K[0] >= 0 and index_K[-1] < spec.element_count and (index_K[1:] > index_K[:-1]).all()


def anchors(data: bytes) -> None:
    """A weight file as a channel's first anchor."""
    with contextlib.suppress(DeltaSyncError):
        anchor.fingerprints(data)
    files = {layout.CHANNEL: channel_document(), f"{layout.anchor_dir(1)}/model.safetensors": data}
    _sync(seal(files | {layout.manifest(1): _anchor_manifest(len(data)), layout.HEAD: _head(1)}))


def checkpoints(data: bytes) -> None:
    """A bundle as the directory that an anchor refers to."""
    parts = containers.unbundle(data)
    with tempfile.TemporaryDirectory() as directory:
        for name in ("model.safetensors", "model.safetensors.index.json", "a.safetensors"):
            if name in parts:
                Path(directory, name).write_bytes(parts[name])
        with contextlib.suppress(DeltaSyncError):
            for name, bits_N in checkpoint.load(Reference(path=directory, tied={"half": "w"})).read(SPECS):
                assert bits_N.size == SPECS[name].element_count and bits_N.dtype == SPECS[name].bits_dtype


def channels(data: bytes) -> None:
    """A bundle as a whole channel, with digests put right: followed, checked, copied, exported, watched."""
    parts = containers.unbundle(data)
    if not parts:
        return
    store = _sync(seal(parts))
    which = zlib.crc32(data) % 4
    with contextlib.suppress(DeltaSyncError):
        if which == 0:
            housekeeping.check(ChannelReader(store), read_data=True)
        elif which == 1:
            housekeeping.copy(ChannelReader(store), _store())
        elif which == 2:
            with tempfile.TemporaryDirectory() as directory:
                target = Path(directory, "there")
                try:
                    housekeeping.export(ChannelReader(store), None, target)
                finally:
                    assert set(Path(directory).iterdir()) <= {target}
        else:
            from deltasync.dashboard.observe import Observer

            observer = Observer(store)
            observer.look()
            observer.read_headers(100)
            observer.snapshot()


def _sync(parts: Parts) -> Store:
    """Follow a channel from nothing, and from version 1."""
    store = _store()
    for key, data in parts.items():
        with contextlib.suppress(DeltaSyncError):
            store.replace(key, data)
    for versions in ((None,), (1, 2, None)):
        replica = Replica(store)
        for version in versions:
            before = replica.version, dict(replica.fingerprints)
            try:
                replica.sync(version)
            except DeltaSyncError:
                assert replica.version in (before[0], None) or replica.version in replica_versions(parts)
    return store


def replica_versions(parts: Parts) -> set[int]:
    return {version for key in parts if (version := layout.manifest_version(key)) is not None}


def _store() -> Store:
    return ObstoreStore(f"memory://{uuid.uuid4().hex}", MemoryStore())  # not `memory_store`, which keeps them


def _holding(data: bytes) -> Store:
    store = _store()
    store.replace("deltas/x", data)
    return store


def channel_document() -> bytes:
    table = {name: (spec.dtype, spec.shape) for name, spec in SPECS.items()}
    return manifest.encode(
        Channel(
            format=manifest.FORMAT,
            run_id="run",
            created_at="2025-01-01T00:00:00+00:00",
            dtype="keep",
            tensors=table,
            tensors_sha256=manifest.table_sha256(table),
        )
    )


def _head(version: int) -> bytes:
    return manifest.encode(Head(format=manifest.FORMAT, run_id="run", version=version, manifest_sha256="0" * 64))


def _anchor_manifest(size: int) -> bytes:
    key = f"{layout.anchor_dir(1)}/model.safetensors"
    files = [FileRef(key=key, bytes=size, sha256="0" * 64)]
    return manifest.encode(
        Manifest(
            format=manifest.FORMAT,
            run_id="run",
            version=1,
            kind="anchor",
            step=None,
            created_at="2025-01-01T00:00:00+00:00",
            total=_TOTAL,
            fingerprint="0" * 16,
            anchor_version=1,
            anchor=manifest.Anchor(directory=layout.anchor_dir(1), files=files),
        )
    )


def seal(parts: Parts) -> Parts:
    """The objects with sizes and digests that agree, wherever a document is whole enough to hold one."""
    sealed = dict(parts)
    for key in sorted(parts, key=lambda key: (key == layout.HEAD, layout.fold_span(key) is not None, key)):
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
            document = json.loads(sealed[key])
            _seal_document(document, sealed)
            sealed[key] = json.dumps(document).encode()
    return sealed


def _seal_document(document: dict[str, Any], sealed: Parts) -> None:
    if "tensors" in document:
        document["tensors_sha256"] = manifest.table_sha256(document["tensors"])
    for part in (document, document.get("delta"), document.get("anchor")):
        if not isinstance(part, dict):
            continue
        for file in part.get("files", ()):
            data = sealed[file["key"]]
            file |= {"bytes": len(data), "sha256": manifest.sha256_hex(data)}
        for version, digest in (("version", "manifest_sha256"), ("base_version", "base_manifest_sha256")):
            if digest in part:
                part[digest] = manifest.sha256_hex(sealed[layout.manifest(part[version])])
    for link in document.get("chain", ()):
        link[1] = manifest.sha256_hex(sealed[layout.manifest(link[0])])


TARGETS: dict[str, Callable[[bytes], None]] = {
    "documents": documents,
    "small": small,
    "raw": payload,
    "packed": payload,
    "context": payload,
    "anchors": anchors,
    "checkpoints": checkpoints,
    "channels": channels,
}
"""By name. The codecs' differ in their corpora only."""
