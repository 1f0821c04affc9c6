"""Tests for `benchmarks.storm`."""

from __future__ import annotations

from pathlib import Path

from benchmarks import storm


def test_joins_serve_what_was_the_newest_version_and_copies_read_as_much(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    trainer = storm.Trainer(url, 0.1)
    try:
        took_s, cpu_s = trainer.publish()
        assert storm.joins(url, 2) == storm.copies(url, 2) == 2
    finally:
        trainer.close()
    assert took_s > 0 and cpu_s > 0
    both = {"joins": took_s, "copies": took_s, "alone": took_s}
    result = {"visible_s": both, "cpu_s": both, "versions": dict.fromkeys(both, 1)}
    shown = [*storm.lines({**result, "newest": 2, "replicas": 2, "megabytes": 0.1})]
    assert shown[-1].startswith("2 of 2 joins served") and "1.00 times as long" in shown[-1]
