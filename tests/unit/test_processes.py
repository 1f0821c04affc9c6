"""Children end with whoever started them, and say how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltasync.errors import DeltaSyncError
from demo import supervisor
from demo.processes import Child
from tests.processes import living, wait_for_end
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the process group ends")

PATIENCE_S = 60.0
STOP_S = 0.5

# Children of three kinds: in other sessions, deaf to SIGTERM, and of parents that are gone.
TREE = """
setsid sleep 1000 &
setsid sh -c 'sleep 1000 & sleep 1000; true' &
sh -c 'trap "" TERM; exec sleep 1000' &
setsid sh -c 'trap "" TERM INT HUP; setsid sleep 1000 & sleep 1000; true' &
(setsid sh -c 'sleep 1000 & sleep 1000 & exit') &
wait
"""
TREE_SIZE = 11  # with bash

PARENT = f"""
import os, signal, sys, threading, time
from pathlib import Path
from demo.processes import Child

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it

def start():
    child = Child("The tree", ["bash", "-c", sys.argv[1]], os.environ, Path(sys.argv[2]), stop_s={STOP_S})
    print(child.__enter__()._process.pid, flush=True)

thread = threading.Thread(target=start)  # which ends before the child does
thread.start()
thread.join()
while True:
    time.sleep(1)
