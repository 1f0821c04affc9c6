"""What to forget and what to prune: decisions over documents and listings that were read before. Pure: no I/O, no weights.

Versions are told apart by their slots, number and epoch: a damaged record has no other name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.keys import Slot
from deltasync.errors import ConfigError, MissingVersionError

Records = Mapping[Slot, Record | None]
"""What is in each slot; None where it is damaged."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which versions stay: those that any of these names. The newest version always stays.

    Attributes:
        last: How many of the newest versions.
        anchors: How many of the newest versions with an anchor.
        step_every: The versions whose trainer's step is a multiple of this.

    Raises:
        ConfigError: nothing was given, or a number below 1.
    """

    last: int | None = None
    anchors: int | None = None
    step_every: int | None = None

    def __post_init__(self) -> None:
        given = [number for number in (self.last, self.anchors, self.step_every) if number is not None]
        if not given:
            raise ConfigError("Say which versions to keep: the last ones, those with an anchor, or every N-th step.")
        if min(given) < 1:
            raise ConfigError("What to keep is counted from 1.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forgetting:
    """What `forget` does. Slots are ascending.

    Attributes:
        asked: Versions that were asked for, and the newest.
        leading: Those that lead to them.
        recent: Those that became dispensable less than the time of grace ago.
        versions: Versions to forget.
        folds: Keys of folds that start or end at a version that does not stay.
        keys: All objects to delete, in this order: at any moment the versions that are left can be read.
    """

    asked: list[Slot]
    leading: list[Slot]
    recent: list[Slot]
    versions: list[Slot]
    folds: list[str]
    keys: list[str]

    @property
    def kept(self) -> list[Slot]:
        """All versions that stay."""
        return sorted({*self.asked, *self.leading, *self.recent})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a channel holds.

    Attributes:
        stored_s: When each record and each fold was stored, by key; 0 where the store does not tell.
        announced: Versions whose anchor is announced, all of its files being listed -> when it was announced.
        folds: Keys of all folds.
    """

    records: Records
    stored_s: Mapping[str, float]
    announced: Mapping[Slot, float]
    folds: Collection[str] = ()

    def before(self, time_s: float) -> Holding:
        """What it held then of what it holds now."""
        records = {slot: record for slot, record in self.records.items() if was(self.stored_s[slot.key], time_s)}
        announced = {slot: stored_s for slot, stored_s in self.announced.items() if was(stored_s, time_s)}
        return Holding(records=records, stored_s=self.stored_s, announced=announced)

    def has_anchor(self, slot: Slot) -> bool:
        """Whether a reader can begin there."""
        record = self.records.get(slot)
        return slot in self.announced or (record is not None and record.anchor is not None)

    def leading_to(self, slot: Slot, passed: Collection[Slot] = ()) -> Iterator[Slot]:
        """What a reader without any weights goes by, the version first: back to the nearest anchor, or to `passed`.

        Raises:
            MissingVersionError: the way ends before.
        """
        at: Slot | None = slot
        while at not in passed:
            if at is None or (at not in self.records and at not in self.announced):
                raise MissingVersionError(
                    f"Version {slot.version} is to be kept, but cannot be read, because a version before it is not in the "
                    "channel. Nothing was forgotten. See `deltasync check`, or choose what to keep so that it goes."
                )
            yield at
            if self.has_anchor(at):
                return
            at = _base(self.records, at)


def line(records: Records) -> list[Slot]:
    """The newest version of the greatest epoch that has one, and all that it follows, newest first.

    Goes on below what was forgotten. Empty if no record of a version can be read.
    """
    readable = (slot for slot, record in records.items() if record is not None and record.is_version)
    newest = max(readable, key=lambda slot: slot.newness, default=None)
    slots = sorted(slot for slot, record in records.items() if record is None or record.is_version)
    found: list[Slot] = []
    while newest is not None:
        found.append(newest)
        base = _base(records, newest)
        if base not in records:
            while slots and (slots[-1].version >= newest.version or slots[-1].epoch > newest.epoch):
                slots.pop()
            base = slots[-1] if slots else None
        newest = base
    return found


def _base(records: Records, slot: Slot) -> Slot | None:
    """What a version follows; of a damaged one, what is likely."""
    record = records[slot]
    if record is not None:
        return None if record.base is None else record.base.slot
    return max((each for each in records if each.version == slot.version - 1 and each.epoch <= slot.epoch), default=None)


