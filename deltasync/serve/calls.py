"""Calls of one process of a server by its others, over a Unix socket.

A connection carries one call and its answer, and lasts as long as what the call holds: a process that ends
holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from deltasync.errors import get_logger
from deltasync.threads import daemon

logger = get_logger(__name__)

Answering = Callable[..., contextlib.AbstractAsyncContextManager[Any]]
"""Answers a call, as a context that lasts as long as the caller needs: takes what `call` takes after the
path.
"""

_SIZE = 8  # bytes that hold the length of a message


async def listen(path: str, answer: Answering) -> asyncio.Server:
    """Begin to answer calls at a path, in a folder that no other user may enter."""
    return await asyncio.start_unix_server(functools.partial(_serve, answer), path)


def listen_in_thread(path: str, answer: Answering) -> None:
    """As `listen`, in a thread of its own, as long as this process."""

    async def serve() -> None:
        async with await listen(path, answer) as server:
            await server.serve_forever()

    daemon("reply", lambda: asyncio.run(serve())).start()


@contextlib.asynccontextmanager
async def call(path: str, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Return a context with the answer to a call, which holds as long as the context what was asked for.

    Raises:
        OSError: nobody listens at this path.
        EOFError: the other process did not answer.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.closing(writer):
        try:
            await _send(writer, (method, args, kwargs))
            answer = await _receive(reader)
        except ConnectionError as error:
            raise EOFError(f"The call of {method} was not answered.") from error
        yield answer


async def _serve(answer: Answering, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def reply(method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            async with answer(method, *args, **kwargs) as found:
                await _send(writer, found)
                await asyncio.Event().wait()
        except Exception:  # the caller learns that there is no answer
            logger.exception("deltasync could not answer another process of this server")
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
    return msgspec.msgpack.decode(
        await reader.readexactly(int.from_bytes(await reader.readexactly(_SIZE), "big"))
    )
