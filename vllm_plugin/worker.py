"""One worker's share of a replica: the load plan, a follower over the live parameters, and staging in the background.

vLLM runs RPCs on the thread that also runs the engine's steps. So everything here that takes long happens in a thread of
its own while tokens are being generated, and the RPCs only start it, look at it, or commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from deltasync import manifest
from deltasync.errors import DeltaSyncError, FingerprintMismatchError
from deltasync.memory import LiveMemory
from deltasync.reader import ChannelReader
from deltasync.replica import Follower, StagedVersion
from deltasync.stores import open_store
from vllm_plugin import load_plan

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

Reply = dict[str, Any]


class WorkerReplica:
    """Follows one channel with the parameters of one worker.

    Args:
        model: The loaded vLLM model.
        checkpoint: Where its weights were loaded from, None if that is no directory with safetensors files.
        channel: URL of the channel, which must have a version.

    Raises:
        NotPublishedError: the channel has none yet.
        ModelMismatchError: the model does not match the channel.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Path | None, channel: str) -> None:
        self._reader = ChannelReader(open_store(channel))
        self._checkpoint = checkpoint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltasync-stage")
        self._staging: Future[StagedVersion | None] | None = None
        before = time.perf_counter()
        segments = load_plan.record(model, self._reader.specs)
        memory = LiveMemory(self._reader.specs, segments)
        self._follower = Follower(self._reader, memory)
        logger.info(
            "deltasync load plan: tensors=%d segments=%d record_s=%.3f",
            len(segments),
            sum(map(len, segments.values())),
            time.perf_counter() - before,
        )
        self._verified = False

    @property
    def version(self) -> int | None:
        """The version whose bits are live; None while they are of no published version."""
        return self._follower.version

    def stage(self) -> None:
        """Begin to stage the next step towards head in the background; unless that is under way."""
        if self._staging is None:
            self._staging = self._thread.submit(self._stage)

    def _stage(self) -> StagedVersion | None:
        head = self._reader.head()
        if not self._verified:
            self._verify()
        steps = self._follower.plan(head)
        return self._follower.stage(steps[0]) if steps else None

    def _verify(self) -> None:
        """Prove the load plan against the checkpoint, and find out which version is live."""
        before = time.perf_counter()
        memory = self._follower.memory
        compared = 0
        if self._checkpoint is not None:
            compared = load_plan.verify(memory, self._reader.specs, self._checkpoint)
        version = self._follower.identify(self._reader.head())
        self._verified = True
        logger.info(
            "deltasync load plan verified: tensors=%d live_version=%s verify_s=%.3f",
            compared,
            version,
            time.perf_counter() - before,
        )

    def poll(self) -> Reply:
        """How staging goes: `state` is `idle`, `staging`, `staged` or, with `error`, `failed`. A failure is told once."""
        job = self._staging
        if job is None:
            return {"state": "idle", "version": self.version}
        if not job.done():
            return {"state": "staging", "version": self.version}
        error = job.exception()
        if error is not None or job.result() is None:
            self._staging = None
        if error is not None:
            return {"state": "failed", "version": self.version, "error": describe(error)}
        return {"state": "idle" if self._staging is None else "staged", "version": self.version}

    def commit(self) -> Reply:
        """Write the staged version into the live parameters, confirm its bits, or roll back. Call between two steps."""
        job, self._staging = self._staging, None
        assert job is not None
        staged = job.result()
        assert staged is not None
        before = time.perf_counter()
        try:
            committed = self._follower.commit(staged)
            self._follower.confirm(committed)
        except FingerprintMismatchError as error:
            return {"version": self.version, "error": describe(error)}
        return {
            "version": self.version,
            "anchor": staged.step.use_anchor,
            "changed": staged.staged.changed,
            "payload_bytes": staged.step.payload_bytes,
            "created_at": staged.manifest.created_at,
            "stage_s": staged.stage_s,
            "commit_s": time.perf_counter() - before,
            "scatter_s": committed.report.scatter_s,
        }

    def digest(self) -> Reply:
        """sha256 of every tensor's bits, gathered out of live memory, independent of the fingerprint."""
        gather = self._follower.memory.gather
        names = self._reader.specs
        return {"version": self.version, "sha256": {name: manifest.sha256_hex(gather(name).data) for name in names}}


def describe(error: BaseException) -> str:
    """An error as text that crosses processes: its class and its sentence."""
    return f"{type(error).__name__}: {error}"


def reply(action: Callable[[], Reply]) -> Reply:
    """Run an RPC's body; our errors become `{"error": text}`, because an exception in an RPC may end vLLM's engine."""
    try:
        return action()
    except DeltaSyncError as error:
        return {"error": describe(error)}
