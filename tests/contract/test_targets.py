"""Every target passes the contract: in host memory, over numpy arrays, modules of torch and MLX, and in vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deltasync.config import ReplicaSettings
from deltasync.errors import StageError
from deltasync.following import Gate, MemoryTarget, Target
from deltasync.following.module import ModuleTarget
from deltasync.following.module_map import plain_name
from deltasync.live import LiveMemory
from tests.contract.array_target import ArrayTarget
from tests.contract.target_contract import NAME, SHAPE, Bench, TargetContract


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


class Looping(InMemory):
    """A bench whose target runs coroutines."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        super().__init__(url)

    def run(self, work: Any) -> Any:
        """Run a coroutine, also from the loop's thread of `Follow.start`."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        super().close()
        if not self.loop.is_running():
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

        from mlx_plugin.module import ModuleTarget as MlxTarget
        from mlx_plugin.module import bits

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


class TestVllm(TargetContract):
    @pytest.fixture
    def bench(self, memory_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
        pytest.importorskip("vllm")
        from prometheus_client import CollectorRegistry

        from deltasync.following.metrics import Metrics
        from tests import driving
        from vllm_plugin import worker
        from vllm_plugin.target import EngineTarget

        monkeypatch.setattr("vllm_plugin.load.loader.checkpoint", lambda _: iter(driving.Model().state_dict().items()))

        class Vllm(Looping):
            engine: Any = None

            def target(self, settings: ReplicaSettings) -> Target:
                self.engine = driving.Engine()  # a server restarts with its workers
                monkeypatch.setattr(worker, "open_nearest", lambda _: self.store)
                return EngineTarget(self.engine, self.reader, settings, Metrics(CollectorRegistry()), self.run)

            def live(self) -> dict[str, torch.Tensor]:
                return dict(self.engine.model.state_dict())

        yield from _bench(Vllm, memory_url)


class TestAdapter(TargetContract):
    @pytest.fixture
    def bench(self, memory_url: str) -> Iterator[Bench]:
        pytest.importorskip("vllm")
        from safetensors.torch import load_file

        from tests.unit.test_adapters import VLLM
        from vllm_plugin.adapters import AdapterTarget

        class Adapter(Looping):
            vllm: Any = None

            made: AdapterTarget | None = None

            def target(self, settings: ReplicaSettings) -> Target:
                self.close_folder()
                self.vllm = VLLM()  # it restarts with the server
                self.made = AdapterTarget(self.vllm, self.reader, settings, self.vllm, self.run)
                return self.made

            def close_folder(self) -> None:
                if self.made is not None:
                    self.made._root.cleanup()

            def close(self) -> None:
                super().close()
                self.close_folder()

            def live(self) -> dict[str, torch.Tensor]:
                found: dict[str, torch.Tensor] = load_file(self.vllm.lora_requests["policy"] / "adapter_model.safetensors")
                return found

        yield from _bench(Adapter, memory_url)
