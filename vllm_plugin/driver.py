"""The driver: one task in vLLM's API server that follows the channel and moves the workers along.

    head -> stage RPC -> (poll) -> pause_generation(keep) -> commit RPC -> update_weight_version -> resume_generation

Staging happens in the workers while tokens are generated; the pause covers the commit only. Whatever fails, generation is
resumed, the version before stays served, and the next look at head tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import time
from collections import deque
from typing import Any

from deltasync import heartbeat
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, DeltaSyncError, NotPublishedError
from deltasync.heartbeat import Heartbeat
from deltasync.manifest import Head
from deltasync.poll import Poll
from deltasync.reader import ChannelReader
from deltasync.stores import open_store
from vllm_plugin.metrics import generated_tokens, running_requests

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

# Between two looks at staging: each is an RPC that runs between two engine steps.
_STAGE_POLL_S = (0.002, 0.05)
_HISTORY = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """One version that became live.

    Attributes:
        stage_s: Fetch, check, decode and translate, in the worker, while serving.
        pause_s: From asking vLLM to pause until it had resumed.
        scatter_s: Of that, writing live weights.
        lag_s: From the publisher's clock at encoding until the version was served.
        tokens_during_sync: Tokens that the server generated between the start of staging and the resume.
        running_requests: Requests in flight when generation was paused.
        served_at: Seconds since the epoch.
    """

    version: int
    anchor: bool
    changed: int
    payload_bytes: int
    stage_s: float
    pause_s: float
    scatter_s: float
    lag_s: float
    tokens_during_sync: int
    running_requests: int
    served_at: float


class Driver:
    """Follows one channel for one server.

    Args:
        engine: vLLM's engine client.
        settings: With a channel.
    """

    def __init__(self, engine: Any, settings: ReplicaSettings) -> None:
        assert settings.channel is not None
        self._engine = engine
        self._settings = settings
        self._channel = settings.channel
        self._reader = ChannelReader(open_store(settings.channel))
        self._state = "waiting"
        self._error: str | None = "Waiting for the first look at the channel."
        self._version: int | None = None
        self._head: Head | None = None
        self._opened = False
        self._beat_s = -settings.heartbeat_interval_s
        self._beat: tuple[object, ...] = ()
        self.commits: deque[Commit] = deque(maxlen=_HISTORY)

    def status(self) -> dict[str, Any]:
        """What `GET /deltasync/status` returns."""
        return {
            "replica_id": self._settings.replica_id,
            "channel": self._reader.store.url,
            "run_id": self._head.run_id if self._head is not None else None,
            "state": self._state,
            "version": self._version,
            "head_version": self._head.version if self._head is not None else None,
            "error": self._error,
            "kv_cache": self._settings.kv_cache,
            "commits": [dataclasses.asdict(commit) for commit in self.commits],
        }

    async def digest(self) -> dict[str, Any]:
        """sha256 of every tensor in live memory with the version they are of."""
        return await self._rpc("deltasync_digest")

    async def run(self) -> None:
        """Follow until cancelled."""
        logger.info("deltasync follows %s as %s", self._reader.store.url, self._settings.replica_id)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        with Poll(self._reader.store, self._settings.poll_interval_s, lambda: _tell(loop, changed)) as poll:
            while True:
                changed.clear()
                before = self._version
                await self._look()
                await self._write_heartbeat()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), poll.delay_s(self._version != before, self._state != "failed"))

    async def _look(self) -> None:
        """Follow once, and report what came of it."""
        try:
            await self._follow_once()
        except NotPublishedError as error:
            self._report("waiting", f"Waiting for the first version: {error}")
        except DeltaSyncError as error:
            self._report("failed", f"{type(error).__name__}: {error}")
        except Exception as error:  # the server goes on with the weights it has, and says why
            self._report("failed", f"Unexpected {type(error).__name__}: {error}")
            logger.exception("deltasync failed unexpectedly")

    async def _follow_once(self) -> None:
        """Look at head, and go one step towards it if it is ahead."""
        self._head = await asyncio.to_thread(self._reader.head)
        if not self._opened:
            reply = await self._rpc("deltasync_open", self._channel)
            if "error" in reply:
                raise ApplyError(reply["error"])
            self._opened = True
        if self._version == self._head.version:
            self._report("serving", None)
            return
        tokens_before = generated_tokens()
        reply = await self._stage()
        if reply["state"] == "staged":
            await self._commit(tokens_before)
        elif reply["version"] != self._version:
            # The weights that vLLM loaded are a published version already.
            await self._serve(reply["version"])

    async def _stage(self) -> dict[str, Any]:
        """Have the workers stage the next step towards head; returns when they have, or have nothing to do."""
        self._state = "staging"
        wait_s, longest_s = _STAGE_POLL_S
        while True:
            reply = await self._rpc("deltasync_stage")
            if reply["state"] == "failed":
                raise ApplyError(reply["error"])
            if reply["state"] != "staging":
                return reply
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)

    async def _commit(self, tokens_before: int) -> None:
        """Pause, commit, announce, resume."""
        self._state = "committing"
        running = running_requests()
        paused = time.perf_counter()
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=self._settings.kv_cache == "recompute")
            reply = await self._rpc("deltasync_commit")
            if "error" not in reply:
                await self._engine.update_weight_version(str(reply["version"]))
        finally:
            await self._engine.resume_generation()
        pause_s = time.perf_counter() - paused
        if "error" in reply:
            raise ApplyError(reply["error"])
        served_at = time.time()
        published_at = datetime.datetime.fromisoformat(reply["created_at"]).timestamp()
        commit = Commit(
            version=reply["version"],
            anchor=reply["anchor"],
            changed=reply["changed"],
            payload_bytes=reply["payload_bytes"],
            stage_s=reply["stage_s"],
            pause_s=pause_s,
            scatter_s=reply["scatter_s"],
            lag_s=served_at - published_at,
            tokens_during_sync=generated_tokens() - tokens_before,
            running_requests=running,
            served_at=served_at,
        )
        self.commits.append(commit)
        self._version = commit.version
        self._report("serving", None)
        logger.info(
            "deltasync serves version=%d changed=%d stage_s=%.3f pause_s=%.4f scatter_s=%.4f lag_s=%.3f",
            commit.version,
            commit.changed,
            commit.stage_s,
            commit.pause_s,
            commit.scatter_s,
            commit.lag_s,
        )

    async def _serve(self, version: int | None) -> None:
        """Announce a version whose bits were live already."""
        if version is not None:
            await self._engine.update_weight_version(str(version))
            logger.info("deltasync serves version=%d, which the loaded weights already were", version)
        self._version = version
        self._report("serving", None)

    async def _rpc(self, method: str, *args: object) -> dict[str, Any]:
        """Call one method on all workers; one worker for now (design: tensor parallel sums their replies)."""
        replies: list[dict[str, Any]] = await self._engine.collective_rpc(method, args=args)
        if len(replies) != 1:
            raise ApplyError(
                f"This release follows a channel with one worker, not with {len(replies)} (set tensor_parallel_size=1)."
            )
        return replies[0]

    def _report(self, state: str, error: str | None) -> None:
        if error is not None and error != self._error:
            logger.log(logging.INFO if state == "waiting" else logging.ERROR, "deltasync: %s", error)
        self._state, self._error = state, error

    async def _write_heartbeat(self) -> None:
        """Write one if something changed or the last one is old. A failure is logged: heartbeats are never needed."""
        beat = (self._version, self._state, self._error)
        now = time.monotonic()
        if beat == self._beat and now - self._beat_s < self._settings.heartbeat_interval_s:
            return
        self._beat, self._beat_s = beat, now
        head = self._head
        document = Heartbeat(
            replica_id=self._settings.replica_id,
            run_id=head.run_id if head is not None else None,
            version=self._version,
            state=self._state,
            head_version=head.version if head is not None else None,
            error=self._error,
        )
        try:
            await asyncio.to_thread(heartbeat.write, self._reader.store, document)
        except DeltaSyncError as error:
            logger.warning("deltasync: heartbeat not written: %s", error)


def _tell(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    """Set an event from another thread, also when its loop is about to end."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(changed.set)
