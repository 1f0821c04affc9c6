"""A replica whose weights lie in host memory: the reference for every other one."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from pathlib import Path

import torch

from deltasync.channel import checkpoint
from deltasync.channel.documents import Version
from deltasync.channel.nearest import open_nearest
from deltasync.channel.plan import goes_back
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import ReaderSettings, whole_number
from deltasync.errors import CorruptDataError, FingerprintMismatchError, MissingVersionError, NotPublishedError
from deltasync.follow.cursor import Course
from deltasync.follow.follower import Follower
from deltasync.follow.pin import NEWEST, Pin
from deltasync.follow.poll import Poll
from deltasync.live import LiveMemory, model_fingerprint
from deltasync.stores import ObjectInfo, Store
from deltasync.tensors.bits import bits_of

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_DETOURS = 8  # most in one call; the next call may take more


class Replica:
    """Weights in host memory that follow a channel.

    Args:
        channel: URL of the channel, or URLs of it and its copies with spaces between them; an opened store; or a reader.
        trusted_keys: See `ReaderSettings`; from the environment if None. Ignored if `channel` is a reader.
        max_age_s: See `ReaderSettings`; from the environment if None.

    Examples:
        >>> replica = Replica("file:///data/run")
        >>> replica.sync()
        7
    """

    _is_alone = True  # nobody else reads the weights before they are of a version

    def __init__(
        self,
        channel: str | os.PathLike[str] | Store | ChannelReader,
        *,
        trusted_keys: str | Path | None = None,
        max_age_s: float | None = None,
    ) -> None:
        settings = ReaderSettings.from_env(trusted_keys=trusted_keys, max_age_s=max_age_s)
        if not isinstance(channel, ChannelReader):
            channel = ChannelReader(open_nearest(channel), settings.trusted_keys)
        self._reader = channel
        self._course = Course(channel, settings.max_age_s)
        self._follower: Follower | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def identity(self) -> Version | None:
        """The version whose bits `state_dict` holds, with its digest; None before the first `sync`."""
        return None if self._follower is None else self._follower.version

    @property
    def version(self) -> int | None:
        """The number of this version."""
        return None if self.identity is None else self.identity.version

    @property
    def digest(self) -> str | None:
        """The sha256 of this version's record."""
        return None if self.identity is None else self.identity.sha256

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of every tensor at `version`."""
        return {} if self._follower is None else dict(self._follower.memory.fingerprints)

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
        pin = NEWEST if version is None else Pin(whole_number("version", version, least=1))
        self._course.forgive()
        deadline = time.monotonic() + timeout_s
        changed = threading.Event()
        with contextlib.ExitStack() as stack:
            poll: Poll | None = None
            while True:
                left_s = deadline - time.monotonic()
                try:
                    return self._advance(pin)
                except (NotPublishedError, MissingVersionError):
                    if left_s <= 0:
                        raise
                if poll is None:
                    poll = stack.enter_context(Poll(self._reader.store, _POLL_S, lambda _: changed.set()))
                changed.wait(min(left_s, poll.delay_s(moved=False)))
                changed.clear()

    def poll(self, known: ObjectInfo | None = None, pin: Pin = NEWEST) -> int:
        """Take the next version, if there is one, usually by a single request.

        Otherwise the same as `sync`, but a new version may be found some seconds later. `known` is what an event told of a
        new record.

        Raises:
            NotPublishedError: the channel has no version yet, or none that the pin allows.
        """
        return self._advance(pin, known=known, look=False)

    def _advance(self, pin: Pin, *, known: ObjectInfo | None = None, look: bool = True) -> int:
        """Take every step to where the pin points, or with `look` false one step; go around what fails.

        Returns the number of the version that is live now.
        """
        detours, looked = 0, not look
        joins = self.identity is None
        while True:
            if self._follower is not None and not self._follower.settled and self._settle():
                self._course.acquit()
            way = self._course.next(self.identity, pin=pin, known=known, now=look and self._course.stuck is not None)
            if not way and not looked:
                looked, way = True, self._course.next(self.identity, pin=pin, now=True)
            if not way:
                break
            if self._follower is None:
                memory, self._tensors = LiveMemory.on_host(self._reader.specs)
                self._follower = Follower(self._reader, memory)
            follower = self._follower
            try:
                self._take(follower, way, joins)
            except (FingerprintMismatchError, CorruptDataError, MissingVersionError) as error:
                detours += 1
                self._course.refused(way, follower.failed, error)
                if detours > _DETOURS:
                    raise
                logger.warning("%s Taking another way.", error)
            else:
                if not look:
                    break
        assert self.version is not None
        return self.version

    def _take(self, follower: Follower, way: list[Stored], joins: bool) -> None:
        """Take a way. While the replica joins, before anybody reads its weights, nothing is kept to undo it."""
        if self._is_alone and (follower.version is None or (joins and not goes_back(way))):
            before = time.perf_counter()
            version = follower.load(way)
            message = "loaded version=%d digest=%.12s steps=%d load_s=%.3f"
            logger.info(message, version.version, version.sha256, len(way), time.perf_counter() - before)
            return
        staged = follower.stage(way)
        with self._undisturbed():
            version = follower.confirm(follower.commit(staged))
        logger.info(
            "committed version=%d digest=%.12s anchor=%s steps=%d changed=%d stage_s=%.3f scatter_s=%.4f",
            version.version,
            version.sha256,
            way[0].use_anchor,
            len(way),
            staged.staged.changed,
            staged.stage_s,
            staged.staged.scatter_s,
        )

    def _undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nobody else reads the weights."""
        return contextlib.nullcontext()

    def load(self, directory: str | Path) -> int | None:
        """Load the weights of a checkpoint directory, so that `sync` fetches only what came after them.

        Returns the version that they are; None if the channel does not know them, and `sync` then starts from an anchor.

        Raises:
            NotPublishedError: the channel has no version yet.
            ConfigError, FormatError, ChainError, ModelMismatchError: it is no checkpoint of this model; nothing changed.
        """
        found = dataclasses.replace(checkpoint.find(Path(directory)), tied=self._course.tied())
        memory, tensors = LiveMemory.on_host(self._reader.specs)
        for name, bits_N in checkpoint.load(found).read(self._reader.specs):
            bits_of(tensors[name])[:] = bits_N
        memory.audit()
        self._follower, self._tensors = Follower(self._reader, memory), tensors
        self._follower.identified(self._course.identify(model_fingerprint(memory.fingerprints)))
        return self.version

    def audit(self) -> bool:
        """Check every bit in memory, against faults that no commit notices; return whether all are those of the version.

        If not, `version` is None, and the next `sync` starts from an anchor.

        Raises:
            NotPublishedError: nothing was synced yet.
        """
        if self._follower is None:
            raise NotPublishedError("This replica holds no version yet; call sync() first.")
        before = self.version
        if self._settle():
            logger.warning("The weights in memory are not those of version %d any more; the next sync loads others.", before)
        return self.version is not None

    def _settle(self) -> bool:
        """Audit the weights; return whether they turned out not to be those of `version`, which is None then."""
        assert self._follower is not None
        before = self.version
        self._follower.settle()
        return before is not None and self.version is None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the live weights by checkpoint name. The next `sync` changes them in place; clone what you keep."""
        if self.version is None:
            raise NotPublishedError("This replica holds no version yet; call sync() first.")
        return dict(self._tensors)
