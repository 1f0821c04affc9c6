"""NaN and memory: what is looked at beside the bits' way."""

from __future__ import annotations

import pytest
import torch

from deltasync import Publisher, Replica
from deltasync.tensors.bits import bits_of, has_nan, spec_of
from tests.conftest import assert_same_bits

FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


def seen(values: torch.Tensor) -> bool:
    return has_nan(bits_of(values), spec_of("w", values))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_is_seen_and_an_infinity_is_none(dtype: str) -> None:
    values = torch.tensor([1.0, -0.0, 2.5, torch.finfo(getattr(torch, dtype)).min]).to(getattr(torch, dtype))
    assert not seen(values)
    for sign in (1, -1):
        values[1] = sign * float("nan")
        assert seen(values)
        if dtype != "float8_e4m3fn":  # which has none
            values[1] = sign * float("inf")
            assert not seen(values)


def test_integers_are_no_nan() -> None:
    assert not seen(torch.tensor([-1, 0x7FFF], dtype=torch.int16))


def test_nan_is_warned_of_where_it_appears_and_not_again(
    memory_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"a": torch.ones(10, 10), "b": torch.ones(5), "count": torch.tensor(-1)}

    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
        caplog.clear()
        return found

    with Publisher(memory_url) as publisher:
        weights["b"][2] = float("nan")
        publisher.publish(weights.items()).wait(60)
        assert [message.split(": ")[1] for message in warnings()] == ["b. Replicas will produce garbage."]
        publisher.publish(weights.items()).wait(60)
        weights["a"][0, 0] = 2.0
        publisher.publish(weights.items()).wait(60)
        assert warnings() == []
        weights["a"][0, 1] = float("nan")
        publisher.publish(weights.items()).wait(60)
        assert [message[:40] for message in warnings()] == ["Version 4 is published as it is, but has"]
    replica = Replica(memory_url)
    replica.sync()
    assert_same_bits(
        replica.state_dict(),
        {name: w.bfloat16() if w.is_floating_point() else w for name, w in weights.items()},
    )


def test_an_audit_finds_a_flipped_bit_and_the_next_sync_repairs_it(memory_url: str) -> None:
    weights = {"a": torch.randn(100, 10).bfloat16(), "b": torch.ones(5)}
    replica = Replica(memory_url)
    with Publisher(memory_url, dtype="keep") as publisher:
        publisher.publish(weights.items()).wait(60)
    replica.sync()
    assert replica.audit()
    replica.state_dict()["a"].view(torch.int16)[50, 3] ^= 1
    assert replica.sync() == 1
    assert not replica.audit()
    assert replica.version is None
    assert replica.sync() == 1
    assert replica.audit()
    assert_same_bits(replica.state_dict(), weights)
