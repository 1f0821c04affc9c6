"""A vLLM worker: `--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension`, whose RPCs call this worker's
shard.

vLLM adds the extension to the bases of its worker, never calls its `__init__`, and refuses names that the
worker has. So both RPCs have a prefix, and the state is created on first use. RPCs run on the thread of the
engine's steps. So long calls run in another thread while tokens are generated, and RPCs only start and poll
them.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError, ModelMismatchError, NotPublishedError, SleepingError
from deltasync.kernels.backend import backend_of
from deltasync.serve import DRAFT, WithDraft, derived, engine, load_plan
from deltasync.serve.mirror import MirroringEngine
from deltasync.serve.shard import Shard
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import dtype_name, int_view
from vllm_plugin import logger
from vllm_plugin.load import layers
from vllm_plugin.load.reload import VllmLayers

# models, and their channels
_followed: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


class WorkerEngine(MirroringEngine):
    """The model that vLLM's model runner has loaded in this worker."""

    loader, log, later = layers.LOADER, logger, layers.LATER

    def __init__(self, runner: Any) -> None:
        self._runner, self.model = runner, runner.get_model()
        derived.note_loaded(self.model)
        self.is_complete = derived.is_complete(self.model)
        self.has_logits = runner.model_config.runner_type == "generate"
        self.dtype = dtype_name(runner.model_config.dtype)
        self.layers = VllmLayers(runner.model_config)

    def take(self, specs: Mapping[str, TensorSpec]) -> None:
        """As `Engine.take`."""
        draft, is_part = layers.draft(self._runner)
        if draft is None:
            super().take(specs)
            return
        derived.note_loaded(draft)
        both = WithDraft(self.model, draft, is_part)
        why = f"the channel has no tensor of it{'' if is_part else f', by names that begin with {DRAFT!r}'}"
        carried = any(name.startswith(DRAFT) for name in specs)
        if is_part:
            try:
                recorded = load_plan.record(both, specs, self.loader)
                carried = any(of & both.drafting for of in recorded.layers.values())
            except ModelMismatchError as error:
                why = str(error)
        if carried:
            self.model, self.is_complete = both, derived.is_complete(both)
            self.draft = f"{type(draft).__name__}, which drafts tokens, is followed as a part of the model."
        else:
            super().take(specs)
            self.draft = f"{type(draft).__name__}, which drafts tokens, keeps the weights that it was loaded with: {why}."

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `Engine.checkpoint`."""
        yield from layers.checkpoint(self._runner)
        if isinstance(self.model, WithDraft) and self.model.draft is not None and not self.model.is_part:
            for name, tensor in layers.draft_checkpoint(self._runner):
                yield DRAFT + name, tensor


def open_shard(runner: Any, channel: str, trusted_keys: str | None = None) -> Shard:
    """Make the shard of one worker, and record its load plan.

    Raises:
        NotPublishedError: the channel has no version yet.
        ModelMismatchError: the model does not match the channel.
        ConfigError: something else changes this model's weights.
    """
    model = runner.get_model()
    if model in _followed:
        raise ConfigError(
            f"Something else in this server follows {_followed[model]} with the same weights; choose one: "
            "the follow loop, the worker extension alone, or vLLM's weight-transfer routes."
        )
    settings, rank, count = ReplicaSettings.from_env(channel=channel, trusted_keys=trusted_keys), 0, None
    if torch.distributed.is_initialized():
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine.limit_threads(os.environ.get("OMP_NUM_THREADS", ""), count)
    reader, before = engine.open_reader(settings, count or 1), time.perf_counter()
    shard = Shard(reader, WorkerEngine(runner), rank)
    shard.record()
    logger.info(
        "deltasync load plan: tensors=%d record_s=%.3f", len(reader.specs), time.perf_counter() - before
    )
    _followed[model] = channel
    return shard


class DeltaSyncWorkerExtension:
    """Mixed into vLLM's worker. RPCs return plain data, see `deltasync.serve.engine.answer`."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Prepare vLLM's worker while it is created: none of its own classes has a `__new__`.

        Raises:
            ConfigError: a channel is configured that nothing in this server would ever follow.
        """
        settings, worker = ReplicaSettings.from_env(), super().__new__(cls)
        if settings.channel is not None:
            _check(settings.channel)
            warm_up_first(worker)
            _note_loaded(worker)
            _hook_sleep(worker)
        return worker

    def deltasync_open(self, channel: str, trusted_keys: str | None = None) -> engine.Answer:
        """Record the load plan for the channel's tensors. A second call changes nothing.

        Records are refused unless a key in the file `trusted_keys` has signed them; by default the
        environment names it. The reply is NotPublishedError while the channel has no version, and
        SleepingError while vLLM sleeps.
        """

        def body() -> None:
            if not hasattr(self, "_deltasync_shard"):
                if getattr(self, "_deltasync_asleep", False):
                    raise SleepingError("vLLM sleeps. Its weights are left alone until it wakes up.")
                self._deltasync_shard = open_shard(self.model_runner, channel, trusted_keys)
                _hook_sleep(self)
                _guard(self, channel)

        return engine.answer(body)

    def deltasync_call(self, method: str, *args: Any) -> engine.Answer:
        """Call a method of the opened shard, one of `deltasync.serve.shard.CALLS`."""

        def body() -> Any:
            if not hasattr(self, "_deltasync_shard"):
                raise NotPublishedError("nothing is followed yet.")
            return self._deltasync_shard.call(method, *args)

        return engine.answer(body)


def _check(channel: str) -> None:
    """Raise ConfigError for a server that would serve the weights it has loaded for ever, though a channel is
    configured.
    """
    if "deltasync" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        raise ConfigError(
            f"This server would never follow {channel}, because VLLM_PLUGINS leaves deltasync out: add it, "
            "or leave "
            "VLLM_PLUGINS unset."
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError(
            f"This server would never follow {channel}, because vLLM's Rust frontend loads no endpoint "
            "plugin: leave "
            "VLLM_USE_RUST_FRONTEND out."
        )


def warm_up_first(worker: Any) -> None:
    """Make a vLLM worker compile the kernels of staging and commits when it compiles its own, before it serves
    requests.
    """
    if not hasattr(worker, "compile_or_warm_up_model"):
        return

    @engine.around(worker, "compile_or_warm_up_model")
    def warm_up_kernels(warm_up: Any) -> Any:
        parameters = worker.model_runner.get_model().parameters()
        for device, dtype in {
            (each.device, int_view(each[:0] if each.ndim else each).dtype) for each in parameters
        }:
            if device.type != "cpu":
                backend_of(device).warm_up(dtype)
        return warm_up()


def _note_loaded(worker: Any) -> None:
    """Make a vLLM worker note what loading made in addition to parameters, before it warms the model up."""
    if hasattr(worker, "load_model"):

        @engine.around(worker, "load_model")
        def note(load_model: Any, *args: Any, **kwargs: Any) -> None:
            load_model(*args, **kwargs)
            for model in (worker.model_runner.get_model(), layers.draft(worker.model_runner)[0]):
                if model is not None:
                    derived.note_loaded(model)


def _hook_sleep(worker: Any) -> None:
    """Make a vLLM worker note that it sleeps, and tell its replica: touching weights then would end the
    process.
    """
    if not hasattr(worker, "sleep") or hasattr(worker, "_deltasync_asleep"):
        return
    worker._deltasync_asleep = False

    @engine.around(worker, "sleep")
    def fall_asleep(sleep: Any, level: int = 1) -> None:
        if opened := getattr(worker, "_deltasync_shard", None):
            opened.fall_asleep()
        worker._deltasync_asleep = True
        sleep(level)

    @engine.around(worker, "wake_up")
    def wake_up(awake: Any, tags: list[str] | None = None) -> None:
        awake(tags)
        if tags is None or "weights" in tags:
            worker._deltasync_asleep = False
            if opened := getattr(worker, "_deltasync_shard", None):
                opened.wake_up()


_LOADS = ("load_model", "reload_weights", "reset_weights", "start_weight_update", "update_weights")


def _guard(worker: Any, channel: str) -> None:
    """Make a worker refuse to load other weights than the channel's, and check where its weights are before
    each step.
    """
    runner = worker.model_runner
    models = [(model, ("load_weights",)) for model in (runner.get_model(), layers.draft(runner)[0])]
    for owner, names in ((worker, _LOADS), (runner, _LOADS), *models):
        for name in names:
            if hasattr(owner, name):
                vars(owner)[name] = _refusing(name, channel)
    if hasattr(worker, "execute_model"):

        @engine.around(worker, "execute_model")
        def put_back(execute_model: Any, *args: Any, **kwargs: Any) -> Any:
            worker._deltasync_shard.put_back()
            return execute_model(*args, **kwargs)


def _refusing(name: str, channel: str) -> Callable[..., None]:
    """Return a method that loads nothing. Only the last worker raises, see
    `vllm_plugin.backend._HiddenError`.
    """

    def refuse(*_: Any, **__: Any) -> None:
        said = f"{name} would load weights that are not those of {channel}, which this server follows. Nothing was loaded."
        logger.error("deltasync: %s", said)
        if (
            not torch.distributed.is_initialized()
            or torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        ):
            raise ConfigError(said)

    vars(refuse)["deltasync_refuses"] = True
    return refuse
