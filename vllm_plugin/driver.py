"""The driver: one task in vLLM's API server that follows the channel and moves the workers along.

    head -> stage -> (poll) -> pause_generation(keep) -> commit -> [confirm] -> update_weight_version -> resume_generation

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

import numpy as np
import torch

from deltasync import heartbeat, manifest
from deltasync.config import ReplicaSettings
from deltasync.errors import ApplyError, DeltaSyncError, NotPublishedError
from deltasync.heartbeat import Heartbeat
from deltasync.manifest import Head
from deltasync.memory import Region, combine, model_fingerprint
from deltasync.poll import Poll
from deltasync.reader import ChannelReader
from deltasync.stores import open_store
from deltasync.types import TensorSpec
from vllm_plugin import load_plan
from vllm_plugin.metrics import generated_tokens, running_requests

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

# Between two looks at work in the background: each is an RPC that runs between two engine steps.
_POLL_S = (0.002, 0.05)
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
        self._busy = asyncio.Lock()
        # Of each worker, which elements of each tensor it holds; of each tensor, its fingerprint over all workers.
        self._regions: list[dict[str, list[Region]]] = []
        self._fingerprints: dict[str, int] = {}
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
        """sha256 of every tensor in live memory, all workers' shards together, with the version they are of.

        Raises:
            ApplyError: two workers hold different copies of the same elements.
        """
        async with self._busy:
            version, sha256 = self._version, {}
            if len(self._regions) == 1:
                (reply,) = await self._call("digest")
                sha256 = reply["sha256"]
            else:
                for name, spec in self._reader.specs.items():
                    shards = [reply["bits"] for reply in await self._call("read", name)]
                    regions = [held[name] for held in self._regions]
                    sha256[name] = manifest.sha256_hex(assemble(spec, regions, shards).data)
        return {"version": version, "sha256": sha256}

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
                    await asyncio.wait_for(
                        changed.wait(), poll.delay_s(self._version != before, self._state in ("serving", "waiting"))
                    )

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
        async with self._busy:
            if not self._opened:
                await self._open()
            if self._version == self._head.version:
                self._report("serving", None)
                return
            tokens_before = generated_tokens()
            state = await self._stage(self._head)
            if state == "unsettled":
                await self._settle(verify=False, identify=False)
            elif state == "staged":
                await self._commit(tokens_before)

    async def _open(self) -> None:
        """Learn what the workers hold, prove it, and find out which version they serve."""
        replies = await self._rpc("deltasync_open", self._channel)
        self._regions = [_regions(reply["regions"]) for reply in replies]
        await asyncio.to_thread(load_plan.check_coverage, self._reader.specs, self._regions)
        await self._settle(verify=True, identify=True)
        self._opened = True

    async def _settle(self, verify: bool, identify: bool) -> None:
        """Audit all live memory and tell the workers what came out."""
        replies = await self._work("audit", verify)
        parts = [{name: tuple(values) for name, values in reply["parts"].items()} for reply in replies]
        self._fingerprints = combine(self._regions, parts)
        assert self._head is not None
        total = model_fingerprint(self._fingerprints)
        replies = await self._call("settle", dataclasses.asdict(self._head), total, identify)
        version = replies[0]["version"]
        if identify and version is not None:
            await self._engine.update_weight_version(str(version))
            logger.info("deltasync serves version=%d, which the loaded weights already were", version)
        self._version = version

    async def _stage(self, head: Head) -> str:
        """Have the workers stage the next step towards head: `staged`, `unsettled` or, with nothing to do, `idle`.

        Raises:
            ApplyError: a worker failed, or they do not agree; the next look tries again.
        """
        self._state = "staging"
        replies = await self._work("stage", dataclasses.asdict(head))
        failed = [reply for reply in replies if reply["state"] == "failed"]
        if failed:
            await self._call("distrust", [reply["step"] for reply in failed if reply.get("step") is not None])
            raise ApplyError(failed[0]["error"])
        states = {(reply["state"], *reply.get("step", ())) for reply in replies}
        if len(states) > 1:
            raise ApplyError(f"The workers staged different steps: {sorted(map(str, states))}.")
        return str(replies[0]["state"])

    async def _work(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Have all workers do something in the background while tokens are generated; what each ended with."""
        wait_s, longest_s = _POLL_S
        replies = await self._call(method, *args)
        while any(reply["state"] == "working" for reply in replies):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
            # Those that have ended told so once, and say `idle` from then on.
            later = await self._call("poll")
            replies = [new if old["state"] == "working" else old for old, new in zip(replies, later, strict=True)]
        errors = [reply["error"] for reply in replies if reply["state"] == "failed" and "step" not in reply]
        if errors:
            raise ApplyError(errors[0])
        return replies

    async def _commit(self, tokens_before: int) -> None:
        """Pause, commit, hold the bits to the published fingerprints, announce, resume."""
        self._state = "committing"
        running = running_requests()
        paused = time.perf_counter()
        try:
            await self._engine.pause_generation(mode="keep", clear_cache=self._settings.kv_cache == "recompute")
            reply = await self._commit_paused()
            await self._engine.update_weight_version(str(reply["version"]))
        finally:
            await self._engine.resume_generation()
        pause_s = time.perf_counter() - paused
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

    async def _commit_paused(self) -> dict[str, Any]:
        """Commit on all workers, or on none; returns the longest times, and the numbers of all of them together."""
        alone = len(self._regions) == 1
        replies = await self._rpc("deltasync_call", "commit", alone, check=False)
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            if not alone:
                await self._call("undo")
            raise ApplyError(errors[0])
        merged = replies[0] | {key: max(reply[key] for reply in replies) for key in ("stage_s", "commit_s", "scatter_s")}
        if alone:
            return merged
        parts = [{name: tuple(values) for name, values in reply["parts"].items()} for reply in replies]
        changed = combine(self._regions, parts)
        fingerprints = self._fingerprints | changed
        confirmed = await self._call("confirm", changed, model_fingerprint(fingerprints))
        self._fingerprints = fingerprints
        return merged | {"version": confirmed[0]["version"], "changed": sum(reply["changed"] for reply in replies)}

    async def _call(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Call a method of every `WorkerReplica`."""
        return await self._rpc("deltasync_call", method, *args)

    async def _rpc(self, method: str, *args: object, check: bool = True) -> list[dict[str, Any]]:
        """Call one method of all workers.

        Raises:
            ApplyError: one of them failed, if `check`.
        """
        replies: list[dict[str, Any]] = await self._engine.collective_rpc(method, args=args)
        errors = [reply["error"] for reply in replies if "error" in reply and "state" not in reply]
        if check and errors:
            raise ApplyError(errors[0])
        return replies

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


def _regions(held: dict[str, Any]) -> dict[str, list[Region]]:
    """A worker's regions, whose tuples became lists on the way."""
    return {
        name: [(offset, tuple((size, stride) for size, stride in dims)) for offset, dims in regions]
        for name, regions in held.items()
    }


def assemble(spec: TensorSpec, regions: list[list[Region]], shards: list[list[bytes]]) -> np.ndarray:
    """A tensor's bits, flat and unsigned, from the bits of the segments that the workers hold.

    Raises:
        ApplyError: two copies of the same elements differ.
    """
    flat_N = np.zeros(spec.element_count, spec.bits_dtype)
    view = torch.from_numpy(flat_N.view(f"i{flat_N.itemsize}"))
    seen: dict[Region, bytes] = {}
    for held, data in zip(regions, shards, strict=True):
        for region, bits in zip(held, data, strict=True):
            if seen.setdefault(region, bits) != bits:
                raise ApplyError(f"Two workers hold different copies of the same elements of {spec}.")
            offset, dims = region
            source = torch.frombuffer(bytearray(bits), dtype=view.dtype) if bits else view[:0]
            shape = [size for size, _ in dims]
            view.as_strided(shape, [stride for _, stride in dims], offset).copy_(source.reshape(shape))
    return flat_N
