"""The callback: what a user of transformers or TRL adds to the trainer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from deltasync.config import TrainerSettings
from deltasync.errors import ConfigError, ModelMismatchError
from trl_callback import adapter, compat, gather, ranks, server
from trl_callback.config import DeltaSyncConfig
from trl_callback.record import VersionRecord
from trl_callback.weight_transfer import DeltaWeightTransfer

logger = logging.getLogger(__name__)

_STATE = "deltasync"
"""Where the trainer's state names the run, in its `stateful_callbacks`. Not by transformers' `ExportableState`: with that, a
checkpoint from before the callback was added cannot be resumed and saved, and restoring a callback makes another one."""


class DeltaSyncCallback(TrainerCallback):
    """A [`~transformers.TrainerCallback`] that publishes the weights to a deltasync channel, as the bits that changed.

    It must be among the `callbacks` of the trainer's constructor. What it does depends on the trainer:

    - `AsyncGRPOTrainer`, `AsyncDistillationTrainer`: it replaces the transfer by NCCL. TRL decides when weights are synced,
      and goes on while replicas serve a version that is at most `max_behind` behind. `AsyncGRPOTrainer` stamps samples with
      the version of their oldest trained token, `AsyncDistillationTrainer` with the version that is served.
    - `GRPOTrainer`, `RLOOTrainer` and others with `vllm_mode="server"`: it publishes the weights when TRL pushes them to the
      server, and training goes on once the replicas serve them. Neither side needs CUDA, and the trainer needs no vLLM.
    - Any other trainer: it publishes the initial weights, those after every `publish_steps` optimizer steps and the final
      ones. It does not wait for replicas, and for uploads only at the end of training: while an upload lasts, newer weights
      join the version that waits.

    Before training, it refuses a trainer that would sync its weights in another way, and one that compares the server's log
    probabilities with its own, if the server does not say that they are those of the distribution sampled from.

    A PEFT model is published by its merged weights, or with `adapter_only` by its adapter. If FSDP2 or DeepSpeed's ZeRO-3
    shards the model, each process publishes what it holds, and nothing is gathered; FSDP1 is refused. A trainer that resumes
    from a checkpoint continues the run that it wrote; any other used channel is refused, unless `resume` is set. The
    trainer's logs say under `delta_sync/` what is published and what the replicas serve.

    Args:
        channel (`str` or [`DeltaSyncConfig`]):
            URL of the channel, or all settings.
        **settings:
            Other fields of [`DeltaSyncConfig`].

    Raises:
        ConfigError: a setting is wrong.

    Example:
    ```python
    >>> trainer = AsyncGRPOTrainer(..., callbacks=[DeltaSyncCallback("s3://bucket/run")])
    >>> trainer = GRPOTrainer(..., callbacks=[DeltaSyncCallback("s3://bucket/run")])
    >>> trainer = SFTTrainer(..., callbacks=[DeltaSyncCallback("file:///data/run", publish_steps=10)])
    ```
    """

    def __init__(self, channel: str | DeltaSyncConfig, **settings: Any) -> None:
        known = {field.name for field in dataclasses.fields(DeltaSyncConfig)} - {"channel"}
        if unknown := settings.keys() - known:
            raise ConfigError(f"Unknown setting: {', '.join(sorted(unknown))}. Known ones: {', '.join(sorted(known))}.")
        config = channel if isinstance(channel, DeltaSyncConfig) else DeltaSyncConfig(channel)
        self.config = dataclasses.replace(config, **settings)
        self._transfer = DeltaWeightTransfer(self.config)
        self._publishes = True  # at the end of steps; known once training starts. Otherwise TRL asks for it.
        self._restore: Callable[[], None] | None = None
        self._metrics, self._last = _Metrics(self._transfer), _Last(self.finish)
        self._adapter: tuple[str, dict[str, Any]] | None = None  # which one is published
        self._problem: Exception | None = None  # why nothing more is published

    @property
    def weight_transfer(self) -> DeltaWeightTransfer:
        """The transfer that syncs the weights of `AsyncGRPOTrainer` and `AsyncDistillationTrainer`.

        The callback alone is enough. To be explicit, pass `weight_transfer=sync.weight_transfer` beside `callbacks=[sync]`.
        """
        return self._transfer

    @property
    def history(self) -> list[VersionRecord]:
        """The published versions, one record for each; empty in other processes than the main one."""
        return self._transfer.history

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse a model that cannot be published; replace what TRL sends weights to a vLLM server by."""
        if compat.generates_on_server(args):
            self._check_merged()
            self._transfer.bind(model, kwargs.get("processing_class"))  # it may generate before it trains, to evaluate
            self._replace_client(args, model)
        elif compat.streams_weights(args):
            self._check_merged()
            self._restore = compat.replace_transfer(self._transfer)
        gather.check_form_of(model, self.config.adapter_only)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Learn the model and the run, before TRL opens the transfer; publish the initial weights.

        What fails in one process is raised in all, with its rank.
        """
        ranks.in_all_processes(lambda: self._prepare(args, state, model, kwargs))
        together = gather.is_sharded(model)

        def begin() -> None:
            self._transfer.open(together=together)
            if self._publishes:
                self._publish(model)

        if together:
            begin()
        else:
            ranks.check_replicas(model)
            ranks.in_all_processes(begin if state.is_world_process_zero else lambda: None)

    def _prepare(self, args: Any, state: TrainerState, model: Any, more: dict[str, Any]) -> None:
        """Do what needs no other process before the channel is opened."""
        if state.is_hyper_param_search:
            raise ConfigError(
                "A hyperparameter search trains one model after the other, and a channel is one run. Search without the "
                "callback, trainer.remove_callback(DeltaSyncCallback), and give it to the trainer of the best one."
            )
        self._adapter = self._problem = None
        number = 1 + compat.callbacks(DeltaSyncCallback).index(self)
        self._metrics.prefix = "delta_sync/" if number == 1 else f"delta_sync_{number}/"
        compat.add_around(self._metrics, self._last)
        transfer = self._transfer
        transfer.step = state.global_step
        transfer.bind(model, more.get("processing_class"))
        transfer.run_ids |= {*state.stateful_callbacks.get(_STATE, {}).get("run_ids", [])}
        self._check_replaced(args, state.is_world_process_zero, model)
        if not self._publishes and number > 1:
            raise ConfigError("This trainer syncs its weights by itself, through one DeltaSyncCallback. Give it one.")
        if not compat.follow_tokens(transfer.ages, more.get("train_dataloader")) and self.config.max_token_lag is not None:
            raise ConfigError(
                "max_token_lag is for AsyncGRPOTrainer by TRL's own rollout worker, which reads the versions of tokens from "
                f"replies, in TRL {compat.WITH_TOKEN_VERSIONS}; this trainer cannot bound them. Leave it out."
            )
        gather.check_form_of(model, self.config.adapter_only)
        if not self._publishes:
            compat.replace_stream(transfer.publish_shards if gather.is_sharded(model) else lambda: None)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any) -> None:
        """Publish every `publish_steps` steps, if the store keeps up, and the last one. TRL's own sync comes after this."""
        transfer = self._transfer
        transfer.step = state.global_step
        if transfer.publisher is None:
            return
        if self._publishes:
            # The final weights are published now, too, as no logs follow `on_train_end`.
            is_due = state.global_step % self.config.publish_steps == 0
            if control.should_training_stop or (is_due and not transfer.is_behind()):
                self._publish(model)
        if transfer.publisher.run_id is not None:
            known = state.stateful_callbacks.setdefault(_STATE, {}).setdefault("run_ids", [])
            known += [] if transfer.publisher.run_id in known else [transfer.publisher.run_id]

    def finish(self, state: TrainerState, model: Any) -> None:
        """Publish the final weights, which other callbacks may have changed until now, and wait for the uploads.

        Raises:
            PublishError: the last version did not become visible.
        """
        transfer = self._transfer
        if transfer.publisher is None:
            return
        self._publish(model, if_changed=transfer.published_step == state.global_step)
        transfer.flush()
        if self._problem is not None:
            logger.error("The last published weights are those of step %s. %s", transfer.published_step, self._problem)

    def _check_merged(self) -> None:
        if self.config.adapter_only:
            raise ConfigError(
                "adapter_only=True is for trainers that leave publishing to the callback; this one streams merged weights. "
                "Leave adapter_only out."
            )

    def _replace_client(self, args: Any, model: Any) -> None:
        """Have TRL's client of a vLLM server publish the weights."""
        if self.config.ack == "none":
            raise ConfigError(
                'This trainer is on-policy: it must wait until replicas serve the new weights, so ack="none" is not for it. '
                "Use AsyncGRPOTrainer, which generates with older weights meanwhile."
            )
        if behind := TrainerSettings.from_env(max_behind=self.config.max_behind).max_behind:
            raise ConfigError(
                f"This trainer is on-policy: replicas must serve the new weights before it goes on, so max_behind={behind} "
                "is not for it. Leave it out, or use AsyncGRPOTrainer."
            )
        self._transfer.on_policy = True
        check = functools.partial(
            server.check,
            args,
            model,
            compares=compat.compares_logprobs(args),
            name=None,
            wait_s=args.vllm_server_timeout,
        )
        self._restore = compat.replace_client(functools.partial(client_class, self._transfer, check))

    def _check_replaced(self, args: Any, is_main: bool, model: Any) -> None:
        """Find out who publishes, and check that TRL sends the weights nowhere else."""
        transfer = self._transfer
        if self._restore is not None:
            self._restore()
        on_server, streams = compat.generates_on_server(args), compat.streams_weights(args)
        self._publishes = not (on_server or streams)
        if on_server and self._restore is None:
            raise ConfigError(
                "This trainer was made without DeltaSyncCallback, and pushes its weights to its vLLM server by itself: give "
                "the callback to its constructor, callbacks=[DeltaSyncCallback(url)]."
            )
        if on_server and is_main and transfer.server_url is None:
            raise ConfigError(
                "This trainer has a client of its own for its vLLM server, which DeltaSyncCallback cannot replace. Use "
                "GRPOTrainer, RLOOTrainer or AsyncGRPOTrainer."
            )
        if streams:
            self._check_merged()
            compat.check_transfer(transfer, is_main)
            compat.replace_version(transfer.update_served)
            found = compat.rollout_server(args)
            if found is not None:
                url, name = found
                check = functools.partial(server.check, args, model, url, compares=compat.compares_logprobs(args), name=name)
                transfer.server_url = url
                if not check(wait_s=None):
                    # The server may start later, or answer once it has weights.
                    transfer.check_server = functools.partial(check, wait_s=args.vllm_server_timeout)

    def _publish(self, model: Any, *, if_changed: bool = False) -> None:
        """Publish the weights. If they are not those of the channel any more, training goes on, and publishes nothing."""
        if self._problem is not None:
            return
        stream = functools.partial(gather.stream_of, model, self.config.adapter_only)
        try:
            if self.config.adapter_only:
                self._check_adapter(model)
            if self._transfer.publish(stream, if_changed=if_changed):
                self._transfer.record(ack_s=None)
        except (ConfigError, ModelMismatchError) as error:
            if self._transfer.published_step is None:
                raise
            self._problem = error
            logger.error("Nothing more is published, and training goes on: %s", error)

    def _check_adapter(self, model: Any) -> None:
        gather.check_publishable(model, adapter_only=True)
        found = adapter.identity(model)
        if self._adapter is not None and found != self._adapter:
            raise ConfigError(
                f"The adapter {self._adapter[0]} is published, and now {found[0]} is active, or is configured anew. "
                "Publish it to another channel."
            )
        self._adapter = found


