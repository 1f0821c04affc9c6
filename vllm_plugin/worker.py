"""One worker's part of a replica: the load plan, a follower over the live parameters, and background work.

vLLM runs RPCs on the thread of the engine's steps. So long work runs in another thread while tokens are generated, and
RPCs only start it, poll it, or commit. Each of several workers has a shard; the target adds up their fingerprints and sends
all of them the sum.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from deltasync.channel.failover import open_failover
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    CommitError,
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FingerprintMismatchError,
    MissingVersionError,
    ModelMismatchError,
    ShareError,
    SleepingError,
)
from deltasync.following import Follower, StagedVersion, engine
from deltasync.live import LiveMemory, Segment, plan, proof
from deltasync.stores import Store
from deltasync.stores.cache import behind_cache
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import bits_of
from vllm_plugin import logger
from vllm_plugin.load import copies, fallback, loader
from vllm_plugin.load.layers import is_complete, note_loaded
from vllm_plugin.messages import Audit, CommitReply, Failure, Handed, Live, Work

CALLS = frozenset({"settled", "poll", "verify", "audit", "prove", "settle", "identified"})
CALLS |= {"stage", "complete", "commit", "confirm", "undo", "read"}
"""Methods of `WorkerReplica` that the target may call."""

_followed: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # models, and their channels


class WorkerReplica:
    """Follows one channel with one worker's parameters of the model that vLLM's model runner has loaded.

    Raises:
        NotPublishedError: the channel has no version yet.
        ModelMismatchError: the model does not match the channel, or vLLM keeps copies of weights that it does not refresh.
        ConfigError: another `WorkerReplica` changes this model's weights; or see `limit_threads`.
    """

    def __init__(self, runner: Any, channel: str, trusted_keys: str | None = None) -> None:
        model = runner.get_model()
        if model in _followed:
            raise ConfigError(
                f"Something else in this server follows {_followed[model]} with the same weights; choose one: "
                "the follow loop, the worker extension alone, or vLLM's weight-transfer routes."
            )
        self._reader = ChannelReader(open_channel(channel), trusted_keys)
        self._runner = runner
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        limit_threads()
        self._thread = ThreadPoolExecutor(1, "deltasync", _use_device, (device,))
        self._work: Future[Work] | None = None
        self._staged: StagedVersion | None = None
        self._committed: StagedVersion | None = None
        self._coming = torch.empty(0)  # a tensor that the target hands over whole
        self._asleep = False
        self._begun_s = 0.0  # when the background work began
        before = time.perf_counter()
        note_loaded(model)
        self._plan = self._record(model)
        self._mirror: fallback.Mirror | None = None
        self._unproven: set[str] = set()
        self._others: dict[str, TensorSpec] = {}  # of the checkpoint, which the channel lacks
        self._copies: list[copies.DerivedCopy] = []
        self._places: engine.Places | None = None
        self._is_stale = False  # whether reloading layers, or refreshing copies, has failed
        self._memory = LiveMemory(self._reader.specs, self._plan.segments)
        self._memory.warm_up()
        self._follower = Follower(self._reader, self._memory)
        _followed[model] = channel
        logger.info(
            "deltasync load plan: tensors=%d segments=%d record_s=%.3f",
            sum(1 for held in self._plan.segments.values() if held),
            sum(map(len, self._plan.segments.values())),
            time.perf_counter() - before,
        )

    def _record(self, model: torch.nn.Module) -> plan.LoadPlan:
        specs = self._reader.specs
        try:
            return loader.record(model, specs)
        except ModelMismatchError as error:
            found = proof.misfits(specs, loader.checkpoint(self._runner))
            raise ModelMismatchError(f"{'; '.join(found[:5])}. {error}" if found else str(error)) from error

    def fall_asleep(self) -> None:
        """Touch the weights no more, which vLLM is about to take out of memory, and refuse calls that would."""
        if self._work is not None:
            wait([self._work])
        if self._committed is not None:
            self.undo()
        self._work = self._staged = None
        self._asleep = True

    def wake_up(self) -> None:
        """Accept calls again: the weights are in memory. An audit has to find out their bits."""
        self._asleep = False
        self._follower.settled = False

    def put_back(self) -> None:
        """Put parameters and buffers of the model back if something replaced them, or their memory."""
        for name in self._places.put_back() if self._places is not None else ():
            self._follower.settled = False
            logger.error("deltasync: something replaced %s in vLLM's model, which follows a channel; it was put back", name)

    def call(self, method: str, *args: Any) -> Any:
        """Call one of `CALLS`. Call `prove`, `commit`, `confirm` and `undo` only while generation is paused.

        Raises:
            ConfigError: the method is not in the list.
            SleepingError: vLLM sleeps; nothing was touched.
        """
        if method not in CALLS:
            raise ConfigError(f"deltasync_call takes {', '.join(sorted(CALLS))}, not {method!r}.")
        if self._asleep and method not in ("undo", "settle", "identified"):
            raise SleepingError("vLLM sleeps. Its weights are left alone until it wakes up.")
        return getattr(self, method)(*args)

    def settled(self) -> bool:
        """Whether it is known which version the live bits are. If not, `stage` ends in `unsettled`."""
        return self._follower.settled

    def poll(self) -> Work:
        """Return the state of the background work. How it ended is returned once, then `idle`."""
        work = self._work
        if work is None:
            return Work("idle")
        if not work.done():
            return Work("working", idle_s=time.monotonic() - max(self._begun_s, self._follower.progressed_s))
        self._work = None
        error = work.exception()
        return work.result() if error is None else Work("failed", failure=Failure.of(error))

    def _begin(self, action: Callable[[], Work]) -> Work:
        self._begun_s = time.monotonic()
        self._work = self._thread.submit(action)
        return self.poll()

    def verify(self) -> Work:
        """Start to prove the load plan against the checkpoint; ends in `verified`."""
        return self._begin(self._verify)

    def _verify(self) -> Work:
        specs, reasons = self._reader.specs, self._plan.reasons
        if self._mirror is None:
            self._unproven, self._others = proof.verify(self._plan, self._memory, specs, loader.checkpoint(self._runner))
            tensors = fallback.mirrored(self._plan, specs, loader.checkpoint(self._runner)) if reasons else {}
            logger.info("deltasync load plan: compared=%d reloaded=%d", len(specs) - len(self._unproven), len(tensors))
            layers = {name: self._plan.layers[name] for name in tensors}
            self._mirror = fallback.Mirror(self._runner, layers, tensors, reasons)
            self._hold(self._mirror.segments)
        return Work("verified", Audit({}, self._memory.regions, reasons, is_complete(self._runner.get_model())))

    def _hold(self, segments: dict[str, list[Segment]]) -> None:
        self._plan.segments.update(segments)
        self._memory = LiveMemory(self._reader.specs, self._plan.segments)
        self._follower = Follower(self._reader, self._memory)

    def audit(self, ignored: list[str]) -> Work:
        """Start to read every bit of live memory; ends in `audited`.

        `ignored` tensors, which no worker loads, are kept on the host of the first one from now on: the model's fingerprint
        counts them.
        """
        return self._begin(lambda: self._audit(ignored))

    def _audit(self, ignored: list[str]) -> Work:
        before = time.perf_counter()
        self._unproven -= set(ignored)
        if ignored and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            self._hold(proof.kept({name: self._reader.specs[name] for name in ignored}, loader.checkpoint(self._runner)))
        self._memory.audit()
        logger.info("deltasync audit: audit_s=%.3f", time.perf_counter() - before)
        return Work("audited", Audit(self._memory.parts, self._memory.regions))

    def prove(self) -> list[str]:
        """Make sure that the fallback works. Changes live memory and puts it back.

        Returns the checkpoint's tensors that the channel lacks, and that vLLM's loader puts where none of the channel is.
        """
        assert self._mirror is not None
        model, held = self._runner.get_model(), self._plan.segments.values()
        covered = {segment.live.untyped_storage().data_ptr() for segments in held for segment in segments}
        self._mirror.prove(covered)
        self._places = engine.Places(model)
        self._copies = copies.find(model, covered, self._mirror.modules)
        if not self._others:
            return []
        try:
            others = loader.record(model, self._others)
        except ModelMismatchError as error:
            logger.warning("deltasync could not see what vLLM loads that the channel lacks: %s", error)
            return []
        known = {segment.place for segments in held for segment in segments}
        return [
            name
            for name, segments in others.segments.items()
            if name in others.reasons or any(segment.place not in known for segment in segments)
        ]

    def settle(self, total: int) -> Live:
        """Compare the model's fingerprint, as audited over all workers (-1 if copies differ), with the live version's.

        Layers whose reload failed are loaded again first: the audit has read their mirror.

        Raises:
            CommitError: that failed; it is not known what the weights are.
        """
        if self._is_stale:
            try:
                self._reload(())
            except Exception as error:
                raise CommitError(f"vLLM could not load layers again, whose weights are uncertain: {error}") from error
        self._follower.settle(total)
        return Live(self._follower.version)

    def identified(self, handed: Handed | None) -> None:
        """Set which version the live bits are, None for no version of the channel.

        Raises:
            ModelMismatchError: they are no version, and there are tensors that the checkpoint did not prove.
        """
        if handed is None and self._unproven:
            raise ModelMismatchError(
                f"{len(self._unproven)} tensors, such as {min(self._unproven)}, are not in the checkpoint that vLLM "
                "loaded, and the weights are no version that the channel knows, so it cannot be proven where they lie "
                "in memory: serve the checkpoint that the channel starts from."
            )
        self._follower.identified(None if handed is None else self._reader.handed(*handed))

    def stage(self, way: list[Handed]) -> Work:
        """Start to stage consecutive records; ends in `staged`, `unsettled`, `lacking` or `failed`."""
        return self._begin(lambda: self._stage(way))

    def _stage(self, way: list[Handed]) -> Work:
        self._staged = None
        if not self._follower.settled:
            return Work("unsettled")
        read: list[StoredRecord] = []
        try:
            for handed in way:
                read.append(self._reader.handed(*handed))
            self._staged = self._follower.stage(read)
        except ShareError as error:
            return Work("lacking", lacking=list(error.tensors))
        except DeltaSyncError as error:
            failed = error.key if len(read) == len(way) else way[len(read)][0]
            is_blamed = isinstance(error, CorruptDataError | MissingVersionError)
            return Work("failed", failure=Failure.of(error), blamed=failed if is_blamed else None)
        return Work("staged")

    def complete(self, name: str, at: int, data: bytes) -> None:
        """Take bytes `at` and following of a tensor that workers lack; with the last ones it is kept whole on the host."""
        if not self._memory.regions[name]:
            return
        if not at:
            spec = self._reader.specs[name]
            self._coming = torch.empty(spec.element_count, dtype=getattr(torch, spec.dtype))
        bytes_B = bits_of(self._coming).view(np.uint8)
        bytes_B[at : at + len(data)] = np.frombuffer(data, np.uint8)
        if at + len(data) == bytes_B.size:
            self._follower.complete(name, bits_of(self._coming))

    def commit(self, alone: bool) -> CommitReply:
        """Write the staged version into the live parameters.

        A worker that is `alone` also confirms the bits, or rolls back. Others need `confirm` or `undo` before the next step.
        """
        staged, self._staged = self._staged, None
        assert staged is not None
        try:
            self._committed = self._follower.commit(staged)
            reload_s = self._reload(staged.staged.fingerprints)
        except Exception:
            self.undo()
            raise
        if alone:
            self.confirm(None, None)
        done = staged.staged
        return CommitReply(done.changed, staged.stage_s, done.scatter_s, reload_s, {} if alone else done.parts)

    def confirm(self, fingerprints: dict[str, int] | None, total: int | None) -> None:
        """Compare the committed bits with the published fingerprints, and roll them back if they differ.

        The arguments are those of the changed tensors and of the model, over all workers; None if this is the only one.
        """
        committed, self._committed = self._committed, None
        assert committed is not None
        try:
            self._follower.confirm(committed, fingerprints, total)
        except FingerprintMismatchError:
            self._reload(committed.staged.fingerprints)
            raise

    def _reload(self, changed: Iterable[str]) -> float:
        """Have vLLM recompute what it derives from the tensors that were written. Returns the seconds for the fallback."""
        self._is_stale = True
        reload_s = 0.0 if self._mirror is None else self._mirror.reload(changed)
        copies.refresh(self._copies)
        self._is_stale = False
        return reload_s

    def undo(self) -> None:
        """Roll back the commit, because another worker's failed."""
        committed, self._committed = self._committed, None
        self._follower.settled = False
        if committed is not None:
            self._follower.rollback(committed)
            self._reload(committed.staged.fingerprints)

    def read(self, name: str) -> list[bytes]:
        """Return the bits of each of this worker's segments of a tensor, from live memory, in the order of its regions."""
        return self._memory.read(name)


def limit_threads() -> None:
    """Limit our kernels on the host to this worker's threads, see `deltasync.following.engine.limit_threads`."""
    distributed = torch.distributed.is_initialized()
    workers = torch.distributed.get_world_size() if distributed else None
    engine.limit_threads(os.environ.get("OMP_NUM_THREADS", ""), workers)


def _use_device(device: torch.device) -> None:
    """Make `device` this thread's current one."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def open_channel(channel: str) -> Store:
    """Open a channel's store, behind the cache that the processes of this machine share."""
    settings = ReplicaSettings.from_env()
    workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return behind_cache(open_failover(channel), settings.cache_dir, settings.cache_bytes, workers)