"""


def grown(pid: int, size: int) -> list[int]:
    """The descendants of a process, once there are so many."""
    wait_until(lambda: len(supervisor.descendants(pid)) >= size)
    return supervisor.descendants(pid)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a supervisor and the tree below it."""
    command = [sys.executable, "-c", PARENT, TREE, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
def test_nothing_is_left_of_a_parent_that_is_killed(
    parent: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert parent.stdout is not None
    watched = int(parent.stdout.readline())
    tree = grown(parent.pid, 1 + TREE_SIZE)
    assert tree[0] == watched
    parent.send_signal(number)
    assert parent.wait(PATIENCE_S) == -number
    wait_for_end(tree)


def test_the_with_block_ends_all(tmp_path: Path) -> None:
    with Child("The tree", ["bash", "-c", TREE], os.environ, tmp_path / "log", stop_s=STOP_S) as child:
        assert child._process is not None
        watched = child._process.pid
        tree = grown(watched, TREE_SIZE)
        assert set(tree[:1]) < set(child.pids())
        assert Path(f"/proc/{tree[0]}/comm").read_text() == "bash\n"
    assert living([watched, *tree]) == []
    assert not Path(f"/proc/{watched}").exists()  # no zombie


def test_the_command_alone_is_asked_first_and_takes_its_own_children_down(tmp_path: Path) -> None:
    script = """
        sh -c 'trap "echo too early; exit" TERM; while true; do sleep 0.05; done' & child=$!; disown
        trap 'echo asked; sleep 0.3; kill -KILL $child; sleep 0.2; echo done; exit 3' TERM
        echo ready; while true; do sleep 0.05; done"""
    log = tmp_path / "log"
    with Child("The tree", ["bash", "-c", script], os.environ, log) as child:
        child.wait_until(lambda: "ready" in log.read_text(), PATIENCE_S, "to start")
    assert log.read_text().split() == ["ready", "asked", "done"]
    assert child.wait(0) == 3


def test_what_a_command_leaves_behind_ends_when_it_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = """setsid sleep 1000 & echo $!; (setsid sh -c 'trap "" TERM; echo $$; exec sleep 1000' &)
        until [ $(wc -l < $0) = 2 ]; do sleep 0.05; done"""
    with Child("The command", ["bash", "-c", script, log], os.environ, log, stop_s=STOP_S) as child:
        assert child.wait(PATIENCE_S) == 0
        left = [int(line) for line in log.read_text().split()]
        assert len(left) == 2 and living(left) == []
        child.check()


def test_orphans_are_buried(tmp_path: Path) -> None:
    """Below the supervisor no zombie stays, though only it can bury them."""
    with Child(
        "The command", ["bash", "-c", "(sleep 0.1 & exit); exec sleep 1000"], os.environ, tmp_path / "log"
    ) as child:
        assert child._process is not None
        grown(child._process.pid, 2)
        pid = child._process.pid
        wait_until(lambda: len(supervisor.descendants(pid)) == 1)
        time.sleep(0.3)
        below = [
            stat
            for path in Path("/proc").glob("[0-9]*/stat")
            if (stat := _fields(path)) is not None and int(stat[1]) == child._process.pid
        ]
        assert [stat[0] for stat in below] == ["S"]


def _fields(path: Path) -> list[str] | None:
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def test_the_command_is_asked_to_end_if_the_supervisor_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "trap 'echo asked; exit' TERM; echo ready; while true; do sleep 0.05; done"
    with Child("The command", ["bash", "-c", script], os.environ, log) as child:
        child.wait_until(lambda: "ready" in log.read_text(), PATIENCE_S, "to start")
        assert child._process is not None
        pids = child.pids()
        child._process.kill()
        wait_for_end(pids)
        assert log.read_text().split() == ["ready", "asked"]
        with pytest.raises(DeltaSyncError, match="The command was ended by SIGKILL"):
            child.check()


@pytest.mark.parametrize(
    ("script", "code", "sentence"),
    [
        ("exit 0", 0, None),
        ("echo first; echo last; exit 7", 7, "ended with exit code 7. Its last line: last (all of it: "),
        ("exit 300", 44, "ended with exit code 44. Its last line: (none) "),
        ("kill -KILL $$", -9, "was ended by SIGKILL. "),
        ("echo oh; kill -SEGV $$", -11, "was ended by SIGSEGV. Its last line: oh "),
        ("kill -TERM $$", -15, "was ended by SIGTERM. "),
    ],
)
def test_how_it_ended(script: str, code: int, sentence: str | None, tmp_path: Path) -> None:
    with Child("The command", ["bash", "-c", script], os.environ, tmp_path / "log") as child:
        assert child.wait(PATIENCE_S) == code
        assert not child.running()
        if sentence is None:
            child.check()
            with pytest.raises(DeltaSyncError, match=r"^The command ended\. Its last line: \(none\)"):
                child.wait_until(lambda: False, PATIENCE_S, "to say something")
            return
        for wait in (child.check, lambda: child.wait_until(lambda: False, PATIENCE_S, "to say something")):
            with pytest.raises(DeltaSyncError) as caught:
                wait()
            assert str(caught.value).startswith(f"The command {sentence}")


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with Child("The router", ["no-such-program"], os.environ, tmp_path / "log") as child:
        assert child.wait(PATIENCE_S) == 127
        with pytest.raises(
            DeltaSyncError, match=r"code 127\. Its last line: no-such-program cannot be started: No such file"
        ):
            child.check()


def test_one_that_takes_too_long(tmp_path: Path) -> None:
    with Child("The command", ["sleep", "1000"], os.environ, tmp_path / "log") as child:
        with pytest.raises(
            DeltaSyncError, match=r"The command took more than 0 s to answer\. Its last line: "
        ):
            child.wait_until(lambda: False, 0.2, "to answer")
        with pytest.raises(DeltaSyncError, match="The command took more than 0 s to end"):
            child.wait(0.2)


def test_what_comes_true_as_it_ends_counts(tmp_path: Path) -> None:
    with Child("The command", ["true"], os.environ, tmp_path / "log") as child:
        answers = iter([False, True])

        def ended_meanwhile() -> bool:
            child.wait(PATIENCE_S)
            return next(answers)

        child.wait_until(ended_meanwhile, PATIENCE_S, "to say something")


def test_the_command_gets_its_words_its_environment_its_cores_and_no_files(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    ours = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(ours, True)
    code = "import os, sys; print(sys.argv[1:], os.sched_getaffinity(0), os.getsid(0) == os.getpid())"
    code += "; print(os.listdir('/proc/self/fd'))"
    words = ["", "two words", "*", "\N{SNOWMAN}", Path("/a")]
    try:
        with Child("P", [sys.executable, "-c", code, *words], os.environ, tmp_path / "log", [core]) as child:
            assert child.wait(PATIENCE_S) == 0
    finally:
        os.close(ours)
    said, files = (tmp_path / "log").read_text().splitlines()
    assert said == f"{[*map(str, words)]} {{{core}}} True"
    assert files == "['0', '1', '2', '3']"  # the last one to list them
    env = {"B": "two\nlines", "A": "not utf-8: \udcff", "PYTHONPATH": "/nowhere", "PATH": os.environ["PATH"]}
    with Child("env", ["env", "-0"], env, tmp_path / "log") as child:
        assert child.wait(PATIENCE_S) == 0
    expected = {f"{name}={value}".encode(errors="surrogateescape") for name, value in env.items()}
    assert set((tmp_path / "log").read_bytes().split(b"\0")) == expected | {b""}


def test_without_a_log_it_writes_where_we_do(capfd: pytest.CaptureFixture[str]) -> None:
    with Child("The command", ["bash", "-c", "echo out; echo err >&2; exit 2"], os.environ, None) as child:
        child.wait(PATIENCE_S)
        with pytest.raises(DeltaSyncError, match=r"^The command ended with exit code 2\.$"):
            child.check()
    assert capfd.readouterr() == ("out\n", "err\n")


def test_supervisor_is_light() -> None:
    """It starts beside each child, from a bare interpreter."""
    code = f"import runpy, sys; runpy.run_path({supervisor.__file__!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()} <= {"__main__", *sys.stdlib_module_names}
