"""Quantize weights to FP8 with a scale for each block, before they are compared: far fewer bits change than in bfloat16.

The layout is that of DeepSeek-V3's checkpoints, which vLLM and transformers load by `QUANTIZATION` in config.json: a matrix
`name` becomes `name` in float8_e4m3fn and `name + "_scale_inv"` in float32, one factor for each block of 128 by 128 weights.
Scales are powers of two: one that followed the largest weight of its block exactly would change at every step, and with it
many values that are close to a rounding boundary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional

from deltasync.errors import ConfigError
from deltasync.publish.stream import Tensor, TensorRange
from deltasync.tensors.bits import cast, dtype_for

BLOCK = 128
SCALE = "_scale_inv"
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
"""`quantization_config` of a model that `fp8_blocks` quantized."""

_LARGEST = 448.0  # of float8_e4m3fn
_KEPT = re.compile(r"(^|\.)(embed_tokens|wte|lm_head|gate|router)\.weight$")  # and all that are no matrices


def fp8_blocks(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantize the weights of linear layers; embeddings, the output layer, routers and norms become bfloat16.

    What servers keep exactly is kept, see `dtype_for`.

    Args:
        named_tensors: Whole tensors of a checkpoint; experts one by one.

    Raises:
        ConfigError: a tensor is a shard.
    """
    for name, tensor in named_tensors:
        if isinstance(tensor, TensorRange) or hasattr(tensor, "placements"):  # a DTensor, whose import takes seconds
            raise ConfigError(f"{name} is a shard, which cannot be quantized by blocks; train with DDP, or serve bfloat16.")
        if tensor.ndim != 2 or not tensor.is_floating_point() or not name.endswith(".weight") or _KEPT.search(name):
            yield name, cast(tensor, dtype_for(name, "bfloat16"))
            continue
        values, scale = quantize(tensor)
        yield name, values
        yield name + SCALE, scale


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, float8_e4m3fn of the same shape, and scales, float32[ceil(rows / 128), ceil(columns / 128)]."""
    rows, columns = weight.shape
    padded = functional.pad(weight.detach().float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    # The least power of two that brings the largest weight into range; 1 for a block of zeros.
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=(1, 3)) / _LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scale = torch.where(mantissa == 0, torch.ones_like(scale), scale)
    scaled = blocks / scale[:, None, :, None]
    values = torch.where(torch.isinf(scaled), math.nan, scaled).to(torch.float8_e4m3fn)  # which has no infinity
    return values.reshape(padded.shape)[:rows, :columns].contiguous(), scale
