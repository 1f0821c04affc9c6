"""What vLLM's own Prometheus metrics say about the server, read in its API process."""

from __future__ import annotations

from prometheus_client import REGISTRY


def _total(name: str, sample_name: str) -> int:
    """Sum of a metric over its labels; 0 where vLLM's statistics are turned off."""
    registry = REGISTRY.restricted_registry([name, sample_name])
    return int(sum(s.value for metric in registry.collect() for s in metric.samples if s.name == sample_name))


def generated_tokens() -> int:
    """Tokens generated since the server started."""
    return _total("vllm:generation_tokens", "vllm:generation_tokens_total")


def running_requests() -> int:
    """Requests in flight at the last engine step."""
    return _total("vllm:num_requests_running", "vllm:num_requests_running")
