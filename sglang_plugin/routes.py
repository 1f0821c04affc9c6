"""Routes in SGLang's HTTP server, and which requests it answers, by which versions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
import types
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException

from deltasync.config import ReplicaSettings
from deltasync.serve import calls
from deltasync.serve.constraint import VersionConstraint, constraint
from deltasync.serve.engine import number_of
from deltasync.serve.requests import until_ready
from deltasync.serve.routes import Routes
from sglang_plugin import SOCKET, adapters
from sglang_plugin.adapters import AdapterRoutes

_TICK_S = 0.5


class SchedulerRoutes(Routes):
    """Routes to the follow loop in the first scheduler's process.

    Attributes:
        last_not_ready: Why requests should not be answered, as of a moment ago.
    """

    def __init__(self, server: Any, path: str) -> None:
        super().__init__(ask=functools.partial(calls.call, path))
        self.last_not_ready: str | None = "This server serves no version yet."
        self._server = server

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        """As `Routes.call`; then SGLang's own routes show the version that is served."""
        found = await super().call(method, *args, **named)
        status = found if method == "status" else await super().call("status", 0)
        self.last_not_ready = found if method == "not_ready" else await super().call("not_ready")
        if status["version"] is not None:
            self._server._global_state.tokenizer_manager._update_weight_version_if_provided(
                str(status["version"])
            )
        return found

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Note each version that is served."""
        task = asyncio.create_task(self._tick(), name="deltasync-tick")
        yield
        task.cancel()

    async def _tick(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # asked again soon
                await self.call("not_ready")
            await asyncio.sleep(_TICK_S)


def install(server: Any) -> None:
    """Add routes to SGLang's application, in its module `server`, before its schedulers start."""
    adapter = ReplicaSettings.from_env().adapter
    _hook_requests(server, _to_schedulers(server) if adapter is None else adapters.install(server))


def _to_schedulers(server: Any) -> SchedulerRoutes:
    folder = tempfile.TemporaryDirectory(prefix="deltasync-")
    os.environ[SOCKET] = f"{folder.name}/follow"
    routes = SchedulerRoutes(server, os.environ[SOCKET])
    routes.attach(server.app)
    server.app.state.deltasync_folder = folder  # as long as the server
    return routes


class _WrongVersion(ValueError):
    status_code = 409


def _check(wanted: VersionConstraint, output: Any, streams: bool) -> None:
    """Raise if an output was made by other versions than its request demands; only the last one of a stream
    names them.
    """
    for each in output if isinstance(output, list) else [output]:
        numbers = [
            number_of(span["version"]) or 0 for span in each.get("meta_info", {}).get("weight_versions") or ()
        ]
        if numbers and not wanted.allows(min(numbers), max(numbers)):
            sentence = wanted.refusal(max(numbers), "The version changed meanwhile.")
            raise _WrongVersion(sentence) if streams else HTTPException(409, sentence)


def _hook_requests(server: Any, routes: SchedulerRoutes | AdapterRoutes) -> None:
    """Hold replies to the versions that their requests demand.

    With `DELTASYNC_WAIT_READY` answer no request before the server was ready once, but its own: to warm
    itself up, and for its health.
    """
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    refusal: Any = until_ready(lambda: routes.last_not_ready) if routes.settings.wait_ready else lambda: None
    own, header = uuid.uuid4().hex, "x-deltasync-warmup"
    generate_request, requests = TokenizerManager.generate_request, server.requests

    @functools.wraps(generate_request)
    async def answered(
        self: Any, asked: Any, request: Any = None, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        is_own = (
            request is None
            or request.headers.get(header) == own
            or str(asked.rid).startswith(HEALTH_CHECK_RID_PREFIX)
        )
        if not is_own and (reason := refusal()):
            raise HTTPException(503, reason, {"retry-after": "1"})
        wanted, streams = constraint.get(), bool(getattr(asked, "stream", False))
        async with contextlib.aclosing(generate_request(self, asked, request, *args, **kwargs)) as outputs:
            async for output in outputs:
                if wanted is not None:
                    _check(wanted, output, streams)
                yield output

    TokenizerManager.generate_request = answered
    post = lambda url, headers, **kwargs: requests.post(url, headers=headers | {header: own}, **kwargs)  # noqa: E731
    # the server warms itself up with it
    server.requests = types.SimpleNamespace(**vars(requests) | {"post": post})
