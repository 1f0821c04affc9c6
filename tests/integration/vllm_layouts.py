"""Models of many architectures in one process: vLLM loads each, a channel is followed, and what came out is told as JSON.

    python -m tests.integration.vllm_layouts FOLDER llama gemma2 ...

For each: the driver's status after version 1, which the loaded weights are, with the tensors of the model that this touched;
its status after version 2, with those that are then other than in a model that vLLM loaded from version 2 (`differences`);
and those that are other in that than in version 1 (`changed`). All tensors count that a module has, whoever made them.
"""

# ruff: noqa: I001  # vLLM for the CPU wants to be imported before torch
from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401

import contextlib
import dataclasses
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
import transformers
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import swap_w13_to_w31
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.utils import replace_parameter

from deltasync import Publisher
from deltasync.config import ReplicaSettings
from deltasync.errors import DeltaSyncError
from deltasync.following import Follow
from deltasync.tensors.bits import cast, dtype_for
from tests.integration.vllm_server import save_model
from vllm_plugin.worker import DeltaSyncWorkerExtension
from vllm_plugin.load.layers import keep_weights_addressable, note_models
from deltasync.following.metrics import Metrics
from vllm_plugin.target import EngineTarget, open_follow
from vllm_plugin.workers import Client


@dataclasses.dataclass(frozen=True)
class Case:
    config: type[transformers.PretrainedConfig]
    fields: dict[str, Any]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    experts: str = "packed"
    """How vLLM lays experts out: `packed` for the CPU's kernels; `loaded`, as Triton's kernels on a GPU take them; or
    `swapped`, the halves of w13 as FlashInfer wants them, in the shape of the checkpoint."""
    dtype: str = "keep"
    """The publisher's. With patterns the trainer's weights are float32, all of them."""
    alone: bool = False
    """Whether each tensor changes alone as well, in a version of its own; those that are one in the model, together."""
    more: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tensors of the channel beside those that the model saves, each a copy of another one."""
    stored: bool = False
    """Whether the checkpoint has these too."""
    tied: bool = False
    """Whether they are one with the others in the model, so that a version in which one changes alone is refused."""


_EXPERTS = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_GEMMA = {"intermediate_size": 192, "head_dim": 32, "tie_word_embeddings": True}
_DEEPSEEK = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}

CASES = {
    # A model with experts comes first: vLLM makes the group of workers that share experts only for such a one.
    "qwen3_moe": Case(transformers.Qwen3MoeConfig, {**_EXPERTS, "num_experts": 4, "head_dim": 32}),
    "qwen3_moe_loaded": Case(transformers.Qwen3MoeConfig, {**_EXPERTS, "num_experts": 4, "head_dim": 32}, {}, "loaded"),
    "qwen3_moe_swapped": Case(transformers.Qwen3MoeConfig, {**_EXPERTS, "num_experts": 4, "head_dim": 32}, {}, "swapped"),
    "llama": Case(transformers.LlamaConfig, {"intermediate_size": 192, "tie_word_embeddings": True}),
    "gemma2": Case(transformers.Gemma2Config, _GEMMA),
    "gemma3": Case(transformers.Gemma3TextConfig, _GEMMA),
    # Its checkpoint has the fused tensors that vLLM makes of others' checkpoints.
    "phi3": Case(transformers.Phi3Config, {"intermediate_size": 192}),
    # vLLM keeps the routers as float32, and the rest as bfloat16.
    "glm4_moe": Case(
        transformers.Glm4MoeConfig,
        {
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 32,
        },
        {},
        "loaded",
        dtype="bfloat16,*.mlp.gate.*=float32",
    ),
    # Sees: the checkpoint's names are not those of vLLM's modules, and the tower's attention is fused as well.
    "idefics3": Case(
        transformers.Idefics3Config,
        {
            "text_config": {"model_type": "llama", "intermediate_size": 192},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_id": 60,
        },
    ),
    # Latent attention: vLLM makes parameters of its own from one of the checkpoint's tensors.
    "deepseek_v2": Case(transformers.DeepseekV2Config, {**_DEEPSEEK, "first_k_dense_replace": 1}),
    # Quantized as well: the parameters of its own are no longer the same memory.
    "deepseek_v2_fp8": Case(
        transformers.DeepseekV2Config, {**_DEEPSEEK, "first_k_dense_replace": 2}, {"quantization": "fp8_per_channel"}
    ),
    # Linear attention: tensors that vLLM reshapes, and others that it keeps as float32.
    "qwen3_next": Case(
        transformers.Qwen3NextConfig,
        {
            **_EXPERTS,
            "num_experts": 4,
            "head_dim": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "fp8": Case(transformers.Qwen3Config, {"intermediate_size": 192, "head_dim": 32}, {"quantization": "fp8_per_channel"}),
    # Its loader copies by itself into expert tensors, which vLLM's layerwise reload does not notice.
    "gpt_oss": Case(
        transformers.GptOssConfig,
        {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    ),
}

_WIDE = {"intermediate_size": 192}
_HEADS = {**_WIDE, "head_dim": 32}
_MAMBA = {**_WIDE, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_head": 32}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_SWEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("PhiConfig", _WIDE),  # its loader makes the bias of its head anew
    "mamba": ("MambaConfig", {"state_size": 16, "intermediate_size": 256}),  # its loader computes with a tensor
    "falcon": ("FalconConfig", {}),
    "falcon_h1": ("FalconH1Config", {**_MAMBA, "mamba_d_ssm": 128, "mamba_n_heads": 4, "head_dim": 32}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_WIDE,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "layers_block_type": ["mamba", "attention"],
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {**_EXPERTS, **_MAMBA, "num_local_experts": 4, "mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    ),
    "jamba": ("JambaConfig", {**_EXPERTS, "num_experts": 4, "attn_layer_offset": 1, "attn_layer_period": 2}),
    "glm4_moe_alone": ("Glm4MoeConfig", {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 32}),
    "deepseek_v3": ("DeepseekV3Config", {**_DEEPSEEK, "first_k_dense_replace": 1, "topk_method": "noaux_tc"}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}),
    "minimax": (
        "MiniMaxM2Config",
        {
            **_EXPERTS,
            "intermediate_size": 64,
            "num_local_experts": 4,
            "head_dim": 32,
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64}),
    "olmoe": ("OlmoeConfig", {**_EXPERTS, "num_experts": 4}),
    "granite_moe": ("GraniteMoeConfig", {**_EXPERTS, "num_local_experts": 4}),
    "gpt2": ("GPT2Config", _GPT2),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 32}),
    "opt": ("OPTConfig", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "cohere": ("CohereConfig", {**_WIDE, "tie_word_embeddings": True}),
    "persimmon": ("PersimmonConfig", {**_WIDE, "num_key_value_heads": 4}),
    **{
        name.removesuffix("Config").lower(): (name, _WIDE)
        for name in [
            *("Qwen2Config", "Olmo2Config", "GraniteConfig", "GPTNeoXConfig", "StableLmConfig", "Starcoder2Config"),
            *("Exaone4Config", "NemotronConfig", "SmolLM3Config", "ApertusConfig", "ArceeConfig"),
        ]
    },
    **{
        name.removesuffix("Config").lower(): (name, _HEADS)
        for name in ["Qwen3Config", "GlmConfig", "Glm4Config", "Ernie4_5Config", "HunYuanDenseV1Config", "SeedOssConfig"]
    },
}
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_TIED = {"more": {_HEAD: _EMBEDDINGS}, "tied": True, "alone": True}
CASES |= {
    # The trainer's model has a head of its own, and is equal to the embeddings, with which vLLM computes.
    "tied": Case(transformers.Qwen3Config, {**_HEADS, "tie_word_embeddings": True}, **_TIED),
    # The checkpoint has it too; vLLM ties it again, because it is equal.
    "tied_again": Case(transformers.Qwen3Config, {**_HEADS, "tie_word_embeddings": True}, **_TIED, stored=True),
    # vLLM's model has no such module.
    "tied_gemma": Case(transformers.Gemma2Config, _GEMMA, more={_HEAD: _EMBEDDINGS}),
}
CASES |= {name: Case(getattr(transformers, config), fields, alone=True) for name, (config, fields) in _SWEPT.items()}


def load(path: Path, arguments: dict[str, Any]) -> tuple[VllmConfig, torch.nn.Module]:
    config = EngineArgs(str(path), enforce_eager=True, max_model_len=256, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
            initialize_model_parallel(1, 1)
        return config, get_model(vllm_config=config)


def laying_out(experts: str) -> contextlib.AbstractContextManager[object]:
    """Have vLLM lay experts out as it does on other devices than this one."""
    if experts == "packed":
        return contextlib.nullcontext()

    def process_weights_after_loading(self: object, layer: torch.nn.Module) -> None:
        w13, w2 = layer.w13_weight, layer.w2_weight
        replace_parameter(layer, "w13_weight", swap_w13_to_w31(w13) if experts == "swapped" else w13)
        replace_parameter(layer, "w2_weight", w2)

    return mock.patch.object(CPUUnquantizedExperts, "process_weights_after_loading", process_weights_after_loading)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors that modules have, registered or not."""
    found = {}
    for name, module in model.named_modules():
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value.detach().clone(memory_format=torch.contiguous_format)
    return found


def differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    same = [k for k in found.keys() & wanted.keys() if torch.equal(bits(found[k]), bits(wanted[k]))]
    return sorted((found.keys() | wanted.keys()) - set(same))


def client(config: VllmConfig, model: torch.nn.Module) -> Client:
    """One worker in this process."""
    worker = DeltaSyncWorkerExtension()
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model, model_config=config.model_config, load_config=config.load_config
    )
    return Client(lambda method, *args: [getattr(worker, method)(*args)])


def caught_up(following: Follow) -> dict[str, Any]:
    """Take what there is, and return the status as the server gives it."""
    with contextlib.suppress(DeltaSyncError):
        following.catch_up()
    target = following.target
    assert isinstance(target, EngineTarget)
    told: dict[str, Any] = msgspec.to_builtins(following.status())
    reloaded, reasons = len(target.workers.reloaded), target.workers.by_reason().items()
    patched = target.workers.patched_count if target.workers.is_open else 0
    shown = [{"reason": why, "tensors": len(names), "first": names[0]} for why, names in reasons]
    return told | {"patched_tensors": patched, "reloaded_tensors": reloaded, "reloaded": shown}


def follow(folder: Path, case: Case) -> dict[str, Any]:
    path = save_model(folder, case.config, **case.fields)
    first = {name: cast(w, dtype_for(name, case.dtype)) for name, w in load_file(path / "model.safetensors").items()}
    first |= {name: first[other].clone() for name, other in case.more.items()}
    save(path, case, first)
    kept = case.dtype == "keep"
    second = {name: (w.float() * 1.01 + 0.01).to(w.dtype) for name, w in first.items()}
    config, model = load(path, case.arguments)
    loaded = tensors_of(model)
    channel = f"file://{folder}/channel"
    settings = ReplicaSettings(channel=channel, replica_id="here")
    following = open_follow(client(config, model), settings, Metrics(CollectorRegistry()))
    told: dict[str, Any] = {"model": type(model).__name__}
    with Publisher(channel, dtype=case.dtype) as publisher:
        publisher.publish(first.items() if kept else [(name, w.float()) for name, w in first.items()]).wait(60)
        told["first"] = caught_up(following)
        told["touched"] = differences(tensors_of(model), loaded)
        publisher.publish(second.items() if kept else [(name, w.float()) for name, w in second.items()]).wait(60)
        told["second"] = caught_up(following)
    shutil.copytree(path, folder / "second")
    save(folder / "second", case, second)
    wanted = tensors_of(load(folder / "second", case.arguments)[1])
    told["differences"] = differences(tensors_of(model), wanted)
    told["changed"] = differences(wanted, loaded)
    if case.alone and told["second"]["version"] == 2:
        told["alone"] = alone(folder, case, second, lambda: caught_up(following), model)
    if case.tied and not told["alone"]:
        told["untied"] = untied(folder, case, second, lambda: caught_up(following), model)
    return told


