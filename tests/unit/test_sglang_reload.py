"""Layers that SGLang processes once they are loaded, in twins: by layers that are loaded and processed as SGLang's
are. With SGLang itself, see `tests.integration.sglang_layouts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from deltasync.errors import ModelMismatchError
from deltasync.serve import load_plan
from deltasync.serve.mirror import Mirror, mirrored
from deltasync.tensors.bits import bits_of, spec_of
from sglang_plugin.reload import SglangLayers, note_built


class Loaded(torch.nn.Parameter):
    """A parameter that knows how it is loaded."""

    weight_loader: Any


class PerTensor:
    """Quantizes as SGLang's online FP8 does: the weight transposed, and a scale; both are other parameters."""

    is_loaded = False

    def process_weights_after_loading(self, layer: Any) -> None:
        assert not self.is_loaded
        most = layer.weight.abs().max().float()
        quantized = (layer.weight.float() * (448 / most)).to(torch.float8_e4m3fn)
        layer.weight = torch.nn.Parameter(quantized.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(most / 448, requires_grad=False)
        self.is_loaded = True


PerTensor.__module__ = "sglang.srt.layers.quantization.fp8"


class Fused(torch.nn.Module):
    """Two matrices of the checkpoint in one, as a linear layer of SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Loaded(torch.zeros(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.weight.weight_loader = self.load
        self.quant_method = PerTensor()

    def load(self, parameter: torch.Tensor, weight: torch.Tensor, half: int) -> None:
        parameter.data[4 * half : 4 * half + 4].copy_(weight)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Fused(), torch.nn.LayerNorm(4, bias=False, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "norm":
                self.norm.weight.data.copy_(weight)
            else:
                parameter = self.layer.weight
                parameter.weight_loader(parameter, weight, int(name))
        self.post_load_weights()

    def post_load_weights(self) -> None:
        assert self.layer.weight.dtype == torch.bfloat16  # what it makes is made again after a commit


def model_of(weights: dict[str, torch.Tensor]) -> Model:
    model = Model()
    note_built(model)
    model.load_weights(weights.items())
    model.layer.quant_method.process_weights_after_loading(model.layer)
    return model


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"0": (4, 4), "1": (4, 4), "norm": (4,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def mirror_of(model: Model, weights: dict[str, torch.Tensor]) -> Mirror:
    specs = {name: spec_of(name, tensor) for name, tensor in weights.items()}
    plan = load_plan.record(model, specs, SglangLayers.loader)
    assert [*plan.reasons] == ["0", "1"] and plan.segments["norm"]
    tensors = mirrored(plan, specs, weights.items())
    layers = {name: plan.layers[name] for name in tensors}
    return Mirror(model, SglangLayers(), layers, tensors, plan.reasons)


def state_of(model: Model) -> list[bytes]:
    return [bits_of(each.detach()).tobytes() for each in (model.layer.weight, model.layer.weight_scale)]


def test_a_version_and_its_rollback_are_what_a_fresh_load_makes(weights: dict[str, torch.Tensor]) -> None:
    model = model_of(weights)
    parameters, before = dict(model.layer._parameters), state_of(model)
    mirror = mirror_of(model, weights)
    mirror.prove()
    assert mirror.twins.names == {"0", "1"} and state_of(model) == before
    changed = weights | {"1": weights["1"] * 3}
    mirror.stage({"1": bits_of(changed["1"])}, {"1"})
    assert state_of(model) == before
    assert mirror.refresh({"1"}) == 0
    assert state_of(model) == state_of(model_of(changed))
    mirror.refresh({"1"})
    assert state_of(model) == before
    assert all(model.layer._parameters[name] is each for name, each in parameters.items())
    model.layer.weight_scale.data.mul_(2)
    assert not mirror.audit()
    assert mirror.refresh(()) > 0
    assert state_of(model) == before and mirror.audit()


def test_a_value_that_loading_does_not_make_is_refused_by_name(weights: dict[str, torch.Tensor]) -> None:
    model = model_of(weights)
    before = state_of(model)
    mirror = mirror_of(model, weights)
    model.layer.quant_method.scheme = "another"
    with pytest.raises(ModelMismatchError, match=r"SGLang does not keep 2 .*Fused\.quant_method\.scheme"):
        mirror.prove()
    assert state_of(model) == before
