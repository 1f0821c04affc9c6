"""Weights that are moved along a channel, one commit at a time: stage, commit, then confirm or roll back."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set

import numpy as np
import torch

from deltasync import codec, limits
from deltasync.channel import payloads
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    CorruptDataError,
    FingerprintMismatchError,
    MissingVersionError,
    StageError,
)
from deltasync.live import LiveMemory, Prints, Staged, model_fingerprint
from deltasync.tensors import Changed, Delta, Region
from deltasync.tensors.delta import merge
from deltasync.threads import ahead


@dataclasses.dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is ready to commit. After the commit it holds the changes that undo it.

    Attributes:
        whole: New bits, or changes, of the tensors that `LiveWeights.complete` keeps whole, and of `reported`.
    """

    chain: Sequence[StoredRecord]
    staged: Staged
    whole: Delta | Mapping[str, np.ndarray]
    stage_s: float


class LiveWeights:
    """Live memory that follows a channel. Not thread-safe, but `stage`, which only reads it, may run in
    another thread.

    Attributes:
        version: The version whose bits are live; None if they are of no version.
        settled: Whether it is known which bits are live. If not, call `settle`.
        progressed_s: When `stage` last finished a tensor or a file, by `time.monotonic`.
        reported: Tensors of which `StagedVersion.whole` has the new bits, or changes; their memory is on the host.
    """

    def __init__(self, reader: ChannelReader, memory: LiveMemory) -> None:
        self.reader = reader
        self.memory = memory
        self.version: VersionId | None = None
        self.progressed_s = 0.0
        self.reported: Set[str] = frozenset()
        self._fingerprint: str | None = None
        self.settled = True
        # of `version`: the bits of tensors of which memory has a part
        self._whole: dict[str, np.ndarray] = {}
        # a version that was rolled back because of a tie, and why
        self._untied: tuple[VersionId, str] | None = None

    def identified(self, stored: StoredRecord | None) -> None:
        """Note that the live bits are those of a version, or of none."""
        self.version = None if stored is None else stored.version
        self._fingerprint = None if stored is None else stored.record.fingerprint
        self.settled = True

    def settle(self, total: int | None = None) -> None:
        """Find out whether the live bits are still those of `version`; if not, it becomes None.

        `total` is the model's fingerprint by an audit of all shards, -1 if copies differ. By default this
        memory, which then holds the whole model, is audited.
        """
        if total is None:
            self.memory.audit()
            total = model_fingerprint(self.memory.fingerprints)
        if self._fingerprint != f"{total:016x}":
            self.version = self._fingerprint = None
        self.settled = True

    def complete(self, name: str, bits_N: np.ndarray) -> None:
        """Keep a whole copy of a tensor, with its bits in `version`, although memory holds a part of it:
        decoding needs it.

        `bits_N` is flat and unsigned, and changes with each version from now on.
        """
        self._whole[name] = bits_N

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion:
        """Fetch, check, decode, merge and translate the versions of a chain. Live weights are untouched.

        Raises:
            StoreError, ChainError, FormatError, StageError: retry, or take another chain.
            StageError: `complete` its `tensors` first, if it names some; else the version was committed before,
                and rolled back because tied tensors differ in it.
        """
        if self._untied is not None and self._untied[0] == chain[-1].version:
            raise StageError(self._untied[1])
        before = time.perf_counter()
        whole: Delta | Mapping[str, np.ndarray]
        with map_out_of_memory(chain[-1].record.version):
            # Deltas before full weights do not matter; a writer that starts over stores full weights between
            # deltas.
            first = max((at for at, stored in enumerate(chain) if stored.use_anchor), default=None)
            if first is not None:
                staged, whole = self._stage_weights(chain[first:])
            else:
                changed = self._changed(chain)
                staged = self.memory.stage(changed)
                whole = changed.delta if self._whole or self.reported else {}
        return StagedVersion(chain, staged, whole, time.perf_counter() - before)

    def _stage_weights(self, chain: Sequence[StoredRecord]) -> tuple[Staged, dict[str, np.ndarray]]:
        """Stage full weights and the deltas after them, tensor by tensor, so that only one of them is
        held.
        """
        whole: dict[str, np.ndarray] = {}
        later: Changed | None = None
        if chain[1:]:
            first = (
                {}
                if not any(map(_needs_old, chain))
                else {name: bits_N for name, bits_N, _ in self._weights(chain[0])}
            )
            later = self._changed(chain[1:], first.__getitem__)

        def weights() -> Iterator[tuple[str, np.ndarray, int | None]]:
            for name, bits_N, expected in self._weights(chain[0]):
                digest: int | None = expected
                if later is not None and name in later.fingerprints:
                    bits_N, digest = bits_N.copy(), later.fingerprints[name]
                    later.delta.apply(name, bits_N)
                if name in self._whole or name in self.reported:  # a copy, so as not to hold all of the file
                    whole[name] = bits_N.copy()
                self.progressed_s = time.monotonic()
                yield name, bits_N, digest

        return self.memory.stage_weights(weights()), whole

    def _weights(self, stored: StoredRecord) -> Iterator[tuple[str, np.ndarray, int]]:
        with self.blaming(stored):
            yield from payloads.weights(self.reader, stored)

    def fetched(self, chain: Sequence[StoredRecord]) -> Generator[Sequence[tuple[str, bytes]], None, None]:
        """Yield the payloads of each record; the next ones are fetched while one is used."""
        return ahead(lambda stored: payloads.fetch(self.reader, stored), chain, limits.FETCHED_AHEAD)

    @contextlib.contextmanager
    def blaming(self, stored: StoredRecord) -> Iterator[None]:
        """Note in an error that the objects of `stored` are missing or damaged."""
        try:
            yield
        except (MissingVersionError, StageError, CorruptDataError) as error:
            error.key = stored.key
            # Decoding from the old bits also fails if those are wrong; an audit finds out.
            if isinstance(error, CorruptDataError) and _needs_old(stored):
                self.settled = False
            raise

    def _changed(
        self, chain: Sequence[StoredRecord], first: Callable[[str], np.ndarray] | None = None
    ) -> Changed:
        """Return the merged changes of records, applied to the live bits or to those of `first`."""
        done: list[Delta] = []
        fingerprints: dict[str, int] = {}

        def wanted(name: str) -> Sequence[Region] | None:
            return None if name in self._whole else self.memory.held(name)

        def old(name: str) -> np.ndarray:
            bits_N = (
                (self._whole[name] if name in self._whole else self.memory.bits(name))
                if first is None
                else first(name)
            )
            if done:
                bits_N = bits_N.copy()
                for delta in done:
                    delta.apply(name, bits_N)
            return bits_N

        # Deltas of several versions are merged, on the host.
        decoder = self.memory.decoder if len(chain) == 1 and first is None and not self._whole else None
        with contextlib.closing(self.fetched(chain)) as fetched:
            for stored in chain:
                with self.blaming(stored):
                    got = next(fetched)
                    delta, digests = payloads.delta(
                        self.reader, stored, old, wanted if self.memory.wanted else None, got, decoder
                    )
                done.append(delta)
                fingerprints |= digests
                if sum(each.changed for each in done) > limits.UNMERGED * delta.layout.element_count:
                    done = [merge(done)]
                self.progressed_s = time.monotonic()
        return Changed(merge(done), fingerprints)

    def commit(self, staged: StagedVersion) -> StagedVersion:
        """Write a staged version and return it; call `confirm` or `rollback` next.

        Raises:
            StageError: live memory was written by someone else, or there is too little memory; the bits are
                as before.
            CommitError: the write failed and could not be undone.
        """
        try:
            with map_out_of_memory(staged.chain[-1].record.version):
                self.memory.commit(staged.staged)
        except BaseException:
            self.settled = False
            raise
        return staged

    def confirm(self, committed: StagedVersion, found: Prints | None = None) -> VersionId:
        """Compare fingerprints with the published ones, of each tensor and of the model, and set `version`.

        `found` are those over all shards. By default this memory holds the whole model.

        Raises:
            FingerprintMismatchError: the bits are not the published ones; they were rolled back.
        """
        wrong, total = self.memory.compare(committed.staged, found)
        stored = committed.chain[-1]
        if wrong or f"{total:016x}" != stored.record.fingerprint:
            self.rollback(committed)
            self.settled = False
            self._refuse_untied(stored, committed.staged.fingerprints, wrong)
            where = f"in {', '.join(wrong[:5])}" if wrong else "in a tensor that this version does not change"
            now = "no version" if self.version is None else f"version {self.version.version}"
            raise FingerprintMismatchError(
                f"Version {stored.record.version} did not give the published bits {where}; rolled back to "
                f"{now}."
            )
        for name, bits_N in self._whole.items():
            if isinstance(committed.whole, Delta):
                committed.whole.apply(name, bits_N)
            else:
                bits_N[:] = committed.whole[name]
        self.version, self._fingerprint = stored.version, stored.record.fingerprint
        return self.version

    def _refuse_untied(
        self, stored: StoredRecord, wanted: Mapping[str, int | None], wrong: Sequence[str]
    ) -> None:
        """Raise StageError if nothing but a tie can be why a version has not given its fingerprints."""
        ties = self.memory.ties
        unlike = wrong or [
            name
            for name, other in ties.items()
            if name in wanted and wanted[name] is None is not wanted[other]
        ]
        if not unlike or not ties.keys() >= {*unlike}:
            return
        said = (
            f"{unlike[0]} and {ties[unlike[0]]} are one tensor in the model, and differ in version "
            f"{stored.record.version}: "
            "serve a checkpoint of a model that does not tie them."
        )
        self._untied = stored.version, said
        raise StageError(said)

    def rollback(self, committed: StagedVersion) -> None:
        """Bring back the bits from before a commit."""
        self.memory.rollback(committed.staged)


def _needs_old(stored: StoredRecord) -> bool:
    delta = stored.record.delta
    return delta is not None and codec.get(delta.codec).needs_old


_MEMORY_IS_OUT = "can't allocate memory", "can't start new thread", "out of memory"
"""Texts of torch, Python and CUDA in a RuntimeError when the host has too little memory."""


@contextlib.contextmanager
def map_out_of_memory(version: int) -> Iterator[None]:
    """Raise StageError, which names the version, where the host has too little memory."""
    try:
        yield
    except BaseException as error:
        panic = type(error).__module__ == "pyo3_runtime"  # raised by safetensors; it is no Exception
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            said in str(error) for said in _MEMORY_IS_OUT
        )
        if panic or short:
            raise StageError(
                f"Not enough memory for version {version}, the one before stays live: {error}"
            ) from error
        raise
