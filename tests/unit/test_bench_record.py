from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record, results
from deltasync.errors import ConfigError


def test_every_result_file_has_a_command() -> None:
    assert {path.stem for path in results.RESULTS.glob("*.json")} <= record.ENTRIES.keys()


def test_an_interrupted_run_goes_on_and_what_cannot_run_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state, into = tmp_path / "state", tmp_path / "into"
    words = [
        "record",
        "--only",
        "placement",
        "--only",
        "corpus",
        "--state",
        str(state),
        "--corpus",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", [*words, "--into", str(into)])
    record.main()
    assert "corpus: skipped" in capsys.readouterr().err
    found = json.loads((into / "placement.json").read_text())
    assert found["command"] == "python -m benchmarks.placement --json" and found["machine"]["cores"]
    assert [path.name for path in into.iterdir()] == ["placement.json"]
    (state / "placement.json").write_text("{}")
    record.main()
    assert (
        "placement: recorded before" in capsys.readouterr().err
        and (into / "placement.json").read_text() == "{}"
    )


def test_a_failed_command_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(record.ENTRIES, "placement", record.Entry(1, "-m benchmarks.placement --nonsense"))
    into = tmp_path / "into"
    monkeypatch.setattr(
        "sys.argv", ["record", "--only", "placement", "--state", str(tmp_path), "--into", str(into)]
    )
    with pytest.raises(SystemExit, match="1"):
        record.main()
    assert not list(into.iterdir())
    assert "--nonsense" in (tmp_path / "placement.log").read_text()


def test_results_of_two_commits_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commit").write_text("0123abc")
    monkeypatch.setattr("sys.argv", ["record", "--only", "placement", "--state", str(tmp_path)])
    with pytest.raises(ConfigError, match="results of commit 0123abc"):
        record.main()


def test_machines_are_compared_where_both_have_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    (folder / "other").mkdir(parents=True)
    for place, copies in ((folder, 1.5), (folder / "other", 2.25)):
        (place / "step.json").write_text(json.dumps({"result": {"copies": copies}}))
    monkeypatch.setattr(results, "RESULTS", folder)
    table = "\n".join(results.machines_compared())
    assert (
        "| figure | here | other |" in table and "| publish of 1.2 GB, times a copy | 1.50 | 2.25 |" in table
    )
