"""Processes that end: what starts servers leaves none of its processes, and what publishes loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from deltasync import Replica
from demo import supervisor
from tests.processes import wait_for_end

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0


def tree_with(title: bytes, process: subprocess.Popen[str]) -> list[int]:
    """The descendants of a process, once one of them is called this."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = supervisor.descendants(process.pid)
        if any(title in command_line(pid) for pid in found):
            return found
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def leaves_nothing(command: list[str], title: bytes, number: signal.Signals, folder: Path) -> None:
    """Start a command with temporary files in a folder, and send it a signal once a process below it has this title."""
    words = [sys.executable, "-m", *command]
    environ = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}  # a busy machine is no reason to wait
    with subprocess.Popen(words, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True) as process:
        tree = tree_with(title, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE_S)
    wait_for_end(tree)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130
        assert said.splitlines()[-1] == "deltasync: interrupted"
        assert "Traceback" not in said


def signals(*slow: signal.Signals) -> pytest.MarkDecorator:
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    marks = [pytest.param(number, id=number.name, marks=[pytest.mark.slow] * (number in slow)) for number in every]
    return pytest.mark.parametrize("number", marks)


@pytest.mark.vllm
@pytest.mark.trl
@signals(signal.SIGINT, signal.SIGKILL)
def test_the_demo(number: signal.Signals, tmp_path: Path) -> None:
    command = ["demo", "--out", str(tmp_path / "demo")]
    leaves_nothing(command, b"EngineCore", number, tmp_path)


@pytest.mark.vllm
@pytest.mark.trl
@signals(*signal.Signals)
def test_the_benchmark_of_commits(number: signal.Signals, tmp_path: Path) -> None:
    command = ["benchmarks.commit", "--size", "tiny", "--commits", "1", "--window", "1", "--pairs", "1"]
    leaves_nothing(command, b"EngineCore", number, tmp_path)
    logs = [path.name for folder in tmp_path.glob("deltasync-bench-*") for path in folder.iterdir() if path.is_file()]
    assert set(logs) <= {"engine.log", "server.log", "request.json", "result.json"}


SCRIPT = """
import os, signal, sys, torch
from deltasync import Publisher, Retention
publisher = Publisher(sys.argv[1], anchor_every=2, retention=Retention())
weights = {f"t{number}": torch.full((64, 64), 1.0) for number in range(300)}
for step in range(3):
    publisher.publish(weights)
    for tensor in weights.values():
        tensor += 1
def end():
    END
end()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("raise RuntimeError", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("global publisher; del publisher", 0),
    ],
)
def test_a_script_that_closes_nothing_ends_with_every_version_visible(end: str, code: int, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    words = [sys.executable, "-W", "error", "-c", SCRIPT.replace("END", end), url]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    # Python forgets an interrupt that ended the script if anything is evaluated while it exits, such as a late import; and
    # the signal may reach another thread, and the main one only when it has ended.
    assert done.returncode in ((code, 1, 0) if code == -signal.SIGINT else (code,)), done.stderr
    assert "The process ends" not in done.stderr
    assert "deltasync" not in done.stderr.replace(str(ROOT), "") or "Traceback" in done.stderr
    replica = Replica(url)
    replica.sync()
    assert torch.equal(replica.state_dict()["t0"], torch.full((64, 64), 3.0, dtype=torch.bfloat16)), done.stderr


def test_a_script_waits_for_a_store_that_is_away_for_a_while_and_for_slow_encoding_until_its_end(tmp_path: Path) -> None:
    script = """
import sys, time
from deltasync import open_store
from deltasync.errors import TransientStoreError
from deltasync.publish import upload
from deltasync.stores.base import WrappedStore
class Away(WrappedStore):
    away = False
    def ask(self, verb, key, action):
        if self.away:
            raise TransientStoreError("away")
        return action()
encode = upload.GroupEncoder.encode
def encode_slowly(*arguments):
    time.sleep(3)
    return encode(*arguments)
upload.GroupEncoder.encode = encode_slowly
upload.EXIT_S = 1.0
store = Away(open_store(sys.argv[1]))
import torch
from deltasync import Publisher
slow, away = Publisher(sys.argv[2]), Publisher(store, retries=10_000)
for publisher in (slow, away):
    publisher.publish({"a": torch.zeros(9)}).wait()
store.away = True
for publisher in (slow, away):
    publisher.publish({"a": torch.ones(9)})
"""
    urls = [f"file://{tmp_path}/{name}" for name in ("away", "slow")]
    done = subprocess.run(
        [sys.executable, "-c", script, *urls], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0
    assert f"The process ends, and version 2 is not in {urls[0]}" in done.stderr
    assert f"is not in {urls[1]}" not in done.stderr
    assert Replica(urls[1]).sync() == 2
