"""Tensors without memory of their own are published by value or refused by name, and never taken for each
other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deltasync import Publisher, Replica
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.tensors.bits import bits_of
from deltasync.trainer.stream import module_tensors
from tests.builders import assert_holds
from tests.conftest import assert_same_bits
from tests.wrapped import Again, Forwarding, Mute, OnlyDequantized, Scaled


def layers(
    kind: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    """Two linear layers of one shape, their weights of a kind, and a norm that is plain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)).to(dtype)
    for layer in model[:2]:
        layer.weight = nn.Parameter(kind(layer.weight.detach()), requires_grad=False)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value_of(tensor) for name, tensor in model.state_dict().items()}


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Scaled):
        return tensor.plain()
    return (tensor.held if isinstance(tensor, Forwarding) else tensor).detach().clone()


def step(model: nn.Module) -> None:
    """Change some values of each tensor."""
    for tensor in model.state_dict().values():
        inner = tensor.values if isinstance(tensor, Scaled) else getattr(tensor, "held", tensor)
        inner.view(-1)[::3] += 1


STREAMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: model,
    "state_dict": lambda model: model.state_dict(),
    "list": lambda model: list(model.state_dict().items()),
    "generator": lambda model: ((name, tensor) for name, tensor in model.state_dict().items()),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", [Scaled.of, OnlyDequantized.of, Forwarding])
def test_wrapped_weights_of_one_shape_are_all_published_by_value(
    memory_url: str, kind: Callable[[torch.Tensor], torch.Tensor], stream: str
) -> None:
    model = layers(kind)
    with Publisher(memory_url) as publisher:
        for version in range(1, 4):
            wanted = values(model)
            publisher.publish(STREAMS[stream](model)).wait(60)
            assert_holds(memory_url, wanted, version)
            step(model)


def test_weights_that_become_wrapped_or_plain_again_are_published_by_value(memory_url: str) -> None:
    model = layers(lambda weight: weight)
    with Publisher(memory_url) as publisher:
        publisher.publish(model).wait(60)
        for kind in (Scaled.of, lambda weight: weight, OnlyDequantized.of):
            for layer in model[:2]:
                layer.weight = nn.Parameter(kind(value_of(layer.weight) + 1), requires_grad=False)
            publisher.publish(model).wait(60)
            assert_holds(memory_url, values(model))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", [Mute, Again])
def test_weights_that_do_not_tell_their_values_are_refused_by_name(
    memory_url: str, kind: type[Scaled], stream: str
) -> None:
    model = layers(kind.of)
    with Publisher(memory_url) as publisher:
        with pytest.raises(
            ConfigError,
            match=rf"^0\.weight is a {kind.__name__}, whose values cannot be read \(.*\)\. Publish",
        ):
            publisher.publish(STREAMS[stream](model))
        publisher.publish(layers(Scaled.of)).wait(60)


def test_a_refusal_at_a_later_publish_publishes_nothing(memory_url: str) -> None:
    with Publisher(memory_url) as publisher:
        publisher.publish(layers(Scaled.of)).wait(60)
        with pytest.raises(ConfigError, match=r"0\.weight is a Mute"):
            publisher.publish(layers(Mute.of))
        assert publisher.publish(layers(Scaled.of)).wait(60).changed == 0


def test_wrapped_weights_are_tied_by_their_parameter_alone() -> None:
    model = layers(Scaled.of)
    model[1].weight = model[0].weight
    assert [*module_tensors(model)] == ["0.weight", "2.weight", "2.bias"]
    model[1].weight = nn.Parameter(
        Scaled(model[0].weight.values, model[0].weight.scale * 2), requires_grad=False
    )
    assert [*module_tensors(model)] == ["0.weight", "1.weight", "2.weight", "2.bias"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_without_memory_are_not_tied(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device)
    if device == "cpu":
        for layer in model:
            layer.weight.untyped_storage().resize_(0)
    assert [*module_tensors(model)] == ["0.weight", "1.weight"]


def test_views_of_another_dtype_are_not_tied() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    model.register_buffer("bits", model.weight.detach().view(torch.int16))
    assert [*module_tensors(model)] == ["weight", "bits"]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_whose_memory_was_freed_is_refused_by_name(
    memory_url: str, dtype: torch.dtype, published: bool
) -> None:
    weights = {"a": torch.ones(4, dtype=dtype), "b": torch.ones(4, 4, dtype=dtype)}
    with Publisher(memory_url) as publisher:
        if published:
            publisher.publish(weights).wait(60)
            publisher.publish(weights).wait(60)
        weights["b"].untyped_storage().resize_(0)
        with pytest.raises(ModelMismatchError, match=r"b has 16 elements and no memory: it was freed"):
            publisher.publish(weights)
        weights["b"] = torch.full((4, 4), 2.0, dtype=dtype)
        publisher.publish(weights).wait(60)


def test_a_tensor_that_negates_its_memory_is_published_by_value(memory_url: str) -> None:
    weight = torch.view_as_complex(torch.tensor([[1.0, 2.0], [3.0, -4.0]])).conj().imag
    assert weight.is_neg()
    with Publisher(memory_url, dtype="float32") as publisher:
        publisher.publish({"w": weight}).wait(60)
        publisher.publish({"w": weight}).wait(60)
    replica = Replica(memory_url)
    replica.sync()
    assert replica.state_dict()["w"].tolist() == [-2.0, 4.0]


def test_a_sparse_tensor_is_refused_by_name(memory_url: str) -> None:
    with (
        Publisher(memory_url) as publisher,
        pytest.raises(ModelMismatchError, match=r"^w is sparse \(torch.sparse_coo\)"),
    ):
        publisher.publish({"w": torch.eye(3).to_sparse()})


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_module_with_a_tensor_of_another_layout_is_refused_by_its_name(memory_url: str, kind: str) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("mask", getattr(torch.eye(4), kind)())
    for stream in (model, model.state_dict()):
        with Publisher(memory_url) as publisher, pytest.raises(ModelMismatchError, match=r"^mask is sparse"):
            publisher.publish(stream)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_parameter_without_a_shape_is_refused_by_name(memory_url: str, stream: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with (
        Publisher(memory_url) as publisher,
        pytest.raises(ModelMismatchError, match=r"^1\.weight is not initialized"),
    ):
        publisher.publish(STREAMS[stream](model))


def test_a_nested_tensor_is_refused_by_name(memory_url: str) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with (
        Publisher(memory_url) as publisher,
        pytest.raises(ModelMismatchError, match=r"^w is a nested tensor"),
    ):
        publisher.publish({"w": nested})


def test_no_bits_are_read_at_address_0() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ModelMismatchError, match="Tensor of 4 elements has no memory"):
        bits_of(freed)


def test_wrapped_weights_are_quantized_by_their_values(
    memory_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = layers(Scaled.of), layers(lambda weight: weight)
    for layer, other in zip(plain[:2], model[:2], strict=True):
        layer.weight = nn.Parameter(value_of(other.weight))
    found = []
    with caplog.at_level(logging.WARNING):
        for number, each in enumerate((model, plain)):
            with Publisher(f"{memory_url}/{number}", dtype="fp8") as publisher:
                publisher.publish(each).wait(60)
            replica = Replica(f"{memory_url}/{number}")
            replica.sync()
            found.append(replica.state_dict())
    assert_same_bits(*found)
