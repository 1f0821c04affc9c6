"""What grows with a model's parameters and what with its changes, counted: `benchmarks.trillion` with small models."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from benchmarks import trillion
from tests.builders import in_parts


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    """A model, and one of 16 times the parameters, of which a 16th of the share changes."""
    small, large = 256, 1024
    with in_parts(), mock.patch("deltasync.ops.steps.GROUP_ELEMENTS", 1 << 16):
        return [
            trillion.run(ranks=64, layers=1, experts=16, columns=columns, changed=share)
            for columns, share in ((small, 0.16), (large, 0.01))
        ]


def test_what_is_stored_and_asked_grows_with_changes_not_with_parameters(
    measured: list[dict[str, Any]],
) -> None:
    small, large = measured
    assert large["parameters"] == pytest.approx(16 * small["parameters"], rel=0.01)
    assert large["step"]["changed"] == pytest.approx(small["step"]["changed"], rel=0.1)
    assert large["stored"]["parts"] == small["stored"]["parts"]
    for name, size in small["stored"]["bytes"].items():
        assert large["stored"]["bytes"][name] == pytest.approx(size, rel=0.1)
    for role, found in small["reading"].items():
        assert large["reading"][role]["requests"] == found["requests"]
    for moved in ("up_bytes", "down_bytes"):
        assert large["step"][moved] == pytest.approx(small["step"][moved], rel=0.3)


def test_a_change_costs_little_more_than_its_bound(measured: list[dict[str, Any]]) -> None:
    found = measured[1]["step"]
    assert trillion.bound_bits() < 8 * found["payload_bytes"] / found["changed"] < 1.5 * trillion.bound_bits()
