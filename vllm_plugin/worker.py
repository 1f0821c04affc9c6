"""One worker's share of a replica: the load plan, a follower over the live parameters, and work in the background.

vLLM runs RPCs on the thread that also runs the engine's steps. So everything here that takes long happens in a thread of
its own while tokens are being generated, and the RPCs only start it, look at it, or commit. With several workers each has
a shard; the driver adds up their fingerprints and tells all of them what came out.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from deltasync import manifest
from deltasync.chain import Step
from deltasync.errors import DeltaSyncError, FingerprintMismatchError
from deltasync.manifest import Head
from deltasync.memory import LiveMemory
from deltasync.reader import ChannelReader
from deltasync.replica import CommittedVersion, Follower, StagedVersion
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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltasync")
        self._work: Future[Reply] | None = None
        self._staged: StagedVersion | None = None
        self._committed: CommittedVersion | None = None
        before = time.perf_counter()
        segments = load_plan.record(model, self._reader.specs)
        self._memory = LiveMemory(self._reader.specs, segments)
        self._follower = Follower(self._reader, self._memory)
        logger.info(
            "deltasync load plan: tensors=%d segments=%d record_s=%.3f",
            sum(1 for held in segments.values() if held),
            sum(map(len, segments.values())),
            time.perf_counter() - before,
        )

    def open(self) -> Reply:
        """`regions`: which elements of each tensor this worker holds."""
        return {"regions": self._memory.regions}

    def poll(self) -> Reply:
        """How the work in the background goes: `state` is `working`, or what it ended with, which is told once."""
        work = self._work
        if work is None:
            return {"state": "idle"}
        if not work.done():
            return {"state": "working"}
        self._work = None
        error = work.exception()
        return work.result() if error is None else {"state": "failed", "error": describe(error)}

    def audit(self, verify: bool) -> Reply:
        """Begin to read every bit of live memory; ends in `audited` with `parts`, the fingerprints of its segments.

        Args:
            verify: Compare with the checkpoint first, which proves the load plan.
        """
        return self._begin(lambda: self._audit(verify))

    def _audit(self, verify: bool) -> Reply:
        before = time.perf_counter()
        compared = 0
        if verify and self._checkpoint is not None:
            compared = load_plan.verify(self._memory, self._reader.specs, self._checkpoint)
        self._memory.audit()
        logger.info("deltasync audit: compared_tensors=%d audit_s=%.3f", compared, time.perf_counter() - before)
        return {"state": "audited", "parts": self._memory.parts}

    def settle(self, head: Reply, total: int, identify: bool) -> Reply:
        """Learn what the audit of all workers says about the live bits.

        Args:
            head: Of the channel.
            total: Fingerprint of the model, -1 if copies differ.
            identify: Find out which version it is, instead of whether it is the one taken for live.
        """
        if identify:
            self._follower.identify(Head(**head), total)
        else:
            self._follower.settle(total)
        return {"version": self._follower.version}

    def stage(self, head: Reply) -> Reply:
        """Begin to stage the next steps towards head; ends in `staged`, `idle` if there is none, or `unsettled`."""
        return self._begin(lambda: self._stage(Head(**head)))

    def _stage(self, head: Head) -> Reply:
        self._staged = None
        if not self._follower.settled:
            return {"state": "unsettled"}
        steps = self._follower.plan(head)
        if not steps:
            return {"state": "idle"}
        group = self._follower.batch(steps)
        try:
            self._staged = self._follower.stage(*group)
        except DeltaSyncError as error:
            failed = next((step for step in group if self._reader.distrusts(step)), None)
            return {"state": "failed", "error": describe(error), "step": failed and dataclasses.astuple(failed)}
        return {"state": "staged", "step": tuple(map(str, group))}

    def distrust(self, steps: list[list[Any]]) -> Reply:
        """Plan without these steps, which failed on some worker: all must take the same way."""
        for step in steps:
            self._reader.distrust(Step(*step))
        return {}

    def _begin(self, action: Callable[[], Reply]) -> Reply:
        if self._work is None:
            self._work = self._thread.submit(action)
        return self.poll()

    def commit(self, alone: bool) -> Reply:
        """Write the staged version into the live parameters. Call between two steps.

        Args:
            alone: There is no other worker: confirm the bits, or roll back, at once. Otherwise the reply holds `parts`, and
                `confirm` or `undo` must follow before the next step.
        """
        staged, self._staged = self._staged, None
        assert staged is not None
        before = time.perf_counter()
        try:
            self._committed = self._follower.commit(staged)
        except Exception:
            self._follower.doubt()
            raise
        reply = {
            "anchor": staged.use_anchor,
            "changed": staged.staged.changed,
            "payload_bytes": staged.payload_bytes,
            "created_at": staged.manifest.created_at,
            "stage_s": staged.stage_s,
            "commit_s": time.perf_counter() - before,
            "scatter_s": self._committed.report.scatter_s,
        }
        confirmed = self.confirm(None, None) if alone else {"parts": self._committed.report.parts}
        return reply | confirmed

    def confirm(self, fingerprints: dict[str, int] | None, total: int | None) -> Reply:
        """Hold what was committed to the published fingerprints, and roll it back if it is something else.

        Args:
            fingerprints: Of the changed tensors, over all workers; None for this one alone.
            total: Of the model.
        """
        committed, self._committed = self._committed, None
        assert committed is not None
        try:
            return {"version": self._follower.confirm(committed, fingerprints, total)}
        except FingerprintMismatchError as error:
            return {"error": describe(error)}

    def undo(self) -> Reply:
        """Roll back what was committed, because another worker could not."""
        committed, self._committed = self._committed, None
        self._follower.doubt()
        if committed is not None:
            self._follower.rollback(committed)
        return {"version": self._follower.version}

    def digest(self) -> Reply:
        """sha256 of every tensor's bits, gathered out of live memory, independent of the fingerprint."""
        names = self._reader.specs
        return {"sha256": {name: manifest.sha256_hex(self._memory.gather(name).data) for name in names}}

    def read(self, name: str) -> Reply:
        """`bits` of each of this worker's segments of a tensor, in the order of its regions and theirs."""
        return {"bits": self._memory.read(name)}


def describe(error: BaseException) -> str:
    """An error as text that crosses processes: its class and its sentence."""
    return f"{type(error).__name__}: {error}"


def reply(action: Callable[[], Reply]) -> Reply:
    """Run an RPC's body; errors become `{"error": text}`, because an exception in an RPC may end vLLM's engine."""
    try:
        return action()
    except DeltaSyncError as error:
        return {"error": describe(error)}
    except Exception as error:  # the server goes on with the weights it has, and says why
        logger.exception("deltasync failed unexpectedly")
        return {"error": f"Unexpected {describe(error)}"}
