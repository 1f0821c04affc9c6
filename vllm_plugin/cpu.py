"""vLLM's CPU platform: keep linear weights where they can be patched.

There vLLM repacks linear weights for oneDNN or SGL kernels when the model is loaded and frees the original, so that no
address holds a checkpoint element any more. Choosing its plain torch path keeps them. On GPUs unquantized weights stay as
they were loaded, and this does nothing.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares


def prepare_reload(layer: Any) -> None:
    """Make vLLM repack an expert layer when it is loaded again: 0.31 does so only while it builds the layer's kernel."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
        layer.quant_method.moe_kernel = None


def keep_weights_addressable() -> None:
    """Make vLLM's CPU linear layers use the weights as loaded; call before the model is loaded. No-op elsewhere."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops
    from vllm.model_executor.layers import utils

    @functools.wraps(utils.check_cpu_sgl_kernel)
    def check_cpu_sgl_kernel(*_: object) -> bool:
        return False

    vllm._custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = check_cpu_sgl_kernel
    logger.info("deltasync keeps CPU linear weights unpacked so that they can be patched in place")
