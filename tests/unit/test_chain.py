"""The cheapest way by what a listing tells. Ways that are read are in `test_follow.py`."""

from __future__ import annotations

import pytest

from deltasync.channel.plan import EDGE_BYTES, Edge, cheapest

DELTA, ANCHOR = 10 * EDGE_BYTES, 1000 * EDGE_BYTES


def anchor(version: int, payload_bytes: int = ANCHOR) -> Edge:
    return Edge(0, version, payload_bytes)


def delta(version: int, payload_bytes: int = DELTA) -> Edge:
    return Edge(version - 1, version, payload_bytes)


def compaction(base: int, version: int, payload_bytes: int) -> Edge:
    return Edge(base, version, payload_bytes, "compaction")


def way(start: int, target: int, edges: list[Edge]) -> list[str] | None:
    found = cheapest(start, target, edges)
    if found is None:
        return None
    return [f"{'compaction' if edge.key else 'delta' if edge.base else 'anchor'} {edge.version}" for edge in found]


SMALL = [anchor(1), delta(2), delta(3), anchor(3), delta(4)]


def test_from_nothing_through_the_newest_anchor() -> None:
    assert way(0, 4, SMALL) == ["anchor 3", "delta 4"]


def test_the_order_of_the_choices_does_not_count() -> None:
    assert cheapest(2, 4, SMALL[::-1]) == cheapest(2, 4, SMALL)


def test_deltas_are_taken_past_an_anchor_that_costs_more() -> None:
    assert way(2, 4, SMALL) == ["delta 3", "delta 4"]


def test_an_anchor_is_taken_when_the_deltas_cost_more() -> None:
    edges = [anchor(1), delta(2, 6 * ANCHOR // 10), delta(3, 6 * ANCHOR // 10), anchor(3), delta(4)]
    assert way(1, 4, edges) == ["anchor 3", "delta 4"]


def test_an_older_anchor_is_taken_when_the_way_from_it_costs_less() -> None:
    edges = [anchor(1), delta(2), delta(3), anchor(3, 5 * ANCHOR), delta(4)]
    assert way(0, 4, edges) == ["anchor 1", "delta 2", "delta 3", "delta 4"]


def test_a_compaction_is_taken_when_it_costs_less_than_what_it_covers() -> None:
    assert way(2, 4, [*SMALL, compaction(2, 4, 2 * DELTA)]) == ["compaction 4"]
    assert way(2, 4, [*SMALL, compaction(2, 4, 3 * DELTA)]) == ["delta 3", "delta 4"]
    assert way(1, 4, [*SMALL, compaction(2, 4, DELTA)]) == ["delta 2", "compaction 4"]


def test_hops_are_not_free_even_without_changes() -> None:
    edges = [anchor(1), *(delta(version, 0) for version in range(2, 10)), compaction(1, 9, EDGE_BYTES)]
    assert way(1, 9, edges) == ["compaction 9"]


def test_nothing_to_do_at_the_target() -> None:
    assert way(4, 4, SMALL) == []
    assert way(4, 4, []) == []


def test_versions_past_the_target_are_not_used() -> None:
    assert way(0, 2, SMALL) == ["anchor 1", "delta 2"]


@pytest.mark.parametrize("start", [0, 1])
def test_a_gap_that_nothing_bridges_has_no_way(start: int) -> None:
    assert way(start, 4, [anchor(1), delta(4)]) is None


def test_a_gap_before_an_anchor_does_no_harm() -> None:
    assert way(1, 4, [anchor(1), delta(3), anchor(3), delta(4)]) == ["anchor 3", "delta 4"]


def test_a_target_that_is_not_listed_has_no_way() -> None:
    assert way(1, 9, SMALL) is None


def test_ten_thousand_deltas_in_a_row() -> None:
    found = way(1, 10_000, [anchor(1), *(delta(version) for version in range(2, 10_001))])
    assert found is not None and len(found) == 9_999
