"""The kernels beside torch's: in a process of their own, as numba starts its threads once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from numba import get_num_threads

from deltasync.channel.threads import Workers, each
from deltasync.kernels import cpu
from deltasync.stores import xet

PUBLISH_AND_FOLLOW = """
import ctypes

import numba
import torch
from numba.np.ufunc import omppool

from deltasync import Publisher, Replica

openmp = ctypes.CDLL(omppool.__file__)
torch.set_num_threads(1)
with Publisher("memory://threads") as publisher:
    publisher.publish({"w": torch.zeros(2000, 1000, dtype=torch.bfloat16)}.items()).wait(60)
    publisher.publish({"w": torch.ones(2000, 1000, dtype=torch.bfloat16)}.items()).wait(60)
replica = Replica("memory://threads")
assert replica.sync() == 2
print(numba.threading_layer(), torch.get_num_threads(), openmp.omp_get_nested())
"""


def test_torch_keeps_its_threads_and_starts_none_inside_of_others() -> None:
    """Not so, a trainer that calls `torch.set_num_threads` is 28 times as slow after its first publish."""
    pytest.importorskip("numba.np.ufunc.omppool", exc_type=ImportError)
    environ = {**os.environ, "NUMBA_THREADING_LAYER": "omp", "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PUBLISH_AND_FOLLOW]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["omp", "1", "0"]


TENSORS_OF_ALL_SIZES = """
import os

import numpy as np

from deltasync.kernels import cpu

seen, made = set(), []
for _ in range(3):
    for tasks in (16, 4, 1, 7):
        cpu.fingerprint(1, np.zeros(tasks << 18, np.uint16))
        now = set(os.listdir("/proc/self/task"))
        made.append(len(now - seen))
        seen |= now
print(cpu.threading_layer(), sum(made[1:]))
"""


def test_no_thread_is_made_again_for_a_larger_tensor() -> None:
    """libgomp ends the threads that a smaller team does not need."""
    pytest.importorskip("numba.np.ufunc.omppool", exc_type=ImportError)
    environ = {**os.environ, "NUMBA_THREADING_LAYER": "omp", "NUMBA_NUM_THREADS": "16", "OMP_NUM_THREADS": "16"}
    command = [sys.executable, "-c", TENSORS_OF_ALL_SIZES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["omp", "0"]


def test_cores_are_left_to_other_threads_while_they_are_at_work() -> None:
    def used(tasks: int) -> int:
        with cpu.threads(tasks):
            return get_num_threads()

    cores = used(1 << 20)
    with cpu.leave_cores(cores - 1):
        assert used(1 << 20) == 1
        with cpu.leave_cores(0):
            assert used(1 << 20) == cores
        with cpu.leave_cores(1000):
            assert used(1 << 20) == 1
    assert used(1 << 20) == cores


def test_workers_do_their_actions_themselves_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none while the interpreter exits, when the last versions are still being stored."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    workers, inner = Workers(2, "test"), Workers(1, "inner")
    assert workers.submit(lambda: inner.submit(int, "7").result()).result() == 7
    with pytest.raises(ValueError):
        workers.submit(int, "seven").result()
    assert not workers.busy
    workers.close()
    assert each(["7", "8"], int, None) == [7, 8]
    assert xet._interruptible(lambda: 7) == 7
    cpu._launch.__wrapped__()
