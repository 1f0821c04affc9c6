"""Several API servers of one engine: one of them leads, and follows the channel; the others ask it.

The engine's process names the leader: the first server that asks, and another one when that has ended. Each server listens
on a socket in a folder that the engine's process made, which no other user may enter. A connection carries one call and its
answer, and lasts as long as what the call holds: a server that ends holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from deltasync.errors import StageError
from vllm_plugin import logger
from vllm_plugin.engine import call_engines
from vllm_plugin.pauses import SWITCHED

Answering = Callable[..., contextlib.AbstractAsyncContextManager[Any]]

_SIZE = 8  # bytes that hold the length of a message


class Servers:
    """One API server among those of its engine.

    Attributes:
        number: The server's.
        leader: The number of the one that leads; None before `elect`.

    Args:
        core: vLLM's `AsyncMPClient`.
        answer: Answers a call, as a context that lasts as long as the caller needs: takes what `call` takes.
        lead: Begins to lead.
    """

    def __init__(self, core: Any, answer: Answering, lead: Callable[[], Awaitable[None]]) -> None:
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
        self._listener = await asyncio.start_unix_server(self._serve, self._socket(self.number))
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
        """Return a context with the answer to a call of the leader, which holds as long as the context what was asked for.

        If the leader ends meanwhile, the next one is asked, unless the call is one of `SWITCHED`, which may have begun.

        Raises:
            StageError: the leader did not answer.
        """
        asked = None
        while True:
            leader = self.leader
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket(leader))
            except OSError:  # it has ended
                await self.elect(leader)
                continue
            with contextlib.closing(writer):
                try:
                    await _send(writer, (method, args, kwargs))
                    answer = await _receive(reader)
                except (ConnectionError, asyncio.IncompleteReadError):
                    if leader == asked or method in SWITCHED:
                        raise StageError(f"The API server that follows the channel did not answer {method}.") from None
                    asked = leader
                    continue
                yield answer
                return

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def reply(method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
            try:
                async with self._electing:
                    pass  # it may just begin to lead
                async with self._answer(method, *args, **kwargs) as answer:
                    await _send(writer, answer)
                    await asyncio.Event().wait()
            except Exception:  # the caller learns that there is no answer
                logger.exception("deltasync could not answer another API server")
            finally:
                writer.close()

        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            replying = asyncio.create_task(reply(*await _receive(reader)))
            try:
                await reader.read()  # until the caller leaves
            finally:
                replying.cancel()
                await asyncio.wait({replying})


async def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(_SIZE, "big") + data)
    await writer.drain()


async def _receive(reader: asyncio.StreamReader) -> Any:
    return msgspec.msgpack.decode(await reader.readexactly(int.from_bytes(await reader.readexactly(_SIZE), "big")))
