"""`--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`: the RPCs of a worker, a thin shell around `WorkerReplica`.

vLLM adds this class to the bases of its worker, never calls its `__init__`, and refuses any name that the worker has; so
there are two, prefixed, and the state is made on first use.
"""

from __future__ import annotations

import os
from typing import Any, Self

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, NotPublishedError
from deltasync.kernels import segment_kernels
from deltasync.tensors.bits import int_view
from vllm_plugin.messages import Answer, answer
from vllm_plugin.worker import WorkerReplica


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. Each method returns plain data, see `vllm_plugin.messages`."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Creating vLLM's worker comes through here, because none of its own classes has a `__new__`.

        Raises:
            ConfigError: a channel is configured, and nothing in this server would ever follow it.
        """
        channel, worker = ReplicaSettings.from_env().channel, super().__new__(cls)
        if channel is not None:
            _check(channel)
            warm_up_first(worker)
        return worker

    def deltasync_open(self, channel: str, trusted_keys: str | None = None) -> Answer:
        """Record the load plan for the channel's tensors; a second call changes nothing.

        What no key in the file `trusted_keys` has signed is refused; by default the environment names the file.
        NotPublishedError while the channel has no version.
        """

        def body() -> None:
            if not hasattr(self, "_deltasync_replica"):
                self._deltasync_replica = WorkerReplica(self.model_runner, channel, trusted_keys)
                _tell_of_sleep(self, self._deltasync_replica)

        return answer(body)

    def deltasync_call(self, method: str, *args: Any) -> Answer:
        """Call a method of the opened `WorkerReplica`, one of `vllm_plugin.worker.CALLS`."""

        def body() -> Any:
            if not hasattr(self, "_deltasync_replica"):
                raise NotPublishedError("nothing is followed yet.")
            return self._deltasync_replica.call(method, *args)

        return answer(body)


def _check(channel: str) -> None:
    """End the start of a server that would serve for ever what it has loaded, though a channel is configured."""
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
    """Have a vLLM worker compile the kernels of commits before it serves, with its own, and not beside requests."""
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


def _tell_of_sleep(worker: Any, replica: WorkerReplica) -> None:
    """Tell a replica of the sleep of a vLLM worker, which has no hook for that: touching weights then ends its process."""
    if not hasattr(worker, "sleep"):
        return
    sleep, wake_up = worker.sleep, worker.wake_up

    def told_sleep(level: int = 1) -> None:
        replica.fall_asleep()
        sleep(level)

    def told_wake_up(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or "weights" in tags:
            replica.wake_up()

    worker.sleep, worker.wake_up = told_sleep, told_wake_up
