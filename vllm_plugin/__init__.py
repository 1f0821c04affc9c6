"""deltasync inside vLLM, by its official extension points only.

    --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension    RPC methods on each worker
    VLLM_PLUGINS=deltasync                                         the driver and the /deltasync/ routes; without it
                                                                   the workers follow by themselves
    DELTASYNC_CHANNEL=file:///data/run                             what to follow
    DELTASYNC_ADAPTER=policy                                       the channel is of an adapter, loaded as runtime LoRA
    --weight-transfer-config '{"backend": "deltasync"}'            or: follow by vLLM's own weight-transfer routes

Without DELTASYNC_CHANNEL nothing of vLLM is touched.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_plugin.extension import DeltaSyncWorkerExtension
    from vllm_plugin.offline import follow

__all__ = ["DeltaSyncWorkerExtension", "follow", "register"]


def register() -> None:
    """vLLM's general-plugin hook, called in every process of a server before the model is loaded; more than once is fine.

    Where deltasync is not configured it only names the backend to vLLM, which imports it when it is chosen.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine("deltasync", "vllm_plugin.backend", "DeltaSyncEngine")
    if not os.environ.get("DELTASYNC_CHANNEL") or os.environ.get("DELTASYNC_ADAPTER"):
        return
    from vllm_plugin.cpu import keep_weights_addressable

    keep_weights_addressable()


def __getattr__(name: str) -> Any:
    if name == "DeltaSyncWorkerExtension":
        from vllm_plugin.extension import DeltaSyncWorkerExtension

        return DeltaSyncWorkerExtension
    if name == "follow":
        from vllm_plugin.offline import follow

        return follow
    raise AttributeError(f"module 'vllm_plugin' has no attribute {name!r}")
