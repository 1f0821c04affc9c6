"""Models of many architectures in one process: SGLang loads each, a channel is followed, and what came out is
told as JSON.

    .venv-sglang/bin/python -m tests.integration.sglang_layouts FOLDER deepseek_v2 ...

In SGLang's environment. FOLDER has a checkpoint of each case. See `tests.integration.layouts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from prometheus_client import CollectorRegistry
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, DeltaSyncError
from deltasync.following import Follow
from deltasync.serve.engine import answer, open_reader
from deltasync.serve.metrics import Metrics
from deltasync.serve.shard import Shard
from deltasync.serve.shards import EngineClient, ShardsTarget
from sglang_plugin.model import ModelEngine, note_loads
from tests.integration.layouts import CASES, follow


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


def engine(
    path: Path, arguments: dict[str, Any], settings: ReplicaSettings | None = None
) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
    """As `layouts.Engine`."""
    runner = load(path, arguments)
    if settings is None:
        return runner.model, dict
    try:
        shard = Shard(open_reader(settings), ModelEngine(runner))
    except ConfigError as error:
        said = {"state": "refused", "version": None, "error": str(error)}
        return runner.model, lambda: said

    def call(method: str, *arguments: Any) -> list[Any]:
        return [answer(shard.record if method == "deltasync_open" else lambda: shard.call(*arguments))]

    target = ShardsTarget(EngineClient(call), shard.reader, settings, Metrics(CollectorRegistry()))
    following = Follow(shard.reader, target, settings)

    def caught_up() -> dict[str, Any]:
        with contextlib.suppress(DeltaSyncError):
            following.catch_up()
        told: dict[str, Any] = msgspec.to_builtins(following.status())
        return told

    return runner.model, caught_up


def main() -> None:
    note_loads()
    for name in sys.argv[2:]:
        case = dataclasses.replace(CASES[name], alone=True)
        told = follow(Path(sys.argv[1], name, "model"), case, engine)
        print("TOLD " + json.dumps({"case": name, **told}), flush=True)


if __name__ == "__main__":
    main()
