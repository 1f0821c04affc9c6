"""Deltas in a device's memory, which the host plays: positions by their lower 32 bits, found again past
2**32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltasync.errors import CorruptDataError
from deltasync.gpu.delta import BLOCK, DeviceDelta, DeviceSparse
from deltasync.tensors import Layout, Sparse, TensorSpec


def sparse(base_B: list[int], held_B: list[list[int]]) -> DeviceSparse:
    at_K = [base + each for base, held in zip(base_B, held_B, strict=True) for each in held]
    bound_B = np.cumsum([0, *map(len, held_B)])
    low_K = torch.tensor(at_K, dtype=torch.int64).to(torch.int32)  # keeps the lower bits
    step_K = torch.arange(1, len(at_K) + 1, dtype=torch.int16)
    count_T = np.array([len(at_K)])
    return DeviceSparse(low_K, step_K, torch.tensor(base_B), torch.from_numpy(bound_B), count_T)


BASES = [0, BLOCK, (1 << 31) - 7, (1 << 32) - 100, (1 << 32) + BLOCK - 100, 3 << 32]
HELD = [[0, 5, BLOCK - 1], [], [0, 6, 7, 8], [0, 99, 100, BLOCK - 1], [3], [0, 1, 4000]]
AT = [base + each for base, held in zip(BASES, HELD, strict=True) for each in held]


def test_whole_positions_come_from_their_lower_bits() -> None:
    steps = sparse(BASES, HELD)
    assert steps.positions().tolist() == AT
    assert steps.positions(2, 6).tolist() == AT[2:6]
    delta = DeviceDelta(Layout({"w": TensorSpec("w", "bfloat16", (4 << 32,))}), {2: steps}, {})
    found = delta.host().steps[2]
    assert found.at_K.dtype == np.int64 and found.at_K.tolist() == AT
    assert found.data_K.dtype == np.uint16 and found.data_K.tolist() == [*range(1, len(AT) + 1)]
    assert delta.counts() == {"w": len(AT)} and delta.changed == len(AT)


@pytest.mark.parametrize("lacking", [slice(1, None), slice(0, -1), slice(0, 0)])
def test_a_host_form_that_lacks_a_step_is_refused(lacking: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = DeviceSparse.host

    def lacks(steps: DeviceSparse, index: np.dtype) -> Sparse:
        return Sparse(*(each[lacking] for each in whole(steps, index)))

    delta = DeviceDelta(Layout({"w": TensorSpec("w", "bfloat16", (4 << 32,))}), {2: sparse(BASES, HELD)})
    assert delta.host().changed == delta.changed
    monkeypatch.setattr(DeviceSparse, "host", lacks)
    with pytest.raises(CorruptDataError, match="not those on its device"):
        delta.host()


def test_changes_below_limits_are_counted() -> None:
    limits = sorted({0, 4 << 32, *BASES, *AT, *(at + 1 for at in AT), *(base - 1 for base in BASES[1:])})
    found = sparse(BASES, HELD).count_below(torch.tensor(limits))
    assert found.tolist() == np.searchsorted(AT, limits).tolist()
    assert sparse([], []).count_below(torch.tensor([0, 9])).tolist() == [0, 0]
    assert sparse([0, BLOCK], [[], []]).count_below(torch.tensor([0, 9])).tolist() == [0, 0]
