"""PEFT models: merged weights, or the adapter alone, as PEFT itself would save them."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, VeraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from deltasync.errors import ConfigError
from deltasync.opening.adapter_base import FILE, AdapterBase
from deltasync.opening.checkpoint import find, load
from tests.conftest import assert_same_bits
from tests.integration.trainers import (
    Bits,
    FlushEachStep,
    Recorder,
    anchor_directory,
    make_trainer,
    merged_bits,
    published_bits,
    tiny_model,
)
from tests.wrapped import Forwarding, Scaled
from trl_callback import DeltaSyncCallback, DeltaSyncConfig, adapter, gather
from trl_callback.gather import as_saved

LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


def adapted_model(**lora: Any) -> PeftModel:
    return get_peft_model(tiny_model(tied=False), LoraConfig(**(LORA | lora)))


def adapter_bits(model: PeftModel, folder: Path) -> Bits:
    model.save_pretrained(folder)
    bits: Bits = load_file(folder / "adapter_model.safetensors")
    return bits


@pytest.mark.parametrize(
    "lora",
    [
        {},
        pytest.param({"use_dora": True}, marks=pytest.mark.slow),
        pytest.param({"modules_to_save": ["lm_head"]}, marks=pytest.mark.slow),
        {"target_modules": "all-linear", "lora_bias": False},
    ],
    ids=["lora", "dora", "a-whole-module-too", "all-linear"],
)
def test_any_trainer_publishes_merged_weights_and_trains_as_without(
    lora: dict[str, Any], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/channel"
    sync, recorder = DeltaSyncCallback(url), Recorder(tmp_path / "saved", merged_bits)
    model, alone = adapted_model(**lora), adapted_model(**lora)
    make_trainer(model, tmp_path / "out", recorder, sync, FlushEachStep(sync)).train()
    assert [record.version for record in sync.history] == [1, 2, 3, 4, 5]
    assert all(record.changed > 0 for record in sync.history)
    for version, bits in enumerate(recorder.bits.values(), start=1):
        assert_same_bits(published_bits(url, version), bits)

    make_trainer(alone, tmp_path / "out").train()
    assert_same_bits(model.state_dict(), alone.state_dict())
    anchor = AutoModelForCausalLM.from_pretrained(anchor_directory(tmp_path))
    assert_same_bits(gather.held_tensors(anchor), recorder.bits[0])


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 4, 3)
        self.second = torch.nn.Conv1d(4, 5, 3, bias=False)
        self.tokens = torch.nn.Embedding(7, 4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(image).flatten(2)).mean(2)[:, :4])


def conv_model() -> torch.nn.Module:
    return Convolutions()


def untied_model() -> torch.nn.Module:
    return tiny_model(tied=False)


MERGES: dict[str, tuple[Any, PeftConfig, bool]] = {
    "dora": (untied_model, LoraConfig(**LORA, use_dora=True), True),
    "embeddings": (untied_model, LoraConfig(**(LORA | {"target_modules": ["q_proj", "embed_tokens"]})), True),
    "a-whole-module-too": (untied_model, LoraConfig(**LORA, modules_to_save=["lm_head", "norm"]), True),
    "some-tokens": (untied_model, LoraConfig(**LORA, trainable_token_indices=[1, 2, 5]), True),
    "a-parameter": (untied_model, LoraConfig(**LORA, target_parameters=["mlp.up_proj.weight"]), True),
    "shared-projections": (untied_model, VeraConfig(r=8, target_modules=["q_proj", "o_proj"]), True),
    "convolutions": (conv_model, LoraConfig(r=2, target_modules=["first", "second", "tokens"]), True),
    "convolutions-with-dora": (
        conv_model,
        LoraConfig(r=2, target_modules=["first", "tokens", "last"], use_dora=True),
        True,
    ),
    "tied-embeddings": (
        tiny_model,
        LoraConfig(**(LORA | {"target_modules": ["q_proj", "embed_tokens"]})),
        False,
    ),
    "its-own-way": (
        untied_model,
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        False,
    ),
}


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")
@pytest.mark.parametrize("name", MERGES)
def test_one_layer_at_a_time_is_merged_as_peft_merges_a_copy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, config, by_layers = MERGES[name]
    model = get_peft_model(make(), copy.deepcopy(config))
    for param in model.parameters():
        if param.requires_grad:  # B is zero at first
            param.data += 0.05 * torch.randn_like(param)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = copy.deepcopy(model).merge_and_unload()
    copied: list[weakref.ref[Any]] = []
    merge = adapter._merged_layer

    def merge_alone(*arguments: Any) -> Any:
        assert not any(layer() for layer in copied)
        layer = merge(*arguments)
        copied.append(weakref.ref(layer.weight))
        return layer

    monkeypatch.setattr(adapter, "_merged_layer", merge_alone)
    stream = gather.stream_of(model)
    bits = {}
    for tensor_name, tensor in stream:
        bits[tensor_name] = tensor.clone()
        del tensor
    saved = as_saved(expected, gather.held_tensors(expected))
    assert list(bits) == list(saved)
    assert_same_bits(bits, saved)
    assert_same_bits(model.state_dict(), before)
    assert bool(copied) == by_layers


@pytest.mark.parametrize("dtype", ["bfloat16", "keep"])
def test_the_adapter_alone_is_published_as_peft_saves_it(dtype: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    sync = DeltaSyncCallback(url, adapter_only=True, served_dtype=dtype)
    recorder = Recorder(tmp_path / "saved", adapter_bits)
    make_trainer(adapted_model(), tmp_path / "out", recorder, sync, FlushEachStep(sync)).train()
    elements = sum(tensor.numel() for tensor in recorder.bits[0].values())
    assert [(record.version, record.total) for record in sync.history] == [(v, elements) for v in range(1, 6)]
    for version, bits in enumerate(recorder.bits.values(), start=1):
        served = bits if dtype == "keep" else {name: tensor.bfloat16() for name, tensor in bits.items()}
        assert_same_bits(published_bits(url, version), served)
    anchor = anchor_directory(tmp_path)
    assert json.loads((anchor / "adapter_config.json").read_bytes()) == json.loads(
        (tmp_path / "saved" / "adapter_config.json").read_bytes()
    )
    names = ["adapter_base.json", "adapter_config.json", "model.safetensors"]
    assert sorted(path.name for path in anchor.iterdir()) == names


def changed(model: PeftModel) -> PeftModel:
    for param in model.parameters():
        if param.requires_grad:
            param.data += 0.1
    return model


@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")
@pytest.mark.parametrize("name", MERGES)
def test_the_base_of_an_adapter_is_what_was_loaded_whatever_the_adapter_learned(name: str) -> None:
    make, config, _ = MERGES[name]
    torch.manual_seed(0)
    base = make()
    own = AdapterBase.of("", as_saved(base, gather.held_tensors(base)).items())
    model = get_peft_model(base, copy.deepcopy(config))
    before, after = gather.adapter_base_of(model), gather.adapter_base_of(changed(model))
    assert before == after
    assert after.tensors == own.tensors
    base.get_parameter(
        next(name for name, param in base.named_parameters() if not param.requires_grad)
    ).data *= 2
    assert gather.adapter_base_of(model) != after


def test_a_base_that_was_loaded_from_a_checkpoint_equals_it_in_any_dtype(tmp_path: Path) -> None:
    tiny_model(tied=False).to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype), LoraConfig(**LORA)
        )
        base = gather.adapter_base_of(changed(model))
        assert base.name == str(tmp_path)
        assert base.compare(load(find(tmp_path))) == ([], [])


def wrapped_base(kind: Callable[[torch.Tensor], torch.Tensor]) -> PeftModel:
    """An adapted model whose linear layers hold their frozen weights in a wrapper subclass, as those of
    torchao.
    """
    model = tiny_model(tied=False)
    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(kind(layer.weight.detach()), requires_grad=False)
    return get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))


def test_an_adapter_over_quantized_weights_is_published_and_these_are_left_out_of_its_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, model = f"file://{tmp_path}/channel", wrapped_base(Scaled.of)
    make_trainer(
        model, tmp_path / "out", DeltaSyncCallback(url, adapter_only=True, served_dtype="keep"), max_steps=2
    ).train()
    assert_same_bits(published_bits(url), adapter_bits(model, tmp_path / "adapter"))
    base = AdapterBase.decode((anchor_directory(tmp_path) / FILE).read_bytes())
    assert not any("_proj" in name for name in base.tensors)
    assert "model.norm.weight" in base.tensors
    (said,) = [record.message for record in caplog.records if "are quantized" in record.message]
    assert said.startswith("14 of the base model's 25 tensors are quantized, so servers cannot compare them")


def test_adapters_are_merged_into_wrapped_weights_or_refused_and_never_lost(
    tmp_path: Path, memory_url: str
) -> None:
    url, model = f"file://{tmp_path}/channel", wrapped_base(Forwarding)
    make_trainer(model, tmp_path / "out", DeltaSyncCallback(url), max_steps=2).train()
    published = published_bits(url)
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            merged = layer.get_base_layer().weight.held + layer.get_delta_weight("default").detach()
            assert_same_bits({name: published[f"{name}.weight"]}, {name: merged.to(torch.bfloat16)})
    with pytest.raises(
        ConfigError,
        match=r"what PEFT merges into .*_proj\.weight, a Scaled, is lost\. Load the base unquantized",
    ):
        make_trainer(wrapped_base(Scaled.of), tmp_path / "out", DeltaSyncCallback(memory_url))


def test_the_active_adapter_of_several_is_published(tmp_path: Path) -> None:
    model = adapted_model()
    model.add_adapter("other", LoraConfig(**{**LORA, "r": 2}))
    model.set_adapter("other")
    url = f"file://{tmp_path}/channel"
    make_trainer(
        model, tmp_path / "out", DeltaSyncCallback(url, adapter_only=True, served_dtype="keep")
    ).train()
    model.save_pretrained(tmp_path / "saved")
    assert_same_bits(
        published_bits(url), load_file(tmp_path / "saved" / "other" / "adapter_model.safetensors")
    )
    config = anchor_directory(tmp_path) / "adapter_config.json"
    assert json.loads(config.read_bytes())["r"] == 2


def test_the_adapter_alone_is_refused_where_there_is_no_such_thing(memory_url: str, tmp_path: Path) -> None:
    sync = DeltaSyncCallback(DeltaSyncConfig(memory_url, adapter_only=True))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM is none"):
        make_trainer(tiny_model(), tmp_path, sync)
    several = adapted_model()
    several.add_adapter("other", LoraConfig(**LORA))
    several.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match="2 are active: default, other"):
        make_trainer(several, tmp_path, sync)
    sharded = adapted_model()
    next(sharded.parameters()).ds_id = 7  # what ZeRO-3 leaves on a parameter
    with pytest.raises(ConfigError, match=r"cannot be merged\. Publish the adapter with adapter_only=True"):
        make_trainer(sharded, tmp_path, DeltaSyncCallback(memory_url))


def test_adapters_that_cannot_be_merged_are_refused(memory_url: str, tmp_path: Path) -> None:
    from peft import PrefixTuningConfig

    model = get_peft_model(tiny_model(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match="cannot be merged"):
        make_trainer(model, tmp_path, DeltaSyncCallback(memory_url))


def test_adapters_that_transformers_has_added_are_refused(memory_url: str, tmp_path: Path) -> None:
    if Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"transformers adds adapters with PEFT {MIN_PEFT_VERSION} and later only")
    with torch.no_grad():
        natively = tiny_model()
        natively.add_adapter(LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="cannot be merged"):
        make_trainer(natively, tmp_path, DeltaSyncCallback(memory_url))
