"""Prometheus metrics: deltasync's own, beside vLLM's under /metrics, and what vLLM's say about the server.

Both live in vLLM's API process and go the same way: by prometheus_client's default registry, or, with several API
processes, by the files in PROMETHEUS_MULTIPROC_DIR.
"""

from __future__ import annotations

import dataclasses
import time

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from deltasync import errors
from deltasync.errors import ApplyError, CommitError, DeltaSyncError

_LONG_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PAUSE_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """One version that became live.

    Attributes:
        sha256: The digest of its record.
        stage_s: Fetch, check, decode and translate, in the worker, while serving.
        pause_s: From asking vLLM to pause until it had resumed.
        scatter_s: Of that, writing live weights, or the mirror of those that take the fallback.
        reload_s: Of that, loading the layers of those again.
        lag_s: From the publisher's clock at encoding until the version was served.
        tokens_during_sync: Tokens that the server generated between the start of staging and the resume.
        running_requests: Requests in flight when generation was paused.
        served_at: Seconds since the epoch.
    """

    version: int
    sha256: str
    anchor: bool
    changed: int
    payload_bytes: int
    stage_s: float
    pause_s: float
    scatter_s: float
    reload_s: float
    lag_s: float
    tokens_during_sync: int
    running_requests: int
    served_at: float


class Metrics:
    """What a replica tells Prometheus.

    Args:
        registry: Where the metrics are registered; a registry takes them once.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._served = Gauge(
            "deltasync_served_version",
            "Version served, 0 before the first.",
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._following = Gauge(
            "deltasync_following",
            "1 if this server follows its channel, 0 if it cannot; /deltasync/status says why.",
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._following.set(1)
        self._newest = Gauge(
            "deltasync_newest_version",
            "Newest version seen in the channel, 0 before the first.",
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._looked_at = Gauge(
            "deltasync_last_look_timestamp_seconds",
            "When the channel's store last answered a look, seconds since the epoch; 0 before the first time.",
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._lag = Histogram(
            "deltasync_lag_seconds",
            "From encoding a version, by the publisher's clock, until it was served.",
            buckets=_LONG_S,
            registry=registry,
        )
        self._stage = Histogram(
            "deltasync_stage_seconds",
            "Fetching, checking and decoding a version while serving.",
            buckets=_LONG_S,
            registry=registry,
        )
        self._pause = Histogram(
            "deltasync_pause_seconds",
            "Pause of token generation for a commit, also for one that was rolled back.",
            buckets=_PAUSE_S,
            registry=registry,
        )
        self._payload = Counter("deltasync_payload_bytes", "Bytes downloaded for committed versions.", registry=registry)
        self._commits = Counter("deltasync_commits", "Commits, by what was applied.", ["kind"], registry=registry)
        self._rollbacks = Counter(
            "deltasync_rollbacks", "Commits that were undone; the version before stayed served.", registry=registry
        )
        self._errors = Counter(
            "deltasync_errors", "Looks at the channel that failed, by the error's class.", ["class"], registry=registry
        )
        for kind in ("delta", "fold", "anchor"):
            self._commits.labels(kind)

    def refused(self) -> None:
        """The server does not follow."""
        self._following.set(0)

    def looked(self, served: int | None, newest: int | None, last_look_s_ago: float | None) -> None:
        """After a look at the channel: the version served, the newest there, and when the store last answered."""
        self._served.set(0 if served is None else served)
        self._newest.set(0 if newest is None else newest)
        self._looked_at.set(0 if last_look_s_ago is None else time.time() - last_look_s_ago)

    def committed(self, commit: Commit, kind: str) -> None:
        """After a commit of kind `delta`, `fold` or `anchor`."""
        self._commits.labels(kind).inc()
        self._payload.inc(commit.payload_bytes)
        self._stage.observe(commit.stage_s)
        self._lag.observe(commit.lag_s)

    def paused(self, pause_s: float) -> None:
        """After generation was resumed."""
        self._pause.observe(pause_s)

    def rolled_back(self, error: ApplyError) -> None:
        """After a commit that failed, which undoes it unless it is a CommitError."""
        if error_class(error) != CommitError.__name__:
            self._rollbacks.inc()

    def failed(self, error: Exception) -> None:
        """After a look at the channel that ended with an error."""
        self._errors.labels(error_class(error)).inc()


def error_class(error: Exception) -> str:
    """The class of an error; of a worker's, which crossed processes as `Class: sentence` in an ApplyError, that class."""
    name = str(error).partition(":")[0]
    found = getattr(errors, name, None) if type(error) is ApplyError else None
    return name if isinstance(found, type) and issubclass(found, DeltaSyncError) else type(error).__name__


def generated_tokens() -> int:
    """Tokens generated since the server started."""
    return _total("vllm:generation_tokens", "vllm:generation_tokens_total")


def running_requests() -> int:
    """Requests in flight at the last engine step."""
    return _total("vllm:num_requests_running", "vllm:num_requests_running")


def _total(name: str, sample_name: str) -> int:
    """Sum of one of vLLM's metrics over its labels; 0 where vLLM's statistics are turned off."""
    registry = REGISTRY.restricted_registry([name, sample_name])
    return int(sum(s.value for metric in registry.collect() for s in metric.samples if s.name == sample_name))
