"""`vllm_plugin.follow(llm, channel)`: the driver for vLLM's offline `LLM`, which generates only when asked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prometheus_client import CollectorRegistry

from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, ConfigError
from vllm_plugin import compat
from vllm_plugin.driver import DETOURS, Driver
from vllm_plugin.metrics import Metrics


class _Engine:
    """An `LLM` as the driver sees an engine client. Nothing is being generated while its methods run."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> Any:
        return self._llm.collective_rpc(method, args=args)

    async def pause_generation(self, **_: object) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        self._llm.llm_engine.set_weight_version(version)


class OfflineReplica:
    """An `LLM` that follows a channel when asked. Made by `follow`."""

    def __init__(self, llm: Any, settings: ReplicaSettings) -> None:
        self._llm = llm
        self._driver = Driver(_Engine(llm), settings, Metrics(CollectorRegistry()))
        self._loop = asyncio.new_event_loop()

    @property
    def version(self) -> int | None:
        """The version that the `LLM` has, None before the first."""
        return self._driver.version

    def sync(self, version: int | None = None, *, timeout_s: float = 60.0) -> int:
        """Bring the weights to the newest version, or at least to `version`, and drop the prefix cache.

        Args:
            version: To wait for, if it is not published yet.
            timeout_s: How long to wait for it to be published.

        Returns:
            The version that is live.

        Raises:
            ApplyError: it could not be brought there, and why; the version before is still live.
        """
        before, deadline, failures = self._driver.identity, time.monotonic() + timeout_s, 0
        while True:
            self._loop.run_until_complete(self._driver.look())
            status = self._driver.status(0)
            live, caught_up = self._driver.version, self._driver.caught_up
            if caught_up and live is not None and (version is None or live >= version):
                break
            failures += status["state"] == "failed"
            if time.monotonic() > deadline or failures > DETOURS:
                wanted = version or status["newest_version"]
                raise ApplyError(f"Version {wanted} is not live, but version {live}. {status['error'] or ''}".strip())
            if caught_up or status["state"] == "waiting":
                time.sleep(0.05)
        if self._driver.identity != before:
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
