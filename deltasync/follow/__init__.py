"""Replicas: where they go (`course`), how weights get there (`follower`), in host memory (`replica`) and in a module."""

from deltasync.follow.cursor import Course
from deltasync.follow.follower import Follower, StagedVersion
from deltasync.follow.module import Following, follow
from deltasync.follow.pin import NEWEST, Pin
from deltasync.follow.poll import Poll
from deltasync.follow.replica import Replica

__all__ = [
    "NEWEST",
    "Course",
    "Follower",
    "Following",
    "Pin",
    "Poll",
    "Replica",
    "StagedVersion",
    "follow",
    "follower",
]
