"""Replicas: where they go (`course`), how weights get there (`follower`), in host memory (`replica`) and in a module."""

from deltasync.replicas.course import Course
from deltasync.replicas.follower import Follower, StagedVersion
from deltasync.replicas.module import Following, follow
from deltasync.replicas.pin import NEWEST, Pin
from deltasync.replicas.poll import Poll
from deltasync.replicas.replica import Replica

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
