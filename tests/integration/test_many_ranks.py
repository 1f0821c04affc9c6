"""64 ranks publish together, one is killed at each step of a publish, and 32 others continue the run: `many_ranks`
is what they do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync import Replica
from tests.conftest import assert_same_bits
from tests.integration import many_ranks
from tests.integration.test_sharded import ROOT, environment

_MOST_BYTES = 20_000

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="it forks")]


def ranks(folder: Path, size: int, first: int, *death: str) -> None:
    script = [
        sys.executable,
        "-m",
        "tests.integration.many_ranks",
        str(folder),
        str(size),
        str(first),
        *death,
    ]
    done = subprocess.run(script, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]


def moved(folder: Path, first: int) -> list[int]:
    """The bytes that each rank but the first said and read for a version."""
    return [
        sum(json.loads(path.read_text())) for path in folder.glob(f"moved.{first}.*") if path.suffix != ".0"
    ]


@pytest.mark.parametrize("death", many_ranks.DEATHS)
def test_a_rank_of_64_is_killed_and_32_go_on(tmp_path: Path, death: str) -> None:
    url = f"file://{tmp_path}/channel"
    ranks(tmp_path, 64, 1, death)
    assert len(found := moved(tmp_path, 1)) == 63 and max(found) < _MOST_BYTES
    said = {path.suffix: path.read_text() for path in tmp_path.glob("survivor.*")}
    assert len(said) == 63
    newest = Replica(url).sync()
    if death == "after it said so":
        assert {*said.values()} == {"published"} and newest == 3
    else:
        assert {*said.values()} == {"refused"} and newest == (3 if death.endswith("after the record") else 2)
    for version in range(1, newest + 1):
        replica = Replica(url)
        replica.sync(version)
        assert_same_bits(replica.state_dict(), many_ranks.weights(version))
    ranks(tmp_path, 32, 3)
    replica = Replica(url)
    replica.sync()
    assert_same_bits(replica.state_dict(), many_ranks.weights(4))
