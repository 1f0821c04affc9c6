"""The cheapest chain by what a listing tells. Chains that are read are in `test_follow.py`."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deltasync.channel.plan import EDGE_BYTES, Edge, cheapest

DELTA, ANCHOR = 10 * EDGE_BYTES, 1000 * EDGE_BYTES
EDGES = st.builds(
    lambda base, more, size: Edge(base, base + more, size * EDGE_BYTES // 4, "some" if more > 1 else None),
    *(st.integers(0, 8), st.integers(1, 5), st.integers(0, 40)),
)


def anchor(version: int, payload_bytes: int = ANCHOR) -> Edge:
    return Edge(0, version, payload_bytes)


def delta(version: int, payload_bytes: int = DELTA) -> Edge:
    return Edge(version - 1, version, payload_bytes)


@given(st.lists(EDGES, max_size=20), st.integers(0, 8), st.integers(1, 12))
def test_no_chain_that_leads_there_is_cheaper(edges: list[Edge], start: int, target: int) -> None:
    cost = {0: 0.0, start: 0.0}
    for _ in edges:
        for edge in edges:
            least = cost.get(edge.base, math.inf) + edge.bytes + EDGE_BYTES
            cost[edge.version] = min(cost.get(edge.version, math.inf), least)
    found = cheapest(start, target, edges)
    if found is None:
        assert cost.get(target, math.inf) == math.inf and target != start
        return
    at = [edge.version for edge in found]
    assert all(edge.base == before for edge, before in zip(found[1:], at, strict=False))
    assert (at[-1] == target and found[0].base in (0, start)) if found else target == start
    assert sum(edge.bytes + EDGE_BYTES for edge in found) == cost[target]


def test_ten_thousand_deltas_in_a_row() -> None:
    found = cheapest(1, 10_000, [anchor(1), *(delta(version) for version in range(2, 10_001))])
    assert found is not None and len(found) == 9_999
