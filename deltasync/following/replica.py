"""A replica with weights in host memory: the reference for every other one."""

from __future__ import annotations

import logging
import os
import pkgutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deltasync.channel.documents import VersionId
from deltasync.channel.failover import open_failover
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import Pin, ReaderSettings, ReplicaSettings, whole_number
from deltasync.errors import NotPublishedError
from deltasync.following.identify import identify, tied
from deltasync.following.loading import HostWeights
from deltasync.following.loop import Loop
from deltasync.following.status import Commit
from deltasync.following.target import Identify
from deltasync.following.weights import LiveWeights, StagedVersion
from deltasync.live import HostMemory, LiveMemory, model_fingerprint
from deltasync.stores import ObjectInfo, Store
from deltasync.tensors.bits import bits_of

logger = logging.getLogger(__name__)

_LOCAL = "deltasync.opening.references:local"  # a wing: reads the weights of a directory


class MemoryTarget:
    """A target whose weights this process can reach. By default they are made in host memory.

    Attributes:
        tensors: The live weights by checkpoint name.
        weights: Stages and commits; None before `open`.
        joining: Whether nobody uses the weights yet, so that chains are loaded, which cannot be undone.
    """

    ignored: Sequence[str] = ()
    held = False

    def __init__(self, reader: ChannelReader) -> None:
        self.reader = reader
        self.tensors: dict[str, torch.Tensor] = {}
        self.weights: LiveWeights | None = None
        self.joining = False

    @property
    def version(self) -> VersionId | None:
        """The version that is live (`Target.version`)."""
        return None if self.weights is None else self.weights.version

    @property
    def progressed_s(self) -> float:
        """When staging last advanced (`Target.progressed_s`)."""
        return 0.0 if self.weights is None else self.weights.progressed_s

    @property
    def _opened(self) -> LiveWeights:
        assert self.weights is not None
        return self.weights

    def open(self, identify: Identify) -> None:
        """Make host memory for the channel's tensors, unless a checkpoint was loaded."""
        if self.weights is None:
            memory, self.tensors = HostMemory.on_host(self.reader.specs)
            self.weights = HostWeights(self.reader, memory)

    def adopt(self, memory: LiveMemory, identify: Identify) -> None:
        """Follow weights that exist: find out which version they are. For a subclass's `open`."""
        memory.warm_up()
        memory.audit()
        found = identify(model_fingerprint(memory.fingerprints))
        self.weights = LiveWeights(self.reader, memory)
        self.weights.identified(found)

    def is_settled(self, asked: bool) -> bool:
        """Whether the live bits are known (`Target.is_settled`)."""
        return self._opened.settled

    def settle(self) -> None:
        """Audit the live bits (`Target.settle`)."""
        self._opened.settle()

    def stage(self, chain: Sequence[StoredRecord]) -> StagedVersion | Sequence[StoredRecord] | None:
        """Stage a chain (`Target.stage`). A replica that joins loads the chain at its commit."""
        if self.version is None or self.joining:
            return chain
        return self._opened.stage(chain)

    def commit(self, staged: StagedVersion | Sequence[StoredRecord]) -> Commit:
        """Commit a staged chain (`Target.commit`)."""
        weights, before = self._opened, time.perf_counter()
        if not isinstance(staged, StagedVersion):
            assert isinstance(weights, HostWeights)
            version = weights.load(staged)
            load_s = time.perf_counter() - before
            return Commit(
                version=version.version, sha256=version.sha256, anchor=staged[0].use_anchor, stage_s=load_s
            )
        return self._exchange(staged)

    def _exchange(self, staged: StagedVersion) -> Commit:
        """Write a staged version into the live weights, and prove it."""
        before = time.perf_counter()
        committed = self._opened.commit(staged)
        try:
            self._refuse(staged.chain[-1].record.version)
        except BaseException:
            self._opened.rollback(committed)
            raise
        version = self._opened.confirm(committed)
        return Commit(
            version=version.version,
            sha256=version.sha256,
            anchor=staged.chain[0].use_anchor,
            changed=staged.staged.changed,
            stage_s=staged.stage_s,
            pause_s=time.perf_counter() - before,
            scatter_s=staged.staged.scatter_s,
        )

    def _refuse(self, version: int) -> None:
        """Raise ModelMismatchError if the weights, which were written, cannot be this version; they are
        rolled back then.
        """

    def close(self) -> None:
        """Do nothing."""


