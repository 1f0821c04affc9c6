"""Weights that are moved along a channel, one commit at a time: stage, commit, then confirm or roll back."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np
import torch

from deltasync import codec
from deltasync.channel import payloads
from deltasync.channel.documents import Version
from deltasync.channel.plan import goes_back
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.channel.threads import ahead
from deltasync.errors import CorruptDataError, DeltaSyncError, FingerprintMismatchError, MissingVersionError, StageError
from deltasync.live import CommitReport, LiveMemory, Staged, model_fingerprint
from deltasync.tensors import Patch
from deltasync.tensors.fold import fold_all

_FETCHED_AHEAD = 4  # records, while one is decoded
_HELD = 4  # times a tensor's elements may be held as patches that are not merged yet


@dataclasses.dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is ready to commit, with what it takes to check it."""

    way: Sequence[Stored]
    staged: Staged
    stage_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A version whose bits are live but not yet confirmed; what it takes to undo it."""

    staged: StagedVersion
    report: CommitReport


class Follower:
    """Live memory that follows a channel. Not thread-safe, but `stage`, which only reads it, may run in another thread.

    Attributes:
        version: The version whose bits are live, None if they are of none.
        settled: Whether it is known what the bits in live memory are. If not: audit them, then call `settle`.
        failed: Key of the record whose objects were missing or damaged when `stage` raised last; None if that was not why.
    """

    def __init__(self, reader: ChannelReader, memory: LiveMemory) -> None:
        self.reader = reader
        self.memory = memory
        self.version: Version | None = None
        self.failed: str | None = None
        self._fingerprint: str | None = None
        self.settled = True
        self._loaded: list[Stored] = []  # how the bits came that `load` wrote

    def identified(self, stored: Stored | None) -> None:
        """The bits in live memory were found to be this version's, or None's."""
        self.version = None if stored is None else stored.version
        self._fingerprint = None if stored is None else stored.record.fingerprint
        self.settled = True

    def settle(self, total: int) -> None:
        """Find out whose fault a failure was: the version's, or that of the bits it met, which are then of no version.

        `total` is the model's fingerprint, by an audit of all shards; -1 if copies differ.
        """
        if total < 0 or self._fingerprint != f"{total:016x}":
            self.version = self._fingerprint = None
        self.settled = True

    def doubt(self) -> None:
        """Something went wrong that may have left other bits than those of `version`."""
        self.settled = False

    def load(self, way: Sequence[Stored]) -> Version:
        """Take a way into host memory that nobody uses yet, so that nothing needs to be kept to undo it.

        What a version got wrong is loaded anew, up to the one before: if this raises, that is `version`, or None.

        Raises:
            StoreError, FormatError, MissingVersionError, StageError, FingerprintMismatchError: as `stage` and `confirm`.
        """
        self.failed = None
        try:
            self._load(way)
        except DeltaSyncError:
            if self.version is None and self._loaded:
                failed = self.failed
                self._load([*self._loaded])
                self.failed = failed
            raise
        return way[-1].version

    def _load(self, way: Sequence[Stored]) -> None:
        wanted: dict[str, int] = {}
        count = 0
        try:
            with contextlib.closing(self._fetched(way)) as fetched:
                for stored in way:
                    with self._blaming(stored), _map_out_of_memory(stored.record.version):
                        got = next(fetched)
                        self.version, self.settled = None, False
                        if stored.use_anchor:
                            self._loaded.clear()
                            self.memory.load(payloads.weights(self.reader, stored))
                        else:
                            patches = payloads.patches(self.reader, stored, self.memory.bits, self.memory.held, got)
                            wanted |= self.memory.patch(patches)
                    count += 1
        finally:
            if count and self._holds(way[count - 1], wanted):
                self.identified(way[count - 1])
                self._loaded += (dataclasses.replace(stored, data=None) for stored in way[:count])
        if self.version != way[-1].version:
            raise FingerprintMismatchError(f"The tensors of version {way[-1].record.version} are not its model.")

    def _holds(self, stored: Stored, wanted: Mapping[str, int]) -> bool:
        """Whether the fingerprints are these, and the model's that of a version."""
        found = self.memory.fingerprints
        right = all(found.get(name) == expected for name, expected in wanted.items())
        return right and f"{model_fingerprint(found):016x}" == stored.record.fingerprint

    def stage(self, way: Sequence[Stored]) -> StagedVersion:
        """Fetch, check, decode, merge and translate a way. Live weights are untouched.

        Raises:
            StoreError, ChainError, FormatError, StageError: retry, or take another way.
        """
        before = time.perf_counter()
        self.failed = None
        with _map_out_of_memory(way[-1].record.version):
            if goes_back(way):
                staged = self.memory.stage(self._undone(way[:-1]))
            else:
                streams = way[0].use_anchor and not any(self._needs_old(stored) for stored in way)
                staged = self.memory.stage(self._patched(way, 1 if streams or len(way) == 1 else 0))
        return StagedVersion(way, staged, time.perf_counter() - before)

    def _patches(
        self, stored: Stored, old: codec.OldBits, fetched: Iterator[Sequence[tuple[str, bytes]]] | None = None
    ) -> Iterator[tuple[Patch, int]]:
        with self._blaming(stored):
            got = None if fetched is None else next(fetched)
            yield from payloads.patches(self.reader, stored, old, self.memory.held, got)

    def _fetched(self, way: Sequence[Stored]) -> Generator[Sequence[tuple[str, bytes]], None, None]:
        return ahead(lambda stored: payloads.fetch(self.reader, stored), way, _FETCHED_AHEAD)

    @contextlib.contextmanager
    def _blaming(self, stored: Stored) -> Iterator[None]:
        """Note whose objects are missing or damaged."""
        try:
            yield
        except (MissingVersionError, StageError, CorruptDataError) as error:
            self.failed = stored.key
            # Decoding by the old bits also fails if those are not what they are taken for; an audit finds out.
            if isinstance(error, CorruptDataError) and self._needs_old(stored):
                self.settled = False
            raise

    def _needs_old(self, stored: Stored) -> bool:
        delta = stored.record.delta
        return delta is not None and codec.get(delta.codec).needs_old

    def _patched(self, way: Sequence[Stored], streamed: int) -> Iterator[tuple[Patch, int]]:
        """What records do together, by tensor, with its fingerprint; of the first `streamed`, 0 or 1, one tensor is held."""
        later, fingerprints = self._folded(way[streamed:])
        for stored in way[:streamed]:
            for patch, expected in self._patches(stored, self.memory.bits):
                if patch.name not in later:
                    yield patch, expected
                    continue
                for merged in _fold([patch, *later.pop(patch.name)]):
                    yield merged, fingerprints[patch.name]
        for name in list(later):
            for merged in _fold(later.pop(name)):
                yield merged, fingerprints[name]

    def _undone(self, way: Sequence[Stored]) -> Iterator[tuple[Patch, None]]:
        """What undoes records. They tell the fingerprints of tensors after them, not before: the model's has to do."""
        for patches in self._folded(way)[0].values():
            for merged in _fold(patches):
                if merged.absolute:
                    self.failed = way[0].key
                    raise MissingVersionError(f"{merged.name} was written as a whole since, which cannot be undone.")
                yield dataclasses.replace(merged, data=np.negative(merged.data)), None

    def _folded(self, way: Sequence[Stored]) -> tuple[dict[str, list[Patch]], dict[str, int]]:
        """Patches of each tensor, oldest first, and its fingerprint after the last."""
        done: dict[str, list[Patch]] = {}
        fingerprints: dict[str, int] = {}

        def old(name: str) -> np.ndarray:
            if not done.get(name):
                return self.memory.bits(name)
            bits_N = self.memory.gather(name)
            for patch in done[name]:
                patch.apply(bits_N)
            return bits_N

        with contextlib.closing(self._fetched(way)) as fetched:
            for stored in way:
                for patch, expected in self._patches(stored, old, fetched):
                    patches = done.setdefault(patch.name, [])
                    patches.append(patch)
                    if sum(each.changed for each in patches) > _HELD * self.reader.specs[patch.name].element_count:
                        patches[:] = _fold(patches)
                    fingerprints[patch.name] = expected
        return done, fingerprints

    def commit(self, staged: StagedVersion) -> CommittedVersion:
        """Write a staged version; follow it by `confirm` or `rollback`.

        Raises:
            StageError: live memory was written by someone else, or there is not enough of it; the bits are as before.
            CommitError: the write failed and could not be undone.
        """
        try:
            with _map_out_of_memory(staged.way[-1].record.version):
                return CommittedVersion(staged, self.memory.commit(staged.staged))
        except BaseException:
            self.doubt()
            raise

    def confirm(
        self, committed: CommittedVersion, fingerprints: Mapping[str, int] | None = None, total: int | None = None
    ) -> Version:
        """Compare fingerprints with the published ones, tensor by tensor and in total, and take the version as live.

        `fingerprints` are those of the named tensors, `total` the model's, over all shards; None if this memory holds all.

        Raises:
            FingerprintMismatchError: the bits are not the published ones; they were rolled back.
        """
        wanted = committed.staged.staged.fingerprints
        if fingerprints is None or total is None:
            fingerprints = self.memory.fingerprints
            total = model_fingerprint(fingerprints)
        wrong = [name for name, value in wanted.items() if value not in (None, fingerprints.get(name))]
        stored = committed.staged.way[-1]
        if wrong or f"{total:016x}" != stored.record.fingerprint:
            self.rollback(committed)
            self.settled = False
            where = f"in {', '.join(wrong[:5])}" if wrong else "in a tensor that this version does not change"
            now = "no version" if self.version is None else f"version {self.version.version}"
            raise FingerprintMismatchError(
                f"Version {stored.record.version} did not give the published bits {where}; rolled back to {now}."
            )
        self.version, self._fingerprint = stored.version, stored.record.fingerprint
        return self.version

    def rollback(self, committed: CommittedVersion) -> None:
        """Bring the bits from before a commit back."""
        self.memory.rollback(committed.report)


def _fold(patches: Sequence[Patch]) -> list[Patch]:
    """These patches of one tensor in one or two; in an empty one if all cancelled out."""
    first = patches[0]
    return fold_all(patches) or [Patch(first.name, np.empty(0, np.int32), first.data[:0], absolute=False)]


_MEMORY_IS_OUT = "can't allocate memory", "can't start new thread", "out of memory"
"""What torch, Python and CUDA, of memory on the host, say then in a RuntimeError."""


@contextlib.contextmanager
def _map_out_of_memory(version: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        panic = type(error).__module__ == "pyo3_runtime"  # safetensors' then, which is no Exception
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in _MEMORY_IS_OUT)
        if panic or short:
            raise StageError(f"Not enough memory for version {version}, the one before stays live: {error}") from error
        raise
