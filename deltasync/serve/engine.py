"""Parts that targets inside an engine's process need, in addition to the follow loop; and what its processes
send others.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch

from deltasync import limits
from deltasync.channel.documents import VersionId
from deltasync.channel.failover import open_failover
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    CorruptDataError,
    DeltaSyncError,
    FingerprintMismatchError,
    MissingVersionError,
    SleepingError,
    StageError,
    describe,
    error_of,
    get_logger,
)
from deltasync.kernels import native
from deltasync.stores.cache import behind_cache

logger = get_logger(__name__)

_T = TypeVar("_T")


def open_reader(settings: ReplicaSettings, process_count: int = 1) -> ChannelReader:
    """Open the channel, behind the cache that the processes of this machine share."""
    assert settings.channel is not None
    store = behind_cache(
        open_failover(settings.channel), settings.cache_dir, settings.cache_bytes, process_count
    )
    return ChannelReader(store, settings.trusted_keys)


def limit_threads(given: str, process_count: int | None) -> None:
    """Limit our kernels on the host to the engine's threads in this process.

    Args:
        given: `OMP_NUM_THREADS`, which engines set; may be empty.
        process_count: The processes that share the cores equally where it is empty; None for no limit.
    """
    first = given.partition(",")[0]
    if first.isdigit() and int(first):
        native.limit_threads(int(first))
    elif process_count is not None:
        native.limit_threads(len(os.sched_getaffinity(0)) // process_count)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that has a function called in place of `owner`'s, with that one before its
    arguments.
    """
    original = getattr(owner, name)

    def replace(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(owner, name, hooked)
        return hook

    return replace


def unique_name(names: OrderedDict[int, str], version: VersionId) -> str:
    """Return a version's number, with the start of its digest if `names` has another version of that number.

    Args:
        names: The first digest of each number that was named; this adds to it, and drops the oldest.
        version: The version to name.
    """
    first = names.setdefault(version.version, version.sha256)
    if len(names) > limits.HISTORY:
        names.popitem(last=False)
    return str(version.version) if first == version.sha256 else f"{version.version}-{version.sha256[:12]}"


def number_of(name: str) -> int | None:
    """Return the version's number in what `unique_name` returned; None for another name, of weights of no
    version.
    """
    number = name.partition("-")[0]
    return int(number) if number.isdecimal() else None


class OnLoop:
    """Runs coroutines on an event loop of another thread, one at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: Future[Any] | None = None

    def __call__(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and return its result."""
        self._running = asyncio.run_coroutine_threadsafe(work, self._loop)
        return self._running.result()

    def cancel(self) -> None:
        """Cancel what is running."""
        if self._running is not None:
            self._running.cancel()


class ParameterAddresses:
    """The addresses of a model's parameters and buffers, so that a replaced one is noticed before the next
    step.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._addresses: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = [
            (held, name, tensor, tensor.data, tensor.data_ptr())
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def put_back(self) -> list[str]:
        """Put tensors back that were replaced, or whose memory was. Returns their names."""
        replaced = []
        for held, name, tensor, data, address in self._addresses:
            if held.get(name) is not tensor or tensor.data_ptr() != address:
                held[name] = tensor
                tensor.data = data
                replaced.append(name)
        return replaced


Handed = tuple[str, str, bytes | None]
"""A record that the follow loop has read: its key, its sha256, and its bytes unless too many."""


def handed(chain: Sequence[StoredRecord]) -> list[Handed]:
    """Return records for shards, with their bytes up to a limit: a shard reads the others by itself."""
    found: list[Handed] = []
    left = limits.HANDED_BYTES
    for stored in chain:
        data = stored.data if stored.size <= left else None
        left -= 0 if data is None else stored.size
        found.append((stored.key, stored.sha256, data))
    return found


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
        tensors = [*error.tensors] if isinstance(error, DeltaSyncError) else []
        return cls(type(error).__name__, str(error), key, tensors)

    def error(self) -> DeltaSyncError:
        """Return the error; an ApplyError if its class is not one of deltasync's."""
        error = error_of(self.kind, self.message, ApplyError)
        error.key, error.tensors = self.key, self.tensors
        return error


class Working(msgspec.Struct):
    """A long call goes on. `idle_s` is the number of seconds since it last came a step further."""

    idle_s: float


describe(Failure, Working)

Answer = dict[str, Any]
"""The reply to a call from another process, in plain data: `{"result": ...}`, `{"error": ...}` or
`{"working": ...}`.
"""


def answer(body: Callable[[], Any]) -> Answer:
    """Run a call's body and return the reply. An exception becomes part of it, because it could end the
    engine.
    """
    try:
        result = body()
    except Exception as error:  # noqa: BLE001 - the server goes on with the weights it has, and says why
        return {"error": msgspec.to_builtins(Failure.of(error))}
    return {
        "working" if isinstance(result, Working) else "result": msgspec.to_builtins(
            result, builtin_types=(bytes,)
        )
    }


def parse(answer: Answer, kind: Any) -> Any:
    """Decode what `answer` returned in another process: a result of this kind, or a Failure."""
    if "error" in answer:
        return msgspec.convert(answer["error"], Failure)
    return msgspec.convert(answer["result"], kind)


def is_safe(error: BaseException) -> bool:
    """Whether the live weights are still those of the version before a commit that ended with this error."""
    return isinstance(error, FingerprintMismatchError | StageError | SleepingError)


def succeeded(replies: Sequence[_T | Failure]) -> list[_T]:
    """Return the replies of all shards.

    Raises:
        DeltaSyncError: the gravest failure among them: one that leaves the weights uncertain, if there is
            one.
    """
    errors = [reply.error() for reply in replies if isinstance(reply, Failure)]
    if errors:
        raised = min(errors, key=lambda error: (is_safe(error), bool(error.tensors)))
        raised.tensors = sorted({name for error in errors for name in error.tensors})
        raise raised
    return [reply for reply in replies if not isinstance(reply, Failure)]
