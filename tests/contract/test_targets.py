"""Every target passes the contract: host memory, arrays, modules of torch and MLX, shards, vLLM, adapters and
relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from deltasync import Replica, open_store
from deltasync.channel import keys
from deltasync.channel.reading import ChannelReader
from deltasync.config import ReplicaSettings
from deltasync.errors import StageError, StoreError
from deltasync.following import MemoryTarget, Target
from deltasync.live import LiveMemory
from deltasync.ops import Relay
from deltasync.serve import Gate, load_plan
from deltasync.serve.engine import answer
from deltasync.serve.gate import plain_name
from deltasync.serve.metrics import Metrics
from deltasync.serve.module import ModuleTarget
from deltasync.serve.shard import Engine, Shard
from deltasync.serve.shards import EngineClient, ShardsTarget
from tests.contract.array_target import ArrayTarget
from tests.contract.target_contract import NAME, SHAPE, Bench, TargetContract
from tests.faults import FaultyStore


def _fails_after(owner: Any, name: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which a commit of live memory is rolled back, as where memory runs out."""
    original = getattr(owner, name)

    def fails(self: Any, staged: Any) -> None:
        original(self, staged)
        self.rollback(staged)
        raise StageError("no memory")

    return mock.patch.object(owner, name, fails)


class InMemory(Bench):
    def failing_commit(self) -> contextlib.AbstractContextManager[Any]:
        return _fails_after(LiveMemory, "commit")


class Host(InMemory):
    def target(self, settings: ReplicaSettings) -> Target:
        self.made = MemoryTarget(self.reader)
        return self.made

    def live(self) -> dict[str, torch.Tensor]:
        return dict(self.made.tensors)


class Arrays(InMemory):
    arrays: dict[str, np.ndarray] | None = None

    def target(self, settings: ReplicaSettings) -> Target:
        self.arrays = self.arrays or {NAME: np.zeros(SHAPE, np.int16)}
        return ArrayTarget(self.reader, self.arrays)

    def live(self) -> dict[str, torch.Tensor]:
        assert self.arrays is not None
        return {NAME: torch.from_numpy(self.arrays[NAME]).view(torch.bfloat16)}


class Module(InMemory):
    module: torch.nn.Module | None = None

    def target(self, settings: ReplicaSettings) -> Target:
        if self.module is None:
            self.module = torch.nn.Module()
            self.module.register_parameter(NAME, torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16)))
        return ModuleTarget(self.module, self.reader, plain_name, Gate())

    def live(self) -> dict[str, torch.Tensor]:
        assert self.module is not None
        return {name: tensor.detach() for name, tensor in self.module.state_dict().items()}


class Rows(torch.nn.Module):
    """A rank's rows of the model, and how its loader cuts them out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.rows = slice(number * SHAPE[0] // 2, (number + 1) * SHAPE[0] // 2)
        self.part = torch.nn.Parameter(
            torch.zeros(SHAPE, dtype=torch.bfloat16)[self.rows], requires_grad=False
        )

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.part.copy_(tensor[self.rows])


class Half(Engine):
    """A rank's part of the engine."""

    loader = load_plan.Loader("the test's engine")

    def __init__(self, number: int) -> None:
        self.model = self.rows = Rows(number)

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield NAME, torch.zeros(SHAPE, dtype=torch.bfloat16)


class Shards(InMemory):
    """An engine of two ranks."""

    halves: list[Half] | None = None

    def target(self, settings: ReplicaSettings) -> Target:
        self.halves = [Half(0), Half(1)]  # it restarts with the loop
        readers = self.reader, ChannelReader(self.store)
        shards = [
            Shard(reader, half, rank)
            for rank, (reader, half) in enumerate(zip(readers, self.halves, strict=True))
        ]
        self.announced: list[str] = []

        def call(method: str, *arguments: Any) -> list[Any]:
            calls = [
                each.record if method == "deltasync_open" else partial(each.call, *arguments)
                for each in shards
            ]
            return [answer(each) for each in calls]

        client = EngineClient(call, self.announced.append)
        return ShardsTarget(client, self.reader, settings, Metrics(CollectorRegistry()))

    def live(self) -> dict[str, torch.Tensor]:
        assert self.halves is not None
        assert self.announced[-1] == str(self.follow.version)
        return {NAME: torch.cat([half.rows.part for half in self.halves])}


