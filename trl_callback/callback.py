"""The callback that a user of transformers or TRL adds to the trainer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from deltasync.config import TrainerSettings, check_names
from deltasync.ending import finish_at_exit
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.serve.constraint import VERSION_HEADER
from trl_callback import compat, gather, ranks, server
from trl_callback.config import DeltaSyncConfig
from trl_callback.record import VersionRecord
from trl_callback.saved import OwnForm
from trl_callback.weight_transfer import DeltaWeightTransfer

logger = logging.getLogger(__name__)

_STATE = "deltasync"
"""Key in the trainer state's `stateful_callbacks` under which the run is saved. transformers'
`ExportableState` is not used: with it, a checkpoint from before the callback was added cannot be resumed, and
restoring a callback makes a second one."""


_STOPPING = ("on_substep_end", "on_step_end", "on_epoch_end", "on_log", "on_evaluate", "on_save")
"""Events in which a callback may stop the training; the trainer goes on to its end after each of them."""


class DeltaSyncCallback(TrainerCallback):
    """A [`~transformers.TrainerCallback`] that publishes the weights to a deltasync channel, as the bits that
    changed.

    Pass it in the `callbacks` of the trainer's constructor. Its behaviour depends on the trainer:

    - `AsyncGRPOTrainer`, `AsyncDistillationTrainer`: the callback replaces the NCCL transfer. TRL decides
      when weights are synced, and continues while replicas serve a version at most `max_behind` behind.
      `AsyncGRPOTrainer` stamps samples with the version of their oldest trained token,
      `AsyncDistillationTrainer` with the served version.
    - `GRPOTrainer`, `RLOOTrainer` and others with `vllm_mode="server"`: the callback publishes the weights
      when TRL pushes them to the server, and training continues once the replicas serve them. Neither side
      needs CUDA, and the trainer needs no vLLM.
    - Any other trainer: the callback publishes the initial weights, those after every `publish_steps`
      optimizer steps, and the final ones. It does not wait for replicas, and waits for uploads only at the
      end of training. During an upload, newer weights merge into the queued version.

    Before training, the callback refuses a trainer that would sync its weights in another way. It also
    refuses a trainer that compares the server's log probabilities with its own, unless the server says that
    they belong to the distribution sampled from.

    A PEFT model is published as its merged weights, or with `adapter_only` as its adapter. If FSDP2 or
    DeepSpeed's ZeRO-3 shards the model, each process publishes its own shards without a gather; FSDP1 is
    refused. A trainer that resumes from a checkpoint continues the run that it wrote, and one that starts
    again in the same `output_dir` the run that it began. Any other used channel is refused unless `resume` is
    set. A trainer that resumes with other weights than the channel has of that step publishes nothing. The
    trainer's logs show published and served versions under `delta_sync/`.

    A schedule-free optimizer has two sets of weights. Versions hold those that gradients are computed with;
    once training is to stop, however that was decided, the callback calls the optimizer's `eval()`, so that
    the final version and later saves hold the average. After an exception there is no final version.

    A pickled callback has its settings only: unpickled, it is a new one, which has published nothing.

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
        check_names(settings, {field.name for field in dataclasses.fields(DeltaSyncConfig)} - {"channel"})
        config = channel if isinstance(channel, DeltaSyncConfig) else DeltaSyncConfig(channel)
        self.config = dataclasses.replace(config, **settings)
        self._transfer = DeltaWeightTransfer(self.config)
        # whether the callback decides when to publish, rather than TRL; known once training starts
        self._publishes = True
        self._restore: Callable[[], None] | None = None
        self._prefix = "delta_sync/"
        # Before all other callbacks, so that they see the metrics, and after them, because they may change
        # the weights.
        self._before, self._after = TrainerCallback(), TrainerCallback()
        self._before.on_log = self._add_metrics
        for event in _STOPPING:
            setattr(self._after, event, self._average)
        self._after.on_train_end = self._finish
        self._problem: Exception | None = None  # the error that ended publishing
        self._own_form: OwnForm | None = None  # how the model is saved, if that is not transformers' way
        self._was_trained = False  # whether it was asked for after a step
        self._averaging: str | None = None  # the schedule-free optimizer of a training that has not ended

    def __reduce__(self) -> tuple[type[DeltaSyncCallback], tuple[DeltaSyncConfig]]:
        """Pickle and copy the settings alone, as the publisher writes from one process."""
        return type(self), (self.config,)

    @property
    def weight_transfer(self) -> DeltaWeightTransfer:
        """The transfer that syncs the weights of `AsyncGRPOTrainer` and `AsyncDistillationTrainer`.

        The callback alone is enough. To be explicit, also pass `weight_transfer=sync.weight_transfer`.
        """
        return self._transfer

    @property
    def history(self) -> list[VersionRecord]:
        """One record for each published version; empty in all processes but the main one."""
        return self._transfer.history

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse a model that cannot be published, and replace TRL's transfer of weights to a vLLM server."""
        compat.check_colocated(args)
        if compat.generates_on_server(args):
            # An evaluation may generate before training.
            self._transfer.bind(model, kwargs.get("processing_class"), args.output_dir)
            self._replace_client(args, model)
        elif compat.streams_weights(args):
            self._restore = compat.replace_transfer(self._transfer)
        gather.check_form_of(model, self.config.adapter_only)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Bind model and run before TRL opens the transfer, and publish the initial weights. If one process
        fails, all do.
        """
        together = gather.is_sharded(model)

        def begin() -> None:
            self._transfer.begin(together=together)
            if self._publishes:
                self._publish(model)

        with ranks.processes() as peers:
            peers.all(lambda: self._prepare(args, state, model, kwargs))
            if not together:
                ranks.check_replicas(peers, model)
                peers.all(begin if state.is_world_process_zero else lambda: None)
        if together:
            begin()

    def _prepare(self, args: Any, state: TrainerState, model: Any, more: dict[str, Any]) -> None:
        if state.is_hyper_param_search:
            raise ConfigError(
                "A hyperparameter search trains several models, but a channel is one run. Search without the "
                "callback "
                "(trainer.remove_callback(DeltaSyncCallback)), and give it to the trainer of the best model."
            )
        self._problem = None
        number = compat.add_around(self, self._before, self._after)
        self._prefix = "delta_sync/" if number == 1 else f"delta_sync_{number}/"
        transfer = self._transfer
        transfer.step = state.global_step
        if state.is_world_process_zero and (average := compat.averages(more.get("optimizer"))) is not None:
            logger.warning(
                "%s has two sets of weights. Versions hold those that gradients are computed with, as do "
                "checkpoints of "
                "steps without an evaluation. After the last step its eval() is called: the final version, "
                "and what is "
                "saved then, hold the average.",
                type(average).__name__,
            )
            self._averaging = type(average).__name__
            finish_at_exit(self)
        transfer.bind(model, more.get("processing_class"), args.output_dir, more.get("optimizer"))
        transfer.run_ids |= {*state.stateful_callbacks.get(_STATE, {}).get("run_ids", [])}
        self._check_replaced(args, state.is_world_process_zero, model)
        if not self._publishes and number > 1:
            raise ConfigError(
                "This trainer decides when to sync and supports only one DeltaSyncCallback. Give it one."
            )
        if (
            not compat.follow_tokens(transfer.ages, more.get("train_dataloader"))
            and self.config.max_token_lag is not None
        ):
            raise ConfigError(
                "max_token_lag needs AsyncGRPOTrainer with TRL's own rollout worker, which reads tokens' "
                "versions from "
                f"replies, in TRL {compat.WITH_TOKEN_VERSIONS}. This trainer cannot bound them; leave it out."
            )
        gather.check_form_of(model, self.config.adapter_only)
        self._own_form = None if self.config.adapter_only else OwnForm.of(model, compat.running_trainer())
        self._was_trained = False
        if self._own_form is not None and (state.is_world_process_zero or gather.is_sharded(model)):
            self._own_form.check(model)
        if not self._publishes:
            compat.replace_stream(transfer.publish_shards if gather.is_sharded(model) else lambda: None)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Publish every `publish_steps` steps if the store keeps up, and always the last step. TRL's own sync
        runs later.
        """
        transfer = self._transfer
        transfer.step = state.global_step
        if transfer.publisher is None:
            return
        if self._publishes:
            # The final weights are published now too, because no logs follow `on_train_end`.
            is_due = state.global_step % self.config.publish_steps == 0
            if control.should_training_stop or (is_due and not transfer.is_behind()):
                self._publish(model)
        if transfer.publisher.run_id is not None:
            known = state.stateful_callbacks.setdefault(_STATE, {}).setdefault("run_ids", [])
            known += [] if transfer.publisher.run_id in known else [transfer.publisher.run_id]

    def _add_metrics(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any
    ) -> None:
        # Logs without a loss are results of `evaluate` and `train`, which choose the best model.
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            found = self._transfer.metrics().items()
            metrics = {name.replace("delta_sync/", self._prefix, 1): value for name, value in found}
            logs.update(metrics)
            if state.log_history:
                state.log_history[-1].update(metrics)

    def _average(
        self, args: Any, state: Any, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Once the training is to stop, switch the optimizer to the average, if it has one."""
        # Not at the end: the best model may be loaded by then, which is an average that the optimizer must
        # not move.
        if control.should_training_stop and (average := compat.averages(optimizer)) is not None:
            average.eval()

    def _finish(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Publish the final weights, and wait for the uploads."""
        transfer, self._averaging = self._transfer, None
        average = compat.averages(kwargs.get("optimizer"))
        if average is not None and not (args.load_best_model_at_end and state.best_model_checkpoint):
            average.eval()  # where nothing has stopped the training, as where the data ended
        if transfer.publisher is None:
            return
        self._publish(model, if_changed=transfer.published_step == state.global_step, is_last=True)
        transfer.flush()
        if self._problem is not None:
            logger.error(
                "The last published weights are those of step %s. %s", transfer.published_step, self._problem
            )

    def finish(self) -> None:
        """Say at the end of the process that a training which has not ended has published no average."""
        if self._averaging is not None:
            logger.warning(
                "Training did not come to its end, so the newest version holds the weights of step %s that "
                "gradients are "
                "computed with, and not the average of %s.",
                *(self._transfer.published_step, self._averaging),
            )
            self._averaging = None

    def _replace_client(self, args: Any, model: Any) -> None:
        """Replace TRL's client of a vLLM server with one that publishes the weights."""
        if behind := TrainerSettings.from_env(max_behind=self.config.max_behind).max_behind:
            raise ConfigError(
                "This trainer is on-policy: it must wait until replicas serve the new weights, so "
                f"max_behind={behind} does not work. Leave it out, or use AsyncGRPOTrainer."
            )
        self._transfer.on_policy = True
        check = functools.partial(
            server.check,
            args,
            model,
            compares=compat.compares_logprobs(args),
            name=None,
            adapter_only=self.config.adapter_only,
            wait_s=args.vllm_server_timeout,
            channel=self._transfer.store,
            named=self.config.replicas or (),
        )
        self._restore = compat.replace_client(functools.partial(client_class, self._transfer, check))

    def _check_replaced(self, args: Any, is_main: bool, model: Any) -> None:
        """Decide whether the callback or TRL starts publishing, and check that TRL sends the weights nowhere
        else.
        """
        transfer = self._transfer
        if self._restore is not None:
            self._restore()
        on_server, streams = compat.generates_on_server(args), compat.streams_weights(args)
        self._publishes = not (on_server or streams)
        if on_server and self._restore is None:
            raise ConfigError(
                "This trainer pushes its weights to its vLLM server, because it was made without "
                "DeltaSyncCallback. Give "
                "the callback to its constructor: callbacks=[DeltaSyncCallback(url)]."
            )
        if on_server and is_main and transfer.server_url is None:
            raise ConfigError(
                "This trainer has its own client for its vLLM server, which DeltaSyncCallback cannot "
                "replace. Use "
                "GRPOTrainer, RLOOTrainer or AsyncGRPOTrainer."
            )
        if streams:
            compat.check_transfer(transfer, is_main)
            compat.replace_version(transfer.update_served)
            found = compat.rollout_server(args)
            if found is not None:
                url, options = found
                transfer.server_url = url
                if not self._check_rollouts(args, model, url, options, wait_s=None):
                    # The server may start later, or answer only once it has weights.
                    transfer.check_server = functools.partial(
                        self._check_rollouts, args, model, url, options, wait_s=args.vllm_server_timeout
                    )

    def _check_rollouts(
        self, args: Any, model: Any, url: str, options: dict[str, Any], *, wait_s: float | None
    ) -> bool:
        """Check the server of the rollouts, and have these name its adapter if that alone is published.
        Return False if it does not answer.
        """
        status = server.check(
            args,
            model,
            url,
            compares=compat.compares_logprobs(args),
            name=options.get("model_name"),
            adapter_only=self.config.adapter_only,
            wait_s=wait_s,
            channel=self._transfer.store,
            named=self.config.replicas or (),
        )
        if status is not None and self.config.adapter_only:
            options["model_name"] = status["adapters"][0]
        return status is not None

    def _publish(self, model: Any, *, if_changed: bool = False, is_last: bool = False) -> None:
        """Publish the weights. If they no longer match the channel, training continues without publishing."""
        if self._problem is not None:
            return
        try:
            self._check_own_form(model, is_last=is_last)
            if self._transfer.publish(self._transfer.stream, if_changed=if_changed):
                self._transfer.record(ack_s=None)
        except (ConfigError, ModelMismatchError) as error:
            if self._transfer.published_step is None:
                raise
            self._problem = error
            logger.error("Publishing has ended; training goes on: %s", error)

    def _check_own_form(self, model: Any, *, is_last: bool) -> None:
        """Check once training has moved the weights, and at the end, that a model's own way to save it still
        saves these.
        """
        if (
            self._own_form is not None
            and self._transfer.published_step is not None
            and (is_last or not self._was_trained)
        ):
            self._was_trained = True
            self._own_form.check(model)


def client_class(transfer: DeltaWeightTransfer, check: Callable[[str], Any], base: type) -> type:
    """Return a subclass of `base`, TRL's `VLLMClient`, that publishes the weights with `transfer`.

    Trainer and server form no process group and need no CUDA. `check` is called with the server's URL once it
    is up, and returns its status. It raises if the server's answers cannot be used for training.
    """

    class DeltaSyncClient(base):
        def init_communicator(self, device: Any = 0) -> None:
            """Record and check the server's URL. Requests then name its adapter, if that alone is published."""
            transfer.server_url = self.base_url
            status = check(self.base_url)
            if transfer.config.adapter_only:
                self.model = status["adapters"][0]

        def close_communicator(self) -> None:
            """Do nothing: there is no process group."""

        def update_named_params(
            self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            """Publish the stream, wait until the replicas serve it, and demand it in each request."""
            transfer.init_weight_transfer()
            transfer.send_weights(named_params)
            transfer.resume()
            assert transfer.publisher is not None
            self.session.headers[VERSION_HEADER] = f">={transfer.publisher.version}"

        def reset_prefix_cache(self) -> None:
            """Do nothing: a replica resets its caches when it commits a version."""

        def get_server_info(self) -> dict[str, Any]:
            """Return the mode of log probabilities, which `check` has verified to be equivalent to processed
            ones.
            """
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    return DeltaSyncClient
