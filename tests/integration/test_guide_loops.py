"""The loops of guides/sharded.md, run as they are printed, with an evaluation between (`guide_ranks`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.test_sharded import ROOT, torchrun

_BLOCK = re.compile(r"^```python\n# needs ([^:\n]+):[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

LOOPS = dict(_BLOCK.findall((ROOT / "docs/guides/sharded.md").read_text()))
"""The loops by what they need."""

_ZERO = "DeepSpeed ZeRO-3"


def test_the_guide_has_these_loops() -> None:
    assert list(LOOPS) == ["FSDP2", "tensor parallelism", "shards of another kind", "DDP", _ZERO]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loops_publish_the_model(tmp_path: Path, size: int) -> None:
    torchrun(size, tmp_path / "loops", *(name for name in LOOPS if name != _ZERO), script="guide_ranks.py", timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_with_deepspeed_publishes_the_model(tmp_path: Path, size: int, deepspeed: Path) -> None:
    environ = {"PYTHONPATH": f"{ROOT}:{deepspeed}", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": f"{deepspeed}/built"}
    torchrun(size, tmp_path / "loops", _ZERO, script="guide_ranks.py", timeout_s=900, **environ)
