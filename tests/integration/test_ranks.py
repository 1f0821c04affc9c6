"""Ranks that open a publisher, fail, come late and leave: `opening_ranks` is what they do, and asserts for
itself.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_sharded import ROOT, environment, torchrun


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ones_trouble_is_everybodys_news(tmp_path: Path, size: int) -> None:
    torchrun(size, tmp_path / "ranks", script="opening_ranks.py")


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_that_ends_before_it_opens_its_publisher_is_named(tmp_path: Path, how: str) -> None:
    script, shared = str(ROOT / "tests/integration/leaving_rank.py"), environment()
    shared["RENDEZVOUS"] = f"file://{tmp_path}/rendezvous"
    command = [sys.executable, script, how]
    leaving = subprocess.Popen([*command, "1"], env=shared, stderr=subprocess.DEVNULL)
    try:
        said = subprocess.run(
            [*command, "0"], env=shared, stdout=subprocess.PIPE, text=True, timeout=120, check=True
        ).stdout
        assert leaving.wait(60) == (1 if how == "raises" else 3)
    finally:
        leaving.kill()
    waited_s, _, message = said.partition(" ")
    assert float(waited_s) < 5 and "Rank 1 ended the process before opening the publisher" in message
