"""Devices where something is in the way: another stream, a capture of a graph, an error, too little memory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.gpu import devices
from deltasync.gpu.shadow import DeviceShadow
from deltasync.live import LiveMemory
from deltasync.tensors import Layout, TensorSpec


def test_comparing_waits_for_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    layout = Layout({"w": TensorSpec("w", "bfloat16", (4,))})
    shadow = DeviceShadow(layout, {"w": (0, 4)}, torch.device("cpu"))
    monkeypatch.setattr(shadow, "wait", lambda: told.append("waited"))
    nothing = SimpleNamespace(steps=None)
    comparison: Any = SimpleNamespace(
        move=lambda addresses: told.append("moved"), launch=lambda fill: lambda: nothing
    )
    shadow._comparisons = {2: (comparison, np.array([0]), np.array([0]), [])}
    shadow.compare([torch.zeros(4, dtype=torch.bfloat16)])
    assert told == ["waited", "moved"]

    def parts() -> Iterator[tuple[str, torch.Tensor]]:
        told.append("asked")
        yield from ()

    shadow.compare_each(parts())
    assert told[2:] == ["waited", "asked"]


def test_work_beside_a_capture_is_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = [0]

    def exchange(given: Any) -> int:
        mode[0], given._obj.value = given._obj.value, mode[0]
        return 0

    monkeypatch.setattr(devices, "_capture_mode", lambda: exchange)
    with pytest.raises(MemoryError), devices.beside_captures():
        assert mode == [2]
        raise MemoryError
    assert mode == [0]
    monkeypatch.setattr(devices, "_capture_mode", lambda: None)
    with devices.beside_captures():
        pass


class _Cuda(devices.Device):
    """A device whose rooms are filled as those of a GPU."""

    _is_cuda = True


def test_a_send_that_fails_leaves_no_room_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = list[bool]()

    def fill(*arguments: object) -> None:
        time.sleep(0.1 * len(filled))
        filled.append(True)

    def record() -> None:
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(devices, "_SENT_BYTES", 8)
    monkeypatch.setattr(devices, "_fill", fill)
    device = _Cuda(torch.device("cpu"))
    event = SimpleNamespace(record=record)
    device.__dict__["_rooms"] = [(torch.zeros(8, dtype=torch.uint8), event)] * 16
    with ThreadPoolExecutor(1) as one:
        monkeypatch.setattr(devices, "copiers", lambda: one)
        with pytest.raises(RuntimeError, match="copy failed"):
            device.send([(np.arange(6, dtype=np.int32), torch.zeros(6, dtype=torch.int32))])
        assert len(filled) == 3


def test_the_host_decodes_what_a_device_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(LiveMemory, "decoder", staticmethod(lambda opened: asked.append(len([*opened]))))
    store = open_store(f"memory://{uuid.uuid4().hex}")
    model = {"w": torch.arange(5000, dtype=torch.float32)}
    with Publisher(store, dtype="keep") as publisher:
        publisher.publish(model.items()).wait(60)
        replica = Replica(store)
        assert replica.sync() == 1
        model["w"] = model["w"] + (torch.arange(5000) % 50 == 0)
        publisher.publish(model.items()).wait(60)
    assert replica.sync() == 2
    assert torch.equal(replica.state_dict()["w"].view(torch.int32), model["w"].view(torch.int32))
    assert asked == [1]