class Looping(InMemory):
    """A bench whose target runs coroutines."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        super().__init__(url)

    def close(self) -> None:
        super().close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def _bench(kind: type[Bench], url: str) -> Iterator[Bench]:
    bench = kind(url)
    try:
        yield bench
    finally:
        bench.close()


class InMemoryContract(TargetContract):
    kind: type[Bench]

    @pytest.fixture
    def bench(self, memory_url: str) -> Iterator[Bench]:
        yield from _bench(self.kind, memory_url)


class TestHost(InMemoryContract):
    kind = Host


class TestArrays(InMemoryContract):
    kind = Arrays


class TestModule(InMemoryContract):
    kind = Module


class TestMlx(TargetContract):
    @pytest.fixture
    def bench(self, memory_url: str) -> Iterator[Bench]:
        mx = pytest.importorskip("mlx.core", reason="needs MLX: make test-mlx")
        from mlx import nn

        from mlx_plugin.arrays import bits
        from mlx_plugin.module import MlxTarget

        class Mlx(InMemory):
            module: nn.Module | None = None

            def target(self, settings: ReplicaSettings) -> Target:
                if self.module is None:
                    self.module = nn.Module()
                    self.module[NAME] = mx.zeros(SHAPE, mx.bfloat16)
                return MlxTarget(self.module, self.reader, plain_name, Gate())

            def live(self) -> dict[str, torch.Tensor]:
                assert self.module is not None
                return {NAME: torch.from_numpy(bits(self.module[NAME]).view(np.int16)).view(torch.bfloat16)}

        yield from _bench(Mlx, memory_url)


class TestShards(InMemoryContract):
    kind = Shards

    def test_a_remark_of_any_shard_is_told_until_a_commit_without_one(self, bench: Shards) -> None:
        target = bench.follow.target
        assert isinstance(target, ShardsTarget) and bench.halves is not None
        for remark in (None, "A layer was slow.", None):
            bench.halves[1].remark = remark
            bench.publish()
            bench.follow.catch_up()
            assert target.remark == remark


class TestVllm(TargetContract):
    @pytest.fixture
    def bench(self, memory_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
        pytest.importorskip("vllm")
        from deltasync.serve.engine import OnLoop
        from tests import driving
        from vllm_plugin.pauses import Pauses
        from vllm_plugin.versions import LiveVersions

        monkeypatch.setattr(
            "vllm_plugin.load.layers.checkpoint", lambda _: iter(driving.Model().state_dict().items())
        )

        class Vllm(Looping):
            engine: Any = None

            def target(self, settings: ReplicaSettings) -> Target:
                self.engine = driving.Engine()  # a server restarts with its workers
                monkeypatch.setattr("deltasync.serve.engine.open_failover", lambda _: self.store)
                pauses = Pauses(self.engine, OnLoop(self.loop), LiveVersions())
                return ShardsTarget(pauses, self.reader, settings, Metrics(CollectorRegistry()))

            def live(self) -> dict[str, torch.Tensor]:
                return dict(self.engine.model.state_dict())

        yield from _bench(Vllm, memory_url)


class Copying(Bench):
    """A relay: the weights are those of a replica of its copy."""

    copy: FaultyStore | None = None

    def target(self, settings: ReplicaSettings) -> Target:
        self.copy = self.copy or FaultyStore(open_store(f"{self.store.url}-copy"))
        return Relay(self.reader, [self.copy]).follow.target

    def live(self) -> dict[str, torch.Tensor]:
        assert self.copy is not None
        replica = Replica(self.copy.inner)
        replica.sync()
        return replica.state_dict()

    @contextlib.contextmanager
    def failing_commit(self) -> Iterator[None]:
        assert self.copy is not None
        self.copy.fail_at("put", keys.HEAD, after=True, error=StoreError)
        yield
        self.copy.heal()


class TestRelay(InMemoryContract):
    kind = Copying

    @pytest.mark.parametrize("text", ["2"])
    def test_pins(self, bench: Bench, text: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[override]
        """A copy has all versions, whatever the environment says for replicas."""
        bench.publish(5)
        monkeypatch.setenv("DELTASYNC_PIN", text)
        follow = Relay(bench.reader, [open_store(f"{bench.store.url}-another")]).follow
        assert follow.pin is None and follow.catch_up() == 5

    def test_a_pin_to_a_version_that_is_not_there_changes_nothing(self, bench: Bench) -> None:
        """It has no pins, see above."""


class TestAdapter(TargetContract):
    @pytest.fixture
    def bench(self, memory_url: str) -> Iterator[Bench]:
        pytest.importorskip("vllm")
        from deltasync.serve.engine import OnLoop
        from tests.unit.test_adapters import VLLM
        from vllm_plugin.adapters import AdapterTarget

        class Adapter(Looping):
            vllm: Any = None

            made: AdapterTarget | None = None

            def target(self, settings: ReplicaSettings) -> Target:
                self.close_files()
                self.vllm = VLLM()  # it restarts with the server
                self.made = AdapterTarget(self.vllm, self.reader, settings, self.vllm, OnLoop(self.loop))
                return self.made

            def close_files(self) -> None:
                while self.made is not None and self.made._files:
                    self.made._files.popitem()[1].close()

            def close(self) -> None:
                super().close()
                self.close_files()

            def live(self) -> dict[str, torch.Tensor]:
                found: dict[str, torch.Tensor] = self.vllm.read("policy")[0]
                return found

        yield from _bench(Adapter, memory_url)
