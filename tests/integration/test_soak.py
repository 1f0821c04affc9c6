"""Seconds of the soak (`make soak` takes an hour): two processes follow a third through random faults."""

from __future__ import annotations

from pathlib import Path

from tests.soak.run import failures, run
from tests.soak.settings import Soak
from tests.soak.watch import Watch


def test_a_few_seconds_of_it(tmp_path: Path) -> None:
    result = run(Soak(folder=tmp_path, versions=25, rate=10.0, warm_up_s=0.0, sample_s=0.2, trouble_s=1.0))
    processes = {what: numbers for what, numbers in result["summary"].items() if what.startswith(("publisher", "replica"))}
    assert len(processes) == 3 * 3  # channel and cache are not full yet, and grow
    processes = {what: numbers for what, numbers in processes.items() if not what.endswith("threads")}  # nor all started
    assert failures(result | {"summary": processes}, versions=20, growth=1.0) == []
    for replica in result["replicas"]:
        assert replica["version"] == result["publisher"]["version"]
    assert sum(result["troubles"].values())


def test_what_grows_after_the_warm_up_is_told() -> None:
    watch = Watch(
        samples={
            "replica memory": [(1.0, 50.0), *((at, 100.0 + 3 * at) for at in range(10, 20))],
            "channel files": [(1.0, 2.0), *((at, 100.0) for at in range(10, 20))],
        }
    )
    result = {"problems": [], "versions": 20, "replicas": [], "summary": watch.summary(warm_up_s=10.0)}
    assert failures(result, versions=20) == ["replica memory grew by 15.8 %, from 133 to 154"]
