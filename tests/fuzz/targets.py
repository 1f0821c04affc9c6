"""Readers of bytes that somebody else wrote. Each target takes any bytes and raises only if a reader did what
it must not.

A reader may raise an error of deltasync/errors.py. Anything else that it raises is a bug, and so is what an
assertion here finds.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from obstore.store import MemoryStore
from rich.console import Console

from deltasync import codec, ops
from deltasync.channel import anchors as weight_files
from deltasync.channel import documents, keys, record, signing
from deltasync.channel.documents import (
    Anchor,
    Channel,
    EpochDocument,
    File,
    Head,
    Record,
    Reference,
    VersionId,
    sha256_hex,
)
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.signing import Trusted
from deltasync.clouds.events import _events
from deltasync.errors import CorruptDataError, DeltaSyncError, printable
from deltasync.following import Replica
from deltasync.opening import checkpoint
from deltasync.ops.cli import watch
from deltasync.ops.dashboard import ChannelObserver, ChannelSnapshot, page
from deltasync.serve import heartbeat
from deltasync.stores import Store
from deltasync.stores.base import check_key
from deltasync.stores.object import ObstoreStore
from deltasync.tensors import Delta, Layout, Region, TensorSpec
from deltasync.tensors.delta import joined, merge
from tests import deltas
from tests.channels import EPOCH, RUN
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
LAYOUT = Layout(SPECS)

_TRUSTED = Trusted(["1" * 64])
_TIME = "2025-01-01T00:00:00+00:00"


def old_bits(name: str) -> np.ndarray:
    """Weights before a delta: the same in every process."""
    spec = SPECS[name]
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = generator.normal(0, 0.02, spec.element_count).astype(np.float32).view(np.uint32)
    return (values >> np.uint32(16) if spec.item_bytes == 2 else values).astype(spec.bits_dtype)


def document(data: bytes) -> None:
    """The first byte chooses the kind; a channel's table gets the digest that it should have. Nobody has
    signed any.
    """
    kinds = Channel, Record, Head, EpochDocument
    kind, body = kinds[data[0] % len(kinds)] if data else Head, data[1:]
    if kind is Channel:
        with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError, TypeError, LookupError):
            table = msgspec.json.decode(body)
            digest = documents.table_sha256(table["tensors"])
            body = msgspec.json.encode(table | {"tensors_sha256": digest})
    key = _key_of(body)
    signing.signed_by(body)
    with pytest.raises(CorruptDataError):
        _TRUSTED.check(key, body)
    with contextlib.suppress(DeltaSyncError):
        found: Any = documents.decode(body, kind, key)
        assert documents.decode(documents.encode(found), kind, key) == found
        if isinstance(found, Channel):
            assert all(0 <= spec.element_count * spec.item_bytes < 1 << 63 for spec in found.specs.values())
            assert found.most_bytes(keys.CHANNEL) <= found.most_bytes(keys.COMPACTIONS)
        if isinstance(found, Record):
            _check_record(found)


def _key_of(body: bytes) -> str:
    """The key that a document is about, so that it is not refused for that."""
    with contextlib.suppress(
        ValueError, TypeError, LookupError, AttributeError, RecursionError, DeltaSyncError
    ):
        says = json.loads(body)
        if says.get("kind") == "compaction":
            return keys.compaction((says["base"] or {"version": 0})["version"], says["version"], EPOCH)
        return (
            keys.slot(says["version"], says["epoch"])
            if "kind" in says
            else keys.epoch_document(says["epoch"])
        )
    return "key"


def _check_record(found: Record) -> None:
    assert found.is_version == (found.kind in ("delta", "anchor"))
    assert found.created_s is not None and str(found.reference)
    if found.kind != "compaction":
        assert keys.slot_of(keys.slot(found.version, found.epoch)) == keys.Slot(found.version, found.epoch)
    for file in found.files:
        assert check_key(file.key) == file.key
    if found.base is not None:
        assert found.base.version < found.version and str(found.base)


def records(data: bytes) -> None:
    """An object as a record at the place that it says it has, with its body's digest put right; then its
    payload.
    """
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        data = containers.join_record(*containers.split_record(data))
    length = int.from_bytes(data[-8:], "little")
    key = _key_of(data[-8 - length : -8])
    with pytest.raises(CorruptDataError):
        record.decode(data, key, _TRUSTED)
    with contextlib.suppress(DeltaSyncError):
        stored = record.decode(data, key, None)
        assert (stored.size, stored.sha256, stored.data) == (len(data), sha256_hex(data), data)
        assert record.signed_by(data) is None or b"ed25519" in data
        _check_record(stored.record)
        assert stored.record.payload_bytes >= stored.record.body_bytes
        reader = ChannelReader(_holding({keys.CHANNEL: channel_document(), key: data}))
        assert reader.stored(key, stored.sha256).record == stored.record


def small(data: bytes) -> None:
    """Heartbeats, replies of servers, keys, the Hub's events, headers and bodies of requests: the first byte
    chooses.
    """
    which, body = data[0] % 6 if data else 0, data[1:]
    text = body.decode("utf-8", "replace")
    if which == 0:
        for beat in heartbeat.read_all(_holding({keys.replica("r"): body}), RUN):
            heartbeat.is_live(beat)
            heartbeat._serves(beat, 1, {1: "0" * 64})
            heartbeat._describe(beat)
    elif which == 1:
        beat = heartbeat.heartbeat_of("http://localhost", body, RUN)
        heartbeat._serves(beat, 1, {1: "0" * 64})
        heartbeat._describe(beat)
    elif which == 2:
        for parse in (keys.slot_of, keys.compaction_of, keys.epoch_of, keys.file_of):
            parse(text)
        if (slot := keys.slot_of(text)) is not None:
            assert slot.key == text
        with contextlib.suppress(DeltaSyncError):
            check_key(text)
            assert re.fullmatch(r"[\x21-\x7e]{1,900}", text)
            assert not text.startswith("/") and not any(part in ("", ".", "..") for part in text.split("/"))
    elif which == 3:
        with contextlib.suppress(msgspec.DecodeError):  # `EventWatch` connects anew
            list(_events(cast("Any", _Lines(text))))
    elif which == 4:
        from deltasync.serve.requests import token_matches

        assert not token_matches(text, "a token that no text holds")
    else:
        from deltasync.serve.requests import Sync, WeightUpdate, body_of

        for kind in (WeightUpdate, Sync):
            with contextlib.suppress(DeltaSyncError):
                wanted: WeightUpdate = body_of(body, kind)
                assert wanted.version is None or 1 <= wanted.version < 1 << 63
                assert 0 < wanted.timeout_s <= 3600


class _Lines:
    def __init__(self, text: str) -> None:
        self._text = text

    def iter_bytes(self) -> list[bytes]:
        return [self._text.encode("utf-8", "surrogatepass")]


def payload(data: bytes) -> None:
    """A delta's payload of any codec, whole and in parts."""
    with contextlib.suppress(DeltaSyncError):
        opened = codec.open_payload(data)
        reader = codec.get(opened.codec)
        for wanted in (None, _wanted):
            delta, fingerprints = reader.decode(opened, LAYOUT, old_bits, wanted)
            deltas.check(delta)
            assert delta.counts().keys() <= fingerprints.keys() <= SPECS.keys()
            assert all(0 <= digest < 1 << 64 for digest in fingerprints.values())
            for name in SPECS:
                delta.apply(name, old_bits(name))
            joined([delta, Delta(LAYOUT, {})])
            merge([delta, delta])


