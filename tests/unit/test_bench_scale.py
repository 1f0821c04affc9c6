from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale


def test_each_part_measures_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "warm_up", lambda: None)
    found: dict[str, Any] = {}
    for part in scale.PARTS.values():
        found |= part(tmp_path, 0.005)
    assert found["elements"] > 4e6 and found["changed"] == pytest.approx(found["elements"] / 100, rel=0.1)
    assert 0 < found["held_s"] <= found["visible_s"] and found["apply_s"] > 0


def _point(elements: float, each_ns: float) -> dict[str, Any]:
    seconds = elements * each_ns * 1e-9
    return {
        "elements": elements,
        "changed": elements / 100,
        "payload_bytes": elements / 80,
        "held_s": seconds,
        "visible_s": 2 * seconds,
        "apply_s": seconds,
    }


def test_what_is_computed_is_compared_with_every_size_that_was_measured() -> None:
    result = scale.compute([_point(0.15e9, 1.0), _point(0.6e9, 1.0), _point(3e9, 2.0)], link=10, store=400)
    errors = [check["apply_s"] for check in result["errors"]]
    assert errors == pytest.approx([0, 0, -0.5])  # the largest took twice as long for each element
    assert "-50%" in "\n".join(scale.lines(result))


def test_a_deployment_shares_its_work_and_replicas_share_the_store() -> None:
    rows = scale.compute([_point(0.6e9, 1.0)], link=10, store=400)["rows"]
    assert {row["model"] for row in rows} == {"7B", "30B-A3B", "235B-A22B", "1T"}
    eight, _, many = (row for row in rows if row["model"] == "7B")
    # 7.6 G elements: 95 MB; 8 ranks publish, one worker applies.
    assert eight["payload_bytes"] == pytest.approx(95e6)
    assert eight["held_s"] == pytest.approx(7.6 / 8)
    up_s, down_s = 0.76 / 80, 0.76 / 10
    assert eight["served_s"] == pytest.approx(2 * 7.6 / 8 + 2.5 * 0.05 + up_s + down_s + 7.6)
    assert many["served_s"] - eight["served_s"] == pytest.approx(0.76 * 256 / 400 - down_s)
