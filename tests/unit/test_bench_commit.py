from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch

from benchmarks import models
from benchmarks.commit import report, server
from benchmarks.commit.__main__ import main
from deltasync.errors import ConfigError
from deltasync.tensors.bits import bits_of


def _weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    weights = {
        "w": torch.randn(400, 500, generator=random).bfloat16(),
        "zeros": torch.tensor([0.0, -0.0] * 5000).bfloat16(),
        "one": torch.ones(1).bfloat16(),
        "none": torch.empty(0).bfloat16(),
    }
    assert not any(tensor.isnan().any() for tensor in weights.values())
    return weights


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.5])
def test_a_version_moves_as_many_elements_as_asked_by_one_or_two_ulp(fraction: float) -> None:
    old, new = _weights(), _weights()
    models.change(new, fraction, seed=1)
    for name in ("w", "zeros"):
        step_N = (bits_of(new[name]) - bits_of(old[name])).view(np.int16)
        assert set(np.unique(np.abs(step_N))) == {0, 1, 2}
        count = step_N.size * fraction
        assert np.count_nonzero(step_N) == pytest.approx(count, abs=5 * count**0.5)
    assert (bits_of(new["w"]) - bits_of(old["w"])).view(np.int16).min() == -2
    assert not any(tensor.isnan().any() for tensor in new.values())


def test_a_silence_is_the_longest_gap_that_overlaps_the_pause() -> None:
    gaps = [(0.0, 1.0), (1.0, 2.0), (2.0, 5.0), (5.0, 6.0), (8.0, 9.0)]
    assert server.longest(gaps, (1.9, 4.9)) == 3.0
    assert server.longest(gaps, (5.1, 5.9)) == 1.0
    assert server.longest(gaps, (6.5, 7.5)) is None
    assert server.outside(gaps, [(1.9, 4.9), (8.5, 20.0)]) == [(0.0, 1.0), (5.0, 6.0)]


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest)
    )
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        main(["--size", "tiny"])


def test_pauses_are_told_beside_those_of_weights_in_place() -> None:
    counts = {"element_count": 82_000_000, "patched_tensors": 3, "twinned_tensors": 2, "reloaded_tensors": 0}
    found = {
        name: {**counts, "changed": {"pause_s": pause_s, "stage_s": 0.05}}
        for name, pause_s in (("in place", 0.004), ("fp8_per_channel", 0.006))
    }
    *_, quantized = report.layout_lines(found)
    assert [cell.strip() for cell in quantized.strip("| ").split("|")] == [
        *("fp8_per_channel", "82,000,000", "3, 2, 0", "6.0 ms", "1.5", "50 ms")
    ]


@pytest.mark.slow
@pytest.mark.vllm
def test_everything_is_measured_in_a_real_vllm_and_bits_are_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--size", "tiny", "--commits", "2", "--window", "2", "--pairs", "1", "--json"])
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["model"]["changed"] == pytest.approx(result["model"]["element_count"] / 100, rel=0.1)
    commit, pause = result["commit"], result["pause"]
    times = [*commit["deltasync"].values(), *commit["vllm"].values(), commit["plain"]]
    assert all(0 < measured["best_s"] <= measured["median_s"] for measured in times)
    assert [pause[kind]["commits"] for kind in ("changed", "unchanged")] == [2, 2]
    assert pause["changed"]["silence_s"] > pause["changed"]["scatter_s"] > pause["unchanged"]["scatter_s"]
    assert [len(result["throughput"][kind]) for kind in ("without", "with_versions")] == [1, 1]
    table = "\n".join(report.lines(result))
    assert "vLLM's own path" in table and "throughput" in table
