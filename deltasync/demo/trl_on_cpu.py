"""What TRL's `AsyncGRPOTrainer` needs to run on a CPU. Used by the demo and the tests only.

TRL 1.16 assumes a GPU in two places of `trl.experimental.async_grpo`, and offers no option for either:

- the constructor asks CUDA for the name of the device, to report a model FLOPs utilisation;
- the attention of its packed batches calls `flash_attn_varlen_func` of a FlashAttention 3 kernel from the Hub.

`prepare` replaces both for the current process. The rollout worker's child process runs no model and needs neither.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional


def prepare() -> None:
    """Patch TRL in this process so that `AsyncGRPOTrainer` can be constructed and run without a GPU.

    Calling it again changes nothing. The patches stay for the life of the process.
    """
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = _no_peak_flops
    packing._flash_attn = lambda: kernel


def _no_peak_flops(*_: Any, **__: Any) -> None:
    """Stand-in for TRL's device lookup: None means that the peak is unknown, and no utilisation is logged."""
    return None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Attention of many sequences laid end to end, as FlashAttention's `flash_attn_varlen_func` computes it.

    The sequences are padded into one batch for PyTorch's attention: wasteful for long ones, fast for the demo's.
    Sequence s has its queries aligned to the end of its keys, so a query sees all keys of the sequence up to itself.

    Args:
        query: Shape (sum of query lengths, query heads, head size).
        key: Shape (sum of key lengths, key heads, head size); the query heads are a multiple of the key heads.
        value: Shape of `key`.
        cu_seqlens_q: Shape (sequences + 1,): where the queries of each sequence start, and the end of the last.
        cu_seqlens_k: The same for keys. No sequence may have fewer keys than queries.
        max_seqlen_q: Most queries of a sequence.
        max_seqlen_k: Most keys of a sequence.
        softmax_scale: Factor on the scores, 1 / sqrt(head size) by default.
        causal: Must be true.
        window_size: Must be (-1, -1), no sliding window.

    Returns:
        Shape and dtype of `query`.

    Raises:
        NotImplementedError: For non-causal or sliding-window attention.
    """
    if not causal or window_size != (-1, -1):
        raise NotImplementedError(f"only full causal attention, got {causal=} {window_size=}")
    query_pad = _pad(query, cu_seqlens_q, max_seqlen_q)
    key_pad = _pad(key, cu_seqlens_k, max_seqlen_k)
    value_pad = _pad(value, cu_seqlens_k, max_seqlen_k)

    # Rows of padding get a mask too, and see their first key at least, so that the softmax of no row is NaN.
    offset = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).view(-1, 1, 1, 1)
    query_at = torch.arange(max_seqlen_q, device=query.device).view(1, 1, -1, 1)
    key_at = torch.arange(max_seqlen_k, device=query.device).view(1, 1, 1, -1)
    out_pad = functional.scaled_dot_product_attention(
        query_pad, key_pad, value_pad, attn_mask=key_at <= query_at + offset, scale=softmax_scale, enable_gqa=True
    )
    sequence, position = _places(cu_seqlens_q)
    return out_pad.transpose(1, 2)[sequence, position]


def _places(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each packed token, the index of its sequence and its position in it."""
    cu_seqlens = cu_seqlens.long()
    sequence = torch.repeat_interleave(cu_seqlens.diff())
    position = torch.arange(sequence.numel(), device=cu_seqlens.device) - cu_seqlens[sequence]
    return sequence, position


def _pad(packed: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """From (tokens, heads, size) to (sequences, heads, max_seqlen, size), zeros where a sequence is shorter."""
    padded = packed.new_zeros(cu_seqlens.numel() - 1, max_seqlen, *packed.shape[1:])
    return padded.index_put(_places(cu_seqlens), packed).transpose(1, 2)
