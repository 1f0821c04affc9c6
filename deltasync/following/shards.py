"""A target for engines whose processes each hold a shard of the weights.

    stage (while the engine computes) -> commit (between two of its steps, on all shards at once) -> announce

`Shards` puts the shards together: it calls a method of each, adds up what they found, and raises the gravest error that one
of them met. There are two ways to reach them: the ranks of one program call them together (`ranked`), and vLLM's workers are
called from another process (`vllm_plugin.workers`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    ApplyError,
    CommitError,
    CorruptDataError,
    DeltaSyncError,
    FingerprintMismatchError,
    MissingVersionError,
    ModelMismatchError,
    ShareError,
    SleepingError,
    StageError,
    describe,
    error_of,
    get_logger,
    printable,
)
from deltasync.following.shard import HANDED_BYTES, Audit, Done, Found, Handed
from deltasync.following.status import Commit
from deltasync.live import assemble, combine, model_fingerprint, proof

logger = get_logger(__name__)

_T = TypeVar("_T")
NOTHING = type(None)
"""The type of the reply of a method that returns nothing."""


class Failure(msgspec.Struct, frozen=True):
    """An error, as it is sent to another process.

    Attributes:
        kind: Its class.
        message: Its text.
        key: The key of the record that is damaged or lacks something, if one is to blame.
        tensors: The tensors of which the shard holds too little to decode a version.
    """

    kind: str
    message: str
    key: str | None = None
    tensors: list[str] = []

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return an error's failure. Errors that are not deltasync's are logged here with their traceback."""
        if not isinstance(error, DeltaSyncError):
            logger.error("deltasync failed unexpectedly", exc_info=error)
        key = error.key if isinstance(error, CorruptDataError | MissingVersionError) else None
        return cls(type(error).__name__, str(error), key, [*error.tensors] if isinstance(error, ShareError) else [])

    def error(self) -> DeltaSyncError:
        """Return the error; an ApplyError if its class is not one of deltasync's."""
        error = error_of(self.kind, self.message, ApplyError)
        if isinstance(error, ShareError):
            error.tensors = self.tensors
        else:
            error.key = self.key
        return error


describe(Failure, Found, Audit, Done)


def is_safe(error: BaseException) -> bool:
    """Whether the live weights are still those of the version before a commit that ended with this error."""
    return isinstance(error, FingerprintMismatchError | StageError | SleepingError)


def succeeded(replies: Sequence[_T | Failure]) -> list[_T]:
    """Return the replies of all shards.

    Raises:
        DeltaSyncError: the gravest failure among them: one that leaves the weights uncertain, if there is one.
    """
    errors = [reply.error() for reply in replies if isinstance(reply, Failure)]
    if errors:
        raised = min(errors, key=lambda error: (is_safe(error), isinstance(error, ShareError)))
        if isinstance(raised, ShareError):
            raised.tensors = sorted({name for error in errors if isinstance(error, ShareError) for name in error.tensors})
        raise raised
    return [reply for reply in replies if not isinstance(reply, Failure)]


def commit_of(chain: Sequence[StoredRecord], done: Done, **measured: Any) -> Commit:
    """Return the commit of a chain, with what the engine has measured."""
    version = chain[-1].version
    return Commit(
        version=version.version,
        sha256=version.sha256,
        anchor=chain[0].use_anchor,
        changed=done.changed,
        stage_s=done.stage_s,
        scatter_s=done.scatter_s,
        reload_s=done.reload_s,
        **measured,
    )


