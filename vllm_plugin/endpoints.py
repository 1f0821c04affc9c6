"""vLLM's endpoint plugin `deltasync`: starts the follow loop with the server and adds its routes.

The routes are those of `deltasync.serve.routes`, and three more:

GET  /deltasync/                 a live page for people
POST /request_weight_update      as /receive_weight_update, under the name in PipelineRL's paper
POST /init_process_group         does nothing, because weights come through the channel

Replies get the headers `x-deltasync-versions` and `x-deltasync-spans` (`vllm_plugin.versions`). If deltasync
cannot follow with this vLLM or its options, the routes say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.resources
import shlex
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from deltasync.errors import AckTimeoutError, DeltaSyncError, describe, printable, redacted
from deltasync.following import Follow
from deltasync.serve.constraint import VersionConstraint
from deltasync.serve.engine import OnLoop, open_reader
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.metrics import Metrics
from deltasync.serve.requests import is_loopback, until_ready
from deltasync.serve.routes import AdapterStatus, Routes, as_json
from deltasync.serve.shards import ShardsTarget
from vllm_plugin import compat, logger
from vllm_plugin.engine import is_pushed, is_salted
from vllm_plugin.pauses import SWITCHED, Pauses, open_follow
from vllm_plugin.servers import Servers
from vllm_plugin.versions import LiveVersions, instrument, replies

_TICK_S = 1.0
_PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Reason(msgspec.Struct):
    """A reason why tensors are mirrored, their number, and the name of the first."""

    reason: str
    tensors: int
    first: str


class ServerStatus(AdapterStatus, kw_only=True):
    """Reply of `GET /deltasync/status` (docs/operations/replica.md). `draft` says what becomes of the model that
    drafts tokens, and `remark` what takes more work in each version than it could.
    """

    kv_cache: str | None = None
    patched_tensors: int | None = None
    twinned_tensors: int | None = None
    reloaded_tensors: int | None = None
    twinned: list[Reason] = msgspec.field(default_factory=list)
    reloaded: list[Reason] = msgspec.field(default_factory=list)
    draft: str | None = None
    remark: str | None = None
    logprobs_mode: str | None = None
    max_lag: int | msgspec.UnsetType = msgspec.UNSET


describe(ServerStatus)


def _rank(args: Namespace) -> int | None:
    """Return this engine's rank among those that share a port: in data parallelism, or as a replica of Ray
    Serve.
    """
    if serve := sys.modules.get("ray.serve"):
        with contextlib.suppress(serve.exceptions.RayServeException):  # not in a replica
            return int(serve.get_replica_context().rank.local_rank)
    rank: int | None = getattr(args, "data_parallel_rank", None)
    return rank


def _several(engine: Any) -> bool:
    """Whether an engine has several API servers."""
    return getattr(engine.engine_core, "client_count", 1) > 1


class DeltaSyncEndpoints(Routes):
    """Implements `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "deltasync"
    required_tasks = None  # whatever a server does with the weights

    def __init__(self) -> None:
        super().__init__()
        self._pauses: Pauses | None = None
        self._servers: Servers | None = None
        self._live = LiveVersions()
        self._closed = until_ready(lambda: None if self._live.was_ready else self._not_ready())
        self._ticking: asyncio.Task[None] | None = None
        # of the server that leads, if that is another
        self._unready: str | None = "This server serves no version yet."
        self._engine: Any = None
        self._models: Any = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the headers of completions."""
        page = importlib.resources.files("vllm_plugin").joinpath("page.html").read_text("utf-8")

        async def show() -> HTMLResponse:
            return HTMLResponse(page, headers=_PAGE_HEADERS)

        async def init_process_group() -> Response:
            return as_json(
                {"status": "ok", "detail": "No process group is needed: weights come through the channel."}
            )

        own: list[tuple[str, str, Callable[..., Any]]] = [
            ("/deltasync/", "GET", show),
            ("/request_weight_update", "POST", self._update_asked),
            ("/init_process_group", "POST", init_process_group),
        ]
        app.add_middleware(replies, live=self._live, single_version=self._single_version)
        self.attach(app, own)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Stop following before vLLM stops its engine, which would look like a fault."""
        yield
        if self._ticking is not None:
            self._ticking.cancel()
        if self._follow is not None:
            await asyncio.to_thread(self._follow.stop)
        if self._servers is not None:
            self._servers.close()

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Start to follow, or note why it cannot start. vLLM serves in any case."""
        channel = self.settings.channel
        if channel is None or engine_client is None:  # the second renders prompts only
            return
        engine_client.deltasync_refusal = lambda: None  # it follows, or `instrument` says why not
        self._engine, self._models = engine_client, getattr(state, "openai_serving_models", None)
        waits = self.settings.wait_ready and not is_pushed(engine_client)
        instrument(
            engine_client,
            live=self._live,
            refusal=self._closed if waits else lambda: None,
            single_version=self._single_version,
            on_ended=lambda: self._metrics.ended.inc(),
        )
        with self._refusing():
            self.settings = self.settings.at_port(getattr(args, "port", 0), _rank(args))
            self._note_address(args)
            self._refused = await self._refusal(engine_client, args) or ""
            if not self._refused and _several(engine_client):
                self._servers = Servers(engine_client.engine_core, self.answer, self._lead)
                self._live.share(await self._servers.listen())
                self._ask = self._servers.call  # until this server leads, as the following
                for name in SWITCHED:
                    setattr(engine_client, name, functools.partial(self.call, name))
        if not self._refused:
            await (self._lead() if self._servers is None else self._servers.elect(None))
            self._ticking = asyncio.create_task(self._tick(), name="deltasync-tick")

    @property
    def ends_requests(self) -> bool:
        """As `Routes.ends_requests`: where a channel is followed, here or in another API server."""
        return self._follow is not None or self._ask is not None

    @functools.cached_property
    def _metrics(self) -> Metrics:
        return Metrics()

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Note and say why this server does not follow, if the body raises or has noted it."""
        try:
            yield
        except DeltaSyncError as error:
            self._refused = str(error)
        except Exception as error:  # the server serves the weights it has loaded, and says why
            logger.exception("deltasync could not start")
            self._refused = f"deltasync could not start: {type(error).__name__}: {error}"
        if self._refused:
            self._metrics.following.set(0)
            logger.error(
                "This server does not follow %s. %s", redacted(self.settings.channel or ""), self._refused
            )

    def _note_address(self, args: Namespace) -> None:
        """Note whether only this machine reaches the server, and warn if others do without a token."""
        host, without_token = getattr(args, "host", None), self.settings.http_token is None
        self.only_loopback = without_token and is_loopback(host)
        if without_token and not self.only_loopback and not getattr(args, "uds", None):
            logger.warning(
                "This server listens on %s without DELTASYNC_HTTP_TOKEN: whoever reaches it may use "
                "/deltasync/*. "
                "Set one, or --host 127.0.0.1.",
                host or "all addresses",
            )

    async def _refusal(self, engine: Any, args: Namespace) -> str | None:
        """Return why this server cannot follow, in one sentence, or None if it can."""
        import vllm

        reason = compat.unsuited(vllm.__version__) or compat.refusal(engine.vllm_config)
        if reason is not None:
            return reason
        if is_pushed(engine):
            self.settings.check_no_max_lag()
            return "A trainer pushes versions here, by vLLM's own weight-transfer routes."
        if self.settings.adapter is not None:
            if _several(engine):
                return "Adapters are loaded into one API server: start vLLM with --api-server-count 1."
            return (
                None
                if args.enable_lora
                else "DELTASYNC_ADAPTER is set, but vLLM was started without --enable-lora."
            )
        if (
            self.settings.kv_cache == "recompute"
            and getattr(engine.vllm_config, "kv_transfer_config", None) is not None
        ):
            return "vLLM cannot recompute keys that a connector is loading: use DELTASYNC_KV_CACHE=keep, or no connector."
        if (reason := compat.unextended(engine.vllm_config)) is not None:
            return reason
        if not await is_salted(engine):
            return "The engine's process did not load deltasync, so its prefix cache would mix versions; see its log."
        return None

    async def _lead(self) -> None:
        """Follow the channel, for all API servers."""
        engine, run = self._engine, OnLoop(asyncio.get_running_loop())
        with self._refusing():
            if self.settings.adapter is not None:
                from vllm_plugin.adapters import AdapterTarget

                reader = open_reader(self.settings)
                target = AdapterTarget(engine, reader, self.settings, self._models, run)
                beats = HeartbeatWriter(reader.store)
                follow = Follow(
                    reader, target, self.settings, observer=self._metrics, heartbeats=beats, log=logger
                )
            else:
                for name in SWITCHED if self._servers is not None else ():
                    delattr(engine, name)
                pauses = self._pauses = Pauses(
                    engine, run, self._live, recomputes=self.settings.kv_cache == "recompute"
                )
                follow = open_follow(pauses, self.settings, self._metrics)
                pauses.on_use = follow.poke
                await pauses.guard()
            self._follow = follow
            follow.waits.on_step.append(self._closed)
            logger.info(
                "deltasync follows %s (%s) as %s; versions and replicas: deltasync watch %s",
                *(url := follow.reader.store.url, follow.pin, self.settings.replica_id, shlex.quote(url)),
            )
            follow.start()
        self._ask = None

    async def _tick(self) -> None:
        """Keep the metrics true while a step hangs; or see whether the server that leads is ready, and is
        there.
        """
        while True:
            with contextlib.suppress(Exception):  # asked again soon
                if self._follow is not None:
                    self._metrics.followed(self._follow)
                elif self._ask is not None:
                    self._unready = await self.call("not_ready")
            await asyncio.sleep(_TICK_S)

    # Between API servers

    @contextlib.asynccontextmanager
    async def answer(self, method: str, *args: Any, **named: Any) -> AsyncIterator[dict[str, Any]]:
        """As `Routes.answer`; or hold another API server's `_single_version`."""
        if method == "single_version":
            async with self._single_version():
                yield {"result": None}
            return
        async with super().answer(method, *args, **named) as answer:
            yield answer

    @contextlib.asynccontextmanager
    async def _single_version(self) -> AsyncIterator[None]:
        """Return a context in which no commit begins, as `Pauses.single_version`."""
        async with contextlib.AsyncExitStack() as stack:
            if self._ask is not None:
                await stack.enter_async_context(self._ask("single_version"))
            elif self._pauses is not None:
                await stack.enter_async_context(self._pauses.single_version())
            yield

    async def call_here(self, method: str, *args: Any, **named: Any) -> Any:
        """As `Routes.call_here`; also a method of the engine client."""
        return await getattr(self._engine if method in SWITCHED else self, method)(*args, **named)

    async def demand(self, wanted: VersionConstraint) -> VersionConstraint:
        """As `Routes.demand`."""
        if wanted.version is not None and wanted.allows(self._live.now, self._live.now):
            return wanted
        return await super().demand(wanted)

    async def reach(self, version: int | None, exact: bool, timeout_s: float) -> int | None:
        """As `Routes.reach`."""
        if self._follow is None:
            raise AckTimeoutError(VersionConstraint(version, exact, timeout_s).refusal(None, self._refused))
        return await super().reach(version, exact, timeout_s)

    # Routes

    async def status(self, commits: int) -> ServerStatus:
        """As `Routes.status`."""
        settings = self.settings
        if self._follow is None and settings.channel is not None:
            channel = redacted(settings.channel)
            return ServerStatus(
                replica_id=settings.replica_id, channel=channel, state="refused", error=self._refused
            )
        follow, target = self.follow(), self.follow().target
        found = ServerStatus(**msgspec.structs.asdict(follow.status(commits)), kv_cache=settings.kv_cache)
        found.logprobs_mode = self._engine.vllm_config.model_config.logprobs_mode
        if settings.max_lag is not None:
            found.max_lag = settings.max_lag
        if not isinstance(target, ShardsTarget):
            found.adapters = getattr(target, "models", [])
            found.base_models = [each.name for each in self._models.base_model_paths]
            lora = self._engine.vllm_config.lora_config
            found.max_lora_rank = lora.max_lora_rank
            if lora.target_modules is not None:
                found.lora_target_modules = lora.target_modules
        elif target.is_open:
            found.twinned_tensors, found.reloaded_tensors = len(target.twinned), len(target.reloaded)
            found.twinned, found.reloaded = (
                [
                    Reason(printable(why), len(names), printable(names[0]))
                    for why, names in target.by_reason(mirrored).items()
                ]
                for mirrored in (target.twinned, target.reloaded)
            )
            found.patched_tensors, found.draft = target.patched_count, target.draft
            found.remark = target.remark
        return found

    async def not_ready(self) -> str | None:
        """As `Routes.not_ready`."""
        return self._not_ready()

    def _not_ready(self) -> str | None:
        if self._ask is not None:
            return self._unready
        reason = self._refused if self._follow is None else self._follow.not_ready
        if reason is None:
            self._live.ready()
        return reason
