from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from deltasync.bench import commit_data, commit_report, commit_server
from deltasync.bits import bits_of
from deltasync.cli import main


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
    commit_data.change(new, fraction, seed=1)
    for name in ("w", "zeros"):
        step_N = (bits_of(new[name]) - bits_of(old[name])).view(np.int16)
        assert set(np.unique(np.abs(step_N))) == {0, 1, 2}
        count = step_N.size * fraction
        assert np.count_nonzero(step_N) == pytest.approx(count, abs=5 * count**0.5)
    assert (bits_of(new["w"]) - bits_of(old["w"])).view(np.int16).min() == -2
    assert not any(tensor.isnan().any() for tensor in new.values())


def test_a_version_is_determined_by_its_seed_and_may_change_nothing() -> None:
    first, second, same = _weights(), _weights(), _weights()
    commit_data.change(first, 0.01, seed=3)
    commit_data.change(second, 0.01, seed=3)
    commit_data.change(same, 0.0, seed=3)
    assert commit_data.digests(first) == commit_data.digests(second) != commit_data.digests(same)
    assert commit_data.digests(same) == commit_data.digests(_weights())


def test_a_silence_is_the_longest_gap_that_overlaps_the_pause() -> None:
    gaps = [(0.0, 1.0), (1.0, 2.0), (2.0, 5.0), (5.0, 6.0), (8.0, 9.0)]
    assert commit_server.longest(gaps, (1.9, 4.9)) == 3.0
    assert commit_server.longest(gaps, (5.1, 5.9)) == 1.0
    assert commit_server.longest(gaps, (6.5, 7.5)) is None
    assert commit_server.outside(gaps, [(1.9, 4.9), (8.5, 20.0)]) == [(0.0, 1.0), (5.0, 6.0)]


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    ran = CliRunner().invoke(main, ["bench", "commit", "--size", "tiny"])
    assert ran.exit_code == 3
    assert "vLLM is not installed" in ran.stderr


@pytest.mark.slow
@pytest.mark.vllm
def test_everything_is_measured_in_a_real_vllm_and_bits_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "commit", "--size", "tiny", "--commits", "2", "--window", "2", "--pairs", "1", "--json"]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert result["model"]["changed"] == pytest.approx(result["model"]["element_count"] / 100, rel=0.1)
    commit, pause = result["commit"], result["pause"]
    times = [*commit["deltasync"].values(), *commit["vllm"].values(), commit["plain"]]
    assert all(0 < measured["best_s"] <= measured["median_s"] for measured in times)
    assert [pause[kind]["commits"] for kind in ("changed", "unchanged")] == [2, 2]
    assert pause["changed"]["silence_s"] > pause["changed"]["scatter_s"] > pause["unchanged"]["scatter_s"]
    assert [len(result["throughput"][kind]) for kind in ("without", "with_versions")] == [1, 1]
    commit_report.show(result)
    table = capsys.readouterr().out
    assert "vLLM's sparse path: default" in table
    assert "of the throughput without" in table
