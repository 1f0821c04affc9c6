"""Two of vLLM's own metrics, which are in the process of its API server."""

from __future__ import annotations

from deltasync.following.metrics import total


def generated_tokens() -> int:
    """Return the tokens generated since the server started."""
    return total("vllm:generation_tokens_total")


def running_requests() -> int:
    """Return the requests in flight at the last engine step."""
    return total("vllm:num_requests_running")
