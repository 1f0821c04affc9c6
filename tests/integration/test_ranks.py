"""Ranks that open a publisher, fail, come late and leave: `opening_ranks` is what they do, and asserts for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_sharded import torchrun


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ones_trouble_is_everybodys_news(tmp_path: Path, size: int) -> None:
    torchrun(size, tmp_path / "ranks", script="opening_ranks.py")
