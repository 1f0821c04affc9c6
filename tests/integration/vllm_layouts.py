"""Models of many architectures in one process: vLLM loads each, a channel is followed, and what came out is
told as JSON.

    python -m tests.integration.vllm_layouts FOLDER llama gemma2 life:fp8 ...

See `tests.integration.layouts`, of `life:` see `life`, of `kernel:` `vllm_kernels`, and of `quantizers` its module.
"""

# ruff: noqa: I001  # vLLM for the CPU wants to be imported before torch
from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.model_manager import create_lora_manager
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.utils import replace_parameter
from vllm.v1.spec_decode.eagle import EagleProposer

from deltasync import Publisher
from deltasync.config import ReplicaSettings
from deltasync.errors import DeltaSyncError
from deltasync.following import Follow
from tests.integration import quantizers, vllm_kernels
from tests.integration.layouts import CASES, Case, end_life, follow, other_than, quantized, save
from tests.integration.vllm_server import Server, save_model
from vllm_plugin.worker import DeltaSyncWorkerExtension
from vllm_plugin.load.layers import keep_weights_addressable, note_models
from vllm_plugin.load.plain import PlainLayer
from vllm_plugin.load.reload import VllmLayers
from deltasync.serve.shards import EngineClient, ShardsTarget
from deltasync.serve.twin import tensors_of
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
        if config.lora_config is not None:
            vocabulary = config.model_config.get_vocab_size()
            device = torch.device("cpu")
            create_lora_manager(model, 8, 256, vocabulary, config.lora_config, config, device)
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


def keeping_blocks() -> contextlib.AbstractContextManager[object]:
    """Have vLLM keep FP8 in blocks as its kernels for GPUs do, whatever this CPU has."""
    return mock.patch.multiple(
        CPUFp8BlockScaledMMKernel,
        is_supported=classmethod(lambda cls, compute_capability=None: (True, None)),
        process_weights_after_loading=Fp8BlockScaledMMLinearKernel.process_weights_after_loading,
    )


def worker_of(
    config: VllmConfig, model: torch.nn.Module, drafter: EagleProposer | None
) -> DeltaSyncWorkerExtension:
    worker = DeltaSyncWorkerExtension()
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model,
        drafter=drafter,
        **{name: getattr(config, name) for name in ("model_config", "load_config", "speculative_config")},
    )
    return worker


def client(worker: DeltaSyncWorkerExtension) -> EngineClient:
    """One worker in this process."""
    return EngineClient(lambda method, *args: [getattr(worker, method)(*args)])


def caught_up(following: Follow) -> dict[str, Any]:
    """Take what there is, and return the status as the server gives it."""
    with contextlib.suppress(DeltaSyncError):
        following.catch_up()
    target = following.target
    assert isinstance(target, ShardsTarget)
    told: dict[str, Any] = msgspec.to_builtins(following.status())
    return told | {
        "draft": target.draft,
        "patched_tensors": target.patched_count if target.is_open else 0,
        "twinned": [[why, names] for why, names in target.by_reason(target.twinned).items()],
        "reloaded": sorted(target.reloaded),
    }


def engine(
    path: Path, arguments: dict[str, Any], settings: ReplicaSettings | None = None
) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
    """As `layouts.Engine`."""
    config, model, drafter = load(path, arguments)
    all_models = model if drafter is None else torch.nn.ModuleList([model, drafter.model])
    if settings is None:
        return all_models, dict
    following = open_follow(client(worker_of(config, model, drafter)), settings)
    return all_models, lambda: caught_up(following)


