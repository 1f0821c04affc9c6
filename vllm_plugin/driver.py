"""The driver: one task in vLLM's API server that follows the channel and moves the workers along.

    head -> stage -> (poll) -> pause_generation(keep) -> commit -> [confirm] -> update_weight_version -> resume_generation

Staging happens in the workers while tokens are generated; the pause covers the commit only. If staging or the commit fails,
the version before stays served, and the next look at head tries again. If a commit fails so that nobody knows the bits,
generation stays paused until an audit or full weights tell. If another client has paused generation, it stays paused; while
vLLM sleeps, nothing is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltasync import heartbeat, manifest
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, DeltaSyncError, NotPublishedError, SleepingError
from deltasync.heartbeat import Heartbeat
from deltasync.live import Region, combine, model_fingerprint
from deltasync.manifest import Head
from deltasync.poll import Poll
from deltasync.printable import printable
from deltasync.reader import ChannelReader
from deltasync.stores import open_store
from vllm_plugin import load_plan
from vllm_plugin.metrics import Commit, Metrics, error_class, generated_tokens, running_requests
from vllm_plugin.pauses import Pauses
from vllm_plugin.workers import Workers, assemble, by_reason, regions_of, told

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

HISTORY = 4096
"""Commits that are remembered."""

_STOP_S = 5.0  # that the last heartbeat may keep a server that ends

_UNDONE = ("FingerprintMismatchError", "StageError", "SleepingError")
"""Errors of a commit that say that it did not begin, or that the old bits are back."""


class Driver:
    """Follows one channel for one server.

    Args:
        engine: vLLM's engine client.
        settings: With a channel.
        metrics: Told what happens.
    """

    def __init__(self, engine: Any, settings: ReplicaSettings, metrics: Metrics) -> None:
        assert settings.channel is not None
        self._engine = engine
        self._workers = Workers(engine)
        self.pauses = Pauses(engine)
        self._settings = settings
        self._metrics = metrics
        self._channel = settings.channel
        self._reader = ChannelReader(open_store(settings.channel), settings.trusted_keys, settings.max_head_age_s)
        self._state = "waiting"
        self._error: str | None = "Waiting for the first look at the channel."
        self._version: int | None = None
        self._head: Head | None = None
        self._opened = False
        self._callers = ThreadPoolExecutor(2, "deltasync-callers")  # who asks must not keep the driver's own looks waiting
        self._busy = asyncio.Lock()
        self._wake = asyncio.Event()  # look at head now
        self._looked = asyncio.Event()  # the look at head that goes on or comes next has ended; then there is a new one
        # Of each worker, which elements of each tensor it holds; of each tensor, its fingerprint over all workers.
        self._regions: list[dict[str, list[Region]]] = []
        self._reloaded: dict[str, str] = {}  # tensors that take the fallback, and why
        self._fingerprints: dict[str, int] = {}
        self._audited_s = 0.0
        self._beat_s = -settings.heartbeat_interval_s
        self._beat: tuple[object, ...] = ()
        self.commits: deque[Commit] = deque(maxlen=HISTORY)

    @property
    def version(self) -> int | None:
        """The version that tokens are made with; changes only while generation is paused. None before the first."""
        return self._version

    @property
    def not_ready(self) -> str | None:
        """Why this server should not get requests, in one sentence; None if it serves a version that is new enough."""
        newest = None if self._head is None else self._head.version
        if self._version is None or newest is None:
            return f"This server serves no version of {self._reader.store.url} yet. {self._error or ''}".rstrip()
        if self._state == "sleeping" or self.pauses.held:
            return f"This server does not generate now. {self._error or ''}".rstrip()
        if newest - self._version > self._settings.ready_behind:
            return f"This server serves version {self._version}, {newest - self._version} behind version {newest}."
        return None

    def status(self, commit_count: int = HISTORY) -> dict[str, Any]:
        """What `GET /deltasync/status` returns, with the last commits only."""
        recent = list(self.commits)[-commit_count:] if commit_count else []
        return {
            "replica_id": self._settings.replica_id,
            "channel": self._reader.store.url,
            "run_id": self._head.run_id if self._head is not None else None,
            "state": self._state,
            "version": self._version,
            "head_version": self._head.version if self._head is not None else None,
            "error": self._error,
            "kv_cache": self._settings.kv_cache,
            "trusted_keys": None if self._reader.trusted is None else self._reader.trusted.names,
            "patched_tensors": len(self._reader.specs) - len(self._reloaded) if self._opened else None,
            "reloaded_tensors": len(self._reloaded) if self._opened else None,
            "reloaded": by_reason(self._reloaded),
            "commits": [dataclasses.asdict(commit) for commit in recent],
        }

    async def reach(self, version: int | None) -> int:
        """Look at head at once, and wait until a version or a later one is served.

        Args:
            version: None for the newest that is published now, or the first if none is.

        Returns:
            The version served.

        Raises:
            DeltaSyncError: the newest version cannot be found out.
        """
        if version is None:
            try:
                loop = asyncio.get_running_loop()
                version = (await loop.run_in_executor(self._callers, self._reader.head)).version
            except NotPublishedError:
                version = 1
        self._wake.set()
        while self._version is None or self._version < version:
            await self._looked.wait()
        return self._version

    async def digest(self) -> dict[str, Any]:
        """sha256 of every tensor in live memory, all workers' shards together, with the version they are of.

        Raises:
            ApplyError: two workers hold different copies of the same elements.
        """
        async with self._busy:
            version, sha256 = self._version, {}
            if len(self._regions) == 1:
                (reply,) = await self._workers.call("digest")
                sha256 = reply["sha256"]
            else:
                for name, spec in self._reader.specs.items():
                    shards = [reply["bits"] for reply in await self._workers.call("read", name)]
                    regions = [held[name] for held in self._regions]
                    sha256[name] = manifest.sha256_hex(assemble(spec, regions, shards).data)
        return {"version": version, "sha256": sha256}

    async def run(self) -> None:
        """Follow until cancelled."""
        logger.info("deltasync follows %s as %s", self._reader.store.url, self._settings.replica_id)
        loop, wake = asyncio.get_running_loop(), self._wake
        with Poll(self._reader.store, self._settings.poll_interval_s, lambda: _tell(loop, wake)) as poll:
            while True:
                wake.clear()
                before = self._version
                await self.look()
                await self._write_heartbeat()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        wake.wait(), poll.delay_s(self._version != before, self._state in ("serving", "waiting"))
                    )

    async def stop(self) -> None:
        """Tell the channel that this server has ended in order. Call when `run` has ended."""
        self._state, self._error = heartbeat.STOPPED, None
        self._callers.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await self._write_heartbeat()

    async def look(self, version: int | None = None) -> None:
        """Go one step towards a version, head's by default, and report what came of it."""
        try:
            await self._follow_once(version)
        except NotPublishedError as error:
            self._report("waiting", f"Waiting for the first version: {error}")
        except SleepingError as error:
            self._report("sleeping", str(error))
        except DeltaSyncError as error:
            self._metrics.failed(error)
            self._report("failed", f"{type(error).__name__}: {error}")
        except Exception as error:  # the server goes on with the weights it has, and says why
            self._metrics.failed(error)
            self._report("failed", printable(f"Unexpected {type(error).__name__}: {error}"))
            logger.exception("deltasync failed unexpectedly")
        self._metrics.looked(self._version, self._head.version if self._head is not None else None)
        self._looked.set()
        self._looked = asyncio.Event()

    async def _follow_once(self, version: int | None) -> None:
        self._head = await asyncio.to_thread(self._reader.head)
        async with self._busy:
            if not self._opened:
                await self._open()
            if self.pauses.held:
                await self._settle(first=False)
            if self._version == (version or self._head.version) and await self._settled():
                await self._audit_if_due()
                self._report("serving", None)
                return
            tokens_before = generated_tokens()
            state = await self._stage(self._head, version)
            if state == "unsettled":
                await self._settle(first=False)
            elif state == "staged":
                await self._commit(tokens_before)

    async def _open(self) -> None:
        """Learn what the workers hold, prove it, and find out which version they serve."""
        keys = self._settings.trusted_keys
        await self._workers.rpc("deltasync_open", self._channel, None if keys is None else str(keys))
        await self._settle(first=True)
        self._opened = True

    async def _settled(self) -> bool:
        """Whether all workers know what the bits in their memory are."""
        return all(reply["settled"] for reply in await self._workers.call("settled"))

    async def _audit_if_due(self) -> None:
        """Find out bits that changed by themselves, by a fault of the memory say.

        Raises:
            ApplyError: there are some. The next look loads full weights.
        """
        interval_s, version = self._settings.audit_interval_s, self._version
        if interval_s and time.monotonic() - self._audited_s >= interval_s:
            await self._settle(first=False)
            if self._version is None:
                raise ApplyError(
                    f"The weights in memory were not those of version {version} any more; loading full weights."
                )

    async def _settle(self, first: bool) -> None:
        """Audit all live memory and tell the workers what came out; the first time, prove where it lies."""
        replies = await self._workers.work("audit", first)
        self._audited_s = time.monotonic()
        if first:
            self._regions = [regions_of(reply) for reply in replies]
            self._reloaded = {name: why for reply in replies for name, why in reply["reloaded"].items()}
            await asyncio.to_thread(load_plan.check_coverage, self._reader.specs, self._regions, self._reloaded)
            if self._reloaded:
                await self._workers.call("prove")
            self._log_plan()
        parts = [{name: tuple(values) for name, values in reply["parts"].items()} for reply in replies]
        self._fingerprints = combine(self._regions, parts)
        assert self._head is not None
        total = model_fingerprint(self._fingerprints)
        replies = await self._workers.call("settle", dataclasses.asdict(self._head), total, first)
        version = replies[0]["version"]
        if version != self._version:
            await self._announce(version)
        if first and version is not None:
            logger.info("deltasync serves version=%d, which the loaded weights already were", version)
        if version is not None:
            await self.pauses.release()

    async def _announce(self, version: int | None) -> None:
        """Tell vLLM which version the weights are, which labels tokens and keeps the prefix cache apart."""
        await self._engine.update_weight_version("unknown" if version is None else str(version))
        self._version = version

    def _log_plan(self) -> None:
        patched = len(self._reader.specs) - len(self._reloaded)
        logger.info("deltasync load plan is proven: patched_in_place=%d reloaded=%d", patched, len(self._reloaded))
        for each in by_reason(self._reloaded):
            logger.warning(
                "deltasync: %d tensors (%s, ...) take the fallback, because %s: a commit that changes them has vLLM load "
                "their layers again, which takes longer",
                each["tensors"],
                each["first"],
                each["reason"],
            )

    async def _stage(self, head: Head, version: int | None) -> str:
        """Have the workers stage the next step: `staged`, `unsettled` or, with nothing to do, `idle`.

        Raises:
            ApplyError: a worker failed, or they do not agree; the next look tries again.
        """
        self._state = "staging"
        replies = await self._workers.work("stage", dataclasses.asdict(head), version)
        failed = [reply for reply in replies if reply["state"] == "failed"]
        if failed:
            await self._workers.call("distrust", [reply["step"] for reply in failed if reply.get("step") is not None])
            error = failed[0]["error"]
            if self._version is None:
                unlike = await asyncio.to_thread(self._reader.unlike, head, self._fingerprints)
                error = error if unlike is None else f"{error} {unlike}"
            raise ApplyError(error)
        states = {(reply["state"], *reply.get("step", ())) for reply in replies}
        if len(states) > 1:
            raise ApplyError(f"The workers staged different steps: {sorted(map(str, states))}.")
        return str(replies[0]["state"])

    async def _commit(self, tokens_before: int) -> None:
        """Pause, commit, hold the bits to the published fingerprints, announce, resume."""
        self._state = "committing"
        running = running_requests()
        try:
            async with self.pauses.paused(self._settings.kv_cache == "recompute", is_safe):
                reply = await self._commit_paused()
                await self._announce(reply["version"])
        except ApplyError as error:
            self._metrics.rolled_back(error)
            raise
        finally:
            pause_s = self.pauses.last_s
            self._metrics.paused(pause_s)
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
            reload_s=reply["reload_s"],
            lag_s=served_at - published_at,
            tokens_during_sync=generated_tokens() - tokens_before,
            running_requests=running,
            served_at=served_at,
        )
        self.commits.append(commit)
        kind = "anchor" if commit.anchor else "fold" if reply["fold"] else "delta"
        self._metrics.committed(commit, kind)
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

    async def _commit_paused(self) -> dict[str, Any]:
        """Commit on all workers, or on none; returns the longest times, and the numbers of all of them together."""
        alone = len(self._regions) == 1
        replies = await self._workers.call("commit", alone, check=False)
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            if not alone:
                await self._workers.call("undo")
            raise told(errors[0])
        merged = replies[0] | {key: max(reply[key] for reply in replies) for key in ("stage_s", "scatter_s", "reload_s")}
        if alone:
            return merged
        parts = [{name: tuple(values) for name, values in reply["parts"].items()} for reply in replies]
        changed = combine(self._regions, parts)
        fingerprints = self._fingerprints | changed
        confirmed = await self._workers.call("confirm", changed, model_fingerprint(fingerprints))
        self._fingerprints = fingerprints
        return merged | {"version": confirmed[0]["version"], "changed": sum(reply["changed"] for reply in replies)}

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


def is_safe(error: BaseException) -> bool:
    """Whether live weights are those of the version before, although a commit ended with this error."""
    return isinstance(error, ApplyError) and error_class(error) in _UNDONE


def _tell(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    """Set an event from another thread, also when its loop is about to end."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(changed.set)
