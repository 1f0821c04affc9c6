"""One process's shard of a model: the load plan, its proof, and the live parameters.

A `Shard` asks no other process. `deltasync.serve.shards` puts the shards of all processes together, by
`Shard.call` between two steps of the engine, in its thread. Long methods, which write nothing that the engine
computes with, then run in another thread while the engine computes, and are polled.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch

from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    CommitError,
    ConfigError,
    CorruptDataError,
    FingerprintMismatchError,
    MissingVersionError,
    ModelMismatchError,
    SleepingError,
    StageError,
    get_logger,
)
from deltasync.following.weights import LiveWeights, StagedVersion
from deltasync.live import LiveMemory, Prints, Segment
from deltasync.serve import derived, load_plan, proof
from deltasync.serve.draft import DRAFT, WithDraft
from deltasync.serve.engine import Handed, ParameterAddresses, Working
from deltasync.tensors import Delta, Region, TensorSpec
from deltasync.tensors.bits import bits_of
from deltasync.threads import Workers

logger = get_logger(__name__)

BACKGROUND = frozenset({"verify", "audit", "stage", "made"})
"""Long methods of `Shard`, which run in the background."""

CALLS = BACKGROUND | {
    "poll",
    "prove",
    "settled",
    "settle",
    "identified",
    "complete",
    "commit",
    "confirm",
    "undo",
    "read",
}
"""Methods of `Shard` that may be called, and `poll`."""

_ASLEEP_TOO = frozenset({"undo", "settle", "identified"})  # these touch no weights then


class LoadProof(msgspec.Struct):
    """The proof of a load plan.

    Attributes:
        regions: The elements of each tensor that the shard holds.
        mirrored: The tensors that the engine does not keep as they are, and why.
        is_complete: Whether the model has all its modules, so that a tensor that its loader ignores is not
            served.
        ties: The tensors without a place, each with the one that the model computes with instead.
        absent: The channel's tensors that the checkpoint lacks, or has in another shape.
        draft: As `Engine.draft`.
    """

    regions: dict[str, list[Region]]
    mirrored: dict[str, str]
    is_complete: bool
    ties: dict[str, str]
    absent: set[str]
    draft: str | None = None


class Audit(msgspec.Struct):
    """Every bit of a shard, read: the fingerprints of its segments, 8 bytes each, and the regions of these in
    that order.
    """

    parts: bytes
    regions: dict[str, list[Region]]


class Done(msgspec.Struct):
    """A commit of one shard, or of all. `deltasync.following.Commit` explains the fields.

    `parts` has the fingerprints of all of the shard's segments, as `Audit`; empty if it is the only shard.
    `remark` is as `Engine.remark`.
    """

    changed: int
    stage_s: float
    scatter_s: float
    reload_s: float
    parts: bytes = b""
    remark: str | None = None


class Engine(ABC):
    """The part of an engine that one process runs.

    Attributes:
        loader: How the engine loads its models.
        model: The model, as it was loaded.
        is_complete: As `LoadProof.is_complete`.
        has_logits: Whether it generates, so that it computes with a head.
        dtype: The dtype that it computes with, as the channel's table has it; None if that is not known.
        log: Where the shard logs.
        later: As `derived.find` takes it.
        draft: A sentence on whether the model that drafts tokens is followed; None if there is none.
        mirrored: The tensors of which `reloads` has given host copies.
        twinned: Those of them whose layers have twins, from which a commit writes what they change; the layers
            of the others are loaded again in its pause.
        remark: A sentence on what takes more work in each version than it could; None if nothing does.
    """

    loader: load_plan.Loader
    model: torch.nn.Module
    is_complete = True
    has_logits = True
    dtype: str | None = None
    draft: str | None = None
    log = logger
    later: Mapping[str, str | None] = MappingProxyType({})
    mirrored: Set[str] = frozenset()
    twinned: Set[str] = frozenset()
    remark: str | None = None
    _copies: Sequence[derived.DerivedCopy] = ()
    _copied = derived.memory_of(())  # the memory of the copies, with fingerprints as they were made last

    def take(self, specs: Mapping[str, TensorSpec]) -> None:
        """Make the draft whose tensors the channel has a part of `model`, before the load plan is
        recorded.
        """
        if any(name.startswith(DRAFT) for name in specs):
            self.model = WithDraft(self.model)

    @abstractmethod
    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the model was loaded from. Raises ModelMismatchError if they cannot be read
        again.
        """

    def reloads(
        self, recorded: load_plan.LoadPlan, specs: Mapping[str, TensorSpec]
    ) -> dict[str, list[Segment]]:
        """Return host copies of the tensors that have a reason in the plan: `refresh` loads their layers
        again from there.

        Raises:
            ModelMismatchError: the engine cannot load them again.
        """
        if recorded.reasons:
            first = min(recorded.reasons)
            raise ModelMismatchError(
                f"{len(recorded.reasons)} tensors cannot be updated in place, such as {specs[first]}: "
                f"{recorded.reasons[first]}. Serve the model without quantization, with kernels that use "
                "weights as "
                "they are in the checkpoint; or publish it in the dtype in which the engine holds it "
                "(DELTASYNC_DTYPE)."
            )
        return {}

    def prove(self, covered: Set[int], reloaded: Set[torch.nn.Module] = frozenset()) -> None:
        """Make sure that `refresh` makes again what the engine derives from weights. Changes live memory and
        restores it.

        Args:
            covered: Addresses of the storages that commits write by themselves.
            reloaded: Modules that `refresh` loads again with all that they hold.

        Raises:
            ModelMismatchError: it does not.
        """
        self._copies = derived.find(self.model, covered, reloaded, self.later)
        self._copied = derived.memory_of(self._copies)

    def stage(  # noqa: B027 - most engines make nothing of weights
        self, changes: Delta | Mapping[str, np.ndarray], names: Set[str]
    ) -> None:
        """Make ready, while the engine computes, what it makes of the tensors `names` that a version changes.
        Nothing that it computes with is changed. `changes` has changes, or new bits, of those `mirrored`.
        What was staged before is forgotten.
        """

    def refresh(self, changed: Iterable[str]) -> float:
        """Make again what the engine derives from these tensors, after they were written or rolled back.
        Returns the seconds that loading them again took.
        """
        derived.refresh(self._copies)
        self._copied.audit()
        return 0.0

    def made(self) -> dict[str, str]:
        """Return the sha256 of each tensor in live memory that the engine has made of published bits, in row-major
        order, by its name in the model.
        """
        return {copy.path: sha256_hex(bits_of(copy.tensor.detach().cpu()).data) for copy in self._copies}

    def is_intact(self) -> bool:
        """Whether live memory is what the engine has made of weights, as far as that is known; if not,
        `refresh` makes it again.
        """
        return self._copied.is_intact()


