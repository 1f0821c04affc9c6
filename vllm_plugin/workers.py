"""The shards of vLLM's workers, as the API server reaches them: by RPCs to all workers of all engines.

Workers reply in plain data, which vLLM can send: `{"result": ...}`, `{"error": ...}`, or `{"working": ...}`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from deltasync.channel.reading import ChannelReader
from deltasync.errors import StageError, describe
from deltasync.following.engine import Failure, succeeded
from deltasync.following.shard import Done
from deltasync.following.shards import Shards
from vllm_plugin import logger
from vllm_plugin.engine import call_workers

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the engine client's event loop, and returns or raises what it does."""

Exchange = Callable[[Sequence[Any], bool], Coroutine[Any, Any, list[Any]]]

_POLL_S = (0.002, 0.05)  # shortest and longest time between polls of long calls, which are RPCs between engine steps


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


describe(Working)


class Workers(Shards):
    """The workers behind one engine client.

    Attributes:
        progressed_s: When the slowest worker's long call last came a step further, by `time.monotonic`.
        closed: Whether nobody waits for long calls any more.
    """

    def __init__(self, engine: Any, reader: ChannelReader, run: Run) -> None:
        super().__init__(reader, logger)
        self._engine, self._run = engine, run
        self.progressed_s = 0.0
        self.closed = False
        self._exchange: Exchange | None = None

    def commit(self, exchange: Exchange | None = None) -> Done:
        """As `Shards.commit`; `exchange` makes its calls, given one and whether it is the last, instead of plain RPCs."""
        self._exchange = exchange
        try:
            return super().commit()
        finally:
            self._exchange = None

    def open(self, channel: str, trusted_keys: str | None) -> int:
        """Have all workers record the load plan, and prove it. Returns the model's fingerprint.

        Raises:
            ModelMismatchError: the workers do not hold every tensor in places that can be updated.
        """
        succeeded([parse(each, type(None)) for each in self._ask("deltasync_open", channel, trusted_keys)])
        self.verify()
        self.prove()
        return self.adopt()

    @property
    def is_open(self) -> bool:
        """Whether it is known what the workers hold."""
        return bool(self._regions)

    def replies(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """As `Shards.replies`. The workers' steps go on meanwhile, if the call takes long."""
        replies, (wait_s, longest_s) = self._ask("deltasync_call", method, *args), _POLL_S
        self.progressed_s = time.monotonic()
        while any("working" in reply for reply in replies):
            if self.closed:
                raise StageError("This server stops following.")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
            later = self._ask("deltasync_call", "poll")
            idle_s = [reply["working"]["idle_s"] for reply in later if "working" in reply]
            self.progressed_s = max(self.progressed_s, time.monotonic() - max(idle_s, default=0.0))
            replies = [new if "working" in old else old for old, new in zip(replies, later, strict=True)]
        return [parse(reply, kind) for reply in replies]

    def _ask(self, rpc: str, *args: Any) -> list[Any]:
        if self._exchange is not None and args[0] in ("commit", "confirm"):
            is_last = args[0] == "confirm" or bool(args[1])
            replies: list[Any] = self._run(self._exchange(args, is_last))
        else:
            replies = self._run(call_workers(self._engine, rpc, args))
        return replies
