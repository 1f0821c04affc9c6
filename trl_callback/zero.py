"""DeepSpeed's ZeRO-3: what this process holds of each parameter, without gathering any. DeepSpeed itself is not imported.

It cuts each flattened parameter into as many equal parts as there are processes, padded at the end, and keeps that of this
process in `param.ds_tensor`, in the dtype of training, also while the parameter is gathered for the forward of a layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from deltasync.errors import ConfigError
from deltasync.publish.sharded import TensorRange


def shards(model: torch.nn.Module) -> bool:
    """Whether ZeRO-3 shards parameters of this model."""
    return any(is_part(param) for param in model.parameters())


def is_part(param: Any) -> bool:
    """Whether ZeRO-3 shards this parameter."""
    return hasattr(param, "ds_id")


def part(name: str, param: Any) -> TensorRange:
    """What this process holds of a parameter.

    Raises:
        ConfigError: it is offloaded to NVMe, quantized, or not spread over all processes.
    """
    held, shape = param.ds_tensor, tuple(param.ds_shape)
    total, rank = math.prod(shape), dist.get_rank()
    if (
        held.status.name != "AVAILABLE"
        or hasattr(held, "ds_quant_scale")
        or held.numel() != -(-total // dist.get_world_size())
    ):
        raise ConfigError(
            f"{name} is sharded by DeepSpeed in a way that DeltaSyncCallback cannot publish: offloaded to NVMe, quantized, "
            "or over some of the processes only. Use ZeRO-3 without these; offloading to the CPU is fine."
        )
    start = min(rank * held.numel(), total)
    return TensorRange(held[: total - start], start, shape)
