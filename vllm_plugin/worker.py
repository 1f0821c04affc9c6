"""One worker's share of a replica: the load plan, a follower over the live parameters, and work in the background.

vLLM runs RPCs on the thread that also runs the engine's steps. So everything here that takes long happens in a thread of
its own while tokens are being generated, and the RPCs only start it, look at it, or commit. With several workers each has
a shard; the driver adds up their fingerprints and tells all of them what came out.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from deltasync.bits import int_view
from deltasync.channel.documents import Version, sha256_hex
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
from deltasync.follow.follower import CommittedVersion, Follower, StagedVersion
from deltasync.kernels import cpu, segment_kernels
from deltasync.live import LiveMemory
from deltasync.stores import Store, open_store
from deltasync.stores.cache import behind_cache
from vllm_plugin import derived, load_plan
from vllm_plugin.reload import Mirror

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

Reply = dict[str, Any]

Handed = tuple[str, str, bytes | None]
"""A record that the driver has read, on its way to the workers: key, sha256, and its bytes, if they are not too many."""

_followed: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()  # models, and their channels


class WorkerReplica:
    """Follows one channel with the parameters of one worker.

    Args:
        runner: vLLM's model runner, with the model loaded.
        channel: URL of the channel, which must have a version.
        trusted_keys: See `ReaderSettings`; from the environment if None.

    Raises:
        NotPublishedError: the channel has none yet.
        ModelMismatchError: the model does not match the channel, or vLLM keeps copies of weights that it does not refresh.
        ConfigError: there is a `WorkerReplica` of this model already, of which only one can know what its bits are; or numba
            has no threading layer for this.
    """

    def __init__(self, runner: Any, channel: str, trusted_keys: str | None = None) -> None:
        if runner.get_model() in _followed:
            raise ConfigError(
                f"Something else in this server follows {_followed[runner.get_model()]} with the same weights; choose one: "
                "the driver, the worker extension alone, or vLLM's weight-transfer routes."
            )
        self._reader = ChannelReader(open_channel(channel), trusted_keys)
        self._runner = runner
        self._device = next((tensor.device for tensor in runner.get_model().parameters()), torch.device("cpu"))
        limit_threads()
        self._thread = ThreadPoolExecutor(1, "deltasync", _use_device, (self._device,))
        self._work: Future[Reply] | None = None
        self._staged: StagedVersion | None = None
        self._committed: CommittedVersion | None = None
        self._asleep = False
        before = time.perf_counter()
        self._plan = load_plan.record(runner.get_model(), self._reader.specs)
        self._mirror: Mirror | None = None
        self._unproven: set[str] = set()
        self._copies = derived.find(runner.get_model())
        self._memory = LiveMemory(self._reader.specs, self._plan.segments)
        self._memory.warm_up()
        self._follower = Follower(self._reader, self._memory)
        _followed[runner.get_model()] = channel
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

    def _awake(self) -> None:
        if self._asleep:
            raise SleepingError("vLLM sleeps. Its weights are left alone until it wakes up.")

    def settled(self) -> Reply:
        """Whether it is known which version the bits in live memory are; if not, `stage` ends in `unsettled`."""
        self._awake()
        return {"settled": self._follower.settled}

    def poll(self) -> Reply:
        """How the work in the background goes: `state` is `working`, or what it ended with, which is told once."""
        self._awake()
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
            verify: Compare with the checkpoint first, which proves the load plan; the reply also holds `regions`, which
                elements of each tensor this worker holds, and `reloaded`, the tensors that take the fallback and why.
        """
        return self._begin(lambda: self._audit(verify))

    def _audit(self, verify: bool) -> Reply:
        before = time.perf_counter()
        reply: Reply = {"state": "audited"}
        if verify:
            reply["reloaded"] = self._verify()
            reply["regions"] = self._memory.regions
        self._memory.audit()
        logger.info("deltasync audit: audit_s=%.3f", time.perf_counter() - before)
        return reply | {"parts": self._memory.parts}

    def _verify(self) -> dict[str, str]:
        """Prove the load plan against the checkpoint; returns the tensors that take the fallback instead, and why."""
        plan, specs = self._plan, self._reader.specs
        if self._mirror is not None:
            return plan.reasons
        self._unproven = load_plan.verify(plan, self._memory, specs, load_plan.checkpoint(self._runner))
        tensors = load_plan.mirrored(plan, specs, load_plan.checkpoint(self._runner)) if plan.reasons else {}
        logger.info("deltasync load plan: compared=%d reloaded=%d", len(specs) - len(self._unproven), len(tensors))
        if tensors:
            self._mirror = Mirror(self._runner, {name: plan.layers[name] for name in tensors}, tensors)
            self._memory = LiveMemory(specs, plan.segments | self._mirror.segments)
            self._follower = Follower(self._reader, self._memory)
        return plan.reasons

    def prove(self) -> Reply:
        """Make sure that the fallback works; changes live memory and puts it back, so call it between two steps."""
        self._awake()
        if self._mirror is not None:
            self._mirror.prove()
        return {}

    def settle(self, total: int) -> Reply:
        """Learn what the audit of all workers says about the live bits: whether they are the version's taken for live.

        Args:
            total: Fingerprint of the model, -1 if copies differ.
        """
        self._follower.settle(total)
        return {"version": _named(self._follower.version)}

    def identified(self, handed: Handed | None) -> Reply:
        """Learn of which version the live bits are, None for no version that the channel knows.

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
        return {"version": _named(self._follower.version)}

    def stage(self, way: list[Handed]) -> Reply:
        """Begin to stage records that follow each other; ends in `staged`, `unsettled`, or `failed`.

        A failure also tells `failed`: the key of the record that is damaged or lacks something, None if that is not why.
        """
        return self._begin(lambda: self._stage(way))

    def _stage(self, way: list[Handed]) -> Reply:
        self._staged = None
        if not self._follower.settled:
            return {"state": "unsettled"}
        read: list[Stored] = []
        try:
            for handed in way:
                read.append(self._reader.handed(*handed))
            self._staged = self._follower.stage(read)
        except DeltaSyncError as error:
            failed = self._follower.failed if len(read) == len(way) else way[len(read)][0]
            blamed = isinstance(error, CorruptDataError | MissingVersionError)
            return {"state": "failed", "error": describe(error), "failed": failed if blamed else None}
        return {"state": "staged"}

    def _begin(self, action: Callable[[], Reply]) -> Reply:
        self._awake()
        if self._work is None:
            self._work = self._thread.submit(action)
        return self.poll()

    def commit(self, alone: bool) -> Reply:
        """Write the staged version into the live parameters. Call between two steps.

        Args:
            alone: There is no other worker: confirm the bits, or roll back, at once. Otherwise the reply holds `parts`, and
                `confirm` or `undo` must follow before the next step.
        """
        self._awake()
        staged, self._staged = self._staged, None
        assert staged is not None
        try:
            self._committed = self._follower.commit(staged)
            reload_s = self._reload(staged)
        except Exception:
            self.undo()
            raise
        reply = {
            "changed": staged.staged.changed,
            "stage_s": staged.stage_s,
            "scatter_s": self._committed.report.scatter_s,
            "reload_s": reload_s,
        }
        confirmed = self.confirm(None, None) if alone else {"parts": self._committed.report.parts}
        return reply | confirmed

    def confirm(self, fingerprints: dict[str, int] | None, total: int | None) -> Reply:
        """Hold what was committed to the published fingerprints, and roll it back if it is something else.

        Args:
            fingerprints: Of the changed tensors, over all workers; None for this one alone.
            total: Of the model.
        """
        self._awake()
        committed, self._committed = self._committed, None
        assert committed is not None
        try:
            return {"version": _named(self._follower.confirm(committed, fingerprints, total))}
        except FingerprintMismatchError as error:
            self._reload(committed.staged)
            return {"error": describe(error)}

    def _reload(self, staged: StagedVersion) -> float:
        """Have vLLM make anew what it made of the weights that were written. Returns seconds."""
        reload_s = 0.0 if self._mirror is None else self._mirror.reload(staged.staged.fingerprints)
        derived.refresh(self._copies)
        return reload_s

    def undo(self) -> Reply:
        """Roll back what was committed, because another worker could not."""
        committed, self._committed = self._committed, None
        self._follower.doubt()
        if committed is not None:
            self._follower.rollback(committed)
            self._reload(committed.staged)
        return {}

    def digest(self) -> Reply:
        """sha256 of every tensor's bits, gathered out of live memory, independent of the fingerprint."""
        self._awake()
        names = self._reader.specs
        return {"sha256": {name: sha256_hex(self._memory.gather(name).data) for name in names}}

    def digest_segments(self) -> Reply:
        """sha256 of the bits of each of this worker's segments, with its region: for each tensor a list of pairs."""
        self._awake()
        sha256 = {name: [sha256_hex(bits) for bits in self._memory.read(name)] for name in self._reader.specs}
        return {"sha256": {name: list(zip(self._memory.regions[name], sha256[name], strict=True)) for name in sha256}}

    def read(self, name: str) -> Reply:
        """`bits` of each of this worker's segments of a tensor, in the order of its regions and theirs."""
        self._awake()
        return {"bits": self._memory.read(name)}


def warm_up_first(worker: Any) -> None:
    """Have a vLLM worker compile the kernels of commits before it serves, with its own, and not beside requests."""
    if not hasattr(worker, "compile_or_warm_up_model"):
        return
    warm_up = worker.compile_or_warm_up_model

    def compile_or_warm_up_model() -> Any:
        parameters = worker.model_runner.get_model().parameters()
        for device, dtype in {(each.device, int_view(each[:0] if each.ndim else each).dtype) for each in parameters}:
            if device.type != "cpu":
                segment_kernels(device).warm_up(device, dtype)
        return warm_up()

    worker.compile_or_warm_up_model = compile_or_warm_up_model


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
    return behind_cache(open_store(channel), settings.cache_dir, settings.cache_bytes, workers)


def _named(version: Version | None) -> tuple[int, str, str] | None:
    return None if version is None else (version.version, version.epoch, version.sha256)


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
