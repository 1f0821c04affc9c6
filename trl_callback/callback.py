"""The callback: what a user of transformers or TRL adds to the trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltasync.errors import ConfigError
from trl_callback import compat, gather
from trl_callback.config import DeltaSyncConfig
from trl_callback.record import VersionRecord
from trl_callback.weight_transfer import DeltaWeightTransfer


class DeltaSyncCallback(TrainerCallback):
    """A [`~transformers.TrainerCallback`] that publishes the weights to a deltasync channel, as the bits that changed.

    With TRL's `AsyncGRPOTrainer`, pass [`~DeltaSyncCallback.weight_transfer`] as well: TRL then decides when weights are
    synced, and counts a version only when replicas serve it. The callback itself publishes nothing then.

    With any other trainer, it publishes the initial weights, those after every `publish_steps` optimizer steps and the final
    ones. It waits for no replica, and for the uploads at the end of training only: while an upload lasts, newer weights
    join the version that waits. The model must be whole in the main process: no FSDP, no DeepSpeed ZeRO-3, no PEFT.

    The latest record of [`~DeltaSyncCallback.history`] is added to the logs under `delta_sync/`. Callbacks added later, such
    as the progress bar, and the log history of the trainer's state see it; the `report_to` integrations do not, as
    transformers runs them before any callback of the user.

    Args:
        channel (`str` or [`DeltaSyncConfig`]):
            URL of the channel, or all settings.
        **settings:
            Other fields of [`DeltaSyncConfig`].

    Raises:
        ConfigError: a setting is wrong.

    Example:
    ```python
    >>> sync = DeltaSyncCallback("file:///data/run")
    >>> trainer = AsyncGRPOTrainer(..., weight_transfer=sync.weight_transfer, callbacks=[sync])

    >>> trainer = SFTTrainer(..., callbacks=[DeltaSyncCallback("file:///data/run", publish_steps=10)])
    ```
    """

    def __init__(self, channel: str | DeltaSyncConfig, **settings: Any) -> None:
        known = {field.name for field in dataclasses.fields(DeltaSyncConfig)} - {"channel"}
        if unknown := settings.keys() - known:
            raise ConfigError(f"Unknown setting: {', '.join(sorted(unknown))}. Known ones: {', '.join(sorted(known))}.")
        if isinstance(channel, DeltaSyncConfig):
            self.config = dataclasses.replace(channel, **settings)
        else:
            self.config = DeltaSyncConfig(channel, **settings)
        self._transfer = DeltaWeightTransfer(self.config)
        self._publishes = True
        self._published_step: int | None = None
        self._logged: VersionRecord | None = None

    @property
    def weight_transfer(self) -> DeltaWeightTransfer:
        """The `weight_transfer` of TRL's `AsyncGRPOTrainer`. Once accessed, the callback publishes nothing by itself.

        Raises:
            ConfigError: the installed TRL has no place for it.
        """
        if self._publishes:
            compat.check_async_grpo()
            self._publishes = False
        return self._transfer

    @property
    def history(self) -> list[VersionRecord]:
        """What was published, one record for each version; empty in other processes than the main one."""
        return self._transfer.history

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Refuse at once a model that cannot be published."""
        if self._publishes:
            gather.check_in_one_piece(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Learn the model, before TRL opens the transfer; publish the initial weights."""
        self._transfer.step = state.global_step
        self._transfer.bind(model, processing_class)
        if self._publishes:
            gather.check_in_one_piece(model)
            if state.is_world_process_zero:
                self._transfer.open()
                self._publish(model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Publish every `publish_steps` steps. TRL's own sync comes after this."""
        self._transfer.step = state.global_step
        if self._publishes and state.is_world_process_zero and state.global_step % self.config.publish_steps == 0:
            self._publish(model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Publish the final weights, and wait for the uploads.

        Raises:
            PublishError: the last version did not become visible.
        """
        if not self._publishes or not state.is_world_process_zero:
            return
        # The best model may have been loaded after the last step.
        if self._published_step != state.global_step or args.load_best_model_at_end:
            self._publish(model)
        assert self._transfer.publisher is not None
        self._transfer.publisher.flush()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the latest version to the logs, once."""
        if logs is None or not self.history or self.history[-1] is self._logged:
            return
        self._logged = self.history[-1]
        metrics = self._logged.metrics()
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    def _publish(self, model: Any) -> None:
        self._transfer.publish(gather.checkpoint_tensors(model).items())
        self._transfer.record(ack_s=None)
        self._published_step = self._transfer.step
