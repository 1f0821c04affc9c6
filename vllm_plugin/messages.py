"""What crosses processes: errors and replies between driver and workers, bodies and replies of routes.

Workers answer in plain data, as vLLM can send it: `{"result": ...}`, or `{"error": {"kind": ..., "message": ...}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from deltasync.channel.documents import Number, Version
from deltasync.errors import (
    UNREADABLE_JSON,
    ApplyError,
    ConfigError,
    DeltaSyncError,
    FingerprintMismatchError,
    SleepingError,
    StageError,
    error_of,
)
from deltasync.live import Parts
from deltasync.tensors import Region
from vllm_plugin import logger

_T = TypeVar("_T")

Answer = dict[str, Any]

Handed = tuple[str, str, bytes | None]
"""A record that the driver has read, on its way to the workers: key, sha256, and its bytes, if they are not too many."""


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to another process: its class and its sentence."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The error, ready to cross; what is no error of deltasync's is logged here, with its traceback."""
        if not isinstance(error, DeltaSyncError):
            logger.error("deltasync failed unexpectedly", exc_info=error)
        return cls(type(error).__name__, str(error))

    def error(self) -> DeltaSyncError:
        """The error again; an ApplyError if its class is none of deltasync's."""
        return error_of(self.kind, self.message, ApplyError)


def is_safe(error: BaseException) -> bool:
    """Whether live weights are those of the version before, although a commit ended with this error."""
    return isinstance(error, FingerprintMismatchError | StageError | SleepingError)


def gravest(failures: Iterable[Failure]) -> DeltaSyncError:
    """The error to raise for several workers: one after which the weights are uncertain, if there is one."""
    return min((failure.error() for failure in failures), key=is_safe)


def answer(body: Callable[[], Any]) -> Answer:
    """Run an RPC's body. An exception in an RPC may end vLLM's engine, so it becomes part of the answer."""
    try:
        return {"result": msgspec.to_builtins(body(), builtin_types=(bytes,))}
    except Exception as error:  # noqa: BLE001 - the server goes on with the weights it has, and says why
        return {"error": msgspec.to_builtins(Failure.of(error))}


def parse(answer: Answer, kind: type[_T]) -> _T | Failure:
    """What `answer` gave in another process."""
    if "error" in answer:
        return msgspec.convert(answer["error"], Failure)
    return msgspec.convert(answer["result"], kind)


class Audit(msgspec.Struct):
    """What an audit found: fingerprints of a worker's segments.

    The first one also tells which elements of each tensor the worker holds, and why tensors take the fallback.
    """

    parts: Parts
    regions: dict[str, list[Region]] = {}
    reloaded: dict[str, str] = {}


class Work(msgspec.Struct):
    """Work in the background of a worker: `idle`, `working`, or what it ended with.

    `blamed` is the key of the record that is damaged or lacks something, None if that is not why staging failed.
    """

    state: str
    audit: Audit | None = None
    failure: Failure | None = None
    blamed: str | None = None


class Live(msgspec.Struct):
    """The version whose bits a worker holds, None for none."""

    version: Version | None


class Committed(msgspec.Struct):
    """What a worker committed."""

    changed: int
    stage_s: float
    scatter_s: float
    reload_s: float
    parts: Parts


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One version that became live, as the status tells it.

    Attributes:
        sha256: The digest of its record.
        stage_s: Fetch, check, decode and translate, in the worker, while serving.
        pause_s: From asking vLLM to pause until it had resumed.
        scatter_s: The share of that for writing live weights, or the mirror of those that take the fallback.
        reload_s: The share of that for loading the layers of those again.
        lag_s: From the publisher's clock at encoding until the version was served; None for what `Course.lag_s` leaves out.
        tokens_during_sync: Tokens that the server generated between the start of staging and the resume.
        running_requests: Requests in flight when generation was paused.
        served_at: Seconds since the epoch.
    """

    version: int
    sha256: str
    anchor: bool
    changed: int
    payload_bytes: int
    stage_s: float
    pause_s: float
    scatter_s: float
    reload_s: float
    lag_s: float | None
    tokens_during_sync: int
    running_requests: int
    served_at: float


class Reason(msgspec.Struct):
    """Why tensors take the fallback: how many, and the first one's name."""

    reason: str
    tensors: int
    first: str


class Status(msgspec.Struct, kw_only=True):
    """Reply of `GET /deltasync/status`; see docs/operations.md. `adapters` are the names that requests may ask for."""

    replica_id: str
    channel: str
    run_id: str | None = None
    state: str
    version: int | None = None
    epoch: str | None = None
    sha256: str | None = None
    newest_version: int | None = None
    pin: str | None = None
    last_look_s_ago: float | None = None
    error: str | None = None
    kv_cache: str | None = None
    trusted_keys: list[str] | None = None
    patched_tensors: int | None = None
    reloaded_tensors: int | None = None
    reloaded: list[Reason] = []
    commits: list[Commit] = []
    adapters: list[str] | msgspec.UnsetType = msgspec.UNSET
    logprobs_mode: str | None = None


HeldSeconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
"""How long a request may be held until a version is served."""


class WeightUpdate(msgspec.Struct, kw_only=True):
    """Body of PipelineRL's `POST /receive_weight_update`; its other fields are ignored.

    Attributes:
        version: As the trainer counts: the `step` that it published with.
    """

    version: Number | None = None
    timeout_s: HeldSeconds = 60.0


class Sync(WeightUpdate, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /deltasync/sync`, where a field that is not one is a mistake, and `version` one of the channel."""


class PinTo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /deltasync/pin`; `pin` as `deltasync.replicas.Pin.parse` takes it."""

    pin: str
    timeout_s: HeldSeconds = 60.0


def body_of(data: bytes, kind: type[_T]) -> _T:
    """The body of a request; an empty one has no fields.

    Raises:
        ConfigError: it is not what the route takes.
    """
    try:
        return msgspec.json.decode(data if data.strip() else b"{}", type=kind)
    except UNREADABLE_JSON as error:
        raise ConfigError(f"The body is not what this route takes: {error}.") from None
