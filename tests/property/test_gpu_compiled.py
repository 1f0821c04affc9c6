"""Every Triton kernel as production launches it, compiled for GPUs that are not there: registers, spills, width of loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from deltasync.kernels.table import Entry, Table
from tests.interpreter import HAS_TRITON, INTERPRETED, run_again

COMPILES = HAS_TRITON and not INTERPRETED

if COMPILES:
    from deltasync.kernels import gpu_diff, gpu_segments
    from tests.triton_compiled import TARGETS, Compiled, compiling
else:
    TARGETS = {}

compiled_only = pytest.mark.skipif(not COMPILES, reason="no triton that compiles")
_KERNELS = (gpu_segments._fingerprint, gpu_segments._prepare, gpu_segments._swap) if COMPILES else ()
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


@compiled_only
@pytest.mark.parametrize("target", TARGETS)
def test_commits(target: str) -> None:
    """All widths of elements and positions; what a commit or an audit launches, warming up has compiled."""
    with compiling(target, gpu_segments) as found:
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            gpu_segments.warm_up.__wrapped__(torch.device("cpu"), dtype)
        warm = sum(len(cache) for kernel in _KERNELS for cache, *_ in kernel.device_caches.values())
        entries = [
            Entry(
                key,
                torch.zeros(300, dtype=dtype)[first:],
                5,
                ((20, 3, 7), (1, 9, 3)),
                at_K,
                at_K.astype(f"u{width}"),
                absolute,
            )
            for width, dtype in ((1, torch.int8), (2, torch.int16), (4, torch.int32), (8, torch.int64))
            for key, first, absolute in ((1, 0, True), ((1 << 64) - 1, 1, False))
            for at_K in (np.arange(16, dtype=np.int32), np.arange(3))
        ]
        of = Table(entries, gpu_segments._Anywhere(torch.device("cpu")))
        gpu_segments.prepare(of)
        gpu_segments.swap(of)
        whole = [dataclasses.replace(entry, at_K=None, value_K=None) for entry in entries]
        gpu_segments.fingerprint(Table(whole, gpu_segments._Anywhere(torch.device("cpu"))))
    _check(found)
    assert sorted(kernel.name for kernel in found) == ["_fingerprint"] * 4 + ["_prepare"] * 8 + ["_swap"] * 8
    assert len(found) == warm


@pytest.mark.skipif(HAS_TRITON, reason="the tests above run as they are")
@pytest.mark.parametrize("targets", ["sm_90", pytest.param("sm_100 or gfx942", marks=pytest.mark.slow)])
def test_through_tritons_compiler(targets: str, tmp_path: Path) -> None:
    run_again([__file__], tmp_path, "-k", targets)
