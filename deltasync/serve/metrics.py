"""Prometheus metrics of a replica, at the engine's own /metrics.

They are in prometheus_client's default registry, or, where the engine has several processes, in the files in
PROMETHEUS_MULTIPROC_DIR. This module is the only one of its room that needs prometheus_client, which engines
bring along.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector

from deltasync.channel.record import StoredRecord
from deltasync.errors import CommitError, DeltaSyncError
from deltasync.following import Follow
from deltasync.following.status import Commit

_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PAUSE_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """A replica's metrics. A registry takes them once.

    Attributes:
        following: 1, or 0 for a server that cannot follow.
        pause: Lengths of pauses, in seconds.
        rollbacks: Commits that were undone.
        ended: Choices that a commit ended, because their oldest token was older than their request allows.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        gauge = functools.partial(Gauge, multiprocess_mode="mostrecent", registry=registry)
        counter = functools.partial(Counter, registry=registry)
        histogram = functools.partial(Histogram, registry=registry)
        self._served = gauge("deltasync_served_version", "Version served, 0 before the first.")
        self.following = gauge(
            "deltasync_following",
            "1 if this server follows its channel, 0 if it cannot; /deltasync/status says why.",
        )
        self.following.set(1)
        self._newest = gauge(
            "deltasync_newest_version", "Newest version seen in the channel, 0 before the first."
        )
        self._followed = gauge(
            "deltasync_seconds_since_followed",
            "Seconds since the channel could last be followed: how long it is stuck.",
        )
        self._lag = histogram(
            "deltasync_lag_seconds",
            "From encoding a version, by the publisher's clock, until it was served; without catching up "
            "after a start.",
            buckets=_LONG_S,
        )
        self._stage = histogram(
            "deltasync_stage_seconds",
            "Fetching, checking and decoding a version while serving.",
            buckets=_LONG_S,
        )
        self.pause = histogram(
            "deltasync_pause_seconds",
            "Pause of token generation for a commit, also for one that was rolled back.",
            buckets=_PAUSE_S,
        )
        self._payload = counter("deltasync_payload_bytes", "Bytes downloaded for committed versions.")
        self._commits = counter("deltasync_commits", "Commits, by the kind of record applied.", ["kind"])
        self.rollbacks = counter(
            "deltasync_rollbacks", "Commits that were undone; the version before stayed served."
        )
        self.ended = counter(
            "deltasync_ended_choices",
            "Choices that a commit ended, because their oldest token was older than their request allows.",
        )
        self._errors = counter("deltasync_errors", "Steps that failed, by the error's class.", ["class"])
        for kind in ("delta", "compaction", "anchor"):
            self._commits.labels(kind)

    def stepped(self, follow: Follow) -> None:
        """Note a step of the follow loop."""
        self._served.set(follow.version or 0)
        self._newest.set(follow.newest or 0)
        self.followed(follow)

    def followed(self, follow: Follow) -> None:
        """Note how long the replica is stuck; call it every second, because a step may hang."""
        self._followed.set(follow.health.stuck_s)

    def committed(self, commit: Commit, chain: Sequence[StoredRecord]) -> None:
        """Note a commit."""
        kind = (
            "anchor"
            if commit.anchor
            else "compaction"
            if any(stored.is_compaction for stored in chain)
            else "delta"
        )
        self._commits.labels(kind).inc()
        self._payload.inc(commit.payload_bytes)
        self._stage.observe(commit.stage_s)
        if commit.lag_s is not None:
            self._lag.observe(commit.lag_s)

    @contextlib.contextmanager
    def attempt(self, pause_s: Callable[[], float]) -> Iterator[None]:
        """Return a context for a commit that notes its pause, and whether it was rolled back."""
        try:
            yield
        except DeltaSyncError as error:
            if not isinstance(error, CommitError):
                self.rollbacks.inc()
            raise
        finally:
            self.pause.observe(pause_s())

    def failed(self, error: BaseException) -> None:
        """Note a step that ended with an error."""
        self._errors.labels(type(error).__name__).inc()


def total(name: str) -> int:
    """Return the sum of one of the engine's metrics over its labels and processes; 0 if its statistics are
    turned off.
    """
    if values.ValueClass._multiprocess:
        metrics = MultiProcessCollector(None).collect()  # type: ignore[no-untyped-call]
    else:
        metrics = REGISTRY.restricted_registry([name]).collect()
    return int(sum(sample.value for metric in metrics for sample in metric.samples if sample.name == name))
