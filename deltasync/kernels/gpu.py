"""The kernels of `reference` in Triton, on contiguous signed views of CUDA tensors, those of a call on one device.

Only this module and `gpu_segments` import triton; `device_kernels` chooses between it and `torch_ops`. What reads a whole
tensor reads it once: `diff` marks the changed elements in a bitmap of N / 8 bytes, counts them per block, and after a prefix
sum over the blocks goes back to the marked elements alone. Partial sums of fingerprints are written per block and added by
torch, which adds int64 modulo 2**64, so that nothing depends on atomics and every result is reproducible.

Kernels see the bit patterns as unsigned integers, and every offset as int64. N elements, K changed, B blocks, W words of
32 marks.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import triton
import triton.language as tl

from deltasync.fingerprint import MASK
from deltasync.kernels import reference
from deltasync.types import index_dtype

_INDEX_STEP = tl.constexpr(int(reference.INDEX_STEP))
_VALUE_STEP = tl.constexpr(int(reference.VALUE_STEP))
_MIX_1 = tl.constexpr(int(reference.MIX_1))
_MIX_2 = tl.constexpr(int(reference.MIX_2))

# Elements per program: enough loads in flight for streaming, a multiple of the 32 marks of a word.
_STREAM_BLOCK = 4096

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@triton.jit
def _cell(key, index, bits):
    z = key + index.to(tl.uint64) * _INDEX_STEP + bits.to(tl.uint64) * _VALUE_STEP
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _bfloat16_bits(bits):
    """float32 bit patterns rounded to nearest even. In integers: hardware and torch disagree on what a NaN becomes."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).to(tl.uint16)


@triton.jit
def _mark(old_ptr, new_ptr, mark_ptr, count_ptr, N, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    at = block * BLOCK + word[:, None] * 32 + bit[None, :]
    inside = at < N
    old = tl.load(old_ptr + at, inside, other=0)
    new = tl.load(new_ptr + at, inside, other=0)
    if ROUND:
        new = _bfloat16_bits(new)
    changed = (old != new).to(tl.uint32)
    tl.store(mark_ptr + block * (BLOCK // 32) + word, tl.sum(changed << bit.to(tl.uint32)[None, :], axis=1))
    tl.store(count_ptr + block, tl.sum(tl.sum(changed, axis=1), axis=0).to(tl.int32))


@triton.jit
def _compact(
    old_ptr,
    new_ptr,
    mark_ptr,
    end_ptr,
    index_ptr,
    step_ptr,
    ROUND: tl.constexpr,
    UPDATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = block * BLOCK + lane
    # The marks end where the tensor does, so that they alone say what may be read.
    word = tl.load(mark_ptr + block * (BLOCK // 32) + lane // 32)
    marked = ((word >> (lane % 32).to(tl.uint32)) & 1).to(tl.int32)
    changed = marked != 0
    k = tl.load(end_ptr + block) - tl.sum(marked, axis=0) + tl.cumsum(marked, axis=0) - marked
    old = tl.load(old_ptr + at, changed, other=0)
    new = tl.load(new_ptr + at, changed, other=0)
    if ROUND:
        new = _bfloat16_bits(new)
    tl.store(index_ptr + k, at.to(index_ptr.dtype.element_ty), changed)
    tl.store(step_ptr + k, new - old, changed)
    if UPDATE:
        tl.store(old_ptr + at, new, changed)


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


def diff(old_N: torch.Tensor, new_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.diff`; waits for the device once, for the number of changes.

    Reads both tensors once, and again where elements changed. Extra memory: N / 8 bytes and the results.
    """
    assert old_N.dtype == new_N.dtype and old_N.numel() == new_N.numel()
    return _diff(old_N, new_N, rounded=False, update=False)


def diff_and_update(shadow_N: torch.Tensor, master_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast, compare, compact, and advance the shadow: `diff` without a cast copy of the master.

    Args:
        shadow_N: Signed view of the last published bits. Mutated: afterwards it holds the master's bits in the served
            dtype. Everything is allocated before the first write; if this raised for want of memory, nothing changed.
        master_N: The weights: float32 for a bfloat16 shadow, rounded to nearest even (a NaN keeps its sign and the upper
            bits of its payload, and becomes quiet); otherwise a signed view of the shadow's own dtype, taken as it is.

    Returns:
        As `diff` of the shadow before and after.
    """
    rounded = master_N.dtype == torch.float32
    assert shadow_N.dtype == (torch.int16 if rounded else master_N.dtype) and shadow_N.numel() == master_N.numel()
    return _diff(shadow_N, master_N.view(torch.int32) if rounded else master_N, rounded=rounded, update=True)


def _diff(old_N: torch.Tensor, new_N: torch.Tensor, *, rounded: bool, update: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = triton.cdiv(old_N.numel(), _STREAM_BLOCK)
    mark_W = old_N.new_empty(blocks * (_STREAM_BLOCK // 32), dtype=torch.int32)
    count_B = old_N.new_empty(blocks, dtype=torch.int32)
    old, new, mark = _unsigned(old_N), _unsigned(new_N), _unsigned(mark_W)
    with _on(old_N.device):
        if blocks:
            _mark[(blocks,)](old, new, mark, count_B, old_N.numel(), rounded, _STREAM_BLOCK, num_warps=8)
        end_B = torch.cumsum(count_B, 0, dtype=torch.int64)
        changed = int(end_B[-1]) if blocks else 0
        index = torch.int32 if index_dtype(old_N.numel()) == np.int32 else torch.int64
        index_K = old_N.new_empty(changed, dtype=index)
        step_K = old_N.new_empty(changed)
        if changed:
            _compact[(blocks,)](
                old, new, mark, end_B, index_K, _unsigned(step_K), rounded, update, _STREAM_BLOCK, num_warps=16
            )
    return index_K, step_K


def _unsigned(view: torch.Tensor) -> torch.Tensor:
    assert view.is_contiguous()
    return view.view(_UNSIGNED[view.element_size()])


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'. Its interpreter takes tensors of the host."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
