"""A target for engines whose processes each hold a shard of the weights.

    stage (while the engine computes) -> commit (between two of its steps, on all shards at once) -> announce

`Shards` puts the shards together: it calls a method of each, adds up what they found, and raises the gravest error that one
of them met. There are two ways to reach them. `RankedShards` is for processes that run the same program: each has one, they
exchange what each shard has found, and all end in the same way; `ShardsTarget` is their target, in the first rank. vLLM's
workers are reached by calls from another process (`vllm_plugin.workers`).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from deltasync import limits
from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    ApplyError,
    CommitError,
    FingerprintMismatchError,
    ModelMismatchError,
    ShareError,
    TiedError,
    describe,
    get_logger,
    printable,
)
from deltasync.following.engine import Failure, is_safe, succeeded, unique_name
from deltasync.following.shard import Audit, Done, Engine, Found, Handed, Shard, handed
from deltasync.following.status import Commit
from deltasync.following.target import Identify
from deltasync.following.weights import LiveWeights
from deltasync.live import Prints, Union, assemble, proof
from deltasync.threads import daemon

logger = get_logger(__name__)

_NOTHING = type(None)


describe(Found, Audit, Done)


def commit_of(chain: Sequence[StoredRecord], done: Done, **measured: Any) -> Commit:
    """Return the commit of a chain, with what the engine has measured."""
    version = chain[-1].version
    return Commit(
        version=version.version,
        sha256=version.sha256,
        anchor=chain[0].use_anchor,
        changed=done.changed,
        stage_s=done.stage_s,
        scatter_s=done.scatter_s,
        reload_s=done.reload_s,
        **measured,
    )


class Shards(ABC):
    """The shards of all processes together. A subclass reaches them.

    Attributes:
        reloaded: The tensors that the engine loads again after each change, and why.
        ignored: The tensors that no process computes with: they are in no proof.
        ties: As `LiveMemory.ties`.
        draft: As `Engine.draft`.
    """

    def __init__(self, reader: ChannelReader, log: logging.Logger = logger) -> None:
        self.reader, self._log = reader, log
        self.reloaded: dict[str, str] = {}
        self.ignored: list[str] = []
        self.ties: dict[str, str] = {}
        self.draft: str | None = None
        self._regions: list[Any] = []  # the elements of each tensor that each shard holds
        self._union: Union | None = None
        self._found: Prints | None = None

    @abstractmethod
    def replies(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Shard`. Returns what each returns, of this kind, or its `Failure`."""

    def every(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Shard`, and return what each returns. Raises as `succeeded`."""
        return succeeded(self.replies(kind, method, *args))

    def verify(self) -> None:
        """Compare all weights with the checkpoint through the load plans.

        Raises:
            ModelMismatchError: the shards do not hold every tensor in places that can be updated.
        """
        found, specs = self.every(Found, "verify"), self.reader.specs
        reloaded = {name: why for each in found for name, why in each.reloaded.items()}
        nowhere = proof.check_coverage(specs, [each.regions for each in found], reloaded)
        ties = {name: other for each in found for name, other in each.ties.items() if name in nowhere}
        ignored = [name for name in nowhere if name not in ties]
        if ignored and not all(each.is_complete for each in found):
            which = f"{len(ignored)} tensors, such as {specs[ignored[0]]},"
            raise ModelMismatchError(f"{which} cannot be updated by this release: the engine's loader copies them nowhere.")
        proof.check_ignored(ignored, specs, set().union(*(each.absent for each in found)))
        self.reloaded, self.ignored, self.ties, self.draft = reloaded, ignored, ties, found[0].draft

    def prove(self) -> None:
        """Make sure that all engines make again what they derive from weights, and say what is not served.

        Raises:
            ModelMismatchError: an engine does not, or the model has tensors that the channel lacks.
        """
        missing = sorted({name for names in self.every(list[str], "prove") for name in names})
        if missing:
            raise ModelMismatchError(
                f"{len(missing)} tensors of the model, such as {missing[0]}, are not in the channel, so they would stay as "
                "loaded: publish `state_dict()`, buffers included, or serve a checkpoint of the trainer's model."
            )
        self._warn(self.ignored, "are not served, and in no proof: the engine's loader ignores them")
        self._log.info(
            "deltasync load plan is proven: patched_in_place=%d reloaded=%d tied=%d ignored=%d",
            *(self.patched_count, len(self.reloaded), len(self.ties), len(self.ignored)),
        )
        if self.draft is not None:
            self._log.info("deltasync: %s", self.draft)
        for why, names in self.by_reason().items():
            self._warn(names, f"take the fallback, because {why}: a commit loads their layers again, which takes longer")

    @property
    def patched_count(self) -> int:
        """How many tensors commits write in place."""
        return len(self.reader.specs) - len(self.reloaded) - len(self.ignored) - len(self.ties)

    def by_reason(self) -> dict[str, list[str]]:
        """Return the tensors that the engine loads again after each change, by the reason."""
        found: dict[str, list[str]] = {}
        for name, why in self.reloaded.items():
            found.setdefault(why, []).append(name)
        return found

    def _warn(self, names: Sequence[str], what: str) -> None:
        if names:
            shown = ", ".join(map(printable, names[:5]))
            self._log.warning("deltasync: %d tensors (%s, ...) %s", len(names), shown, printable(what))

    def adopt(self) -> int:
        """Audit the shards for the first time. Returns the model's fingerprint."""
        return self._total(self.every(Audit, "audit", self.ignored, self.ties))

    def identified(self, record: Handed | None) -> None:
        """Tell the shards which version they hold, None for no version of the channel."""
        self.every(_NOTHING, "identified", record)

    def settle(self) -> VersionId | None:
        """Audit the shards. Returns the version that they hold, or None if the bits are not what they were taken for."""
        total = self._total(self.every(Audit, "audit"))
        named = {*self.every(VersionId | None, "settle", total)}
        if len(named) > 1:
            raise ApplyError(f"The shards hold different versions: {', '.join(sorted(map(str, named)))}.")
        (version,) = named
        return version

    def _total(self, audits: Sequence[Audit]) -> int:
        self._regions = [audit.regions for audit in audits]
        self._union = Union([*self.reader.specs], self._regions)
        return self._prints(audits).total

    def _prints(self, shards: Sequence[Audit] | Sequence[Done]) -> Prints:
        """Return the fingerprints of all tensors, from those that the shards say of their segments."""
        assert self._union is not None
        self._found = self._union.of(np.frombuffer(b"".join(each.parts for each in shards), np.uint64))
        return self._found

    @property
    def fingerprints(self) -> dict[str, int]:
        """Each tensor's fingerprint over all shards, as of the last audit, or commit of several shards."""
        return {} if self._found is None else self._found.by_name(self.reader.specs)

    def stage(self, chain: Sequence[Handed]) -> bool:
        """Have all shards stage a chain. Returns whether all know their bits, so that it can be committed.

        A tensor of which a shard holds too little to decode it is handed to all shards that hold a part of it, once.

        Raises:
            ApplyError: a shard lacks a tensor that it was handed.
        """
        completed: set[str] = set()
        while True:
            try:
                return all(self.every(bool, "stage", chain))
            except ShareError as error:
                lacking = {*error.tensors}
            if lacking & completed:
                raise ApplyError(f"A shard was handed {min(lacking & completed)}, and lacks it.")
            for name in sorted(lacking):
                self._complete(name)
            completed |= lacking
            size_mb = sum(self.reader.specs[name].nbytes for name in lacking) / 1e6
            self._log.info(
                "deltasync: each process keeps %d tensors whole on the host, %.1f MB, such as %s, to decode `context`",
                *(len(lacking), size_mb, min(lacking)),
            )

    def _complete(self, name: str) -> None:
        data = self._assembled(name).data.cast("B")
        for at in range(0, len(data), limits.HANDED_BYTES):
            self.every(_NOTHING, "complete", name, at, bytes(data[at : at + limits.HANDED_BYTES]))

    def commit(self) -> Done:
        """Commit what is staged, on all shards or on none. Call between two steps of the engine.

        Returns the longest times, and the sum of the changed elements.

        Raises:
            DeltaSyncError: the commit failed; `is_safe` says whether the old bits are live again.
        """
        alone = len(self._regions) == 1
        replies = self.replies(Done, "commit", alone)
        if not alone and any(isinstance(reply, Failure) for reply in replies):
            _check_undone(self.replies(_NOTHING, "undo"))
        done = succeeded(replies)
        if not alone:
            value_T, same_T = self._prints(done)
            self._compared((value_T.tobytes(), same_T.tobytes()))
        return Done(
            changed=sum(each.changed for each in done),
            stage_s=max(each.stage_s for each in done),
            scatter_s=max(each.scatter_s for each in done),
            reload_s=max(each.reload_s for each in done),
        )

    def _compared(self, found: tuple[bytes, bytes]) -> None:
        """Have all shards compare the fingerprints over all of them with the published ones."""
        confirmed = self.replies(_NOTHING, "confirm", found)
        if None in confirmed:
            _check_undone(confirmed)
        succeeded(confirmed)

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor that is computed with, in live memory, put together from all shards.

        Raises:
            ApplyError: two shards hold different copies of the same elements.
        """
        return {name: sha256_hex(self._assembled(name).data) for name in self.reader.specs if name not in self.ignored}

    def _assembled(self, name: str) -> np.ndarray:
        return assemble(
            self.reader.specs[name], [held[name] for held in self._regions], self.every(list[bytes], "read", name)
        )


def _check_undone(replies: Iterable[Any]) -> None:
    """Raise CommitError if a shard failed to undo a commit: shards may then hold different versions."""
    for reply in replies:
        if isinstance(reply, Failure):
            raise CommitError(f"A shard's weights are uncertain. {reply.error()}")


class Ranks:
    """The ranks that share a model: a process group of torch's with gloo. Make it in the engine's thread, on all at once.

    Attributes:
        size: The number of ranks.
        number: This rank.
    """

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        self.size, self.number = group.size(), group.rank()
        self._engines, self._thread = group, threading.get_ident()
        for_ever = datetime.timedelta(days=3650)  # a thread waits for the next version
        members = torch.distributed.get_process_group_ranks(group)
        self._ours = torch.distributed.new_group(members, for_ever, "gloo") if self.size > 1 else group

    def gather(self, mine: Any) -> list[Any]:
        """Return the argument of each rank, in order: in the engine's thread by its group, in others by one of ours."""
        found: list[Any] = [None] * self.size
        group = self._engines if threading.get_ident() == self._thread else self._ours
        torch.distributed.all_gather_object(found, mine, group=group)
        return found

    def broadcast(self, call: Any = None) -> Any:
        """Send a call from the first rank's thread to the others', which receive it by calling this without one."""
        box = [call]
        torch.distributed.broadcast_object_list(box, group=self._ours, group_src=0)
        return box[0]


class RankedShards(Shards):
    """The shards of ranks that run the same program: each rank has one of these, and calls its methods with the others.

    Attributes:
        shard: The shard of this rank.
        ranks: All ranks.
        held: Whether nothing may be computed, because the version of the weights is unknown. The same on all ranks.
    """

    def __init__(self, reader: ChannelReader, engine: Engine, ranks: Ranks) -> None:
        super().__init__(reader)
        self.shard, self.ranks, self.held = Shard(reader, engine, ranks.number), ranks, False
        self._names: OrderedDict[int, str] = OrderedDict()

    @property
    def weights(self) -> LiveWeights:
        """The weights of this rank; there after `adopt`."""
        return self.shard.weights

    def replies(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """As `Shards.replies`, on all ranks."""
        mine: Any
        try:
            self.shard.use_device()  # in whichever thread this is
            mine = getattr(self.shard, method)(*args)
        except Exception as error:  # noqa: BLE001 - all ranks raise it
            mine = Failure.of(error)
        return [mine] if self.ranks.size == 1 else self.ranks.gather(mine)

    def prepare(self) -> None:
        """Read the channel's tensors. Raises NotPublishedError if it has no version yet."""
        self.every(_NOTHING, "prepare")

    def record(self) -> None:
        """Record the load plans. Call between two steps."""
        self.every(_NOTHING, "record")

    def settled(self) -> None:
        """Announce what the weights are, between two steps; from here on they may be computed with."""
        version = self.weights.version
        if version is None and self.held:
            return  # full weights follow
        self.shard.engine.announce("unknown" if version is None else unique_name(self._names, version))
        self.held = False

    def commit(self) -> Done:
        """As `Shards.commit`, and announce the version."""
        try:
            done = super().commit()
        except BaseException as error:
            self.held = self.held or not is_safe(error)
            raise
        self.settled()
        return done

    def _compared(self, found: tuple[bytes, bytes]) -> None:
        # All ranks compare the same numbers, so the bits are right on all or on none; only what undoes them may differ.
        try:
            self.shard.confirm(found)
        except (FingerprintMismatchError, TiedError, CommitError) as error:
            succeeded(self.ranks.gather(Failure.of(error)))

    def wake_up(self) -> None:
        """Hold the engine until an audit has found the version of the weights."""
        self.shard.wake_up()
        self.held = bool(self._regions)


class ShardsTarget:
    """The weights of all ranks, as a `Target` in the first one.

    `between_steps` runs a method of every rank's `RankedShards` between two steps of the engine, in the same one on all
    ranks: `record`, `prove`, `settled`, and `commit`, of which it returns the pause and the number of running requests too.
    """

    def __init__(self, shards: RankedShards, between_steps: Callable[..., Any]) -> None:
        self.version: VersionId | None = None
        self._shards, self._between_steps = shards, between_steps
        self._is_sure = False  # whether all ranks were settled when they were asked last

    @property
    def progressed_s(self) -> float:
        """When staging last advanced (`Target.progressed_s`)."""
        return self._shards.shard.progressed_s

    @property
    def ignored(self) -> Sequence[str]:
        """As `Target.ignored`."""
        return self._shards.ignored

    def _in_background(self, method: str, *arguments: Any) -> Any:
        if self._shards.ranks.size > 1:
            self._shards.ranks.broadcast((method, arguments))
        return getattr(self._shards, method)(*arguments)

    def open(self, identify: Identify) -> None:
        """Prove the load plan and find the live version (`Target.open`)."""
        self._in_background("prepare")
        self._between_steps("record")
        self._in_background("verify")
        self._between_steps("prove")
        found = identify(self._in_background("adopt"))
        self._in_background("identified", None if found is None else handed([found])[0])
        self._settled()

    def _settled(self) -> None:
        self._between_steps("settled")
        self.version, self._is_sure = self._shards.weights.version, True

    def is_settled(self, asked: bool) -> bool:
        """Whether the live bits are known (`Target.is_settled`)."""
        return self._is_sure and self._shards.shard.settled()

    def settle(self) -> None:
        """Audit the live bits on all ranks (`Target.settle`)."""
        self._in_background("settle")
        self._settled()

    def stage(self, chain: Sequence[StoredRecord]) -> Sequence[StoredRecord] | None:
        """Stage a chain on all ranks (`Target.stage`)."""
        self._is_sure = bool(self._in_background("stage", handed(chain)))
        return chain if self._is_sure else None

    def commit(self, staged: Sequence[StoredRecord]) -> Commit:
        """Commit on all ranks at once (`Target.commit`)."""
        pause_s, running, done = self._between_steps("commit")
        self.version = staged[-1].version
        return commit_of(staged, done, pause_s=pause_s, running_requests=running)

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory."""
        found: dict[str, str] = self._in_background("digest")
        return found

    def close(self) -> None:
        """Do nothing."""


def serve_background(shards: RankedShards) -> None:
    """Run in a thread of this process what the first rank runs in the background."""

    def serve() -> None:
        while True:
            method, arguments = shards.ranks.broadcast()
            with contextlib.suppress(Exception):  # the first rank has met it too, and reports it
                getattr(shards, method)(*arguments)

    daemon("follow", serve).start()
