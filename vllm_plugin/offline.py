"""`vllm_plugin.follow(llm, channel)`: the follow loop for vLLM's offline `LLM`, which generates only when
asked.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from deltasync.config import ReplicaSettings
from deltasync.errors import AckTimeoutError, ApplyError, CommitError, ConfigError, DeltaSyncError
from deltasync.serve.shards import EngineClient
from vllm_plugin import compat
from vllm_plugin.engine import check_salted
from vllm_plugin.pauses import open_follow

_POLL_S = 0.05


class OfflineReplica:
    """An `LLM` that follows a channel when `sync` is called. Made by `follow`."""

    def __init__(self, llm: Any, settings: ReplicaSettings) -> None:
        def call(method: str, *args: object) -> list[Any]:
            return list(llm.collective_rpc(method, args=args))

        self._client = EngineClient(call, llm.llm_engine.set_weight_version)
        self._follow = open_follow(self._client, settings)

    @property
    def version(self) -> int | None:
        """The version that the `LLM` holds, None before the first."""
        return self._follow.version

    @property
    def refusal(self) -> str | None:
        """Why the `LLM` must not generate, in one sentence; None if it may."""
        return (
            f"The weights are uncertain: sync again. {self._follow.error or ''}".rstrip()
            if self._client.held
            else None
        )

    def sync(self, version: int | None = None, *, timeout_s: float = 60.0) -> int:
        """Bring the weights to the newest version, and return the version that is live.

        Args:
            version: The version that must be live at least. It may not be published yet.
            timeout_s: How long to wait for it to be published.

        Raises:
            ApplyError: the weights were not brought there, and why; the version before is still live.
            CommitError: the weights are uncertain. Call again before anything is generated, or load the model
                again.
        """
        follow, deadline = self._follow, time.monotonic() + timeout_s
        try:
            while (live := follow.catch_up(wait_s=max(0.0, deadline - time.monotonic()))) < (version or 0):
                if time.monotonic() > deadline:
                    raise AckTimeoutError(f"After {timeout_s:g} s nothing newer is published.")
                time.sleep(_POLL_S)
            return live
        except DeltaSyncError as error:
            if self._client.held:
                with contextlib.suppress(Exception):
                    follow.audit()
            if self._client.held:
                raise CommitError(f"The weights are uncertain: generate nothing. {error}") from error
            wanted = version or follow.newest
            raise ApplyError(
                f"Version {wanted} is not live, but version {follow.version}. {error}"
            ) from error

    def close(self) -> None:
        """Stop following. The `LLM` keeps its weights."""
        self._follow.target.close()


def follow(llm: Any, channel: str, **settings: Any) -> OfflineReplica:
    """Make an offline `LLM` follow a channel.

    Args:
        llm: `vllm.LLM(..., worker_extension_cls="vllm_plugin.DeltaSyncWorkerExtension")`, made while the
            environment has
            `DELTASYNC_CHANNEL`: then its caches are kept apart by version, and on a CPU its weights stay
            where they can be patched.
        channel: The channel's URL.
        **settings: Fields of `ReplicaSettings`.

    Raises:
        ConfigError: deltasync does not support this vLLM, or its configuration.

    Examples:
        >>> replica = vllm_plugin.follow(llm, "s3://bucket/run")
        >>> replica.sync()
        7
    """
    import vllm

    config = llm.llm_engine.vllm_config
    unsuited = compat.unsuited(vllm.__version__) or compat.refusal(config) or compat.unextended(config)
    if unsuited is not None:
        raise ConfigError(unsuited)
    check_salted(llm)
    replica = OfflineReplica(llm, ReplicaSettings.from_env(channel=channel, **settings))
    llm.llm_engine.deltasync_refusal = lambda: replica.refusal
    return replica
