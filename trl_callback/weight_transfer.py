"""The weight transfer of TRL's `AsyncGRPOTrainer`, through a channel."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from deltasync import Publisher, Receipt, heartbeat
from deltasync.config import PublisherSettings
from deltasync.errors import ConfigError
from trl_callback import gather
from trl_callback.config import DeltaSyncConfig
from trl_callback.record import VersionRecord

logger = logging.getLogger(__name__)


class DeltaWeightTransfer:
    """Implements TRL's `WeightTransferProtocol`: publishes the weights to a channel instead of sending them to a server.

    Generation is never paused. `send_weights` returns as soon as the weights have been read and encoded; the upload goes on
    in the background, until `resume` waits for it and for the replicas to serve the version. So the version that TRL counts
    is one that the fleet serves, unless `ack="none"` was asked for.

    Args:
        config ([`DeltaSyncConfig`]): Settings.

    Attributes:
        step (`int`): The trainer's `global_step`, published with each version; kept up to date by the callback.
        history (`list[VersionRecord]`): What was published.
        publisher ([`~deltasync.Publisher`], *optional*): `None` before `init_weight_transfer`.
    """

    def __init__(self, config: DeltaSyncConfig) -> None:
        self.config = config
        self.step = 0
        self.history: list[VersionRecord] = []
        self.publisher: Publisher | None = None
        self._model: torch.nn.Module | None = None
        self._processing_class: Any = None
        self._receipt: Receipt | None = None

    def bind(self, model: torch.nn.Module, processing_class: Any = None) -> None:
        """Learn whose weights these are. Anchors get its config and the files of the tokenizer or processor.

        [`DeltaSyncCallback`] does this when it is among the trainer's callbacks.
        """
        self._model = model
        self._processing_class = processing_class

    def init_weight_transfer(self) -> None:
        """Open the channel.

        Raises:
            ConfigError: no model is bound, or TRL does not stream it as a checkpoint names it.
            ChannelInUseError: the channel holds a run and `resume` is not set.
        """
        if self._model is None:
            raise ConfigError("The weight transfer knows no model. Pass the callback to the trainer too: callbacks=[sync].")
        if not gather.is_peft(self._model) and not gather.sharded_names(self._model):
            gather.check_names(self._model)
        self.open()

    def open(self) -> None:
        """Open the channel for the bound model, once."""
        if self.publisher is not None:
            return
        assert self._model is not None
        dtype = PublisherSettings.from_env(dtype=self.config.served_dtype).dtype
        self.publisher = Publisher(
            self.config.channel,
            codec=self.config.codec,
            anchor_every=self.config.anchor_every,
            dtype=dtype,
            model_files=gather.checkpoint_files(self._model, self._processing_class, dtype),
            resume=self.config.resume,
        )

    def pause(self) -> None:
        """Nothing: generation goes on, and a replica switches versions by itself."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Read the stream to its end and publish it; the upload goes on in the background.

        Raises:
            ModelMismatchError: the weights are not of the channel's model.
            PublishError: another publisher writes to the channel.
        """
        assert self._model is not None
        self.publish(gather.complete(iterator, self._model))

    def resume(self) -> None:
        """Wait until the version is stored and served as `config.ack` asks, then record it.

        Raises:
            PublishError: the version did not become visible.
            TimeoutError: it is still being uploaded after `config.ack_timeout_s`.
            AckTimeoutError: it is published, but replicas lag; names them.
        """
        if self._receipt is None:
            return
        if self.config.ack == "none":
            self.record(ack_s=None)
            return
        assert self.publisher is not None and self.publisher.run_id is not None
        before = time.perf_counter()
        self._receipt.wait(self.config.ack_timeout_s)
        left_s = self.config.ack_timeout_s - (time.perf_counter() - before)
        heartbeat.wait_for(self.publisher.store, self.publisher.run_id, self._receipt.version, self.config.ack, left_s)
        self.record(ack_s=time.perf_counter() - before)

    def destroy(self) -> None:
        """Finish the uploads and close the channel.

        Raises:
            PublishError: the last version did not become visible.
        """
        if self.publisher is not None:
            self.publisher.close()

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights of `step`; `resume` or `record` follows."""
        assert self.publisher is not None
        with torch.no_grad():
            self._receipt = self.publisher.publish(named_tensors, step=self.step)

    def record(self, ack_s: float | None) -> None:
        """Append what was published last to the history, and log it."""
        receipt, self._receipt = self._receipt, None
        assert receipt is not None
        if self.history and self.history[-1].version == receipt.version:
            self.history.pop()  # its upload had not begun, so it became part of this one
        record = VersionRecord(
            version=receipt.version,
            step=self.step,
            kind=receipt.kind,
            changed=receipt.changed,
            total=receipt.total,
            payload_bytes=receipt.payload_bytes,
            anchor_bytes=receipt.anchor_bytes,
            encode_s=receipt.encode_s,
            ack_s=ack_s,
        )
        self.history.append(record)
        logger.info(
            "version=%d changed_fraction=%.4f payload_bytes=%d bits_per_changed=%.2f encode_s=%.3f ack_s=%.3f",
            record.version,
            record.changed_fraction,
            record.payload_bytes,
            math.nan if record.bits_per_changed is None else record.bits_per_changed,
            record.encode_s,
            math.nan if ack_s is None else ack_s,
        )
