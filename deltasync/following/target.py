"""`Target`, the interface between the follow loop and an engine. docs/guides/engines.md shows how to write
one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deltasync.channel.documents import VersionId
from deltasync.channel.record import StoredRecord
from deltasync.following.status import Commit, Status

Identify = Callable[[int], StoredRecord | None]
"""Returns the version of the channel whose model has this fingerprint (`live.model_fingerprint`); None if
none has.
"""


class Target(Protocol):
    """Weights that a `Follow` moves along a channel. It calls one method at a time, from one thread at a
    time.

    Errors keep the replica where it is, and the loop tries again. `SleepingError` says that the weights are
    not in memory.
    """

    @property
    def version(self) -> VersionId | None:
        """The version whose bits are live; None if they are of no version of the channel. May be read from
        any thread.
        """
        ...

    @property
    def progressed_s(self) -> float:
        """When `stage` last advanced, by `time.monotonic`. This tells a hung store from a large version."""
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """The channel's tensors that the engine does not compute with, so that no proof covers them."""
        ...

    @property
    def held(self) -> bool:
        """Whether nothing may be computed, because it is not known what the weights are. May be read from any
        thread.
        """
        ...

    def open(self, identify: Identify) -> None:
        """Prove where in memory the channel's tensors are, and find the version of the live bits.

        Raises:
            ModelMismatchError: the weights are not the channel's model; they are as they were.
        """
        ...

    def is_settled(self, asked: bool) -> bool:
        """Whether it is known which bits are live. If not, `settle` is called next. `asked` forbids a
        remembered answer.
        """
        ...

    def settle(self) -> None:
        """Audit the live bits, and set `version`: it stays if the bits are those of that version, and is None
        otherwise.
        """
        ...

    def stage(self, chain: Sequence[StoredRecord]) -> Any:
        """Fetch, verify and decode the versions of a chain without touching live weights. Returns the
        argument of `commit`.

        A chain starts from `version`, or from full weights (`chain[0].use_anchor`).
        Returns None if the live bits are not known, so that `settle` is needed first.

        Raises:
            MissingVersionError, CorruptDataError: with `key`, if a record's objects are to blame: they are
                avoided.
        """
        ...

    def commit(self, staged: Any) -> Commit:
        """Make the staged version live, whole or not at all, prove its bits, and set `version`.

        Raises:
            FingerprintMismatchError: the bits are not the published ones; the version before is live again.
            CommitError: the weights are uncertain; nothing may be computed from them before `settle`.
        """
        ...

    def close(self) -> None:
        """Give up a running `stage`, never a commit; called from another thread. The weights stay as they
        are.
        """
        ...


class Observer(Protocol):
    """Callbacks of a `Follow`, from its thread: for metrics, and for an engine's own work after a step."""

    def stepped(self, follow: Any) -> None:
        """A step of this `Follow` has ended, by success or by an error."""
        ...

    def committed(self, commit: Commit, chain: Sequence[StoredRecord]) -> None:
        """A version became live."""
        ...

    def failed(self, error: BaseException) -> None:
        """A step failed. Called once for each failed request, not again while the same failure lasts."""
        ...


class Heartbeats(Protocol):
    """Tells others about a replica while `Follow.run` follows (`serve.heartbeats.HeartbeatWriter`)."""

    @property
    def boot(self) -> str:
        """Identifies this life of the replica. It may change."""
        ...

    def run(
        self, status: Callable[[], Status], ended: threading.Event, renewed: Callable[[], object]
    ) -> None:
        """Tell the status now and then until `ended` is set, however long a step takes.

        `renewed` is called after this process was suspended or restored, so that what it knows may be old.
        """
        ...

    def look(self) -> None:
        """Call `renewed` now if that has happened."""
        ...

    def update(self, status: Status) -> None:
        """A step has ended, with this status."""
        ...

    def stop(self, status: Status) -> None:
        """The replica stops. Returns after a bounded time."""
        ...
