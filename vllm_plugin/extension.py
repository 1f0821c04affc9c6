"""`--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`: a worker's RPCs, a thin shell around `WorkerReplica`.

vLLM adds this class to the bases of its worker, never calls its `__init__`, and refuses names that the worker has. So both
RPCs have a prefix, and the state is created on first use.
"""

from __future__ import annotations

import os
from typing import Any, Self

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, NotPublishedError
from deltasync.kernels import segment_kernels
from deltasync.tensors.bits import int_view
from vllm_plugin.load.layers import note_loaded
from vllm_plugin.messages import Answer, answer
from vllm_plugin.worker import WorkerReplica


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. RPCs return plain data, see `vllm_plugin.messages`."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Prepare vLLM's worker while it is created: none of its own classes has a `__new__`.

        Raises:
            ConfigError: a channel is configured that nothing in this server would ever follow.
        """
        channel, worker = ReplicaSettings.from_env().channel, super().__new__(cls)
        if channel is not None:
            _check(channel)
            warm_up_first(worker)
            _note_loaded(worker)
        return worker

    def deltasync_open(self, channel: str, trusted_keys: str | None = None) -> Answer:
        """Record the load plan for the channel's tensors. A second call changes nothing.

        Records are refused unless a key in the file `trusted_keys` has signed them; by default the environment names it.
        The reply is NotPublishedError while the channel has no version.
        """

        def body() -> None:
            if not hasattr(self, "_deltasync_replica"):
                self._deltasync_replica = WorkerReplica(self.model_runner, channel, trusted_keys)
                _hook_sleep(self, self._deltasync_replica)

        return answer(body)

    def deltasync_call(self, method: str, *args: Any) -> Answer:
        """Call a method of the opened `WorkerReplica`, one of `vllm_plugin.worker.CALLS`."""

        def body() -> Any:
            if not hasattr(self, "_deltasync_replica"):
                raise NotPublishedError("nothing is followed yet.")
            return self._deltasync_replica.call(method, *args)

        return answer(body)


def _check(channel: str) -> None:
    """Raise ConfigError for a server that would serve the weights it has loaded for ever, though a channel is configured."""
    if "deltasync" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        raise ConfigError(
            f"This server would never follow {channel}, because VLLM_PLUGINS leaves deltasync out: add it, or leave "
            "VLLM_PLUGINS unset."
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError(
            f"This server would never follow {channel}, because vLLM's Rust frontend loads no endpoint plugin: leave "
            "VLLM_USE_RUST_FRONTEND out."
        )


def warm_up_first(worker: Any) -> None:
    """Make a vLLM worker compile the kernels of commits when it compiles its own, before it serves requests."""
    if not hasattr(worker, "compile_or_warm_up_model"):
        return
    warm_up = worker.compile_or_warm_up_model

    def compile_or_warm_up_model() -> Any:
        parameters = worker.model_runner.get_model().parameters()
        for device, dtype in {(each.device, int_view(each[:0] if each.ndim else each).dtype) for each in parameters}:
            if device.type != "cpu":
                segment_kernels(device).warm_up(device, dtype)
        return warm_up()

    worker.compile_or_warm_up_model = compile_or_warm_up_model


def _note_loaded(worker: Any) -> None:
    """Make a vLLM worker note what loading made beside parameters, before it warms the model up."""
    if not hasattr(worker, "load_model"):
        return
    load_model = worker.load_model

    def noted_load_model(*args: Any, **kwargs: Any) -> None:
        load_model(*args, **kwargs)
        note_loaded(worker.model_runner.get_model())

    worker.load_model = noted_load_model


def _hook_sleep(worker: Any, replica: WorkerReplica) -> None:
    """Make a vLLM worker tell the replica when it sleeps: touching weights then would end the process."""
    if not hasattr(worker, "sleep"):
        return
    sleep, wake_up = worker.sleep, worker.wake_up

    def hooked_sleep(level: int = 1) -> None:
        replica.fall_asleep()
        sleep(level)

    def hooked_wake_up(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or "weights" in tags:
            replica.wake_up()

    worker.sleep, worker.wake_up = hooked_sleep, hooked_wake_up
