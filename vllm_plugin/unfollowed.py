"""No answer from an engine that was to follow a channel and that nothing will ever follow.

The driver comes with vLLM's endpoint plugins. An application that makes an `AsyncLLM` without vLLM's own app may load none,
as Ray Serve LLM does by default; its engine would answer for ever with the weights that it was started with.
"""

from __future__ import annotations

import functools
from typing import Any

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError


def refuse() -> None:
    """Have the engines of this process refuse requests until their `deltasync_attached` is set. Again is fine."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if hasattr(AsyncLLM, "deltasync_attached"):
        return
    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.deltasync_attached:
            raise ConfigError(
                f"This engine would never follow {ReplicaSettings.from_env().channel}: its application loads no "
                "endpoint plugin of vLLM. Start it by `vllm serve`; in Ray Serve LLM set "
                "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and RAY_SERVE_ENABLE_HA_PROXY=1."
            )
        return generate(self, *args, **kwargs)

    AsyncLLM.deltasync_attached = False
    AsyncLLM.generate = checked
