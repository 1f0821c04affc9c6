"""verl's own manager, workers and registry with our engine between them, on CPUs: `make test-ray`."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltasync.channel.reading import ChannelReader
from deltasync.stores import open_store
from tests.integration.test_sharded import torchrun

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("verl.checkpoint_engine", reason="verl is not installed: make test-ray")

from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.utils.import_utils import import_external_libs  # noqa: E402
from verl.workers.config import CheckpointEngineConfig  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # verl's wheel has a package `tests` too

ACTORS, SERVERS, SHAPE = 2, 3, (64, 48)


def trained(step: int) -> dict[str, torch.Tensor]:
    """A few elements change in each step."""
    weights = {
        name: torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        for name in "ab"
    }
    for each in range(1, step + 1):
        weights["a"].view(torch.int16).view(-1)[each * 7 : each * 7 + 5] += 1
    return weights


class Actor(Worker):
    """What verl's actor does with its engine, with a model of its own."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=self.rank == 0,
            bucket_size=1 << 20,
            **config.engine_kwargs[config.backend],
        )
        self.gathered: list[str] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        def gather() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in trained(global_steps).items():
                self.gathered.append(name)
                yield name, tensor

        found: dict[str, Any] = await self.checkpoint_engine.send_weights(gather(), global_steps=global_steps)
        return found

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def names(self) -> list[str]:
        return self.gathered


class Server:
    """In the place of vLLM: keeps what it is given."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        self.live = {name: tensor.clone() async for name, tensor in weights}


class ServerWorker(CheckpointEngineWorker):
    """verl's own rollout worker."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, Server())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def live(self) -> dict[str, torch.Tensor]:
        return self.server_adapter.live


class Replicas:
    """A rollout replica, of which the manager wants its workers, and that it stops and goes on."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def abort_all_requests(self, **_: Any) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def resume_generation(self) -> None: ...


class _Rollout:
    """Of verl's rollout configuration what its worker reads."""

    name = "vllm"

    def __init__(self, checkpoint_engine: CheckpointEngineConfig) -> None:
        self.checkpoint_engine = checkpoint_engine


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def _group(cls: type, count: int, *args: Any) -> Any:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), *args), device_name="cpu")


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_rollouts_get_the_bits_of_each_step(cluster: None, tmp_path: Path) -> None:
    channel = f"file://{tmp_path}/channel"
    config = CheckpointEngineConfig(
        backend="deltasync",
        custom_backend_module="trl_callback.verl",
        engine_kwargs={"deltasync": {"channel": channel}},
    )
    actors = _group(Actor, ACTORS, config)
    servers = _group(ServerWorker, SERVERS, _Rollout(config))
    manager = CheckpointEngineManager(config, actors, [Replicas(list(servers.workers))])

    async def update(step: int) -> Any:
        return await manager.update_weights(global_steps=step)

    for step in range(1, 4):
        metrics = asyncio.run(update(step))
        assert metrics["deltasync/version"] == step
        for live in servers.live():
            wanted = trained(step)
            assert live.keys() == wanted.keys()
            assert all(
                torch.equal(live[name].view(torch.int16), wanted[name].view(torch.int16)) for name in wanted
            )
    assert metrics["deltasync/payload_bytes"] < 2000
    assert all(names == ["a", "b"] * 3 for names in actors.names())  # all actors took part in gathering
    reader = ChannelReader(open_store(channel))
    assert [reader.numbered(number).record.step for number in (1, 2, 3)] == [1, 2, 3]


def test_megatrons_ranks_stream_the_checkpoints_tensors_and_publish_none_alone(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-ray")
    torchrun(2, tmp_path / "ranks", script="megatron_ranks.py")
