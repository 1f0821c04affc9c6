from __future__ import annotations

import pytest

from deltasync import chain
from deltasync.chain import STEP_BYTES, Step
from deltasync.errors import MissingVersionError

DELTA, ANCHOR = 10 * STEP_BYTES, 1000 * STEP_BYTES


def anchor(version: int, payload_bytes: int = ANCHOR) -> Step:
    return Step(version, None, None, payload_bytes)


def delta(version: int, payload_bytes: int = DELTA) -> Step:
    return Step(version, None, version - 1, payload_bytes)


def fold(base_version: int, version: int, payload_bytes: int) -> Step:
    return Step(version, None, base_version, payload_bytes, "fold")


def shown(steps: list[Step]) -> list[str]:
    def one(step: Step) -> str:
        kind = "anchor" if step.use_anchor else "delta" if step.fold is None else "fold"
        return f"{kind} {step.version}"

    return [one(step) for step in steps]


SMALL = [anchor(1), delta(2), delta(3), anchor(3), delta(4)]


def test_from_nothing_through_the_newest_anchor() -> None:
    assert shown(chain.plan(None, 4, SMALL)) == ["anchor 3", "delta 4"]


def test_the_order_of_the_choices_does_not_count() -> None:
    assert chain.plan(2, 4, SMALL[::-1]) == chain.plan(2, 4, SMALL)


def test_deltas_are_taken_past_an_anchor_that_costs_more() -> None:
    assert shown(chain.plan(2, 4, SMALL)) == ["delta 3", "delta 4"]


def test_an_anchor_is_taken_when_the_deltas_cost_more() -> None:
    steps = [anchor(1), delta(2, 6 * ANCHOR // 10), delta(3, 6 * ANCHOR // 10), anchor(3), delta(4)]
    assert shown(chain.plan(1, 4, steps)) == ["anchor 3", "delta 4"]


def test_an_older_anchor_is_taken_when_the_chain_from_it_costs_less() -> None:
    steps = [anchor(1), delta(2), delta(3), anchor(3, 5 * ANCHOR), delta(4)]
    assert shown(chain.plan(None, 4, steps)) == ["anchor 1", "delta 2", "delta 3", "delta 4"]


def test_a_fold_is_taken_when_it_costs_less_than_what_it_covers() -> None:
    assert shown(chain.plan(2, 4, [*SMALL, fold(2, 4, 2 * DELTA)])) == ["fold 4"]
    assert shown(chain.plan(2, 4, [*SMALL, fold(2, 4, 3 * DELTA)])) == ["delta 3", "delta 4"]
    assert shown(chain.plan(1, 4, [*SMALL, fold(2, 4, DELTA)])) == ["delta 2", "fold 4"]


def test_steps_are_not_free_even_without_changes() -> None:
    steps = [anchor(1), *(delta(version, 0) for version in range(2, 10)), fold(1, 9, STEP_BYTES)]
    assert shown(chain.plan(1, 9, steps)) == ["fold 9"]


def test_nothing_to_do_at_the_target() -> None:
    assert chain.plan(4, 4, SMALL) == []
    assert chain.plan(4, 4, []) == []


def test_back_to_an_older_version_by_its_anchor() -> None:
    assert shown(chain.plan(4, 2, SMALL)) == ["anchor 1", "delta 2"]
    assert shown(chain.plan(4, 3, SMALL)) == ["anchor 3"]


def test_versions_past_the_target_are_not_used() -> None:
    assert shown(chain.plan(None, 2, SMALL)) == ["anchor 1", "delta 2"]


@pytest.mark.parametrize("current", [None, 1])
def test_a_gap_that_no_anchor_bridges_is_named(current: int | None) -> None:
    with pytest.raises(MissingVersionError, match="version 4"):
        chain.plan(current, 4, [anchor(1), delta(4)])


def test_a_gap_before_an_anchor_does_no_harm() -> None:
    assert shown(chain.plan(1, 4, [anchor(1), delta(3), anchor(3), delta(4)])) == ["anchor 3", "delta 4"]


def test_an_unknown_target_is_missing() -> None:
    with pytest.raises(MissingVersionError):
        chain.plan(1, 9, SMALL)


def test_a_chain_of_ten_thousand() -> None:
    steps = [anchor(1), *(delta(version) for version in range(2, 10_001))]
    assert len(chain.plan(1, 10_000, steps)) == 9_999
