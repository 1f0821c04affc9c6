"""Repair a channel: restore lost objects, or store shortcuts that replace them. The publisher may keep
running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from deltasync import limits
from deltasync.channel import documents, keys, record, signing
from deltasync.channel.documents import Channel, Head, sha256_hex
from deltasync.channel.keys import Slot
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer
from deltasync.errors import (
    ApplyError,
    ChainError,
    ConfigError,
    CorruptDataError,
    FormatError,
    MissingVersionError,
    NotPublishedError,
    StoreError,
)
from deltasync.ops.checks import Damage, Inspection
from deltasync.ops.compaction import write_anchor, write_compaction
from deltasync.ops.copies import model_files, replica_at
from deltasync.stores import open_store

logger = logging.getLogger(__name__)

Source = Callable[[str, str | None, int], bytes | None]
"""Returns unchecked bytes for (key, sha256 or None, most bytes), None if it has none."""

_ROUNDS = 3  # a restored record may name files that are missing too


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """The repair of one object."""

    key: str
    problem: str  # the object's problem
    # `put back`, `bypassed` (a replacement was stored), `not needed`, or `left`: no repair is possible now
    outcome: str
    how: str  # details of the outcome


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """The result of `repair`. `lost` are versions of the channel that are still unreachable."""

    objects: list[Repaired]
    lost: list[int]

    @property
    def exit_code(self) -> int:
        """0 if every version is reachable and no outcome is `left`."""
        return (
            MissingVersionError.exit_code
            if self.lost or any(each.outcome == "left" for each in self.objects)
            else 0
        )


def repair(
    reader: ChannelReader,
    *,
    source: Source | None = None,
    replay: bool = True,
    signer: Signer | None = None,
) -> Repair:
    """Restore missing and damaged objects from `source`, or store replacements. No other object is deleted or
    replaced.

    A replacement is a compaction, or a newer anchor instead of a damaged one, made from bits that are still
    readable. Without such bits the object is left, and replicas recover at the publisher's next anchor.
    Without `replay` only the sha256 of each file is checked, and nothing is applied. `reader` must be new,
    because an older one has cached channel.json. `source_of` makes a `source`. If the store fails, earlier
    repairs remain.
    """
    objects = _restore_channel(reader, source)
    signing.require_signer(signer, reader.signed)
    for _ in range(_ROUNDS):
        inspection = Inspection(reader)
        if replay:
            inspection.replay()
        else:
            inspection.read_files()
        inspection.report()
        tried = (
            []
            if source is None
            else [_restore(reader, source, damage) for damage in inspection.damages.values()]
        )
        restored = [each for each in tried if each is not None]
        objects += restored
        if not restored:
            break
    objects += [_replaced(inspection, signer, damage) for damage in list(inspection.damages.values())]
    lost = inspection.versions.keys() - inspection.reachable()
    return Repair(objects=objects, lost=sorted(slot.version for slot in lost))


def source_of(place: str) -> Source:
    """Return a source of lost bytes: a copy of the channel, or a directory of files named by sha256 (a node's
    cache).
    """
    directory = Path(place)
    if "://" in place or (directory / keys.CHANNEL).is_file():
        store = open_store(place if "://" in place else directory)

        def from_copy(key: str, sha256: str | None, most_bytes: int) -> bytes | None:
            try:
                return store.read(key, most_bytes)
            except (StoreError, CorruptDataError) as error:
                logger.info("%s cannot be read from %s: %s", key, store.url, error)
                return None

        return from_copy
    if not directory.is_dir():
        raise ConfigError(f"{place} is neither the URL of a copy of the channel nor a directory.")

    def by_digest(key: str, sha256: str | None, most_bytes: int) -> bytes | None:
        path = directory / (sha256 or "-")
        return path.read_bytes() if path.is_file() and path.stat().st_size <= most_bytes else None

    return by_digest


def _restore_channel(reader: ChannelReader, source: Source | None) -> list[Repaired]:
    try:
        reader.channel()
    except (FormatError, NotPublishedError) as error:
        data = None if source is None else source(keys.CHANNEL, None, limits.CHANNEL_BYTES)
        if data is None or not _is_channel(reader, data):
            kind = NotPublishedError if isinstance(error, NotPublishedError) else CorruptDataError
            raise kind(
                f"{error} channel.json can only be restored from a copy of the channel (--from)."
            ) from error
        reader.store.put(keys.CHANNEL, data)
        reader.channel()
        return [Repaired(key=keys.CHANNEL, problem=str(error), outcome="put back", how="from the copy")]
    return []


def _is_channel(reader: ChannelReader, data: bytes) -> bool:
    """Whether this channel.json describes the run whose records are in the store."""
    try:
        if reader.trusted is not None:
            reader.trusted.check(keys.CHANNEL, data)
        channel = documents.decode(data, Channel, keys.CHANNEL)
    except FormatError:
        return False
    slots = reader.slots()
    for slot, _ in reversed(slots):
        with contextlib.suppress(FormatError):
            data = reader.store.read(slot.key, channel.most_bytes(slot.key))
            return record.decode(data, slot.key, reader.trusted).record.run_id == channel.run_id
    return not slots


def _restore(reader: ChannelReader, source: Source, damage: Damage) -> Repaired | None:
    """Restore an object from the source. None if the source does not have its bytes."""
    key, sha256 = damage.key, damage.sha256
    data = source(key, sha256, max(reader.channel().most_bytes(key), reader.channel().most_payload_bytes))
    if data is None or not (_may_be(reader, key, data) if sha256 is None else sha256_hex(data) == sha256):
        return None
    reader.store.put(key, data)
    return Repaired(key=key, problem=str(damage.problem), outcome="put back", how="from the source")


def _may_be(reader: ChannelReader, key: str, data: bytes) -> bool:
    """Whether bytes without a known digest may be the object's. Every object but head is immutable."""
    run_id = reader.channel().run_id
    with contextlib.suppress(FormatError):
        if keys.slot_of(key) is not None or keys.shortcut_of(key) is not None:
            return record.decode(data, key, reader.trusted).record.run_id == run_id
        if keys.epoch_of(key) is not None:
            return documents.decode(data, documents.EpochDocument, key).run_id == run_id
    return False


