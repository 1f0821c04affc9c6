"""Models of many architectures in one process: SGLang loads each, a channel is followed, and what came out is
told as JSON.

    .venv-sglang/bin/python -m tests.integration.sglang_layouts FOLDER deepseek_v2 life:fp8 ...

In SGLang's environment. FOLDER has a checkpoint of each case. See `tests.integration.layouts`, and of `life:`
see `life`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization import fp8
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from deltasync import Publisher
from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.following import Follow
from deltasync.serve.engine import answer, open_reader
from deltasync.serve.metrics import Metrics
from deltasync.serve.shard import Shard
from deltasync.serve.shards import EngineClient, ShardsTarget
from sglang_plugin.model import ModelEngine, note_loads
from sglang_plugin.reload import SglangLayers
from tests.integration.layouts import CASES, Case, differences, end_life, follow, save, tensors_of
from tests.integration.vllm_server import Server


def load(path: Path, arguments: dict[str, Any]) -> SimpleNamespace:
    """A model runner, as far as the plugin knows it."""
    options = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True}
    config = ServerArgs(model_path=str(path), device="cpu", skip_tokenizer_init=True, **options, **arguments)
    publish(config, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    if not torch.distributed.is_initialized():
        initialize_moe_config()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        bootstrap.init_parallel_runtime(server_args=config, device="cpu", dist_port=port)
    model_config, load_config = ModelConfig.from_server_args(config), LoadConfig()
    bootstrap.init_layer_runtime(model_config=model_config)
    model = get_model(
        model_config=model_config, load_config=load_config, device_config=DeviceConfig("cpu", 0)
    )
    return SimpleNamespace(model=model, model_config=model_config, load_config=load_config)


def followed(runner: SimpleNamespace, settings: ReplicaSettings) -> tuple[Follow, Shard]:
    """The follow loop of a model runner in this process, and its shard."""
    shard = Shard(open_reader(settings), ModelEngine(runner))

    def call(method: str, *arguments: Any) -> list[Any]:
        return [answer(shard.record if method == "deltasync_open" else lambda: shard.call(*arguments))]

    target = ShardsTarget(EngineClient(call), shard.reader, settings, Metrics(CollectorRegistry()))
    return Follow(shard.reader, target, settings), shard


def engine(
    path: Path, arguments: dict[str, Any], settings: ReplicaSettings | None = None
) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
    """As `layouts.Engine`."""
    runner = load(path, arguments)
    if settings is None:
        return runner.model, dict
    try:
        following, _ = followed(runner, settings)
    except ConfigError as error:
        said = {"state": "refused", "version": None, "error": str(error)}
        return runner.model, lambda: said
    return runner.model, lambda: caught_up(following)


def caught_up(following: Follow) -> dict[str, Any]:
    """Take what there is, and return the status."""
    with contextlib.suppress(DeltaSyncError):
        following.catch_up()
    told: dict[str, Any] = msgspec.to_builtins(following.status())
    return told


def life(path: Path, case: Case) -> dict[str, Any]:
    """What becomes of what SGLang makes of weights: versions, damaged memory, sleep, a twin that fails, and a
    version that is rolled back. After each, whether all tensors, and the sha256 of those that SGLang has made,
    are those of a model that is loaded from the version served.
    """
    settings = ReplicaSettings(channel=f"file://{path.parent}/channel", replica_id="here")
    weights, rng = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    runner = load(path, case.arguments)
    following, shard = followed(runner, settings)
    told: dict[str, Any] = {}

    def note(what: str) -> None:
        """Compare with a fresh model, which finds that it has loaded the newest version."""
        caught_up(following)
        save(shutil.copytree(path, path.parent / what), case, weights)
        other = load(path.parent / what, case.arguments)
        fresh, of_fresh = followed(other, settings)
        caught_up(fresh)
        status = following.status()
        told[what] = {
            "error": status.error,
            "versions": (status.version, fresh.status().version),
            "made": len(shard.made()),
            "same": shard.made() == of_fresh.made(),
            "differences": differences(tensors_of(runner.model), tensors_of(other.model)),
            "reload_s": [commit.reload_s for commit in status.commits],
            "twinned": len(shard.engine.twinned),
        }

    with Publisher(settings.channel or "") as publisher:
        server = Server("", settings.channel or "", weights, publisher=publisher)

        def publish(scale: float = 1.0) -> None:
            """Change every element, or one in a hundred."""
            for tensor in weights.values():
                tensor.mul_(scale).add_(0.01 * (torch.rand(tensor.shape, generator=rng) > 0.99))
            publisher.publish(weights.items()).wait(60)
            caught_up(following)

        for number in range(10):
            publish(1.01 if number % 3 else 1.0)
        note("ten versions")
        made = next(each for each in runner.model.modules() if hasattr(each, "weight_scale")).weight_scale
        made.data.mul_(2)
        told["repaired"] = following.audit()
        note("damage")
        shard.fall_asleep()
        made.data.zero_()
        shard.wake_up()
        note("sleep")
        make = SglangLayers.make

        def in_pauses_alone(self: SglangLayers, *arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("out of memory")
            return make(self, *arguments)

        with mock.patch.object(SglangLayers, "make", in_pauses_alone):
            publish()
        end_life(server, publish, note)
    return told


QWEN3 = CASES["qwen3"]
LIVES = {name: dataclasses.replace(QWEN3, arguments={"quantization": name}) for name in ("fp8", "w8a8_fp8")}


def main() -> None:
    note_loads()
    for name in sys.argv[2:]:
        path = Path(sys.argv[1], name, "model")
        if name.startswith("life:"):
            # which SGLang leaves to AMX on CPUs; otherwise it is torch alone
            with mock.patch.object(fp8, "_is_cpu", False):
                told = life(path, LIVES[name.removeprefix("life:")])
        else:
            told = follow(path, dataclasses.replace(CASES[name], alone=True), engine)
        print("TOLD " + json.dumps({"case": name, **told}), flush=True)


if __name__ == "__main__":
    main()
