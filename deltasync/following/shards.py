"""A target for engines whose processes each hold a shard of the weights and run the same program.

    stage (while the engine computes) -> commit (between two of its steps, on all ranks at once) -> announce

The follow loop runs in the first rank. `ShardsTarget` has every rank run the methods of its `Shard` with the same arguments,
and they end in the same way on all: what each has found is exchanged, so that all raise the error that one of them met. A
method "beside" runs in a thread of each rank while the engine computes; one "between steps" in the engine's own.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
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
    get_logger,
)
from deltasync.following.engine import Places, unique_name
from deltasync.following.follower import Follower, StagedVersion
from deltasync.following.status import Commit
from deltasync.following.target import Identify
from deltasync.live import LiveMemory, assemble, combine, model_fingerprint, plan, proof

logger = get_logger(__name__)

_T = TypeVar("_T")

Handed = tuple[str, str, bytes | None]
"""A record that the first rank has read: its key, its sha256, and its bytes."""


class Ranks(Protocol):
    """The ranks that share a model, and how they talk to each other."""

    size: int
    number: int

    def gather(self, mine: Any) -> list[Any]:
        """Return the argument of each rank, in order. All call it from the same kind of thread."""
        ...

    def broadcast(self, call: Any = None) -> Any:
        """Send a call from the first rank's thread to the others', which receive it by calling this without one."""
        ...


class TorchRanks:
    """Implements `Ranks` for a process group of torch's with gloo. Make it in the engine's thread, on all ranks at once."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.size, self.number = group.size(), group.rank()
        self._engines, self._thread = group, threading.get_ident()
        for_ever = datetime.timedelta(days=3650)  # a thread waits for the next version
        members = torch.distributed.get_process_group_ranks(group)
        self._ours = torch.distributed.new_group(members, for_ever, "gloo") if self.size > 1 else group

    def gather(self, mine: Any) -> list[Any]:
        """Gather (`Ranks.gather`): in the engine's thread with its group, in other threads with a group of ours."""
        found: list[Any] = [None] * self.size
        group = self._engines if threading.get_ident() == self._thread else self._ours
        torch.distributed.all_gather_object(found, mine, group=group)
        return found

    def broadcast(self, call: Any = None) -> Any:
        """Broadcast (`Ranks.broadcast`)."""
        box = [call]
        torch.distributed.broadcast_object_list(box, group=self._ours, group_src=0)
        return box[0]