def life(path: Path, case: Case) -> dict[str, Any]:
    """What becomes of what vLLM makes of weights: ten versions, damaged memory, sleep, a twin that fails, and a
    version that is rolled back. After each, whether its sha256 is that of a server that loads the version served.
    """
    folder = path.parent / "life"
    settings = ReplicaSettings(channel=f"file://{folder}/channel", replica_id="here")
    weights, rng = load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    if case.format is not None:
        weights = quantized(path, case.format, weights)
        save(path, case, weights)
    worker = worker_of(*load(path, case.arguments))
    following = open_follow(client(worker), settings)
    told: dict[str, Any] = {}

    def note(what: str) -> None:
        """Compare with a fresh server, which finds that it has loaded the newest version."""
        caught_up(following)
        save(shutil.copytree(path, folder / what), case, weights)
        fresh = open_follow(client(worker_of(*load(folder / what, case.arguments))), settings)
        caught_up(fresh)
        status = following.status()
        told[what] = {
            "error": status.error,
            "versions": (status.version, fresh.status().version),
            "made": len(made(following)),
            "same": made(following) == made(fresh),
            "reload_s": [commit.reload_s for commit in status.commits],
        }

    with Publisher(settings.channel or "", dtype=case.dtype) as publisher:
        server = Server("", settings.channel or "", weights, publisher=publisher)

        def publish(scale: float = 1.0) -> None:
            """Change every element, or one in a hundred; all of those that have come quantized."""
            for name, tensor in weights.items():
                if tensor.is_floating_point() and tensor.element_size() > 1:
                    tensor.mul_(scale).add_(0.01 * (torch.rand(tensor.shape, generator=rng) > 0.99))
                else:
                    weights[name] = other_than(name, tensor)
            publisher.publish(weights.items()).wait(60)
            caught_up(following)

        publisher.publish(weights.items()).wait(60)
        caught_up(following)
        with mock.patch.object(VllmLayers, "make", autospec=True, side_effect=VllmLayers.make) as making:
            told["twins"] = []
            for number in range(10):
                making.reset_mock()
                publish(1.01 if number % 3 else 1.0)
                told["twins"].append(making.call_count)
        told["remark"] = worker._deltasync_shard.engine.remark
        note("ten versions")
        layer = min(worker._deltasync_shard.engine._mirror.modules, key=lambda each: str(each))
        damaged = next(each for each in tensors_of(layer).values() if each.numel() > 1)
        memory_of(damaged)[damaged.storage_offset() * damaged.element_size()] ^= 1
        told["repaired"] = following.audit()
        note("damage")
        sleep(worker)
        note("sleep")
        failing = mock.patch.object(VllmLayers, "make", side_effect=RuntimeError("out of memory"))
        with failing, mock.patch.object(PlainLayer, "stage", return_value=None):
            publish()
        end_life(server, publish, note)
    return told


def sleep(worker: DeltaSyncWorkerExtension) -> None:
    """Put a worker to sleep and wake it up, as vLLM does with level 2, which leaves of a model its buffers."""
    shard, model = worker._deltasync_shard, worker.model_runner.get_model()
    shard.fall_asleep()
    kept = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    for module in model.modules():
        for tensor in tensors_of(module).values():
            if not tensor.is_meta and tensor.untyped_storage().data_ptr() not in kept:
                memory_of(tensor).fill_(0x5A)
    shard.wake_up()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[arg-type]


def lay_out(path: Path, case: Case) -> dict[str, Any]:
    return follow(path, case, engine)


def made(following: Follow) -> dict[str, str]:
    target = following.target
    assert isinstance(target, ShardsTarget)
    (found,) = target.made()
    return found


def main() -> None:
    note_models()
    keep_weights_addressable()
    for name in sys.argv[2:]:
        if name == "quantizers":
            print("TOLD " + json.dumps({"case": name, "proven": quantizers.proven()}), flush=True)
            continue
        if name == "kernels":
            print("TOLD " + json.dumps({"case": name, "for_cuda": vllm_kernels.for_cuda()}), flush=True)
            continue
        if name.startswith("kernel:"):
            case = vllm_kernels.case_of(name)
            with vllm_kernels.chosen(name):
                path = save_model(Path(sys.argv[1], name.replace(":", "-")), case.config, **case.fields)
                print("TOLD " + json.dumps({"case": name, **lay_out(path, case)}), flush=True)
            continue
        case, runs = CASES[name.removeprefix("life:")], life if name.startswith("life:") else lay_out
        with laying_out(case.experts), keeping_blocks():
            path = save_model(Path(sys.argv[1], name.replace(":", "-")), case.config, **case.fields)
            print("TOLD " + json.dumps({"case": name, **runs(path, case)}), flush=True)


if __name__ == "__main__":
    main()
