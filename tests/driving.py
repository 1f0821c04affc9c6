"""vLLM's target and its routes over one real worker in this process, and a trainer for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from deltasync import open_store
from deltasync.channel.documents import DeltaFiles
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Signer
from deltasync.config import ReplicaSettings
from deltasync.following import Follow
from deltasync.serve.engine import OnLoop, open_reader
from deltasync.serve.heartbeats import HeartbeatWriter
from deltasync.serve.metrics import Metrics
from deltasync.serve.shards import EngineClient, ShardsTarget
from deltasync.stores import Store
from tests.channels import Made
from vllm_plugin.endpoints import DeltaSyncEndpoints
from vllm_plugin.pauses import Pauses
from vllm_plugin.versions import LiveVersions
from vllm_plugin.worker import DeltaSyncWorkerExtension

PATIENCE_S = 60.0
EXTENSION = "vllm_plugin.DeltaSyncWorkerExtension"
PLAIN = Namespace()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self.w = torch.nn.Parameter(weight, requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).copy_(tensor)


def runner_of(get_model: Callable[[], torch.nn.Module], **fields: Any) -> SimpleNamespace:
    """vLLM's model runner, as far as a worker's shard goes."""
    config = SimpleNamespace(model="/no/checkpoint", runner_type="generate", dtype=torch.bfloat16)
    return SimpleNamespace(get_model=get_model, model_config=config, **fields)


class Engine:
    """vLLM's engine client as far as the driver goes, with one worker on this thread."""

    def __init__(self) -> None:
        self.model = Model()
        self.worker = DeltaSyncWorkerExtension()
        self.worker.model_runner = runner_of(lambda: self.model)
        self.vllm_config = SimpleNamespace(
            load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
            model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
            parallel_config=SimpleNamespace(enable_eplb=False, worker_extension_cls=EXTENSION),
            weight_transfer_config=None,
        )
        self.engine_core = SimpleNamespace(
            core_engines=[b"0"],
            _call_utility_async=self.call_utility_async,
            pause_scheduler_async=self.pause_generation,
        )
        self.salted = True
        self.weight_version = "default"
        self.events: list[tuple[str, int | None]] = []
        self.driver: Driver | None = None

    async def collective_rpc(self, method: str, *, args: tuple[object, ...]) -> list[Any]:
        await asyncio.sleep(0)
        return [getattr(self.worker, method)(*args)]

    async def call_utility_async(self, method: str, *args: Any, engine: object) -> Any:
        if method == "deltasync_exchange":
            return await self.exchange(*args)
        assert method in ("deltasync_salts", "deltasync_guard")
        return self.salted if method == "deltasync_salts" else False

    async def exchange(
        self, call: list[Any], name: str | None, recomputes: bool, resumes: bool | None
    ) -> list[Any]:
        """As `vllm_plugin.engine.exchange_here`."""
        self._note("pause")
        answers, resumed_s = [self.worker.deltasync_call(*call)], None
        if name is not None and "error" not in answers[0]:
            self.set_weight_version(name)
            if resumes is not False:
                self._note("resume")
                resumed_s = time.monotonic()
        return [answers, False, time.monotonic(), resumed_s]

    async def generate(self, prompt: object) -> AsyncIterator[object]:
        yield SimpleNamespace(outputs=[])

    encode = generate

    async def is_paused(self) -> bool:
        return False

    async def sleep(self) -> None:
        self._note("sleep")

    async def wake_up(self) -> None:
        self._note("wake up")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._note("pause")

    async def resume_generation(self) -> None:
        self._note("resume")

    async def update_weight_version(self, version: str) -> None:
        self.set_weight_version(version)

    def set_weight_version(self, version: str) -> None:
        self.weight_version = version

    def _note(self, what: str) -> None:
        if self.driver is not None:
            announced = self.weight_version.partition("-")[0]
            self.events.append((what, int(announced) if announced.isdecimal() else None))


def target_of(call: Callable[..., list[Any]], reader: ChannelReader) -> ShardsTarget:
    """The target of workers that this calls."""
    return ShardsTarget(
        EngineClient(call), reader, ReplicaSettings(channel=reader.store.url), Metrics(CollectorRegistry())
    )


