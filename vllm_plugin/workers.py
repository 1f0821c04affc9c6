"""The shards of vLLM's workers, as the follow loop reaches them: by calls of all workers of all engines.

Workers reply in plain data, which vLLM can send: `{"result": ...}`, `{"error": ...}`, or `{"working": ...}`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from deltasync.channel.reading import ChannelReader
from deltasync.errors import StageError, describe
from deltasync.following.engine import Failure, is_safe, succeeded
from deltasync.following.shard import Done
from deltasync.following.shards import Shards
from vllm_plugin import logger

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


class Client:
    """Calls vLLM's workers. This one is for an engine in which nothing is generated while the follow loop steps.

    Attributes:
        held: Whether nothing may be generated, because the weights are uncertain.
        used: Whether another caller may have changed the weights. The target resets it.
        last_s: Seconds that the last pause for a commit took.

    Args:
        call: Calls a method of every worker, and returns the replies in the order of ranks.
        announce: Labels tokens with the name of a version, and keeps the prefix cache apart.
    """

    held = used = False
    last_s = 0.0

    def __init__(self, call: Callable[..., list[Answer]], announce: Callable[[str], object] = lambda name: None) -> None:
        self.call, self.announce = call, announce

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Return a context for a commit, which calls `exchange`. `held` after an error that is not safe (`is_safe`)."""
        try:
            yield
            self.held = False
        except BaseException as error:
            self.held = self.held or not is_safe(error)
            raise

    def exchange(self, call: Sequence[Any], name: str | None) -> list[Answer]:
        """Make a call of all workers in a pause. The last one of a commit has the version's name, to announce."""
        answers = self.call("deltasync_call", *call)
        if name is not None and not any("error" in answer for answer in answers):
            self.announce(name)
        return answers

    def release(self) -> None:
        """Hold no more: it is known again which version the weights are."""
        self.held = False

    def cancel(self) -> None:
        """Give up the call that is under way."""


class WorkerShards(Shards):
    """The workers behind one client.

    Attributes:
        progressed_s: When the slowest worker's long call last came a step further, by `time.monotonic`.
        closed: Whether nobody waits for long calls any more.
    """

    def __init__(self, client: Client, reader: ChannelReader) -> None:
        super().__init__(reader, logger)
        self._client = client
        self.progressed_s = 0.0
        self.closed = False
        self._name: str | None = None  # of the version that is committed

    def commit(self, name: str | None = None) -> Done:
        """As `Shards.commit`, and announce the version by this name."""
        self._name = name
        return super().commit()

    def open(self, channel: str, trusted_keys: str | None) -> int:
        """Have all workers record the load plan, and prove it. Returns the model's fingerprint.

        Raises:
            ModelMismatchError: the workers do not hold every tensor in places that can be updated.
        """
        succeeded([parse(each, type(None)) for each in self._client.call("deltasync_open", channel, trusted_keys)])
        self.verify()
        self.prove()
        return self.adopt()

    @property
    def is_open(self) -> bool:
        """Whether it is known what the workers hold."""
        return bool(self._regions)

    def replies(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """As `Shards.replies`. The workers' steps go on meanwhile, if the call takes long."""
        (wait_s, longest_s), client = _POLL_S, self._client
        if method in ("commit", "confirm"):
            replies = client.exchange((method, *args), self._name if method == "confirm" or args[0] else None)
        else:
            replies = client.call("deltasync_call", method, *args)
        self.progressed_s = time.monotonic()
        while any("working" in reply for reply in replies):
            if self.closed:
                raise StageError("This server stops following.")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
            later = client.call("deltasync_call", "poll")
            idle_s = [reply["working"]["idle_s"] for reply in later if "working" in reply]
            self.progressed_s = max(self.progressed_s, time.monotonic() - max(idle_s, default=0.0))
            replies = [new if "working" in old else old for old, new in zip(replies, later, strict=True)]
        return [parse(reply, kind) for reply in replies]
