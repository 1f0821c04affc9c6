"""Routes of a replica in an engine's HTTP server.

GET  /deltasync/status         version served, lag, errors, and each commit's numbers; ?commits=0 leaves these out
GET  /deltasync/ready          200 while a version that is new enough is served, otherwise 503; needs no token
POST /deltasync/sync           refresh now, and reply once a version is served
POST /deltasync/pin            stay at a version, or follow again, and reply once that is served; 409 keeps the old pin
POST /receive_weight_update    as /deltasync/sync, by the trainer's step, as PipelineRL's trainer calls it
GET  /deltasync/digest         sha256 of every live tensor, read between two engine steps

If DELTASYNC_HTTP_TOKEN is set, all but `ready` require it; without it, status replies with the state and the versions only.
Requests from other sites' pages are refused (`deltasync.following.requests`), and so are bodies not declared as JSON.

`LocalRoutes` are for a follow loop in the server's process, `RemoteRoutes` for loops in other processes. This module is the
only one of its room that needs FastAPI, which engines bring along.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response

from deltasync import limits
from deltasync.config import ReplicaSettings
from deltasync.errors import AckTimeoutError, ConfigError, DeltaSyncError
from deltasync.following import requests
from deltasync.following.loop import Follow
from deltasync.following.requests import (
    PinTo,
    Refused,
    Sync,
    WeightUpdate,
    body_of,
    in_short,
    stranger,
    token_matches,
)
from deltasync.following.wanted import Wanted

_Body = TypeVar("_Body")

_TICK_S = 0.5
_ASK_S = 0.01
_STATUS_S = 10.0


def as_json(document: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a document."""
    return Response(msgspec.json.encode(document), status_code, headers, "application/json")