class Engine(Protocol):
    """One rank's part of the engine."""

    loader: plan.Loader
    model: torch.nn.Module

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the model was loaded from. Raises ModelMismatchError if they cannot be read again."""
        ...

    def announce(self, name: str) -> None:
        """Note that other weights are live, between two steps: label tokens with their name, and keep caches apart."""
        ...


class Shard:
    """One rank's part of a replica: the load plan, its proof, and a follower over the live parameters.

    Attributes:
        ranks: All parts.
        held: Whether nothing may be computed, because the version of the weights is unknown. The same on all ranks.
    """

    def __init__(self, reader: ChannelReader, engine: Engine, ranks: Ranks) -> None:
        self.ranks = ranks
        self.held = False
        self._asleep = False
        self._reader, self._engine = reader, engine
        self._device = next((each.device for each in engine.model.parameters()), torch.device("cpu"))
        self._memory = threading.Lock()  # held while a thread reads the weights, which sleep takes away
        self._places: Places | None = None
        self._plan: plan.LoadPlan | None = None
        self._unproven: set[str] = set()
        self._regions: list[Any] = []  # of each rank
        self._fingerprints: dict[str, int] = {}  # of tensors over all ranks
        self._names: OrderedDict[int, str] = OrderedDict()
        self._follower: Follower | None = None
        self._staged: StagedVersion | None = None

    @property
    def follower(self) -> Follower:
        """Stages and commits; exists after `prove`."""
        assert self._follower is not None
        return self._follower

    @property
    def is_settled(self) -> bool:
        """Whether this rank knows which bits are live."""
        return self._follower is not None and self._follower.settled

    @property
    def progressed_s(self) -> float:
        """When staging last advanced (`Target.progressed_s`)."""
        return 0.0 if self._follower is None else self._follower.progressed_s

    def together(self, body: Callable[[], _T]) -> list[_T]:
        """Run `body` on all ranks, each of which calls this. Returns the results of all ranks.

        Raises:
            DeltaSyncError: it raised on one; a CommitError if there is one.
        """
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)  # whichever thread this is
        if self.ranks.size == 1:
            return [body()]
        mine: tuple[Any, tuple[str, str, Any] | None]
        try:
            mine = body(), None
        except Exception as error:
            if not isinstance(error, DeltaSyncError):
                logger.exception("deltasync failed unexpectedly")
            detail = error.tensors if isinstance(error, ShareError) else getattr(error, "key", None)
            mine = None, (type(error).__name__, str(error), detail)
        found = self.ranks.gather(mine)
        failures = sorted((each[1] for each in found if each[1]), key=lambda failure: failure[0] != CommitError.__name__)
        if failures:
            raised = error_of(failures[0][0], failures[0][1], ApplyError)
            if isinstance(raised, ShareError):
                raised.tensors = sorted({name for failure in failures for name in failure[2] or ()})
            else:
                raised.key = failures[0][2]
            raise raised
        return [each[0] for each in found]

    def _check_awake(self) -> None:
        if self._asleep:
            raise SleepingError(
                f"{self._engine.loader.engine} has released its weights. They are left alone until it wakes up."
            )

    # Beside the engine

    def prepare(self) -> None:
        """Read the channel's tensors. Raises NotPublishedError if it has no version yet."""
        self.together(lambda: self._reader.specs and None)

    def prove(self) -> int:
        """Compare the weights with the checkpoint through the load plan, bit by bit. Returns the model's fingerprint.

        Raises:
            ModelMismatchError: the engine does not hold every tensor in places that can be updated.
        """
        specs, recorded = self._reader.specs, self._plan
        assert recorded is not None

        def verify() -> tuple[Any, dict[str, str]]:
            memory = LiveMemory(specs, recorded.segments)
            with self._memory:
                self._check_awake()
                self._unproven, others = proof.verify(recorded, memory, specs, self._engine.checkpoint())
            if others and not self.ranks.number:
                logger.warning(
                    "deltasync: %d tensors of the checkpoint, such as %s, stay as loaded", len(others), min(others)
                )
            return memory.regions, recorded.reasons

        found = self.together(verify)
        reasons = {name: why for _, of in found for name, why in of.items()}
        if reasons:
            first = min(reasons)
            raise ModelMismatchError(
                f"{len(reasons)} tensors cannot be updated in place, such as {specs[first]}: {reasons[first]}. "
                "Serve the model without quantization, by kernels that use weights as they are in the checkpoint."
            )
        ignored = proof.check_coverage(specs, [regions for regions, _ in found])
        self._unproven -= set(ignored)

        def adopt() -> Any:
            if ignored and not self.ranks.number:  # no layer loads them, and the model's fingerprint counts them
                recorded.segments.update(proof.kept({name: specs[name] for name in ignored}, self._engine.checkpoint()))
                logger.warning(
                    "deltasync: %d tensors, such as %s, are not served: nothing loads them", len(ignored), ignored[0]
                )
            memory = LiveMemory(specs, recorded.segments)
            memory.warm_up()
            self._follower = Follower(self._reader, memory)
            return memory.regions

        self._regions = self.together(adopt)
        return self._audit()

    def _audit(self) -> int:
        def audit() -> Any:
            with self._memory:
                self._check_awake()
                self.follower.memory.audit()
            return self.follower.memory.parts

        self._fingerprints = combine(self._regions, self.together(audit))
        return model_fingerprint(self._fingerprints)

    def settle(self) -> None:
        """Audit the live bits: they are the version that they were taken for, or none."""
        self.follower.settle(self._audit())

    def stage(self, chain: Sequence[Handed]) -> bool:
        """Fetch, verify and decode a chain. Returns whether all ranks know their bits, so that it can be committed."""
        stored: list[StoredRecord] = []

        def stage() -> bool:
            if not self.follower.settled:
                return False
            stored[:] = stored or [self._reader.handed(*handed) for handed in chain]
            with self._memory:
                self._check_awake()
                self._staged = self.follower.stage(stored)
            return True

        try:
            return all(self.together(stage))
        except ShareError as error:
            for name in error.tensors:
                self.follower.complete(name, self._assembled(name))
            return all(self.together(stage))

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory, put together from the shards of all ranks."""
        return {name: sha256_hex(self._assembled(name).data) for name in self._reader.specs}

    def _assembled(self, name: str) -> Any:
        def read() -> list[bytes]:
            with self._memory:
                self._check_awake()
                return self.follower.memory.read(name)

        return assemble(self._reader.specs[name], [held[name] for held in self._regions], self.together(read))

    # Between two steps of the engine

    def record(self) -> None:
        """Record the load plan from the engine's own loader. Nothing is changed."""

        def record() -> None:
            self._check_awake()
            self._plan = plan.record(self._engine.model, self._reader.specs, self._engine.loader)
            self._places = Places(self._engine.model)

        self.together(record)

    def identified(self, handed: Handed | None) -> None:
        """Note which version the weights are, None for no version of the channel.

        Raises:
            ModelMismatchError: they are no version, and there are tensors that the checkpoint did not prove.
        """

        def identify() -> None:
            if handed is None and self._unproven:
                raise ModelMismatchError(
                    f"{len(self._unproven)} tensors, such as {min(self._unproven)}, are not in the checkpoint that was "
                    "loaded, and the weights are no version that the channel knows, so it cannot be proven where they lie "
                    "in memory: serve the checkpoint that the channel starts from."
                )
            self.follower.identified(None if handed is None else self._reader.handed(*handed))

        self.together(identify)
        self.settled()

    def settled(self) -> None:
        """Announce the version of the weights; from here on the engine may compute."""
        version = self.follower.version
        if version is None and self.held:
            return  # full weights follow
        self._engine.announce("unknown" if version is None else unique_name(self._names, version))
        self.held = False

    def commit(self) -> tuple[int, float, float]:
        """Write the staged version into the live weights, and prove it, on all ranks or on none.

        Returns the changed elements of all ranks, and this rank's times to stage and to write.
        """
        staged, self._staged, follower = self._staged, None, self.follower
        committed: list[StagedVersion] = []

        def write() -> tuple[Any, int]:
            self._check_awake()
            if staged is None:
                raise StageError("The staged version is gone, because the engine slept. It is staged again.")
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)  # kernels that the engine has launched
            committed.append(follower.commit(staged))
            return staged.staged.parts, staged.staged.changed

        def undo() -> None:
            if committed:
                follower.rollback(committed[0])

        try:
            written = self.together(write)
            changed = combine(self._regions, [parts for parts, _ in written])
            fingerprints = self._fingerprints | changed
            self.together(lambda: follower.confirm(committed[0], changed, model_fingerprint(fingerprints)))
        except FingerprintMismatchError:
            raise  # `confirm` has rolled back
        except BaseException as error:
            follower.settled, self.held = False, True
            self.together(undo)
            self.held = not isinstance(error, StageError | SleepingError)
            raise
        assert staged is not None
        self._fingerprints = fingerprints
        self.settled()
        return sum(count for _, count in written), staged.stage_s, staged.staged.scatter_s

    def check_places(self) -> None:
        """Put parameters back that something replaced since the last step."""
        for name in self._places.put_back() if self._places is not None else ():
            self._unsettle()
            logger.error("deltasync: something replaced %s in a model that follows a channel; it was put back", name)

    def fall_asleep(self) -> None:
        """Touch the weights no more, which the engine is about to take out of memory."""
        self._asleep = True
        with self._memory:
            self._staged = None

    def wake_up(self) -> None:
        """Hold the engine until an audit has found the version of the weights."""
        self._asleep, self.held = False, self._follower is not None
        self._unsettle()

    def _unsettle(self) -> None:
        if self._follower is not None:
            self._follower.settled = False