def _replaced(inspection: Inspection, signer: Signer | None, damage: Damage) -> Repaired:
    """Store a replacement for one object if one is needed and possible."""
    try:
        outcome, how = _replace(inspection, signer, damage)
    except (FormatError, ChainError, ApplyError, ConfigError) as error:
        outcome, how = "left", f"no replacement could be stored: {error}"
    return Repaired(key=damage.key, problem=str(damage.problem), outcome=outcome, how=how)


def _replace(inspection: Inspection, signer: Signer | None, damage: Damage) -> tuple[str, str]:
    reader, slot, span = inspection.reader, keys.slot_of(damage.of), keys.shortcut_of(damage.of)
    if damage.key == keys.HEAD:
        if not inspection.lineage:
            return "not needed", "the channel has no version"
        version, run_id = inspection.records[inspection.lineage[0]].version, reader.channel().run_id
        head = Head(run_id=run_id, version=version.version, epoch=version.epoch, sha256=version.sha256)
        reader.store.put(keys.HEAD, documents.encode(head))
        return "bypassed", f"it names version {version} now"
    if keys.epoch_of(damage.key) is not None:
        return "not needed", "records name their epoch too"
    edge = inspection.shortcuts.get(damage.of) or (inspection.records.get(slot) if slot is not None else None)
    if edge is not None and inspection.usable(edge) and damage.key != damage.of:
        return "left", "the weights are readable without it; a copy of the channel (--from) may have it"
    if span is not None and span.base:
        return "not needed", "other chains reach its version"
    if span is not None:
        return _replace_anchor(inspection, signer, span.version)
    if slot is None:
        return "left", "its key has an unknown form"
    if edge is not None and edge.use_anchor and slot in inspection.reachable():
        return _replace_anchor(inspection, signer, slot.version)
    return _replace_record(inspection, signer, slot)


def _replace_record(inspection: Inspection, signer: Signer | None, slot: Slot) -> tuple[str, str]:
    """Store a compaction from the previous version to the first later one that is reachable without this
    record.
    """
    versions = inspection.lineage
    if not versions or slot.newness > versions[0].newness:
        return "left", "it was the newest; the publisher continues after it with full weights"
    if slot not in versions:
        return "not needed", f"version {versions[0].version} does not build on it"
    reached = inspection.reachable() & inspection.records.keys()
    readable = {each.version: each for each in versions if each in reached}
    after = [number for number in sorted(readable) if number >= slot.version]
    if not after:
        return "left", "no later version is readable; replicas recover at the publisher's next anchor"
    if slot.version - 1 not in readable:
        return "not needed", f"version {after[0]} is readable without it"
    if inspection.reachable([readable[slot.version - 1]], anchors=False) & {
        readable[number] for number in after
    }:
        return "not needed", "a compaction skips it"
    compaction = write_compaction(inspection.reader, slot.version - 1, after[0], signer=signer)
    inspection.shortcuts[compaction.key] = compaction
    return "bypassed", f"by {compaction.key}"


def _replace_anchor(inspection: Inspection, signer: Signer | None, version: int) -> tuple[str, str]:
    """Store an anchor of the newest readable version, unless an intact anchor of this or a later version
    exists.
    """
    reader = inspection.reader
    anchors = [each for each in inspection.edges() if each.use_anchor and inspection.usable(each)]
    newest = max((each.record.version for each in anchors), default=0)
    if newest >= version:
        return "not needed", f"there is an anchor of version {newest}"
    reached = inspection.reachable() & inspection.records.keys()
    readable = [slot for slot in inspection.lineage if slot in reached and slot.version >= version]
    if not readable:
        return "left", "its weights are lost; the publisher's next anchor replaces it"
    replica, identity = replica_at(reader, max(readable).version)
    made = write_anchor(reader, replica, model_files(reader, identity), signer=signer)
    inspection.shortcuts[made.key] = made
    return "bypassed", f"by {made.key}, an anchor of version {made.record.version}"
