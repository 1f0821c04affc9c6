"""vLLM's endpoint plugin `deltasync`: starts the follow loop with the server and adds its routes.

The routes are those of `deltasync.following.routes`, and three more:

GET  /deltasync/                 a live page for people
POST /request_weight_update      as /receive_weight_update, under the name in PipelineRL's paper
POST /init_process_group         does nothing, because weights come through the channel

Replies get the headers `x-deltasync-versions` and `x-deltasync-spans` (`vllm_plugin.versions`). If deltasync cannot follow
with this vLLM or its options, the routes say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from deltasync.errors import AckTimeoutError, DeltaSyncError, describe, printable, redacted
from deltasync.following import Follow, Status
from deltasync.following.engine import open_reader
from deltasync.following.metrics import Metrics
from deltasync.following.requests import Refused, is_loopback, until_ready
from deltasync.following.routes import LocalRoutes, as_json
from deltasync.following.wanted import Wanted, demanding, reach
from vllm_plugin import compat, logger
from vllm_plugin.engine import is_pushed, is_salted
from vllm_plugin.pauses import OnLoop, Pauses
from vllm_plugin.target import EngineTarget, LiveVersions, open_follow
from vllm_plugin.versions import attend, replies

_TICK_S = 1.0
_PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Reason(msgspec.Struct):
    """A reason why tensors take the fallback, their number, and the name of the first."""

    reason: str
    tensors: int
    first: str


class ServerStatus(Status, kw_only=True):
    """Reply of `GET /deltasync/status` (docs/operations/replica.md). `adapters` are model names that requests may use."""

    kv_cache: str | None = None
    patched_tensors: int | None = None
    reloaded_tensors: int | None = None
    reloaded: list[Reason] = msgspec.field(default_factory=list)
    adapters: list[str] | msgspec.UnsetType = msgspec.UNSET
    logprobs_mode: str | None = None


describe(ServerStatus)


def _rank(args: Namespace) -> int | None:
    """Return this engine's rank among those that share a port: in data parallelism, or as a replica of Ray Serve."""
    if serve := sys.modules.get("ray.serve"):
        with contextlib.suppress(serve.exceptions.RayServeException):  # not in a replica
            return int(serve.get_replica_context().rank.local_rank)
    rank: int | None = getattr(args, "data_parallel_rank", None)
    return rank


