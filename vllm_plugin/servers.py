"""Several API servers of one engine: one of them leads, and follows the channel; the others ask it.

The engine's process names the leader: the first server that asks, and another one when that has ended. Each
server listens on a socket (`deltasync.serve.calls`) in a folder that the engine's process made, which no
other user may enter.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from deltasync.errors import StageError
from deltasync.serve import calls
from vllm_plugin.engine import call_engines
from vllm_plugin.pauses import SWITCHED


class Servers:
    """One API server among those of its engine.

    Attributes:
        number: The server's.
        leader: The number of the one that leads; None before `elect`.

    Args:
        core: vLLM's `AsyncMPClient`.
        answer: Answers a call.
        lead: Begins to lead.
    """

    def __init__(self, core: Any, answer: calls.Answering, lead: Callable[[], Awaitable[None]]) -> None:
        self.number: int = core.client_index
        self.leader: int | None = None
        self._core, self._answer, self._lead = core, answer, lead
        self._electing = asyncio.Lock()
        self._folder = ""

    @property
    def leads(self) -> bool:
        """Whether this server leads."""
        return self.leader == self.number

    async def listen(self) -> str:
        """Begin to answer. Returns the path of a file that all servers share."""
        self._folder, _ = await self._ask_engine()
        self._listener = await calls.listen(self._socket(self.number), self._answered)
        return f"{self._folder}/versions"

    def close(self) -> None:
        """Answer no more, so that another server leads if this one does."""
        self._listener.close()

    def _socket(self, number: int | None) -> str:
        return f"{self._folder}/{number}"

    async def _ask_engine(self, *arguments: Any) -> Any:
        return (await call_engines(self._core, "deltasync_lead", *arguments))[0]

    async def elect(self, ended: int | None) -> None:
        """Learn who leads, or begin to, now that this server has `ended`; None at first."""
        async with self._electing:
            if self.leader == ended:
                _, leader = await self._ask_engine(self.number, ended)
                if leader == self.number:
                    await self._lead()
                self.leader = leader

    @contextlib.asynccontextmanager
    async def call(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """As `calls.call`, of the leader.

        If it ends meanwhile, the next one is asked, unless the call is one of `SWITCHED`, which may have
        begun.

        Raises:
            StageError: the leader did not answer.
        """
        asked = None
        while True:
            leader = self.leader
            async with contextlib.AsyncExitStack() as stack:
                try:
                    answer = await stack.enter_async_context(
                        calls.call(self._socket(leader), method, *args, **kwargs)
                    )
                except EOFError:
                    if leader == asked or method in SWITCHED:
                        raise StageError(
                            f"The API server that follows the channel did not answer {method}."
                        ) from None
                    asked = leader
                    continue
                except OSError:  # it has ended
                    await self.elect(leader)
                    continue
                yield answer
                return

    @contextlib.asynccontextmanager
    async def _answered(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with self._electing:
            pass  # it may just begin to lead
        async with self._answer(method, *args, **kwargs) as answer:
            yield answer
