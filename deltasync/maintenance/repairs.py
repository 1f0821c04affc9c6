"""Repair a channel: put lost bytes back, or store a way around them. The publisher may run meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

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
from deltasync.following import Replica
from deltasync.maintenance.checks import Damage, Examined
from deltasync.maintenance.compaction import write_anchor, write_compaction
from deltasync.maintenance.copies import model_files
from deltasync.maintenance.retention import line
from deltasync.maintenance.scan import Progress, quiet
from deltasync.stores import open_store

logger = logging.getLogger(__name__)

Source = Callable[[str, str | None, int], bytes | None]
"""Returns the bytes of (key, sha256 or None, most bytes), None if it has none. They must be checked."""

_ROUNDS = 3  # a record that is put back may name files that are missing too


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """What was done about one object.

    Attributes:
        problem: What is wrong with it.
        outcome: `put back`; `bypassed`: a replacement was stored; `not needed`: another chain leads past it; `left`: nothing
            can be done now.
    """

    key: str
    problem: str
    outcome: str
    how: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """What `repair` did; `lost` are versions in the channel that still cannot be reached."""

    objects: list[Repaired]
    lost: list[int]

    @property
    def exit_code(self) -> int:
        """0 if every version can be reached and no object was left as it is."""
        return MissingVersionError.exit_code if self.lost or any(each.outcome == "left" for each in self.objects) else 0


def repair(
    reader: ChannelReader,
    *,
    source: Source | None = None,
    replay: bool = True,
    signer: Signer | None = None,
    progress: Progress = quiet,
) -> Repair:
    """Put back what is missing or damaged from `source`, or store a way around it. Nothing else is deleted or replaced.

    The way around is a compaction, or a newer anchor in the place of a damaged one, from bits that can still be read. If
    there are none, the object is left for the publisher's next anchor. `reader` must be fresh, since it remembers
    channel.json; for `source` see `source_of`. Without `replay` only the sha256 of each file is checked, and nothing is
    applied.

    Raises:
        NotPublishedError, FormatError: channel.json is missing or damaged, and `source` does not have it.
        ConfigError: the channel is signed and there is no `signer`.
        StoreError: the store failed; what was repaired until then stays.
    """
    objects = _restore_channel(reader, source)
    signing.require_signer(signer, reader.signed)
    for _ in range(_ROUNDS):
        examined = Examined(reader, progress)
        if replay:
            examined.replay(progress)
        else:
            examined.read_files(progress)
        examined.conclude()
        tried = [] if source is None else [_put_back(reader, source, damage) for damage in examined.damages.values()]
        put_back = [each for each in tried if each is not None]
        objects += put_back
        if not put_back:
            break
    bypass = _Bypass(reader, examined, signer, progress)
    objects += [bypass.around(damage) for damage in list(examined.damages.values())]
    lost = examined.versions.keys() - examined.reached()
    return Repair(objects=objects, lost=sorted(slot.version for slot in lost))


def source_of(where: str) -> Source:
    """Return where to get lost bytes: a copy of the channel, or a directory of files named by sha256 (a node's cache).

    Raises:
        ConfigError: it is neither a URL nor a directory.
    """
    directory = Path(where)
    if "://" in where or (directory / keys.CHANNEL).is_file():
        store = open_store(where if "://" in where else directory.absolute().as_uri())

        def from_copy(key: str, sha256: str | None, most_bytes: int) -> bytes | None:
            try:
                return store.read(key, most_bytes)
            except (StoreError, CorruptDataError) as error:
                logger.info("%s cannot be read from %s: %s", key, store.url, error)
                return None

        return from_copy
    if not directory.is_dir():
        raise ConfigError(f"{where} is neither the URL of a copy of the channel nor a directory.")

    def by_digest(key: str, sha256: str | None, most_bytes: int) -> bytes | None:
        path = directory / (sha256 or "-")
        return path.read_bytes() if path.is_file() and path.stat().st_size <= most_bytes else None

    return by_digest


def _restore_channel(reader: ChannelReader, source: Source | None) -> list[Repaired]:
    try:
        reader.channel()
    except (FormatError, NotPublishedError) as error:
        data = None if source is None else source(keys.CHANNEL, None, documents.CHANNEL_BYTES)
        if data is None or not _is_channel(reader, data):
            kind = NotPublishedError if isinstance(error, NotPublishedError) else CorruptDataError
            raise kind(
                f"{error} Only a copy of the channel (--from) has the bytes of channel.json, or a reader that runs."
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
            data = reader.store.read(slot.key, record.most_bytes(slot.key, channel.specs))
            return record.decode(data, slot.key, reader.trusted).record.run_id == channel.run_id
    return not slots


def _put_back(reader: ChannelReader, source: Source, damage: Damage) -> Repaired | None:
    """Store the bytes that an object must have under its key; None if the source does not have them."""
    key, sha256 = damage.key, damage.sha256
    data = source(key, sha256, max(record.most_bytes(key, reader.specs), record.most_payload_bytes(reader.specs)))
    if data is None or not (_may_be(reader, key, data) if sha256 is None else sha256_hex(data) == sha256):
        return None
    reader.store.put(key, data)
    return Repaired(key=key, problem=str(damage.problem), outcome="put back", how="its bytes were there")


def _may_be(reader: ChannelReader, key: str, data: bytes) -> bool:
    """Whether bytes whose digest nothing names can be those of the object: only head ever changes."""
    run_id = reader.channel().run_id
    with contextlib.suppress(FormatError):
        if keys.slot_of(key) is not None or keys.shortcut_of(key) is not None:
            return record.decode(data, key, reader.trusted).record.run_id == run_id
        if keys.epoch_of(key) is not None:
            return documents.decode(data, documents.EpochDocument, key).run_id == run_id
    return False


class _Bypass:
    """Stores ways around objects that cannot be put back."""

    def __init__(self, reader: ChannelReader, examined: Examined, signer: Signer | None, progress: Progress) -> None:
        self._reader, self._examined, self._signer, self._progress = reader, examined, signer, progress
        versions = line(examined.documents())
        self._newest = versions[0] if versions else None
        self._line = set(versions)

    def around(self, damage: Damage) -> Repaired:
        """Do what can be done about one object now."""
        try:
            outcome, how = self._around(damage)
        except (FormatError, ChainError, ApplyError) as error:
            outcome, how = "left", f"no way around it could be stored: {error}"
        return Repaired(key=damage.key, problem=str(damage.problem), outcome=outcome, how=how)

    def _around(self, damage: Damage) -> tuple[str, str]:
        examined, slot, span = self._examined, keys.slot_of(damage.of), keys.shortcut_of(damage.of)
        if damage.key == keys.HEAD:
            if self._newest is None:
                return "not needed", "there is no version to name"
            version, run_id = examined.records[self._newest].version, self._reader.channel().run_id
            head = Head(run_id=run_id, version=version.version, epoch=version.epoch, sha256=version.sha256)
            self._reader.store.put(keys.HEAD, documents.encode(head))
            return "bypassed", f"it names version {version} now"
        if keys.epoch_of(damage.key) is not None:
            return "not needed", "records also tell who opened the channel"
        edge = examined.shortcuts.get(damage.of) or (examined.records.get(slot) if slot is not None else None)
        if edge is not None and examined.usable(edge) and damage.key != damage.of:
            return "left", "the weights can be read without it; a copy of the channel (--from) may have it"
        if span is not None:
            return self._around_anchor(span.version) if span.base == 0 else ("not needed", "other ways lead there")
        if slot is None:
            return "left", "its key does not tell what it is"
        if edge is not None and edge.use_anchor and slot in examined.reached():
            return self._around_anchor(slot.version)
        return self._around_record(slot)

    def _around_record(self, slot: Slot) -> tuple[str, str]:
        """Store a compaction from the version before to the first one after it that can be read by another way."""
        examined = self._examined
        reached = examined.reached()
        if self._newest is None or slot.newness > self._newest.newness:
            return "left", "it was the newest; the publisher continues after it with full weights"
        if slot not in self._line:
            return "not needed", f"version {self._newest.version} does not follow it"
        whole = {each.version: each for each in self._line & reached & examined.records.keys()}
        after = [number for number in sorted(whole) if number >= slot.version]
        if not after:
            return "left", "no later version can be read; the publisher's next anchor leads on"
        if slot.version - 1 not in whole:
            return "not needed", f"version {after[0]} can be read without it"
        if examined.reached([whole[slot.version - 1]], nothing=False) & {whole[number] for number in after}:
            return "not needed", "a compaction leads around it"
        compaction = write_compaction(self._reader, slot.version - 1, after[0], signer=self._signer, progress=self._progress)
        examined.shortcuts[compaction.key] = compaction
        return "bypassed", f"by {compaction.key}"

    def _around_anchor(self, version: int) -> tuple[str, str]:
        """Store an anchor of the newest version that can be read, unless there is one that is not older than this."""
        examined, reached = self._examined, self._examined.reached()
        anchors = [each for each in examined.edges() if each.use_anchor and examined.usable(each)]
        newer = max((each.record.version for each in anchors), default=0)
        if newer >= version:
            return "not needed", f"there is an anchor of version {newer}"
        there = [slot for slot in self._line & reached & examined.records.keys() if slot.version >= version]
        if not there:
            return "left", "its weights cannot be read any more; the publisher's next anchor takes its place"
        replica = Replica(self._reader)
        replica.sync(max(there).version)
        assert replica.identity is not None
        beside = model_files(self._reader, replica.identity)
        made = write_anchor(self._reader, replica, beside, signer=self._signer, progress=self._progress)
        examined.shortcuts[made.key] = made
        return "bypassed", f"by {made.key}, an anchor of version {made.record.version}"