def save(path: Path, case: Case, weights: dict[str, torch.Tensor]) -> None:
    held = {name: tensor for name, tensor in weights.items() if case.stored or name not in case.more}
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


def untied(
    folder: Path,
    case: Case,
    weights: dict[str, torch.Tensor],
    follow_on: Callable[[], dict[str, Any]],
    model: torch.nn.Module,
) -> list[tuple[str, int]]:
    """Change tensors alone that are one in the model. Returns error and version after each; live tensors stay."""
    found, before = [], tensors_of(model)
    with Publisher(f"file://{folder}/channel", dtype=case.dtype, resume=True) as publisher:
        for name in next(iter(case.more.items())):
            other = weights | {name: -weights[name] - 0.5}
            publisher.publish(other.items()).wait(60)
            status = follow_on()
            found.append((status["error"], status["version"]))
            assert differences(tensors_of(model), before) == []
    return found


def alone(
    folder: Path,
    case: Case,
    weights: dict[str, torch.Tensor],
    follow_on: Callable[[], dict[str, Any]],
    model: torch.nn.Module,
) -> dict[str, list[str]]:
    """Change each tensor in a version of its own. Returns what is then other than in a fresh load, by the tensor."""
    wrong = {}
    with Publisher(f"file://{folder}/channel", dtype=case.dtype, resume=True) as publisher:
        for name in [*weights]:
            together = [name, *(case.more[name] for _ in "1" if case.tied and name in case.more)]
            if case.tied and name in case.more.values():
                continue
            weights |= {each: -weights[each] - 0.5 for each in together}
            version = publisher.publish(weights.items())
            version.wait(60)
            status = follow_on()
            save(folder / "second", case, weights)
            found = differences(tensors_of(model), tensors_of(load(folder / "second", case.arguments)[1]))
            if found or status["version"] != version.version:
                wrong[name] = [str(status["error"]), *found]
    return wrong


def main() -> None:
    note_models()
    keep_weights_addressable()
    for name in sys.argv[2:]:
        with laying_out(CASES[name].experts):
            told = follow(Path(sys.argv[1], name), CASES[name])
        print("TOLD " + json.dumps({"case": name, **told}), flush=True)


if __name__ == "__main__":
    main()
