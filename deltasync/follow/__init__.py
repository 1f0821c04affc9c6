"""Replicas: where they go (`course`), how weights get there (`follower`), and the one in host memory (`replica`)."""

from deltasync.follow.course import Course
from deltasync.follow.follower import CommittedVersion, Follower, StagedVersion
from deltasync.follow.pin import NEWEST, Pin
from deltasync.follow.poll import Poll
from deltasync.follow.replica import Replica

__all__ = ["NEWEST", "CommittedVersion", "Course", "Follower", "Pin", "Poll", "Replica", "StagedVersion", "follower"]
