"""`--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`: the RPCs of a worker, a thin shell around `WorkerReplica`.

vLLM adds this class to the bases of its worker, never calls its `__init__`, and refuses any name that the worker has; so
there are two, prefixed, and the state is made on first use.
"""

from __future__ import annotations

from typing import Any, Self

from vllm_plugin import alone, sleep
from vllm_plugin.worker import Reply, WorkerReplica, reply


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. Each method returns a plain dict, with `error` if it failed."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Creating vLLM's worker comes through here, because none of its own classes has a `__new__`."""
        worker = super().__new__(cls)
        if alone.wanted() and hasattr(cls, "compile_or_warm_up_model"):
            alone.attach(worker)
        return worker

    def deltasync_open(self, channel: str, trusted_keys: str | None = None) -> Reply:
        """Record the load plan for the channel's tensors; a second call changes nothing.

        What no key in the file `trusted_keys` has signed is refused; by default the environment names the file.

        `{"error": "NotPublishedError: ..."}` while the channel has no version.
        """
        if hasattr(self, "_deltasync_alone"):
            return {
                "error": "ConfigError: These workers follow DELTASYNC_CHANNEL by themselves. To drive them, start vLLM with "
                "VLLM_PLUGINS=deltasync."
            }

        def body() -> Reply:
            if not hasattr(self, "_deltasync_replica"):
                self._deltasync_replica = WorkerReplica(self.model_runner, channel, trusted_keys)
                sleep.tell(self, self._deltasync_replica)
            return {}

        return reply(body)

    def deltasync_call(self, method: str, *args: Any) -> Reply:
        """Call a method of the opened `WorkerReplica`; `commit`, `confirm` and `undo` only while generation is paused."""
        if hasattr(self, "_deltasync_alone"):
            return self._deltasync_alone.read(method, *args)
        if not hasattr(self, "_deltasync_replica"):
            return {"error": "NotPublishedError: nothing is followed yet."}
        return reply(lambda: getattr(self._deltasync_replica, method)(*args))
