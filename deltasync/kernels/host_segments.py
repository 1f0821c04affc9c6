"""The kernels over tables of segments in host memory: the C extension's. Without it, `torch_ops` serves."""

from __future__ import annotations

import torch

from deltasync.kernels import native, torch_ops
from deltasync.kernels.table import Rows, Table, Writes


def prepare(of: Writes) -> None:
    """See `SegmentKernels.prepare`. Positions in the vector are dropped: what is swapped has those in live
    memory.
    """
    if (extension := native.extension()) is None:
        torch_ops.prepare(of)
        return
    of.sum_3S.zero_()
    low_K, of.low_K = of.low_K, torch.empty(of.value_V.numel(), dtype=torch.int32, device="cpu")
    if not extension.stage(*_given(of), low_K.numpy(), of.step_K.numpy()):
        raise ValueError("a position is outside of its segment")


def swap(of: Writes) -> None:
    """See `SegmentKernels.swap`."""
    if (extension := native.extension()) is None:
        torch_ops.swap(of)
        return
    of.sum_3S.zero_()
    extension.exchange(*_given(of))


def _given(of: Writes) -> tuple[object, ...]:
    held = of.table
    arrays = held.line_SC, held.dim_S2D3, of.write_SC, of.row_R, of.low_K, of.value_V, of.sum_3S
    return native.threads(8 * of.value_V.numel()), of.block, *(array.numpy() for array in arrays)


def fingerprint(of: Table, rows: Rows, gain_S: torch.Tensor) -> None:
    """See `SegmentKernels.fingerprint`."""
    gain_S.zero_()
    sum_S = gain_S.numpy().view("u8")
    for number in rows.lines.tolist():
        sum_S[number] = native.fingerprint_runs(of.lines[number].key, *of.lines[number].runs())


warm_up = torch_ops.warm_up
