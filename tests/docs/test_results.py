"""The tables of the documents are what docs/results/ has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import results
from demo import report
from tests.docs.pages import PAGES

FILES = sorted(results.RESULTS.glob("*.json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(results.common.ROOT).as_posix())
def test_tables_are_those_of_the_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert results.updated(text) == text, "make results-tables"
    assert text.count("<!-- results: ") == text.count("<!-- /results -->")


def test_every_table_figure_and_file_is_used() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall("<!-- results: (.*) -->", text)) == set(results.TABLES)
    assert set(re.findall("<!-- result: (.*?) -->", text)) == set(results.FIGURES)
    assert FILES and all(f"docs/results/{path.name}" in text for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_where_its_figures_are_from(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found.keys() == {"command", "date", "commit", "machine", "result"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and found["machine"]["cores"] and found["result"]


def test_bits_between_two_densities_are_interpolated_in_the_samples_of_that_master_and_span() -> None:
    ends = [results._master(f"bf16 {changed}, compaction of 8") for changed in ("0.12%", "1.07%")]
    low, high = (results._encoding(end, "packed")["bits_per_changed"] for end in ends)
    middle = (ends[0]["changed_fraction"] * ends[1]["changed_fraction"]) ** 0.5
    assert results._bits_at("bf16", "compaction of 8", "packed", middle) == pytest.approx((low + high) / 2)
    assert results._bits_at("bf16", "compaction of 8", "packed", ends[1]["changed_fraction"]) == high


def test_the_demo_s_picture_is_of_the_run_in_the_table() -> None:
    image = pytest.importorskip("PIL.Image")
    with image.open(results.common.ROOT / "docs/images/demo.png") as picture:
        assert picture.text["deltasync-run"] == report.run_of(results.load("demo")["result"])


def test_a_figure_that_was_typed_by_hand_is_found() -> None:
    text = results.updated("<!-- results: codec-readme -->\n<!-- /results -->")
    figure = re.findall(r"\d+\.\d\d", text)[0]
    wrong = text.replace(figure, "0.99", 1)
    assert wrong != text and results.updated(wrong) == text
