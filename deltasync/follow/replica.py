"""A replica: follows a channel and keeps weights at its newest version, bit for bit.

`Follower` is the state machine that every replica shares, over any `LiveMemory`; `Replica` is the one whose weights lie
in host memory, the reference for every other one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from deltasync import chain, checkpoint, codec, fingerprint
from deltasync.bits import bits_of
from deltasync.config import ReaderSettings
from deltasync.errors import (
    CorruptDataError,
    FingerprintMismatchError,
    HeadRewindError,
    MissingVersionError,
    NotPublishedError,
    StageError,
)
from deltasync.fold import fold_all
from deltasync.live import CommitReport, LiveMemory, Parts, Staged, model_fingerprint
from deltasync.manifest import Head, Manifest
from deltasync.poll import Poll
from deltasync.reader import ChannelReader, FetchedStep, ahead
from deltasync.stores import Store, open_store
from deltasync.types import Patch

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_STEPS_AHEAD = 4  # being fetched while one is decoded
_BATCH = 64  # steps that are merged into one commit
_BATCH_BYTES = 1 << 28  # of their payloads; what they decode to is held in memory
_HELD = 4  # times a tensor's elements may be held as patches that are not merged yet
_DETOURS = 8  # taken in one go; the next call may take more


@dataclasses.dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that is ready to commit, with what it takes to check it."""

    manifest: Manifest
    steps: Sequence[chain.Step]
    staged: Staged
    stage_s: float

    @property
    def use_anchor(self) -> bool:
        """Whether it is full weights."""
        return self.steps[0].use_anchor

    @property
    def payload_bytes(self) -> int:
        """Bytes that were downloaded for it."""
        return sum(step.payload_bytes for step in self.steps)


