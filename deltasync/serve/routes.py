"""Routes of a replica in an engine's HTTP server.

GET  /deltasync/status         version served, lag, errors, and each commit's numbers; ?commits=0 leaves these out
GET  /deltasync/ready          200 while a version that is new enough is served, otherwise 503; needs no token
POST /deltasync/sync           refresh now, and reply once a version is served
POST /deltasync/pin            stay at a version, or follow again, and reply once that is served; 409 keeps the old pin
POST /receive_weight_update    as /deltasync/sync, by the trainer's step, as PipelineRL's trainer calls it
GET  /deltasync/digest         sha256 of every live tensor, read between two engine steps

If DELTASYNC_HTTP_TOKEN is set, all but `ready` require it; without it, status replies with the state and the
versions only. Requests from other sites' pages are refused (`deltasync.serve.requests`), and so are bodies
not declared as JSON.

The follow loop may be in another process of the server than the routes: they are a `Routes` each, and one
asks the other (`deltasync.serve.calls`). This module is the only one of its room that needs FastAPI, which
engines bring along.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import Response

from deltasync import limits
from deltasync.config import ReplicaSettings, parse_pin, pin_text
from deltasync.errors import ApplyError, ConfigError, DeltaSyncError, MissingVersionError, describe
from deltasync.following import Follow, Status
from deltasync.serve import calls
from deltasync.serve.constraint import VersionConstraint, require_version, wait, wait_until_met
from deltasync.serve.engine import Failure, parse
from deltasync.serve.requests import PinTo, Refused, Sync, WeightUpdate, body_of, stranger, token_matches
from deltasync.threads import Workers

_T = TypeVar("_T")


def as_json(document: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a document."""
    return Response(msgspec.json.encode(document), status_code, headers, "application/json")


class AdapterStatus(Status, kw_only=True):
    """The status of a server with an adapter. `adapters` are model names that requests may use, `base_models`
    those that get the base model without an adapter, `max_lora_rank` and `lora_target_modules` what the engine
    loads of adapters.
    """

    adapters: list[str] | msgspec.UnsetType = msgspec.UNSET
    base_models: list[str] | msgspec.UnsetType = msgspec.UNSET
    max_lora_rank: int | msgspec.UnsetType = msgspec.UNSET
    lora_target_modules: list[str] | msgspec.UnsetType = msgspec.UNSET


describe(AdapterStatus)


