"""Following a channel: the cursor, the one loop (`Follow`), and its target in host memory."""

from deltasync.following.cursor import Cursor
from deltasync.following.follow import Follow
from deltasync.following.loading import HostWeights
from deltasync.following.poll import Poll
from deltasync.following.replica import MemoryTarget, Replica
from deltasync.following.status import Commit, Status
from deltasync.following.target import Identify, Observer, Target
from deltasync.following.weights import LiveWeights, StagedVersion

__all__ = [
    "Commit",
    "Cursor",
    "Follow",
    "HostWeights",
    "Identify",
    "LiveWeights",
    "MemoryTarget",
    "Observer",
    "Poll",
    "Replica",
    "StagedVersion",
    "Status",
    "Target",
    "replica",
    "search",
    "state",
    "status",
    "target",
    "weights",
]
