"""`--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`: the RPCs of a worker, a thin shell around `WorkerReplica`.

vLLM adds this class to the bases of its worker, never calls its `__init__`, and refuses any name that the worker has; so
there are two, prefixed, and the state is made on first use.
"""

from __future__ import annotations

import os
from typing import Any, Self

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError
from vllm_plugin import sleep
from vllm_plugin.worker import Reply, WorkerReplica, reply, warm_up_first


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. Each method returns a plain dict, with `error` if it failed."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Creating vLLM's worker comes through here, because none of its own classes has a `__new__`.

        Raises:
            ConfigError: a channel is configured, and nothing in this server would ever follow it.
        """
        _check(os.environ)
        worker = super().__new__(cls)
        if ReplicaSettings.from_env().channel is not None:
            warm_up_first(worker)
        return worker

    def deltasync_open(self, channel: str, trusted_keys: str | None = None) -> Reply:
        """Record the load plan for the channel's tensors; a second call changes nothing.

        What no key in the file `trusted_keys` has signed is refused; by default the environment names the file.

        `{"error": "NotPublishedError: ..."}` while the channel has no version.
        """

        def body() -> Reply:
            if not hasattr(self, "_deltasync_replica"):
                self._deltasync_replica = WorkerReplica(self.model_runner, channel, trusted_keys)
                sleep.tell(self, self._deltasync_replica)
            return {}

        return reply(body)

    def deltasync_call(self, method: str, *args: Any) -> Reply:
        """Call a method of the opened `WorkerReplica`; `commit`, `confirm` and `undo` only while generation is paused."""
        if not hasattr(self, "_deltasync_replica"):
            return {"error": "NotPublishedError: nothing is followed yet."}
        return reply(lambda: getattr(self._deltasync_replica, method)(*args))


def _check(environ: Any) -> None:
    """End the start of a server that would serve for ever what it has loaded, though a channel is configured."""
    settings = ReplicaSettings.from_env()
    if settings.channel is None:
        return
    if "deltasync" not in environ.get("VLLM_PLUGINS", "").split(","):
        raise ConfigError(
            f"This server would never follow {settings.channel}, because VLLM_PLUGINS leaves deltasync out: add it, or "
            "leave VLLM_PLUGINS unset."
        )
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError(
            f"This server would never follow {settings.channel}, because vLLM's Rust frontend loads no endpoint plugin: "
            "leave VLLM_USE_RUST_FRONTEND out."
        )