class Driver(Follow):
    """The follow loop over an engine, whose steps are taken one by one, in another thread than the event
    loop's.
    """

    target: ShardsTarget

    def __init__(self, engine: Any, settings: ReplicaSettings, metrics: Metrics) -> None:
        reader = open_reader(settings)
        run, recomputes = OnLoop(asyncio.get_running_loop()), settings.kv_cache == "recompute"
        self.live = LiveVersions()
        self.pauses = Pauses(engine, run, self.live, recomputes=recomputes)
        target = ShardsTarget(self.pauses, reader, settings, metrics)
        beats = HeartbeatWriter(reader.store)
        super().__init__(reader, target, settings, observer=metrics, prefetch=False, heartbeats=beats)

    @property
    def caught_up(self) -> bool:
        return self.waits.caught_up == self.waits._steps

    async def refresh(self, pin: int | None = None, *, asked: bool = False) -> None:
        """Take one step; `status` tells how it went."""
        self.waits.asked |= asked
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.step, pin, audits=True)

    async def catch_up_in_thread(self, pin: int | None = None) -> None:
        await asyncio.to_thread(self.catch_up, pin)

    async def reach(self, version: int | None = None) -> int:
        return await asyncio.wrap_future(self.request(version))


class Trainer:
    """Publishes what the engine's model started from, and then changes of it, record by record."""

    def __init__(self, store: str | Store, signer: Signer | None = None) -> None:
        self.channel = Made(open_store(store) if isinstance(store, str) else store, signer)
        self.weights = {name: tensor.clone() for name, tensor in Model().state_dict().items()}

    def publish(self, parts: int = 0, step: int | None = None) -> int:
        self.weights["w"].view(torch.int16)[:3] += 1
        if self.channel.tip is None:
            self.channel.create(self.weights)
            stored = self.channel.anchor(self.weights)
        else:
            stored = self.channel.delta(self.weights, parts, step)
        self.channel.head()
        return stored.record.version

    def publish_lies(self) -> None:
        """A version whose record names another fingerprint of the model than its payload leads to."""
        channel, base = self.channel, self.channel.tip
        assert base is not None
        self.weights["w"].view(torch.int16)[:3] += 1
        number = base.version + 1
        encoded, changed = channel.encode(channel.bits[base.sha256], self.weights, number, base.version, 1)[0]
        honest = channel.record(
            "delta", number, self.weights, delta=DeltaFiles(codec="packed", changed=changed)
        )
        channel.append(dataclasses.replace(honest, fingerprint="0" * 16), encoded, self.weights)
        channel.head()


@pytest.fixture
def trainer(memory_url: str) -> Trainer:
    return Trainer(memory_url)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    # There is no vLLM here to name the files that it loaded.
    monkeypatch.setattr("vllm_plugin.load.layers.checkpoint", lambda _: iter(Model().state_dict().items()))
    return Engine()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@contextlib.asynccontextmanager
async def following(
    engine: Engine, url: str, registry: CollectorRegistry, **settings: Any
) -> AsyncIterator[Driver]:
    driver = engine.driver = Driver(
        engine, ReplicaSettings(channel=url, replica_id="unit", **settings), Metrics(registry)
    )
    driver.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield driver
    finally:
        await asyncio.to_thread(driver.stop)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@contextlib.contextmanager
def serving(
    engine: Engine | None,
    monkeypatch: pytest.MonkeyPatch,
    args: Namespace = PLAIN,
    **environ: str,
) -> Iterator[TestClient]:
    pytest.importorskip("vllm")
    registry = CollectorRegistry()
    monkeypatch.setattr("vllm_plugin.endpoints.Metrics", lambda: Metrics(registry))
    monkeypatch.setattr("vllm_plugin.compat.changed", lambda _: None)  # of the real vLLM in tests/integration
    for name, text in environ.items():
        monkeypatch.setenv(f"DELTASYNC_{name}", text)
    plugin = DeltaSyncEndpoints()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.registry = registry
        await plugin.init_state(engine, app.state, args)
        yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def complete(to: int = 0, stream: bool = False) -> Any:
        if to:
            assert plugin._follow is not None
            await asyncio.to_thread(plugin._follow.wait, to)
        if engine is not None:
            async for _ in engine.generate({}):
                pass
        return StreamingResponse(iter(["data: [DONE]\n\n"]), media_type="text/event-stream") if stream else {}

    plugin.attach_router(app)
    with TestClient(app) as client:
        yield client
