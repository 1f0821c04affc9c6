"""Following a channel: the cursor, the one loop (`Follow`) and its targets in host memory and in a torch module."""

from deltasync.following.cursor import Cursor
from deltasync.following.gate import Gate, GatedTarget, Mapped, Names, Part, gated_calls, reclassed
from deltasync.following.loop import Follow
from deltasync.following.module import ModuleReplica, follow
from deltasync.following.poll import Poll
from deltasync.following.replica import MemoryTarget, Replica
from deltasync.following.status import Commit, Status
from deltasync.following.target import Identify, Observer, Target
from deltasync.following.weights import LiveWeights, StagedVersion

__all__ = [
    "Commit",
    "Cursor",
    "Follow",
    "Gate",
    "GatedTarget",
    "Identify",
    "LiveWeights",
    "Mapped",
    "MemoryTarget",
    "ModuleReplica",
    "Names",
    "Observer",
    "Part",
    "Poll",
    "Replica",
    "StagedVersion",
    "Status",
    "Target",
    "calls",
    "engine",
    "follow",
    "gated_calls",
    "metrics",
    "reclassed",
    "replies",
    "requests",
    "routes",
    "shard",
    "shards",
    "startup",
    "wanted",
]