class Routes:
    """The routes, and who may use them. An engine with more to say overrides the methods that routes call.

    Attributes:
        only_loopback: Whether only this machine reaches the server: it then answers to IP addresses and
            `localhost` alone.

    Args:
        follow: The loop, if it is in this process.
        ask: Otherwise how to reach the process that has it, as `calls.call` after the path.
    """

    def __init__(self, follow: Follow | None = None, ask: calls.Answering | None = None) -> None:
        self.settings = ReplicaSettings.from_env()
        self.only_loopback = False
        self._follow, self._ask = follow, ask
        self._refused = "deltasync follows nothing: set DELTASYNC_CHANNEL."
        self._slots = asyncio.Semaphore(limits.WAITING_REQUESTS)

    def attach(self, app: FastAPI, also: Iterable[tuple[str, str, Callable[..., Any]]] = ()) -> None:
        """Add the routes to an application that has not started, and others with the same guard: path,
        method, function.

        Every request of the application then waits for the version that it demands.
        """
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("/deltasync/sync", "POST", self._sync_asked),
            ("/deltasync/pin", "POST", self._pin_asked),
            ("/receive_weight_update", "POST", self._update_asked),
            ("/deltasync/digest", "GET", self._digest_asked),
            *also,
        ]
        router = APIRouter(lifespan=self.lifespan)
        for path, method, route in routes:
            router.add_api_route(
                path, route, methods=[method], dependencies=[Depends(self.authorize)], response_model=None
            )
        router.add_api_route("/deltasync/status", self._status_asked, response_model=None)
        router.add_api_route("/deltasync/ready", self._ready_asked, response_model=None)
        app.include_router(router)
        app.add_middleware(
            require_version,
            wait_until_met=self.demand,
            ends_requests=lambda: self.ends_requests,
            default_lag=self.settings.max_lag,
        )

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
        """Call one of the methods below, where the follow loop is."""
        if self._ask is None:
            return await self.call_here(method, *args, **named)
        async with contextlib.AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(self._ask(method, *args, **named))
            except (OSError, EOFError):
                raise Refused(503, "The process that follows the channel does not answer.") from None
            if "refused" in answer:
                raise Refused(answer["refused"], answer["body"].pop("error"), **answer["body"])
            found = parse(answer, Any)
            if isinstance(found, Failure):
                raise found.error()
            return found

    @contextlib.asynccontextmanager
    async def answer(self, method: str, *args: Any, **named: Any) -> AsyncIterator[dict[str, Any]]:
        """Answer another process's `call`."""
        try:
            answer = {"result": msgspec.to_builtins(await self.call_here(method, *args, **named))}
        except Refused as refused:
            answer = {"refused": refused.status_code, "body": refused.body}
        except Exception as error:  # noqa: BLE001 - raised where the call came from
            answer = {"error": msgspec.to_builtins(Failure.of(error))}
        yield answer

    async def call_here(self, method: str, *args: Any, **named: Any) -> Any:
        """As `call`, where the follow loop is in this process."""
        return await getattr(self, method)(*args, **named)

    @property
    def ends_requests(self) -> bool:
        """Whether a commit ends requests whose oldest token is older than they allow (`constraint.max_lag`)."""
        return False

    def follow(self) -> Follow:
        """Return the loop. Raises Refused if nothing is followed."""
        if self._follow is None:
            raise Refused(503, self._refused)
        return self._follow

    async def status(self, commits: int) -> Any:
        """Return the status with the last `commits`."""
        return self.follow().status(commits)

    async def not_ready(self) -> str | None:
        """Return why the server should get no requests; None if it serves a version that is new enough."""
        return self.follow().not_ready

    async def digest(self) -> Any:
        """Return the version served, and the sha256 of every live tensor, read between two steps of the
        loop; and of what the engine has made of them, if anything: of those that it does not keep as they are
        (`mirrored`), and copies.
        """
        follow = self.follow()

        def read() -> dict[str, Any]:
            with follow.between_steps() as target:
                number = None if target.version is None else target.version.version
                found = {"version": number, "sha256": target.digest()}  # type: ignore[attr-defined]
                made: list[dict[str, str]] = getattr(target, "made", list)()
                return found | ({"mirrored": sorted(target.mirrored), "made": made} if any(made) else {})  # type: ignore[attr-defined]

        try:
            return await _in_thread(read)
        except ApplyError as error:
            what, why = str(error), follow.error or ""
            raise Refused(503, why if what in why else f"{what} {why}".rstrip()) from None

    async def sync(self, timeout_s: float, *, version: int | None = None, step: int | None = None) -> Any:
        """Reply once what `Follow.request` takes is served, or with 504 after `timeout_s`."""
        follow, before = self.follow(), time.monotonic()
        try:
            served = await wait(follow, timeout_s, version, step)
        except ApplyError as error:
            raise Refused(409, str(error)) from None
        if served is None:
            status = follow.status(0)
            wanted = "The newest version" if version is None else f"Version {version}"
            raise Refused(
                504,
                f"{wanted if step is None else f'Step {step}'} is not served after {timeout_s:g} s: this "
                "replica serves "
                f"version {status.version}, the newest is version {status.newest_version}, and it is "
                f"{status.state}"
                f"{'' if status.pin is None else f', pinned: {status.pin}'}.",
                cause=status.error,
                **_in_short(status),
            )
        return {"version": served, "waited_s": time.monotonic() - before}

    async def pin(self, timeout_s: float, pin: str) -> Any:
        """Pin, and reply once what the pin points to is served; 409 if it is not there, or the pin was
        changed meanwhile.
        """
        follow = self.follow()
        try:
            wanted = parse_pin(pin)
            async with asyncio.timeout(timeout_s):
                await _in_thread(follow.check_pin, wanted)
        except ConfigError as error:
            raise Refused(422, str(error)) from None
        except MissingVersionError as error:
            raise Refused(409, f"{error} The pin stays: {pin_text(follow.pin)}.") from None
        except TimeoutError:
            raise Refused(
                504, f"The store does not say whether it is there. The pin stays: {pin_text(follow.pin)}."
            ) from None
        follow.set_pin(wanted, checked=True)
        return await self.sync(timeout_s)

    async def reach(self, version: int | None, exact: bool, timeout_s: float) -> int | None:
        """Wait for a version, as `constraint.wait_until_met`. Returns its number."""
        return (await wait_until_met(self.follow(), VersionConstraint(version, exact, timeout_s))).version

    async def demand(self, wanted: VersionConstraint) -> VersionConstraint:
        """Wait for a version that a request demands, as `constraint.require_version` has it; an adapter's older
        one that is still served is as good as the live one. Raises AckTimeoutError.
        """
        if wanted.exact and wanted.version in getattr(self._follow and self._follow.target, "kept", ()):
            return wanted
        return msgspec.structs.replace(
            wanted, version=await self.call("reach", *msgspec.structs.astuple(wanted))
        )

    async def authorize(self, request: Request) -> None:
        """Refuse requests without the token, and those of other sites' pages."""
        self._refuse_strangers(request)
        token = self.settings.http_token
        if token is not None and not token_matches(request.headers.get("authorization"), token):
            challenge = {"www-authenticate": 'Basic realm="deltasync"'}
            raise Refused(
                401, "Send DELTASYNC_HTTP_TOKEN as a bearer token, or as the password of any user.", challenge
            )

    def _refuse_strangers(self, request: Request) -> None:
        sentence = stranger(request.method, request.headers, self.only_loopback)
        if sentence is not None:
            raise Refused(403, sentence)

    async def _status_asked(
        self, request: Request, commits: Annotated[int, Query(ge=0)] = limits.HISTORY
    ) -> Response:
        self._refuse_strangers(request)
        is_full = "authorization" in request.headers or self.settings.http_token is None
        if is_full:
            await self.authorize(request)
        found = await self.call("status", commits)
        return as_json(found if is_full else _in_short(found))

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
        """Return a method's reply, which may take long. It is given up once the client has left, which frees
        its slot.
        """
        if self._slots.locked():
            raise Refused(
                429, f"{limits.WAITING_REQUESTS} requests wait for versions already.", {"retry-after": "1"}
            )

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


