"""deltasync inside vLLM.

    DELTASYNC_CHANNEL=s3://bucket/run vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension

The server then follows the channel, reports under /deltasync/ and /metrics, and keeps its caches apart by version.
Without DELTASYNC_CHANNEL nothing in vLLM is changed. Two other ways, for other purposes:

    DELTASYNC_ADAPTER=policy                               load the channel's adapter as runtime LoRA
    --weight-transfer-config '{"backend": "deltasync"}'    let a trainer push through vLLM's own weight-transfer routes
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import MutableMapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from deltasync.errors import ConfigError, get_logger

if TYPE_CHECKING:
    from vllm_plugin.offline import follow
    from vllm_plugin.worker import DeltaSyncWorkerExtension

__all__ = ["DeltaSyncWorkerExtension", "follow", "register"]

logger = get_logger("vllm.vllm_plugin")
"""The plugin's only logger. It is below vLLM's own, whose handlers and level it shares."""

_LOADED_BY_DEFAULT = ("general", "io_processor", "platform", "stat_logger")
"""Kinds of plugins that vLLM loads unless VLLM_PLUGINS is set and does not name them."""


def register() -> None:
    """Prepare this process for following. vLLM's general-plugin hook: called in every process before the model is loaded.

    May be called more than once, and never raises: a server that cannot be prepared starts without following, and says so.
    Where deltasync is not configured, it only names the weight-transfer backend to vLLM, which imports it when it is chosen.
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
        if trainers := getattr(weight_transfer, "WeightTransferTrainerFactory", None):  # missing in older versions
            trainers.register_engine("deltasync", "vllm_plugin.trainer_side", "DeltaSyncTrainerEngine")
    if not os.environ.get("DELTASYNC_CHANNEL"):
        return
    opt_in(os.environ)
    from vllm_plugin import compat

    _refuse_unfollowed()
    if os.environ.get("DELTASYNC_ADAPTER") or compat.outside(vllm.__version__) is not None:
        return
    from vllm_plugin import engine, salt
    from vllm_plugin.load.layers import keep_weights_addressable, note_models

    note_models()
    keep_weights_addressable()
    salt.install()
    engine.install()


def opt_in(environ: MutableMapping[str, str]) -> None:
    """Set VLLM_PLUGINS in this environment, unless it is set, so that vLLM loads our endpoint plugin.

    vLLM loads endpoint plugins only if VLLM_PLUGINS names them. The other plugins that it loads by default are named too.
    Processes that this one starts inherit the variable.
    """
    if "VLLM_PLUGINS" not in environ:
        names = {plugin.name for kind in _LOADED_BY_DEFAULT for plugin in entry_points(group=f"vllm.{kind}_plugins")}
        environ["VLLM_PLUGINS"] = ",".join(sorted(names | {"deltasync"}))


def _refuse_unfollowed() -> None:
    """Make vLLM's engines refuse requests until their `deltasync_attached` is set.

    The follow loop comes with vLLM's endpoint plugins. An application that makes an `AsyncLLM` without vLLM's own app may
    load none, as Ray Serve LLM does by default. Its engine would serve the weights it started with for ever.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    if hasattr(AsyncLLM, "deltasync_attached"):
        return

    def checked(method: Any) -> Any:
        @functools.wraps(method)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.deltasync_attached:
                raise ConfigError(
                    f"This engine would never follow {os.environ.get('DELTASYNC_CHANNEL')}: its application loads no "
                    "endpoint plugin of vLLM. Start it by `vllm serve`; in Ray Serve LLM set "
                    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and RAY_SERVE_ENABLE_HA_PROXY=1."
                )
            return method(self, *args, **kwargs)

        return wrapped

    AsyncLLM.deltasync_attached = False
    AsyncLLM.generate, AsyncLLM.encode = checked(AsyncLLM.generate), checked(AsyncLLM.encode)


def __getattr__(name: str) -> Any:
    module = {"DeltaSyncWorkerExtension": "worker", "follow": "offline"}.get(name)
    if module is None:
        raise AttributeError(f"module 'vllm_plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm_plugin.{module}"), name)
