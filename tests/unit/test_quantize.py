"""FP8 by blocks: what is published, and that transformers reads it as it was meant."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from deltasync import Publisher
from deltasync.errors import ConfigError
from deltasync.trainer.stream import BLOCK, SCALE, TensorRange, fp8_blocks, quantize
from demo import model as demo_model
from tests.conftest import assert_same_bits
from tests.integration.trainers import make_trainer, published_bits, tiny_moe
from trl_callback import DeltaSyncCallback, DeltaSyncConfig


def dequantize(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse of `quantize` but for its rounding, float32."""
    rows, columns = values.shape
    each = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * each


@given(st.integers(1, 300), st.integers(1, 300), st.integers(-30, 30), st.integers(0, 99))
def test_values_are_the_nearest_and_scales_the_least_powers_of_two(
    rows: int, columns: int, power: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**power
    values, scale = quantize(weight)
    assert scale.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            largest, chosen = block.abs().max().item(), scale[i, j].item()
            assert math.frexp(chosen)[0] == 0.5
            assert largest <= 448 * chosen and largest > 448 * chosen / 2
            expected = (block.double() / chosen).to(torch.float8_e4m3fn)
            found = values[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert ((dequantize(values, scale) - weight).abs() <= weight.abs() / 16 + scale.max() * 2**-10).all()


def test_a_block_of_zeros_and_the_largest_value_of_a_scale() -> None:
    values, scale = quantize(torch.zeros(3, 130))
    assert scale.tolist() == [[1.0, 1.0]] and not values.float().any()
    values, scale = quantize(torch.tensor([[448.0, -1.0]]))
    assert scale.item() == 1.0 and values.float().tolist() == [[448.0, -1.0]]


def test_an_anchor_is_a_checkpoint_that_transformers_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = demo_model.build_model(demo_model.build_tokenizer())
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel", served_dtype="fp8")
    make_trainer(model, tmp_path / "out", sync, max_steps=1).train()
    (anchor,) = (tmp_path / "channel" / "anchors").iterdir()
    config = json.loads((anchor / "config.json").read_bytes())
    assert (config["dtype"], config["quantization_config"]["quant_method"]) == ("bfloat16", "fp8")
    published = published_bits(sync.config.channel, 1)
    read = AutoModelForCausalLM.from_pretrained(
        anchor, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    scaled = [name for name in published if name + SCALE in published]
    assert len(scaled) == 7 * model.config.num_hidden_layers
    for name, tensor in read.state_dict().items():
        expected = dequantize(published[name], published[name + SCALE]) if name in scaled else published[name]
        assert torch.equal(tensor, expected.bfloat16()), name


def test_far_fewer_bits_change_than_in_bfloat16_and_each_version_is_the_quantized_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.layers.0.mlp.up_proj.weight": 0.02 * torch.randn(1024, 256, generator=generator),
        "model.layers.0.mlp.gate.weight": 0.02 * torch.randn(8, 256, generator=generator),
        "model.embed_tokens.weight": 0.02 * torch.randn(64, 256, generator=generator),
        "model.norm.weight": torch.ones(256),
    }
    changed = {}
    for dtype in ("bfloat16", "fp8"):
        url, current = f"memory://{dtype}-changes", dict(weights)
        with Publisher(url, dtype=dtype) as publisher:
            publisher.publish(current.items()).wait(60)
            for version in range(2, 5):
                current = {
                    name: w + 1e-6 * torch.randn(w.shape, generator=generator) for name, w in current.items()
                }
                receipt = publisher.publish(current.items())
                receipt.wait(60)
                if dtype == "fp8":
                    assert_same_bits(published_bits(url, version), dict(fp8_blocks(current.items())))
            changed[dtype] = receipt.changed
    assert 0 < changed["fp8"] < changed["bfloat16"] / 5


def test_experts_are_quantized_one_by_one_and_the_router_is_not(tmp_path: Path) -> None:
    sync = DeltaSyncCallback(f"file://{tmp_path}/channel", served_dtype="fp8")
    make_trainer(tiny_moe(), tmp_path / "out", sync, max_steps=1).train()
    published = published_bits(sync.config.channel)
    assert published["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert published["model.layers.0.mlp.experts.3.up_proj.weight" + SCALE].dtype == torch.float32
    for name in (
        "model.layers.0.mlp.gate.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
    ):
        assert published[name].dtype == torch.bfloat16


def test_shards_adapters_and_the_trained_checkpoint_are_refused(memory_url: str) -> None:
    part = TensorRange(torch.zeros(128), 0, (2, 128))
    with (
        Publisher(memory_url, dtype="fp8") as publisher,
        pytest.raises(ConfigError, match=r"up\.weight is a shard"),
    ):
        publisher.publish([("up.weight", part)])
    with pytest.raises(ConfigError, match="cannot be served in FP8"):
        DeltaSyncConfig(memory_url, served_dtype="fp8", adapter_only=True)
    with pytest.raises(ConfigError, match="Name the FP8 checkpoint as initial"):
        DeltaSyncConfig(memory_url, served_dtype="fp8", initial="auto")
