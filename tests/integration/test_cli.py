"""The command line as people use it; each exit code also in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from deltasync import Publisher, open_store
from deltasync.ops.cli import main
from tests.channels import filled, states_of


def run(*arguments: str, timeout_s: float = 120, **environ: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, "-m", "deltasync", *arguments], {**os.environ, **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def invoke(*arguments: str) -> Result:
    """The same in this process, which has imported everything."""
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"file://{tmp_path_factory.mktemp('cli')}/channel"
    weights = {"a": torch.linspace(-1, 1, 1000), "b": torch.ones(10, 10)}
    with Publisher(url) as publisher:
        for step in range(3):
            publisher.publish(weights.items(), step=10 * step).wait(30)
            weights["a"][step] += 1
    return url


@pytest.mark.parametrize("command", ["", *main.list_commands(None)])  # type: ignore[arg-type]
def test_every_command_has_help(command: str) -> None:
    done = invoke(*command.split(), "--help")
    assert done.exit_code == 0 and "Usage:" in done.stdout


def test_log_lists_versions(channel: str) -> None:
    rows = [json.loads(line) for line in invoke("log", channel, "--json").stdout.splitlines()]
    assert [(row["version"], row["kind"], row["step"]) for row in rows] == [
        (1, "anchor", 0),
        (2, "delta", 10),
        (3, "delta", 20),
    ]
    assert rows[1]["changed_fraction"] == pytest.approx(1 / 1100)
    assert "version" in invoke("log", channel).stdout
    assert len(invoke("log", channel, "--last", "1", "--json").stdout.splitlines()) == 1


def test_log_takes_a_line_of_80_columns_for_each_row(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    filled(open_store(url), states_of(1_000_000, 12), anchors=(7,), compactions=((2, 10), (9, 12)))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    done = subprocess.run(
        [sys.executable, "-m", "deltasync", "log", url], stdout=theirs, env=os.environ, timeout=120
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal that nobody holds any more
        while found := os.read(ours, 65536):
            shown += found
    os.close(ours)
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()]
    heads = ["version", "digest", "kind", "step", "time", "changed", "delta", "bits", "anchor"]
    assert done.returncode == 0 and heads in [line.split() for line in lines]
    rows = lines[[line.split() for line in lines].index(heads) + 1 :]
    kinds = [line.split()[2 if re.match(r"\d+ +[0-9a-f]{12} ", line) else 1] for line in rows[:15]]
    assert kinds == ["anchor", *["delta"] * 6, "anchor", *["delta"] * 3, "compact", *["delta"] * 2, "compact"]
    assert len(rows) == 15 + 1 and rows[15].startswith("11 deltas ")
    assert max(map(len, lines)) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    assert all(re.search(r" \d\d:\d\d:\d\d ", line + " ") for line in rows[:15])


def test_show_tells_one_version(channel: str) -> None:
    assert json.loads(invoke("log", channel, "2", "--json").stdout)["document"]["version"] == 2
    shown = invoke("log", channel, "latest").stdout
    assert "1 of 1,100 elements since version 2" in shown
    assert "a bfloat16[1000]" in shown


def test_follow_goes_to_the_newest_version(channel: str) -> None:
    followed, shown = run("follow", channel, "--once", "--json"), invoke("log", channel, "latest", "--json")
    identity = json.loads(followed.stdout)
    assert (identity["version"], identity["sha256"]) == (3, json.loads(shown.stdout)["sha256"])


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["log", "file:///nonexistent/channel"], 5, "holds no channel yet"),
        (["serve", "m", "--channel", "nonsense"], 3, "Not a channel URL"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_a_process_ends_with_one_sentence_and_an_exit_code(
    arguments: list[str], exit_code: int, said: str
) -> None:
    """More mistakes are in `tests/unit/test_mistakes.py`, without processes."""
    done = run(*arguments)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        demo = [sys.executable, "-m", "demo", "--out", str(tmp_path / "demo")]
        serve = [
            sys.executable,
            "-m",
            "deltasync",
            "serve",
            "m",
            "--channel",
            f"file://{tmp_path}/c",
            "--host",
            "127.0.0.1",
        ]
        for command in (demo, serve):
            done = subprocess.run(
                [*command, "--port", port], capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 3
            assert f"Port {port}" in done.stderr
            assert "Traceback" not in done.stderr
