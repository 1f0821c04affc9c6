"""vLLM's endpoint plugin `deltasync`: starts the follow loop with the server and adds its routes.

GET  /deltasync/                 a live page for people
GET  /deltasync/status           version served, lag, errors, and each commit's numbers
GET  /deltasync/ready            200 while a version that is new enough is served, otherwise 503; needs no token
POST /deltasync/sync             refresh now, and reply once a version is served
POST /deltasync/pin              stay at a version, or skip some, and reply once that is served; 409 keeps the old pin
POST /receive_weight_update      as /deltasync/sync, for trainers that speak PipelineRL's inference contract; also
POST /request_weight_update      under the name in its paper, with POST /init_process_group, which does nothing
GET  /deltasync/digest           sha256 of every live tensor (only with DELTASYNC_DIGEST_ROUTE=1)

If DELTASYNC_HTTP_TOKEN is set, all of them require it; without it, status replies with the state and the versions only.
Requests from other sites' pages are refused (`deltasync.following.requests`), and so are bodies not declared as JSON.
Replies get the headers `x-deltasync-versions` and `x-deltasync-spans` (`vllm_plugin.versions`). If deltasync cannot follow
with this vLLM or its options, the routes say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, Response

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError, MissingVersionError, PinnedError, redacted
from deltasync.following import HISTORY, Follow, Pin
from deltasync.following.engine import open_reader
from deltasync.following.metrics import Metrics
from deltasync.following.requests import (
    PinTo,
    Sync,
    WeightUpdate,
    body_of,
    is_loopback,
    stranger,
    token_matches,
    until_ready,
)
from vllm_plugin import compat, logger
from vllm_plugin.engine import Unguarded, is_salted
from vllm_plugin.messages import ServerStatus
from vllm_plugin.target import EngineTarget, LiveVersions, OnLoop, open_follow
from vllm_plugin.versions import attend, replies

_Body = TypeVar("_Body")

_BODY_BYTES = 4 << 20  # PipelineRL's trainer names every tensor in its body
_MOST_HELD = 64  # requests that wait for a version
_TICK_S = 1.0
_PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def _json(document: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(document), status_code, headers, "application/json")


def _rank(args: Namespace) -> int | None:
    """Return this engine's rank among those that share a port: in data parallelism, or as a replica of Ray Serve."""
    if serve := sys.modules.get("ray.serve"):
        with contextlib.suppress(serve.exceptions.RayServeException):  # not in a replica
            return int(serve.get_replica_context().rank.local_rank)
    rank: int | None = getattr(args, "data_parallel_rank", None)
    return rank


def _in_short(status: ServerStatus) -> dict[str, Any]:
    """Return what may be read without the token."""
    return {"state": status.state, "version": status.version, "newest_version": status.newest_version}


