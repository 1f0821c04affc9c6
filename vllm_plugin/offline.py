"""`vllm_plugin.follow(llm, channel)`: the driver for vLLM's offline `LLM`, which generates only when asked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prometheus_client import CollectorRegistry

from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, CommitError, ConfigError
from vllm_plugin import compat
from vllm_plugin.driver import Driver
from vllm_plugin.engine import IdleEngine
from vllm_plugin.metrics import Metrics


class _OfflineEngine(IdleEngine):
    """An `LLM` as the driver sees an engine client."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def collective_rpc(self, method: str, *, args: tuple[object, ...]) -> list[Any]:
        replies: list[Any] = self._llm.collective_rpc(method, args=args)
        return replies

    async def update_weight_version(self, version: str) -> None:
        self._llm.llm_engine.set_weight_version(version)


class OfflineReplica:
    """An `LLM` that follows a channel when asked. Made by `follow`."""

    def __init__(self, llm: Any, settings: ReplicaSettings) -> None:
        self._llm = llm
        self._driver = Driver(_OfflineEngine(llm), settings, Metrics(CollectorRegistry()))
        self._loop = asyncio.new_event_loop()

    @property
    def version(self) -> int | None:
        """The version that the `LLM` has, None before the first."""
        return self._driver.version

    def sync(self, version: int | None = None, *, timeout_s: float = 60.0) -> int:
        """Bring the weights to the newest version, or at least to `version`, drop the prefix cache, and return what is live.

        Args:
            version: To wait for, if it is not published yet.
            timeout_s: How long to wait for it to be published.

        Raises:
            ApplyError: it could not be brought there, and why; the version before is still live.
            CommitError: nobody knows what the weights are. Call again before anything is generated, or load the model anew.
        """
        driver, before, deadline = self._driver, self._driver.identity, time.monotonic() + timeout_s
        while True:
            self._loop.run_until_complete(driver.look_until_done(deadline=deadline))
            live, status = driver.version, driver.status(0)
            if driver.caught_up and live is not None and (version is None or live >= version):
                break
            if driver.pauses.held:
                raise CommitError(f"It is not known what the weights are: generate nothing. {status.error or ''}".strip())
            if status.state == "failed" or time.monotonic() > deadline:
                wanted = version or status.newest_version
                raise ApplyError(f"Version {wanted} is not live, but version {live}. {status.error or ''}".strip())
            time.sleep(0.05)
        if driver.identity != before:
            self._llm.reset_prefix_cache()
        return live

    def close(self) -> None:
        """End what it holds; the `LLM` keeps its weights."""
        self._loop.close()


def follow(llm: Any, channel: str, **settings: Any) -> OfflineReplica:
    """Let an offline `LLM` follow a channel.

    Args:
        llm: `vllm.LLM(..., worker_extension_cls="vllm_plugin.DeltaSyncWorkerExtension")`, made with `DELTASYNC_CHANNEL` set
            in the environment, so that on a CPU its weights stay where they can be patched.
        channel: URL of the channel.
        **settings: Fields of `ReplicaSettings`.

    Raises:
        ConfigError: deltasync was not run with this vLLM.

    Examples:
        >>> replica = vllm_plugin.follow(llm, "s3://bucket/run")
        >>> replica.sync()
        7
    """
    import vllm

    unsuited = compat.unsuited(vllm.__version__)
    if unsuited is not None:
        raise ConfigError(unsuited)
    return OfflineReplica(llm, ReplicaSettings.from_env(channel=channel, **settings))
