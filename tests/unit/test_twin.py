"""What twins of layers make, staged and exchanged in live memory."""

from __future__ import annotations

from collections.abc import Mapping, Set

import pytest
import torch

from deltasync.errors import StageError
from vllm_plugin.load.twin import Made, Twins, overlaps


class Scaled(torch.nn.Module):
    """A weight kept transposed in 8 bits, and its scale, as vLLM's online FP8 keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(quantized(torch.zeros(4, 6)), requires_grad=False)
        self.scale = torch.zeros(())


def quantized(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn).t()


def made_by(layers: Set[torch.nn.Module], weights: Mapping[str, torch.Tensor]) -> Made:
    return {layer: {"weight": quantized(weights["w"]), "scale": weights["w"].max()} for layer in layers}


def test_what_a_twin_makes_is_exchanged_in_place_and_back() -> None:
    layer = Scaled()
    twins = Twins(layer, [({layer}, {"w"})], made_by)
    place, stride = layer.weight.data_ptr(), layer.weight.stride()
    first, second = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)
    second[1, 3] = 300
    for weight in (first, second):  # most elements, then two
        twins.stage({"w"}, lambda _, given=weight: given)
        twins.exchange()
        assert torch.equal(layer.weight.float(), quantized(weight).float())
        assert float(layer.scale) == float(weight.max())
        assert twins.is_intact()
    twins.exchange()
    assert torch.equal(layer.weight.float(), quantized(first).float())
    assert (layer.weight.data_ptr(), layer.weight.stride()) == (place, stride)
    assert twins.is_intact()


def test_live_memory_that_somebody_wrote_is_not_committed_over() -> None:
    layer, one = Scaled(), torch.zeros(4, 6)
    one[0, 0] = 1
    twins = Twins(layer, [({layer}, {"w"})], made_by)
    twins.stage({"w"}, lambda _: one)
    layer.weight.data.view(torch.int8)[0, 0] = 7
    assert not twins.is_intact()
    with pytest.raises(StageError):
        twins.exchange()
    assert int(layer.weight.data.view(torch.int8)[0, 0]) == 7


def test_views_of_one_storage_that_differ_cannot_be_exchanged_one_by_one() -> None:
    layer = torch.nn.Module()
    layer.register_buffer("whole", torch.zeros(4, 4))
    assert not overlaps([layer])
    layer.register_buffer("part", layer.whole[:2])
    assert overlaps([layer])
