"""The backend `deltasync` of vLLM's own weight-transfer routes, for trainers that push.

    vllm serve MODEL --weight-transfer-config '{"backend": "deltasync"}'     with VLLM_SERVER_DEV_MODE=1

    POST /init_weight_transfer_engine    {"init_info": {}}
    POST /start_weight_update
    POST /update_weights                 {"update_info": {"version": 7}}
    POST /finish_weight_update           {"weight_version": "7"}

vLLM calls each of these on all workers of an engine at once, between two steps. In `update_weights` the first
worker runs the follow loop, and reaches the others through a collective that they wait in, instead of RPCs.
Start and finish do nothing: weights are patched in place, without vLLM's layerwise reload.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.outputs import AsyncModelRunnerOutput

from deltasync.config import ReplicaSettings
from deltasync.errors import ConfigError
from deltasync.following import Follow
from deltasync.serve.engine import Answer, Failure, answer, parse
from deltasync.serve.shards import EngineClient
from vllm_plugin import compat
from vllm_plugin.pauses import open_follow
from vllm_plugin.worker import DeltaSyncWorkerExtension


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """`init_info`: the channel's URL, by default `DELTASYNC_CHANNEL`. Another one must be in
    `allowed_channels`.
    """

    channel: str | None = None


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update_info`: the version of the channel to serve, by default the newest."""

    version: int | None = None

    def __post_init__(self) -> None:
        if self.version is not None and (type(self.version) is not int or self.version < 1):
            raise ConfigError(
                f"version must be a whole number from 1, or null for the newest, not {self.version!r}."
            )


class _HiddenError(RuntimeError, AsyncModelRunnerOutput):
    """An error in a worker that must seem to succeed: vLLM takes what `get_output` returns for the reply.

    vLLM reads its workers' replies in order up to the first error, and takes those left for replies to its
    later calls (vllm-project/vllm#57846). So only the last worker may raise.
    """

    def get_output(self) -> Any:
        """Return the reply."""
        return None


def _reported_once(method: Callable[[DeltaSyncEngine, Any], Any]) -> Callable[[DeltaSyncEngine, Any], Any]:
    """Wrap a method so that an error that all workers raise reaches vLLM from the last one only."""

    @functools.wraps(method)
    def wrapped(self: DeltaSyncEngine, argument: Any) -> Any:
        try:
            return method(self, argument)
        except Exception as error:
            if self.group.is_last_rank:
                raise
            raise _HiddenError(str(error)) from error

    return wrapped


class DeltaSyncEngine(WeightTransferEngine):
    """Implements `vllm.distributed.weight_transfer.base.WeightTransferEngine` in one worker.

    Raises:
        ConfigError: nothing can follow with this configuration (`compat.refusal`); or the engine shares its
            experts with other data-parallel engines, or may sleep, which nobody would notice.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        reason = compat.refusal(vllm_config, keyed=frozenset())
        if reason is not None:
            raise ConfigError(reason)
        self.group = get_world_group()
        if self.group.world_size != vllm_config.parallel_config.world_size:
            raise ConfigError(
                "The backend 'deltasync' does not span data-parallel engines: let the server follow instead."
            )
        if vllm_config.model_config.enable_sleep_mode:
            raise ConfigError(
                "The backend 'deltasync' is not told when vLLM sleeps: let the server follow instead."
            )
        self._worker = DeltaSyncWorkerExtension()
        self._worker.model_runner = SimpleNamespace(
            get_model=lambda: model,
            load_config=vllm_config.load_config,
            model_config=vllm_config.model_config,
        )
        self._follow: Follow | None = None  # of the first worker only
        self._channel: str | None = None

    @_reported_once
    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Decode `init_info`."""
        return super().parse_init_info(init_dict)

    @_reported_once
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Choose the channel. It may still be empty: the first update opens it.

        Raises:
            ConfigError: no channel is named, callers may not name this one, or another one is followed
                already.
        """
        self._together(lambda: self._choose(init_info.channel))

    def start_weight_update(self) -> None:
        """Do nothing: weights are patched in place."""

    @_reported_once
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage and commit a version on all workers. If that fails, the version before is still live:
        ApplyError.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Do the same as `update_weights`."""
        self._together(lambda: self._serve(update_info.version))

    def finish_weight_update(self) -> None:
        """Do nothing: the version is live and proven since `update_weights`."""

    def shutdown(self) -> None:
        """Do nothing: it holds nothing."""

    def _choose(self, channel: str | None) -> None:
        settings = ReplicaSettings.from_env().with_called_channel(channel)
        if settings.channel is None:
            raise ConfigError(
                'No channel is named: set DELTASYNC_CHANNEL, or send {"init_info": {"channel": URL}}.'
            )
        if self._follow is not None and self._channel == settings.channel:
            return
        if self._follow is not None and self._follow.version is not None:
            raise ConfigError(f"This server follows {self._channel}; restart it to follow another channel.")
        self._follow = open_follow(EngineClient(self._call), settings)
        self._channel = settings.channel

    def _serve(self, version: int | None) -> None:
        if self._follow is None:
            self._choose(None)
        assert self._follow is not None
        self._follow.catch_up(version)

    def _together(self, lead: Callable[[], None]) -> None:
        """Run `lead` on the first worker while the others serve its calls. If it fails, all raise its
        error.
        """
        if self.group.is_first_rank:
            outcome = answer(lead)
            self._broadcast(None, outcome)
        else:
            method, *arguments = self._broadcast()
            while method is not None:
                self._do(method, *arguments)
                method, *arguments = self._broadcast()
            (outcome,) = arguments
        failure = parse(outcome, type(None))
        if isinstance(failure, Failure):
            raise failure.error()

    def _call(self, method: str, *arguments: object) -> list[Answer]:
        """Call a method of every worker's extension, from the first. Returns the replies in the order of
        their ranks.
        """
        self._broadcast(method, *arguments)
        return self._do(method, *arguments)

    def _broadcast(self, *message: Any) -> tuple[Any, ...]:
        """Send a message from the first worker to the others, who receive it by calling this without one."""
        box = [message]
        torch.distributed.broadcast_object_list(box, src=self.group.first_rank, group=self.group.cpu_group)
        return box[0]

    def _do(self, method: str, *arguments: Any) -> list[Answer]:
        replies: list[Any] = [None] * self.group.world_size
        mine = getattr(self._worker, method)(*arguments)
        torch.distributed.all_gather_object(replies, mine, group=self.group.cpu_group)
        return replies
