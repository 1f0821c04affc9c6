"""vLLM's own loader: the load plan recorded from it, and the checkpoint that it has read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deltasync.errors import ModelMismatchError
from deltasync.live import plan
from vllm_plugin.load.layers import as_loaded, computed_parameters

LOADER = plan.Loader("vLLM", as_loaded, computed_parameters)
"""How vLLM loads models."""


def checkpoint(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a vLLM model runner loaded its model from.

    Raises:
        ModelMismatchError: it was not loaded from a checkpoint that can be read again.
    """
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(runner.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise ModelMismatchError(
            f"vLLM loaded its weights by {type(loader).__name__}, so it cannot be proven where they are. "
            "Serve a checkpoint, without --load-format."
        )
    yield from loader.get_all_weights(runner.model_config, runner.get_model())
