"""The demo as people start it: a real TRL trainer and a real vLLM server, on CPU cores of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.trl, pytest.mark.slow]  # CI runs `make demo`


def test_the_demo_proves_its_bits(tmp_path: Path) -> None:
    out, steps = tmp_path / "demo", 4
    command = [sys.executable, ROOT / "examples" / "demo", "--out", out, "--steps", str(steps), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["bit_exact"] is True
    assert summary["versions_published"] == steps + 1
    assert summary["versions_committed"] == steps + 1
    assert summary["bit_exact_versions"][-1] == steps + 1 and len(summary["bit_exact_versions"]) > 1
    lines = [json.loads(line) for line in (out / "published.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [*range(1, steps + 2)]
    # each version has weights of its own
    assert len({line["sha256"]["lm_head.weight"] for line in lines}) == steps + 1
