"""Every Triton kernel as production launches it, compiled for GPUs that are not there: registers, spills, width of loads."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.triton_beside import run_here

HAS_TRITON = importlib.util.find_spec("triton") is not None
COMPILES = HAS_TRITON and os.environ.get("TRITON_INTERPRET") != "1"

if COMPILES:
    from deltasync.kernels import gpu_diff
    from tests.triton_compiled import TARGETS, Compiled, compiling
else:
    TARGETS = {}

compiled_only = pytest.mark.skipif(not COMPILES, reason="no triton that compiles")
MOST_REGISTERS = 128
"""Of a thread: eight warps are then resident twice, on each of these GPUs."""


def _check(found: list[Compiled]) -> None:
    assert found
    assert [kernel.name for kernel in found if kernel.spilled or kernel.registers > MOST_REGISTERS] == []


@compiled_only
@pytest.mark.parametrize("target", TARGETS)
def test_comparing(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All widths, and float32 rounded to bfloat16; what is aligned, as nearly all tensors are, is read many at a time."""
    nothing = np.empty(0, np.int32)
    monkeypatch.setattr(gpu_diff._Launched, "results", lambda group: (np.zeros(len(group.rows), np.int64), nothing, nothing))
    kinds = [(dtype, dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)]
    with compiling(target, gpu_diff) as found:
        for shadow, new in [*kinds, (torch.int16, torch.float32)]:
            for first in (0, 1):
                diff = gpu_diff.Diff(torch.device("cpu"))
                for size in (1, 16, 5000):  # whether a count is 1 or a multiple of 16 makes no other kernel
                    diff.add(
                        str(size), torch.zeros(size + 1, dtype=shadow)[first:], torch.zeros(size + 1, dtype=new)[first:], 8
                    )
                diff.finish()
    _check(found)
    assert sorted(kernel.name for kernel in found) == ["_compact"] * 5 + ["_mark"] * 10
    marks = [kernel.code for kernel in found if kernel.name == "_mark"]
    wide = sum(re.search(r"ld\.global\.(v4\.b32|v2\.b64)|_load_dwordx4", code) is not None for code in marks)
    assert wide == (5 if target.startswith("sm") else 4)  # a thread of AMD's reads 8 of the elements of one byte


@pytest.mark.skipif(HAS_TRITON, reason="the tests above run as they are")
def test_through_tritons_compiler(tmp_path: Path) -> None:
    run_here(__file__, tmp_path, [])
