"""deltasync inside vLLM.

    DELTASYNC_CHANNEL=s3://bucket/run vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension

is all there is to type: the server follows the channel, tells so under /deltasync/ and /metrics, and keeps its prefix cache
apart by version. Without DELTASYNC_CHANNEL nothing of vLLM is touched. Two other ways, for other purposes:

    DELTASYNC_ADAPTER=policy                                       the channel is of an adapter, loaded as runtime LoRA
    --weight-transfer-config '{"backend": "deltasync"}'            a trainer pushes by vLLM's own weight-transfer routes
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import MutableMapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from deltasync.errors import ConfigError
from vllm_plugin.log import logger

if TYPE_CHECKING:
    from vllm_plugin.extension import DeltaSyncWorkerExtension
    from vllm_plugin.offline import follow

__all__ = ["DeltaSyncWorkerExtension", "follow", "register"]

_LOADED_UNASKED = ("general", "io_processor", "platform", "stat_logger")
"""Kinds of plugins that vLLM loads unless VLLM_PLUGINS is set and does not name them."""


def register() -> None:
    """vLLM's general-plugin hook, called in every process of a server before the model is loaded; more than once is fine.

    Where deltasync is not configured it only names the backend to vLLM, which imports it when it is chosen. It never raises:
    a server that cannot be prepared for following starts without, and says so.
    """
    try:
        _register()
    except Exception:
        logger.exception("deltasync could not prepare this process; its server will not follow")


def _register() -> None:
    import vllm
    from vllm.distributed import weight_transfer

    with contextlib.suppress(ValueError):  # registered already
        weight_transfer.WeightTransferEngineFactory.register_engine("deltasync", "vllm_plugin.backend", "DeltaSyncEngine")
        if trainers := getattr(weight_transfer, "WeightTransferTrainerFactory", None):  # older ones have none
            trainers.register_engine("deltasync", "vllm_plugin.trainer_side", "DeltaSyncTrainerEngine")
    if not os.environ.get("DELTASYNC_CHANNEL"):
        return
    opt_in(os.environ)
    from vllm_plugin import compat

    _refuse_unfollowed()
    if os.environ.get("DELTASYNC_ADAPTER") or compat.outside(vllm.__version__) is not None:
        return
    from vllm_plugin import salt
    from vllm_plugin.load.layers import keep_weights_addressable

    keep_weights_addressable()
    salt.install()


def opt_in(environ: MutableMapping[str, str]) -> None:
    """Have vLLM load our endpoint plugin, as it does only for those that VLLM_PLUGINS names, and all that it loads anyway.

    Changes the environment, which the processes that this one starts inherit, unless it names plugins already.
    """
    if "VLLM_PLUGINS" not in environ:
        names = {plugin.name for kind in _LOADED_UNASKED for plugin in entry_points(group=f"vllm.{kind}_plugins")}
        environ["VLLM_PLUGINS"] = ",".join(sorted(names | {"deltasync"}))


def _refuse_unfollowed() -> None:
    """Have the engines of this process refuse requests until their `deltasync_attached` is set. Again is fine.

    The driver comes with vLLM's endpoint plugins. An application that makes an `AsyncLLM` without vLLM's own app may load
    none, as Ray Serve LLM does by default; its engine would answer for ever with the weights that it was started with.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    if hasattr(AsyncLLM, "deltasync_attached"):
        return
    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.deltasync_attached:
            raise ConfigError(
                f"This engine would never follow {os.environ.get('DELTASYNC_CHANNEL')}: its application loads no endpoint "
                "plugin of vLLM. Start it by `vllm serve`; in Ray Serve LLM set "
                "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and RAY_SERVE_ENABLE_HA_PROXY=1."
            )
        return generate(self, *args, **kwargs)

    AsyncLLM.deltasync_attached = False
    AsyncLLM.generate = checked


def __getattr__(name: str) -> Any:
    module = {"DeltaSyncWorkerExtension": "extension", "follow": "offline"}.get(name)
    if module is None:
        raise AttributeError(f"module 'vllm_plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm_plugin.{module}"), name)
