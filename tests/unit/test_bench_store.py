from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import store as bench
from deltasync import open_store


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_everything_is_measured_and_nothing_is_left(kind: str, memory_url: str, tmp_path: Path) -> None:
    url = memory_url if kind == "memory" else f"file://{tmp_path}"
    result = bench.run(url, 10_000)
    assert all(rate > 0 for name in ("client", "store") for rate in result["large"][name].values())
    assert result["large"]["share"] > 0
    assert all(0 < times["p50_ms"] <= times["p95_ms"] for times in result["small"].values())
    assert result["version"]["delta_bytes"] >= 10_000
    assert result["calls"]["idle_poll"] == {"read": 1}
    assert list(open_store(url).list("")) == []
    assert kind == "memory" or list(tmp_path.iterdir()) == []
    assert any("of its client's rate" in line for line in bench.lines(result))
