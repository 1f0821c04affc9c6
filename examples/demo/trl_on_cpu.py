"""Patches with which TRL's `AsyncGRPOTrainer` runs on a CPU. Used by the demo and the tests only.

TRL 1.16 assumes a GPU in two places of `trl.experimental.async_grpo`, and offers no option for either: the
constructor asks CUDA for the name of the device, and the attention of its packed batches calls a
FlashAttention 3 kernel from the Hub.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence


def prepare() -> None:
    """Patch TRL for the life of this process, so that `AsyncGRPOTrainer` runs without a GPU."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_, **__: None  # unknown: no utilisation is logged
    packing._flash_attn = lambda: kernel


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
    """Return the attention of sequences laid end to end, as FlashAttention's `flash_attn_varlen_func`
    computes it.

    The sequences are padded into one batch for PyTorch's attention: wasteful for long ones, fast for the
    demo's. A sequence's queries are aligned to the end of its keys, so a query sees all keys of the sequence
    up to itself.

    `query`, `key` and `value` have shape (sum of lengths, heads, head size); query heads are a multiple of
    key heads. `cu_seqlens_*`, of shape (sequences + 1,), hold where each sequence starts, and the end of the
    last. No sequence may have fewer keys than queries. `max_seqlen_*` are not used.

    Raises:
        NotImplementedError: for non-causal or sliding-window attention.
    """
    if not causal or window_size != (-1, -1):
        raise NotImplementedError(f"only full causal attention, got {causal=} {window_size=}")
    query_lengths, key_lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    query_pad, key_pad, value_pad = (
        _padded(query, query_lengths),
        _padded(key, key_lengths),
        _padded(value, key_lengths),
    )
    # Rows of padding get a mask too, and see their first key at least, so that the softmax of no row is NaN.
    offset = (key_lengths - query_lengths).view(-1, 1, 1, 1)
    query_at = torch.arange(query_pad.shape[2], device=query.device).view(1, 1, -1, 1)
    key_at = torch.arange(key_pad.shape[2], device=query.device).view(1, 1, 1, -1)
    out_pad = functional.scaled_dot_product_attention(
        query_pad,
        key_pad,
        value_pad,
        attn_mask=key_at <= query_at + offset,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return torch.cat(
        [row[:length] for row, length in zip(out_pad.transpose(1, 2), query_lengths.tolist(), strict=True)]
    )


def _padded(packed: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Reshape (tokens, heads, size) to (sequences, heads, longest, size), with zeros after shorter
    sequences.
    """
    return pad_sequence(list(torch.split(packed, lengths.tolist())), batch_first=True).transpose(1, 2)
