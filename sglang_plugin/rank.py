"""One scheduler's part of a replica: the load plan, its proof, and a follower over the live parameters.

Every rank of the tensor-parallel group runs the same methods with the same arguments at once, and ends them in the same way:
what each has found is exchanged, so that all raise the error that one of them met. Methods for the scheduler's thread run
between two steps of the engine; the others run in a thread beside it while tokens are generated.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from deltasync.channel.documents import Version, sha256_hex
from deltasync.channel.record import Stored
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    CommitError,
    DeltaSyncError,
    FingerprintMismatchError,
    ModelMismatchError,
    ShareError,
    SleepingError,
    StageError,
    error_of,
)
from deltasync.following import Follower, StagedVersion
from deltasync.following.engine import Places, limit_threads, open_reader, unique_name
from deltasync.live import LiveMemory, assemble, combine, model_fingerprint, plan, proof
from deltasync.tensors.bits import bits_of
from sglang_plugin import logger

_T = TypeVar("_T")

Handed = tuple[str, str, bytes | None]
"""A record that the first rank has read: its key, its sha256, and its bytes."""

_LOADER = plan.Loader("SGLang")


class Rank:
    """A scheduler's part. `scheduler` is SGLang's; of the group, only `size` and `number` are used by others.

    Attributes:
        held: Whether nothing may be computed, because it is not known what the weights are.
        salt: What keeps apart all that is cached under the version that is live.
        announce: Called in the scheduler's thread with the name of each version that becomes live.
    """

    def __init__(self, scheduler: Any, settings: ReplicaSettings, announce: Callable[[str], None]) -> None:
        from sglang.srt.runtime_context import get_parallel

        group = get_parallel().tp_group
        self.size, self.number = int(group.world_size), int(group.rank_in_group)
        self.held = self.asleep = False
        self.salt = "deltasync"
        self.announce = announce
        self.scheduler = scheduler
        self.memory_lock = threading.Lock()  # held while a thread reads the weights, which sleep takes away
        self._scheduler_thread, self._scheduler_group = threading.get_ident(), group.cpu_group
        self._own_group = torch.distributed.new_group(group.ranks, backend="gloo") if self.size > 1 else None
        self._reader = open_reader(settings, self.size)
        self._runner = scheduler.tp_worker.model_runner
        self._places: Places | None = None
        self._plan: plan.LoadPlan | None = None
        self._unproven: set[str] = set()
        self._regions: list[Any] = []  # of each rank
        self._fingerprints: dict[str, int] = {}  # of tensors over all ranks
        self._names: OrderedDict[int, str] = OrderedDict()
        self._follower: Follower | None = None
        self._staged: StagedVersion | None = None
        limit_threads(os.environ.get("OMP_NUM_THREADS", ""), self.size)

    # Together

    def broadcast(self, call: Any = None) -> Any:
        """Send a call from the first rank's thread to the others', which wait for it by calling this without one."""
        if self.size == 1:
            return call
        box = [call]
        torch.distributed.broadcast_object_list(box, group=self._own_group, group_src=0)
        return box[0]

    def together(self, body: Callable[[], _T]) -> list[_T]:
        """Run `body` on all ranks, each of which calls this. Returns what it returned on each.

        Raises:
            DeltaSyncError: it raised on one; a CommitError if there is one.
        """
        if self.size == 1:
            return [body()]
        mine: tuple[Any, tuple[str, str, Any] | None]
        try:
            mine = body(), None
        except Exception as error:
            if not isinstance(error, DeltaSyncError):
                logger.exception("deltasync failed unexpectedly")
            mine = None, (type(error).__name__, str(error), getattr(error, "key", getattr(error, "tensors", None)))
        found: list[Any] = [None] * self.size
        in_scheduler = threading.get_ident() == self._scheduler_thread
        torch.distributed.all_gather_object(found, mine, group=self._scheduler_group if in_scheduler else self._own_group)
        failures = sorted((each[1] for each in found if each[1]), key=lambda failure: failure[0] != CommitError.__name__)
        if failures:
            kind, message, detail = failures[0]
            raised = error_of(kind, message, ApplyError)
            if isinstance(raised, ShareError):
                raised.tensors = sorted({name for failure in failures for name in failure[2] or ()})
            else:
                raised.key = detail
            raise raised
        return [each[0] for each in found]

    # In a thread beside the scheduler's

    def prepare(self) -> None:
        """Read the channel's tensors. Raises NotPublishedError if it has no version yet."""
        self.together(lambda: self._reader.specs and None)

    def prove(self) -> int:
        """Compare the weights with the checkpoint through the load plan, bit by bit. Returns the model's fingerprint.

        Raises:
            ModelMismatchError: SGLang does not hold every tensor in places that can be updated.
        """
        specs, recorded = self._reader.specs, self._plan
        assert recorded is not None

        def verify() -> tuple[Any, dict[str, str]]:
            memory = LiveMemory(specs, recorded.segments)
            self._unproven, others = proof.verify(recorded, memory, specs, self._checkpoint())
            if others and not self.number:
                logger.info("deltasync: %d tensors of the checkpoint are not the channel's and stay as loaded", len(others))
            return memory.regions, recorded.reasons

        found = self.together(verify)
        reasons = {name: why for _, of in found for name, why in of.items()}
        if reasons:
            name = min(reasons)
            raise ModelMismatchError(
                f"{len(reasons)} tensors cannot be updated in place, such as {specs[name]}: {reasons[name]}. Serve the model "
                "without quantization, with kernels that use weights as they are in the checkpoint."
            )
        ignored = proof.check_coverage(specs, [regions for regions, _ in found])
        self._unproven -= set(ignored)

        def audit() -> Any:
            if ignored and not self.number:  # SGLang loads them nowhere; the model's fingerprint counts them
                recorded.segments.update(proof.kept({name: specs[name] for name in ignored}, self._checkpoint()))
                logger.warning(
                    "deltasync: %d tensors, such as %s, are not served: no layer loads them", len(ignored), ignored[0]
                )
            memory = LiveMemory(specs, recorded.segments)
            memory.warm_up()
            self._follower = Follower(self._reader, memory)
            return memory.regions

        with self.memory_lock:
            self._regions = self.together(audit)
        return self._audit()

    def _checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

        loader = get_model_loader(self._runner.load_config, self._runner.model_config)
        if not isinstance(loader, DefaultModelLoader):
            raise ModelMismatchError(
                f"SGLang loaded its weights by {type(loader).__name__}, so it cannot be proven where they lie: serve a "
                "checkpoint, without --load-format."
            )
        return loader._get_all_weights(self._runner.model_config, self._runner.model)

    @property
    def follower(self) -> Follower:
        """What stages and commits; there after `prove`."""
        assert self._follower is not None
        return self._follower

    def _audit(self) -> int:
        def audit() -> Any:
            self._check_awake()
            with self.memory_lock:
                self.follower.memory.audit()
            return self.follower.memory.parts

        self._fingerprints = combine(self._regions, self.together(audit))
        return model_fingerprint(self._fingerprints)

    def settle(self) -> Version | None:
        """Audit the live bits. Returns the version that they are, None if they are none."""
        self.follower.settle(self._audit())
        return self.follower.version

    def stage(self, chain: list[Handed]) -> bool:
        """Fetch, verify and decode a chain. Returns whether all ranks know their bits, so that it can be committed."""
        stored: list[Stored] = []

        def stage() -> bool:
            self._check_awake()
            if not self.follower.settled:
                return False
            stored[:] = stored or [self._reader.handed(*handed) for handed in chain]
            with self.memory_lock:
                self._staged = self.follower.stage(stored)
            return True

        try:
            return all(self.together(stage))
        except ShareError as error:
            for name in error.tensors:
                self.follower.complete(name, bits_of(torch.from_numpy(self._assembled(name))))
            return all(self.together(stage))

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory, put together from the shards of all ranks."""
        return {name: sha256_hex(self._assembled(name).data) for name in self._reader.specs}

    def _assembled(self, name: str) -> Any:
        def read() -> list[bytes]:
            self._check_awake()
            with self.memory_lock:
                return self.follower.memory.read(name)

        return assemble(self._reader.specs[name], [held[name] for held in self._regions], self.together(read))

    # In the scheduler's thread

    def record(self) -> None:
        """Record the load plan from the model's own loader. Nothing is changed."""
        from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

        def record() -> None:
            self._check_awake()
            derived = _unsupported_derived_weight_cache_error(self._runner.model)
            if derived is not None:
                raise ModelMismatchError(derived)
            self._plan = plan.record(self._runner.model, self._reader.specs, _LOADER)
            self._places = Places(self._runner.model)

        self.together(record)

    def identified(self, handed: Handed | None) -> Version | None:
        """Note which version the weights are, None for no version of the channel.

        Raises:
            ModelMismatchError: they are no version, and there are tensors that the checkpoint did not prove.
        """

        def identify() -> None:
            if handed is None and self._unproven:
                raise ModelMismatchError(
                    f"{len(self._unproven)} tensors, such as {min(self._unproven)}, are not in the checkpoint that SGLang "
                    "loaded, and the weights are no version that the channel knows, so it cannot be proven where they lie in "
                    "memory: serve the checkpoint that the channel starts from."
                )
            self.follower.identified(None if handed is None else self._reader.handed(*handed))

        self.together(identify)
        return self.settled()

    def settled(self) -> Version | None:
        """Name what the weights are from here on, and compute again. Returns it."""
        version = self.follower.version
        self.announce("unknown" if version is None else unique_name(self._names, version))
        self.held = False
        return version

    def commit(self) -> tuple[int, float, float]:
        """Write the staged version into the live weights, and prove it, on all ranks or on none.

        Returns the changed elements of all ranks, and this rank's times to stage and to write.
        """
        staged, self._staged, follower = self._staged, None, self.follower
        assert staged is not None
        committed: list[StagedVersion] = []

        def write() -> tuple[Any, int]:
            self._check_awake()
            device = next(self._runner.model.parameters()).device
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # what steps have launched
            committed.append(follower.commit(staged))
            return staged.staged.parts, staged.staged.changed

        try:
            written = self.together(write)
            changed = combine(self._regions, [parts for parts, _ in written])
            fingerprints = self._fingerprints | changed
            self.together(lambda: follower.confirm(committed[0], changed, model_fingerprint(fingerprints)))
        except (FingerprintMismatchError, StageError, SleepingError) as error:
            if committed and not isinstance(error, FingerprintMismatchError):
                follower.settled = False
                follower.rollback(committed[0])
            raise
        except BaseException:
            self.held, follower.settled = True, False
            raise
        self._fingerprints = fingerprints
        self.settled()
        return sum(count for _, count in written), staged.stage_s, staged.staged.scatter_s

    def check_places(self) -> None:
        """Put parameters back that something replaced since the last step."""
        for name in self._places.put_back() if self._places is not None else ():
            self._unsettle()
            logger.error(
                "deltasync: something replaced %s in SGLang's model, which follows a channel; it was put back", name
            )

    def fall_asleep(self) -> None:
        """Touch the weights no more, which SGLang is about to take out of memory."""
        self.asleep = True
        with self.memory_lock:
            self._staged = None

    def wake_up(self) -> None:
        """Compute nothing until an audit has found out what the weights are."""
        self.asleep, self.held = False, self._follower is not None
        self._unsettle()

    def _unsettle(self) -> None:
        if self._follower is not None:
            self._follower.settled = False

    def _check_awake(self) -> None:
        if self.asleep:
            raise SleepingError("SGLang has released its weights. They are left alone until it has them again.")
