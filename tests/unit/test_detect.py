"""Streams whose tensors are checked once: what changes between two publishes is seen, or refused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.publish.shadow import Shadow
from deltasync.tensors.bits import bits_of
from tests.builders import Compared

Weights = dict[str, torch.Tensor]


def _weights() -> Weights:
    return {
        "a": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "wide": torch.arange(6, dtype=torch.float32),
        "turned": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t(),
        "count": torch.arange(5, dtype=torch.int64),
    }


def _known(weights: Weights) -> Compared:
    """Twice published, so that the second publish has checked the tensors."""
    known = Compared(weights, "bfloat16")
    assert not known.take(weights).changed
    return known


def _bytes(shadow: Shadow) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in shadow.bits.items()}


def _published(weights: Weights) -> dict[str, bytes]:
    kept = {
        name: tensor if name == "count" else tensor.to(torch.bfloat16) for name, tensor in weights.items()
    }
    return {name: bits_of(tensor.contiguous()).tobytes() for name, tensor in kept.items()}


def _moved(weights: Weights) -> None:
    """Other memory, in the same objects."""
    for tensor in weights.values():
        tensor.data = tensor.data + 1


def _added(weights: Weights) -> None:
    for tensor in weights.values():
        tensor += 1


def _replaced(weights: Weights) -> None:
    for name, tensor in weights.items():
        weights[name] = tensor + 1


def _turned(weights: Weights) -> None:
    """As many elements of the same shape, in another order in memory."""
    weights["a"].data = (weights["a"] + 1).t().contiguous().t()
    weights["turned"].data = (weights["turned"] + 1).contiguous()


def _widened(weights: Weights) -> None:
    weights["a"].data = weights["a"].to(torch.float32) + 1


def _reordered(weights: Weights) -> None:
    for name in list(weights)[:2]:
        weights[name] = weights.pop(name) + 1


def _parameters(weights: Weights) -> None:
    weights["a"] = torch.nn.Parameter(weights["a"] + 1)


@pytest.mark.parametrize("change", [_moved, _added, _replaced, _turned, _widened, _reordered, _parameters])
@pytest.mark.parametrize("listed", [False, True], ids=["mapping", "list"])
def test_what_changes_in_known_tensors_is_published(change: Callable[[Weights], None], listed: bool) -> None:
    weights = _weights()
    known = _known(weights)
    shadow = known.shadow
    for _ in range(3):
        change(weights)
        assert known.take(list(weights.items()) if listed else weights).changed
        assert _bytes(shadow) == _published(weights)
        again = Shadow(shadow.specs, shadow.ranges, shadow.bits)
        assert shadow.fingerprints == dict(again.fingerprints)
        assert shadow.fingerprints.total == sum(again.fingerprints.values()) % (1 << 64)


def _shorter(weights: Weights) -> None:
    weights["a"].data = weights["a"].data[:2]


def _reshaped(weights: Weights) -> None:
    weights["a"].data = weights["a"].data.reshape(4, 3)


def _gone(weights: Weights) -> None:
    del weights["a"]


def _renamed(weights: Weights) -> None:
    weights["b"] = weights.pop("a")


def _more(weights: Weights) -> None:
    weights["b"] = torch.zeros(2)


def _sharded(weights: Weights) -> None:
    """As FSDP1 marks a parameter that it has flattened."""
    weights["a"]._fsdp_flattened = True  # type: ignore[attr-defined]


def _offloaded(weights: Weights) -> None:
    weights["a"] = weights["a"].to("meta")


@pytest.mark.parametrize("change", [_shorter, _reshaped, _gone, _renamed, _more, _sharded, _offloaded])
def test_what_is_not_the_known_model_is_refused_and_nothing_is_taken(
    change: Callable[[Weights], None],
) -> None:
    weights = _weights()
    known = _known(weights)
    before = _bytes(known.shadow)
    change(weights)
    weights["count"] += 1
    with pytest.raises((ModelMismatchError, ConfigError)):
        known.compare(weights)
    assert _bytes(known.shadow) == before


class _Calls:
    """Counts calls of Python and C functions."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Calls:
        gc.collect()
        gc.disable()  # others' callbacks would count
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _profile(self, frame: object, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


def calls_of(tensor_count: int, elements: int, place: str = "host") -> int:
    """Return how many functions are called to compare a model with its shadow and to apply what differs."""
    flat = torch.arange(elements, dtype=torch.int32).to(torch.bfloat16)
    sizes = [elements // tensor_count] * (tensor_count - 1)
    parts = flat.split([*sizes, elements - sum(sizes)])
    weights = {f"layer.{number}.weight": part for number, part in enumerate(parts)}
    known = Compared(weights, "bfloat16", place)
    for _ in range(2):
        known.take(weights)
        flat[::97] += 1
    with _Calls() as calls:
        found = known.take(weights.items())
    assert found.changed
    return calls.count


def test_as_many_calls_for_many_tensors_as_for_few() -> None:
    calls_of(339, 100_000)  # fills the caches of abstract classes
    few, many = (calls_of(count, 100_000) for count in (339, 18_819))
    assert many <= 1.1 * few


def test_wide_tensors_are_copied_a_few_at_a_time() -> None:
    weights = {str(n): torch.full((300,), float(n)) for n in range(20)}
    with mock.patch("deltasync.publish.detect._COPIES_BYTES", 1500):
        known = _known(weights)
        for tensor in weights.values():
            tensor += 1
        found = known.take(weights)
    assert len(found.pieces) > 3
    assert _bytes(known.shadow) == _published(weights)
