"""What vLLM needs to start beside a trainer: on this machine's GPU if there is one, else on its CPUs."""

from __future__ import annotations

import importlib.util

BESIDE = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "6G")
"""Options with which vLLM starts on a GPU that another process uses as well: by default it takes 92 % of the
memory.
"""


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def options(gpu: bool) -> list[str]:
    """Return vLLM's options: beside another process on the GPU, with CUDA graphs; eager on CPUs."""
    return [*BESIDE] if gpu else ["--enforce-eager"]


def variables() -> dict[str, str]:
    """Return environment variables: vLLM samples with flashinfer by default, and fails without it."""
    return {} if importlib.util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