class _Metrics(TrainerCallback):
    """Adds new metrics to the logs. It runs before all other callbacks, so that they find them there."""

    def __init__(self, transfer: DeltaWeightTransfer) -> None:
        self._transfer = transfer
        self.prefix = "delta_sync/"

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # Other dicts are those that `evaluate` and `train` return, and that decide which model is the best.
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            metrics = {
                name.replace("delta_sync/", self.prefix, 1): value for name, value in self._transfer.metrics().items()
            }
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)


class _Last(TrainerCallback):
    """Publishes the final weights after all other callbacks."""

    def __init__(self, finish: Callable[[TrainerState, Any], None]) -> None:
        self._finish = finish

    def on_train_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._finish(state, model)


def client_class(transfer: DeltaWeightTransfer, check: Callable[[str], object], base: type) -> type:
    """Return a subclass of `base`, TRL's `VLLMClient`, that publishes the weights by `transfer`.

    Trainer and server form no process group and need no CUDA. `check` gets the server's URL once it is up, and raises if the
    trainer cannot be trained with its answers.
    """

    class DeltaSyncClient(base):
        def init_communicator(self, device: Any = 0) -> None:
            """Pass on the server's URL."""
            transfer.server_url = self.base_url
            check(self.base_url)

        def close_communicator(self) -> None:
            """Do nothing: there is no process group."""

        def update_named_params(
            self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            """Publish the stream, and wait until the replicas serve it."""
            transfer.init_weight_transfer()
            transfer.send_weights(named_params)
            transfer.resume()

        def reset_prefix_cache(self) -> None:
            """Do nothing: a replica looks after its caches when it commits a version."""

        def get_server_info(self) -> dict[str, Any]:
            """Return all that TRL asks for: log probabilities are processed, or as good as that once `check` returned."""
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    return DeltaSyncClient