def _in_short(status: Any) -> dict[str, Any]:
    """Return what may be read of a status without the token, as by a trainer that waits for its server behind
    a router.
    """
    names = {"state", "run_id", "version", "epoch", "sha256", "newest_version"}
    names |= {"logprobs_mode", "adapters", "max_lora_rank", "lora_target_modules", "max_lag"}
    return {name: value for name, value in msgspec.to_builtins(status).items() if name in names}


_threads = Workers(limits.REPLY_THREADS, "reply")


async def _in_thread(call: Callable[..., _T], *args: Any) -> _T:
    """Run a call in a thread that keeps neither the event loop nor the end of the process, should the store
    hang.
    """
    return await asyncio.shield(asyncio.wrap_future(_threads.submit(call, *args)))


async def _body(request: Request, kind: type[_T]) -> _T:
    if request.query_params:
        raise Refused(
            422,
            f"This route takes its fields in a JSON body, not in the address: {request.url.query[:80]!r}.",
        )
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limits.BODY_BYTES:
            raise Refused(413, f"The body is larger than {limits.BODY_BYTES:,} bytes.")
    if (
        data
        and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
    ):
        raise Refused(415, "Send the body as content-type: application/json.")
    try:
        return body_of(bytes(data), kind)
    except ConfigError as error:
        raise Refused(422, str(error)) from None
