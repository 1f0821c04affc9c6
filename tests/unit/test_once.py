"""A version's bytes are serialized, hashed and parsed once on the way out, and hashed and parsed once on the
way in.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel import record
from deltasync.codec import base, tiles

_SMALL = 8 << 10
"""Bytes of documents, headers and heads, which may be hashed or parsed again."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that pass through sha256, and through the functions that make and parse payloads."""
    found: Counter[str] = Counter()
    sha256 = hashlib.sha256

    class Counting:
        def __init__(self, data: Any = b"") -> None:
            self._digest = sha256()
            self.update(data)

        def update(self, data: Any) -> None:
            found["hashed"] += memoryview(data).nbytes
            self._digest.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._digest, name)

    def size_of_result(
        what: str, function: Callable[..., Any], size: Callable[[Any], int]
    ) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            found[what] += size(result)
            return result

        return counting

    monkeypatch.setattr(hashlib, "sha256", Counting)
    monkeypatch.setattr(base.Encoded, "to_bytes", size_of_result("payload made", base.Encoded.to_bytes, len))
    monkeypatch.setattr(
        record, "encode", size_of_result("record made", record.encode, lambda stored: stored.size)
    )

    def parse(start: int, header: Any, size: int) -> Any:
        found["parsed"] += size
        return entries(start, header, size)

    entries = base._entries
    monkeypatch.setattr(base, "_entries", parse)
    return found


def test_bytes_are_handled_once_on_each_side(memory_url: str, counted: Counter[str]) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    store = open_store(memory_url)
    with Publisher(store, codec="packed") as publisher:
        publisher.publish(weights).wait(60)
        replica = Replica(store)
        replica.sync()
        for version in (2, 3):
            weights["w"].view(torch.int16)[torch.rand(1 << 20, generator=random) < 0.5] += 1
            publisher.flush()
            counted.clear()
            receipt = publisher.publish(weights).wait(60)
            publisher._uploader.wait_released()
            assert receipt.payload_bytes > 4 * _SMALL
            out = dict(counted)
            for what in ("hashed", "payload made", "record made", "parsed"):
                assert receipt.payload_bytes <= out[what] < receipt.payload_bytes + _SMALL, what
            counted.clear()
            assert replica.sync() == version
            for what in ("hashed", "parsed"):
                assert receipt.payload_bytes <= counted[what] < receipt.payload_bytes + _SMALL, what


def test_a_small_model_is_not_paid_for_tensor_by_tensor(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries become a file once, tables are kept, and positions are not searched once more for each
    tensor.
    """
    calls, found = Counter[str](), dict[int, Counter[str]]()

    def counting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            calls[what] += 1
            return function(*arguments, **named)

        return count

    monkeypatch.setattr(base, "body", counting("files", base.body))
    monkeypatch.setattr(np, "searchsorted", counting("searches", np.searchsorted))
    for tensors in (4, 40):
        weights = {f"w{n}": torch.zeros(64, 64, dtype=torch.bfloat16) for n in range(tensors)}
        with Publisher(f"{memory_url}/{tensors}") as publisher:
            for step in range(4):
                for tensor in weights.values():
                    tensor.view(torch.int16)[step::4] += 1
                publisher.flush()
                calls.clear()
                made = tiles._tiling.cache_info().misses
                publisher.publish(weights).wait(60)
        assert tiles._tiling.cache_info().misses == made
        found[tensors] = Counter(calls)
    assert found[4]["files"] == 1
    assert found[4]["searches"] > 0
    assert found[40] == found[4]
