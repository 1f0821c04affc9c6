"""A weight transfer for TRL's `AsyncGRPOTrainer` that publishes to a channel."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deltasync import Publisher, Receipt, open_store
from deltasync.channel.reading import ChannelReader
from deltasync.config import PublisherSettings, TrainerSettings
from deltasync.errors import AckTimeoutError, ConfigError, NotPublishedError, PublishError, get_logger
from deltasync.opening.adapter_base import FILE
from deltasync.opening.owner import OVERWRITE, owner_of
from deltasync.serve import heartbeat
from deltasync.trainer.stream import Stream
from trl_callback import adapter, compat, gather, ranks
from trl_callback.config import DeltaSyncConfig
from trl_callback.fleet import Fleet, Pace
from trl_callback.patience import OPEN_S, RETRIES, PatientStore
from trl_callback.record import History, VersionRecord
from trl_callback.tokens import TokenAges

_Value = TypeVar("_Value")

logger = get_logger(__name__)

OWNER_FILE = "deltasync_owner"
"""File in the trainer's `output_dir` with the owner's id."""

_MARGIN_S = 60.0
# how long an upload that was given up may take to end: a request under way may still be answered
_LAST_ANSWER_S = 60.0


class DeltaWeightTransfer:
    """Implements TRL's `WeightTransferProtocol`: publishes the weights to a channel instead of sending them
    to a server.

    Generation is never paused. `send_weights` returns as soon as the weights are read; encoding and upload
    run in the background. `resume` waits until the replicas serve a version at most `max_behind` behind the
    one just published.

    Attributes:
        step (`int`): The trainer's `global_step`, published with each version. The callback updates it.
        published_step (`int`, *optional*): The last version's step; `None` before the first.
        publisher ([`~deltasync.Publisher`], *optional*): The publisher; `None` before `init_weight_transfer`.
        on_policy (`bool`): Whether training waits for each version, on all replicas. The callback sets it.
        server_url (`str`, *optional*): The server that the trainer generates on. It must serve each awaited
            version.
        run_ids (`set[str]`): The earlier runs of this trainer, which it may continue.
        check_server (`Callable`, *optional*): Called once, when the first version is served; raises to refuse
            the server.
        ages ([`TokenAges`]): The ages of the trained tokens.
    """

    def __init__(self, config: DeltaSyncConfig) -> None:
        self.config = config
        self.step = 0
        self.published_step: int | None = None
        self.publisher: Publisher | None = None
        self.on_policy = False
        self.server_url: str | None = None
        self.run_ids: set[str] = set()
        self.check_server: Callable[[], object] | None = None
        self.ages = TokenAges(config.max_token_lag, config.train_unversioned)
        self._store = PatientStore(open_store(config.channel))
        self._fleet = Fleet(self._store, config.replicas or ())
        self._model: torch.nn.Module | None = None
        self._processing_class: Any = None
        self._output_dir: str | None = None
        self._optimizer: Any = None
        self._together = False
        self._adapter: tuple[str, dict[str, Any]] | None = None  # name and configuration of the published one
        self._published: Receipt | None = None  # the last publication's receipt
        self._receipt: Receipt | None = None  # the same, until it is in the history
        self._pace: Pace | None = None
        self._heard: heartbeat.FleetHeartbeats | None = None
        self._history = History()

    @property
    def store(self) -> PatientStore:
        """The channel's store."""
        return self._store

    @property
    def history(self) -> list[VersionRecord]:
        """The published and encoded versions, oldest first."""
        return self._history.encoded()

    def bind(
        self,
        model: torch.nn.Module,
        processing_class: Any = None,
        output_dir: str | None = None,
        optimizer: Any = None,
    ) -> None:
        """Set the model to publish. Anchors include its config and the files of the tokenizer or processor.

        `output_dir` is where the file with the owner's id is; a schedule-free `optimizer` may hold the
        average in the model. [`DeltaSyncCallback`] calls this when it is among the trainer's callbacks.
        """
        self._model, self._processing_class = model, processing_class
        self._output_dir, self._optimizer = output_dir, optimizer

    def init_weight_transfer(self) -> None:
        """Open the channel.

        Raises:
            ConfigError: no model is bound, or other processes hold parts of it.
            ChannelInUseError: the channel holds a run and `resume` is not set.
        """
        if self._model is None:
            raise ConfigError(
                "The weight transfer has no model. Pass the callback to the trainer too: callbacks=[sync]."
            )
        if self.publisher is None and gather.is_sharded(self._model):
            raise ConfigError(
                "Before training only the main process syncs weights, and it holds only shards of them. "
                "Evaluate with "
                "eval_on_start=True instead, and give the callback to the trainer's constructor."
            )
        self.open()

    def open(self, *, together: bool = False) -> None:
        """Open the channel for the bound model, once. With `together`, all processes publish, each its own
        shards.

        Raises:
            ChannelInUseError: the channel holds a run that is neither in `run_ids` nor the owner's, and
                `resume` is not set.
            StoreError: the store cannot be reached.
        """
        if self.publisher is not None:
            return
        self._together, self.published_step, self._adapter = together, None, None
        config, model = self.config, self._model
        assert model is not None
        with self._store.within(min(OPEN_S, config.ack_timeout_s)):
            with ranks.processes(together) as peers:
                arguments = peers.all(self._arguments)
                if config.adapter_only:
                    base = peers.all(lambda: gather.adapter_base_of(model))
                    arguments["model_files"] |= {FILE: base.summed(peers.agree).encode()}
            self.publisher = Publisher(
                self._store,
                codec=config.codec,
                anchor_every=config.anchor_every,
                retries=RETRIES,
                signing_key=config.signing_key,
                group=dist.group.WORLD if together else None,
                **arguments,
            )
        asked = TrainerSettings.from_env(max_behind=config.max_behind).max_behind
        self._pace = Pace(self._wait_for, (0 if self.on_policy else 1) if asked is None else asked)
        if not together or dist.get_rank() == 0:
            url, newest = self._store.url, self.publisher.version
            begins = f"goes on after version {newest}" if newest else "begins with version 1"
            # To stderr, because trainers do not show INFO logs.
            sys.stderr.write(
                f"deltasync: publishing to {url}, which {begins}, with codec "
                f"{self.publisher.settings.codec}. "
                f"To see versions and replicas: deltasync watch {shlex.quote(url)}\n"
            )

    def begin(self, *, together: bool) -> None:
        """Open the channel for a training, as `open`. After an earlier one of this trainer the next publish
        is compared.
        """
        publisher = self.publisher
        self.open(together=together)
        if publisher is not None:
            publisher.expect_resumed(self._is_compared and self.config.resume != OVERWRITE)

    def _arguments(self) -> dict[str, Any]:
        """Return the publisher's arguments that come from the model, the environment and the store."""
        assert self._model is not None
        config = self.config
        settings = PublisherSettings.from_env(dtype=config.served_dtype)
        dtype = gather.served_dtypes(self._model, settings.dtype)
        if config.adapter_only:
            files = adapter.files(self._model, config.adapter_only)
        else:
            files = gather.checkpoint_files(self._model, self._processing_class, dtype)
        owner = self._owner()
        resume = config.resume or self._holds_our_run(owner)
        if resume and not self._is_compared:
            resume = OVERWRITE
        return {
            "dtype": dtype,
            "model_files": files,
            "initial": gather.loaded_from(self._model) if config.initial == "auto" else config.initial,
            "resume": resume,
            "owner": owner,
            # The other processes wait for the main process, which waits for the fleet.
            "peer_timeout_s": max(settings.peer_timeout_s, config.ack_timeout_s + _MARGIN_S),
        }

    @property
    def _is_compared(self) -> bool:
        """Whether the first weights have to be those that the channel has of their step.

        A trainer at step 0 has loaded no checkpoint. One that holds the average has other weights than those
        that gradients are computed with, which the channel has.
        """
        return self.step > 0 and not compat.holds_average(self._optimizer)

    def _owner(self) -> str | None:
        """Return the id by which a job that starts again knows its run. Only the main process needs it."""
        if self.config.owner is not None or self._output_dir is None or (self._together and dist.get_rank()):
            return self.config.owner
        try:
            return owner_of(Path(self._output_dir, OWNER_FILE))
        except ConfigError as error:
            logger.warning(
                "If this job starts again before its first checkpoint, the channel is refused. %s", error
            )
            return None

    def _holds_our_run(self, owner: str | None) -> bool:
        with contextlib.suppress(NotPublishedError):
            if self.run_ids or owner is not None:
                channel = ChannelReader(self._store).channel()
                return channel.run_id in self.run_ids or (owner is not None and channel.owner == owner)
        return False

    def pause(self) -> None:
        """Do nothing: generation continues, and a replica switches versions on its own."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish the model's weights, and upload them in the background. TRL's stream is not read: it lacks
        some tensors.

        If all processes publish their shards, the others call `publish_shards` at the same time.

        Raises:
            ModelMismatchError: the weights belong to another model than the channel's.
            PublishError: another publisher writes to the channel.
        """
        if self._together:
            self.publish_shards()
        else:
            self.publish(self.stream)

    def publish_shards(self) -> None:
        """Publish this process's shards, and wait like `resume`. All processes call it; if one fails, all
        fail.
        """
        self.publish(self.stream)
        self.record(ack_s=self._first(self._wait_in_pace))

    def stream(self) -> Iterable[tuple[str, Any]]:
        """Return what this process publishes of the bound model, as `gather.stream_of`.

        Raises:
            ConfigError: as there; or the active adapter is not the one that the channel holds.
        """
        assert self._model is not None
        tensors = gather.stream_of(self._model, self.config.adapter_only)
        if self.config.adapter_only:
            found = adapter.identity(self._model, self.config.adapter_only)
            if self._adapter is not None and found != self._adapter:
                raise ConfigError(
                    f"The channel holds the adapter {self._adapter[0]}, but now {found[0]} is active, or its "
                    "configuration has changed. Publish it to another channel."
                )
            self._adapter = found
        return tensors

    def resume(self) -> None:
        """Wait until all replicas serve this version or one at most `max_behind` behind it.

        Raises:
            PublishError: the awaited version did not become visible.
            AckTimeoutError: it is still uploading after `config.ack_timeout_s`.
            AckTimeoutError: it is published, but replicas lag. The message names them.
            ConfigError: the server's answers cannot be used for training.
        """
        if self._receipt is not None:
            self.record(ack_s=self._wait_in_pace())
        check, self.check_server = self.check_server, None
        if check is not None:
            check()

    def update_served(self, count: int, update: Callable[[int], None]) -> None:
        """Report the version that the fleet serves to TRL's rollouts, not the published one. See
        `Pace.report`.
        """
        if self.publisher is not None and self.published_step == self.step:  # else the sync was skipped
            self.ages.synced(self.publisher.version, count)
        pace, demanded = self._pace, self.ages.demanded

        def report(served: int) -> None:
            update(served)
            if demanded is not None and pace is not None:
                demanded.value = pace.served or 0

        if pace is not None:
            pace.report(count, report)

    def _wait_in_pace(self) -> float:
        """Wait until the fleet is close enough to the last version. Return the seconds."""
        assert self._receipt is not None and self._pace is not None
        return self._pace.keep(self._receipt)

    def _wait_for(self, receipt: Receipt) -> None:
        """Wait until a version is stored and served."""
        before = time.perf_counter()
        assert self.publisher is not None
        config = self.config
        try:
            receipt.wait(config.ack_timeout_s)
        except AckTimeoutError as error:
            raise AckTimeoutError(
                f"{error} Last error of {self._store.url}: {self._store.trouble}."
            ) from None
        run_id, published, urls = self.publisher.run_id, self.publisher.published, config.replicas or ()
        assert run_id is not None
        required = [] if self.server_url is None else [self.server_url]
        heartbeat.wake([*{*urls, *required}], receipt.version)

        def wait(urls: Sequence[str], required: bool = False) -> None:
            left_s = max(0.0, config.ack_timeout_s - (time.perf_counter() - before))
            heartbeat.wait_for(
                self._store, run_id, receipt.version, published, left_s, urls, self._heard, required
            )

        if required:
            wait(required, True)
        if self._heard is None:
            self._heard = heartbeat.FleetHeartbeats(self._store, run_id, decides=True)
        wait(urls)

    def destroy(self) -> None:
        """Finish the uploads (`flush`) and close the channel. It may be opened again."""
        if (publisher := self.publisher) is None:
            return
        try:
            self.flush()
        finally:
            self.publisher = self._heard = self._pace = None
            with contextlib.suppress(PublishError):  # `flush` raised it
                publisher.close()
            self._store.give_up()  # no more waits for replicas

    def flush(self) -> None:
        """Wait for the uploads. After `config.ack_timeout_s` they are given up, except for a request that is
        under way.

        Raises PublishError if the last version did not become visible.
        """
        publisher = self.publisher
        assert publisher is not None
        with contextlib.suppress(AckTimeoutError):
            publisher.flush(self.config.ack_timeout_s)
            return
        self._store.give_up()
        late = ""
        try:
            publisher.flush(_LAST_ANSWER_S)
            return
        except AckTimeoutError:
            late = " A request that is still under way may make it visible."
        except PublishError:
            pass  # the upload has ended
        self.publisher = None
        raise PublishError(
            f"Version {publisher.version} is not in {self._store.url}, {self.config.ack_timeout_s:g} s after "
            "the "
            f"end of training, and was given up.{late} Last error: {self._store.trouble}."
        )

    def is_behind(self) -> bool:
        """Whether the store is so far behind that the next version should be skipped. The same in all
        processes.
        """
        return self._first(self._store.is_behind)

    def _first(self, action: Callable[[], _Value]) -> _Value:
        """Run an action in the first process that publishes and return its result in all."""
        assert self.publisher is not None
        agreement = self.publisher.agreement
        with agreement.inside():
            return agreement.first(action)

    def publish(self, named_tensors: Stream, *, if_changed: bool = False) -> bool:
        """Publish the weights of `step`; `resume` or `record` follows. Return False if `if_changed` and
        nothing changed.
        """
        publisher = self.publisher
        assert publisher is not None
        with torch.no_grad():
            receipt = publisher.publish(
                named_tensors, self.step, self.ages.of_version(), if_changed=if_changed
            )
        if receipt is self._published:
            return False
        self._receipt = self._published = receipt
        self.published_step = self.step
        assert publisher.run_id is not None
        self.run_ids.add(publisher.run_id)
        self._store.expect(self._receipt)
        published = time.perf_counter()
        self._receipt.when_done(lambda: self._history.log(upload_s=time.perf_counter() - published))
        return True

    def record(self, ack_s: float | None) -> None:
        """Add the last published version to the history."""
        receipt, self._receipt = self._receipt, None
        assert receipt is not None
        self._history.add(receipt, self.step, ack_s)

    def metrics(self) -> dict[str, float]:
        """Return new metrics since the last call, for the trainer's logs."""
        metrics = self._history.metrics() | self.ages.metrics()
        if self._pace is not None and self._pace.served is not None:
            metrics["delta_sync/served_version"] = self._pace.served
        if self.publisher is not None and self.publisher.run_id is not None:
            metrics |= self._fleet.metrics(
                self.publisher.run_id, self.publisher.version, self.publisher.published
            )
        return metrics