def _wanted(name: str) -> list[Region]:
    count = SPECS[name].element_count
    return [(0, ((1, 1),)), (count // 2, ((70, 1),))] if count > 100 else []


def anchors(data: bytes) -> None:
    """A weight file, by itself and as a channel's first anchor."""
    with contextlib.suppress(DeltaSyncError):
        for name, bits_N, _ in weight_files.read_weights(data, SPECS):
            assert (bits_N.size, bits_N.dtype) == (SPECS[name].element_count, SPECS[name].bits_dtype)
    folder = keys.anchor_folder(1, EPOCH)
    file = File(key=f"{folder}/model.safetensors", bytes=len(data), sha256=sha256_hex(data))
    first = Record(
        run_id=RUN,
        kind="anchor",
        version=1,
        epoch=EPOCH,
        created_at=_TIME,
        fingerprint="0" * 16,
        anchor=Anchor(directory=folder, files=[file]),
    )
    stored = record.encode(first, keys.slot(1, EPOCH), None, None)
    assert stored.data is not None
    _sync({keys.CHANNEL: channel_document(), file.key: data, stored.key: stored.data})


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
    """A bundle as a whole channel, with digests put right: planned in, followed, checked, copied,
    exported.
    """
    parts = containers.unbundle(data)
    if not parts:
        return
    store = _sync(seal(parts))
    which = zlib.crc32(data) % 3
    with contextlib.suppress(DeltaSyncError):
        if which == 0:
            ops.check(ChannelReader(store), read_data=True)
        elif which == 1:
            ops.copy(ChannelReader(store), _holding({}))
        else:
            with tempfile.TemporaryDirectory() as directory:
                target = Path(directory, "there")
                try:
                    ops.export(ChannelReader(store), None, target)
                finally:
                    assert set(Path(directory).iterdir()) <= {target}


def dashboard(data: bytes) -> None:
    """A bundle as a whole channel, with digests put right, as the dashboard and `deltasync watch` show it."""
    parts = containers.unbundle(data)
    if not parts:
        return
    observer = ChannelObserver(_holding(seal(parts)), last=4, heat=3)
    before: ChannelSnapshot | None = None
    for _ in range(2):
        found = observer.snapshot()
        with contextlib.suppress(DeltaSyncError):
            found = observer.refresh()
            observer.read_headers(2)
            found = observer.snapshot()
        shown = page(found).partition(b'id="data">')[2].partition(b"</script>")[0]
        assert _is_printable(msgspec.json.decode(shown)), "a page"
        lines = [printable(watch.sentence(change)) for change in watch.changes(before, found)]
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(watch.screen(found))
        for line in (*lines, *console.file.getvalue().split("\n")):  # type: ignore[attr-defined]
            assert line.isprintable(), "a line"
        before = found


def _is_printable(document: Any) -> bool:
    if isinstance(document, dict):
        return all(_is_printable(name) and _is_printable(value) for name, value in document.items())
    if isinstance(document, list):
        return all(map(_is_printable, document))
    return not isinstance(document, str) or document.isprintable()


def _sync(parts: Parts) -> Store:
    """Plan ways, and follow a channel from nothing, and from version 1."""
    store = _holding(parts)
    reader = ChannelReader(store)
    with contextlib.suppress(DeltaSyncError):
        newest = reader.newest()
        if newest is not None and newest.record.is_version:
            for have in (None, *reader.versions()):
                with contextlib.suppress(DeltaSyncError):
                    way = find_chain(reader, have, newest.version)
                    assert not way or (
                        way[-1].version == newest.version and (way[0].use_anchor or way[0].base == have)
                    )
                    assert all(stored.base == before.version for before, stored in itertools.pairwise(way))
    for versions in ((None,), (1, 2, None)):
        replica = Replica(store)
        for version in versions:
            before = replica.identity
            try:
                replica.sync(version)
                assert replica.identity is not None
                promised = {stored.record.fingerprint for stored in leading(reader, parts, replica.identity)}
                assert f"{sum(replica.fingerprints.values()) % 2**64:016x}" in promised
            except DeltaSyncError:
                assert replica.identity in (before, None) or replica.identity.version in named_versions(parts)
    return store


def leading(reader: ChannelReader, parts: Parts, version: VersionId) -> Iterator[StoredRecord]:
    """The version's record, and the compactions to it."""
    for key in parts:
        if key == version.key or keys.compaction_of(key) is not None:
            with contextlib.suppress(DeltaSyncError):
                if (stored := reader.stored(key)).version == version:
                    yield stored


def named_versions(parts: Parts) -> set[int]:
    """Numbers of the records, and of the ends of compactions, whose records need not be there."""
    found = [keys.slot_of(key) or keys.compaction_of(key) for key in parts]
    return {place.version for place in found if place is not None}


def _holding(parts: Parts) -> Store:
    # not `memory_store`, which keeps them
    store = ObstoreStore(f"memory://{uuid.uuid4().hex}", MemoryStore())
    for key, data in parts.items():
        with contextlib.suppress(DeltaSyncError):
            store.put(key, data)
    return store


def channel_document() -> bytes:
    table = {name: (spec.dtype, spec.shape) for name, spec in SPECS.items()}
    channel = Channel(
        run_id=RUN,
        created_at=_TIME,
        fencing="seal",
        epoch=EPOCH,
        dtype="keep",
        tensors=table,
        tensors_sha256=documents.table_sha256(table),
    )
    return documents.encode(channel)


def seal(parts: Parts) -> Parts:
    """The objects with sizes and digests that agree, wherever a document is whole enough to hold one."""
    sealed = dict(parts)
    order = sorted(parts, key=lambda key: (key == keys.HEAD, keys.shortcut_of(key) is not None, key))
    for key in order:
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
            if key.startswith((keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS)):
                header, body, says = containers.split_record(sealed[key])
                _seal_record(says, sealed)
                sealed[key] = containers.join_record(header, body, says)
            else:
                says = json.loads(sealed[key])
                if "tensors" in says:
                    says["tensors_sha256"] = documents.table_sha256(says["tensors"])
                elif key == keys.HEAD:
                    says["sha256"] = sha256_hex(sealed[keys.slot(says["version"], says["epoch"])])
                sealed[key] = json.dumps(says).encode()
    return sealed


def _seal_record(says: dict[str, Any], sealed: Parts) -> None:
    for part in (says.get("delta"), says.get("anchor")):
        for file in [
            file for name in ("parts", "files", "model_files") for file in (part or {}).get(name, ())
        ]:
            with contextlib.suppress(LookupError, TypeError):
                file |= {"bytes": len(sealed[file["key"]]), "sha256": sha256_hex(sealed[file["key"]])}
    for named in (says.get("base"), says if says.get("kind") == "compaction" else None):
        if named is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError):
                named["sha256"] = sha256_hex(sealed[keys.slot(named["version"], named["epoch"])])


TARGETS: dict[str, Callable[[bytes], None]] = {
    "documents": document,
    "records": records,
    "small": small,
    "raw": payload,
    "packed": payload,
    "context": payload,
    "anchors": anchors,
    "checkpoints": checkpoints,
    "channels": channels,
    "dashboard": dashboard,
}
"""By name. The codecs' differ in their corpora only."""
