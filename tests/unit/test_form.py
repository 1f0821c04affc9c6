"""A module that is published again is not walked again, and what is published of it is what a fresh
`state_dict` has, whatever was done to the module in between.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from deltasync import Publisher
from deltasync.errors import ConfigError
from deltasync.trainer.form import LEFT_OUT
from deltasync.trainer.stream import module_tensors
from tests.builders import assert_holds


class Tied(nn.Module):
    """Two layers of one shape, buffers, a head that is tied to the embedding, and a name without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norms = nn.Sequential(nn.BatchNorm1d(8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_module("none", None)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("angles", torch.ones(8), persistent=False)


class Negated(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return -value


def new(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(model.first.weight, new(8, 8))


def modules_exchanged(model: Any) -> None:
    model.first, model.second = model.second, model.first


def class_changed(model: Any) -> None:
    model.first.__class__ = type("Other", (nn.Linear,), {"get_extra_state": lambda _: torch.ones(2)})


def data_tied(model: Any) -> None:
    model.second.weight.data = model.first.weight.data


def untied(model: Any) -> None:
    model.head.weight = new(8, 8)


def own_method(model: Any) -> None:
    state_dict = model.first.state_dict
    model.first.state_dict = lambda **given: {
        key: of for key, of in state_dict(**given).items() if "b" in key
    }


def hooked(model: Any) -> None:
    def doubled(_: Any, state: dict[str, Any], prefix: str, *_more: Any) -> None:
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]

    model.first.register_state_dict_post_hook(doubled)


def hooked_before(model: Any) -> None:
    model.first.register_state_dict_pre_hook(lambda module, *_: module.bias.data.fill_(3))


def deleted_and_last(model: Any) -> None:
    weight = model.first.weight
    del model.first.weight
    model.first.weight = weight


def sparse(model: Any) -> None:
    model.scale = torch.eye(8).to_sparse()


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "parameter replaced": lambda model: setattr(model.first, "weight", new(8, 8)),
    "parameter of another shape": lambda model: setattr(model.first, "weight", new(4, 8)),
    "parameter deleted and last": deleted_and_last,
    "parameter none": lambda model: setattr(model.first, "bias", None),
    "parameter frozen": lambda model: model.requires_grad_(False),
    "tied": lambda model: setattr(model.second, "weight", model.first.weight),
    "tied by data": data_tied,
    "untied": untied,
    "tied by other names": lambda model: setattr(model, "_tied_weights_keys", ["embed"]),
    "retyped by data": lambda model: setattr(model.first.weight, "data", model.first.weight.data.half()),
    "retyped": lambda model: model.to(torch.float16),
    "tensors swapped": swapped,
    "merged in place": lambda model: model.first.weight.data.add_(1),
    "buffer not saved": lambda model: model.register_buffer("scale", model.scale, persistent=False),
    "buffer saved": lambda model: model.register_buffer("angles", model.angles),
    "buffer none": lambda model: setattr(model, "scale", None),
    "buffer sparse": sparse,
    "buffer added": lambda model: model.first.register_buffer("mask", torch.zeros(2)),
    "module of another class": lambda model: setattr(model, "first", nn.Embedding(8, 8)),
    "module for none": lambda model: setattr(model, "none", nn.Linear(2, 2)),
    "none for a module": lambda model: setattr(model, "second", None),
    "module appended": lambda model: model.norms.append(nn.Linear(2, 2)),
    "module twice": lambda model: model.norms.append(model.first),
    "modules exchanged": modules_exchanged,
    "module renamed": lambda model: model.add_module("third", model._modules.pop("first")),
    "module wrapped": lambda model: setattr(model, "first", nn.DataParallel(model.first)),
    "class changed": class_changed,
    "method of its own": own_method,
    "hook": hooked,
    "hook before": hooked_before,
    "parametrized": lambda model: parametrize.register_parametrization(model.first, "weight", Negated()),
}


def fresh(model: nn.Module) -> dict[str, torch.Tensor]:
    """What torch saves, each memory once, by the name that is not tied to another one."""
    state = {name.replace("module.", ""): tensor for name, tensor in model.state_dict().items()}
    kept: dict[Any, str] = {}
    for name, tensor in state.items():
        place = name if tensor.is_sparse else (tensor.data_ptr(), tensor.dtype, tensor.shape)
        known = kept.setdefault(place, name)
        if any(pattern in known for pattern in getattr(model, "_tied_weights_keys", ())):
            kept[place] = name
    return {name: tensor for name, tensor in state.items() if name in kept.values()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_has_the_tensors_of_a_fresh_state_dict_after_any_change(change: str) -> None:
    model = Tied()
    for each in ("nothing", change, "nothing", "untied"):
        CHANGES[each](model)
        found, wanted = module_tensors(model), fresh(model)
        assert [*found] == [*wanted]
        for name, tensor in wanted.items():
            of = found[name]
            assert (of.dtype, of.layout, of.shape) == (tensor.dtype, tensor.layout, tensor.shape), name
            assert torch.equal(of.to_dense(), tensor.to_dense()), name


PUBLISHED = ("nothing", "parameter replaced", "parameter deleted and last", "parameter frozen")
PUBLISHED += ("tensors swapped", "merged in place", "modules exchanged", "hook", "hook before")


@pytest.mark.parametrize("change", PUBLISHED)
def test_what_is_published_after_a_change_has_the_bits_of_a_fresh_state_dict(
    memory_url: str, change: str
) -> None:
    model = Tied()
    with Publisher(memory_url, dtype="keep") as publisher:
        for each in ("nothing", "nothing", change, "nothing", "merged in place"):
            CHANGES[each](model)
            publisher.publish(model).wait(60)
            assert_holds(memory_url, fresh(model))


def test_a_module_of_the_same_form_is_read_with_one_call_for_each_module() -> None:
    model: Any = Tied()
    model.norms.extend(nn.Linear(2, 2) for _ in range(200))
    first, second = (calls(lambda: module_tensors(model)) for _ in range(2))
    assert first > 5 * len([*model.modules()])
    CHANGES["parameter replaced"](model)
    assert calls(lambda: module_tensors(model)) == second
    assert calls(lambda: module_tensors(model, alone=True)) == second
    model.norms.extend(nn.Linear(2, 2) for _ in range(200))
    module_tensors(model)
    assert calls(lambda: module_tensors(model)) == second + 200


@pytest.mark.parametrize("is_of_class", [False, True])
def test_a_module_of_which_ddp_leaves_out_some_is_refused_alone(
    is_of_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Tied()
    module_tensors(model, alone=True)
    monkeypatch.setattr(Tied if is_of_class else model, LEFT_OUT, ["first.weight"], raising=False)
    with pytest.raises(ConfigError, match="is left out of DDP"):
        module_tensors(model, alone=True)
    assert module_tensors(model).keys() == fresh(model).keys()


def calls(run: Callable[[], object]) -> int:
    """Return how many functions of Python were called."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_nothing_of_a_module_outlives_it() -> None:
    model: Any = Tied()
    module_tensors(model)
    parts = [weakref.ref(each) for each in (model.first, model.first.weight, model)]
    model.first = nn.Linear(8, 8)
    gc.collect()
    assert [each() is None for each in parts] == [True, True, False]
    del model
    gc.collect()
    assert parts[2]() is None
