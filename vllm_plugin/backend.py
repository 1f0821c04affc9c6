"""vLLM's own weight-transfer routes: the backend `deltasync`, for trainers that push.

    vllm serve MODEL --weight-transfer-config '{"backend": "deltasync"}'     with VLLM_SERVER_DEV_MODE=1

    POST /init_weight_transfer_engine    {"init_info": {}}
    POST /start_weight_update
    POST /update_weights                 {"update_info": {"version": 7}}
    POST /finish_weight_update           {"weight_version": "7"}

vLLM calls each of these on all workers of an engine at once, between two of its steps. In `update_weights` the first worker
runs the driver; what that does by RPCs elsewhere, it does here by a collective that the others wait in. Start and finish
have nothing to do: weights are patched in place, so vLLM's layerwise reload is not begun.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.v1.outputs import AsyncModelRunnerOutput

from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError
from vllm_plugin.driver import DETOURS, Driver
from vllm_plugin.extension import DeltaSyncWorkerExtension
from vllm_plugin.metrics import Metrics
from vllm_plugin.worker import Reply, reply


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):
    """`init_info`: URL of the channel, `DELTASYNC_CHANNEL` by default; another one must be allowed (`allowed_channels`)."""

    channel: str | None = None


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update_info`: the version of the channel to serve, the newest by default."""

    version: int | None = None

    def __post_init__(self) -> None:
        if self.version is not None and (type(self.version) is not int or self.version < 1):
            raise ConfigError(f"version must be a whole number from 1, or null for the newest, not {self.version!r}.")


class _Answered(RuntimeError, AsyncModelRunnerOutput):
    """An error that another worker reports.

    vLLM reads the replies of an engine's workers in order and stops at the first error; those that it has not read then
    count as replies to its later calls (vllm-project/vllm#57846). So all but the last worker must seem to have succeeded:
    vLLM puts what `get_output` returns in the place of this.
    """

    def get_output(self) -> Any:
        """The reply."""
        return None


def _reported_once(method: Callable[[DeltaSyncEngine, Any], Any]) -> Callable[[DeltaSyncEngine, Any], Any]:
    """Make an error that all workers raise reach vLLM from the last one only."""

    @functools.wraps(method)
    def wrapped(self: DeltaSyncEngine, argument: Any) -> Any:
        try:
            return method(self, argument)
        except Exception as error:
            if self.group.is_last_rank:
                raise
            raise _Answered(str(error)) from error

    return wrapped


class _Engine:
    """The workers as the driver sees an engine client. Nothing is generated while vLLM waits for them."""

    def __init__(self, call: Callable[..., list[Reply]]) -> None:
        self._call = call

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[Reply]:
        return self._call(method, *args)

    async def pause_generation(self, **_: object) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        """Left to the trainer, who names it to `/finish_weight_update`."""


class DeltaSyncEngine(WeightTransferEngine):
    """One worker's end of the backend; see `vllm.distributed.weight_transfer.base.WeightTransferEngine`.

    Raises:
        ConfigError: the engine shares its experts with other data-parallel engines, or may sleep, which would go unnoticed.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.group = get_world_group()
        if self.group.world_size != vllm_config.parallel_config.world_size:
            raise ConfigError("The backend 'deltasync' does not span data-parallel engines: let the driver follow instead.")
        if vllm_config.model_config.enable_sleep_mode:
            raise ConfigError("The backend 'deltasync' is not told when vLLM sleeps: let the driver follow instead.")
        self._worker = DeltaSyncWorkerExtension()
        self._worker.model_runner = SimpleNamespace(
            get_model=lambda: model, load_config=vllm_config.load_config, model_config=vllm_config.model_config
        )
        self._driver: Driver | None = None  # of the first worker only
        self._channel: str | None = None
        self._loop = asyncio.new_event_loop()

    @_reported_once
    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """`InitInfo` of what was sent."""
        return super().parse_init_info(init_dict)

    @_reported_once
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Choose the channel, which may still be empty: it is opened by the first update.

        Raises:
            ConfigError: no channel is named, it is not one that callers may name, or another one is followed already.
        """
        self._together(lambda: self._choose(init_info.channel))

    def start_weight_update(self) -> None:
        """Nothing: weights are patched in place."""

    @_reported_once
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage and commit a version on all workers, or on none.

        Raises:
            ApplyError: the version before is still live, and why.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As `update_weights`."""
        self._together(lambda: self._serve(update_info.version))

    def finish_weight_update(self) -> None:
        """Nothing: the version is live and proven since `update_weights`."""

    def shutdown(self) -> None:
        """End what it holds."""
        self._loop.close()

    def _choose(self, channel: str | None) -> Reply:
        settings = ReplicaSettings.from_env().with_called_channel(channel)
        if settings.channel is None:
            raise ConfigError('No channel is named: set DELTASYNC_CHANNEL, or send {"init_info": {"channel": URL}}.')
        if self._driver is not None and self._channel == settings.channel:
            return {}
        if self._driver is not None and self._driver.version is not None:
            raise ConfigError(f"This server follows {self._channel}; restart it to follow another channel.")
        self._driver = Driver(_Engine(self._call), settings, Metrics(CollectorRegistry()))
        self._channel = settings.channel
        return {}

    def _serve(self, version: int | None) -> Reply:
        if self._driver is None:
            self._choose(None)
        assert self._driver is not None
        failures = 0
        while True:
            self._loop.run_until_complete(self._driver.look(version))
            status = self._driver.status(0)
            if self._driver.caught_up:
                return {} if status["error"] is None else {"error": status["error"]}
            failures += status["state"] == "failed"
            if status["state"] in ("waiting", "sleeping") or failures > DETOURS:
                return {"error": status["error"]}

    def _together(self, lead: Callable[[], Reply]) -> None:
        """Run `lead` on the first worker while the others answer its calls; if it failed, all raise its error."""
        if self.group.is_first_rank:
            outcome = reply(lead)
            self._tell(None, outcome)
        else:
            method, *arguments = self._tell()
            while method is not None:
                self._do(method, *arguments)
                method, *arguments = self._tell()
            (outcome,) = arguments
        if "error" in outcome:
            raise ApplyError(outcome["error"])

    def _call(self, method: str, *arguments: object) -> list[Reply]:
        """Call a method of every worker's extension; the replies in the order of their ranks. On the first worker."""
        self._tell(method, *arguments)
        return self._do(method, *arguments)

    def _tell(self, *message: Any) -> tuple[Any, ...]:
        """Send a message from the first worker to the others, who get it by calling this without one."""
        box = [message]
        torch.distributed.broadcast_object_list(box, src=self.group.first_rank, group=self.group.cpu_group)
        return box[0]

    def _do(self, method: str, *arguments: Any) -> list[Reply]:
        replies: list[Any] = [None] * self.group.world_size
        mine = getattr(self._worker, method)(*arguments)
        torch.distributed.all_gather_object(replies, mine, group=self.group.cpu_group)
        return replies