class Shard:
    """The shard of one process.

    Attributes:
        reader: The channel.
        asleep: Whether the weights are not in memory, so that nothing touches them.

    Args:
        number: The rank of this process among those that share the model.
    """

    def __init__(self, reader: ChannelReader, engine: Engine, number: int = 0) -> None:
        self.reader, self.engine = reader, engine
        self.asleep = False
        self._number = number
        self._device = next((each.device for each in engine.model.parameters()), torch.device("cpu"))
        self._in_use = threading.Lock()  # held while another thread than the engine's reads the weights
        self._plan: load_plan.LoadPlan | None = None
        self._found: LoadProof | None = None
        self._unproven: set[str] = set()
        self._others: dict[str, TensorSpec] = {}  # of the checkpoint, which the channel lacks
        self._addresses: ParameterAddresses | None = None
        self._weights: LiveWeights | None = None
        self._staged: StagedVersion | None = None
        self._committed: StagedVersion | None = None
        self._coming = torch.empty(0, device="cpu")  # a tensor that is handed over whole
        self._is_stale = False  # whether `Engine.refresh` has failed
        self._is_known = True  # whether the weights are as they were loaded, before `audit`
        self._thread = Workers(1, "follow")
        self._work: Future[Any] | None = None
        self._begun_s = 0.0  # when the long call began

    @property
    def weights(self) -> LiveWeights:
        """The weights in the shard's memory; there after `audit`."""
        assert self._weights is not None
        return self._weights

    @property
    def is_open(self) -> bool:
        """Whether `weights` are there."""
        return self._weights is not None

    @property
    def _recorded(self) -> load_plan.LoadPlan:
        assert self._plan is not None
        return self._plan

    def call(self, method: str, *args: Any) -> Any:
        """Call one of `CALLS`. Returns `Working` while a long call goes on.

        Raises:
            ConfigError: the method is not in the list.
            SleepingError: the weights are not in memory; nothing was touched.
        """
        if method not in CALLS:
            raise ConfigError(f"deltasync_call takes {', '.join(sorted(CALLS))}, not {method!r}.")
        if method not in _ASLEEP_TOO:
            self._check_awake()
        if method in BACKGROUND:
            self._begun_s = time.monotonic()
            self._work = self._thread.submit(self._in_background, method, *args)
        elif method != "poll":
            return getattr(self, method)(*args)
        return self._poll()

    def _in_background(self, method: str, *args: Any) -> Any:
        self._use_device()
        return getattr(self, method)(*args)

    def _poll(self) -> Any:
        """Return what the long call has returned, once; None if there is none."""
        work = self._work
        if work is not None and not work.done():
            progressed_s = 0.0 if self._weights is None else self._weights.progressed_s
            return Working(time.monotonic() - max(self._begun_s, progressed_s))
        self._work = None
        return None if work is None else work.result()

    def _use_device(self) -> None:
        """Make the model's device this thread's current one."""
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)

    def _check_awake(self) -> None:
        if self.asleep:
            raise SleepingError(
                f"{self.engine.loader.engine} sleeps. Its weights are left alone until it wakes up."
            )

    # In the background, while the engine computes

    def verify(self) -> LoadProof:
        """Compare the weights with the checkpoint through the load plan, bit by bit.

        Raises:
            ModelMismatchError: the engine keeps tensors in a layout of its own, and cannot load them again.
        """
        specs, recorded = self.reader.specs, self._recorded
        if self._found is None:
            with self._in_use:
                self._check_awake()
                memory, loaded = LiveMemory(specs, recorded.segments), self.engine.checkpoint()
                self._unproven, self._others = proof.verify(recorded, memory, specs, loaded)
                recorded.segments.update(self.engine.reloads(recorded, specs))
            regions, model = (
                LiveMemory(specs, recorded.segments).regions,
                self.engine.loader.as_loaded(self.engine.model)[0],
            )
            if isinstance(model, WithDraft):
                model = model.model
            ties = proof.ties(recorded, specs, model, has_logits=self.engine.has_logits)
            self._found = LoadProof(
                regions, recorded.reasons, self.engine.is_complete, ties, self._unproven, self.engine.draft
            )
        return self._found

    def audit(
        self, ignored: Sequence[str] | None = None, ties: Mapping[str, str] = MappingProxyType({})
    ) -> Audit:
        """Read every bit of live memory.

        Args:
            ignored: Given when the shard is opened: the tensors that no process computes with. The first
                process keeps them on its host from now on, because the model's fingerprint counts them.
            ties: Given when the shard is opened, as `LiveMemory.ties`.
        """
        # not opened before, by an API server that has ended
        if ignored is not None and self._weights is None:
            self._adopt(set(ignored), ties)
        memory = self.weights.memory
        with self._in_use:
            self._check_awake()
            memory.audit()
            self._is_stale = self._is_stale or not self.engine.is_intact()
        return Audit(memory.known_parts.tobytes(), memory.regions)

    def _adopt(self, ignored: set[str], ties: Mapping[str, str]) -> None:
        specs, recorded = self.reader.specs, self._recorded
        self._unproven -= {*ignored, *ties}
        if ignored and not self._number:
            recorded.segments.update(
                proof.kept({name: specs[name] for name in ignored}, self.engine.checkpoint())
            )
        memory = LiveMemory(specs, recorded.segments, ties=ties)
        memory.warm_up()
        self._weights = LiveWeights(self.reader, memory)
        self._weights.reported = self.engine.mirrored

    def stage(self, chain: Sequence[Handed]) -> bool:
        """Fetch, verify and decode consecutive records. Returns False if the live bits are not known.

        Raises:
            StageError: `complete` its `tensors` first, if it names some.
            CorruptDataError, MissingVersionError: with the `key` of the record that is to blame.
        """
        self._staged = None
        if not self.weights.settled:
            return False
        stored: list[StoredRecord] = []
        for each in chain:
            try:
                stored.append(self.reader.handed(*each))
            except (CorruptDataError, MissingVersionError) as error:
                error.key = each[0]
                raise
        with self._in_use:
            self._check_awake()
            staged = self.weights.stage(stored)
            self.engine.stage(staged.whole, staged.staged.fingerprints.keys())
            self._staged = staged
        return True

    def read(self, name: str) -> list[bytes]:
        """Return the bits of each of this shard's segments of a tensor, from live memory, in the order of its
        regions.
        """
        with self._in_use:
            self._check_awake()
            return self.weights.memory.read(name)

    def made(self) -> dict[str, str]:
        """As `Engine.made`."""
        with self._in_use:
            self._check_awake()
            return self.engine.made()

    # Between two steps of the engine, or before it computes with these weights

    def record(self) -> None:
        """Record the load plan from the engine's own loader. Nothing is changed. A second call does nothing.

        Raises:
            NotPublishedError: the channel has no version yet.
            ModelMismatchError: the model does not match the channel.
        """
        self._check_awake()
        if self._plan is not None:
            return
        engine, specs = self.engine, self.reader.specs
        proof.check_dtype(specs, engine.loader.engine, engine.dtype)
        engine.take(specs)
        try:
            recorded = load_plan.record(engine.model, specs, engine.loader)
        except ModelMismatchError as error:
            found = proof.misfits(specs, engine.checkpoint())
            raise ModelMismatchError(f"{'; '.join(found[:5])}. {error}" if found else str(error)) from error
        # together: commits go to where these places are
        self._plan, self._addresses = recorded, ParameterAddresses(engine.model)

    def prove(self) -> tuple[list[str], list[str]]:
        """Make sure that the engine makes again what it derives from weights. Changes live memory and
        restores it.

        Returns the checkpoint's tensors that the channel lacks, and that the engine loads to where none of
        the channel's is; and the channel's whose layers it loads again in each pause.

        Raises:
            ModelMismatchError: it does not, or it cannot be seen where the engine loads those tensors.
        """
        model, segments = (
            self.engine.model,
            [each for held in self._recorded.segments.values() for each in held],
        )
        self.engine.prove({each.live.untyped_storage().data_ptr() for each in segments})
        try:
            others = (
                load_plan.record(model, self._others, self.engine.loader)
                if self._others
                else load_plan.LoadPlan({}, {}, {})
            )
        except ModelMismatchError as error:
            raise ModelMismatchError(
                f"The checkpoint has {min(self._others)}, which the channel lacks. {error}"
            ) from error
        known = {each.place for each in segments}
        missing = [
            name
            for name, held in others.segments.items()
            if name in others.reasons or any(each.place not in known for each in held)
        ]
        return missing, sorted(self.engine.mirrored - self.engine.twinned)

    def settled(self) -> bool:
        """Whether it is known which version the live bits are."""
        return self._is_known if self._weights is None else self._weights.settled

    def settle(self, total: int) -> VersionId | None:
        """Compare the model's fingerprint, as audited over all shards (-1 if copies differ), with the live
        version's.

        Raises:
            CommitError: the engine could not make again what it derives from weights; it is not known what
                they are.
        """
        if self._is_stale:
            try:
                self._refresh(())
            except Exception as error:
                raise CommitError(
                    f"Layers could not be loaded again, so their weights are uncertain: {error}"
                ) from error
        self.weights.settle(total)
        return self.weights.version

    def identified(self, record: Handed | None) -> None:
        """Note which version the live bits are, None for no version of the channel.

        Raises:
            ModelMismatchError: they are no version, and there are tensors that the checkpoint did not prove.
        """
        if record is None and self._unproven:
            raise ModelMismatchError(
                f"{len(self._unproven)} tensors, such as {min(self._unproven)}, are not in the checkpoint "
                "that was loaded, "
                "and the weights are no version that the channel knows, so it cannot be proven where they "
                "are in memory: "
                "serve the checkpoint that the channel starts from."
            )
        self.weights.identified(None if record is None else self.reader.handed(*record))

    def complete(self, name: str, at: int, data: bytes) -> None:
        """Take bytes `at` and following of a tensor that shards lack; with the last ones it is kept whole on
        the host.
        """
        if not self.weights.memory.regions[name]:
            return
        if not at:
            spec = self.reader.specs[name]
            self._coming = torch.empty(spec.element_count, dtype=getattr(torch, spec.dtype), device="cpu")
        bytes_B = bits_of(self._coming).view(np.uint8)
        bytes_B[at : at + len(data)] = np.frombuffer(data, np.uint8)
        if at + len(data) == bytes_B.size:
            self.weights.complete(name, bits_of(self._coming))

    def commit(self, alone: bool) -> Done:
        """Write the staged version into the live weights.

        Args:
            alone: Whether this is the only shard, which confirms the bits by itself. Others need `confirm` or
                `undo` before the next step.

        Raises:
            StageError, SleepingError, FingerprintMismatchError: the bits are as before.
            CommitError: they are uncertain.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise StageError("The staged version is gone, because the engine slept.")
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # what the engine has launched
        try:
            self._committed = self.weights.commit(staged)
            reload_s = self._refresh(staged.staged.fingerprints)
        except Exception:
            self.undo()
            raise
        if alone:
            self.confirm(None)
        done = staged.staged
        parts = b"" if alone else self.weights.memory.known_parts.tobytes()
        return Done(done.changed, staged.stage_s, done.scatter_s, reload_s, parts, self.engine.remark)

    def confirm(self, found: tuple[bytes, bytes] | None) -> None:
        """Compare the committed bits with the published fingerprints, and roll them back if they differ.

        `found` has the arrays of `Prints`, over all shards; None if this is the only one.
        """
        committed, self._committed = self._committed, None
        assert committed is not None
        try:
            prints = (
                None
                if found is None
                else Prints(np.frombuffer(found[0], np.uint64), np.frombuffer(found[1], bool))
            )
            self.weights.confirm(committed, prints)
        except (FingerprintMismatchError, StageError):
            self._refresh(committed.staged.fingerprints)
            raise

    def undo(self) -> None:
        """Roll back the commit, because another shard's failed."""
        committed, self._committed = self._committed, None
        self.weights.settled = False
        if committed is not None:
            self.weights.rollback(committed)
            self._refresh(committed.staged.fingerprints)

    def _refresh(self, changed: Iterable[str]) -> float:
        self._is_stale = True
        reload_s = self.engine.refresh(changed)
        self._is_stale = False
        return reload_s

    def put_back(self) -> None:
        """Put parameters and buffers of the model back if something replaced them, or their memory, since the
        last step.
        """
        for name in self._addresses.put_back() if self._addresses is not None else ():
            self._unsettle()
            self.engine.log.error(
                "deltasync: something replaced %s in a model that follows a channel; it was put back", name
            )

    def fall_asleep(self) -> None:
        """Touch the weights no more, which the engine is about to take out of memory; a long call ends
        first.
        """
        if self._work is not None:
            wait([self._work])
        self._work, self.asleep = None, True
        with self._in_use:
            self._staged = None
            if self._committed is not None:
                self.undo()
            self.engine.stage({}, frozenset())  # what is staged, and undoes the last commit, takes memory

    def wake_up(self) -> None:
        """Take calls again: the weights are in memory. An audit has to find out their bits."""
        self.asleep = False
        self._unsettle()

    def _unsettle(self) -> None:
        if self._weights is None:
            self._is_known = False
        else:
            self._weights.settled = False
