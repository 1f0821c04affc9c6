from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import join as bench


def test_the_late_joiner_has_the_published_bits_and_everything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "warm_up", lambda: None)
    result = {name: part(tmp_path, 0.01) for name, part in bench.PARTS.items()}
    assert result["join"]["sha256"] == result["publish"]["sha256"]
    assert all(seconds > 0 for part in result.values() for key, seconds in part.items() if key.endswith("_s"))
    assert any("late joiner" in line for line in bench.lines(result))


@pytest.mark.slow
def test_full_weights_take_no_second_copy_of_the_model(tmp_path: Path) -> None:
    result = bench.measure(0.6, tmp_path)
    weight_bytes = result["floors"]["weight_bytes"]
    # The model, the shadow and the largest file; the replica's weights and the largest files.
    assert result["publish"]["first_bytes"] < 2.7 * weight_bytes
    assert result["join"]["peak_bytes"] < 1.8 * weight_bytes