@dataclasses.dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A version whose bits are live but not yet confirmed; what it takes to undo it."""

    staged: StagedVersion
    report: CommitReport
    parts_before: Parts


class Follower:
    """Moves live memory along a channel, one version at a time: plan, stage, commit, then confirm or roll back.

    Not thread-safe, except that `stage` may run in another thread than the one that owns the live weights, because it
    only reads them.

    Attributes:
        version: The version whose bits are live, None before the first.
        suspect: The version whose commit did not give the published bits and was rolled back, None if all went well.
    """

    def __init__(self, reader: ChannelReader, memory: LiveMemory) -> None:
        self.reader = reader
        self.memory = memory
        self.version: int | None = None
        self.suspect: int | None = None
        self._reached = 0  # the version that was confirmed last, also while it is not known what the live bits are
        self._settled = True
        self._singly_to = 0

    @property
    def settled(self) -> bool:
        """Whether it is known what the bits in live memory are. If not: audit them, then call `settle`."""
        return self._settled

    def identify(self, head: Head, total: int) -> int | None:
        """Find out which version the bits in live memory are, so that nothing needs to be loaded.

        Looks at head's version, those that its manifest names, and that of its anchor; sets and returns `version`.

        Args:
            head: Of the channel.
            total: Fingerprint of the model, of an audit of all shards.
        """
        newest = self.reader.manifest(head.version, head.manifest_sha256)
        fingerprints = {link.fingerprint: link.version for link in newest.chain} | {newest.fingerprint: newest.version}
        if newest.anchor_version not in fingerprints.values():
            with contextlib.suppress(MissingVersionError):
                fingerprints[self.reader.manifest(newest.anchor_version).fingerprint] = newest.anchor_version
        self.version = fingerprints.get(fingerprint.to_hex(total)) if total >= 0 else None
        self._reached = self.version or 0
        self.suspect, self._settled = None, True
        return self.version

    def plan(self, head: Head, version: int | None = None) -> list[chain.Step]:
        """Steps to `version` (default: head's), none if it is already live. Call it settled.

        After a rollback that was the version's fault, the version is only passed by on an anchor after it.

        Raises:
            HeadRewindError: head is older than what is or was live, and no version was asked for.
            FingerprintMismatchError: only the rolled back version leads there.
        """
        if version is None and head.version < self._reached:
            raise HeadRewindError(
                f"Head names version {head.version}, but version {self._reached} is live. Keeping it; "
                "if the channel was restored from a backup, restart the replica."
            )
        assert self._settled
        steps = self.reader.plan(self.version, head, version)
        if self.suspect is not None and any(step.version == self.suspect for step in steps):
            steps = self.reader.plan(None, head, version)
            if any(step.version == self.suspect for step in steps):
                raise FingerprintMismatchError(
                    f"Version {self.suspect} does not give the bits that it promises; version {self.version} stays live "
                    "until an anchor after it is published."
                )
        return steps

    def settle(self, total: int) -> None:
        """Find out whose fault a failure was: the version's, or that of the bits it met, which are then of no version.

        Args:
            total: Fingerprint of the model, of an audit of all shards.
        """
        known = self.version is not None and total >= 0
        if not known or self.reader.manifest(self.version).fingerprint != fingerprint.to_hex(total):  # type: ignore[arg-type]
            self.version = self.suspect = None
        self._settled = True

    def batch(self, steps: Sequence[chain.Step]) -> Sequence[chain.Step]:
        """The first of planned steps that are worth one commit: an anchor alone, or deltas as far as memory allows."""
        most = 1 if (self.version or 0) < self._singly_to else _BATCH
        payload_bytes = 0
        for count, step in enumerate(steps):
            payload_bytes += step.payload_bytes
            if count and (step.use_anchor or steps[0].use_anchor or count >= most or payload_bytes > _BATCH_BYTES):
                return steps[:count]
        return steps

    def stage(self, *steps: chain.Step) -> StagedVersion:
        """Fetch, check, decode, merge and translate steps that follow each other. Live weights are untouched.

        Raises:
            StoreError, ChainError, FormatError, StageError: nothing changed; retry, or plan again.
        """
        before = time.perf_counter()
        last = steps[-1]
        with _saying_memory_is_out(last.version):
            patches = self._patches(steps[0], self.memory.gather) if len(steps) == 1 else self._merged(steps)
            staged = self.memory.stage(patches)
        version = self.reader.manifest(last.version, last.manifest_sha256)
        return StagedVersion(version, steps, staged, time.perf_counter() - before)

    def _patches(
        self, step: chain.Step, old: codec.OldBits, fetched: Iterator[FetchedStep] | None = None
    ) -> Iterator[tuple[Patch, int]]:
        try:
            yield from self.reader.patches(step, old, self.memory.held, None if fetched is None else next(fetched))
        except MissingVersionError:
            self.reader.distrust(step)
            raise
        except CorruptDataError:
            # Decoding by the old bits also fails if those are not what they are taken for; the next plan finds out.
            if step.fold is not None:
                self.reader.distrust(step)
            elif not step.use_anchor and self._decodes_by_old_bits(step):
                self._settled = False
            raise

    def _decodes_by_old_bits(self, step: chain.Step) -> bool:
        delta = self.reader.manifest(step.version, step.manifest_sha256).delta
        return delta is not None and codec.get(delta.codec).needs_old

    def _merged(self, steps: Sequence[chain.Step]) -> Iterator[tuple[Patch, int]]:
        """What several steps do together, tensor by tensor, with the fingerprint after the last."""
        done: dict[str, list[Patch]] = {}
        fingerprints: dict[str, int] = {}

        def old(name: str) -> np.ndarray:
            bits_N = self.memory.gather(name)
            for patch in done.get(name, ()):
                patch.apply(bits_N)
            return bits_N

        with contextlib.closing(ahead(self.reader.fetch_step, steps, _STEPS_AHEAD)) as fetched:
            for step in steps:
                for patch, expected in self._patches(step, old, fetched):
                    patches = done.setdefault(patch.name, [])
                    patches.append(patch)
                    if sum(each.changed for each in patches) > _HELD * self.reader.specs[patch.name].element_count:
                        patches[:] = _folded(patches)
                    fingerprints[patch.name] = expected
        for name, expected in fingerprints.items():
            for patch in _folded(done.pop(name)):
                yield patch, expected

    def commit(self, staged: StagedVersion) -> CommittedVersion:
        """Write a staged version; follow it by `confirm` or `rollback`.

        Raises:
            StageError: live memory was written by someone else, or there is not enough of it; the bits are as before.
            CommitError: the write failed and could not be undone.
        """
        before = dict(self.memory.parts)
        try:
            with _saying_memory_is_out(staged.manifest.version):
                return CommittedVersion(staged, self.memory.commit(staged.staged), before)
        except BaseException:
            self.doubt()
            raise

    def confirm(
        self, committed: CommittedVersion, fingerprints: Mapping[str, int] | None = None, total: int | None = None
    ) -> int:
        """Compare the fingerprints with the published ones, tensor by tensor and in total, and take the version as live.

        Args:
            committed: What was committed last.
            fingerprints: Of the tensors that the version names, over all shards; None if this memory holds the whole model.
            total: Of the model, over all shards.

        Raises:
            FingerprintMismatchError: the bits are not the published ones; they were rolled back.
        """
        wanted = committed.staged.staged.fingerprints
        if fingerprints is None or total is None:
            fingerprints = self.memory.fingerprints
            total = model_fingerprint(fingerprints)
        wrong = [name for name in wanted if wanted[name] != fingerprints.get(name)]
        manifest = committed.staged.manifest
        if wrong or f"{total:016x}" != manifest.fingerprint:
            self.rollback(committed)
            self._settled = False
            steps = committed.staged.steps
            if len(steps) > 1:
                self._singly_to = manifest.version  # to find out which of them it is
            elif steps[0].fold is None:
                self.suspect = manifest.version
            else:
                self.reader.distrust(steps[0])
            where = f"in {', '.join(wrong[:5])}" if wrong else "in a tensor that this version does not change"
            raise FingerprintMismatchError(
                f"Version {manifest.version} did not give the published bits {where}; rolled back to version {self.version}."
            )
        self.version = self._reached = manifest.version
        if self.suspect is not None and self.version > self.suspect:
            self.suspect = None
        return self.version

    def doubt(self) -> None:
        """Something went wrong that may have left other bits than those of `version`."""
        self._settled = False

    def rollback(self, committed: CommittedVersion) -> None:
        """Bring the bits from before a commit back."""
        self.memory.rollback(committed.report, committed.parts_before)

    def advance(self, head: Head, version: int | None = None) -> int:
        """Stage, commit and confirm every step to `version` (default: head's).

        A step that does not give the published bits or whose objects are gone is left out where another way leads on.

        Raises:
            DeltaSyncError: the last confirmed version stays live.
        """
        target = head.version if version is None else version
        steps = self._plan(head, version)
        detours = 0
        while steps:
            group = self.batch(steps)
            try:
                self._take(group)
            except (FingerprintMismatchError, CorruptDataError, MissingVersionError) as error:
                detours += 1
                steps = self._plan(head, version)
                if detours > _DETOURS or (steps and self.batch(steps) == group):
                    raise
                logger.warning("%s Taking another way.", error)
            else:
                # With bits of some version there may be folds to go on by.
                steps = self.plan(head, version) if group[0].use_anchor else steps[len(group) :]
        return target

    def _plan(self, head: Head, version: int | None) -> list[chain.Step]:
        """As `plan`, after an audit if it takes one; for memory that holds the whole model."""
        if not self._settled:
            self.memory.audit()
            self.settle(model_fingerprint(self.memory.fingerprints))
        return self.plan(head, version)

    def _take(self, steps: Sequence[chain.Step]) -> None:
        staged = self.stage(*steps)
        committed = self.commit(staged)
        self.confirm(committed)
        logger.info(
            "committed version=%d anchor=%s steps=%d changed=%d stage_s=%.3f scatter_s=%.4f",
            steps[-1].version,
            staged.use_anchor,
            len(steps),
            staged.staged.changed,
            staged.stage_s,
            committed.report.scatter_s,
        )


def _folded(patches: Sequence[Patch]) -> list[Patch]:
    """These patches of one tensor in one or two; in an empty one if all cancelled out."""
    first = patches[0]
    return fold_all(patches) or [Patch(first.name, np.empty(0, np.int32), first.data[:0], absolute=False)]


_MEMORY_IS_OUT = "can't allocate memory", "can't start new thread", "out of memory"
"""What torch, Python and CUDA, of memory on the host, say then in a RuntimeError."""


@contextlib.contextmanager
def _saying_memory_is_out(version: int) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        panic = type(error).__module__ == "pyo3_runtime"  # safetensors' then, which is no Exception
        short = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in _MEMORY_IS_OUT)
        if panic or short:
            raise StageError(f"Not enough memory for version {version}, the one before stays live: {error}") from error
        raise


class Replica:
    """Weights in host memory that follow a channel.

    Args:
        channel: URL of the channel, an opened store, or a reader of it.
        trusted_keys: See `ReaderSettings`; from the environment if None. A reader has its own.
        max_head_age_s: Likewise.

    Examples:
        >>> replica = Replica("file:///data/run")
        >>> replica.sync()
        7
    """

    def __init__(
        self,
        channel: str | Store | ChannelReader,
        *,
        trusted_keys: str | Path | None = None,
        max_head_age_s: float | None = None,
    ) -> None:
        if not isinstance(channel, ChannelReader):
            settings = ReaderSettings.from_env(trusted_keys=trusted_keys, max_head_age_s=max_head_age_s)
            store = open_store(channel) if isinstance(channel, str) else channel
            channel = ChannelReader(store, settings.trusted_keys, settings.max_head_age_s)
        self._reader = channel
        self._follower: Follower | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def version(self) -> int | None:
        """The version whose bits `state_dict` holds, None before the first `sync`."""
        return None if self._follower is None else self._follower.version

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor at `version`."""
        return {} if self._follower is None else dict(self._follower.memory.fingerprints)

    def sync(self, version: int | None = None, *, timeout_s: float = 0.0) -> int:
        """Bring the weights to a version and check every bit that was written.

        Args:
            version: Which; the newest complete one by default.
            timeout_s: How long to wait for it to be published.

        Returns:
            The version that is now live.

        Raises:
            NotPublishedError: the channel has no version yet.
            ChainError, FormatError, StoreError, ApplyError: the previous version stays live.
        """
        head = self._head(version, time.monotonic() + timeout_s)
        if self._follower is None:
            memory, self._tensors = LiveMemory.on_host(self._reader.specs)
            memory.audit()
            self._follower = Follower(self._reader, memory)
        return self._follower.advance(head, version)

    def load(self, directory: str | Path) -> int | None:
        """Take the weights of a checkpoint directory, so that `sync` fetches only what came after them.

        For instance those of the checkpoint that the channel starts from, where it lies elsewhere than the channel says.

        Returns:
            The version that they are, None if it is none that head's manifest knows; `sync` then starts from an anchor.

        Raises:
            NotPublishedError: the channel has no version yet.
            ConfigError, FormatError, ChainError, ModelMismatchError: it is none of this model; what was there stays.
        """
        head = self._reader.head()
        anchor_version = self._reader.manifest(head.version, head.manifest_sha256).anchor_version
        known = self._reader.manifest(anchor_version).reference
        found = dataclasses.replace(checkpoint.find(Path(directory)), tied={} if known is None else known.tied)
        memory, tensors = LiveMemory.on_host(self._reader.specs)
        for name, bits_N in checkpoint.load(found).read(self._reader.specs):
            bits_of(tensors[name])[:] = bits_N
        memory.audit()
        self._follower, self._tensors = Follower(self._reader, memory), tensors
        return self._follower.identify(head, model_fingerprint(memory.fingerprints))

    def audit(self) -> bool:
        """Hold every bit in memory to the version, against faults that no commit meets.

        Returns:
            Whether the bits are the version's. If not, `version` is None, and the next `sync` starts from an anchor.

        Raises:
            NotPublishedError: nothing was synced yet.
        """
        if self._follower is None:
            raise NotPublishedError("This replica holds no version yet; call sync() first.")
        before = self.version
        self._follower.memory.audit()
        self._follower.settle(model_fingerprint(self._follower.memory.fingerprints))
        if before is not None and self.version is None:
            logger.warning("The weights in memory are not those of version %d any more; the next sync loads others.", before)
        return self.version is not None

    def _head(self, version: int | None, deadline: float) -> Head:
        """Head, once it names `version` or, for None, anything; at `deadline` whatever it names then."""
        changed = threading.Event()
        with contextlib.ExitStack() as stack:
            poll: Poll | None = None
            while True:
                left_s = deadline - time.monotonic()
                try:
                    head = self._reader.head()
                    if version is None or version <= head.version or left_s <= 0:
                        return head
                except NotPublishedError:
                    if left_s <= 0:
                        raise
                if poll is None:
                    poll = stack.enter_context(Poll(self._reader.store, _POLL_S, changed.set))
                changed.wait(min(left_s, poll.delay_s(moved=False)))
                changed.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by checkpoint name. They are the live ones: the next `sync` changes them in place; clone to keep.

        Raises:
            NotPublishedError: nothing was synced yet.
        """
        if self.version is None:
            raise NotPublishedError("This replica holds no version yet; call sync() first.")
        return dict(self._tensors)