class _Refused(Exception):
    """The request is answered with this error."""

    def __init__(self, status_code: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.response = _json({"error": sentence}, status_code, headers)


class DeltaSyncEndpoints:
    """Implements `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "deltasync"
    required_tasks = None  # whatever a server does with the weights

    def __init__(self) -> None:
        self._settings = ReplicaSettings.from_env()
        self._follow: Follow | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._refused = "deltasync follows nothing: set DELTASYNC_CHANNEL."
        self._logprobs_mode: str | None = None
        self._metrics: Metrics | None = None
        self._held = asyncio.Semaphore(_MOST_HELD)
        self._only_loopback = False

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the headers of completions."""
        guarded = [Depends(self._authorize)]
        page = importlib.resources.files("vllm_plugin").joinpath("page.html").read_text("utf-8")

        @app.get("/deltasync/", dependencies=guarded, include_in_schema=False)
        async def show() -> HTMLResponse:
            return HTMLResponse(page, headers=_PAGE_HEADERS)

        @app.get("/deltasync/status")
        async def status(request: Request, commits: Annotated[int, Query(ge=0)] = HISTORY) -> Response:
            self._refuse_strangers(request)
            is_full = "authorization" in request.headers or self._settings.http_token is None
            if is_full:
                await self._authorize(request)
            found = self._status(commits)
            return _json(found if is_full else _in_short(found))

        @app.get("/deltasync/ready")
        async def ready() -> Response:
            reason = self._not_ready()
            return _json({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

        @app.post("/deltasync/sync", dependencies=guarded)
        async def sync(request: Request) -> Response:
            wanted = await _body(request, Sync)
            return await self._sync(request, wanted.timeout_s, version=wanted.version)

        @app.post("/deltasync/pin", dependencies=guarded)
        async def pin(request: Request) -> Response:
            wanted = await _body(request, PinTo)
            return await self._pin(request, wanted)

        if self._settings.digest_route:

            @app.get("/deltasync/digest", dependencies=guarded)
            async def digest() -> dict[str, Any]:
                return await asyncio.to_thread(self._digest)

        self._attach_pipeline_rl(app)

        @app.exception_handler(_Refused)
        async def refused(request: Request, error: _Refused) -> Response:
            return error.response

        @app.exception_handler(DeltaSyncError)
        async def failed(request: Request, error: DeltaSyncError) -> Response:
            return _json({"error": f"{type(error).__name__}: {error}"}, 503)

        app.include_router(APIRouter(lifespan=self._lifespan))
        app.add_middleware(replies, live=self._live)

    def _attach_pipeline_rl(self, app: FastAPI) -> None:
        """Add the routes that PipelineRL's trainer calls once it has published: weights come through the channel."""
        guarded = [Depends(self._authorize)]

        @app.post("/receive_weight_update", dependencies=guarded)
        @app.post("/request_weight_update", dependencies=guarded)
        async def receive_weight_update(request: Request) -> Response:
            wanted = await _body(request, WeightUpdate)
            return await self._sync(request, wanted.timeout_s, step=wanted.version)

        @app.post("/init_process_group", dependencies=guarded)
        async def init_process_group() -> Response:
            return _json({"status": "ok", "detail": "No process group is needed: weights come through the channel."})

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Stop following before vLLM stops its engine, which would look like a fault."""
        yield
        if self._follow is not None and self._ticking is not None:
            self._ticking.cancel()
            await asyncio.to_thread(self._follow.stop)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start to follow, or note why it cannot start. vLLM serves in any case."""
        channel = self._settings.channel
        if channel is None or engine_client is None:  # the second renders prompts only
            return
        engine_client.deltasync_attached = True  # it follows, or this says why not (`vllm_plugin._refuse_unfollowed`)
        waits = self._settings.wait_ready and not _is_pushed(engine_client)
        attend(
            engine_client,
            live=self._live,
            refusal=until_ready(self._not_ready) if waits else lambda: None,
            pauses=lambda: None if (engine := self._engine()) is None else engine.pauses,
        )
        try:
            self._settings = self._settings.at_port(getattr(args, "port", 0), _rank(args))
            self._check_address(args)
            self._metrics = Metrics()
            self._refused = await self._refusal(engine_client, args) or ""
            if not self._refused:
                await self._start(engine_client, state, self._metrics)
        except DeltaSyncError as error:
            self._refused = str(error)
        except Exception as error:  # the server serves the weights it has loaded, and says why
            logger.exception("deltasync could not start")
            self._refused = f"deltasync could not start: {type(error).__name__}: {error}"
        if self._refused:
            if self._metrics is not None:
                self._metrics.following.set(0)
            logger.error("This server does not follow %s. %s", redacted(channel), self._refused)

    def _check_address(self, args: Namespace) -> None:
        """Note whether only this machine reaches the server, and warn if others do without a token."""
        host = getattr(args, "host", None)
        without_token = self._settings.http_token is None
        self._only_loopback = without_token and is_loopback(host)
        if without_token and not self._only_loopback and not getattr(args, "uds", None):
            logger.warning(
                "This server listens on %s without DELTASYNC_HTTP_TOKEN: whoever reaches it may use /deltasync/*. "
                "Set one, or --host 127.0.0.1.",
                host or "all addresses",
            )

    async def _refusal(self, engine: Any, args: Namespace) -> str | None:
        """Return why this server cannot follow, in one sentence, or None if it can."""
        import vllm

        reason = compat.unsuited(vllm.__version__) or compat.refusal(engine.vllm_config, args)
        if reason is not None:
            return reason
        if _is_pushed(engine):
            return "A trainer pushes versions here, by vLLM's own weight-transfer routes."
        if self._settings.adapter is not None:
            return None if args.enable_lora else "DELTASYNC_ADAPTER is set, but vLLM was started without --enable-lora."
        if not args.worker_extension_cls:
            return "vLLM was started without --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension."
        if not await is_salted(engine):
            return "The engine's process did not load deltasync, so its prefix cache would mix versions; see its log."
        return None

    async def _start(self, engine: Any, state: Any, metrics: Metrics) -> None:
        if self._settings.adapter is not None:
            from vllm_plugin.adapters import AdapterTarget

            reader, run = open_reader(self._settings), OnLoop(asyncio.get_running_loop())
            target = AdapterTarget(engine, reader, self._settings, state.openai_serving_models, run)
            self._follow = Follow(reader, target, self._settings, observer=metrics, log=logger)
        else:
            follow = open_follow(Unguarded(engine), self._settings, metrics, OnLoop(asyncio.get_running_loop()))
            assert isinstance(follow.target, EngineTarget)
            follow.target.pauses.on_use = follow.poke
            await follow.target.pauses.guard(engine)
            self._follow = follow
        self._logprobs_mode = engine.vllm_config.model_config.logprobs_mode
        self._ticking = asyncio.create_task(self._tick(self._follow, metrics), name="deltasync-tick")
        logger.info(
            "deltasync follows %s (%s) as %s; versions and replicas: deltasync watch %s",
            *(self._follow.reader.store.url, self._follow.pin, self._settings.replica_id, self._follow.reader.store.url),
        )
        self._follow.start()

    async def _tick(self, follow: Follow, metrics: Metrics) -> None:
        """Keep the metrics true while a step hangs."""
        while True:
            metrics.followed(follow)
            await asyncio.sleep(_TICK_S)

    def _engine(self) -> EngineTarget | None:
        """What the loop moves, unless that is an adapter."""
        target = None if self._follow is None else self._follow.target
        return target if isinstance(target, EngineTarget) else None

    def _live(self) -> LiveVersions | None:
        """The versions that made tokens. None with an adapter: a reply names its version as its model."""
        return None if (engine := self._engine()) is None else engine.live

    def _status(self, commit_count: int) -> ServerStatus:
        settings, follow = self._settings, self._follow
        if follow is None and settings.channel is not None:
            channel = redacted(settings.channel)
            return ServerStatus(replica_id=settings.replica_id, channel=channel, state="refused", error=self._refused)
        follow, engine = self._running(), self._engine()
        found = ServerStatus(**msgspec.structs.asdict(follow.status(commit_count)), logprobs_mode=self._logprobs_mode)
        found.kv_cache = settings.kv_cache
        if engine is None:
            found.adapters = getattr(follow.target, "models", [])
        elif engine.workers.is_open:
            found.reloaded_tensors, found.reloaded = engine.workers.reloaded_count, engine.workers.reasons
            found.patched_tensors = len(follow.reader.specs) - found.reloaded_tensors
        return found

    def _digest(self) -> dict[str, Any]:
        with self._running().between_steps() as target:
            number = None if target.version is None else target.version.version
            return {"version": number, "sha256": target.digest()}  # type: ignore[attr-defined]

    def _not_ready(self) -> str | None:
        engine = self._engine()
        if engine is not None and engine.pauses.held:
            return f"This server does not generate now. {self._running().error or ''}".rstrip()
        return self._refused if self._follow is None else self._follow.not_ready

    async def _pin(self, request: Request, wanted: PinTo) -> Response:
        """Pin, and reply once what the pin points to is served; 409 if it is not there, or the pin was changed meanwhile."""
        follow = self._running()
        try:
            pin = Pin.parse(wanted.pin)
        except ConfigError as error:
            raise _Refused(422, str(error)) from None
        self._refuse_crowds()
        try:
            async with asyncio.timeout(wanted.timeout_s):
                await asyncio.to_thread(follow.check_pin, pin)
        except MissingVersionError as error:
            raise _Refused(409, f"{error} The pin stays: {follow.pin}.") from None
        except TimeoutError:
            raise _Refused(504, f"The store does not say whether it is there. The pin stays: {follow.pin}.") from None
        follow.set_pin(pin, checked=True)
        return await self._sync(request, wanted.timeout_s)

    def _refuse_crowds(self) -> None:
        if self._held.locked():
            raise _Refused(429, f"{_MOST_HELD} requests wait for versions already.", {"retry-after": "1"})

    async def _sync(
        self, request: Request, timeout_s: float, *, version: int | None = None, step: int | None = None
    ) -> Response:
        """Reply once what `Follow.request` takes is served, or with 504 after `timeout_s`."""
        follow, before = self._running(), time.monotonic()
        self._refuse_crowds()
        try:
            async with self._held:
                served = await _wait(follow, request, timeout_s, version, step)
        except PinnedError as error:
            raise _Refused(409, str(error)) from None
        if served is None:
            status = self._status(0)
            wanted = "The newest version" if version is None else f"Version {version}"
            sentence = (
                f"{wanted if step is None else f'Step {step}'} is not served after {timeout_s:g} s: this replica serves "
                f"version {status.version}, the newest is version {status.newest_version}, and it is {status.state}"
                f"{'' if status.pin is None else f', pinned: {status.pin}'}."
            )
            return _json({"error": sentence, "cause": status.error} | _in_short(status), 504)
        return _json({"version": served, "waited_s": time.monotonic() - before})

    def _refuse_strangers(self, request: Request) -> None:
        sentence = stranger(request.method, request.headers, self._only_loopback)
        if sentence is not None:
            raise _Refused(403, sentence)

    async def _authorize(self, request: Request) -> None:
        self._refuse_strangers(request)
        token = self._settings.http_token
        if token is not None and not token_matches(request.headers.get("authorization"), token):
            challenge = {"www-authenticate": 'Basic realm="deltasync"'}
            raise _Refused(401, "Send DELTASYNC_HTTP_TOKEN as a bearer token, or as the password of any user.", challenge)

    def _running(self) -> Follow:
        if self._follow is None:
            raise _Refused(503, self._refused)
        return self._follow


async def _wait(follow: Follow, request: Request, timeout_s: float, version: int | None, step: int | None) -> int | None:
    """Return the number of the version served once it is what a client asks for; None after `timeout_s`, or if it left.

    Raises:
        PinnedError: as `Follow.request`.
    """
    loop, stepped = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is about to end
            loop.call_soon_threadsafe(stepped.set)

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    follow.on_step.append(wake)
    reached, gone = follow.request(version, step), asyncio.create_task(left())
    try:
        async with asyncio.timeout(timeout_s):
            while (served := reached()) is None and not gone.done():
                waiting = asyncio.create_task(stepped.wait())
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                stepped.clear()
            return served
    except TimeoutError:
        return None
    finally:
        follow.on_step.remove(wake)
        gone.cancel()


def _is_pushed(engine: Any) -> bool:
    """Whether a trainer pushes versions here, so that nothing has to be waited for."""
    transfer = getattr(getattr(engine, "vllm_config", None), "weight_transfer_config", None)
    return transfer is not None and transfer.backend == "deltasync"


async def _body(request: Request, kind: type[_Body]) -> _Body:
    if request.query_params:
        raise _Refused(422, f"This route takes its fields in a JSON body, not in the address: {request.url.query[:80]!r}.")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _BODY_BYTES:
            raise _Refused(413, f"The body is larger than {_BODY_BYTES:,} bytes.")
    if data and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise _Refused(415, "Send the body as content-type: application/json.")
    try:
        return body_of(bytes(data), kind)
    except ConfigError as error:
        raise _Refused(422, str(error)) from None
