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
    """Start a command with temporary files in a folder, and send it a signal once a process below it has this
    title.
    """
    words = [sys.executable, "-m", *command]
    # a busy machine is no reason to wait
    environ = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
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
    marks = [
        pytest.param(number, id=number.name, marks=[pytest.mark.slow] * (number in slow)) for number in every
    ]
    return pytest.mark.parametrize("number", marks)


@pytest.mark.vllm
@pytest.mark.trl
@signals(*signal.Signals)
def test_the_demo(number: signal.Signals, tmp_path: Path) -> None:
    command = ["demo", "--out", str(tmp_path / "demo")]
    leaves_nothing(command, b"EngineCore", number, tmp_path)


@pytest.mark.vllm
@pytest.mark.trl
@signals(*signal.Signals)
def test_the_benchmark_of_commits(number: signal.Signals, tmp_path: Path) -> None:
    command = ["benchmarks.commit", "--size", "tiny", "--commits", "1", "--window", "1", "--pairs", "1"]
    leaves_nothing(command, b"EngineCore", number, tmp_path)
    logs = [
        path.name
        for folder in tmp_path.glob("deltasync-bench-*")
        for path in folder.iterdir()
        if path.is_file()
    ]
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
def test_a_script_that_closes_nothing_ends_with_every_version_visible(
    end: str, code: int, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/channel"
    words = [sys.executable, "-W", "error", "-c", SCRIPT.replace("END", end), url]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    # Python forgets an interrupt that ended the script if anything is evaluated while it exits, such as a
    # late import; and the signal may reach another thread, and the main one only when it has ended.
    assert done.returncode in ((code, 1, 0) if code == -signal.SIGINT else (code,)), done.stderr
    assert "The process ends" not in done.stderr
    assert "deltasync" not in done.stderr.replace(str(ROOT), "") or "Traceback" in done.stderr
    replica = Replica(url)
    replica.sync()
    assert torch.equal(replica.state_dict()["t0"], torch.full((64, 64), 3.0, dtype=torch.bfloat16)), (
        done.stderr
    )


SIGNALLED = """
import ctypes, gc, os, signal, sys, threading, time, weakref, torch
from deltasync import Publisher
publisher = Publisher(sys.argv[1])
weights = {f"t{number}": torch.full((64, 64), 1.0) for number in range(100)}
publisher.publish(weights)
def get_signal():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
class Node:
    def __del__(self):
        get_signal()
class Key:
    def __del__(self):
        try:
            get_signal()
        finally:
            raise ValueError  # in whose place Python drops it
class Quiet:
    pass
def reading():
    for name, tensor in weights.items():
        tensor += 1
        if name == "t50":
            get_signal()
        yield name, tensor
MOMENT
try:
    time.sleep(3600)
finally:
    print("left", flush=True)
print("goes on")
"""


@pytest.mark.parametrize(
    ("moment", "value"),
    [
        ("node = Node(); del node", 1.0),
        ("key = Key(); del key", 1.0),
        ("quiet = Quiet(); called = weakref.ref(quiet, lambda _: get_signal()); del quiet", 1.0),
        ("gc.callbacks.append(lambda *_: (gc.callbacks.clear(), get_signal())); gc.collect()", 1.0),
        ("ctypes.CFUNCTYPE(None)(get_signal)()", 1.0),
        ("publisher.publish(reading())", 2.0),
        ("threading.Timer(0.5, get_signal).start()", 1.0),
    ],
    ids=["destructor", "other-error", "weakref", "collector", "callback", "publish", "wait"],
)
def test_sigterm_ends_a_process_wherever_it_comes(moment: str, value: float, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/channel"
    words = [sys.executable, "-c", SIGNALLED.replace("MOMENT", moment), url]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "goes on" not in done.stdout and "Terminated" not in done.stderr
    replica = Replica(url)
    replica.sync()
    assert torch.equal(replica.state_dict()["t0"], torch.full((64, 64), value, dtype=torch.bfloat16)), (
        done.stderr
    )


def test_what_a_thread_publishes_after_the_script_has_ended_is_stored(tmp_path: Path) -> None:
    script = """
import sys, threading, torch
from deltasync import Publisher
def train():
    publisher = Publisher(sys.argv[1])
    publisher.publish({"w": torch.zeros(9)})
    main.join()
    for value in range(1, 5):
        publisher.publish({"w": torch.full((9,), float(value))})
main = threading.main_thread()
threading.Thread(target=train).start()
"""
    url = f"file://{tmp_path}/channel"
    done = subprocess.run(
        [sys.executable, "-c", script, url], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    replica = Replica(url)
    replica.sync()
    assert torch.equal(replica.state_dict()["w"], torch.full((9,), 4.0, dtype=torch.bfloat16)), done.stderr


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("pass", {0}),
        ("raise RuntimeError", {1}),
        ("if rank == size - 1: raise RuntimeError\ndist.barrier()", {1}),
        ("if rank == 0: sys.exit(7)\ndist.destroy_process_group()", {0, 7}),
        ("signalled", {128 + signal.SIGTERM}),
    ],
    ids=["end", "error", "error-of-one", "exit-of-the-first", "sigterm"],
)
def test_ranks_that_close_nothing_end_with_the_last_version_visible(
    how: str, codes: set[int], size: int, tmp_path: Path
) -> None:
    folder, script = tmp_path / "channel", str(ROOT / "tests/integration/ending_ranks.py")
    environ = os.environ | {
        "RENDEZVOUS": f"file://{tmp_path}/rendezvous",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    lasts = [Path(f"{folder}.{rank}") for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(folder), how, str(rank), str(size)],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        if how == "signalled":
            while not lasts[0].exists() or int(lasts[0].read_text()) < 3:
                assert all(rank.poll() is None for rank in ranks)
                time.sleep(0.01)
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert {rank.returncode for rank in ranks} == codes, said
    replica = Replica(f"file://{folder}")
    replica.sync()
    last, found = max(int(path.read_text()) for path in lasts), replica.state_dict()["w"]
    # A publish that SIGTERM comes into ends with its version, which no file names.
    assert found.min() == found.max() and int(found.max()) in (
        (last, last + 1) if how == "signalled" else (last,)
    ), said


def test_a_script_waits_for_a_store_that_is_away_for_a_while_and_for_slow_encoding_until_its_end(
    tmp_path: Path,
) -> None:
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
def encode_slowly(*arguments, **options):
    time.sleep(3)
    return encode(*arguments, **options)
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
