"""`benchmarks.curves`: rollouts by a followed module and by a dense copy train the same parameters, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import curves
from tests.integration import trainers
from tests.integration.trainers import tiny_model

checkpoint = trainers.checkpoint

pytestmark = [
    pytest.mark.trl,
    # of torch, while TRL imports it
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


def different_rewards(completions: Sequence[Any], **_: Any) -> list[float]:
    return [len(completion[0]["content"] or "") % 7 / 7 for completion in completions]


def test_both_transfers_train_alike_and_the_age_of_the_weights_does_not(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.task.counting_reward", different_rewards)
    runs = {
        (transfer, every): curves.train(checkpoint, tmp_path / f"{transfer}-{every}", transfer, every, 0, 3)
        for every in (1, 2)
        for transfer in curves.TRANSFERS
    }
    for every, points in ((1, [0, 1, 2]), (2, [0, 2])):
        ours, dense = (runs[transfer, every] for transfer in curves.TRANSFERS)
        assert [step for step, _ in ours["rewards"]] == points
        assert ours["rewards"] == dense["rewards"] and ours["sha256"] == dense["sha256"]
        assert len(ours["bytes"]) == len(points) and not dense["bytes"]
        assert all(
            ours["sha256"][name] != digest
            for name, digest in curves.digests(tiny_model().state_dict()).items()
        )
    assert runs["dense", 1]["sha256"] != runs["dense", 2]["sha256"]


def test_a_reward_is_reached_on_average_over_as_many_samples() -> None:
    curve = [(0.0, 0.5), (1.0, 0.9), (2.0, 0.7), (3.0, 0.8)]
    assert curves._reached_s(curve, 1) == 1.0
    assert curves._reached_s(curve, 2) == 2.0
    assert curves._reached_s(curve, 4) is None