class Replica:
    """Weights in host memory that follow a channel.

    Args:
        channel: URL of the channel, or URLs of it and its copies with spaces between them; an opened store;
            or a reader.
        trusted_keys: See `ReaderSettings`; from the environment if None. Ignored if `channel` is a reader.
        max_age_s: See `ReaderSettings`; from the environment if None.

    Examples:
        >>> replica = Replica("file:///data/run")
        >>> replica.sync()
        7
    """

    def __init__(
        self,
        channel: str | os.PathLike[str] | Store | ChannelReader,
        *,
        trusted_keys: str | Path | None = None,
        max_age_s: float | None = None,
    ) -> None:
        settings = ReaderSettings.from_env(trusted_keys=trusted_keys, max_age_s=max_age_s)
        if not isinstance(channel, ChannelReader):
            channel = ChannelReader(open_failover(channel), settings.trusted_keys)
        self._target = MemoryTarget(channel)
        self._follow = Loop(channel, self._target, ReplicaSettings(max_age_s=settings.max_age_s))

    def __repr__(self) -> str:
        return f"Replica({self._follow.reader.store.url!r}, version={self._follow.version})"

    @property
    def identity(self) -> VersionId | None:
        """The version whose bits `state_dict` holds, with its digest; None before the first `sync`."""
        return self._target.version

    @property
    def version(self) -> int | None:
        """The number of this version."""
        return self._follow.version

    @property
    def digest(self) -> str | None:
        """The sha256 of this version's record."""
        identity = self.identity
        return None if identity is None else identity.sha256

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor at `version`."""
        weights = self._target.weights
        return {} if weights is None else dict(weights.memory.fingerprints)

    def sync(self, version: int | None = None, *, timeout_s: float = 0.0) -> int:
        """Bring the weights to a version and check every bit that was written.

        Args:
            version: The version's number; the newest by default.
            timeout_s: How long to wait for the version to be published.

        Returns:
            The number of the version that is now live.

        Raises:
            NotPublishedError: the channel has no version yet.
            ChainError, FormatError, StoreError, ApplyError: the previous version stays live.
        """
        pin = None if version is None else whole_number("version", version, least=1)
        self._target.joining = self.identity is None
        return self._follow.catch_up(pin, wait_s=timeout_s)

    def poll(self, known: ObjectInfo | None = None, pin: Pin = None) -> int:
        """Take the next version, if there is one, usually by a single request.

        Otherwise the same as `sync`, but a new version may be found some seconds later. `known` is the
        listing entry of a new record, from an event.

        Raises:
            NotPublishedError: the channel has no version yet.
        """
        self._target.joining = self.identity is None
        self._follow.step(pin, known=known)
        version = self.version
        assert version is not None
        return version

    def load(self, directory: str | Path) -> int | None:
        """Load the weights of a checkpoint directory, so that `sync` fetches only later versions.

        Returns the version that they are; None if the channel does not know them, and `sync` then starts from
        an anchor.

        Raises:
            NotPublishedError: the channel has no version yet.
            ConfigError, FormatError, ChainError, ModelMismatchError: it is no checkpoint of this model;
                nothing changed.
        """
        reader = self._target.reader
        with self._follow.between_steps():
            memory, tensors = HostMemory.on_host(reader.specs)
            for name, bits_N in pkgutil.resolve_name(_LOCAL)(directory, tied(reader), reader.specs):
                bits_of(tensors[name])[:] = bits_N
            memory.audit()
            known = identify(reader, self._follow.cursor.locate(), model_fingerprint(memory.fingerprints))
            self._target.weights, self._target.tensors = HostWeights(reader, memory), tensors
            self._target.weights.identified(known)
        return self.version

    def audit(self) -> bool:
        """Check every bit in memory, against faults that no commit notices; return whether all are those of
        the version.

        If not, `version` is None, and the next `sync` starts from an anchor.

        Raises:
            NotPublishedError: nothing was synced yet.
        """
        before = self.version
        if self._target.weights is None:
            raise NotPublishedError("This replica holds no version yet; call sync() first.")
        is_right = self._follow.audit()
        if not is_right and before is not None:
            logger.warning(
                "The weights in memory are not those of version %d any more; the next sync loads others.",
                before,
            )
        return is_right

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the live weights by checkpoint name. The next `sync` changes them in place; clone tensors
        that you keep.
        """
        if self.version is None:
            raise NotPublishedError("This replica holds no version yet; call sync() first.")
        return dict(self._target.tensors)
