"""A publisher that resumes may hand over its tensors in another order: positions count by the channel's
table.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from deltasync import Publisher, Replica
from tests.conftest import assert_same_bits


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{number}.weight": torch.randn(7, 5).bfloat16() for number in range(9)}


@pytest.mark.parametrize("is_damaged", [False, True])
def test_tensors_in_another_order(tmp_path: Path, is_damaged: bool) -> None:
    url, model = f"file://{tmp_path}/channel", weights()
    with Publisher(url) as publisher:
        publisher.publish(model).wait(60)
    if is_damaged:  # so that the next version has full weights
        for path in (tmp_path / "channel/anchors").rglob("*.safetensors"):
            path.write_bytes(b"")
    shuffled = list(model)
    random.Random(1).shuffle(shuffled)
    with Publisher(url, resume=True) as publisher:
        for step in range(3):
            for name in shuffled[step : step + 3]:
                model[name].view(-1)[step::4] += 1
            receipt = publisher.publish({name: model[name] for name in shuffled}).wait(60)
            assert (receipt.kind == "anchor") == (is_damaged and step == 0)
            if step == 0:
                replica = Replica(url)
            replica.sync()
            assert_same_bits(replica.state_dict(), model)
