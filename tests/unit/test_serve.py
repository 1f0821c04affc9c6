"""`deltasync serve` up to the moment at which it becomes vLLM."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deltasync.ops.cli import main


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Command lines and environments that would have been executed."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("deltasync.ops.cli.serve.require_vllm", lambda: None)
    monkeypatch.setattr("deltasync.ops.cli.serve.check_port", lambda host, port: None)
    monkeypatch.setattr("os.execvpe", lambda _, line, env: found.append((line, env)))
    return found


def test_it_listens_on_this_machine_alone_unless_told_otherwise(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["serve", "model", "--channel", f"file://{tmp_path}/c"])
    ((line, env),) = started
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert "DELTASYNC_HTTP_TOKEN" not in env
    assert done.output == ""


def test_where_others_reach_it_it_makes_a_token_and_tells_it_once(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    arguments = ["serve", "model", "--channel", f"file://{tmp_path}/c", "--host", "0.0.0.0"]
    outputs = [CliRunner().invoke(main, arguments).output for _ in range(2)]
    tokens = [env["DELTASYNC_HTTP_TOKEN"] for _, env in started]
    assert tokens[0] != tokens[1]
    for token, output in zip(tokens, outputs, strict=True):
        assert re.fullmatch(r"[!-~]{32,}", token)
        assert output.count(token) == 1
        assert all(token not in word for line, _ in started for word in line)


def test_a_token_that_is_given_is_kept_and_not_told(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASYNC_HTTP_TOKEN", "of-ours")
    done = CliRunner().invoke(
        main, ["serve", "model", "--channel", f"file://{tmp_path}/c", "--host", "0.0.0.0"]
    )
    assert started[0][1]["DELTASYNC_HTTP_TOKEN"] == "of-ours"
    assert "of-ours" not in done.output


def test_a_dry_run_needs_no_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = CliRunner().invoke(main, ["serve", "model", "--channel", f"file://{tmp_path}/c", "--dry-run"])
    assert (
        "--worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension" in done.output and done.exit_code == 0
    )
    refused = CliRunner().invoke(main, ["serve", "model", "--channel", f"file://{tmp_path}/c"])
    assert (refused.exit_code, "vLLM is not installed" in refused.output) == (3, True)