class DeltaSyncEndpoints(LocalRoutes):
    """Implements `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "deltasync"
    required_tasks = None  # whatever a server does with the weights

    def __init__(self) -> None:
        super().__init__()
        self._follow: Follow | None = None
        self._pauses: Pauses | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._refused = "deltasync follows nothing: set DELTASYNC_CHANNEL."
        self._logprobs_mode: str | None = None
        self._metrics: Metrics | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the headers of completions."""
        page = importlib.resources.files("vllm_plugin").joinpath("page.html").read_text("utf-8")

        async def show() -> HTMLResponse:
            return HTMLResponse(page, headers=_PAGE_HEADERS)

        async def init_process_group() -> Response:
            return as_json({"status": "ok", "detail": "No process group is needed: weights come through the channel."})

        own: list[tuple[str, str, Callable[..., Any]]] = [
            ("/deltasync/", "GET", show),
            ("/request_weight_update", "POST", self._update_asked),
            ("/init_process_group", "POST", init_process_group),
        ]
        self.attach(app, own)
        app.add_middleware(replies, live=self._live, pauses=lambda: self._pauses)
        app.add_middleware(demanding, reach=self._reach)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Stop following before vLLM stops its engine, which would look like a fault."""
        yield
        if self._follow is not None and self._ticking is not None:
            self._ticking.cancel()
            await asyncio.to_thread(self._follow.stop)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start to follow, or note why it cannot start. vLLM serves in any case."""
        channel = self.settings.channel
        if channel is None or engine_client is None:  # the second renders prompts only
            return
        engine_client.deltasync_refusal = lambda: None  # it follows, or `attend` says why not
        waits = self.settings.wait_ready and not is_pushed(engine_client)
        attend(
            engine_client,
            live=self._live,
            refusal=until_ready(self._not_ready) if waits else lambda: None,
            pauses=lambda: self._pauses,
        )
        try:
            self.settings = self.settings.at_port(getattr(args, "port", 0), _rank(args))
            self._note_address(args)
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

    def _note_address(self, args: Namespace) -> None:
        """Note whether only this machine reaches the server, and warn if others do without a token."""
        host, without_token = getattr(args, "host", None), self.settings.http_token is None
        self.only_loopback = without_token and is_loopback(host)
        if without_token and not self.only_loopback and not getattr(args, "uds", None):
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
        if is_pushed(engine):
            return "A trainer pushes versions here, by vLLM's own weight-transfer routes."
        if self.settings.adapter is not None:
            return None if args.enable_lora else "DELTASYNC_ADAPTER is set, but vLLM was started without --enable-lora."
        if (reason := compat.unextended(engine.vllm_config)) is not None:
            return reason
        if not await is_salted(engine):
            return "The engine's process did not load deltasync, so its prefix cache would mix versions; see its log."
        return None

    async def _start(self, engine: Any, state: Any, metrics: Metrics) -> None:
        run = OnLoop(asyncio.get_running_loop())
        if self.settings.adapter is not None:
            from vllm_plugin.adapters import AdapterTarget

            reader = open_reader(self.settings)
            target = AdapterTarget(engine, reader, self.settings, state.openai_serving_models, run)
            follow = Follow(reader, target, self.settings, observer=metrics, log=logger)
        else:
            pauses = self._pauses = Pauses(engine, run, recomputes=self.settings.kv_cache == "recompute")
            follow = open_follow(pauses, self.settings, metrics)
            pauses.on_use = follow.poke
            await pauses.guard()
        self._follow = follow
        self._logprobs_mode = engine.vllm_config.model_config.logprobs_mode
        self._ticking = asyncio.create_task(self._tick(follow, metrics), name="deltasync-tick")
        logger.info(
            "deltasync follows %s (%s) as %s; versions and replicas: deltasync watch %s",
            *(follow.reader.store.url, follow.pin, self.settings.replica_id, follow.reader.store.url),
        )
        follow.start()

    async def _tick(self, follow: Follow, metrics: Metrics) -> None:
        """Keep the metrics true while a step hangs."""
        while True:
            metrics.followed(follow)
            await asyncio.sleep(_TICK_S)

    async def _reach(self, version: Wanted) -> Wanted:
        """Wait for a version that a request demands. Raises AckTimeoutError."""
        if self._follow is None or self._pauses is None:
            adapter = "A request of an adapter names its version as its model, such as NAME-v7."
            raise AckTimeoutError(version.refusal(None, adapter if self._follow is not None else self._refused))
        return await reach(self._follow, version)

    def follow(self) -> Follow:
        """As `LocalRoutes.follow`."""
        if self._follow is None:
            raise Refused(503, self._refused)
        return self._follow

    def _engine(self) -> EngineTarget | None:
        """The target of the loop, unless that is an adapter."""
        target = None if self._follow is None else self._follow.target
        return target if isinstance(target, EngineTarget) else None

    def _live(self) -> LiveVersions | None:
        """The versions that made tokens. None with an adapter: a reply names its version as its model."""
        return None if (engine := self._engine()) is None else engine.live

    async def status(self, commits: int) -> ServerStatus:
        """As `Routes.status`."""
        settings, engine = self.settings, self._engine()
        if self._follow is None and settings.channel is not None:
            channel = redacted(settings.channel)
            return ServerStatus(replica_id=settings.replica_id, channel=channel, state="refused", error=self._refused)
        follow = self.follow()
        found = ServerStatus(**msgspec.structs.asdict(follow.status(commits)), logprobs_mode=self._logprobs_mode)
        found.kv_cache = settings.kv_cache
        if engine is None:
            found.adapters = getattr(follow.target, "models", [])
        elif engine.workers.is_open:
            found.reloaded_tensors, reasons = len(engine.workers.reloaded), engine.workers.by_reason().items()
            found.reloaded = [Reason(printable(why), len(names), printable(names[0])) for why, names in reasons]
            found.patched_tensors = engine.workers.patched_count
        return found

    async def not_ready(self) -> str | None:
        """As `Routes.not_ready`."""
        return self._not_ready()

    def _not_ready(self) -> str | None:
        if self._pauses is not None and self._pauses.held:
            return f"This server does not generate now. {self.follow().error or ''}".rstrip()
        return self._refused if self._follow is None else self._follow.not_ready
