"""Routes of a replica whose follow loop runs in another process than the HTTP server.

GET  /deltasync/status         version served, lag, errors, and each commit's numbers
GET  /deltasync/ready          200 while a version that is new enough is served, otherwise 503; needs no token
POST /deltasync/sync           refresh now, and reply once a version is served
POST /deltasync/pin            stay at a version, or skip some, and reply once that is served; 409 keeps the old pin
POST /receive_weight_update    as sync, by the trainer's step
GET  /deltasync/digest         sha256 of every live tensor (only with DELTASYNC_DIGEST_ROUTE=1)

All but `ready` require DELTASYNC_HTTP_TOKEN, if it is set. This module is the only one of its room that needs FastAPI, which
engines bring along.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError
from deltasync.following.questions import STATUS_CODES
from deltasync.following.requests import PinTo, Sync, WeightUpdate, body_of, stranger, token_matches

_Body = TypeVar("_Body")

_TICK_S = 0.5
_ASK_S = 0.01


class RemoteRoutes:
    """The routes. `states` returns the `Questions.state` of each loop, and `ask` puts a question to all of them.

    Attributes:
        not_ready: Why requests should not be answered, as of a moment ago.
    """

    def __init__(
        self, states: Callable[[], Awaitable[list[dict[str, Any]]]], ask: Callable[[dict[str, Any]], Awaitable[object]]
    ) -> None:
        self.settings = ReplicaSettings.from_env()
        self.not_ready: str | None = "This server serves no version yet."
        self._refresh, self._put = states, ask

    def router(self) -> APIRouter:
        """Return the routes for an application that has not started."""
        router = APIRouter(lifespan=self._ticking)
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("/deltasync/status", "GET", self._status),
            ("/deltasync/sync", "POST", self._sync),
            ("/deltasync/pin", "POST", self._pin),
            ("/receive_weight_update", "POST", self._receive),
        ]
        if self.settings.digest_route:
            routes.append(("/deltasync/digest", "GET", self._digest))
        for path, method, route in routes:
            guards = [Depends(self._authorize)]
            router.add_api_route(path, route, methods=[method], dependencies=guards, response_model=None)
        router.add_api_route("/deltasync/ready", self._ready, response_model=None)
        return router

    async def _states(self) -> list[dict[str, Any]]:
        states = await self._refresh()
        self.not_ready = next((state["not_ready"] for state in states if state["not_ready"]), None)
        return states

    async def _status(self) -> Any:
        """Return the status; of several groups, that of the one furthest behind, and all of them in `groups`."""
        found = [state["status"] for state in await self._states()]
        last = min(found, key=lambda status: status["version"] or 0)
        return last if len(found) == 1 else last | {"groups": found}

    async def _ready(self) -> JSONResponse:
        await self._states()
        return JSONResponse({"ready": self.not_ready is None, "reason": self.not_ready}, 503 if self.not_ready else 200)

    async def _digest(self) -> Any:
        return await self._ask(600.0, digest=True)

    async def _sync(self, request: Request) -> Any:
        wanted = await _body(request, Sync)
        return await self._ask(wanted.timeout_s, version=wanted.version)

    async def _receive(self, request: Request) -> Any:
        wanted = await _body(request, WeightUpdate)
        return await self._ask(wanted.timeout_s, step=wanted.version)

    async def _pin(self, request: Request) -> Any:
        wanted = await _body(request, PinTo)
        return await self._ask(wanted.timeout_s, pin=wanted.pin)

    async def _ask(self, timeout_s: float, **question: Any) -> Any:
        number, answers = uuid.uuid4().hex, list[Any]()
        await self._put({**question, "id": number, "timeout_s": timeout_s})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s + 5):
                while not answers or not all(answers):
                    await asyncio.sleep(_ASK_S)
                    answers = [state["answers"].get(number) for state in await self._states()]
        answer = next((each for each in answers if not each or "error" in each), answers[0] if answers else None)
        kind = (answer or {}).get("error", "").partition(":")[0]
        if answer and not kind:
            return answer
        return JSONResponse(answer or {"error": "The schedulers do not answer."}, STATUS_CODES.get(kind, 504))

    async def _authorize(self, request: Request) -> None:
        """Refuse requests without the token, and those of other sites' pages."""
        token, sentence = self.settings.http_token, stranger(request.method, request.headers, False)
        if sentence:
            raise HTTPException(403, sentence)
        if token is not None and not token_matches(request.headers.get("authorization"), token):
            raise HTTPException(401, "Send DELTASYNC_HTTP_TOKEN as a bearer token.")

    @contextlib.asynccontextmanager
    async def _ticking(self, _: FastAPI) -> AsyncIterator[None]:
        """Update the states of the schedulers."""

        async def tick() -> None:
            while True:
                with contextlib.suppress(Exception):  # asked again soon
                    await self._states()
                await asyncio.sleep(_TICK_S)

        task = asyncio.create_task(tick(), name="deltasync-tick")
        yield
        task.cancel()


async def _body(request: Request, kind: type[_Body]) -> _Body:
    try:
        return body_of(await request.body(), kind)
    except ConfigError as error:
        raise HTTPException(422, str(error)) from None
