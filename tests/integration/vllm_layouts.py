"""Models of many architectures in one process: vLLM loads each, a channel is followed, and what came out is
told as JSON.

    python -m tests.integration.vllm_layouts FOLDER llama gemma2 ...

See `tests.integration.layouts`.
"""

# ruff: noqa: I001  # vLLM for the CPU wants to be imported before torch
from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.utils import replace_parameter
from vllm.v1.spec_decode.eagle import EagleProposer

from deltasync.config import ReplicaSettings
from deltasync.errors import DeltaSyncError
from deltasync.following import Follow
from tests.integration.layouts import CASES, follow
from tests.integration.vllm_server import save_model
from vllm_plugin.worker import DeltaSyncWorkerExtension
from vllm_plugin.load.layers import keep_weights_addressable, note_models
from deltasync.serve.shards import EngineClient, ShardsTarget
from vllm_plugin.pauses import open_follow


def load(path: Path, arguments: dict[str, Any]) -> tuple[VllmConfig, torch.nn.Module, EagleProposer | None]:
    """vLLM's configuration, the model, and what drafts, if anything does."""
    config = EngineArgs(str(path), enforce_eager=True, max_model_len=256, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
            initialize_model_parallel(1, 1)
        model, drafter = get_model(vllm_config=config), None
        if config.speculative_config is not None:
            drafter = EagleProposer(config, torch.device("cpu"))
            drafter.load_model(model)
        return config, model, drafter


def laying_out(experts: str) -> contextlib.AbstractContextManager[object]:
    """Have vLLM lay experts out as it does on other devices than this one."""
    if experts == "packed":
        return contextlib.nullcontext()

    def process_weights_after_loading(self: object, layer: torch.nn.Module) -> None:
        w13, w2 = layer.w13_weight, layer.w2_weight
        replace_parameter(layer, "w13_weight", swap_w13_to_w31(w13) if experts == "swapped" else w13)
        replace_parameter(layer, "w2_weight", w2)

    return mock.patch.object(
        CPUUnquantizedExperts, "process_weights_after_loading", process_weights_after_loading
    )


def client(config: VllmConfig, model: torch.nn.Module, drafter: EagleProposer | None) -> EngineClient:
    """One worker in this process."""
    worker = DeltaSyncWorkerExtension()
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model,
        drafter=drafter,
        **{name: getattr(config, name) for name in ("model_config", "load_config", "speculative_config")},
    )
    return EngineClient(lambda method, *args: [getattr(worker, method)(*args)])


def caught_up(following: Follow) -> dict[str, Any]:
    """Take what there is, and return the status as the server gives it."""
    with contextlib.suppress(DeltaSyncError):
        following.catch_up()
    target = following.target
    assert isinstance(target, ShardsTarget)
    told: dict[str, Any] = msgspec.to_builtins(following.status())
    reloaded, reasons = len(target.reloaded), target.by_reason().items()
    patched = target.patched_count if target.is_open else 0
    shown = [{"reason": why, "tensors": len(names), "first": names[0]} for why, names in reasons]
    return told | {
        "draft": target.draft,
        "patched_tensors": patched,
        "reloaded_tensors": reloaded,
        "reloaded": shown,
    }


def engine(
    path: Path, arguments: dict[str, Any], settings: ReplicaSettings | None = None
) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
    """As `layouts.Engine`."""
    config, model, drafter = load(path, arguments)
    all_models = model if drafter is None else torch.nn.ModuleList([model, drafter.model])
    if settings is None:
        return all_models, dict
    following = open_follow(client(config, model, drafter), settings)
    return all_models, lambda: caught_up(following)


def main() -> None:
    note_models()
    keep_weights_addressable()
    for name in sys.argv[2:]:
        case = CASES[name]
        with laying_out(case.experts):
            told = follow(save_model(Path(sys.argv[1], name), case.config, **case.fields), case, engine)
        print("TOLD " + json.dumps({"case": name, **told}), flush=True)


if __name__ == "__main__":
    main()
