"""Where the shadow goes: to the device of the tensors if that has room, or to the host. torch.cuda is
faked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch

from deltasync import Publisher
from deltasync.errors import ConfigError
from deltasync.gpu import shadow as device_shadow
from deltasync.publish import placement
from deltasync.tensors import Layout, TensorSpec

GIB = 1 << 30
CUDA = torch.device("cuda", 0)


class Driver:
    """The memory of an accelerator of 100 GiB, as torch.cuda tells it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.allocated, self.peak, self.reserved = 100 * GIB, 0, 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 100 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(placement.kernels, "compares", lambda device: device.type == "cuda")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


LAYOUT = Layout({"w": TensorSpec("w", "bfloat16", (1 << 30,))})
RANGES: Mapping[str, tuple[int, int]] = {"w": (0, 1 << 30)}


def chosen(place: str, *devices: str) -> torch.device | None:
    return placement.choose(place, LAYOUT, RANGES, {torch.device(name) for name in devices})


def test_pytorchs_cache_is_room_but_not_what_training_needs(driver: Driver) -> None:
    driver.free, driver.reserved, driver.allocated = 5 * GIB, 60 * GIB, 20 * GIB
    driver.peak = 58 * GIB  # activations that are gone while a publish looks
    assert device_shadow.room_bytes(CUDA) == (5 + 60 - 58 - 10) * GIB


def test_the_shadow_goes_where_the_tensors_are_if_there_is_room(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    needed = device_shadow.needed_bytes(LAYOUT, RANGES)
    assert 2 * (1 << 30) < needed < 2.2 * (1 << 30)
    with caplog.at_level(logging.INFO, "deltasync"):
        driver.free = 10 * GIB + needed
        assert chosen("auto", "cuda:0", "cuda:0") == CUDA
        driver.free -= 1
        assert chosen("auto", "cuda:0") is None
        assert chosen("device", "cuda:0") == CUDA
        assert chosen("host", "cuda:0") is None
        assert chosen("device", "cuda:0", "cuda:1") is None
        assert chosen("auto", "cpu") is None
    assert "shadow place=cuda:0" in caplog.text and "has room for" in caplog.text


def test_the_place_is_chosen_once_and_said(memory_url: str, caplog: pytest.LogCaptureFixture) -> None:
    weights = {"w": torch.zeros(9)}
    with caplog.at_level(logging.INFO, "deltasync"), Publisher(memory_url) as publisher:
        for _ in range(3):
            weights["w"] += 1
            publisher.publish(weights).wait(60)
    said = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("shadow place=")
    ]
    assert said == ["shadow place=host why='the tensors are on cpu' bytes=18"]


def test_an_unknown_place_is_refused(memory_url: str) -> None:
    with pytest.raises(ConfigError, match="shadow"):
        Publisher(memory_url, shadow="elsewhere")


def test_offloaded_parameters_are_refused_in_one_sentence(memory_url: str) -> None:
    offloaded = {"layer.weight": torch.empty(3, 4, device="meta")}
    with (
        Publisher(memory_url) as publisher,
        pytest.raises(
            ConfigError, match=r"layer\.weight is offloaded: it is on the meta device, without values"
        ),
    ):
        publisher.publish(offloaded.items())
