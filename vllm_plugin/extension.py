"""`--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`: the RPCs of a worker, a thin shell around `WorkerReplica`.

vLLM adds this class to the bases of its worker, never calls its `__init__`, and refuses any name that the worker has; so
there are two, prefixed, and the state is made on first use.
"""

from __future__ import annotations

from typing import Any

from vllm_plugin.worker import Reply, WorkerReplica, reply


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. Each method returns a plain dict, with `error` if it failed."""

    model_runner: Any

    def deltasync_open(self, channel: str) -> Reply:
        """Record the load plan for the channel's tensors; a second call changes nothing.

        `{"error": "NotPublishedError: ..."}` while the channel has no version.
        """

        def body() -> Reply:
            if not hasattr(self, "_deltasync_replica"):
                self._deltasync_replica = WorkerReplica(self.model_runner, channel)
            return {}

        return reply(body)

    def deltasync_call(self, method: str, *args: Any) -> Reply:
        """Call a method of the opened `WorkerReplica`; `commit`, `confirm` and `undo` only while generation is paused."""
        if not hasattr(self, "_deltasync_replica"):
            return {"error": "NotPublishedError: nothing is followed yet."}
        return reply(lambda: getattr(self._deltasync_replica, method)(*args))
