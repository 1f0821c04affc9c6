"""Messages between processes: replies and errors of workers to the target, bodies and replies of routes.

Workers reply in plain data, which vLLM can send: `{"result": ...}`, or `{"error": {"kind": ..., "message": ...}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from deltasync.channel.documents import VersionId
from deltasync.errors import (
    ApplyError,
    DeltaSyncError,
    FingerprintMismatchError,
    SleepingError,
    StageError,
    describe,
    error_of,
)
from deltasync.following import Status
from deltasync.live import Parts
from deltasync.tensors import Region
from vllm_plugin import logger

_T = TypeVar("_T")

Answer = dict[str, Any]

Handed = tuple[str, str, bytes | None]
"""A record that the follow loop has read and hands to the workers: its key, its sha256, and its bytes unless too many."""


class Failure(msgspec.Struct, frozen=True):
    """An error, as it is sent to another process: its class and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return an error's failure. Errors that are not deltasync's are logged here with their traceback."""
        if not isinstance(error, DeltaSyncError):
            logger.error("deltasync failed unexpectedly", exc_info=error)
        return cls(type(error).__name__, str(error))

    def error(self) -> DeltaSyncError:
        """Return the error; an ApplyError if its class is not one of deltasync's."""
        return error_of(self.kind, self.message, ApplyError)


def is_safe(error: BaseException) -> bool:
    """Whether the live weights are still those of the version before a commit that ended with this error."""
    return isinstance(error, FingerprintMismatchError | StageError | SleepingError)


def gravest(failures: Iterable[Failure]) -> DeltaSyncError:
    """Return the error to raise for several workers: one that leaves the weights uncertain, if there is one."""
    return min((failure.error() for failure in failures), key=is_safe)


def answer(body: Callable[[], Any]) -> Answer:
    """Run an RPC's body and return the reply. An exception becomes part of it, because it could end vLLM's engine."""
    try:
        return {"result": msgspec.to_builtins(body(), builtin_types=(bytes,))}
    except Exception as error:  # noqa: BLE001 - the server goes on with the weights it has, and says why
        return {"error": msgspec.to_builtins(Failure.of(error))}


def parse(answer: Answer, kind: type[_T]) -> _T | Failure:
    """Decode what `answer` returned in another process."""
    if "error" in answer:
        return msgspec.convert(answer["error"], Failure)
    return msgspec.convert(answer["result"], kind)


class Audit(msgspec.Struct):
    """Result of an audit.

    Attributes:
        parts: The fingerprints of the worker's segments.
        regions: Which elements of each tensor the worker holds.
        reloaded: The tensors that take the fallback, and why. Only of `verify`, as is the next.
        complete: Whether vLLM's model has all its modules, so that a tensor that its loader ignores is not served.
    """

    parts: Parts
    regions: dict[str, list[Region]]
    reloaded: dict[str, str] = {}
    complete: bool = False


class Work(msgspec.Struct):
    """State of a worker's background work.

    Attributes:
        state: `idle`, `working`, or how it ended: `verified`, `audited`, `staged`, `unsettled`, `lacking`, `failed`.
        blamed: The key of the record that is damaged or lacks something, None if staging failed for another reason.
        idle_s: Seconds since work that goes on last came a step further.
        lacking: The tensors that the worker needs whole to decode the version.
    """

    state: str
    audit: Audit | None = None
    failure: Failure | None = None
    blamed: str | None = None
    idle_s: float = 0.0
    lacking: list[str] = []


class Live(msgspec.Struct):
    """The version whose bits a worker holds, None if they are of no version."""

    version: VersionId | None


class CommitReply(msgspec.Struct):
    """Result of a commit in one worker, or in all together. `deltasync.following.Commit` explains the fields.

    `parts` has the fingerprints of the worker's segments of the changed tensors; empty if it is the only worker.
    """

    changed: int
    stage_s: float
    scatter_s: float
    reload_s: float
    parts: Parts = {}


class Reason(msgspec.Struct):
    """A reason why tensors take the fallback, their number, and the name of the first."""

    reason: str
    tensors: int
    first: str


class ServerStatus(Status, kw_only=True):
    """Reply of `GET /deltasync/status` (docs/operations/replica.md). `adapters` are model names that requests may use."""

    kv_cache: str | None = None
    patched_tensors: int | None = None
    reloaded_tensors: int | None = None
    reloaded: list[Reason] = msgspec.field(default_factory=list)
    adapters: list[str] | msgspec.UnsetType = msgspec.UNSET
    logprobs_mode: str | None = None


describe(Failure, Audit, Work, CommitReply, Live, ServerStatus)
