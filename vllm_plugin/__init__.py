"""deltasync inside vLLM.

    DELTASYNC_CHANNEL=s3://bucket/run vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension

The server then follows the channel, reports under /deltasync/ and /metrics, and keeps its caches apart by
version. Without DELTASYNC_CHANNEL nothing in vLLM is changed. Two other ways, for other purposes:

    DELTASYNC_ADAPTER=policy                               load the channel's adapter as runtime LoRA
    --weight-transfer-config '{"backend": "deltasync"}'    let a trainer push through vLLM's own
    weight-transfer routes
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
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

EXTENSION = "vllm_plugin.DeltaSyncWorkerExtension"

_LOADED_BY_DEFAULT = ("general", "io_processor", "platform", "stat_logger")
"""Kinds of plugins that vLLM loads unless VLLM_PLUGINS is set and does not name them."""


def register() -> None:
    """Prepare this process for following. vLLM's general-plugin hook: called in every process before the
    model is loaded.

    May be called more than once. A server that cannot be prepared starts without following, and says so.
    Where deltasync is not configured, it only names the weight-transfer backend to vLLM, which imports it
    when it is chosen.

    Raises:
        ConfigError: a variable is misspelt or cannot be used. A command of vLLM's ends with this sentence
            instead.
    """
    from deltasync.serve import startup

    try:
        _register()
    except ConfigError as error:
        if startup.is_command("vllm"):
            startup.leave(error)
        raise
    except Exception:
        logger.exception("deltasync could not prepare this process; its server will not follow")


def _register() -> None:
    from deltasync.serve import startup

    follows = startup.is_to_follow(alone=startup.is_command("vllm"))
    if not follows and startup.runs_extension(sys.argv, EXTENSION):
        raise ConfigError(
            f"{startup.CHANNEL} is not set, but this command names {EXTENSION}: such a server would serve "
            "the weights that "
            "it loads for ever. Set it to the channel's URL, or leave the extension out."
        )
    import vllm
    from vllm.distributed import weight_transfer

    with contextlib.suppress(ValueError):  # registered already
        weight_transfer.WeightTransferEngineFactory.register_engine(
            "deltasync", "vllm_plugin.backend", "DeltaSyncEngine"
        )
        weight_transfer.WeightTransferTrainerFactory.register_engine(
            "deltasync", "vllm_plugin.trainer_side", "DeltaSyncTrainerEngine"
        )
    if not follows:
        return
    opt_in(os.environ)
    from vllm_plugin import compat

    _refuse_unfollowed()
    if compat.outside(vllm.__version__) is not None:
        return
    if os.environ.get("DELTASYNC_ADAPTER"):
        from vllm_plugin import adapter_files

        adapter_files.install()
        return
    from vllm_plugin import engine, salt
    from vllm_plugin.load.layers import keep_weights_addressable, note_models

    note_models()
    keep_weights_addressable()
    salt.install()
    engine.install()


def opt_in(environ: MutableMapping[str, str]) -> None:
    """Set VLLM_PLUGINS in this environment, unless it is set, so that vLLM loads our endpoint plugin.

    vLLM loads endpoint plugins only if VLLM_PLUGINS names them. The other plugins that it loads by default
    are named too. Processes that this one starts inherit the variable.
    """
    if "VLLM_PLUGINS" not in environ:
        names = {
            plugin.name
            for kind in _LOADED_BY_DEFAULT
            for plugin in entry_points(group=f"vllm.{kind}_plugins")
        }
        environ["VLLM_PLUGINS"] = ",".join(sorted(names | {"deltasync"}))


def _refuse_unfollowed() -> None:
    """Make vLLM's engines refuse requests for the reason that their `deltasync_refusal` returns, None if
    there is none.

    At first it is that nothing follows. The follow loop comes with vLLM's endpoint plugins, of which an
    application that makes an `AsyncLLM` by itself may load none, as Ray Serve LLM does by default; or with
    `follow`, for an `LLM`. Without it the engine would serve the weights it started with for ever.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    if hasattr(AsyncLLM, "deltasync_refusal"):
        return
    _refuse(
        AsyncLLM,
        ("generate", "encode"),
        "its application loads no endpoint plugin of vLLM. Start it by `vllm serve`; in Ray Serve LLM set "
        "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and RAY_SERVE_ENABLE_HA_PROXY=1.",
    )
    _refuse(
        LLMEngine,
        ("add_request",),
        "nothing has called vllm_plugin.follow(llm, URL). Do so before it generates, or leave "
        "DELTASYNC_CHANNEL out.",
    )


def _refuse(engine_class: Any, methods: tuple[str, ...], why: str) -> None:
    """Have methods of an engine raise ConfigError where its `deltasync_refusal` returns a reason, at first
    that of `why`.
    """
    from deltasync.serve.engine import around
    from vllm_plugin.engine import is_pushed

    def checked(method: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_pushed(self) and (reason := self.deltasync_refusal()) is not None:
            raise ConfigError(reason)
        return method(self, *args, **kwargs)

    engine_class.deltasync_refusal = staticmethod(
        lambda: f"This engine would never follow {os.environ.get('DELTASYNC_CHANNEL')}: {why}"
    )
    for name in methods:
        around(engine_class, name)(checked)


def __getattr__(name: str) -> Any:
    module = {"DeltaSyncWorkerExtension": "worker", "follow": "offline"}.get(name)
    if module is None:
        raise AttributeError(f"module 'vllm_plugin' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vllm_plugin.{module}"), name)
