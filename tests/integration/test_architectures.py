"""Every small causal and vision architecture that transformers can build here: what is published is what
`save_pretrained` writes, and a checkpoint made of that computes what the trainer computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from deltasync import Publisher, follow
from deltasync.errors import ApplyError, ModelMismatchError
from tests.conftest import assert_same_bits
from trl_callback import gather

# of models that nobody trains here
pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

_MOST_ELEMENTS = 60_000_000
_SMALL = dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32)
_SMALL |= dict.fromkeys(
    ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48
)
_SMALL |= dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2)
_SMALL |= dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_experts_per_tok"), 2
)
_SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
_SMALL |= dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64)
_SMALL |= dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1)
_SMALL |= {
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
}
_SMALL |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Where sizes depend on each other.
_OWN: dict[str, dict[str, Any]] = {
    "cosmos3_edge": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    },
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "glm5_next": {"qk_rope_head_dim": 0},
    "gpt_neo": {"attention_layers": ["global", "local"], "attention_types": [[["global", "local"], 1]]},
    "granite_docling": {"out_hidden_size": 32},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "inkling2": {"text_hidden_size": 32, "unpadded_vocab_size": 64},
    "inkling2_loop": {"text_hidden_size": 32, "unpadded_vocab_size": 64},
    "inkling2_loop_text": {"unpadded_vocab_size": 64},
    "inkling2_text": {"unpadded_vocab_size": 64},
    "laguna": {"num_attention_heads_per_layer": [2, 2]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}

CASES = [(AutoModelForCausalLM, name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
CASES += [(AutoModelForImageTextToText, name) for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]


def shrunk(config: Any, own: dict[str, Any]) -> Any:
    for name, value in _SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    for name in ("text_config", "vision_config", "audio_config"):
        if getattr(config, name, None) is not None:
            shrunk(getattr(config, name), own)
    for name, value in own.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def built(auto: Any, name: str) -> Any:
    """A model with random weights; what cannot be made small is left out, and said."""
    try:
        config = shrunk(CONFIG_MAPPING[name](), _OWN.get(name, {}))
        with torch.device("meta"):
            elements = sum(param.numel() for param in auto.from_config(config).parameters())
        if elements > _MOST_ELEMENTS:
            pytest.skip(f"{name} has {elements:,} elements")
        torch.manual_seed(0)
        return auto.from_config(config).eval()
    except Exception as error:  # noqa: BLE001 - of any model's own checks
        pytest.skip(f"{name} cannot be built by these sizes: {type(error).__name__}")


def moved(model: Any, version: int) -> None:
    """Change every weight and every persistent buffer that is no whole number."""
    source = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for tensor in {id(each): each for each in model.state_dict(keep_vars=True).values()}.values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.randn(tensor.shape, generator=source).to(tensor.dtype))


@pytest.mark.parametrize(
    ("auto", "name"), CASES, ids=[f"{name}-{auto.__name__[12:]}" for auto, name in CASES]
)
def test_a_followed_one_computes_what_a_fresh_one_does_in_three_versions(
    auto: Any, name: str, memory_url: str
) -> None:
    trainer, live = built(auto, name).requires_grad_(False), built(auto, name).requires_grad_(False)
    moved(live, 9)
    with Publisher(memory_url, dtype="keep", retention=None) as publisher:
        publisher.publish(trainer).wait()
        try:
            with follow(live, memory_url, background=False) as following:
                for version in (1, 2, 3):
                    assert following.sync() == version
                    fresh = built(auto, name)
                    fresh.load_state_dict(trainer.state_dict())
                    expected = logits_of(fresh)
                    if expected is None:
                        pytest.skip(f"{name} wants more than tokens")
                    with torch.no_grad():
                        found = live(input_ids=torch.arange(3, 11)[None], use_cache=False).logits
                    assert torch.equal(found.nan_to_num(), expected.nan_to_num()), version
                    moved(trainer, version)
                    publisher.publish(trainer).wait()
        except (ModelMismatchError, ApplyError) as error:
            pytest.skip(f"{name} is refused: {error}")


def logits_of(model: Any) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            return model(input_ids=torch.arange(3, 11)[None], use_cache=False).logits
    except Exception:  # noqa: BLE001 - of any model's own code
        return None  # it wants more than tokens


@pytest.mark.parametrize(
    ("auto", "name"), CASES, ids=[f"{name}-{auto.__name__[12:]}" for auto, name in CASES]
)
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_what_is_published_is_what_would_be_saved(
    auto: Any, name: str, adapted: bool, tmp_path: Path
) -> None:
    model = built(auto, name)
    if adapted:
        try:
            model = get_peft_model(
                model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
            ).eval()
        except (ValueError, NotImplementedError):
            pytest.skip("PEFT finds nothing to adapt")
    merged = copy.deepcopy(model).merge_and_unload() if adapted else model
    merged.save_pretrained(tmp_path / "saved")
    published = {tensor_name: tensor.clone() for tensor_name, tensor in gather.stream_of(model)}
    assert_same_bits(published, load_file(tmp_path / "saved" / "model.safetensors"))
    for file_name, data in gather.checkpoint_files(model, None, "keep").items():
        (tmp_path / "saved" / file_name).write_bytes(data)
    save_file(published, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    wanted = logits_of(merged)
    if wanted is None:
        return
    found = logits_of(type(merged).from_pretrained(tmp_path / "saved").eval())
    if not torch.allclose(found, wanted, atol=1e-5, rtol=1e-5):
        merged.save_pretrained(tmp_path / "own")
        own = logits_of(type(merged).from_pretrained(tmp_path / "own").eval())
        assert not torch.allclose(own, wanted, atol=1e-5, rtol=1e-5)
        pytest.skip(f"transformers does not load what it saved of {name}")
