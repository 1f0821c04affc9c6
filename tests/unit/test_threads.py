"""Threads of the product beside those of others."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deltasync import limits, threads
from deltasync.threads import NAMES, Workers, each

IMPORT_ALL = """
import os
import deltasync, deltasync.kernels.native as native
import numpy as np

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
native.extension()
assert threads() == before, "nothing is started at import"
native.threads = lambda elements: 4
native.fingerprint(1, np.zeros(1 << 22, np.uint16))
assert threads() == before + 3
native.fingerprint(1, np.zeros(1 << 22, np.uint16))
assert threads() == before + 3, "there is one pool"
"""


def test_threads_are_made_in_one_place_and_the_page_has_their_names() -> None:
    root = Path(threads.__file__).parents[1]
    for package in ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback"):
        for path in (root / package).rglob("*.py"):
            made = re.findall(r"\bThread\(|ThreadPoolExecutor\(", path.read_text())
            assert not made or path == Path(threads.__file__), f"{path} makes a thread; use deltasync.threads"
    rows = re.findall(r"^\| `(\w+)` \|", (root / "docs/reference/threads.md").read_text(), re.M)
    assert tuple(rows) == NAMES and len(NAMES) <= 8


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_kernels_have_one_pool_that_starts_with_the_first_large_tensor() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_ALL], check=True, timeout=120)


def test_workers_do_their_actions_themselves_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none while the interpreter exits, when the last versions are still being stored."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    workers, inner = Workers(2, "fetch"), Workers(1, "upload")
    assert workers.submit(lambda: inner.submit(int, "7").result()).result() == 7
    with pytest.raises(ValueError):
        workers.submit(int, "seven").result()
    assert not workers.busy
    workers.close()
    assert each(["7", "8"], int, None) == [7, 8]


def test_workers_that_stay_take_the_next_action() -> None:
    workers = Workers(2, "copy", idle_s=30.0)
    first = {workers.submit(threading.current_thread).result() for _ in range(50)}
    both = threading.Barrier(2)  # which needs two threads at once
    for future in [workers.submit(both.wait, 30.0) for _ in range(2)]:
        future.result()
    workers.close()
    assert not workers.busy and len(first) <= 2
    assert workers.submit(int, "7").result() == 7


def test_the_page_of_limits_has_them_all() -> None:
    page = (Path(threads.__file__).parents[1] / "docs/reference/limits.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.M))
    units = {"KiB": 1 << 10, "MiB": 1 << 20}
    shown = {
        name: int(value.split()[0].replace(",", "")) * units.get(value.split()[-1], 1)
        for name, value in rows.items()
    }
    assert shown == {name: value for name, value in vars(limits).items() if name.isupper()}