class ShardsTarget:
    """The weights of all ranks, as a `Target` in the first one.

    `between_steps` runs a method of every rank between two steps of the engine, in the same one on all ranks: `record`,
    `identified` and `settled` of `Shard`, and `commit`, which returns the pause and the number of running requests before
    what `Shard.commit` does.
    """

    def __init__(self, shard: Shard, between_steps: Callable[..., Any]) -> None:
        self.version: VersionId | None = None
        self._shard, self._between_steps = shard, between_steps
        self._is_sure = False  # whether all ranks were settled when they were asked last

    @property
    def progressed_s(self) -> float:
        """When staging last advanced (`Target.progressed_s`)."""
        return self._shard.progressed_s

    def _on_ranks(self, method: str, *arguments: Any) -> Any:
        if self._shard.ranks.size > 1:
            self._shard.ranks.broadcast((method, arguments))
        return getattr(self._shard, method)(*arguments)

    def open(self, identify: Identify) -> None:
        """Prove the load plan and find the live version (`Target.open`)."""
        self._on_ranks("prepare")
        self._between_steps("record")
        found = identify(self._on_ranks("prove"))
        self._between_steps("identified", None if found is None else _handed(found))
        self.version, self._is_sure = self._shard.follower.version, True

    def is_settled(self, asked: bool) -> bool:
        """Whether the live bits are known (`Target.is_settled`)."""
        return self._is_sure and self._shard.is_settled

    def settle(self) -> None:
        """Audit the live bits on all ranks (`Target.settle`)."""
        self._on_ranks("settle")
        self._between_steps("settled")
        self.version, self._is_sure = self._shard.follower.version, True

    def stage(self, chain: Sequence[StoredRecord]) -> Sequence[StoredRecord] | None:
        """Stage a chain on all ranks (`Target.stage`)."""
        self._is_sure = bool(self._on_ranks("stage", [_handed(stored) for stored in chain]))
        return chain if self._is_sure else None

    def commit(self, staged: Sequence[StoredRecord]) -> Commit:
        """Commit on all ranks at once (`Target.commit`)."""
        pause_s, running, changed, stage_s, scatter_s = self._between_steps("commit")
        self.version = version = staged[-1].version
        return Commit(
            version=version.version,
            sha256=version.sha256,
            anchor=staged[0].use_anchor,
            changed=changed,
            stage_s=stage_s,
            pause_s=pause_s,
            scatter_s=scatter_s,
            running_requests=running,
        )

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory."""
        found: dict[str, str] = self._on_ranks("digest")
        return found

    def close(self) -> None:
        """Do nothing."""


def serve_in_thread(shard: Shard) -> None:
    """Serve the calls of the first rank in a thread of this process, while the engine computes."""

    def serve() -> None:
        while True:
            method, arguments = shard.ranks.broadcast()
            with contextlib.suppress(Exception):  # the first rank has met it too, and reports it
                getattr(shard, method)(*arguments)

    threading.Thread(target=serve, name="deltasync-rank", daemon=True).start()


def _handed(stored: StoredRecord) -> Handed:
    return stored.key, stored.sha256, stored.data
