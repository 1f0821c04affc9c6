"""A target for engines whose processes run one program, each with a shard of the weights, such as SGLang's schedulers.

Each rank has a `RankedShards`. They exchange what each shard has found, and all end in the same way. `ShardsTarget` is their
target, in the first rank.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import CommitError, FingerprintMismatchError
from deltasync.following.engine import unique_name
from deltasync.following.follower import Follower
from deltasync.following.shard import Done, Engine, Shard, handed
from deltasync.following.shards import NOTHING, Failure, Shards, commit_of, is_safe, succeeded
from deltasync.following.status import Commit
from deltasync.following.target import Identify


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
    def follower(self) -> Follower:
        """The follower of this rank; there after `adopt`."""
        return self.shard.follower

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
        self.every(NOTHING, "prepare")

    def record(self) -> None:
        """Record the load plans. Call between two steps."""
        self.every(NOTHING, "record")

    def settled(self) -> None:
        """Announce what the weights are, between two steps; from here on they may be computed with."""
        version = self.follower.version
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

    def _confirm(self, changed: dict[str, int], total: int) -> None:
        # All ranks compare the same numbers, so the bits are right on all or on none; only what undoes them may differ.
        try:
            self.shard.confirm(changed, total)
        except (FingerprintMismatchError, CommitError) as error:
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
        self.version, self._is_sure = self._shards.follower.version, True

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

    threading.Thread(target=serve, name="deltasync-rank", daemon=True).start()
