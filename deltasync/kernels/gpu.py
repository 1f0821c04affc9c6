"""The kernels of `reference` in Triton, on contiguous signed views of CUDA tensors, those of a call on one device.

`device_kernels` chooses between it and `torch_ops`; comparing is in `gpu_diff`. Partial sums of fingerprints are written per
block and added by torch, which adds int64 modulo 2**64, so that nothing depends on atomics and every result is reproducible.

Kernels see the bit patterns as unsigned integers, and every offset as int64. N elements, K changed, B blocks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from deltasync.fingerprint import MASK
from deltasync.kernels import reference

_INDEX_STEP = tl.constexpr(int(reference.INDEX_STEP))
_VALUE_STEP = tl.constexpr(int(reference.VALUE_STEP))
_MIX_1 = tl.constexpr(int(reference.MIX_1))
_MIX_2 = tl.constexpr(int(reference.MIX_2))

# Elements per program: enough loads in flight for streaming.
_STREAM_BLOCK = 4096
_SCATTER_BLOCK = 1024

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@triton.jit
def _cell(key, index, bits):
    z = key + index.to(tl.uint64) * _INDEX_STEP + bits.to(tl.uint64) * _VALUE_STEP
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


# Not specialized on values or alignment, nor is `_swap`: a commit must not meet a compilation that `warm_up` has not done.
@triton.jit(do_not_specialize=["key", "K"], do_not_specialize_on_alignment=["dest_ptr", "check_ptr"])
def _prepare(
    key: tl.uint64,
    dest_ptr,
    dest_index_ptr,
    data_ptr,
    index_ptr,
    new_ptr,
    added_ptr,
    check_ptr,
    K: tl.int64,
    ABSOLUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    at = tl.load(dest_index_ptr + k, inside, other=0).to(tl.int64)
    old = tl.load(dest_ptr + at, inside, other=0)
    new = tl.load(data_ptr + k, inside, other=0)
    if not ABSOLUTE:
        new += old
    tl.store(new_ptr + k, new, inside)
    index = tl.load(index_ptr + k, inside, other=0)
    # Outside, old and new are both 0 and add nothing.
    tl.store(added_ptr + block, tl.sum(_cell(key, index, new) - _cell(key, index, old), axis=0))
    tl.store(check_ptr + block, tl.sum(_weighted(at, old), axis=0))


@triton.jit
def _weighted(at, bits):
    return bits.to(tl.uint64) * (at.to(tl.uint64) * 2 + 1)


@triton.jit(do_not_specialize=["K"], do_not_specialize_on_alignment=["dest_ptr", "dest_index_ptr", "value_ptr", "check_ptr"])
def _swap(dest_ptr, dest_index_ptr, value_ptr, check_ptr, K: tl.int64, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    k = block * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    at = tl.load(dest_index_ptr + k, inside, other=0).to(tl.int64)
    old = tl.load(dest_ptr + at, inside, other=0)
    tl.store(dest_ptr + at, tl.load(value_ptr + k, inside, other=0), inside)
    tl.store(value_ptr + k, old, inside)
    tl.store(check_ptr + block, tl.sum(_weighted(at, old), axis=0))


@triton.jit(do_not_specialize=["key"])
def _fingerprint(key: tl.uint64, bits_ptr, part_ptr, N, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    hashed = _cell(key, at, tl.load(bits_ptr + at, inside, other=0))
    tl.store(part_ptr + block, tl.sum(tl.where(inside, hashed, 0), axis=0))


def fingerprint(key: int, bits_N: torch.Tensor) -> int:
    """As `reference.fingerprint`; waits for the device."""
    part_B = bits_N.new_empty(triton.cdiv(bits_N.numel(), _STREAM_BLOCK), dtype=torch.int64)
    if part_B.numel():
        with _on(bits_N.device):
            _fingerprint[(part_B.numel(),)](
                key, _unsigned(bits_N), _unsigned(part_B), bits_N.numel(), _STREAM_BLOCK, num_warps=8
            )
    return int(part_B.sum()) & MASK


def prepare(
    key: int, dest: torch.Tensor, dest_index_K: torch.Tensor, data_K: torch.Tensor, absolute: bool, index_K: torch.Tensor
) -> tuple[torch.Tensor, int, int]:
    """As `reference.prepare`, one kernel; waits for the device."""
    assert dest.dtype == data_K.dtype
    new_K = torch.empty_like(data_K)
    sum_2B = data_K.new_empty((2, triton.cdiv(data_K.numel(), _SCATTER_BLOCK)), dtype=torch.int64)
    if data_K.numel():
        with _on(dest.device):
            _prepare[(sum_2B.shape[1],)](
                key,
                _unsigned(dest),
                dest_index_K.contiguous(),
                _unsigned(data_K),
                index_K.contiguous(),
                _unsigned(new_K),
                _unsigned(sum_2B[0]),
                _unsigned(sum_2B[1]),
                data_K.numel(),
                absolute,
                _SCATTER_BLOCK,
            )
    added, check = sum_2B.sum(1).tolist()
    return new_K, added & MASK, check & MASK


def swap(writes: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> int:
    """As `reference.swap`, a kernel for each write. Waits for the device once: after return the new bits are live."""
    writes = [write for write in writes if write[2].numel()]
    if not writes:
        return 0
    start_W = [0, *itertools.accumulate(triton.cdiv(value_K.numel(), _SCATTER_BLOCK) for _, _, value_K in writes)]
    check_B = writes[0][0].new_empty(start_W[-1], dtype=torch.int64)
    with _on(check_B.device):
        for (dest, dest_index_K, value_K), (first, last) in zip(writes, itertools.pairwise(start_W), strict=True):
            check = _unsigned(check_B[first:last])
            _swap[(last - first,)](_unsigned(dest), dest_index_K, _unsigned(value_K), check, value_K.numel(), _SCATTER_BLOCK)
    return int(check_B.cpu().sum()) & MASK  # on the host: with no memory left on the device, the exchange has still ended


@functools.cache
def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile what `prepare` and `swap` need on this device for signed views of this dtype, once per process.

    It costs seconds that a commit would otherwise spend; Triton keeps what it compiled on disk, for later processes.
    """
    dest = torch.zeros(1, dtype=dtype, device=device)
    first = [torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)]
    for dest_index_K, index_K, absolute in itertools.product(first, first, (True, False)):
        prepare(0, dest, dest_index_K, dest.clone(), absolute, index_K)
    for dest_index_K in first:
        swap([(dest, dest_index_K, dest.clone())])


def _unsigned(view: torch.Tensor) -> torch.Tensor:
    assert view.is_contiguous()
    return view.view(_UNSIGNED[view.element_size()])


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'. Its interpreter takes tensors of the host."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
