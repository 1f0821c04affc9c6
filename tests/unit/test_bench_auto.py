from __future__ import annotations

import pytest

from benchmarks import auto


def test_every_codec_is_served_over_the_line_and_auto_takes_the_smaller_one_over_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "_SIMULATED", 1 << 18)
    monkeypatch.setattr(auto, "MBITS", (0.4,))
    monkeypatch.setattr(auto, "_SLOW_VERSIONS", 2)
    (row,) = auto.measure(1 << 18)
    assert row["auto_took"] == {"context": 2}
    # Nothing is faster than the line, which its 2,800 changes pass up and down in at least 5 bits each.
    assert all(seconds > 2 * 2800 * 5 / 0.4e6 for seconds in row["served_s"].values())
    assert any("2 context" in line for line in auto.lines([row]))