class Routes(ABC):
    """The routes, and who may use them.

    Attributes:
        only_loopback: Whether only this machine reaches the server: it then answers to IP addresses and `localhost` alone.
    """

    def __init__(self) -> None:
        self.settings = ReplicaSettings.from_env()
        self.only_loopback = False
        self._slots = asyncio.Semaphore(limits.WAITING_REQUESTS)

    def attach(self, app: FastAPI, also: Iterable[tuple[str, str, Callable[..., Any]]] = ()) -> None:
        """Add the routes to an application that has not started, and others with the same guard: path, method, function."""
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("/deltasync/sync", "POST", self._sync_asked),
            ("/deltasync/pin", "POST", self._pin_asked),
            ("/receive_weight_update", "POST", self._update_asked),
            ("/deltasync/digest", "GET", self._digest_asked),
            *also,
        ]
        router = APIRouter(lifespan=self.lifespan)
        for path, method, route in routes:
            router.add_api_route(path, route, methods=[method], dependencies=[Depends(self.authorize)], response_model=None)
        router.add_api_route("/deltasync/status", self._status_asked, response_model=None)
        router.add_api_route("/deltasync/ready", self._ready_asked, response_model=None)
        app.include_router(router)

        @app.exception_handler(Refused)
        async def refused(request: Request, error: Refused) -> Response:
            return as_json(error.body, error.status_code, error.headers)

        @app.exception_handler(DeltaSyncError)
        async def failed(request: Request, error: DeltaSyncError) -> Response:
            return as_json({"error": f"{type(error).__name__}: {error}"}, 503)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Return a context that lasts as long as the application."""
        yield

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        """Call one of the methods below."""
        return await getattr(self, method)(*args, **named)

    @abstractmethod
    async def status(self, commits: int) -> Any:
        """Return the status with the last `commits`."""

    @abstractmethod
    async def not_ready(self) -> str | None:
        """Return why the server should get no requests; None if it serves a version that is new enough."""

    @abstractmethod
    async def digest(self) -> Any:
        """Return the version served, and the sha256 of every tensor."""

    @abstractmethod
    async def sync(self, timeout_s: float, *, version: int | None = None, step: int | None = None) -> Any:
        """Reply once what `Follow.request` takes is served, or with 504 after `timeout_s`."""

    @abstractmethod
    async def pin(self, timeout_s: float, pin: str) -> Any:
        """Pin, and reply once what the pin points to is served; 409 if it is not there, or the pin was changed meanwhile."""

    async def authorize(self, request: Request) -> None:
        """Refuse requests without the token, and those of other sites' pages."""
        self._refuse_strangers(request)
        token = self.settings.http_token
        if token is not None and not token_matches(request.headers.get("authorization"), token):
            challenge = {"www-authenticate": 'Basic realm="deltasync"'}
            raise Refused(401, "Send DELTASYNC_HTTP_TOKEN as a bearer token, or as the password of any user.", challenge)

    def _refuse_strangers(self, request: Request) -> None:
        sentence = stranger(request.method, request.headers, self.only_loopback)
        if sentence is not None:
            raise Refused(403, sentence)

    async def _status_asked(self, request: Request, commits: Annotated[int, Query(ge=0)] = limits.HISTORY) -> Response:
        self._refuse_strangers(request)
        is_full = "authorization" in request.headers or self.settings.http_token is None
        if is_full:
            await self.authorize(request)
        found = await self.call("status", commits)
        return as_json(found if is_full else in_short(found))

    async def _ready_asked(self) -> Response:
        reason = await self.call("not_ready")
        return as_json({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def _digest_asked(self) -> Any:
        return await self.call("digest")

    async def _sync_asked(self, request: Request) -> Any:
        wanted = await _body(request, Sync)
        return await self._hold(request, "sync", wanted.timeout_s, version=wanted.version)

    async def _update_asked(self, request: Request) -> Any:
        wanted = await _body(request, WeightUpdate)
        return await self._hold(request, "sync", wanted.timeout_s, step=wanted.version)

    async def _pin_asked(self, request: Request) -> Any:
        wanted = await _body(request, PinTo)
        return await self._hold(request, "pin", wanted.timeout_s, wanted.pin)

    async def _hold(self, request: Request, method: str, *args: Any, **named: Any) -> Any:
        """Return a method's reply, which may take long. It is given up once the client has left, which frees its slot."""
        if self._slots.locked():
            raise Refused(429, f"{limits.WAITING_REQUESTS} requests wait for versions already.", {"retry-after": "1"})

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        async with self._slots:
            reply, gone = asyncio.create_task(self.call(method, *args, **named)), asyncio.create_task(left())
            try:
                await asyncio.wait({reply, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not reply.done():
                    raise Refused(499, "The client has left.")
                return reply.result()
            finally:
                reply.cancel()
                gone.cancel()
                await asyncio.wait({reply, gone})


class LocalRoutes(Routes):
    """Routes to a follow loop of this process. A subclass has `follow`, the status and what else the engine says."""

    @abstractmethod
    def follow(self) -> Follow:
        """Return the loop. Raises Refused if nothing is followed."""

    async def digest(self) -> Any:
        """As `Routes.digest`."""
        return await requests.digest(self.follow())

    async def pin(self, timeout_s: float, pin: str) -> Any:
        """As `Routes.pin`."""
        return await requests.pin(self.follow(), pin, timeout_s)

    async def sync(self, timeout_s: float, *, version: int | None = None, step: int | None = None) -> Any:
        """As `Routes.sync`."""
        return await requests.sync(self.follow(), timeout_s, version, step)


class RemoteRoutes(Routes):
    """Routes to follow loops in other processes.

    `states` returns the `Requests.state` of each loop, and `ask` puts a request to all of them.

    Attributes:
        last_not_ready: Why requests should not be answered, as of a moment ago.
        last_version: The version served then; of several groups, by the one furthest behind.
    """

    def __init__(
        self, states: Callable[[], Awaitable[list[dict[str, Any]]]], ask: Callable[[dict[str, Any]], Awaitable[object]]
    ) -> None:
        super().__init__()
        self.last_not_ready: str | None = "This server serves no version yet."
        self.last_version: int | None = None
        self._refresh, self._put = states, ask

    async def _states(self) -> list[dict[str, Any]]:
        states = await self._refresh()
        self.last_not_ready = next((state["not_ready"] for state in states if state["not_ready"]), None)
        self.last_version = min((state["version"] for state in states), key=lambda version: version or 0)
        return states

    async def not_ready(self) -> str | None:
        """As `Routes.not_ready`."""
        await self._states()
        return self.last_not_ready

    async def status(self, commits: int) -> Any:
        """Return the status; of several groups, that of the one furthest behind, and all of them in `groups`."""
        found = await self._answers(_STATUS_S, commits=commits)
        last = min(found, key=lambda status: status["version"] or 0)
        return last if len(found) == 1 else last | {"groups": found}

    async def digest(self) -> Any:
        """As `Routes.digest`."""
        return (await self._answers(600.0, digest=True))[0]

    async def sync(self, timeout_s: float, *, version: int | None = None, step: int | None = None) -> Any:
        """As `Routes.sync`."""
        return (await self._answers(timeout_s, version=version, step=step))[0]

    async def pin(self, timeout_s: float, pin: str) -> Any:
        """As `Routes.pin`."""
        return (await self._answers(timeout_s, pin=pin))[0]

    async def reach(self, wanted: Wanted) -> Wanted:
        """As `wanted.reach`, of all loops."""
        if wanted.version is not None and wanted.allows(self.last_version, self.last_version):
            return wanted
        try:
            found = [
                answer["version"] for answer in await self._answers(wanted.timeout_s, version=wanted.version, step=None)
            ]
        except Refused as refused:
            raise AckTimeoutError(wanted.refusal(self.last_version, str(refused))) from None
        if not wanted.allows(min(found), max(found)):
            raise AckTimeoutError(wanted.refusal(max(found)))
        return wanted if wanted.version is not None else msgspec.structs.replace(wanted, version=min(found))

    async def _answers(self, timeout_s: float, **request: Any) -> list[dict[str, Any]]:
        """Return what each loop answers. Raises Refused with an error of one, or if one does not answer in time.

        A request that nobody waits for any more is withdrawn.
        """
        number, answers = uuid.uuid4().hex, list[Any]()
        await self._put({**request, "id": number, "timeout_s": timeout_s})
        try:
            async with asyncio.timeout(timeout_s + 5):
                while not answers or not all(answers):
                    await asyncio.sleep(_ASK_S)
                    answers = [state["answers"].get(number) for state in await self._states()]
        except TimeoutError:
            pass
        finally:
            if not answers or not all(answers):
                await self._put({"id": number, "timeout_s": 0.0, "withdrawn": True})
        for answer in answers or [None]:
            fields = dict(answer or {"refused": 504, "error": "The schedulers do not answer."})
            if "refused" in fields:
                raise Refused(fields.pop("refused"), fields.pop("error"), **fields)
        return answers

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
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
    if request.query_params:
        raise Refused(422, f"This route takes its fields in a JSON body, not in the address: {request.url.query[:80]!r}.")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limits.BODY_BYTES:
            raise Refused(413, f"The body is larger than {limits.BODY_BYTES:,} bytes.")
    if data and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "Send the body as content-type: application/json.")
    try:
        return body_of(bytes(data), kind)
    except ConfigError as error:
        raise Refused(422, str(error)) from None
