"""Routes in SGLang's HTTP server, and which requests it answers.

GET  /deltasync/status     version served, lag, errors, and each commit's numbers
GET  /deltasync/ready      200 while a version that is new enough is served, otherwise 503; needs no token
POST /deltasync/sync       refresh now, and reply once a version is served
POST /deltasync/pin        stay at a version, or skip some, and reply once that is served
GET  /deltasync/digest     sha256 of every live tensor (only with DELTASYNC_DIGEST_ROUTE=1)

They ask the schedulers by SGLang's own internal state. All but `ready` require DELTASYNC_HTTP_TOKEN, if it is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import types
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from deltasync.channel.documents import Number
from deltasync.config import ReplicaSettings
from deltasync.following.requests import stranger, token_matches, until_ready
from sglang_plugin.scheduler import MARK

_TICK_S = 0.5
_ASK_S = 0.01
_BODY_BYTES = 1 << 16
_WARMUP = "x-deltasync-warmup"  # a header
_STATUS = {"ConfigError": 422, "MissingVersionError": 409, "PinnedError": 409}  # of replies, by the error's class


class Ask(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `sync`, which takes a version of the channel or a trainer's step, and of `pin`."""

    version: Number | None = None
    step: Number | None = None
    pin: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0


class Routes:
    """The routes of one server. `server` is SGLang's module `http_server`."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._settings = ReplicaSettings.from_env()
        self.not_ready: str | None = "This server serves no version yet."

    @property
    def _manager(self) -> Any:
        return self._server._global_state.tokenizer_manager

    async def _states(self) -> list[dict[str, Any]]:
        """Return what each data-parallel group of schedulers says."""
        states = [state[MARK] for state in await self._manager.get_internal_state()]
        self.not_ready = next((state["not_ready"] for state in states if state["not_ready"]), None)
        version = states[0]["status"]["version"]
        if version is not None and str(version) != self._manager.config_value("weight_version"):
            self._manager._update_weight_version_if_provided(str(version))
        return states

    async def status(self) -> Any:
        """Return the status; of several groups, that of the one furthest behind, and all of them in `groups`."""
        found = [state["status"] for state in await self._states()]
        last = min(found, key=lambda status: status["version"] or 0)
        return last if len(found) == 1 else last | {"groups": found}

    async def ready(self) -> JSONResponse:
        """Tell whether this server serves a version that is new enough."""
        await self._states()
        return JSONResponse({"ready": self.not_ready is None, "reason": self.not_ready}, 503 if self.not_ready else 200)

    async def digest(self) -> Any:
        """Return the sha256 of every live tensor."""
        return await self._ask({"digest": True}, 600.0)

    async def sync(self, request: Request) -> Any:
        """Refresh, pin, and reply once what is asked for is served."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _BODY_BYTES:
                raise HTTPException(413, f"The body is larger than {_BODY_BYTES:,} bytes.")
        try:
            asked = msgspec.json.decode(bytes(body) or b"{}", type=Ask)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HTTPException(422, f"The body is not what this route takes: {error}.") from None
        return await self._ask(msgspec.structs.asdict(asked), asked.timeout_s)

    async def _ask(self, what: dict[str, Any], timeout_s: float) -> Any:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        number = uuid.uuid4().hex
        await self._manager.set_internal_state(SetInternalStateReq(server_args={MARK: what | {"id": number}}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s + 5):
                while not all(found := [state["asked"].get(number) for state in await self._states()]):
                    await asyncio.sleep(_ASK_S)
                error = next((each["error"] for each in found if each.get("error")), None)
                return (
                    found[0] if error is None else JSONResponse({"error": error}, _STATUS.get(error.partition(":")[0], 504))
                )
        return JSONResponse({"error": "The schedulers do not answer."}, 504)

    async def authorize(self, request: Request) -> None:
        """Refuse requests without the token, and those of other sites' pages."""
        token = self._settings.http_token
        if sentence := stranger(request.method, request.headers, False):
            raise HTTPException(403, sentence)
        if token is not None and not token_matches(request.headers.get("authorization"), token):
            raise HTTPException(401, "Send DELTASYNC_HTTP_TOKEN as a bearer token.")

    @contextlib.asynccontextmanager
    async def ticking(self, _: FastAPI) -> AsyncIterator[None]:
        """Keep what is known of the schedulers true, for requests and for `/model_info`."""

        async def tick() -> None:
            while True:
                with contextlib.suppress(Exception):  # asked again soon
                    await self._states()
                await asyncio.sleep(_TICK_S)

        task = asyncio.create_task(tick(), name="deltasync-tick")
        yield
        task.cancel()


def install(server: Any) -> None:
    """Add the routes to SGLang's application, and have it answer requests from when it is ready."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    routes = Routes(server)
    guarded = [Depends(routes.authorize)]
    router = APIRouter(prefix="/deltasync", lifespan=routes.ticking)
    router.add_api_route("/status", routes.status, dependencies=guarded)
    router.add_api_route("/ready", routes.ready)
    router.add_api_route("/sync", routes.sync, methods=["POST"], dependencies=guarded)
    router.add_api_route("/pin", routes.sync, methods=["POST"], dependencies=guarded)
    if routes._settings.digest_route:
        router.add_api_route("/digest", routes.digest, dependencies=guarded)
    server.app.include_router(router)
    if not routes._settings.wait_ready:
        return
    refusal, generate_request, own = (
        until_ready(lambda: routes.not_ready),
        TokenizerManager.generate_request,
        uuid.uuid4().hex,
    )

    @functools.wraps(generate_request)
    async def answered(self: Any, asked: Any, request: Any = None, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        is_own = request is None or request.headers.get(_WARMUP) == own or str(asked.rid).startswith(HEALTH_CHECK_RID_PREFIX)
        if not is_own and (reason := refusal()):
            raise HTTPException(503, reason, {"retry-after": "1"})
        async with contextlib.aclosing(generate_request(self, asked, request, *args, **kwargs)) as outputs:
            async for output in outputs:
                yield output

    def post(url: str, headers: dict[str, str], **kwargs: Any) -> Any:
        return requests.post(url, headers=headers | {_WARMUP: own}, **kwargs)

    TokenizerManager.generate_request = answered
    requests = server.requests  # by which the server warms itself up
    server.requests = types.SimpleNamespace(**vars(requests) | {"post": post})