class Shards(ABC):
    """The shards of all processes together. A subclass reaches them.

    Attributes:
        reloaded: The tensors that the engine loads again after each change, and why.
        ignored: The tensors that no process loads.
        fingerprints: Each tensor's fingerprint over all shards, as of the last audit, or commit of several shards.
    """

    def __init__(self, reader: ChannelReader, log: logging.Logger = logger) -> None:
        self.reader, self._log = reader, log
        self.reloaded: dict[str, str] = {}
        self.ignored: list[str] = []
        self.fingerprints: dict[str, int] = {}
        self._regions: list[Any] = []  # the elements of each tensor that each shard holds

    @abstractmethod
    def replies(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Shard`. Returns what each returns, of this kind, or its `Failure`."""

    def every(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Shard`, and return what each returns. Raises as `succeeded`."""
        return succeeded(self.replies(kind, method, *args))

    def verify(self) -> None:
        """Compare all weights with the checkpoint through the load plans.

        Raises:
            ModelMismatchError: the shards do not hold every tensor in places that can be updated.
        """
        found, specs = self.every(Found, "verify"), self.reader.specs
        self.reloaded = {name: why for each in found for name, why in each.reloaded.items()}
        self.ignored = proof.check_coverage(specs, [each.regions for each in found], self.reloaded)
        if self.ignored and not all(each.is_complete for each in found):
            which = f"{len(self.ignored)} tensors, such as {specs[self.ignored[0]]},"
            raise ModelMismatchError(f"{which} cannot be updated by this release: the engine's loader copies them nowhere.")

    def prove(self) -> None:
        """Make sure that all engines make again what they derive from weights, and say what is not served."""
        missing = sorted({name for names in self.every(list[str], "prove") for name in names})
        self._warn(self.ignored, "are not served: the engine's loader ignores them")
        self._warn(missing, "stay as loaded: the channel has no such tensors. Publish `state_dict()`, buffers included")
        patched = len(self.reader.specs) - len(self.reloaded) - len(self.ignored)
        self._log.info("deltasync load plan is proven: patched_in_place=%d reloaded=%d", patched, len(self.reloaded))
        for why, names in self.by_reason().items():
            self._warn(names, f"take the fallback, because {why}: a commit loads their layers again, which takes longer")

    def by_reason(self) -> dict[str, list[str]]:
        """Return the tensors that the engine loads again after each change, by the reason."""
        found: dict[str, list[str]] = {}
        for name, why in self.reloaded.items():
            found.setdefault(why, []).append(name)
        return found

    def _warn(self, names: Sequence[str], what: str) -> None:
        if names:
            shown = ", ".join(map(printable, names[:5]))
            self._log.warning("deltasync: %d tensors (%s, ...) %s", len(names), shown, printable(what))

    def adopt(self) -> int:
        """Audit the shards for the first time. Returns the model's fingerprint."""
        return self._total(self.every(Audit, "audit", self.ignored))

    def identified(self, record: Handed | None) -> None:
        """Tell the shards which version they hold, None for no version of the channel."""
        self.every(NOTHING, "identified", record)

    def settle(self) -> VersionId | None:
        """Audit the shards. Returns the version that they hold, or None if the bits are not what they were taken for."""
        total = self._total(self.every(Audit, "audit"))
        named = {*self.every(VersionId | None, "settle", total)}
        if len(named) > 1:
            raise ApplyError(f"The shards hold different versions: {', '.join(sorted(map(str, named)))}.")
        (version,) = named
        return version

    def _total(self, audits: Sequence[Audit]) -> int:
        self._regions = [audit.regions for audit in audits]
        self.fingerprints = combine(self._regions, [audit.parts for audit in audits])
        return model_fingerprint(self.fingerprints)

    def stage(self, chain: Sequence[Handed]) -> bool:
        """Have all shards stage a chain. Returns whether all know their bits, so that it can be committed.

        A tensor of which a shard holds too little to decode it is handed to all shards that hold a part of it, once.

        Raises:
            ApplyError: a shard lacks a tensor that it was handed.
        """
        completed: set[str] = set()
        while True:
            try:
                return all(self.every(bool, "stage", chain))
            except ShareError as error:
                lacking = {*error.tensors}
            if lacking & completed:
                raise ApplyError(f"A shard was handed {min(lacking & completed)}, and lacks it.")
            for name in sorted(lacking):
                self._complete(name)
            completed |= lacking
            size_mb = sum(self.reader.specs[name].nbytes for name in lacking) / 1e6
            self._log.info(
                "deltasync: each process keeps %d tensors whole on the host, %.1f MB, such as %s, to decode `context`",
                *(len(lacking), size_mb, min(lacking)),
            )

    def _complete(self, name: str) -> None:
        data = self._assembled(name).data.cast("B")
        for at in range(0, len(data), HANDED_BYTES):
            self.every(NOTHING, "complete", name, at, bytes(data[at : at + HANDED_BYTES]))

    def commit(self) -> Done:
        """Commit what is staged, on all shards or on none. Call between two steps of the engine.

        Returns the longest times, and the sum of the changed elements.

        Raises:
            DeltaSyncError: the commit failed; `is_safe` says whether the old bits are live again.
        """
        alone = len(self._regions) == 1
        replies = self.replies(Done, "commit", alone)
        if not alone and any(isinstance(reply, Failure) for reply in replies):
            _check_undone(self.replies(NOTHING, "undo"))
        done = succeeded(replies)
        if not alone:
            changed = combine(self._regions, [each.parts for each in done])
            fingerprints = self.fingerprints | changed
            self._confirm(changed, model_fingerprint(fingerprints))
            self.fingerprints = fingerprints
        return Done(
            changed=sum(each.changed for each in done),
            stage_s=max(each.stage_s for each in done),
            scatter_s=max(each.scatter_s for each in done),
            reload_s=max(each.reload_s for each in done),
        )

    def _confirm(self, changed: dict[str, int], total: int) -> None:
        confirmed = self.replies(NOTHING, "confirm", changed, total)
        if None in confirmed:
            _check_undone(confirmed)
        succeeded(confirmed)

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory, put together from all shards.

        Raises:
            ApplyError: two shards hold different copies of the same elements.
        """
        return {name: sha256_hex(self._assembled(name).data) for name in self.reader.specs}

    def _assembled(self, name: str) -> np.ndarray:
        return assemble(
            self.reader.specs[name], [held[name] for held in self._regions], self.every(list[bytes], "read", name)
        )


def _check_undone(replies: Iterable[Any]) -> None:
    """Raise CommitError if a shard failed to undo a commit: shards may then hold different versions."""
    for reply in replies:
        if isinstance(reply, Failure):
            raise CommitError(f"A shard's weights are uncertain. {reply.error()}")
