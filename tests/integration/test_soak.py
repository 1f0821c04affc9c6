"""Seconds of the soak (`make soak` takes an hour): two processes follow a third through random faults."""

from __future__ import annotations

from pathlib import Path

from tests.soak.run import failures, run
from tests.soak.settings import Soak


def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    result = run(Soak(folder=tmp_path, versions=25, rate=10.0, warm_up_s=0.0, sample_s=0.2, trouble_s=1.0))
    assert failures(result, versions=20, growth=1.0) == []
    for replica in result["replicas"]:
        assert replica["version"] == result["publisher"]["version"]
    assert sum(result["troubles"].values())
