"""What somebody who may write to the bucket, but has no key that is trusted, can store in a channel."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Callable
from random import Random

import msgspec

from deltasync.channel import documents, keys, record
from deltasync.channel.documents import EpochDocument, Head, Record, VersionId
from deltasync.channel.keys import Slot
from deltasync.channel.signing import Signer
from deltasync.errors import FormatError
from deltasync.serve.heartbeat import Heartbeat

_FAR = "999999-ffffffff"


def forged(
    random: Random, objects: dict[str, bytes], theirs: Signer | None, run_id: str
) -> tuple[str, bytes | None]:
    """Return a key and what is stored there: None if it is deleted.

    Args:
        random: Chooses.
        objects: What is there.
        theirs: The outsider's own key; without it only hints and strangers' places are written to.
        run_id: The run's.
    """
    kinds = (keys.VERSIONS, keys.COMPACTIONS, keys.ANNOUNCEMENTS)
    records = sorted(key for key, data in objects.items() if key.startswith(kinds) and len(data) > 8)
    slots = [slot for key in records if (slot := keys.slot_of(key)) is not None]
    kind = random.random()
    if kind < 0.3:
        return keys.HEAD, _hint(random, objects, run_id, records)
    if kind < 0.45 and slots:
        return keys.replica("stranger", "00000001"), _heartbeat(random, run_id, random.choice(slots))
    if theirs is None or not slots or random.random() < 0.3:
        return _stray(random, objects, run_id, is_signed=theirs is not None)
    newest = max(slots, key=lambda slot: slot.newness)
    if random.random() < 0.3:
        return _appended(random, objects, theirs, run_id, newest)
    key = random.choice((newest.key, random.choice(records)))
    if random.random() < 0.3:
        target = random.choice(
            (key, keys.slot(random.choice((1, 3, 99, keys.LARGEST_VERSION)), _FAR), random.choice(records))
        )
        return target, objects[random.choice(records)]
    return key, _altered(random, key, objects[key], theirs)


def _heartbeat(random: Random, run_id: str, slot: Slot) -> bytes:
    """A replica that serves other weights by the number of a version, or a later one."""
    version = slot.version + random.choice((0, 3, 100))
    beat = Heartbeat(
        replica_id="stranger",
        run_id=run_id,
        version=version,
        state="serving",
        epoch=slot.epoch,
        sha256="f" * 64,
    )
    return msgspec.json.encode(beat)


def _hint(random: Random, objects: dict[str, bytes], run_id: str, records: list[str]) -> bytes:
    """A head that leads elsewhere."""
    slot = keys.slot_of(random.choice(records)) if records else None
    named = [VersionId(900, _FAR, "f" * 64), VersionId(keys.LARGEST_VERSION, _FAR, "0" * 64)]
    if slot is not None:
        digest = documents.sha256_hex(objects[slot.key])
        named += [VersionId(slot.version, slot.epoch, digest), VersionId(slot.version, slot.epoch, "f" * 64)]
        named += [VersionId(slot.version + 1, slot.epoch, digest)]
    version = random.choice(named)
    head = Head(run_id=run_id, version=version.version, epoch=version.epoch, sha256=version.sha256)
    return random.choice(
        (documents.encode(head), documents.encode(head), b"", b"{}", b"[" * 4000, bytes(1 << 16))
    )


def _stray(random: Random, objects: dict[str, bytes], run_id: str, is_signed: bool) -> tuple[str, bytes]:
    """An object where nothing is."""
    epoch = f"{random.choice((1, 2, 3, 999_999)):06d}-{random.randbytes(4).hex()}"
    on = VersionId(random.choice((1, 41)), epoch, "0" * 64)
    opening = EpochDocument(
        run_id=random.choice((run_id, "other")),
        epoch=epoch,
        continues=on,
        writer="",
        created_at=documents.now(),
    )
    data = random.choice(
        (b"", random.randbytes(300), documents.encode(opening), objects[random.choice(sorted(objects))])
    )
    # In an unsigned channel, what cannot be read at the key of a record may be a damaged one.
    slots = [keys.slot(random.choice((1, 2, 50, keys.LARGEST_VERSION - 1)), epoch)] if is_signed else []
    places = [*slots, f"epochs/{epoch}.json", "replicas/odd.json"]
    return random.choice([*places, "versions/0000000/odd", "anchors/odd", "parts/odd/odd"]), data


def _appended(
    random: Random, objects: dict[str, bytes], theirs: Signer, run_id: str, newest: Slot
) -> tuple[str, bytes | None]:
    """What could be the next version: other weights that were published before, or the end of the log."""
    on = VersionId(newest.version, newest.epoch, documents.sha256_hex(objects[newest.key]))
    fields = {
        "run_id": run_id,
        "version": on.version + 1,
        "epoch": on.epoch,
        "base": on,
        "created_at": documents.now(),
    }
    found = Record(kind="seal", next_epoch=_FAR, **fields)  # type: ignore[arg-type]
    for key in sorted(objects) if random.random() < 0.7 else ():
        with contextlib.suppress(FormatError):
            old = (
                record.decode_document(objects[key], len(objects[key]), key, None)
                if key.startswith(keys.VERSIONS)
                else None
            )
            if old is not None and old.kind == "anchor":
                found = dataclasses.replace(old, **fields)
    target = Slot(on.version + 1, on.epoch).key
    return target, record.encode(found, target, None, random.choice((theirs, None))).data


def _altered(random: Random, key: str, data: bytes, theirs: Signer) -> bytes | None:
    """A record of ours that is changed, or gone."""
    (length,) = struct.unpack("<Q", data[-8:])
    body, document = data[: -8 - length], data[-8 - length : -8]
    at = document.find(b',"signature"')
    stripped = document[:at] + b"}\n" if at >= 0 else document
    ours, own = document[at:], theirs.seal(key, stripped)
    changes: list[Callable[[], bytes | None]] = [
        lambda: None,
        lambda: data[: random.randrange(len(data))],
        lambda: data + b"\n",
        lambda: _record(body, stripped),
        lambda: _record(body, own),
        lambda: _record(body, own[: own.index(b',"signature"')] + ours),
        lambda: _record(body, document.replace(b'"ed25519"', b'"none"')),
        lambda: _record(bytes(len(body)), document),
        lambda: _record(bytes(1 << 16) + body, document),
    ]
    return random.choice(changes)()


def _record(body: bytes, document: bytes) -> bytes:
    return body + document + struct.pack("<Q", len(document))
