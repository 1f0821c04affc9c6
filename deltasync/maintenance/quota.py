"""Compute how many replicas one account of the Hub serves, from its quotas and the requests of a version.

Requests were counted with the tests' stand-in for the Hub: a version every 5 s, then an idle minute (2026-11-25).
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW_S = 300.0  # length of the window in which the Hub counts requests
EVERY_S = (5.0, 10.0, 30.0, 60.0)  # times between two versions, in seconds


class Requests(NamedTuple):
    """Requests counted against the two quotas that deltasync uses: the Hub's API, and `/resolve/`."""

    api: float
    resolvers: float


ADVICE = "Give servers a token of another account, so that replicas cannot use up the trainer's quota."

PLANS = {
    "free": Requests(1_000, 5_000),
    "PRO": Requests(2_500, 12_000),
    "Team": Requests(3_000, 20_000),
    "Enterprise": Requests(6_000, 50_000),
}
"""Requests per window in the plans of 2025."""

PUBLISHED = Requests(3.1, 1.3)  # a publisher's, per version
FOLLOWED, IDLE_MINUTE = Requests(1.0, 1.3), Requests(2.0, 4.0)  # of a replica that reads the feed, heartbeat included
POLLED, POLLED_MINUTE = Requests(1.1, 10.9), Requests(7.0, 81.0)  # of a replica that polls


def sentences() -> list[str]:
    """Return how many replicas an account serves in addition to a trainer, a sentence for each of `EVERY_S`."""
    return [
        f"A version every {every_s:g} s, one account: "
        + ", ".join(
            f"{plan} {_most(quota, every_s, FOLLOWED, IDLE_MINUTE)} replicas "
            f"({_most(quota, every_s, POLLED, POLLED_MINUTE)} polling)"
            for plan, quota in PLANS.items()
        )
        + "."
        for every_s in EVERY_S
    ]


def _most(quota: Requests, every_s: float, version: Requests, minute: Requests) -> int:
    """Return the most replicas with these requests of each version and each minute; the tighter quota decides."""
    versions, minutes = WINDOW_S / every_s, WINDOW_S / 60
    served = (
        (most - versions * published) / (versions * of_version + minutes * of_minute)
        for most, published, of_version, of_minute in zip(quota, PUBLISHED, version, minute, strict=True)
    )
    return max(0, int(min(served)))
