"""Models of many architectures in one process of an engine: each follows a channel, and what came out is told
as JSON.

For each: the status after version 1, which the loaded weights are, with the tensors of the model that this
touched; the status after version 2, with those that are then other than in a model that was loaded from
version 2 (`differences`); and those that are other in that than in version 1 (`changed`). All tensors count
that a module has, whoever made them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers
from safetensors.torch import load_file, save_file

from deltasync import Publisher
from deltasync.config import ReplicaSettings
from deltasync.tensors.bits import cast, dtype_for
from deltasync.trainer.stream import QUANTIZATION, fp8_blocks

if TYPE_CHECKING:
    from tests.integration.vllm_server import Server


class Engine(Protocol):
    def __call__(
        self, path: Path, arguments: dict[str, Any], settings: ReplicaSettings | None = None
    ) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
        """Load a checkpoint. Returns the model, and what takes the versions that there are and returns the
        status.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Case:
    config: type[transformers.PretrainedConfig]
    fields: dict[str, Any]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    experts: str = "packed"
    """How vLLM lays experts out: `packed` for the CPU's kernels; `loaded`, as Triton's kernels on a GPU take
    them; or `swapped`, the halves of w13 as FlashInfer wants them, in the shape of the checkpoint."""
    dtype: str = "keep"
    """The publisher's. With patterns the trainer's weights are float32, all of them."""
    alone: bool = False
    """Whether each tensor changes alone as well, in a version of its own; those that are one in the model,
    together.
    """
    more: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tensors of the channel beside those that the model saves, each a copy of another one."""
    format: str | None = None
    """How the checkpoint and the channel have linear layers: one of `_FORMATS`."""
    stored: bool = False
    """Whether the checkpoint has these too."""
    tied: bool = False
    """Whether they are one with the others in the model, so that a version in which one changes alone is
    refused.
    """


_EXPERTS = {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
_GLM = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 32,
}
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
    # What SGLang asks for: on CPUs it has no other positions for this attention, and no defaults for the
    # experts.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}

_EXPERT = [f"mlp.experts.{number}" for number in range(4)]
_MLPS = [
    f"{part}.{name}_proj" for part in [*_EXPERT, "mlp.shared_experts"] for name in ("gate", "up", "down")
]
_BLOCK = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *_MLPS,
    "mlp.gate",
    "input_layernorm",
    "post_attention_layernorm",
]
_DRAFT = {
    **{f"model.layers.2.{name}.weight": f"model.layers.1.{name}.weight" for name in _BLOCK},
    "model.layers.2.mlp.gate.e_score_correction_bias": "model.layers.1.mlp.gate.e_score_correction_bias",
    **{
        f"model.layers.2.{name}.weight": "model.norm.weight"
        for name in ("enorm", "hnorm", "shared_head.norm")
    },
    "model.layers.2.eh_proj.weight": "model.layers.0.mlp.down_proj.weight",
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
}
"""A layer that drafts, in the checkpoint of a model of two layers: the tensors, and those that they are
copies of.
"""

CASES = {
    # A model with experts comes first: vLLM makes the group of workers that share experts only for such a
    # one.
    "qwen3_moe": Case(transformers.Qwen3MoeConfig, {**_EXPERTS, "num_experts": 4, "head_dim": 32}),
    "qwen3_moe_loaded": Case(
        transformers.Qwen3MoeConfig, {**_EXPERTS, "num_experts": 4, "head_dim": 32}, {}, "loaded"
    ),
    "qwen3_moe_swapped": Case(
        transformers.Qwen3MoeConfig, {**_EXPERTS, "num_experts": 4, "head_dim": 32}, {}, "swapped"
    ),
    "llama": Case(transformers.LlamaConfig, {"intermediate_size": 192, "tie_word_embeddings": True}),
    "gemma2": Case(transformers.Gemma2Config, _GEMMA),
    "gemma3": Case(transformers.Gemma3TextConfig, _GEMMA),
    # Its checkpoint has the fused tensors that vLLM makes of others' checkpoints.
    "phi3": Case(transformers.Phi3Config, {"intermediate_size": 192}),
    # vLLM keeps the routers as float32, and the rest as bfloat16.
    "glm4_moe": Case(
        transformers.Glm4MoeConfig,
        _GLM,
        {},
        "loaded",
        dtype="bfloat16,*.mlp.gate.*=float32",
    ),
    # Sees: the checkpoint's names are not those of vLLM's modules, and the tower's attention is fused as
    # well.
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
        transformers.DeepseekV2Config,
        {**_DEEPSEEK, "first_k_dense_replace": 2},
        {"quantization": "fp8_per_channel"},
    ),
    # As DeepSeek-V3: SGLang joins two projections before it loads them, and keeps the router's bias as
    # float32.
    "deepseek_v3_lora": Case(
        transformers.DeepseekV3Config,
        {**_DEEPSEEK, "q_lora_rank": 64, "topk_method": "noaux_tc", "first_k_dense_replace": 1},
        dtype="bfloat16,*.e_score_correction_bias=float32",
        alone=True,
    ),
    # Its third layer drafts tokens, with the embeddings and the head of the model.
    "glm4_moe_mtp": Case(
        transformers.Glm4MoeConfig,
        {**_GLM, "intermediate_size": 256, "num_nextn_predict_layers": 1},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        "loaded",
        dtype="bfloat16,*.mlp.gate.*=float32",
        more=_DRAFT,
        stored=True,
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
    "fp8": Case(
        transformers.Qwen3Config,
        {"intermediate_size": 192, "head_dim": 32},
        {"quantization": "fp8_per_channel"},
    ),
    # Beneath adapters: vLLM wraps the layers.
    "fp8_lora": Case(
        transformers.Qwen3Config,
        {"intermediate_size": 192, "head_dim": 32},
        {"quantization": "fp8_per_channel", "enable_lora": True, "max_lora_rank": 8},
    ),
    # What a trainer sends that quantizes by itself.
    **{
        kind: Case(transformers.Qwen3Config, {"intermediate_size": 192, "head_dim": 32}, format=kind)
        for kind in ("int8", "float8", "gptq", "awq")
    },
    # As `dtype="fp8"` publishes it.
    "fp8_blocks": Case(
        transformers.Qwen3Config, {"intermediate_size": 256, "head_dim": 64}, format="fp8_blocks"
    ),
    # Its loader copies by itself into expert tensors, which vLLM's layerwise reload does not notice.
    "gpt_oss": Case(
        transformers.GptOssConfig,
        {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    ),
}

# The same with experts that are packed, in the model and in its draft.
CASES["glm4_moe_mtp_packed"] = dataclasses.replace(CASES["glm4_moe_mtp"], experts="packed")

_WIDE = {"intermediate_size": 192}
_HEADS = {**_WIDE, "head_dim": 32}
_MAMBA = {**_WIDE, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_head": 32}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_SWEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("PhiConfig", _WIDE),  # its loader makes the bias of its head anew
    # its loader computes with a tensor
    "mamba": ("MambaConfig", {"state_size": 16, "intermediate_size": 256}),
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
        {
            **_EXPERTS,
            **_MAMBA,
            "num_local_experts": 4,
            "mamba_n_heads": 8,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "jamba": ("JambaConfig", {**_EXPERTS, "num_experts": 4, "attn_layer_offset": 1, "attn_layer_period": 2}),
    "glm4_moe_alone": (
        "Glm4MoeConfig",
        {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 32},
    ),
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
            *(
                "Qwen2Config",
                "Olmo2Config",
                "GraniteConfig",
                "GPTNeoXConfig",
                "StableLmConfig",
                "Starcoder2Config",
            ),
            *("Exaone4Config", "NemotronConfig", "SmolLM3Config", "ApertusConfig", "ArceeConfig"),
        ]
    },
    **{
        name.removesuffix("Config").lower(): (name, _HEADS)
        for name in [
            "Qwen3Config",
            "GlmConfig",
            "Glm4Config",
            "Ernie4_5Config",
            "HunYuanDenseV1Config",
            "SeedOssConfig",
        ]
    },
}
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_TIED = {"more": {_HEAD: _EMBEDDINGS}, "tied": True, "alone": True}
CASES |= {
    # The trainer's model has a head of its own, and is equal to the embeddings, with which vLLM computes.
    "tied": Case(transformers.Qwen3Config, {**_HEADS, "tie_word_embeddings": True}, **_TIED),
    # The checkpoint has it too; vLLM ties it again, because it is equal.
    "tied_again": Case(
        transformers.Qwen3Config, {**_HEADS, "tie_word_embeddings": True}, **_TIED, stored=True
    ),
    # vLLM's model has no such module.
    "tied_gemma": Case(transformers.Gemma2Config, _GEMMA, more={_HEAD: _EMBEDDINGS}),
}
CASES |= {
    name: Case(getattr(transformers, config), fields, alone=True) for name, (config, fields) in _SWEPT.items()
}


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


def follow(path: Path, case: Case, engine: Engine) -> dict[str, Any]:
    """What becomes of a checkpoint, which `path` has, as the module of the engine says."""
    folder = path.parent
    first = {
        name: cast(w, dtype_for(name, case.dtype))
        for name, w in load_file(path / "model.safetensors").items()
    }
    first |= {name: first[other].clone() for name, other in case.more.items()}
    if case.format is not None:
        first = quantized(path, case.format, first)
    save(path, case, first)
    kept = case.dtype == "keep"
    second = {name: other_than(name, w) for name, w in first.items()}
    channel = f"file://{folder}/channel"
    model, caught_up = engine(path, case.arguments, ReplicaSettings(channel=channel, replica_id="here"))
    loaded = tensors_of(model)
    told: dict[str, Any] = {"model": type(model).__name__}
    with Publisher(channel, dtype=case.dtype) as publisher:
        publisher.publish(first.items() if kept else [(name, w.float()) for name, w in first.items()]).wait(
            60
        )
        told["first"] = caught_up()
        told["touched"] = differences(tensors_of(model), loaded)
        publisher.publish(second.items() if kept else [(name, w.float()) for name, w in second.items()]).wait(
            60
        )
        told["second"] = caught_up()
    shutil.copytree(path, folder / "second")
    save(folder / "second", case, second)
    wanted = tensors_of(engine(folder / "second", case.arguments)[0])
    told["differences"] = differences(tensors_of(model), wanted)
    told["changed"] = differences(wanted, loaded)
    if case.alone and told["second"]["version"] == 2:
        told["alone"] = alone(folder, case, second, caught_up, model, engine)
    if case.tied and not told["alone"]:
        told["untied"] = untied(folder, case, second, caught_up, model)
    return told


def end_life(server: Server, publish: Callable[..., None], note: Callable[[str], None]) -> None:
    """Note what became of a version whose twins failed; publish one more, and one that is rolled back."""
    note("a twin that fails")
    publish()
    note("twins again")
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    with server.publishing_a_wrong_fingerprint():
        publish(1.5)
    server.weights |= before
    note("a rollback")


def other_than(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight that is trained a little more."""
    if weight.is_floating_point():
        return (weight.float() * 1.01 + 0.01).to(weight.dtype)
    return weight.clone() if name.endswith("g_idx") else weight ^ 1


