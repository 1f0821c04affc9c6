"""`--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`: a worker's RPCs, a thin shell around `WorkerShard`.

vLLM adds this class to the bases of its worker, never calls its `__init__`, and refuses names that the worker has. So both
RPCs have a prefix, and the state is created on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import torch

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, NotPublishedError, SleepingError
from deltasync.following.engine import compile_while_loading
from deltasync.kernels import segment_kernels
from deltasync.live.derived import note_loaded
from deltasync.tensors.bits import int_view
from vllm_plugin import logger
from vllm_plugin.messages import Answer, answer
from vllm_plugin.worker import WorkerShard


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. RPCs return plain data, see `vllm_plugin.messages`."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Prepare vLLM's worker while it is created: none of its own classes has a `__new__`.

        Raises:
            ConfigError: a channel is configured that nothing in this server would ever follow.
        """
        settings, worker = ReplicaSettings.from_env(), super().__new__(cls)
        if settings.channel is not None:
            _check(settings.channel)
            if not kwargs.get("local_rank"):  # the others then find what this one has compiled
                compile_while_loading(settings, on_host=not torch.accelerator.is_available())
            warm_up_first(worker)
            _note_loaded(worker)
            _hook_sleep(worker)
        return worker

    def deltasync_open(self, channel: str, trusted_keys: str | None = None) -> Answer:
        """Record the load plan for the channel's tensors. A second call changes nothing.

        Records are refused unless a key in the file `trusted_keys` has signed them; by default the environment names it.
        The reply is NotPublishedError while the channel has no version, and SleepingError while vLLM sleeps.
        """

        def body() -> None:
            if not hasattr(self, "_deltasync_shard"):
                if getattr(self, "_deltasync_asleep", False):
                    raise SleepingError("vLLM sleeps. Its weights are left alone until it wakes up.")
                self._deltasync_shard = WorkerShard(self.model_runner, channel, trusted_keys)
                _hook_sleep(self)
                _guard(self, channel)

        return answer(body)

    def deltasync_call(self, method: str, *args: Any) -> Answer:
        """Call a method of the opened shard, one of `vllm_plugin.worker.CALLS`."""

        def body() -> Any:
            if not hasattr(self, "_deltasync_shard"):
                raise NotPublishedError("nothing is followed yet.")
            return self._deltasync_shard.call(method, *args)

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
    """Make a vLLM worker note what loading made in addition to parameters, before it warms the model up."""
    if (load_model := getattr(worker, "load_model", None)) is not None:

        def noted_load_model(*args: Any, **kwargs: Any) -> None:
            load_model(*args, **kwargs)
            note_loaded(worker.model_runner.get_model())

        worker.load_model = noted_load_model


def _hook_sleep(worker: Any) -> None:
    """Make a vLLM worker note that it sleeps, and tell its replica: touching weights then would end the process."""
    if not hasattr(worker, "sleep") or hasattr(worker, "_deltasync_asleep"):
        return
    sleep, wake_up = worker.sleep, worker.wake_up

    def hooked_sleep(level: int = 1) -> None:
        if opened := getattr(worker, "_deltasync_shard", None):
            opened.fall_asleep()
        worker._deltasync_asleep = True
        sleep(level)

    def hooked_wake_up(tags: list[str] | None = None) -> None:
        wake_up(tags)
        if tags is None or "weights" in tags:
            worker._deltasync_asleep = False
            if opened := getattr(worker, "_deltasync_shard", None):
                opened.shard.wake_up()

    worker.sleep, worker.wake_up, worker._deltasync_asleep = hooked_sleep, hooked_wake_up, False


_LOADS = ("load_model", "reload_weights", "reset_weights", "start_weight_update", "update_weights")


def _guard(worker: Any, channel: str) -> None:
    """Make a worker refuse to load other weights than the channel's, and check where its weights are before each step."""
    runner = worker.model_runner
    for owner, names in ((worker, _LOADS), (runner, _LOADS), (runner.get_model(), ("load_weights",))):
        for name in names:
            if hasattr(owner, name):
                vars(owner)[name] = _refusing(name, channel)
    if hasattr(worker, "execute_model"):
        execute_model = worker.execute_model

        def checked_execute_model(*args: Any, **kwargs: Any) -> Any:
            worker._deltasync_shard.shard.put_back()
            return execute_model(*args, **kwargs)

        worker.execute_model = checked_execute_model


def _refusing(name: str, channel: str) -> Callable[..., None]:
    """Return a method that loads nothing. Only the last worker raises, see `vllm_plugin.backend._SilentError`."""

    def refuse(*_: Any, **__: Any) -> None:
        said = f"{name} would load weights that are not those of {channel}, which this server follows. Nothing was loaded."
        logger.error("deltasync: %s", said)
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            raise ConfigError(said)

    vars(refuse)["deltasync_refuses"] = True
    return refuse
