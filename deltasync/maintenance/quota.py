"""Compute how many replicas one account of the Hub serves, from its quotas and the requests of a version.

Requests were counted with the tests' stand-in for the Hub: a version every 5 s, then an idle minute (2026-11-25).
"""

from __future__ import annotations

import dataclasses

WINDOW_S = 300.0
"""Length of the window in which the Hub counts requests."""

EVERY_S = (5.0, 10.0, 30.0, 60.0)
"""Times between two versions in `table`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Requests:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The most replicas that one account serves in addition to a trainer.

    Attributes:
        plan: The account's plan.
        every_s: Time between two versions.
        following: Number of replicas, if they read the feed of events.
        polling: Number of replicas, if they poll.
    """

    plan: str
    every_s: float
    following: int
    polling: int


def served(plan: str, every_s: float) -> Served:
    """Return how many replicas an account serves; the tighter quota decides."""
    versions, minutes = WINDOW_S / every_s, WINDOW_S / 60

    def most(version: Requests, minute: Requests) -> int:
        quota = PLANS[plan]
        api = (quota.api - versions * PUBLISHED.api) / (versions * version.api + minutes * minute.api)
        resolvers = (quota.resolvers - versions * PUBLISHED.resolvers) / (
            versions * version.resolvers + minutes * minute.resolvers
        )
        return max(0, int(min(api, resolvers)))

    return Served(plan, every_s, most(FOLLOWED, IDLE_MINUTE), most(POLLED, POLLED_MINUTE))


def table() -> list[Served]:
    """Return a row for each time between versions and plan."""
    return [served(plan, every_s) for every_s in EVERY_S for plan in PLANS]


def sentences() -> list[str]:
    """Return the table in words, a sentence for each time between two versions."""
    return [
        f"A version every {every_s:g} s, one account: "
        + ", ".join(
            f"{row.plan} {row.following} replicas ({row.polling} polling)" for row in table() if row.every_s == every_s
        )
        + "."
        for every_s in EVERY_S
    ]
