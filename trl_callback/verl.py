"""verl's `CheckpointEngine`: weights go from verl's actors to its rollouts through a channel, in any other
cluster.

    actor_rollout_ref.rollout.checkpoint_engine.backend=deltasync
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=trl_callback.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.deltasync.channel=s3://bucket/run

verl imports this module by that name and makes one engine in each actor and in each rollout worker. The first
actor publishes; a rollout worker keeps the weights in host memory, patches them by deltas, and hands them to
verl's own server adapter. verl gathers the weights for the first actor; the publisher refuses a part of a
tensor, and one of several experts of the same name. Written for verl 0.9 (`verl/checkpoint_engine/base.py`).
Other replicas may follow the same channel.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from deltasync import Publisher, Replica
from deltasync.errors import ConfigError

logger = logging.getLogger(__name__)


@CheckpointEngineRegistry.register("deltasync")
class DeltaSyncCheckpointEngine(CheckpointEngine):
    """One process's end of the channel; the master is the actor that publishes.

    Args:
        bucket_size: Not used.
        is_master: Whether this is the actor that publishes.
        channel: URL of the channel.
        timeout_s: Seconds that an update may take, from the publish to the last rollout worker.
        **options: Arguments of `Publisher`, such as `resume` or `dtype`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        channel: str,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        self._channel, self._timeout_s, self._options = channel, timeout_s, options
        self._is_master = is_master
        self._publisher: Publisher | None = None
        self._replica: Replica | None = None
        self._version: int | None = None
        if is_master:
            atexit.register(self._warn_if_unused)

    def _warn_if_unused(self) -> None:
        if self._publisher is None:
            logger.warning(
                "verl made this engine and never asked it for an update, so nothing was published to %s. Set "
                "trainer.v1.trainer_mode=separate_async and actor_rollout_ref.rollout.nnodes: verl's default "
                "needs none.",
                self._channel,
            )

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next version, at the master."""
        if not self._is_master:
            return {}
        if self._publisher is None:
            self._publisher = Publisher(self._channel, **self._options)
        return {"version": self._publisher.version + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the version to every process; none connects to another."""
        (version,) = [each["version"] for each in metadata if each]
        return {"version": [version] * actor_wg_world_size}, {"version": [version] * rollout_world_size}

    def init_process_group(self, version: int) -> None:
        """Set the version of the update that follows."""
        self._version = version

    def finalize(self) -> None:
        """End the update."""
        self._version = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publish at the master, and wait until the version is visible; elsewhere take part in gathering the
        weights.
        """
        if self._publisher is None:
            collections.deque(weights, maxlen=0)
            return {}
        receipt = self._publisher.publish(weights, step=global_steps)
        done = await asyncio.to_thread(receipt.wait, self._timeout_s)
        return {"deltasync/version": done.version, "deltasync/payload_bytes": done.payload_bytes}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield all weights of the version, each in host memory that the next update overwrites."""
        if self._version is None:
            raise ConfigError("verl asked for weights before it had said which version.")
        if self._replica is None:
            self._replica = Replica(self._channel)
        await asyncio.to_thread(self._replica.sync, self._version, timeout_s=self._timeout_s)
        for name, tensor in self._replica.state_dict().items():
            yield name, tensor
