"""Publish, follow, forget and prune, explored as a model: every interleaving within bounds. See docs/protocol-model.md."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.state import Rules

UNDECIDED = Rules(conditional=False)
ONE = Rules(writers=1)

SMALL = {
    "two publishers": Rules(),
    "two publishers, a fault": Rules(crashes=0, faults=1),
    "two publishers, versions by number": Rules(crashes=0, explicit=True),
    "two publishers, anything may get in between": Rules(timely=False),
    "two publishers, requests that arrive late": Rules(crashes=0, faults=1, late=True, reader=False),
    "two publishers, forget": Rules(crashes=0, forgets=1, explicit=True),
    "two publishers, forget and prune": Rules(crashes=0, forgets=1, prunes=1, reader=False),
    "undecided store": UNDECIDED._replace(crashes=0),
    "undecided store, a crash": UNDECIDED._replace(reader=False),
    "undecided store, a fault": UNDECIDED._replace(crashes=0, faults=1, reader=False),
    "undecided store, anything may get in between": UNDECIDED._replace(crashes=0, timely=False),
    "one publisher, faults": ONE._replace(calls=3, crashes=1, faults=2),
    "one publisher, forget and prune": ONE._replace(calls=3, forgets=1, prunes=1),
}
LARGE = {
    "two publishers": Rules(calls=3),
    "two publishers, faults": Rules(faults=2),
    "two publishers, anything may get in between": Rules(faults=1, timely=False),
    "two publishers, requests that arrive late": Rules(faults=1, late=True),
    "two publishers, forget and prune": Rules(crashes=0, forgets=1, prunes=1),
    "two publishers, forget and prune twice": Rules(crashes=1, forgets=2, prunes=2, reader=False),
    "undecided store": UNDECIDED._replace(faults=1),
    "undecided store, anything may get in between": UNDECIDED._replace(timely=False),
    "undecided store, requests that arrive late": UNDECIDED._replace(crashes=0, faults=1, late=True),
    "one publisher, forget and prune": ONE._replace(calls=4, forgets=1, prunes=1),
}

# The rule that is dropped -> where that shows, and what goes wrong then.
MUTATIONS = {
    "create_only": (Rules(), "cannot be read"),
    "payload_first": (Rules(), "cannot be read"),
    "manifest_first": (Rules(), "cannot be read"),
    "new_number_after_loss": (ONE._replace(faults=1, calls=3), "is alone and was told of another publisher"),
    "anchor_after_loss": (ONE._replace(faults=1, calls=3, anchor_every=9), "cannot be read"),
    "roll_forward": (ONE, "everybody left, and whoever opens the channel cannot publish"),
    "list_before_head": (Rules(calls=3), "head goes back"),
    "lease": (UNDECIDED, "head goes back"),
    "lease_before_manifest": (Rules(forgets=1, explicit=True), "cannot be read"),
    "lease_on_retry": (Rules(faults=1), "head goes back"),
    "check_digests": (UNDECIDED._replace(crashes=0), "to one reader and is"),
    "grace": (ONE._replace(calls=3, crashes=0, forgets=1, prunes=1), "is gone while a reader that was led to it needs it"),
    "objects_before_manifests": (ONE._replace(prunes=1), "is gone while a reader"),
    "forgotten_after_manifests": (ONE._replace(calls=3, crashes=0, forgets=1, prunes=1), "is gone while a reader"),
    "spare_after_head": (ONE._replace(prunes=1), "cannot be read"),
    "newest_first": (ONE._replace(calls=4, anchor_every=3, forgets=1), "is left and cannot be read"),
}

# What is left where the store or time does not help, by design; docs/protocol-model.md says why.
LIMITS = {
    "an undecided store, a manifest written over, and its version asked for by number": (
        UNDECIDED._replace(crashes=0, explicit=True),
        "was B1v2 to one reader and is A2v2 to another",
    ),
    "a number that is forgotten between a look at head and the write that rests on it": (
        Rules(crashes=0, forgets=1, timely=False),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_invariant_holds_in_every_state(name: str) -> None:
    result = explore(SMALL[name])
    print(f"{name}: {result.states} states, {result.steps} steps")
    assert not result.wrong, f"\n{result}"
    assert result.states > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_every_invariant_holds_in_every_state_of_a_larger_world(name: str) -> None:
    result = explore(LARGE[name])
    print(f"{name}: {result.states} states, {result.steps} steps")
    assert not result.wrong, f"\n{result}"


@pytest.mark.parametrize("rule", MUTATIONS)
def test_every_rule_matters(rule: str) -> None:
    rules, wrong = MUTATIONS[rule]
    result = explore(rules._replace(**{rule: False}))
    print(f"without {rule}:\n{result}")
    assert wrong in result.wrong
    assert result.trace


def test_there_is_a_mutation_of_every_rule() -> None:
    first = Rules._fields.index("create_only")
    assert set(MUTATIONS) == set(Rules._fields[first:])


@pytest.mark.parametrize("limit", LIMITS)
def test_known_limits_are_found(limit: str) -> None:
    rules, wrong = LIMITS[limit]
    result = explore(rules)
    print(f"{limit}:\n{result}")
    assert wrong in result.wrong
