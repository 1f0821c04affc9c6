"""The walk of the quickstart prints what its page says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.walk import masked, printed, walk

pytest.importorskip("moto")
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")


def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    count = 0
    for block, outputs in walk(tmp_path):
        for (command, shown), (_, output) in zip(printed(block), outputs, strict=True):
            assert masked(output) == masked(shown), command
            count += bool(shown)
    assert count >= 6


def test_a_mask_leaves_what_is_compared() -> None:
    assert masked("version 4 (0123456789ab)  3.1%\n  12 ms") == masked("version 4 (ba9876543210) 33.12% 1 ms")
    assert masked("version 4") != masked("version 5")
    assert masked("problems none") != masked("problems 1")
