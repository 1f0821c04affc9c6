"""Every Triton kernel as production launches it, compiled for GPUs that are not there: registers, spills,
width of loads.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from deltasync.gpu.delta import BLOCK, DeviceSparse
from deltasync.kernels.table import Line, Table, Writes
from deltasync.live import Segment
from tests.devices import StandIn
from tests.interpreter import HAS_TRITON, INTERPRETED, run_again

COMPILES = HAS_TRITON and not INTERPRETED

if COMPILES:
    import triton

    from deltasync.gpu import classes as gpu_classes
    from deltasync.gpu import coder as gpu_coder
    from deltasync.gpu import detect as gpu_diff
    from deltasync.gpu import segments as gpu_segments
    from deltasync.gpu.classes import BlockBits, Changes
    from deltasync.gpu.coder import Streams
    from deltasync.kernels.rans import Classes
    from tests.triton_compiled import TARGETS, Compiled, compiling
else:
    TARGETS = {}

compiled_only = pytest.mark.skipif(not COMPILES, reason="no triton that compiles")
_KERNELS = (
    (gpu_segments._fingerprint, gpu_segments._fingerprint_strided, gpu_segments._prepare, gpu_segments._swap)
    if COMPILES
    else ()
)
MOST_REGISTERS = 128
"""Of a thread: eight warps are then resident twice, on each of these GPUs."""


MOST_INSTRUCTIONS = {"_count_chunks": 30, "_encode": 310, "_decode": 380, "_rank": 200, "_places": 160}
"""Of elements of two bytes: of a lane for an element of up to 16 classes, or for a change of its stream; else of a
warp for a change. `_rank` has a turn for the changes of a chunk that were of another class, which most have not.
"""


def _instructions(kernel: Compiled, warp: int) -> float:
    """Return what `MOST_INSTRUCTIONS` bounds."""
    whole, *loops = kernel.lengths()
    if kernel.name == "_count_chunks":  # the inner loop takes eight classes a turn, by four warps
        return (loops[0] + loops[1]) / (kernel.constants["CHUNKS"] * gpu_classes.CHUNK / (4 * warp))
    if kernel.name in ("_rank", "_places"):  # by four warps, with one turn of listed changes if bits are new
        return 4 * whole / kernel.constants["CHANGES"]
    return loops[0]


def _check(found: list[Compiled]) -> None:
    assert found
    assert [kernel.name for kernel in found if kernel.spilled or kernel.registers > MOST_REGISTERS] == []


@compiled_only
@pytest.mark.parametrize("target", TARGETS)
def test_comparing(target: str) -> None:
    """All widths, and float32 rounded to bfloat16; what is aligned, as nearly all tensors are, is read many
    at a time.
    """
    with compiling(target, gpu_diff) as found:
        for width, new_width in ((1, 1), (2, 2), (4, 4), (8, 8), (2, 4)):
            for address in (0x1000, 0x1001):
                for size in (1, 16, 5000):  # whether a count is 1 or a multiple of 16 makes no other kernel
                    line_RC = np.zeros((1, gpu_diff.COLUMNS), np.int64)
                    line_RC[0, [gpu_diff.OLD, gpu_diff.NEW, gpu_diff.COUNT]] = 0x1000, address, size
                    nothing = np.zeros(1, np.int64)
                    of = gpu_diff.Comparison(
                        torch.device("cpu"), width, line_RC, np.full(1, new_width), nothing, 1, nothing
                    )
                    launched = of._launch(size, lambda run, to: None)
                    launched.count_B.fill_(BLOCK)
                    of._overflowing(launched, lambda run, to: None)
                    of.apply(
                        DeviceSparse(launched.low_K, launched.step_K, of._base_B, launched.bound_B, nothing)
                    )
                    of.sums()
    _check(found)
    assert sorted(kernel.name for kernel in found) == (
        ["_all"] * 10 + ["_apply"] * 4 + ["_compare"] * 10 + ["_pack"] * 8 + ["_print"] * 4
    )  # of all blocks, and of those that are listed
    wide = [
        re.search(r"ld\.global\.(v4\.b32|v2\.b64)|_load_dwordx4", of.code)
        for of in found
        if of.name in ("_compare", "_all")
    ]
    assert sum(match is not None for match in wide) >= 9  # `_all` reads one byte eight times


@compiled_only
@pytest.mark.parametrize("target", TARGETS)
def test_commits(target: str) -> None:
    """All widths; what a commit or an audit launches, warming up has compiled."""
    with compiling(target, gpu_segments) as found:
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            gpu_segments.warm_up.__wrapped__(StandIn(gpu_segments), dtype)
        warm = sum(len(cache) for kernel in _KERNELS for cache, *_ in kernel.device_caches.values())
        room = StandIn(gpu_segments)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            live = torch.zeros(301, dtype=dtype)
            # One run, aligned and not, and a shard of a matrix; more rows than are launched at once.
            segments = [
                Segment(live[1:], (1,), 5),
                Segment(live[:300], (1,), 0),
                Segment(live[:60].view(6, 10)[:, 3:], (20, 1), 7),
            ]
            lines = [Line(1 << 63, each.flat(), each.offset, 9, 400, each.layout()) for each in segments]
            of = Table(lines, room)
            for count in (16, 3):
                low_K, step_K = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=dtype)
                for mutates in (False, True):
                    writes = Writes(
                        of, low_K, step_K, np.zeros(3, np.int64), np.array([count, 0, 3]), mutates=mutates
                    )
                    gpu_segments.prepare(writes)
                    gpu_segments.swap(writes)
            gpu_segments.fingerprint(of, of.whole, *of.empty(((3,), torch.int64)))
            gpu_segments.fingerprint(of, of.rows(np.arange(1, 3)), *of.empty(((3,), torch.int64)))
    _check(found)
    names = ["_fingerprint"] * 8 + ["_fingerprint_strided"] * 4 + ["_prepare"] * 8 + ["_swap"] * 8
    assert sorted(kernel.name for kernel in found) == names
    assert len(found) == warm
    wide = [
        kernel
        for kernel in found
        if re.search(r"ld\.global\.(v4\.b32|v2\.b64|v2\.b32|b64)|_load_dwordx", kernel.code)
    ]
    # what is aligned is read many elements at a time
    assert sum(kernel.name == "_fingerprint" for kernel in wide) >= 4


@compiled_only
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("widths", [(2,), pytest.param((1, 4, 8), marks=pytest.mark.slow)], ids=str)
def test_codecs(target: str, widths: tuple[int, ...]) -> None:
    """All widths of elements and gaps; encoding, undoing, decoding and ordering, in not too many
    instructions.
    """
    zeros, device = torch.zeros, torch.device("cpu")
    with compiling(target, gpu_coder, gpu_classes) as found:
        for width in widths:
            unsigned = getattr(torch, f"uint{8 * width}")
            long_S, int_S, bound_S = (
                zeros(5, dtype=torch.int64),
                zeros(5, dtype=torch.int32),
                zeros(6, dtype=torch.int64),
            )
            at_K, step_K = zeros(40, dtype=torch.int32), zeros(40, dtype=unsigned)
            streams = Streams(bound_S, long_S, int_S, at_K, step_K)
            count = gpu_coder.count(streams, 3)
            gpu_coder.join(count, torch.tensor([0, 3], dtype=torch.int32))
            fitted = gpu_coder.fit(count)
            gpu_coder.encode(streams, fitted)
            slots, words = gpu_coder.slots(fitted.freq_TS), zeros(9, dtype=torch.int32)
            runs = gpu_coder.Runs(int_S, long_S, long_S)
            gpu_coder.decode(bound_S, long_S, long_S, int_S, words, bound_S, slots, runs, at_K, step_K)
            bits_N = zeros(4000, dtype=torch.int64)
            bands = zeros(2, 6, dtype=torch.int64), *(zeros(2, dtype=torch.int64) for _ in range(3))
            for columns in (7, 8):
                row_BF = np.tile(np.array([bits_N.data_ptr(), columns, 8, 100, 0, 0, 0]), (5, 1))
                band_GF = np.array([[0, 8, columns, 3, 100, 0], [5000, 8, columns, 2, 100, 3]])
                changes = Changes(*bands, at_K, step_K, bits_N)
                changes.tally(5)
                bits = BlockBits(row_BF, band_GF, np.arange(6, dtype=np.int64) * 8, width, device, changes)
                bits.survey(np.array([0, 3, 5]), np.array([3, 5]))
                bits.divide(np.zeros(5, np.int64), Classes.of([np.array([[1, 8, 9], [9, 200, 4]])]))
                for gap_bits in (32, 40):
                    gap_K, class_K, ranked_K, first_B = gpu_classes.rank(bits, gap_bits)
                    streams = Streams(bits.bound, long_S, int_S, gap_K, ranked_K, class_K, first_B)
                    gpu_coder.count_classes(streams, 4)
                    gpu_coder.encode(streams, fitted, gap_bits)
                for bits.changes in (changes, None):
                    with mock.patch.object(torch.Tensor, "all", lambda *_: True):  # nothing runs
                        gpu_classes.decode(bits, words, bound_S, slots, long_S, at_K, step_K)
    _check(found)
    assert {kernel.name for kernel in found} == {"_" + name for name in _LAUNCHED.split()}
    if widths == (2,):
        counted = [
            each
            for each in found
            if each.constants.get("UNIT", 8) == 8
            and each.name in MOST_INSTRUCTIONS
            and not each.constants.get("ARE_NEW")
        ]
        assert {each.name for each in counted} == MOST_INSTRUCTIONS.keys()
        warp = TARGETS[target].warp_size
        if target == "gfx942" and triton.__version__.startswith("3.5"):  # its streams are half as long again
            counted = [each for each in counted if each.name not in ("_encode", "_decode")]
        many = [(each.name, _instructions(each, warp)) for each in counted]
        assert all(count <= MOST_INSTRUCTIONS[name] for name, count in many), many


_LAUNCHED = """classify correct count count_chunks count_classes count_marks decode encode first_classes fit gaps gather
    join mark move_placed move_ranked places rank search size slots sum_chunks survey_elements survey_steps tally"""


@pytest.mark.skipif(HAS_TRITON, reason="the tests above run as they are")
@pytest.mark.parametrize(
    "targets", ["sm_90", pytest.param("sm_80 or sm_100 or gfx942", marks=pytest.mark.slow)]
)
def test_through_tritons_compiler(targets: str, tmp_path: Path) -> None:
    run_again([__file__], tmp_path, "-k", targets)