def forgetting(holding: Holding, keep: Keep, since_s: float) -> Forgetting:
    """Decide what to forget. Seals stay, and so do damaged records that nothing follows in their epoch: they may be seals.

    What became dispensable after `since_s` stays too: something newer made it so when that was stored. Infinity for nothing.

    Raises:
        MissingVersionError: a version that stays cannot be read as it is, so that forgetting could only make it worse.
    """
    records = holding.records
    asked = _asked(holding, keep)
    needed: set[Slot] = set()
    for slot in asked:
        needed.update(holding.leading_to(slot, needed))
    before = holding.before(since_s)
    recent = {slot for slot in records if slot not in before.records}
    past = Holding(records=records, stored_s=holding.stored_s, announced=before.announced)
    since: set[Slot] = set()
    for slot in {*_asked(before, keep), *recent}:
        with contextlib.suppress(MissingVersionError):
            since.update(past.leading_to(slot, since))
    kept = (needed | since) & records.keys()
    last = {slot.epoch: slot for slot in sorted(records)}
    gone = {
        slot
        for slot, record in records.items()
        if slot not in kept and (record.is_version if record is not None else last[slot.epoch] != slot)
    }
    versions = {slot for slot, record in records.items() if record is not None and record.is_version} & kept
    folds = _folds_to_forget(holding, {slot.version for slot in needed | since}, since_s)
    order = [(slot.version, slot.epoch, 1, slot.key) for slot in gone]
    order += [(span.version, "", 0, key) for key, span in folds.items()]
    return Forgetting(
        asked=sorted(asked),
        leading=sorted((needed & versions) - asked),
        recent=sorted(versions - needed),
        versions=sorted(gone),
        folds=sorted(folds),
        keys=[key for *_, key in sorted(order, reverse=True)],
    )


def _folds_to_forget(holding: Holding, kept: Collection[int], since_s: float) -> dict[str, keys.Span]:
    """By numbers: a fold may be damaged, and of forks more than need be stay."""
    newest = max(kept, default=0)
    spans = {key: span for key in holding.folds if (span := keys.fold_of(key)) is not None}
    return {
        key: span
        for key, span in spans.items()
        if span.version <= newest
        and not {span.base or span.version, span.version}.issubset(kept)
        and was(holding.stored_s[key], since_s)
    }


def was(stored_s: float, time_s: float) -> bool:
    """Whether it was there at that time, as far as is known."""
    return time_s == math.inf or 0 < stored_s <= time_s


def _asked(holding: Holding, keep: Keep) -> set[Slot]:
    versions = line(holding.records)
    asked = set(versions[: keep.last or 1])
    if keep.anchors is not None:
        asked.update([slot for slot in versions if holding.has_anchor(slot)][: keep.anchors])
    if keep.step_every is not None:
        for slot in versions:
            record = holding.records[slot]
            if record is not None and record.step is not None and record.step % keep.step_every == 0:
                asked.add(slot)
    return asked


class References:
    """The files that records and folds, None where damaged, name, and those that an author may still be about to name."""

    def __init__(self, records: Records, folds: Mapping[str, Record | None]) -> None:
        found = [record for record in (*records.values(), *folds.values()) if record is not None]
        self._keys = {file.key for record in found for file in record.files}
        self._folders = {record.anchor.directory for record in found if record.anchor is not None}
        self._damaged = {slot for slot, record in records.items() if record is None}
        versions = {slot: record for slot, record in records.items() if record is not None and record.is_version}
        anchored = [slot for slot, record in versions.items() if record.anchor is not None]
        for key, fold in folds.items():
            span = keys.fold_of(key)
            assert span is not None
            if fold is None:
                self._damaged.add(Slot(span.version, span.author))
            elif fold.anchor is not None:
                anchored.append(Slot(span.version, span.author))
        self._last = {slot.epoch: slot.version for slot in sorted(versions)}  # version of each epoch
        self._anchors = {slot.epoch: slot.version for slot in sorted(anchored)}  # last anchor of each author
        self._newest_epoch = max(self._last, default="")

    def __contains__(self, key: str) -> bool:
        """Whether a document names the file, or may: a damaged one in the same slot. All in an anchor's folder is of it."""
        folder = "/".join(key.split("/")[:2])
        return key in self._keys or folder in self._folders or keys.file_of(key) in self._damaged

    def under_way(self, key: str) -> bool:
        """Whether the author of a file may still name it, however old it is: nobody has succeeded it yet."""
        of = keys.file_of(key)
        assert of is not None
        last = self._anchors if key.startswith(keys.ANCHORS) else self._last
        return of.epoch >= self._newest_epoch and of.version > last.get(of.epoch, 0)