def _compressed(packed: str, weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": packed,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_CHANNELS, _TOKENS = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
_INT8, _FP8 = ({"num_bits": 8, "type": kind, "symmetric": True} for kind in ("int", "float"))
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
_NVFP4 = _FP4 | {"strategy": "tensor_group", "group_size": 16}
_MXFP4 = _FP4 | {"strategy": "group", "group_size": 32, "dynamic": False, "scale_dtype": "torch.uint8"}
_MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": None}
_FORMATS: dict[str, dict[str, Any]] = {
    "int8": _compressed("int-quantized", _INT8 | _CHANNELS, _INT8 | _TOKENS),
    "float8": _compressed("float-quantized", _FP8 | _CHANNELS, _FP8 | _TOKENS),
    "fp8_blocks": QUANTIZATION,
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "nvfp4": _compressed("nvfp4-pack-quantized", _NVFP4 | {"dynamic": False}, _NVFP4 | {"dynamic": "local"}),
    "nvfp4_modelopt": _MODELOPT | {"quant_algo": "NVFP4", "group_size": 16},
    "mxfp8": _MODELOPT | {"quant_algo": "MXFP8"},
    "mxfp4": _compressed("mxfp4-pack-quantized", _MXFP4, None),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


class _Random:
    """Random parts of a linear layer, of the shapes of vLLM's `create_weights`."""

    def __init__(self) -> None:
        self._rng = torch.Generator().manual_seed(0)

    def _integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._rng)

    def bytes(self, *shape: int) -> torch.Tensor:
        return self._integers(0, 256, *shape).to(torch.uint8)

    def words(self, *shape: int) -> torch.Tensor:
        return self._integers(-(2**31), 2**31, *shape).to(torch.int32)

    def exponents(self, *shape: int) -> torch.Tensor:
        return self._integers(110, 130, *shape).to(torch.uint8)

    def whole(self, *shape: int) -> torch.Tensor:
        return self._integers(-127, 128, *shape).to(torch.int8)

    def float8(self, *shape: int) -> torch.Tensor:
        return self._integers(1, 120, *shape).to(torch.uint8).view(torch.float8_e4m3fn)

    def scale(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._rng) / 100 + 0.001

    def of(self, kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        """Return the parts by the ends of their names."""
        nibbles, groups = (rows, columns // 2), columns // 32
        match kind:
            case "int8" | "float8":
                weight = self.whole if kind == "int8" else self.float8
                return {"weight": weight(rows, columns), "weight_scale": self.scale(rows, 1)}
            case "fp8_tensor":
                weight, scales = self.float8(rows, columns), ("weight_scale", "input_scale")
                return {"weight": weight} | {name: self.scale() for name in scales}
            case "nvfp4":
                scales = "weight_global_scale", "input_global_scale"
                return {
                    "weight_packed": self.bytes(*nibbles),
                    "weight_scale": self.float8(rows, columns // 16),
                    **{name: 1000 * self.scale(1) for name in scales},
                }
            case "nvfp4_modelopt":
                scales = "weight_scale_2", "input_scale"
                return {
                    "weight": self.bytes(*nibbles),
                    "weight_scale": self.float8(rows, columns // 16),
                    **{name: self.scale() for name in scales},
                }
            case "mxfp8":
                return {"weight": self.float8(rows, columns), "weight_scale": self.exponents(rows, groups)}
            case "mxfp4":
                return {"weight_packed": self.bytes(*nibbles), "weight_scale": self.exponents(rows, groups)}
        found = {
            "scales": self.scale(groups, rows).to(torch.bfloat16),
            "qzeros": self.words(groups, rows // 8),
        }
        if kind == "awq":
            return found | {"qweight": self.words(columns, rows // 8)}
        order = torch.arange(columns, dtype=torch.int32) // 32
        return found | {"qweight": self.words(columns // 8, rows), "g_idx": order}


def quantized(path: Path, kind: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint in a quantized format, and note the format in its configuration. Blocks are what a
    publisher makes; others have random values in their linear layers. Routers and the head are not quantized.
    """
    settings = json.loads((path / "config.json").read_text())
    kept = [
        "lm_head",
        *(name.removesuffix(".weight") for name in weights if name.endswith("mlp.gate.weight")),
    ]
    named = {"ignore": kept, "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": _FORMATS[kind] | named}))
    if kind == "fp8_blocks":
        return dict(fp8_blocks(weights.items()))
    random, found = _Random(), dict[str, torch.Tensor]()
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            found[name] = weight
            continue
        base = name.removesuffix("weight")
        found |= {f"{base}{part}": made for part, made in random.of(kind, *weight.shape).items()}
    return found


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
    """Change tensors alone that are one in the model. Returns error and version after each; live tensors
    stay.
    """
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
    engine: Engine,
) -> dict[str, list[str]]:
    """Change each tensor in a version of its own. Returns what is then other than in a fresh load, by the
    tensor.
    """
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
            found = differences(tensors_of(model), tensors_of(engine(folder / "second", case.arguments)[0]))
            if found or status["version"] != version.version:
                wrong[name] = [str(status["error"]), *found]
    return wrong
