"""Messages between processes: replies of workers to RPCs, and the reply of `GET /deltasync/status`.

Workers reply in plain data, which vLLM can send: `{"result": ...}`, `{"error": ...}`, or `{"working": ...}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from deltasync.errors import describe
from deltasync.following import Status
from deltasync.following.engine import Failure

Answer = dict[str, Any]


class Working(msgspec.Struct):
    """A long call goes on. `idle_s` is the number of seconds since it last came a step further."""

    idle_s: float


def answer(body: Callable[[], Any]) -> Answer:
    """Run an RPC's body and return the reply. An exception becomes part of it, because it could end vLLM's engine."""
    try:
        result = body()
    except Exception as error:  # noqa: BLE001 - the server goes on with the weights it has, and says why
        return {"error": msgspec.to_builtins(Failure.of(error))}
    return {"working" if isinstance(result, Working) else "result": msgspec.to_builtins(result, builtin_types=(bytes,))}


def parse(answer: Answer, kind: Any) -> Any:
    """Decode what `answer` returned in another process: a result of this kind, or a Failure."""
    if "error" in answer:
        return msgspec.convert(answer["error"], Failure)
    return msgspec.convert(answer["result"], kind)


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


describe(Working, ServerStatus)
