"""One worker's share of a replica: the load plan, a follower over the live parameters, and work in the background.

vLLM runs RPCs on the thread that also runs the engine's steps. So what takes long happens in a thread while tokens are being
generated, and the RPCs only start it, look at it, or commit. With several workers each has a shard; the driver adds up their
fingerprints and tells all of them what came out.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from deltasync.channel.nearest import open_nearest
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FingerprintMismatchError,
    MissingVersionError,
    ModelMismatchError,
    SleepingError,
)
from deltasync.kernels import cpu
from deltasync.live import LiveMemory
from deltasync.replicas.follower import CommittedVersion, Follower, StagedVersion
from deltasync.stores import Store
from deltasync.stores.cache import behind_cache
from vllm_plugin import logger
from vllm_plugin.load import copies, fallback, plan, proof
from vllm_plugin.messages import Audit, Committed, Failure, Handed, Live, Work

CALLS = frozenset(
    ("settled", "poll", "audit", "prove", "settle", "identified", "stage", "commit", "confirm", "undo", "read")
)
"""Methods of `WorkerReplica` that may be called from outside the worker."""

_followed: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # models, and their channels


class WorkerReplica:
    """Follows one channel with the parameters of one worker, of the model that vLLM's model runner has loaded.

    Raises:
        NotPublishedError: the channel has none yet.
        ModelMismatchError: the model does not match the channel, or vLLM keeps copies of weights that it does not refresh.
        ConfigError: there is a `WorkerReplica` of this model already, of which only one can know what its bits are; or numba
            has no threading layer for this.
    """

    def __init__(self, runner: Any, channel: str, trusted_keys: str | None = None) -> None:
        model = runner.get_model()
        if model in _followed:
            raise ConfigError(
                f"Something else in this server follows {_followed[model]} with the same weights; choose one: "
                "the driver, the worker extension alone, or vLLM's weight-transfer routes."
            )
        self._reader = ChannelReader(open_channel(channel), trusted_keys)
        self._runner = runner
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        limit_threads()
        self._thread = ThreadPoolExecutor(1, "deltasync", _use_device, (device,))
        self._work: Future[Work] | None = None
        self._staged: StagedVersion | None = None
        self._committed: CommittedVersion | None = None
        self._asleep = False
        before = time.perf_counter()
        self._plan = plan.record(model, self._reader.specs)
        self._mirror: fallback.Mirror | None = None
        self._unproven: set[str] = set()
        self._copies = copies.find(model)
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

    def fall_asleep(self) -> None:
        """vLLM takes the weights out of memory: touch them no more, and refuse what would."""
        if self._work is not None:
            wait([self._work])
        if self._committed is not None:
            self.undo()
        self._work = self._staged = None
        self._asleep = True

    def wake_up(self) -> None:
        """The weights are in memory again; with which bits, an audit has to find out."""
        self._asleep = False
        self._follower.doubt()

    def call(self, method: str, *args: Any) -> Any:
        """Call one of `CALLS`; `prove`, `commit`, `confirm` and `undo` only while generation is paused.

        Raises:
            ConfigError: it is none of these.
            SleepingError: vLLM sleeps, and nothing was touched.
        """
        if method not in CALLS:
            raise ConfigError(f"deltasync_call takes {', '.join(sorted(CALLS))}, not {method!r}.")
        if self._asleep and method not in ("undo", "settle", "identified"):
            raise SleepingError("vLLM sleeps. Its weights are left alone until it wakes up.")
        return getattr(self, method)(*args)

    def settled(self) -> bool:
        """Whether it is known which version the live bits are; if not, `stage` ends in `unsettled`."""
        return self._follower.settled

    def poll(self) -> Work:
        """How the work in the background goes. What it ended with is told once."""
        work = self._work
        if work is None:
            return Work("idle")
        if not work.done():
            return Work("working")
        self._work = None
        error = work.exception()
        return work.result() if error is None else Work("failed", failure=Failure.of(error))

    def _begin(self, action: Callable[[], Work]) -> Work:
        self._work = self._thread.submit(action)
        return self.poll()

    def audit(self, first: bool) -> Work:
        """Begin to read every bit of live memory; ends in `audited`. The first time, prove the load plan before."""
        return self._begin(lambda: self._audit(first))

    def _audit(self, first: bool) -> Work:
        before = time.perf_counter()
        reloaded = self._verify() if first else {}
        self._memory.audit()
        logger.info("deltasync audit: audit_s=%.3f", time.perf_counter() - before)
        return Work("audited", Audit(self._memory.parts, self._memory.regions if first else {}, reloaded))

    def _verify(self) -> dict[str, str]:
        """Prove the load plan against the checkpoint; returns the tensors that take the fallback instead, and why."""
        specs, reasons = self._reader.specs, self._plan.reasons
        if self._mirror is not None:
            return reasons
        self._unproven = proof.verify(self._plan, self._memory, specs, proof.checkpoint(self._runner))
        tensors = fallback.mirrored(self._plan, specs, proof.checkpoint(self._runner)) if reasons else {}
        logger.info("deltasync load plan: compared=%d reloaded=%d", len(specs) - len(self._unproven), len(tensors))
        if tensors:
            self._mirror = fallback.Mirror(self._runner, {name: self._plan.layers[name] for name in tensors}, tensors)
            self._memory = LiveMemory(specs, self._plan.segments | self._mirror.segments)
            self._follower = Follower(self._reader, self._memory)
        return reasons

    def prove(self) -> None:
        """Make sure that the fallback works; changes live memory and puts it back."""
        if self._mirror is not None:
            self._mirror.prove()

    def settle(self, total: int) -> Live:
        """Learn the fingerprint of the model that an audit of all workers found, -1 if copies differ."""
        self._follower.settle(total)
        return Live(self._follower.version)

    def identified(self, handed: Handed | None) -> None:
        """Learn which version the live bits are, None for no version that the channel knows.

        Raises:
            ModelMismatchError: None, and there are tensors that the checkpoint did not prove.
        """
        if handed is None and self._unproven:
            raise ModelMismatchError(
                f"{len(self._unproven)} tensors, such as {min(self._unproven)}, are not in the checkpoint that vLLM "
                "loaded, and the weights are no version that the channel knows, so it cannot be proven where they lie "
                "in memory: serve the checkpoint that the channel starts from."
            )
        self._follower.identified(None if handed is None else self._reader.handed(*handed))

    def stage(self, way: list[Handed]) -> Work:
        """Begin to stage records that follow each other; ends in `staged`, `unsettled` or `failed`."""
        return self._begin(lambda: self._stage(way))

    def _stage(self, way: list[Handed]) -> Work:
        self._staged = None
        if not self._follower.settled:
            return Work("unsettled")
        read: list[Stored] = []
        try:
            for handed in way:
                read.append(self._reader.handed(*handed))
            self._staged = self._follower.stage(read)
        except DeltaSyncError as error:
            failed = self._follower.failed if len(read) == len(way) else way[len(read)][0]
            is_blamed = isinstance(error, CorruptDataError | MissingVersionError)
            return Work("failed", failure=Failure.of(error), blamed=failed if is_blamed else None)
        return Work("staged")

    def commit(self, alone: bool) -> Committed:
        """Write the staged version into the live parameters.

        A worker alone also confirms the bits, or rolls back; for others `confirm` or `undo` follows before the next step.
        """
        staged, self._staged = self._staged, None
        assert staged is not None
        try:
            self._committed = committed = self._follower.commit(staged)
            reload_s = self._reload(staged)
        except Exception:
            self.undo()
            raise
        if alone:
            self.confirm(None, None)
        report = committed.report
        parts = {} if alone else report.parts
        return Committed(staged.staged.changed, staged.stage_s, report.scatter_s, reload_s, parts)

    def confirm(self, fingerprints: dict[str, int] | None, total: int | None) -> None:
        """Hold what was committed to the published fingerprints, and roll it back if it is something else.

        Given are those of the changed tensors and of the model, over all workers; None for this worker alone.
        """
        committed, self._committed = self._committed, None
        assert committed is not None
        try:
            self._follower.confirm(committed, fingerprints, total)
        except FingerprintMismatchError:
            self._reload(committed.staged)
            raise

    def _reload(self, staged: StagedVersion) -> float:
        """Have vLLM make anew what it made of the weights that were written. Returns seconds."""
        reload_s = 0.0 if self._mirror is None else self._mirror.reload(staged.staged.fingerprints)
        copies.refresh(self._copies)
        return reload_s

    def undo(self) -> None:
        """Roll back what was committed, because another worker could not."""
        committed, self._committed = self._committed, None
        self._follower.doubt()
        if committed is not None:
            self._follower.rollback(committed)
            self._reload(committed.staged)

    def read(self, name: str) -> list[bytes]:
        """Bits of each of this worker's segments of a tensor, read out of live memory, in the order of its regions."""
        return self._memory.read(name)


def limit_threads() -> None:
    """Keep our kernels on the host to the threads that vLLM gives each worker, as OMP_NUM_THREADS says, or an equal share.

    Raises:
        ConfigError: numba has no threading layer that several threads may use at once; it would end the process.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if given.isdigit() and int(given):
        cpu.limit_threads(int(given))
    elif torch.distributed.is_initialized():
        cpu.limit_threads(len(os.sched_getaffinity(0)) // torch.distributed.get_world_size())
    if cpu.threading_layer() == "workqueue":
        raise ConfigError(
            "numba found neither OpenMP nor TBB here, and what it has instead ends the process when two threads use it: "
            "install libgomp (apt-get install libgomp1)."
        )


def _use_device(device: torch.device) -> None:
    """Make a device the current one of this thread."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def open_channel(channel: str) -> Store:
    """The store of a channel, behind the cache that the processes of this machine share."""
    settings = ReplicaSettings.from_env()
    workers = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return behind_cache(open_nearest(channel), settings.cache_dir, settings.cache_bytes, workers)
