"""Format 2 explored as a model: every interleaving within bounds. See docs/protocol-model.md."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.state import Rules

ONE = Rules(writers=1)
BOTH = Rules()
UNREAD = Rules(reader=False)
LEASE = Rules(store="plain")
RESTORED = Rules(backup="start", anchor_every=9)

SMALL = {
    "one writer, faults": ONE._replace(calls=4, crashes=1, opens=2, faults=2, parts=True, reader=False),
    "one writer, a reader, forget and prune": ONE._replace(calls=3, forgets=1, prunes=1, parts=True),
    "one writer, a damaged object": ONE._replace(calls=3, damages=1, parts=True),
    "one writer, a damaged object, a compaction": ONE._replace(calls=4, damages=1, compactions=1),
    "two writers": BOTH,
    "two writers, parts, a fault": BOTH._replace(parts=True, faults=1),
    "two writers, requests that arrive late": BOTH._replace(faults=1, late=True),
    "two writers, a crash, requests that arrive late": UNREAD._replace(crashes=1, opens=2, faults=1, late=True),
    "two writers, forget": BOTH._replace(forgets=1, anchor_every=3),
    "two writers, forget, requests that arrive late": UNREAD._replace(forgets=1, faults=1, late=True),
    "two writers, forget and prune": UNREAD._replace(forgets=1, prunes=1, parts=True),
    "two writers, a damaged object": BOTH._replace(damages=1, anchor_every=9),
    "two writers, a new replica, an edge that remembers": BOTH._replace(joins=1, sticky=True, anchor_every=9),
    "two writers, a restored backup": RESTORED,
    "two writers, a backup of any moment": UNREAD._replace(backup="any"),
    "two writers, listings that are cut": BOTH._replace(cut=True),
    "lease, listings that are cut": LEASE._replace(cut=True),
    "lease, a crash, listings that are cut": LEASE._replace(cut=True, crashes=1, opens=2, reader=False),
    "lease": LEASE,
    "lease, requests that arrive late": LEASE._replace(faults=1, late=True),
    "lease, a crash, requests that arrive late": LEASE._replace(crashes=1, opens=2, faults=1, late=True, reader=False),
    "lease, a crash, prune, requests that arrive late": LEASE._replace(
        crashes=1, faults=1, late=True, prunes=1, parts=True, reader=False
    ),
    "lease, forget, requests that arrive late": LEASE._replace(forgets=1, faults=1, late=True, reader=False),
    "lease, forget and prune": LEASE._replace(forgets=1, prunes=1, parts=True, reader=False),
    "lease, a new replica, an edge that remembers": LEASE._replace(joins=1, sticky=True, anchor_every=9),
    "lease, a restored backup": LEASE._replace(backup="start", anchor_every=9),
    "lease that does not hold: forks, and nothing worse": LEASE._replace(timely=False, linear=False),
    "a store that lies": Rules(store="lies"),
}
LARGE = {
    "one writer, a reader, faults": ONE._replace(calls=4, crashes=1, opens=2, faults=2, parts=True),
    "two writers, a crash": BOTH._replace(calls=3, crashes=1, opens=2),
    "two writers, a crash, requests that arrive late": BOTH._replace(crashes=1, opens=2, faults=1, late=True),
    "two writers, forget": BOTH._replace(calls=3, forgets=1, parts=True),
    "two writers, forget and prune": BOTH._replace(forgets=1, prunes=1, parts=True),
    "two writers, forget and prune, longer": UNREAD._replace(calls=3, forgets=1, prunes=1, parts=True),
    "two writers, a damaged object": BOTH._replace(damages=1, parts=True),
    "two writers, a backup of any moment": BOTH._replace(backup="any"),
    "lease, a crash, requests that arrive late": LEASE._replace(crashes=1, opens=2, faults=1, late=True),
    "lease, forget and prune": LEASE._replace(forgets=1, prunes=1, parts=True),
    "two writers, forget and prune, requests that arrive late": UNREAD._replace(
        forgets=1, prunes=1, parts=True, faults=1, late=True
    ),
    "lease, forget and prune, requests that arrive late": LEASE._replace(
        forgets=1, prunes=1, parts=True, faults=1, late=True, reader=False
    ),
    "lease, a damaged object": LEASE._replace(damages=1),
    "lease, a backup of any moment": LEASE._replace(backup="any"),
    "lease that does not hold, a fault": LEASE._replace(timely=False, linear=False, faults=1),
}

# The rule that is dropped -> where that shows, and what goes wrong then.
MUTATIONS = {
    "seal": (UNREAD, "a fork"),
    "list_after_seal": (UNREAD._replace(calls=3, forgets=1), "a fork"),
    "read_on": (LEASE._replace(cut=True), "a fork"),
    "count_sealed": (UNREAD._replace(crashes=1, opens=2), "cannot publish"),
    "keep_seals": (UNREAD._replace(calls=3, forgets=1), "a fork"),
    "probe": (Rules(store="lies"), "is written over"),
    "epoch_in_key": (LEASE._replace(timely=False, linear=False), "is written over"),
    "token": (LEASE._replace(crashes=1, opens=2), "is written over"),
    "parts_first": (ONE._replace(parts=True), "nothing leads to"),
    "same_bytes": (ONE._replace(calls=3, faults=1), "is alone and was told of another writer"),
    "attempt": (ONE._replace(calls=4, faults=3, late=True, parts=True), "is written over"),
    "full_after_loss": (ONE._replace(calls=3, faults=1, parts=True), "a delta from"),
    "settle": (LEASE, "a fork"),
    "look": (LEASE, "a fork"),
    "suspend_counts": (LEASE, "a fork"),
    "poll_base": (RESTORED, "a delta from"),
    "plan_by_digest": (RESTORED, "never gets to"),
    "never_back": (RESTORED, "a reader goes back"),
    "lost_anew": (RESTORED, "waits for ever"),
    "list_when_lost": (BOTH._replace(sticky=True), "waits for ever"),
    "detour": (ONE._replace(calls=3, damages=1), "never gets to"),
    "ack_by_digest": (RESTORED, "for an acknowledgement"),
    "newest_first": (ONE._replace(calls=3, anchor_every=3, forgets=1), "is left and cannot be read"),
    "objects_first": (UNREAD._replace(forgets=1, prunes=1, parts=True), "is left and cannot be read"),
    "spare_under_way": (ONE._replace(prunes=1, parts=True), "nothing leads to"),
    "ends_by_version": (
        LEASE._replace(crashes=1, faults=1, late=True, prunes=1, parts=True, reader=False),
        "nothing leads to",
    ),
    "grace": (UNREAD._replace(forgets=1, prunes=1, parts=True), "is left and cannot be read"),
}

# What is left, by design; docs/protocol-model.md says why.
LIMITS = {
    "a lease, and a request that lands after its successor has settled": (LEASE._replace(timely=False), "a fork"),
    "a restored backup that has lost versions": (RESTORED._replace(forks_after_restore=False), "a fork"),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_invariant_holds_in_every_state(name: str) -> None:
    result = explore(SMALL[name])
    print(f"{name}: {result.states} states, {result.steps} steps, {result.depth} deep")
    assert not result.wrong, f"\n{result}"
    assert result.states > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_invariant_holds_in_every_state_of_a_larger_world(name: str) -> None:
    result = explore(LARGE[name])
    print(f"{name}: {result.states} states, {result.steps} steps, {result.depth} deep")
    assert not result.wrong, f"\n{result}"


@pytest.mark.parametrize("rule", MUTATIONS)
def test_every_rule_matters(rule: str) -> None:
    rules, wrong = MUTATIONS[rule]
    result = explore(rules._replace(**{rule: False}))
    print(f"without {rule}:\n{result}")
    assert wrong in result.wrong
    assert result.trace


def test_there_is_a_mutation_of_every_rule() -> None:
    first = Rules._fields.index("seal")
    assert set(MUTATIONS) == set(Rules._fields[first:])


@pytest.mark.parametrize("limit", LIMITS)
def test_known_limits_are_found(limit: str) -> None:
    rules, wrong = LIMITS[limit]
    result = explore(rules)
    print(f"{limit}:\n{result}")
    assert wrong in result.wrong
